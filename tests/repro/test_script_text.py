"""The scripts that ``fsdp-doctor repro`` writes, as text: they need torch alone, and refusals are sentences."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator

import pytest
from support.inside import doctor
from support.places import ROOT
from support.reports import report, result

from fsdp_doctor.errors import UsageError
from fsdp_doctor.machine.versions import read_installed_versions
from fsdp_doctor.matrix.cases import Case
from fsdp_doctor.matrix.methods import FIX, explain_impossible, find_direction, find_method
from fsdp_doctor.matrix.selection import Selection, select
from fsdp_doctor.report.journal import read_report
from fsdp_doctor.repro import expectation, find_expected, read_reported, render_script
from fsdp_doctor.repro.script import prune

# The longest extraction has what moves FSDP1's units and what compares names and values.
_MOST_LINES = {"out": 136, "in": 178}


def _case(case_id: str) -> Case:
    return select(Selection(case_ids=(case_id,)))[0]


def _list_statements(node: ast.AST) -> Iterator[ast.AST]:
    """Lists all statements below ``node`` without a look into expressions, which import nothing."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            yield child
            yield from _list_statements(child)


def test_scripts_of_the_matrix_import_only_torch_and_what_cases_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every thirteenth case: there are thousands, and thirteen is prime to the numbers of methods."""
    # The packages' metadata, read for each case, would take half of the time.
    installed = read_installed_versions(("torch", "transformers", "peft"))
    monkeypatch.setattr(expectation, "read_installed_versions", lambda packages: installed)
    allowed = {"torch", "transformers", "peft", "torchao"} | sys.stdlib_module_names
    refusals = set()
    for case in select(Selection(level="full"))[::13]:
        if explain_impossible(find_method(case.method, case.scenario.version), case.scenario):
            continue
        try:
            text = render_script(case, find_expected(case))
        except UsageError as refusal:
            refusals.add(str(refusal).partition("': ")[2])
            continue
        script = ast.parse(text)
        compile(script, case.id, "exec")
        imported = [node for node in _list_statements(script) if isinstance(node, ast.Import | ast.ImportFrom)]
        modules = {alias.name for node in imported if isinstance(node, ast.Import) for alias in node.names}
        modules |= {node.module or "" for node in imported if isinstance(node, ast.ImportFrom)}
        assert {module.partition(".")[0] for module in modules} <= allowed, case.id
    assert refusals <= set(_REFUSALS.values())


# Why there is no script, by a case that shows it.
_REFUSALS = {
    "fsdp1/none/unstaged/fresh/hsdp/set_optimizer_state_dict.full": (
        "torch cannot save the optimizer's state of FSDP1's replicas"
    ),
    "fsdp2/none/unstaged/qwen3-qlora/fp32-compute/state_dict": "no script can be written for the model qwen3-qlora",
    "fsdp2/none/unstaged/qwen3-qlora-bf16/state_dict": "no script can be written for the model qwen3-qlora-bf16",
    "fsdp2/none/unstaged/qwen3-float8/state_dict": "no script can be written for the model qwen3-float8",
    "fsdp2/none/unstaged/qwen3-mxfp8/state_dict": "no script can be written for the model qwen3-mxfp8",
    "fsdp2/moved/unstaged/state_dict": "no script can be written for the offload moved",
    "fsdp2/by-phase/unstaged/state_dict": "no script can be written for the offload by-phase",
    "fsdp2/by-parameter/unstaged/state_dict": "no script can be written for the offload by-parameter",
    "fsdp2/partial/unstaged/fresh/meta/dcp.load": (
        "no script can be written for a partly offloaded model on the meta device"
    ),
    "fsdp2/none/unstaged/packed/state_dict.full_tensor.to": (
        "no script can be written for a case with a consumer, because a script reads each entry when it comes"
    ),
    "fsdp2/none/unstaged/qwen3-moe/fresh/hub/load_state_dict.full+assign": (
        "a script saves its checkpoint itself, not with save_pretrained"
    ),
    "fsdp2/none/unstaged/qwen3-moe/hidden-experts/get_optimizer_state_dict": (
        "no script can be written, because only fsdp-doctor can see that the optimizer's state has other values"
    ),
    "fsdp2/none/unstaged/after-raised-backward/dcp.load": (
        "no script can be written, because only fsdp-doctor can see the effect of the load on the next step"
    ),
    "fsdp2/none/unstaged/tp/state_dict": "no script can be written for the sharding tp",
    "fsdp2/none/unstaged/replicate/state_dict": "no script can be written for the sharding replicate",
    **{
        f"fsdp2/none/unstaged/qwen3-moe/{kind}/state_dict": f"no script can be written for the sharding {kind}"
        for kind in ("experts", "2d", "hidden-experts")
    },
}


@pytest.mark.parametrize("case_id", _REFUSALS)
def test_a_case_without_a_script_is_refused_with_its_reason(case_id: str) -> None:
    case = _case(case_id)
    with pytest.raises(UsageError, match=re.escape(_REFUSALS[case_id])):
        render_script(case, find_expected(case))


def test_scripts_of_bad_cases_are_short_and_name_case_versions_and_command() -> None:
    committed = read_report(ROOT / "examples" / "reports" / "emulated.json.gz")
    for bad in committed.bad:
        text = render_script(bad.case, read_reported(bad.case, committed))
        assert len(text.splitlines()) <= _MOST_LINES[find_direction(bad.case)], bad.id
        head = " ".join((ast.get_docstring(ast.parse(text)) or "").split())
        assert all(part in head for part in ("torch 2.13", "torchrun --nproc-per-node", bad.id))


def test_a_hang_is_reported_by_the_script_itself() -> None:
    case = _case("fsdp2/none/unstaged/uneven/from_local")
    text = render_script(case, find_expected(case))
    assert 'EXPECTED = "hang"' in text
    assert "threading.Timer(60, finish" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fsdp2/policy/staged/state_dikt"], "did you mean state_dict"),
        (["fsdp2/policy/stagd/state_dict"], "did you mean staged"),
        (["fsdp2/policy/staged/local_state_dict"], "local_state_dict"),
        ([f"fsdp2/policy/staged/{FIX}"], "fsdp-doctor's own"),
        (["fsdp2/policy/staged/my.module:function"], "your own"),
        (["fsdp1-orig/none/unstaged/local_state_dict"], "LOCAL_STATE_DICT only for use_orig_params=False"),
        (["fsdp1/none/unstaged/fresh/size1/dcp.load.model+optimizer"], "cannot save the optimizer's state"),
        (["fsdp1-orig/optimizer/unstaged/size1/nonblocking/get_optimizer_state_dict"], "only fsdp-doctor can see"),
        (["fsdp2/policy/staged/state_dict", "--out", "/nowhere/at/all.py"], "/nowhere/at"),
        (["fsdp2/policy/staged/state_dict", "--report", "/nowhere.json"], "cannot read the report"),
    ],
)
def test_a_case_without_a_script_is_refused_in_a_sentence(arguments: list[str], words: str) -> None:
    done = doctor("repro", *arguments)
    assert (done.code, done.stdout) == (2, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_script_sees_the_place_of_an_optimizers_state() -> None:
    assert find_expected(_case("fsdp1-orig/optimizer/unstaged/size1/get_optimizer_state_dict")).kind == "misplaced"


@pytest.mark.parametrize(
    ("case_id", "reason"),
    [
        ("state_dict", "the extraction changed 3 of 90 parts of the training state: lm_head.weight"),
        (
            "fresh/load_state_dict.sharded",
            "the next training step ends otherwise than that of a run which had this state from the start: lm_head",
        ),
        ("fresh/load_state_dict.sharded", "requires_grad is False where it was True: lm_head.weight"),
    ],
)
def test_a_finding_of_a_report_that_a_script_cannot_make_is_refused(case_id: str, reason: str) -> None:
    case = _case(f"fsdp2/none/unstaged/{case_id}")
    with pytest.raises(UsageError, match=f"only fsdp-doctor can see that {reason.partition(':')[0]}"):
        read_reported(case, report(result(case, "poisoned", reason)))


def test_a_case_that_the_report_does_not_have_is_refused() -> None:
    with pytest.raises(UsageError, match="the report has no case"):
        read_reported(_case("fsdp1-orig/none/unstaged/state_dict"), report())


_SOURCE = '''\
"""What it is for.

    a command
"""
import os, re
import torch, torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

WIDTH = 2  # wide
HEIGHT = 3

"""A module that was pasted in."""
from __future__ import annotations
from collections.abc import Iterator
from torch.distributed.tensor import DTensor

def unused():
    return re, HEIGHT

@torch.no_grad()
def used(tensor: DTensor) -> Iterator[int]:

    yield helper(tensor)

def helper(tensor):
    return WIDTH * dist.get_rank()

if __name__ == "__main__":
    used(torch.ones(1))
'''
_PRUNED = '''\
"""What it is for.

    a command
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

WIDTH = 2  # wide

@torch.no_grad()
def used(tensor: DTensor) -> Iterator[int]:
    yield helper(tensor)

def helper(tensor):
    return WIDTH * dist.get_rank()

if __name__ == "__main__":
    used(torch.ones(1))
'''


def test_a_script_keeps_what_its_main_block_uses_in_the_usual_order() -> None:
    assert prune(_SOURCE) == prune(_PRUNED) == _PRUNED
    with pytest.raises(ValueError, match="defined twice: used"):
        prune(_SOURCE.replace("def unused", "def used"))
