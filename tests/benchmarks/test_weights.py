"""benchmarks/weights.py: its rows and refusals, on CPU ranks and on the emulated device, but no number of seconds."""

from __future__ import annotations

import json
import pathlib
import runpy
import sys
from collections.abc import Callable
from typing import Any

import pytest
from program import Run, forked_script, run
from support.emulation import needs_emulation
from support.places import ROOT

_SCRIPT = ROOT / "benchmarks" / "weights.py"
_CPU = ("--device", "cpu", "--repeat", "1")


def bench(tmp_path: pathlib.Path, *options: str, **how: Any) -> tuple[Run, dict[str, Any]]:
    file = tmp_path / "bench.json"
    done = forked_script(_SCRIPT, "--repeat", "1", "--json", str(file), *options, **how)
    return done, json.loads(file.read_text()) if file.exists() else {}


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, dict[str, Any]]:
    needs_emulation()
    return bench(
        tmp_path_factory.mktemp("bench"),
        *("--device", "emulated", "--layers", "1", "--strategy", "fsdp2,fsdp1", "--offload", "none,policy,param"),
        *("--staging", "unstaged,staged", "--dtype", "fp32:bf16"),
    )


def test_every_method_is_measured_over_every_offload_under_which_it_makes_sense(
    emulated: tuple[Run, dict[str, Any]],
) -> None:
    run, report = emulated
    assert run.code == 0, run.stderr
    rows, staged = (
        {(row["strategy"], row["offload"], row["method"]) for row in report["measured"] if row["staging"] == staging}
        for staging in ("unstaged", "staged")
    )
    for offload in ("none", "policy", "param"):
        assert {("fsdp2", offload, "full_tensors"), ("fsdp2", offload, "state_dict.to.full_tensor")} <= rows
        assert ("fsdp1", offload, "fsdp_doctor:full_state_dict") in rows
    # torch unshards what a manual offload has moved to the host only after it was moved back.
    assert ("fsdp2", "param", "unshard") not in rows
    assert ("fsdp1", "param", "summon_full_params") not in rows
    assert {("fsdp2", "param", "unshard"), ("fsdp1", "param", "summon_full_params")} <= staged
    assert {offload for _, offload, _ in staged} == {"param"}
    assert not [row["error"] for row in report["measured"] if row["error"]]


def test_each_row_has_its_time_its_bytes_its_ratio_and_its_memory(emulated: tuple[Run, dict[str, Any]]) -> None:
    _, report = emulated
    (whole,) = {row["full_bytes"] for row in report["measured"] if row["strategy"] == "fsdp2"}
    for row in report["measured"]:
        assert row["seconds"] > 0
        assert row["peak_extra_bytes"] > 0
        assert (row["ratio"] is None) == (
            row["method"] in ("fsdp_doctor:full_state_dict", "get_model_state_dict.full+cpu")
        )
    # The small shape's parameters in bf16, the tied one once.
    assert whole == 2 * (4096 * 256 + (3 * 256 * 768 + 2 * 256 * 256 + 2 * 256 * 128 + 2 * 256 + 2 * 32) + 256)
    assert all(rate > 0 for name, rate in report["links"].items() if name not in ("host_copy", "page_cache"))


def test_the_table_has_a_line_for_each_row(emulated: tuple[Run, dict[str, Any]]) -> None:
    run, report = emulated
    for row in report["measured"]:
        staged = "staged " if row["staging"] == "staged" else ""
        model = f"{row['strategy']} {row['offload']} {staged}{row['dtypes']}"
        assert [line for line in run.stdout.splitlines() if model in line and row["method"] in line]
    assert "2 ranks of emulated" in run.stdout


def test_a_smaller_bucket_takes_less_memory(tmp_path: pathlib.Path) -> None:
    needs_emulation()
    run, report = bench(
        tmp_path, "--device", "emulated", "--dtype", "bf16", "--method", "full_tensors", "--bucket-bytes", "256KiB"
    )
    assert run.code == 0, run.stderr
    (row,) = report["measured"]
    largest = 2 * 4096 * 256
    assert row["peak_extra_bytes"] <= 2 * (256 << 10) + largest


def test_a_users_method_is_measured_or_is_a_row_with_its_error(
    tmp_path: pathlib.Path,
) -> None:
    (tmp_path / "mine.py").write_text(
        "from fsdp_doctor import full_tensors\n"
        "def good(model):\n    yield from full_tensors(model)\n"
        "def broken(model):\n    raise KeyError('lm_head')\n",
    )
    run, report = bench(
        tmp_path, "--device", "cpu", "--method", "mine:good,mine:broken", env={"PYTHONPATH": str(tmp_path)}
    )
    assert run.code == 0, run.stderr
    good, bad = report["measured"]
    assert good["seconds"] > 0
    assert bad["error"] == "KeyError: 'lm_head'"


def test_fsdp1_without_an_accelerator_is_refused_in_a_sentence() -> None:
    run = forked_script(_SCRIPT, "--device", "cpu", "--strategy", "fsdp1")
    assert run.code == 3
    assert "FSDP1" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the program with options that it refuses, in this process, and returns what it says."""
    monkeypatch.syspath_prepend(_SCRIPT.parent)
    main = runpy.run_path(str(_SCRIPT))["main"]

    def run(*options: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(_SCRIPT), *options])
        with pytest.raises(SystemExit, match=r"^2$"):
            main()
        printed = capsys.readouterr()
        assert printed.out == ""
        return printed.err

    return run


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--model", "qwen9"), "--model qwen9: "),
        (("--offload", "some"), "--offload: 'some'"),
        (("--staging", "staged"), "--offload param"),
        (("--pinning", "unpinned"), "--offload policy"),
        (("--direction", "in", "--offload", "param", "--staging", "staged"), "--direction out"),
        (("--dtype", "int8"), "--dtype: 'int8'"),
        (("--bucket-bytes", "0"), "--bucket-bytes: '0'"),
        (("--method", "telepathy"), "'telepathy'"),
        (("--repeat", "0"), "--repeat: '0'"),
        (("--layers=-1",), "--layers: "),
        (("--direction", "up"), "--direction: invalid choice: 'up'"),
        (("--source", "files"), "--direction in"),
        (("--direction", "in", "--source", "tape"), "--source: 'tape'"),
        (("--direction", "in", "--method", "full_tensors"), "'full_tensors'"),
        (("--device", "tpu"), "--device: invalid choice: 'tpu'"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    refusal: Callable[..., str], options: tuple[str, ...], sentence: str
) -> None:
    assert sentence in refusal(*options)


@pytest.mark.parametrize(
    ("strategy", "method", "has"),
    [("fsdp1", "unshard", "summon_full_params"), ("fsdp2", "summon_full_params", "unshard")],
)
def test_a_method_unknown_to_the_strategy_is_refused_with_the_known_methods(
    refusal: Callable[..., str], strategy: str, method: str, has: str
) -> None:
    said = refusal("--strategy", strategy, "--method", method)
    assert f"{strategy} has no method '{method}' to measure; use one of full_tensors, " in said
    assert has in said


def test_cases_that_an_offload_breaks_are_named_and_other_cases_are_measured(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "bench.json"
    done = forked_script(_SCRIPT, *_CPU, "--offload", "none,param", "--method", "unshard", "--json", str(file), ranks=1)
    assert done.code == 0, done.stderr
    assert "fsdp2/param/unstaged/unshard" in done.stderr
    assert [row["offload"] for row in json.loads(file.read_text())["measured"]] == ["none"]


def test_nothing_measured_is_exit_code_3() -> None:
    done = forked_script(_SCRIPT, *_CPU, "--offload", "param", "--method", "unshard", ranks=1)
    assert done.code == 3
    assert "fsdp2/param/unstaged/unshard" in done.stderr


def test_nothing_but_errors_is_exit_code_3(tmp_path: pathlib.Path) -> None:
    (tmp_path / "broken_method.py").write_text("def broken(model):\n    raise KeyError('lm_head')\n")
    done = forked_script(_SCRIPT, *_CPU, "--method", "broken_method:broken", env={"PYTHONPATH": str(tmp_path)}, ranks=1)
    assert done.code == 3
    assert "KeyError: 'lm_head'" in done.stdout


def test_alone_it_starts_its_ranks(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "bench.json"
    options = ("--layers", "1", "--method", "full_tensors", "--ranks", "2", "--json", str(file))
    done = run(sys.executable, str(_SCRIPT), *_CPU, *options)
    assert done.code == 0, done.stderr
    assert json.loads(file.read_text())["world_size"] == 2
    assert done.left == []
