"""Tests what a method under test is called with: the model, and by name what its further parameters ask for."""

from __future__ import annotations

import ast
import pathlib
import re
from typing import Any

import pytest
import torch
from program import forked_doctor, probe
from support.places import ROOT

from fsdp_doctor.case.methods.lookup import (
    MethodArguments,
    call_by_name,
    find_function,
    list_requested_arguments,
    load_user_method,
)
from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.methods import METHODS

_MODEL = torch.nn.Linear(2, 2)
_DEVICE = torch.device("cpu")
_OPTIMIZER = torch.optim.SGD(_MODEL.parameters(), lr=0.1)
_GIVEN = MethodArguments(model=_MODEL, device=_DEVICE, optimizer=_OPTIMIZER)
_MINE = """\
def weights(wrapped, optimizer, device, suffix=""):
    assert optimizer.state, "the optimizer of the training steps"
    for name, parameter in wrapped.named_parameters():
        yield name + suffix, parameter.full_tensor().to(device)

def asks_for_a_tokenizer(model, tokenizer):
    return {}
"""
_SCENARIO = ("--strategy", "fsdp2", "--offload", "none", "--staging", "unstaged", "--method", "state_dict")


def test_the_model_comes_first_whatever_its_parameter_is_called() -> None:
    def method(wrapped: Any) -> Any:
        return wrapped

    assert call_by_name(method)(_GIVEN) is _MODEL


def test_further_parameters_get_the_argument_of_their_name() -> None:
    def method(model: Any, device: Any, *, optimizer: Any) -> Any:
        return model, device, optimizer

    assert call_by_name(method)(_GIVEN) == (_MODEL, _DEVICE, _OPTIMIZER)


def test_a_default_is_kept_although_its_parameter_is_named_like_an_argument() -> None:
    def method(model: Any, device: str = "meta", **others: Any) -> Any:
        return device, others

    assert call_by_name(method)(_GIVEN) == ("meta", {})


def test_a_callable_without_a_signature_gets_the_model_alone() -> None:
    assert call_by_name(type)(_GIVEN) is torch.nn.Linear


@pytest.mark.parametrize("row", [row for row in METHODS if "lora" not in row.function], ids=lambda row: row.name)
def test_every_method_of_the_table_asks_for_what_there_is_alone(row: Any) -> None:
    of_loads = {"state", "buffers"} if row.direction == "in" else set()
    assert (
        set(list_requested_arguments(find_function(row)))
        <= {"optimizer", "device", "scratch", "control", "experts", "train"} | of_loads
    )


@pytest.mark.parametrize("row", [row for row in METHODS if row.direction == "in"], ids=lambda row: row.name)
def test_every_method_that_loads_asks_for_its_checkpoint(row: Any) -> None:
    if "lora" in row.function:
        pytest.importorskip("peft")
    assert "state" in list_requested_arguments(find_function(row))
    assert ("optimizer" in list_requested_arguments(find_function(row))) is (row.contract.loads != "model")


def test_the_modules_of_the_methods_import_nothing_of_ours() -> None:
    """A script of ``fsdp-doctor repro`` has their functions as they stand."""
    room = ROOT / "fsdp_doctor" / "case" / "methods"
    modules = [*room.glob("on_*.py"), *room.glob("into_*.py")]
    assert len(modules) == 5
    for module in modules:
        for node in ast.walk(ast.parse(module.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or "."] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.startswith(("fsdp_doctor", "."))], module


def test_a_users_function_with_an_unknown_parameter_is_refused_at_load(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_loaded.py").write_text(_MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match="no argument 'tokenizer'"):
        load_user_method("mine_loaded:asks_for_a_tokenizer")
    load_user_method("mine_loaded:weights")
    with pytest.raises(UsageError, match="no argument 'optimizer'"):
        load_user_method("mine_loaded:weights", ("model", "device"))


def test_a_users_function_is_given_the_scenarios_optimizer_and_device(tmp_path: pathlib.Path) -> None:
    (tmp_path / "mine.py").write_text(_MINE)
    done = probe(tmp_path, *_SCENARIO, "--method", "mine:weights", env={"PYTHONPATH": str(tmp_path)})
    assert done.kind("mine:weights") == "ok", done.stdout


@pytest.mark.parametrize(
    ("command", "method", "parameter"),
    [
        (("probe", "--device", "cpu", *_SCENARIO), "mine:asks_for_a_tokenizer", "tokenizer"),
    ],
)
def test_it_is_said_in_a_sentence_which_parameter_cannot_be_given(
    tmp_path: pathlib.Path, command: tuple[str, ...], method: str, parameter: str
) -> None:
    (tmp_path / "mine.py").write_text(_MINE)
    done = forked_doctor(*command, "--method", method, env={"PYTHONPATH": str(tmp_path)})
    assert (done.code, done.stdout) == (2, "")
    assert f"a method has no argument {parameter!r}" in re.sub(r"\s+", " ", done.stderr)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        ("no_such_module:function", "cannot import no_such_module: ModuleNotFoundError"),
        ("faults.values:no_such_function", "no_such_function in faults.values does not exist"),
        ("faults.values:not_a_function", "is a str, not a function"),
    ],
)
def test_what_is_no_function_of_the_users_is_a_usage_error(method: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as refusal:
        load_user_method(method)
    assert "\n" not in str(refusal.value)
