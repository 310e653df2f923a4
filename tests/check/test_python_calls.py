"""What a Python script configures is read from its syntax tree; nothing of it is run."""

from __future__ import annotations

import pytest

from fsdp_doctor.check.python_calls import python_settings
from fsdp_doctor.errors import UsageError


def _read(text: str) -> dict[str, object]:
    return {row.key: row.value for row in python_settings(text, "train.py")}


def test_literals_and_names_that_are_assigned_once_are_read_and_the_rest_stays_source() -> None:
    text = (
        "STATE = 'FULL_STATE_DICT'\nfsdp = pick()\n"
        "TrainingArguments(output_dir='out', fsdp=fsdp, fsdp_config={'state_dict_type': STATE, 'a': {'b': -1}})\n"
    )
    assert _read(text) == {
        "output_dir": "out",
        "fsdp": "pick()",
        "fsdp_config.state_dict_type": "FULL_STATE_DICT",
        "fsdp_config.a.b": -1,
    }


def test_a_name_that_is_assigned_twice_has_no_value() -> None:
    assert _read("x = 1\nx = 2\nSFTConfig(fsdp=x)\n") == {"fsdp": "x"}


def test_each_setting_keeps_its_line() -> None:
    rows = python_settings("\nTrainingArguments(\n    fsdp='full_shard',\n    seed=1,\n)\n", "train.py")
    assert [str(row) for row in rows] == ["fsdp=full_shard (train.py:3)", "seed=1 (train.py:4)"]


def test_a_trainer_is_lightnings_only_where_lightning_is_imported() -> None:
    assert _read("Trainer(devices=2)\n") == {}
    assert _read("import pytorch_lightning as pl\npl.Trainer(devices=2)\n") == {
        "lightning.called": True,
        "lightning.devices": 2,
    }


def test_nothing_is_run() -> None:
    assert _read("raise SystemExit\nTrainingArguments(fsdp=__import__('os').abort())\n") == {
        "fsdp": "__import__('os').abort()"
    }


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a = (", r"train\.py:1: invalid Python: '\(' was never closed"),
        ("x = " + "-" * 100_000 + "1", "it is nested too deeply"),
        ("x = a" + ".b" * 60_000, "it is nested too deeply"),
        ("a\n" * 100_000, "is larger than 128 KiB, too large for a script"),
    ],
)
def test_what_is_no_script_is_a_usage_error(text: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        python_settings(text, "train.py")
