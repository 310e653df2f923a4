"""Every remedy of ``examine`` is carried out by a test on the state that it is for."""

from __future__ import annotations

import ast
import pathlib

from support.places import ROOT

_TESTS = pathlib.Path(__file__).parent
# Carried out with what they need: experts, quantized weights, and buffers that differ.
_ELSEWHERE = {
    "buffers-differ": "weights/extract/test_buffers_of_each_rank.py",
    "experts-hidden": "weights/extract/test_expert_groups.py",
    "unreadable": "weights/fsdp/test_unreadable_tensors.py",
}


def _list_kinds_with_remedies() -> set[str]:
    calls = [
        node
        for name in ("findings", "model_findings")
        for node in ast.walk(ast.parse((ROOT / "fsdp_doctor" / "examination" / f"{name}.py").read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Finding"
    ]
    keywords = [{keyword.arg: keyword.value for keyword in call.keywords} for call in calls]
    return {ast.literal_eval(found["kind"]) for found in keywords if "remedy" in found}


def _list_strings(file: pathlib.Path) -> set[str]:
    nodes = ast.walk(ast.parse(file.read_text()))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_every_remedy_is_executed() -> None:
    files = [*_TESTS.glob("test_examine_remedies*.py"), _TESTS / "test_examine_raised_steps.py"]
    executed = set().union(*map(_list_strings, files))
    kinds = _list_kinds_with_remedies()
    assert len(kinds) > 30
    assert kinds - executed == _ELSEWHERE.keys()
    assert all((_TESTS.parent / name).exists() for name in _ELSEWHERE.values())
