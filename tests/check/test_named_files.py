"""A file that a command names is followed where it is here, and said where it is not."""

from __future__ import annotations

import pathlib

import pytest
from support.checked import said

from fsdp_doctor.check import check

_YAML = "fsdp: full_shard\nfsdp_config: {fsdp_version: 2}\n"


@pytest.mark.parametrize("command", ["llamafactory-cli train sft.yaml", "torchrun train.py --config sft.yaml"])
def test_the_file_is_read_from_the_folder_of_the_script(command: str, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"{command}\n")
    (tmp_path / "sft.yaml").write_text(_YAML)
    result = check([str(script)], framework_version="5.9")
    assert [use.scenario.strategy for use in result.uses if use.scenario] == ["fsdp2"]


def test_what_the_command_says_goes_before_its_file(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("torchrun train.py --config sft.yaml --fsdp 'full_shard offload'\n")
    (tmp_path / "sft.yaml").write_text(_YAML)
    result = check([str(script)], framework_version="5.9")
    assert [use.scenario.offload for use in result.uses if use.scenario] == ["policy"]


def test_a_file_that_is_not_here_is_said(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("torchrun train.py --config sft.yaml --fsdp full_shard\n")
    assert "names a file that cannot be read here" in said(check([str(script)]), "unknown")
    (tmp_path / "sft.yaml").write_text("a: [\n")
    assert "names a file that cannot be read here" in said(check([str(script)]), "unknown")


def test_a_recipe_that_is_no_file_is_nothing_to_follow(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("tune run full_finetune_distributed --config llama3/8B_full fsdp_cpu_offload=True\n")
    result = check([str(script)], framework_version="0.6.1")
    assert [use.scenario.offload for use in result.uses if use.scenario] == ["policy"]
    assert said(result, "unknown") == ""


def test_of_several_trainings_that_differ_the_others_are_named(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "README.md"
    first = "torchrun --nproc_per_node 2 train.py --fsdp full_shard --seed 1\n"
    script.write_text(f"{first}\ntorchrun --nproc_per_node 4 train.py --fsdp full_shard\n")
    result = check([str(script)])
    assert result.world_size == 4
    assert "of several commands that look like the training the last is read" in said(result, "note")
    script.write_text(f"{first}\n{first.replace('--seed 1', '--seed 2')}")
    assert "of several commands" not in said(check([str(script)]), "note")


def test_a_configuration_of_hydras_that_is_given_beside_is_known(tmp_path: pathlib.Path) -> None:
    script, config = tmp_path / "run.sh", tmp_path / "my_trainer.yaml"
    script.write_text("python3 -m verl.trainer.main_ppo --config-path=conf --config-name=my_trainer trainer.nnodes=1\n")
    config.write_text("actor_rollout_ref: {actor: {strategy: fsdp2}}\n")
    assert check([str(script)], framework_version="0.9.0").exit_code == 3
    beside = check([str(config), str(script)], framework_version="0.9.0")
    assert [use.scenario.strategy for use in beside.uses if use.scenario] == ["fsdp2"]


def test_what_only_changes_another_file_is_read_with_it(tmp_path: pathlib.Path) -> None:
    (tmp_path / "base.yaml").write_text("policy: {dtensor_cfg: {enabled: true, _v2: true}, model_name: x}\n")
    (tmp_path / "middle.yaml").write_text("defaults: base.yaml\npolicy: {dtensor_cfg: {cpu_offload: true}}\n")
    (tmp_path / "last.yaml").write_text("defaults: middle.yaml\ncluster: {gpus_per_node: 4}\n")
    result = check([str(tmp_path / "last.yaml")], framework_version="0.7.0")
    assert [use.scenario.offload for use in result.uses if use.scenario] == ["policy"]
    assert result.world_size == 4


@pytest.mark.parametrize("recipe", ["quantize", "eleuther_eval"])
def test_a_recipe_of_torchtune_that_does_not_train_is_not_read(recipe: str, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"tune run {recipe} --config quantization\n")
    assert check([str(script)]).exit_code == 3


_ACCELERATE = "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_offload_params: {}\n"
_LAUNCH = "accelerate launch --config_file fsdp.yaml train.py\n"


@pytest.mark.parametrize(
    ("text", "offload"),
    [
        (f"cat <<EOF > fsdp.yaml\n{_ACCELERATE.format('true')}EOF\n", "policy"),
        (f"cat > ./fsdp.yaml <<'YAML'\n{_ACCELERATE.format('false')}YAML\n", "none"),
        (f'tee fsdp.yaml > /dev/null << "EOF"\n{_ACCELERATE.format("true")}EOF\n', "policy"),
        (f"X=yes\ncat > fsdp.yaml <<EOF\n{_ACCELERATE.format('${X}')}EOF\n", "policy"),
        (
            "cat > fsdp.yaml <<EOF\ndistributed_type: FSDP\nEOF\n"
            "cat >> fsdp.yaml <<EOF\nfsdp_config: {fsdp_version: 2}\nEOF\n",
            "none",
        ),
    ],
    ids=["first", "last", "tee", "variable", "appended"],
)
def test_a_file_that_the_script_writes_itself_is_read(text: str, offload: str, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"set -e\n{text}{_LAUNCH}")
    result = check([str(script)], framework_version="1.15.0")
    assert [(use.scenario.strategy, use.scenario.offload) for use in result.uses if use.scenario] == [
        ("fsdp2", offload)
    ]


@pytest.mark.parametrize(
    "text",
    [
        f"cat > other.yaml <<EOF\n{_ACCELERATE.format('true')}EOF\n",
        f"cat > fsdp.yaml <<'EOF'\n{_ACCELERATE.format('${X}')}EOF\n",
        f"cat > fsdp.yaml <<EOF\n{_ACCELERATE.format('$X')}EOF\n",
        "".join(f"cat > fsdp.yaml <<EOF\n{_ACCELERATE.format(value)}EOF\n" for value in ("true", "false")),
        f"cat <<EOF\n{_ACCELERATE.format('true')}EOF\n",
    ],
    ids=["another file", "no variables", "unknown variable", "two branches", "no file"],
)
def test_what_a_script_writes_elsewhere_or_does_not_say_is_not_known(text: str, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"{text}{_LAUNCH}")
    assert check([str(script)]).exit_code == 3


def test_a_file_that_the_script_writes_itself_is_not_missed(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"cat > sft.yaml <<EOF\n{_YAML}EOF\ntorchrun train.py --config sft.yaml\n")
    result = check([str(script)], framework_version="5.9")
    assert [use.scenario.strategy for use in result.uses if use.scenario] == ["fsdp2"]
    assert said(result, "unknown") == ""
