"""Launch commands of shell scripts become settings: the launcher, what it starts, and the flags of both."""

from __future__ import annotations

import pathlib

import pytest
from support.checked import of_kind

from fsdp_doctor.check import check
from fsdp_doctor.check.launch_commands import count_launched_ranks, read_script
from fsdp_doctor.check.settings import Settings
from fsdp_doctor.errors import UsageError


def _read(text: str) -> dict[str, object]:
    return {row.key: row.value for row in read_script(text, "run.sh")}


def test_the_flags_of_the_launcher_and_of_the_script_are_separate() -> None:
    assert _read('torchrun --nproc-per-node=4 --nnodes 2 train.py --fsdp "full_shard offload" --bf16 --lr 1.0 x') == {
        "launch.program": "torchrun",
        "launch.nproc_per_node": "4",
        "launch.nnodes": "2",
        "launch.script": "train.py",
        "fsdp": "full_shard offload",
        "bf16": True,
        "lr": "1.0 x",
    }


@pytest.mark.parametrize(
    ("command", "program", "script"),
    [
        ("python -m torch.distributed.run --nproc_per_node 2 -m pkg.train", "torchrun", "pkg.train"),
        ("CUDA_VISIBLE_DEVICES=0,1 nohup accelerate launch --use_fsdp train.py", "accelerate", "train.py"),
        ("ray job submit --address=x -- python3 -u -m verl.trainer.main_ppo a.b=1", "python", "verl.trainer.main_ppo"),
        ("uv run --extra x python train.py", "python", "train.py"),
        ("NPROC_PER_NODE=4 swift sft --model x", "swift", "sft"),
        ("/opt/venv/bin/torchrun --standalone train.py", "torchrun", "train.py"),
        ("torchrun -m --nnodes 1 pkg.train", "torchrun", "pkg.train"),
    ],
)
def test_launchers_are_found_wherever_they_stand(command: str, program: str, script: str) -> None:
    settings = _read(command)
    assert (settings["launch.program"], settings["launch.script"]) == (program, script)


def test_a_line_goes_on_after_a_backslash_and_keeps_its_number() -> None:
    rows = list(read_script("\n\ntorchrun \\\n  --nproc_per_node 2 \\\n  train.py --fsdp x\n", "run.sh"))
    assert {row.where for row in rows} == {"run.sh:3"}
    assert {row.key: row.value for row in rows}["fsdp"] == "x"


@pytest.mark.parametrize(
    ("line", "fsdp"),
    [
        ("torchrun t.py --fsdp 'full_shard offload' 2>&1 | tee log", "full_shard offload"),
        ("torchrun t.py &> log --fsdp full_shard; echo --fsdp offload", "full_shard"),
        (r"torchrun t.py --fsdp full_shard\ offload&", "full_shard offload"),
        ('torchrun t.py --name "it\'s" --fsdp full_shard', "full_shard"),
        ("torchrun t.py --fsdp full_shard --name it's", "full_shard"),
        ("torchrun t.py --fsdp full_shard --code 'a", "full_shard"),
    ],
)
def test_words_are_split_as_a_shell_splits_them(line: str, fsdp: str) -> None:
    assert _read(line)["fsdp"] == fsdp


def test_of_several_commands_the_one_that_names_fsdp_is_the_training() -> None:
    text = "torchrun a.py --fsdp full_shard --seed 1\ntorchrun evaluate.py --seed 2\npython plot.py --seed 3\n"
    assert _read(text)["seed"] == 1


@pytest.mark.parametrize(("second", "differs"), [("4", True), ("2", False)])
def test_the_last_of_several_trainings_is_read_and_different_trainings_are_noted(
    tmp_path: pathlib.Path, second: str, differs: bool
) -> None:
    script = tmp_path / "run.sh"
    command = "torchrun --nproc_per_node {} train.py --fsdp full_shard --seed {}\n"
    script.write_text(command.format("2", 1) + command.format(second, 2))
    result = check([str(script)])
    assert result.world_size == int(second)
    assert any("not_read=line 1" in row for note in of_kind(result, "note") for row in note.settings) == differs


def test_variables_arrays_and_defaults_are_expanded() -> None:
    text = 'SEED=${RANDOM_SEED:-}\nN=4\n: "${M:=2}"\nARGS=(\n  --fsdp full_shard\n  --seed ${SEED:-1}\n)\n'
    settings = _read(text + 'torchrun --nproc_per_node $N --nnodes ${M} t.py "${ARGS[@]}"\n')
    assert (settings["launch.nproc_per_node"], settings["launch.nnodes"], settings["seed"]) == ("4", "2", 1)


@pytest.mark.parametrize("used", ["$N", "${N}", "${N:-2}"])
def test_a_variable_that_branches_assign_differently_is_unknown(used: str) -> None:
    text = f"if x; then\nN=4\nelse\nN=8\nfi\ntorchrun --nproc_per_node {used} t.py\n"
    assert _read(text)["launch.nproc_per_node"] == used


@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        ("torchrun --nproc_per_node 4 --nnodes 2 t.py", 8),
        ("torchrun --nproc_per_node gpu t.py", None),
        ("CUDA_VISIBLE_DEVICES=0,2 torchrun --nproc_per_node gpu t.py", 2),
        ("CUDA_VISIBLE_DEVICES=3 torchrun --nproc_per_node auto --nnodes 4 t.py", 4),
        ("CUDA_VISIBLE_DEVICES=$IDS torchrun --nproc_per_node gpu t.py", None),
        ("torchrun --nproc_per_node 4 --nnodes 1:2 t.py", None),
        ("torchrun --nproc_per_node $N t.py", None),
        ("accelerate launch --num_processes 6 --num_machines 2 t.py", 6),
        ("NPROC_PER_NODE=2 NNODES=3 swift sft", 6),
        ("deepspeed --num_gpus 4 t.py", 4),
        ("python t.py", None),
    ],
)
def test_the_ranks_that_a_command_starts(command: str, ranks: int | None) -> None:
    assert count_launched_ranks(Settings.from_rows(read_script(command, "run.sh"))) == ranks


def test_variables_that_contain_one_another_are_refused_before_they_grow() -> None:
    text = "A0=0123456789\n" + "".join(f"A{i}=$A{i - 1}$A{i - 1}\n" for i in range(1, 60))
    with pytest.raises(UsageError, match=r"run\.sh"):
        list(read_script(text, "run.sh"))
