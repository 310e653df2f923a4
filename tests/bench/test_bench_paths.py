"""fsdp-doctor bench --path: what a strategy or an offload lacks is refused or named, never an empty table."""

from __future__ import annotations

import json
import pathlib

import pytest
from program import forked_doctor
from support.inside import doctor

_BENCH = ("bench", "--device", "cpu", "--repeat", "1")


@pytest.mark.parametrize(
    ("strategy", "path", "has"),
    [("fsdp1", "unshard", "summon_full_params"), ("fsdp2", "summon_full_params", "unshard")],
)
def test_a_path_that_no_strategy_has_is_refused_with_those_that_it_has(strategy: str, path: str, has: str) -> None:
    done = doctor("bench", "--strategy", strategy, "--path", path)
    assert (done.code, done.stdout) == (2, "")
    assert f"{strategy} has no method '{path}' to measure; use one of full_tensors, " in done.stderr
    assert has in done.stderr


def test_what_an_offload_is_known_to_break_is_named_and_the_rest_is_measured(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "bench.json"
    done = forked_doctor(*_BENCH, "--offload", "none,param", "--path", "unshard", "--json", str(file), ranks=1)
    assert done.code == 0, done.stderr
    assert "fsdp2/param/unstaged/unshard" in done.stderr
    assert [row["offload"] for row in json.loads(file.read_text())["measured"]] == ["none"]


def test_nothing_measured_is_exit_code_3() -> None:
    done = forked_doctor(*_BENCH, "--offload", "param", "--path", "unshard", ranks=1)
    assert done.code == 3
    assert done.stderr.startswith("note: ")
    assert "fsdp2/param/unstaged/unshard" in done.stderr


def test_nothing_but_errors_is_exit_code_3(tmp_path: pathlib.Path) -> None:
    (tmp_path / "broken_path.py").write_text("def broken(model):\n    raise KeyError('lm_head')\n")
    path = {"PYTHONPATH": str(tmp_path)}
    done = forked_doctor(*_BENCH, "--path", "broken_path:broken", env=path, ranks=1)
    assert done.code == 3
    assert "KeyError: 'lm_head'" in done.stdout
