"""Every way to start the program starts the same program."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys

import pytest
from program import Run, probe, run
from support import inside
from support.places import ROOT

from fsdp_doctor.matrix.methods import FIXES
from fsdp_doctor.report.journal import read_report

_SCENARIOS = ("--strategy", "fsdp2", "--offload", "none,policy", "--staging", "staged")
_TWO_CASES = ("--device", "cpu", *_SCENARIOS, "--method", "unshard")
_HALF_BAD = (*_SCENARIOS, "--method", "summon_full_params,unshard")
_IDS = ["fsdp2/none/staged/unshard", "fsdp2/policy/staged/unshard"]


@pytest.fixture(scope="module")
def half_bad(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, pathlib.Path]:
    """A run of two ok and two bad cases into a pipe, by the launcher file from another directory; and its report."""
    directory = tmp_path_factory.mktemp("half_bad")
    file = directory / "report.json"
    words = ("probe", "--device", "cpu", *_HALF_BAD, "--strict", "--confirm", "--json", str(file))
    done = run(sys.executable, str(ROOT / "fsdp-doctor"), *words, env={"PYTHONPATH": ""}, cwd=directory)
    return dataclasses.replace(done, report=read_report(file)), file


def test_confirm_repeats_bad_cases_in_fresh_workers_and_keeps_the_known_failure(
    half_bad: tuple[Run, pathlib.Path],
) -> None:
    done, _ = half_bad
    assert done.code == 1
    assert done.report is not None
    confirmed = {result.case.method: result.confirmed for result in done.report.results}
    assert confirmed == {"summon_full_params": True, "unshard": None}
    assert "\tconfirmed\t" in done.stdout
    again = done.result("policy/staged/summon_full_params")
    assert again.known == "summon-full-params-noop-on-fsdp2"
    assert len(again.yielded) == 2
    assert all(again.yielded)


def test_a_pipe_gets_lines_and_no_live_line(half_bad: tuple[Run, pathlib.Path]) -> None:
    done, _ = half_bad
    assert len(done.stdout.splitlines()) == 4
    assert "\x1b[" not in done.stdout + done.stderr
    assert "starting the workers" not in done.stdout + done.stderr


def test_differences_from_an_expected_report_in_either_direction_end_with_1(
    half_bad: tuple[Run, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    data = json.loads(half_bad[1].read_text())
    expected = tmp_path / "expected.json"
    for result in data["results"]:
        result["verdict"]["kind"] = {"ok": "crash", "wrong": "ok"}[result["verdict"]["kind"]]
    expected.write_text(json.dumps(data))
    other = probe(tmp_path, *_HALF_BAD, "--expect", str(expected))
    assert other.code == 1
    assert "expected ok, got wrong: fsdp2/none/staged/summon_full_params" in other.stderr
    assert "expected crash, got ok: fsdp2/none/staged/unshard" in other.stderr


def test_last_failed_selects_the_bad_cases_of_a_report(half_bad: tuple[Run, pathlib.Path]) -> None:
    listed = inside.doctor("list", "--last-failed", str(half_bad[1]))
    assert listed.stdout.split() == ["fsdp2/none/staged/summon_full_params", "fsdp2/policy/staged/summon_full_params"]


def test_the_command_alone_starts_two_ranks_and_writes_every_output(tmp_path: pathlib.Path) -> None:
    """The command starts two ranks where there is no accelerator; each output is the same again from the JSON."""
    files = {name: tmp_path / f"out.{name}" for name in ("json", "markdown", "junit", "svg")}
    flags = [word for name, file in files.items() for word in (f"--{name}", str(file))]
    command = str(pathlib.Path(sys.executable).parent / "fsdp-doctor")
    done = run(command, "probe", *_TWO_CASES, "--fix", *flags, "--format", "table")
    assert done.code == 0, done.stderr
    assert "on 2 ranks of cpu" in done.stderr
    assert [result.id for result in read_report(files["json"]).results if result.case.method not in FIXES] == _IDS
    assert "full_tensors" in done.stdout
    for name in ("markdown", "junit"):
        again = inside.doctor("report", "show", str(files["json"]), "--format", name)
        assert again.stdout == files[name].read_text()
    svg = tmp_path / "again.svg"
    assert inside.doctor("report", "show", str(files["json"]), "--format", "svg", "-o", str(svg)).code == 0
    assert "full_tensors" in svg.read_text()


def test_the_configuration_and_checkpoint_of_a_user_are_built(tmp_path: pathlib.Path) -> None:
    import torch
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=True, max_position_embeddings=32,
    )  # fmt: skip
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(tmp_path / "config")
    torch.manual_seed(7)
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path / "checkpoint")
    for directory in ("config", "checkpoint"):
        selected = ("--strategy", "fsdp2", "--offload", "policy", "--method", "state_dict", "--fix")
        done = probe(tmp_path, "--model", str(tmp_path / directory), *selected)
        assert done.code == 0, done.stderr
        assert done.report is not None
        kinds = {(result.case.scenario.model, result.verdict.kind) for result in done.report.results}
        assert kinds == {("custom", "ok")}
