"""Every input is read, or refused, within seconds and memory: what was made to break that, and what a fuzzer found."""

from __future__ import annotations

import pathlib
import time

import pytest
from support.hostile import HOSTILE, MB

from fsdp_doctor.check import check, presentation
from fsdp_doctor.check.settings import Setting, Settings
from fsdp_doctor.errors import UsageError


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_in_one_sentence_and_in_time(name: str, tmp_path: pathlib.Path) -> None:
    file = tmp_path / name
    file.write_text(HOSTILE[name])
    started = time.process_time()
    with pytest.raises(UsageError) as raised:
        check([str(file)])
    assert "\n" not in str(raised.value)
    assert time.process_time() - started < 2 * (1 + len(HOSTILE[name]) / MB)


def test_a_long_value_is_shown_in_part() -> None:
    row = Setting("a", "x" * 100_000, "file:1")
    assert len(str(row)) < 300
    result = check(["fsdp=full_shard", "output_dir=out", f"fsdp_config.{'k' * 100}={'x' * 100_000}"])
    assert len(presentation.as_text(result)) < 20_000


def test_many_unknown_keys_are_said_in_part(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("output_dir: x\nfsdp: full_shard\nfsdp_config:\n" + "".join(f"  k{i}: 1\n" for i in range(15_000)))
    unknown = [one for one in check([str(file)]).findings if one.kind == "unknown"]
    assert len(unknown) == 21
    assert unknown[-1].sentence == "14980 more keys of fsdp_config are not known"


def test_settings_that_replace_one_another_take_no_longer_the_more_there_are() -> None:
    started = time.process_time()
    rows = [Setting(f"x.k{i}", i, "f") for i in range(10_000)]
    settings = Settings.of([*rows, *(Setting(key, 1, "f") for _ in range(5_000) for key in ("a.b.c", "a.b"))])
    assert time.process_time() - started < 2
    assert [row.key for row in settings.below("a")] == ["a.b"]
    settings.without("x")
    assert [row.key for row in settings] == ["a.b"]


def test_a_model_that_is_a_huge_file_is_not_read(tmp_path: pathlib.Path) -> None:
    with open(tmp_path / "config.json", "wb") as file:
        file.truncate(1 << 40)
    asked = ["actor_rollout_ref.actor.strategy=fsdp2", f"actor_rollout_ref.model.path={tmp_path}"]
    assert check(asked, framework_version="0.9.0").exit_code == 0


def test_a_home_that_there_is_not_is_no_file_that_is_followed() -> None:
    asked = ["defaults=~nosuchuser.yaml", "policy.dtensor_cfg.enabled=true", "policy.model_name=x"]
    assert check(asked, framework_version="0.7.0").determined


def test_a_number_that_cannot_even_be_printed_is_said(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "config.yaml"
    digits = "9" * 4000
    file.write_text(
        f"trainer: {{n_gpus_per_node: {digits}, nnodes: {digits}}}\nactor_rollout_ref: {{actor: {{strategy: fsdp2}}}}\n"
    )
    result = check([str(file)], framework_version="0.9.0")
    assert result.world_size is None
    assert any("is not a number of any use here" in one.sentence for one in result.findings)
    presentation.as_text(result)
