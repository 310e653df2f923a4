"""``fsdp-doctor repro``: standalone scripts that do what the case did, on the device that the matrix runs on."""

from __future__ import annotations

import ast
import functools
import json
import pathlib
import sys
import tempfile

import pytest
import torch
from program import TESTS, default_matrix, doctor, run, torchrun

from fsdp_doctor.errors import UsageError
from fsdp_doctor.known.catalogue import known_failures
from fsdp_doctor.matrix.cases import Case
from fsdp_doctor.matrix.paths import FIX, find_path, impossible
from fsdp_doctor.matrix.selection import Selection, select
from fsdp_doctor.report.document import CaseResult
from fsdp_doctor.repro import Expectation, expected, reported, script

_OK = Expectation(kind="ok")
# The first torch for which the emulated device can be built.
_emulated = pytest.mark.skipif(
    tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < (2, 10),
    reason="the emulated device needs torch 2.10",
)
# Cases beyond the default matrix, of other axes and other ways to fail; a hang would cost its minute.
_BEYOND = tuple(
    entry.evidence
    for entry in known_failures()
    if entry.reproduced and entry.verdict != "hang" and entry.shows_on(torch.__version__)
)


def _case(case_id: str) -> Case:
    return select(Selection(case_ids=(case_id,)))[0]


def _name(case_id: str) -> str:
    return case_id.replace("/", "--") + ".py"


@functools.cache
def _bad() -> tuple[CaseResult, ...]:
    return tuple(default_matrix().bad)


@functools.cache
def _runs() -> dict[str, tuple[list[int], str]]:
    """By script: the ranks' exit codes, and what they printed."""
    directory = pathlib.Path(tempfile.mkdtemp())
    for result in _bad():
        (directory / _name(result.id)).write_text(script(result.case, reported(result.case, default_matrix())))
    for case_id in _BEYOND:
        (directory / f"beyond--{_name(case_id)}").write_text(script(_case(case_id), expected(_case(case_id))))
    done = run(
        sys.executable,
        str(TESTS / "support" / "run_scripts.py"),
        str(directory),
        "emulated",
        env={"OMP_NUM_THREADS": "1"},
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert rows, done.stderr
    return {row["script"]: (row["codes"], row["output"]) for row in rows}


@_emulated
def test_the_script_of_every_bad_case_of_the_default_matrix_ends_as_the_case_did() -> None:
    assert len(_bad()) > 90
    failed = {result.id: _runs()[_name(result.id)] for result in _bad() if any(_runs()[_name(result.id)][0])}
    assert failed == {}


@_emulated
def test_it_fails_with_the_same_exception_or_the_same_wrong_tensors() -> None:
    """Looked at from outside: what the scripts printed, against the report's own words."""
    for result in _bad():
        output = " ".join(_runs()[_name(result.id)][1].split())
        failure = next((r.record.failure for r in result.ranks if r.record and r.record.failure), None)
        if result.verdict.kind in ("crash", "poisoned"):
            assert failure is not None
            message = " ".join(failure.message.split(": [(")[0].split())
            assert f"{result.verdict.kind}: {failure.type}: {message}" in output, result.id
        elif result.verdict.kind in ("wrong", "misplaced"):
            names, _, more = result.verdict.reason.partition(": ")[2].partition(" and ")
            count = len(names.split(", ")) + int(more.split()[0])
            assert f"{result.verdict.kind}: {count} entries: {names}" in output, result.id
        else:
            assert f"{result.verdict.kind}: " in output, result.id


@_emulated
@pytest.mark.parametrize("case_id", _BEYOND)
def test_the_script_of_an_entrys_evidence_ends_as_the_catalogue_says(case_id: str) -> None:
    codes, output = _runs()[f"beyond--{_name(case_id)}"]
    assert codes == [0, 0], output


@_emulated
def test_a_script_that_expects_something_else_says_so_and_ends_with_1(tmp_path: pathlib.Path) -> None:
    case = _case("fsdp2/none/unstaged/state_dict.to.full_tensor")
    wrong = Expectation(kind="crash", message="RuntimeError: nothing raises this")
    (tmp_path / "ok.py").write_text(script(case, _OK))
    (tmp_path / "wrong.py").write_text(script(case, wrong))
    done = run(
        sys.executable,
        str(TESTS / "support" / "run_scripts.py"),
        str(tmp_path),
        "emulated",
        env={"OMP_NUM_THREADS": "1"},
    )
    rows = {row["script"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert (rows["ok.py"]["codes"], rows["wrong.py"]["codes"]) == ([0, 0], [1, 1])
    assert rows["ok.py"]["output"].count("ok: PASS") == 2


def test_a_script_runs_under_torchrun_as_its_docstring_says(tmp_path: pathlib.Path) -> None:
    """On the CPU, without anything of ours in the process."""
    file = tmp_path / "r.py"
    made = doctor("repro", "fsdp2/none/unstaged/summon_full_params", "--out", str(file))
    assert (made.code, made.stdout) == (0, "")
    assert "torchrun --nproc-per-node 2 r.py" in file.read_text()
    done = torchrun("--nproc-per-node=2", str(file), env={"OMP_NUM_THREADS": "1", "PYTHONPATH": ""}, cwd=tmp_path)
    assert (done.code, "wrong: 25 entries: model.embed_tokens.weight" in done.stdout) == (0, True), done.stderr


def test_scripts_of_the_whole_matrix_parse_and_import_torch_transformers_and_peft_alone() -> None:
    """Every seventh case: there are more than five thousand, and seven is prime to the numbers of paths."""
    allowed = {"torch", "transformers", "peft"} | sys.stdlib_module_names
    for case in select(Selection(full=True))[::7]:
        if impossible(find_path(case.path, case.scenario.version), case.scenario):
            continue
        tree = ast.parse(script(case, expected(case)))
        imported = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        modules = {alias.name for node in imported if isinstance(node, ast.Import) for alias in node.names}
        modules |= {node.module or "" for node in imported if isinstance(node, ast.ImportFrom)}
        assert {module.partition(".")[0] for module in modules} <= allowed, case.id


@_emulated
def test_the_scripts_of_the_default_matrix_are_under_120_lines_and_have_versions_and_command() -> None:
    for result in _bad():
        text = script(result.case, reported(result.case, default_matrix()))
        assert len(text.splitlines()) < 120, result.id
        head = " ".join((ast.get_docstring(ast.parse(text)) or "").split())
        assert f"torch {torch.__version__}" in head
        assert "torchrun --nproc-per-node" in head
        assert result.id in head


def test_a_hang_is_reported_by_the_script_itself() -> None:
    text = script(
        _case("fsdp2/none/unstaged/uneven/from_local"), expected(_case("fsdp2/none/unstaged/uneven/from_local"))
    )
    assert 'EXPECTED = "hang"' in text
    assert "threading.Timer(60, finish" in text


@pytest.mark.parametrize(
    ("arguments", "expected_words"),
    [
        (["fsdp2/policy/staged/state_dikt"], "near it: state_dict"),
        (["fsdp2/policy/stagd/state_dict"], "near it: staged"),
        (["fsdp2/policy/staged/local_state_dict"], "has no path"),
        ([f"fsdp2/policy/staged/{FIX}"], "fsdp-doctor's own"),
        (["fsdp2/policy/staged/my.module:function"], "your own"),
        (["fsdp2/policy/staged/state_dict", "--out", "/nowhere/at/all.py"], "/nowhere/at"),
        (["fsdp2/policy/staged/state_dict", "--report", "/nowhere.json"], "cannot read the report"),
    ],
)
def test_what_cannot_be_written_is_refused_in_a_sentence(arguments: list[str], expected_words: str) -> None:
    done = doctor("repro", *arguments)
    assert (done.code, done.stdout) == (2, "")
    assert expected_words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_case_that_cannot_be_tried_is_refused_with_the_probes_reason() -> None:
    done = doctor("repro", "fsdp1-orig/none/unstaged/local_state_dict")
    assert (done.code, done.stdout) == (2, "")
    assert "torch has LOCAL_STATE_DICT only for use_orig_params=False" in done.stderr


@_emulated
def test_an_exception_before_the_cycle_ends_a_script_that_expects_a_hang_with_1(tmp_path: pathlib.Path) -> None:
    case = _case("fsdp2/none/unstaged/uneven/from_local")
    text = script(case, expected(case))
    (tmp_path / "hang.py").write_text(text.replace("    loss.backward()", '    raise RuntimeError("planted")'))
    done = run(
        sys.executable,
        str(TESTS / "support" / "run_scripts.py"),
        str(tmp_path),
        "emulated",
        env={"OMP_NUM_THREADS": "1"},
    )
    row = json.loads(done.stdout)
    assert row["codes"] == [1, 1], row
    assert "planted" in row["output"]


@_emulated
def test_a_scripts_own_check_does_not_hide_the_race_that_it_is_to_show(tmp_path: pathlib.Path) -> None:
    case = _case("fsdp2/param/unstaged/nonblocking/get_model_state_dict.sharded")
    (tmp_path / "race.py").write_text(script(case, expected(case)))
    done = run(
        sys.executable,
        str(TESTS / "support" / "run_scripts.py"),
        str(tmp_path),
        "emulated",
        env={"OMP_NUM_THREADS": "1"},
    )
    assert json.loads(done.stdout)["codes"] == [0, 0], done.stdout


@_emulated
def test_a_case_that_the_report_does_not_have_is_refused() -> None:
    with pytest.raises(UsageError, match="the report has no case"):
        reported(_case("fsdp1-orig/none/unstaged/state_dict"), default_matrix())


def test_repro_imports_no_torch() -> None:
    program = (
        "import sys; from fsdp_doctor.repro import expected, script; "
        "from fsdp_doctor.matrix.selection import Selection, select; "
        "case = select(Selection(case_ids=('fsdp2/policy/staged/state_dict',)))[0]; script(case, expected(case)); "
        "assert 'torch' not in sys.modules"
    )
    done = run(sys.executable, "-c", program)
    assert done.code == 0, done.stderr
