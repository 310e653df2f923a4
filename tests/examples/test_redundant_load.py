"""examples/verl-4229: each file is what the command in its README makes now, and the remedy is one."""

from __future__ import annotations

import re

import pytest
from program import doctor as program_doctor
from support.emulation import needs_emulation
from support.inside import Done, doctor
from support.places import ROOT

DIRECTORY = ROOT / "examples" / "verl-4229"
_VERSIONS = ("--framework-version", "0.7.0", "--torch-version", "2.9")
_REMEDY = "actor_rollout_ref.actor.fsdp_config.param_offload=True"


def _doctor(*arguments: str) -> Done:
    return doctor(*arguments, env={"COLUMNS": "120"}, cwd=DIRECTORY)


def _text(file: str) -> str:
    return (DIRECTORY / file).read_text(encoding="utf-8")


def test_check_finds_the_settings_that_meet() -> None:
    done = _doctor("check", "config.txt", *_VERSIONS)
    assert (done.stdout, done.code) == (_text("check.txt"), 1)
    assert "actor_rollout_ref.actor.fsdp_config.fsdp_size=1 (config.txt:3)" in done.stdout
    assert "issue 4229" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [(_REMEDY, *_VERSIONS), ("--framework-version", "0.9.0"), ("~async_training", *_VERSIONS)],
    ids=["the remedy", "a version that does not load it", "not asynchronous"],
)
def test_check_finds_it_nowhere_else(arguments: tuple[str, ...]) -> None:
    assert "issue 4229" not in _doctor("check", "config.txt", *arguments).stdout


def test_the_plan_has_the_model_on_the_device_at_the_engines_start() -> None:
    arguments = ("memory", "plan", "--config", "config.txt", "--gpu-memory", "24GiB")
    done = _doctor(*arguments, "--framework-version", "0.7.0")
    assert (done.stdout, done.code) == (_text("plan.txt"), 1)
    assert "rollout worker: engine starts  does not fit" in done.stdout
    assert "that it never uses 5.7" in done.stdout
    newer = _doctor(*arguments, "--framework-version", "0.9.0")
    assert "rollout worker: engine starts\n" in newer.stdout


def test_the_two_processes_are_as_the_example_shows_them() -> None:
    needs_emulation()
    (command,) = re.findall(r"`fsdp-doctor (memory rollout [^`]*)`", _text("README.md"))
    done = program_doctor(*command.split())
    assert (done.stdout, done.code) == (_text("rollout.txt"), 1), done.stderr
    loaded, _, alone = done.stdout.partition("FSDP model not loaded")
    assert "Free memory on device" in loaded
    assert "the engine started" in alone
