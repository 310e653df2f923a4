"""The scripts of loading cases do what the case did, on the device that the matrix runs on."""

from __future__ import annotations

import ast
import functools
import pathlib

import pytest
from program import default_matrix, doctor, torchrun_script
from support.forked import ScriptRun, run_script

from fsdp_doctor.matrix.cases import Case
from fsdp_doctor.matrix.paths import find_path
from fsdp_doctor.matrix.selection import Selection, select
from fsdp_doctor.report.document import CaseResult
from fsdp_doctor.repro import Expectation, expected, reported, script

_OK = Expectation(kind="ok")
# By how they end, the paths in turn; FSDP2 first.
_SAMPLE = (
    "fsdp2/none/unstaged/fresh/load_state_dict.full",
    "fsdp2/param/unstaged/fresh/load_state_dict.full+assign",
    "fsdp2/policy/staged/fresh/to_empty.broadcast",
    "fsdp2/none/unstaged/fresh/extra-key/set_model_state_dict.broadcast",
    "fsdp1/param/unstaged/fresh/set_model_state_dict.sharded",
    "fsdp1/none/unstaged/fresh/load_full_state_dict.rank0",
    "fsdp2/policy/unstaged/fresh/meta/set_model_state_dict.broadcast+cpu",
    "fsdp2/none/unstaged/fresh/meta/dcp.load",
    "fsdp2/param/unstaged/fresh/dcp.load.fresh_optimizer",
    "fsdp2/none/unstaged/fresh/missing-key/set_model_state_dict.broadcast+lenient",
    "fsdp2/none/unstaged/fresh/bf16/load_state_dict.sharded+assign",
    "fsdp2/none/unstaged/fresh/fp32/rank_files.model+optimizer",
    "fsdp1/none/unstaged/fresh/fp32/load_full_state_dict",
    "fsdp2/none/unstaged/qwen3-tied/fresh/tied-twice/load_state_dict.sharded+assign",
    "fsdp2/policy/staged/fresh/rank_files",
    "fsdp2/param/unstaged/fresh/distribute_tensor.assign",
    "fsdp2/param/unstaged/fresh/set_optimizer_state_dict.sharded",
    "fsdp1/param/unstaged/fresh/optim_state_dict_to_load.full",
    "fsdp2/none/unstaged/fresh/bf16/distribute_tensor.assign",
    "fsdp2/none/unstaged/fresh/missing-key/dcp.load",
    "fsdp2/none/unstaged/fresh/extra-key/set_model_state_dict.broadcast+cpu",
    "fsdp1/none/unstaged/fresh/other-world/rank_files.model+optimizer",
    "fsdp1/none/unstaged/fresh/extra-key/load_full_state_dict.rank0",
    "fsdp2/none/unstaged/fresh/meta/to_empty.broadcast",
    "fsdp2/policy/unstaged/fresh/dcp.load.model+optimizer",
    "fsdp2/none/unstaged/fresh/other-world/dcp.load.model+optimizer",
    "fsdp1/param/staged/fresh/rank_files.model+optimizer",
    "fsdp1/policy/unstaged/fresh/optim_state_dict_to_load.sharded",
    "fsdp1/none/unstaged/fresh/bf16/load_sharded_state_dict",
    "fsdp1/policy/unstaged/fresh/load_full_state_dict",
)


@functools.cache
def _result(case_id: str) -> CaseResult:
    return next(result for result in default_matrix().results if result.id == case_id)


def _case(case_id: str) -> Case:
    return select(Selection(case_ids=(case_id,)))[0]


def _run(directory: pathlib.Path, text: str) -> ScriptRun:
    """A rank that waits for one which raised is not waited for as long as by a user."""
    file = directory / "script.py"
    file.write_text(text.replace("threading.Timer(60,", "threading.Timer(20,"))
    return run_script(file)


@pytest.mark.parametrize("case_id", _SAMPLE)
def test_the_script_of_a_loading_case_ends_as_the_case_did(tmp_path: pathlib.Path, case_id: str) -> None:
    result = _result(case_id)
    run = _run(tmp_path, script(result.case, reported(result.case, default_matrix())))
    assert run.codes == [0, 0], run.output
    assert f"] {result.verdict.kind}: " in run.output


def test_the_sample_has_every_kind_of_verdict_that_the_default_matrix_has_on_either_fsdp() -> None:
    loads = [r for r in default_matrix().results if find_path(r.case.path, r.case.scenario.version).direction == "in"]
    kinds = {(r.case.scenario.version, r.verdict.kind) for r in loads}
    assert kinds == {(_case(case_id).scenario.version, _result(case_id).verdict.kind) for case_id in _SAMPLE}


def test_every_loading_case_of_the_default_matrix_has_a_script_that_compiles() -> None:
    for case in select(Selection(directions=("in",))):
        compile(script(case, expected(case)), case.id, "exec")


def test_scripts_of_bad_loads_have_at_most_175_lines_and_have_versions_and_command() -> None:
    for result in default_matrix().bad:
        if find_path(result.case.path, result.case.scenario.version).direction == "in":
            text = script(result.case, reported(result.case, default_matrix()))
            assert len(text.splitlines()) <= 175, result.id
            head = " ".join((ast.get_docstring(ast.parse(text)) or "").split())
            assert "torchrun --nproc-per-node 2" in head
            assert result.id in head


def test_a_load_that_does_nothing_is_not_ok(tmp_path: pathlib.Path) -> None:
    case = _case("fsdp2/none/unstaged/fresh/set_model_state_dict.full")
    text = script(case, _OK)
    assert _run(tmp_path, text).codes == [0, 0]
    run = _run(tmp_path, text.replace("        set_model_state_dict_full(model, state)", "        pass"))
    assert run.codes == [1, 1]
    assert "incomplete: 25 entries: model.embed_tokens.weight, " in run.output


@pytest.mark.parametrize(
    ("case_id", "load"),
    [
        ("fsdp2/none/unstaged/fresh/set_optimizer_state_dict.full", "set_optimizer_state_dict_full"),
        ("fsdp1/none/unstaged/fresh/optim_state_dict_to_load.full", "optim_state_dict_to_load_full"),
    ],
)
def test_one_other_moment_is_not_ok(tmp_path: pathlib.Path, case_id: str, load: str) -> None:
    call = f"        {load}(model, optimizer, state)"
    planted = "        next(iter(optimizer.state.values()))['exp_avg'].mul_(2)"
    text = script(_case(case_id), _OK)
    assert text.count(call) == 1
    run = _run(tmp_path, text.replace(call, f"{call}\n{planted}"))
    assert run.codes == [1, 1]
    assert "wrong: 1 entries: " in run.output


def test_a_checkpoint_that_one_rank_refuses_and_another_loads_is_not_ok(tmp_path: pathlib.Path) -> None:
    case = _case("fsdp2/none/unstaged/fresh/extra-key/load_state_dict.sharded")
    text = script(case, Expectation(kind="ok", message="Unexpected key"))
    assert _run(tmp_path, text).codes == [0, 0]
    call = "        load_state_dict(model, state)"
    assert text.count(call) == 1
    run = _run(tmp_path, text.replace(call, f"        state.pop('extra.weight') if dist.get_rank() else None\n{call}"))
    assert run.codes == [1, 1]
    assert "[rank0] crash: RuntimeError: " in run.output


def test_a_checkpoint_that_every_rank_refuses_is_no_crash(tmp_path: pathlib.Path) -> None:
    case = _case("fsdp2/none/unstaged/fresh/extra-key/load_state_dict.sharded")
    run = _run(tmp_path, script(case, Expectation(kind="crash", message="Unexpected key")))
    assert run.codes == [1, 1]
    assert "[rank0] refused: RuntimeError: " in run.output
    assert run.output.count("] refused: RuntimeError: ") == 2


def test_a_loading_script_runs_under_torchrun_without_anything_of_ours_in_the_process(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "r.py"
    made = doctor("repro", "fsdp2/none/unstaged/fresh/dcp.load.model+optimizer", "--out", str(file))
    assert (made.code, made.stdout) == (0, "")
    done = torchrun_script(file, tmp_path)
    assert (done.code, done.stdout.count("ok: PASS")) == (0, 2), done.stderr
