"""The scripts that ``fsdp-doctor repro`` writes, as text, and what it refuses."""

from __future__ import annotations

import ast
import sys

import pytest
from support.inside import doctor

from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.cases import Case
from fsdp_doctor.matrix.paths import FIX, find_path, impossible
from fsdp_doctor.matrix.selection import Selection, select
from fsdp_doctor.repro import expected, script


def _case(case_id: str) -> Case:
    return select(Selection(case_ids=(case_id,)))[0]


def test_scripts_of_the_whole_matrix_parse_and_import_torch_transformers_and_peft_alone() -> None:
    """Every seventh case: there are more than five thousand, and seven is prime to the numbers of paths."""
    allowed = {"torch", "transformers", "peft"} | sys.stdlib_module_names
    refusals = set()
    for case in select(Selection(level="full"))[::7]:
        if impossible(find_path(case.path, case.scenario.version), case.scenario):
            continue
        try:
            tree = ast.parse(script(case, expected(case)))
        except UsageError as refusal:
            refusals.add(str(refusal).partition("': ")[2])
            continue
        imported = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        modules = {alias.name for node in imported if isinstance(node, ast.Import) for alias in node.names}
        modules |= {node.module or "" for node in imported if isinstance(node, ast.ImportFrom)}
        assert {module.partition(".")[0] for module in modules} <= allowed, case.id
    assert refusals == {
        "torch cannot save the optimizer's state of FSDP1's replicas",
        *(f"there is no script of a model that is sharded as {kind}" for kind in ("tp", "experts", "replicate")),
    }


def test_a_hang_is_reported_by_the_script_itself() -> None:
    text = script(
        _case("fsdp2/none/unstaged/uneven/from_local"), expected(_case("fsdp2/none/unstaged/uneven/from_local"))
    )
    assert 'EXPECTED = "hang"' in text
    assert "threading.Timer(60, finish" in text


@pytest.mark.parametrize(
    ("arguments", "expected_words"),
    [
        (["fsdp2/policy/staged/state_dikt"], "did you mean state_dict"),
        (["fsdp2/policy/stagd/state_dict"], "did you mean staged"),
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
