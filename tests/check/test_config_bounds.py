"""Every input is read or refused within seconds and memory: hostile files, pipes, endless devices."""

from __future__ import annotations

import os
import pathlib
import sys
import threading

import pytest
from program import Started, run
from support.checked import CONFIGS
from support.hostile import HOSTILE, MB

from fsdp_doctor.check import check, presentation
from fsdp_doctor.check.settings import Setting, Settings

_CHECK_EACH = """
import pathlib, sys
from fsdp_doctor.check import check
from fsdp_doctor.errors import UsageError
for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    try:
        check([str(path)])
    except UsageError as error:
        print(path.name, "refused in", len(str(error).splitlines()), "line")
"""


def test_hostile_files_are_refused_within_two_seconds_per_mebibyte_and_300_megabytes(
    tmp_path: pathlib.Path,
) -> None:
    for name, text in HOSTILE.items():
        (tmp_path / name).write_text(text)
    seconds = 2 * sum(1 + len(text) // MB for text in HOSTILE.values())
    limits = f'ulimit -v 300000; ulimit -t {seconds}; exec "$@"'
    finished = run("bash", "-c", limits, "bash", sys.executable, "-c", _CHECK_EACH, str(tmp_path))
    assert finished.code == 0, finished.stderr
    assert finished.stdout.splitlines() == [f"{name} refused in 1 line" for name in sorted(HOSTILE)]


def test_a_long_value_is_shown_in_part() -> None:
    row = Setting("a", "x" * 100_000, "file:1")
    assert len(str(row)) < 300
    result = check(["fsdp=full_shard", "output_dir=out", f"fsdp_config.{'k' * 100}={'x' * 100_000}"])
    assert len(presentation.render_text(result)) < 20_000


def test_many_unknown_keys_are_said_in_part(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("output_dir: x\nfsdp: full_shard\nfsdp_config:\n" + "".join(f"  k{i}: 1\n" for i in range(15_000)))
    unknown = [finding for finding in check([str(file)]).findings if finding.kind == "unknown"]
    assert len(unknown) == 21
    assert "14980" in unknown[-1].sentence


def test_settings_that_replace_one_another_leave_the_last() -> None:
    rows = [Setting(f"x.k{i}", i, "f") for i in range(100)]
    settings = Settings.from_rows([*rows, *(Setting(key, 1, "f") for _ in range(50) for key in ("a.b.c", "a.b"))])
    assert [row.key for row in settings.list_below("a")] == ["a.b"]
    settings.remove("x")
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
    assert any(finding.kind == "unknown" for finding in result.findings)
    presentation.render_text(result)


def _check(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "fsdp_doctor", "check", *arguments)


def test_a_pipe_is_awaited_with_a_message_and_then_read(tmp_path: pathlib.Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    started = Started(*_check(str(pipe), "--framework-version", "5.9"))
    said = started.first_message()
    threading.Thread(target=pipe.write_bytes, args=((CONFIGS / "trl.yaml").read_bytes(),), daemon=True).start()
    finished = started.wait()
    assert finished.code == 0, finished.stderr
    assert str(pipe) in said
    assert "nothing known to break" in finished.stdout


def test_ctrl_c_ends_the_wait(tmp_path: pathlib.Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    started = Started(*_check(str(pipe)))
    started.first_message()
    started.interrupt()
    finished = started.wait()
    assert finished.code == 130
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize("device", ["/dev/urandom", "/dev/zero"])
def test_an_endless_device_is_read_to_a_limit(device: str) -> None:
    finished = run(*_check(device))
    assert finished.code == 2
    assert f"{device} is larger than 4 MiB" in finished.stderr
