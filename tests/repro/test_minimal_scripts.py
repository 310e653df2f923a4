"""The scripts of ``fsdp-doctor repro --minimal``: short, of torch alone, and they show the very failure of the case."""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import pathlib
import re
import symtable
import sys

import pytest
from program import torchrun_script
from support.forked import ScriptRun, run_script
from support.inside import doctor
from support.places import ROOT

from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.cases import Case
from fsdp_doctor.matrix.selection import Selection, select
from fsdp_doctor.report.document import CaseResult, Report
from fsdp_doctor.report.journal import read_report
from fsdp_doctor.repro import render_minimal
from fsdp_doctor.repro.minimal import MOST_LINES, count_lines

# On the CPU, only the check of its entries needs the device.
_SHARDED = "fsdp2/none/unstaged/state_dict"
_OF_FULL_SCRIPTS = re.compile(r"os\._exit|store|Timer|faulthandler|fsdp_doctor|transformers")


@functools.cache
def _committed() -> Report:
    return read_report(ROOT / "examples" / "reports" / "emulated.json.gz")


def _case(case_id: str) -> Case:
    return select(Selection(case_ids=(case_id,)))[0]


def _result(case_id: str) -> CaseResult:
    return next(result for result in _committed().results if result.id == case_id)


def _run(directory: pathlib.Path, text: str) -> ScriptRun:
    """Runs a script as its docstring says: on so many ranks, of the CPU or of the emulated device."""
    file = directory / "script.py"
    file.write_text(text)
    ranks = re.search(r"--nproc-per-node (\d)", text)
    assert ranks is not None
    return run_script(file, "cpu" if "# on the CPU" in text else "emulated", int(ranks[1]))


def test_short_scripts_of_the_reports_bad_cases_are_of_torch_alone() -> None:
    shown = set()
    for bad in _committed().bad:
        try:
            text = render_minimal(bad.case)
        except UsageError:
            continue
        shown.add(bad.known)
        assert count_lines(text) <= MOST_LINES, bad.id
        assert max(map(len, text.splitlines())) <= 120, bad.id
        docstring, *body = ast.parse(text).body
        assert not _OF_FULL_SCRIPTS.search("\n".join(text.splitlines()[docstring.end_lineno :])), bad.id
        modules = {alias.name for node in body if isinstance(node, ast.Import) for alias in node.names}
        modules |= {node.module or "" for node in body if isinstance(node, ast.ImportFrom)}
        assert {module.partition(".")[0] for module in modules} <= {"torch", *sys.stdlib_module_names}, bad.id
        assert bad.id in " ".join(text.split())
    assert len(shown) > 20


def test_short_scripts_of_good_cases_define_every_name() -> None:
    good = [result.case for result in _committed().results if result.verdict.kind == "ok"]
    scripts = {}
    for case in [*good[::7], _case(_SHARDED)]:
        with contextlib.suppress(UsageError):
            scripts[case.id] = render_minimal(case)
    assert _SHARDED in scripts
    assert len(scripts) > 20
    assert {case_id: undefined for case_id, text in scripts.items() if (undefined := _list_undefined_names(text))} == {}


def _list_undefined_names(script: str) -> set[str]:
    """Lists the global names that a script reads and neither assigns nor imports."""
    top = symtable.symtable(script, "script", "exec")
    tables = [top]
    for table in tables:
        tables += table.get_children()
    of_top = top.get_symbols()
    defined = {name.get_name() for name in of_top if name.is_assigned() or name.is_imported() or name.is_namespace()}
    read = {
        name.get_name()
        for table in tables
        for name in table.get_symbols()
        if name.is_referenced() and (name.is_global() or table is top)
    }
    return read - defined - set(dir(builtins))


@pytest.mark.parametrize(
    "case_id",
    [
        _SHARDED,
        "fsdp1/none/unstaged/full_state_dict",
    ],
)
def test_a_short_script_of_a_good_case_does_not_show_it(tmp_path: pathlib.Path, case_id: str) -> None:
    run = _run(tmp_path, render_minimal(_case(case_id)))
    assert not any(run.codes), run.output
    assert "not shown" in run.output.splitlines(), run.output


@pytest.mark.parametrize(
    "case_id",
    [
        "fsdp2/policy/staged/state_dict",
        "fsdp2/policy/staged/fresh/dcp.load",
        "fsdp2/policy/staged/fresh/set_optimizer_state_dict.full",
        "fsdp2/policy/staged/fresh/load_state_dict.sharded",
        "fsdp2/policy+param/staged/fresh/load_state_dict.sharded+assign",
        "fsdp2/none/unstaged/fresh/load_state_dict.full",
        "fsdp2/none/unstaged/fresh/load_state_dict.full+assign",
        "fsdp2/none/unstaged/fresh/load_state_dict.sharded+assign",
        "fsdp2/none/unstaged/fresh/set_model_state_dict.broadcast.again",
        "fsdp2/none/unstaged/fresh/extra-key/set_model_state_dict.broadcast",
        "fsdp1/param/unstaged/full_state_dict",
        "fsdp1/param/unstaged/fresh/load_sharded_state_dict",
        "fsdp1/none/unstaged/fresh/load_full_state_dict.rank0",
        "fsdp1/none/unstaged/qwen3-tied/fresh/tied-twice/set_model_state_dict.broadcast",
    ],
)
def test_a_short_script_raises_the_reports_exception(tmp_path: pathlib.Path, case_id: str) -> None:
    result = _result(case_id)
    run = _run(tmp_path, render_minimal(result.case))
    assert "shown" in run.output.splitlines(), run.output
    assert not any(run.codes)
    holds = re.search(r"the optimizer holds \d+ of the model's", result.verdict.reason)
    if holds is not None:
        wanted = holds[0]
    else:
        assert result.failure is not None
        # Without the names of the model, which stand at the end: its class, or a list of parameters.
        first = f"{result.failure.type}: {result.failure.message}".splitlines()[0]
        wanted = re.sub(r" for \w+:$|: \[\(.*$", "", " ".join(first.split()))
    assert re.sub(r"emulated:\d", "emulated:0", wanted) in " ".join(run.output.split())


# By case: the words of the report for what is wrong, and those of the script, which has names of its own.
_WRONG = {
    "fsdp2/none/unstaged/summon_full_params": ("dtensor where a full tensor", r"wrong: 0\.weight, a DTensor"),
    "fsdp2/policy/staged/parameters.full_tensor": ("on cpu where", r"0\.weight is on cpu"),
    "fsdp2/param/unstaged/fresh/load_state_dict.sharded+assign": (
        "on emulated where cpu was promised",
        r"\(device\(type='emulated', index=0\), torch\.float32\), and it was \(device\(type='cpu'\)",
    ),
    "fsdp2/none/unstaged/fresh/meta/set_model_state_dict.broadcast": (
        "Cannot copy out of meta tensor",
        r"\['kept'\] are still on the meta device",
    ),
    "fsdp2/none/unstaged/fresh/meta/load_state_dict.sharded": (
        "meta device",
        r"\['0\.weight', .*\] are still on the meta device",
    ),
    "fsdp2/none/unstaged/fresh/fp32/set_model_state_dict.full": ("rounded to torch.bfloat16", "rounded to bfloat16"),
    "fsdp2/none/unstaged/fresh/missing-key/set_model_state_dict.full": ("not reported as missing", "was not loaded"),
    "fsdp2/none/unstaged/qwen3-tied/fresh/tied-twice/load_state_dict.sharded+assign": (
        "of its own where the names were tied",
        "no longer tied",
    ),
}


@pytest.mark.parametrize("case_id", _WRONG)
def test_a_short_script_finds_wrong_what_the_report_does(tmp_path: pathlib.Path, case_id: str) -> None:
    of_report, of_script = _WRONG[case_id]
    result = _result(case_id)
    assert of_report in f"{result.verdict.reason} {result.failure.message if result.failure else ''}"
    run = _run(tmp_path, render_minimal(result.case))
    assert "shown" in run.output.splitlines(), run.output
    assert re.search(of_script, run.output), run.output


@pytest.mark.parametrize(
    "case_id",
    [
        "fsdp2/none/unstaged/state_dict.full_tensor.to",
        "fsdp2/policy/unstaged/get_model_state_dict.full+cpu",
        "fsdp1/none/unstaged/full_state_dict",
        "fsdp2/none/unstaged/fresh/set_model_state_dict.full",
        "fsdp2/none/unstaged/fresh/load_state_dict.sharded",
        "fsdp2/none/unstaged/fresh/dcp.load",
        "fsdp2/none/unstaged/fresh/set_optimizer_state_dict.full",
    ],
)
def test_a_short_script_of_a_healthy_case_shows_nothing(tmp_path: pathlib.Path, case_id: str) -> None:
    run = _run(tmp_path, render_minimal(_case(case_id)))
    assert "not shown" in run.output.splitlines(), run.output
    assert not any(run.codes)


_NO_FULL_TENSORS = "fsdp2/none/unstaged/summon_full_params"


def test_a_short_script_shows_nothing_once_the_failure_is_gone(tmp_path: pathlib.Path) -> None:
    text = render_minimal(_case(_NO_FULL_TENSORS))
    (sharding,) = re.findall(r"^fully_shard\(.*\n", text, re.MULTILINE)
    run = _run(tmp_path, text.replace(sharding, ""))
    assert (run.codes, "not shown" in run.output.splitlines()) == ([0], True), run.output


def test_as_a_test_a_short_script_ends_with_1_where_it_fails(tmp_path: pathlib.Path) -> None:
    text = render_minimal(_case(_NO_FULL_TENSORS), as_test=True)
    assert _run(tmp_path, text).codes == [1]
    (sharding,) = re.findall(r"^fully_shard\(.*\n", text, re.MULTILINE)
    assert _run(tmp_path, text.replace(sharding, "")).codes == [0]


def test_a_short_script_runs_under_torchrun_as_its_docstring_says(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "r.py"
    assert doctor("repro", _NO_FULL_TENSORS, "--minimal", "--out", str(file)).code == 0
    assert "torchrun --nproc-per-node 1 r.py" in file.read_text()
    done = torchrun_script(file, tmp_path, ranks=1)
    assert (done.code, "shown" in done.stdout.splitlines()) == (0, True), done.stderr
    assert doctor("repro", _NO_FULL_TENSORS, "--minimal", "--as-test", "--out", str(file)).code == 0
    (tmp_path / "test").mkdir()
    assert torchrun_script(file, tmp_path / "test", ranks=1).code == 1


@pytest.mark.parametrize(
    ("case_id", "words"),
    [
        ("fsdp2/none/unstaged/qwen3-lora/lora.merged.read_late", "peft"),
        ("fsdp2/none/unstaged/qwen3-moe/state_dict", "experts"),
        ("fsdp2/none/unstaged/uneven/from_local", "watchdog"),
        ("fsdp2/none/unstaged/fresh/other-world/dcp.load", "another run"),
        ("fsdp2/none/unstaged/tp/state_dict", "the sharding tp"),
        ("trainer:fsdp2/cpu_offload/full/prepare", "framework"),
    ],
)
def test_a_case_without_a_short_script_is_refused_with_its_reason(case_id: str, words: str) -> None:
    done = doctor("repro", case_id, "--minimal")
    assert (done.code, done.stdout) == (2, "")
    assert words in done.stderr
