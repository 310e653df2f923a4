"""CONFIG arguments of `fsdp-doctor check` become settings: files, named files, scripts, overrides; or are refused."""

from __future__ import annotations

import io
import pathlib
import sys

import pytest
from support.checked import ACTOR, CONFIGS, FSDP2, checked, flag, of_kind, said, use_of

from fsdp_doctor.check import check, list_cases, reading
from fsdp_doctor.errors import UsageError


def _offloads(arguments: list[str], version: str) -> list[str]:
    return [str(use.scenario.offload) for use in check(arguments, framework_version=version).uses if use.scenario]


@pytest.mark.parametrize(
    ("file", "place"),
    [
        ("broken.yaml", "broken.yaml:4: invalid YAML"),
        ("broken.toml", "broken.toml:3: invalid TOML"),
        ("broken.json", "broken.json:2: invalid JSON"),
        ("binary.yaml", "binary.yaml"),
        ("empty.yaml", "empty.yaml"),
        ("deepspeed.yaml", "deepspeed.yaml"),
        ("accelerate_v3.yaml", "accelerate_v3.yaml:4"),
        ("nosuch.yaml", "nosuch.yaml"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line_with_its_place(file: str, place: str) -> None:
    with pytest.raises(UsageError) as raised:
        checked(file)
    assert place in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.yaml", "a: &a\n  b: *a\n"),
        ("config.yaml", "- a\n- b\n"),
        ("config.yaml", "a: !!python/object:os.system x\n"),
        ("config.yaml", "a: 2026-99-99\n"),
        ("config.yaml", "a: \x07\n"),
        ("config.yaml", "a: " + "[" * 5000 + "\n"),
        ("config.yaml", "a: " + "x" * (4 << 20)),
        ("config.json", "[" * 100_000),
        ("config.json", "[1, 2]"),
        ("config.json", '{"a":' * 3000 + "1" + "}" * 3000),
        ("config.json", '{"a": ' + "1" * 5000 + "}"),
        ("config.json", '{"a": {' + ",".join(f'"k{i}": 1' for i in range(20_001)) + "}}"),
        ("config.toml", "a = " + "[" * 100_000),
        ("notes.txt", "there is nothing here: at all\nor is there\n"),
        ("train.py", "TrainingArguments(fsdp='full_shard', output_dir='out')\n"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_by_its_name(tmp_path: pathlib.Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(UsageError) as raised:
        check([str(file)])
    assert str(file) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_closed_standard_input_and_an_unknown_home_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="~no-such-user-here"):
        check(["~no-such-user-here/config.yaml"])
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UsageError, match="standard input"):
        check(["-"])


def test_the_standard_input_may_be_a_whole_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    data = (CONFIGS / "verl_fsdp1.yaml").read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    use = use_of(check(["-"], framework_version="0.9.0"), "actor")
    assert any("standard input:3" in reason.because for reason in use.reasons)


def test_a_script_gives_its_overrides_with_their_lines() -> None:
    settings = reading.read([str(CONFIGS / "verl_policy.sh")])
    rows = {row.key: (row.value, row.where.rpartition(":")[2]) for row in settings}
    assert rows[f"{ACTOR}.fsdp_config.offload_policy"] == (True, "13")  # from the variable offload
    assert rows[f"{ACTOR}.strategy"] == ("fsdp2", "11")  # quoted; not the line that is commented out
    assert rows["actor_rollout_ref.model.path"] == ("Qwen/Qwen3-4B", "10")  # the variable's default
    assert rows[f"{ACTOR}.fsdp_config.fsdp_size"] == (-1, "14")  # ++
    assert rows["trainer.use_legacy_worker_impl"] == ("disable", "17")  # +
    assert rows["data.train_files"] == (["gsm8k/train.parquet"], "9")


def test_two_quoted_overrides_on_a_line_are_two_settings(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text("python main.py 'a.b=True' \"c.d=[x, y]\" e.f=1; g.h=2\n")
    rows = {row.key: row.value for row in reading.read([str(file)]) if not row.key.startswith("launch.")}
    assert rows == {"a.b": True, "c.d": ["x", "y"], "e.f": 1, "g.h": 2}


def test_a_file_that_is_named_like_an_override_is_a_file(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run=1").write_text("a.b=2\n")
    assert [str(row) for row in reading.read(["run=1"])] == ["a.b=2 (run=1:1)"]


def test_overrides_replace_file_values_in_any_order_and_a_tilde_removes_settings() -> None:
    key, file = f"{ACTOR}.fsdp_config.offload_policy", "verl_policy.sh"
    for arguments in ((file, f"{key}=false"), (f"{key}=false", file), (file, f"~{key}")):
        assert str(use_of(checked(*arguments, version="0.9.0"), "actor").scenario.offload) == "none"


def test_a_section_that_is_replaced_loses_its_previous_settings() -> None:
    result = checked("verl_policy.sh", f"{ACTOR}.fsdp_config=null", version="0.9.0")
    assert str(use_of(result, "actor").scenario.offload) == "none"


def test_a_later_file_replaces_an_earlier_one(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "later.yaml"
    file.write_text("actor_rollout_ref: {actor: {strategy: fsdp}}\n")
    result = checked("verl_grpo.yaml", str(file), version="0.9.0")
    assert use_of(result, "actor").scenario.strategy == "fsdp1"


def test_an_interpolation_is_followed_inside_the_file_and_is_unknown_otherwise() -> None:
    followed = use_of(checked("verl_grpo.yaml", version="0.9.0"), "ref")
    assert followed.scenario.strategy == "fsdp2"
    result = checked(FSDP2, flag("offload_policy", "${oc.env:OFFLOAD}"))
    assert use_of(result, "actor").scenario is None
    assert "${oc.env:OFFLOAD}" in said(result, "unknown")
    assert list_cases(result) == []


def test_what_decides_which_models_there_are_must_be_readable() -> None:
    result = checked("algorithm.use_kl_in_reward=${oc.env:KL}", FSDP2)
    assert "use_kl_in_reward=${oc.env:KL}" in said(result, "unknown")
    assert (list_cases(result), result.exit_code) == ([], 3)


def test_a_reference_to_itself_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"strategy=\$\{a\.b\}"):
        checked("actor_rollout_ref.actor.strategy=${a.b}", "a.b=${a.b}")


@pytest.mark.parametrize("launched", [False, True])
def test_duplicate_values_in_one_file_are_noted_even_through_a_launch_command(
    tmp_path: pathlib.Path, launched: bool
) -> None:
    file = tmp_path / "fsdp.yaml"
    section = "fsdp_config:\n  fsdp_version: 2\n  fsdp_offload_params: true\n  fsdp_offload_params: false\n"
    file.write_text(f"distributed_type: FSDP\n{section}")
    if launched:
        (tmp_path / "run.sh").write_text("accelerate launch --config_file fsdp.yaml train.py\n")
    result = check([str(tmp_path / "run.sh" if launched else file)])
    (note,) = [finding for finding in of_kind(result, "note") if len(finding.settings) == 2]
    assert ["fsdp_offload_params=true" in note.settings[0], "fsdp_offload_params=false" in note.settings[1]] == [
        True
    ] * 2


# Named files


_YAML = "fsdp: full_shard\nfsdp_config: {fsdp_version: 2}\n"


@pytest.mark.parametrize(
    ("command", "offload"),
    [
        ("llamafactory-cli train sft.yaml", "none"),
        ("torchrun train.py --config sft.yaml", "none"),
        ("torchrun train.py --config sft.yaml --fsdp 'full_shard offload'", "policy"),
    ],
)
def test_a_command_overrides_the_file_that_it_names(command: str, offload: str, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"{command}\n")
    (tmp_path / "sft.yaml").write_text(_YAML)
    (use,) = check([str(script)], framework_version="5.9").uses
    assert use.scenario is not None
    assert (use.scenario.strategy, str(use.scenario.offload)) == ("fsdp2", offload)


@pytest.mark.parametrize("text", [None, "a: [\n"])
def test_a_named_file_that_cannot_be_read_is_unknown(tmp_path: pathlib.Path, text: str | None) -> None:
    script = tmp_path / "run.sh"
    script.write_text("torchrun train.py --config sft.yaml --fsdp full_shard\n")
    if text:
        (tmp_path / "sft.yaml").write_text(text)
    (finding,) = of_kind(check([str(script)]), "unknown")
    assert "config=sft.yaml" in finding.settings[0]


def test_a_file_that_changes_another_one_is_read_with_it(tmp_path: pathlib.Path) -> None:
    (tmp_path / "base.yaml").write_text("policy: {dtensor_cfg: {enabled: true, _v2: true}, model_name: x}\n")
    (tmp_path / "middle.yaml").write_text("defaults: base.yaml\npolicy: {dtensor_cfg: {cpu_offload: true}}\n")
    (tmp_path / "last.yaml").write_text("defaults: middle.yaml\ncluster: {gpus_per_node: 4}\n")
    assert _offloads([str(tmp_path / "last.yaml")], "0.7.0") == ["policy"]


def test_a_file_that_a_script_writes_is_asked_for(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "run.sh"
    written = "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n"
    script.write_text(f"cat > fsdp.yaml <<EOF\n{written}EOF\naccelerate launch --config_file fsdp.yaml train.py\n")
    assert check([str(script)]).exit_code == 3
    (tmp_path / "fsdp.yaml").write_text(written)
    assert _offloads([str(script)], "1.15.0") == ["none"]


def test_a_configuration_of_hydra_that_is_given_beside_is_known(tmp_path: pathlib.Path) -> None:
    script, config = tmp_path / "run.sh", tmp_path / "my_trainer.yaml"
    script.write_text("python3 -m verl.trainer.main_ppo --config-path=conf --config-name=my_trainer trainer.nnodes=1\n")
    config.write_text("actor_rollout_ref: {actor: {strategy: fsdp2}}\n")
    assert check([str(script)], framework_version="0.9.0").exit_code == 3
    assert _offloads([str(config), str(script)], "0.9.0") == ["none"]
