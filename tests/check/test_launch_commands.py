"""Commands in a text become settings: the launcher, what it starts, and the flags of both."""

from __future__ import annotations

import pytest

from fsdp_doctor.check.launch_commands import launch_settings
from fsdp_doctor.check.launch_ranks import launched_ranks
from fsdp_doctor.check.settings import Settings
from fsdp_doctor.check.shell_text import ShellText
from fsdp_doctor.errors import UsageError


def _read(text: str) -> dict[str, object]:
    return {row.key: row.value for row in launch_settings(ShellText(text, "run.sh"))}


def test_the_flags_of_the_launcher_and_of_the_script_are_told_apart() -> None:
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
        ("tune run --nproc_per_node 2 full_finetune_distributed --config llama3/8B_full", "tune", None),
        ("/opt/venv/bin/torchrun --standalone train.py", "torchrun", "train.py"),
        ("torchrun -m --nnodes 1 pkg.train", "torchrun", "pkg.train"),
    ],
)
def test_launchers_are_found_wherever_they_stand(command: str, program: str, script: str | None) -> None:
    found = _read(command)
    assert found["launch.program"] == program
    assert script is None or found["launch.script"] == script


def test_a_line_goes_on_after_a_backslash_and_keeps_its_number() -> None:
    rows = launch_settings(ShellText("\n\ntorchrun \\\n  --nproc_per_node 2 \\\n  train.py --fsdp x\n", "run.sh"))
    assert {row.where for row in rows} == {"run.sh:3"}
    assert {row.key: row.value for row in rows}["fsdp"] == "x"


def test_of_several_commands_the_one_that_names_fsdp_is_the_training() -> None:
    text = "torchrun a.py --fsdp full_shard --seed 1\ntorchrun evaluate.py --seed 2\npython plot.py --seed 3\n"
    assert _read(text)["seed"] == 1


def test_variables_are_put_in_where_the_text_gives_them_one_value() -> None:
    text = 'N=4\n: "${M:=2}"\nARGS=(\n  --fsdp full_shard\n  --seed 1\n)\n'
    found = _read(text + 'torchrun --nproc_per_node $N --nnodes ${M} t.py "${ARGS[@]}"\n')
    assert (found["launch.nproc_per_node"], found["launch.nnodes"], found["seed"]) == ("4", "2", 1)


def test_what_branches_assign_differently_is_not_known() -> None:
    text = "if x; then N=4; fi\nN=4\nelse\nN=8\nfi\ntorchrun --nproc_per_node $N t.py\n"
    assert _read(text)["launch.nproc_per_node"] == "$N"


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
    assert launched_ranks(Settings.of(launch_settings(ShellText(command, "run.sh")))) == ranks


def test_variables_that_hold_one_another_are_refused_before_they_grow() -> None:
    text = "A0=0123456789\n" + "".join(f"A{i}=$A{i - 1}$A{i - 1}\n" for i in range(1, 60))
    with pytest.raises(UsageError, match="its variables, which hold one another, become too long"):
        ShellText(text, "run.sh")
