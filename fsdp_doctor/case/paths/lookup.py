"""From the name of a path to the function behind it, the user's own included."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from fsdp_doctor.case.paths.inputs import Subject
from fsdp_doctor.errors import UsageError
from fsdp_doctor.extract import full_tensors
from fsdp_doctor.matrix.contracts import Contract
from fsdp_doctor.matrix.paths import Path

PathFunction = Callable[[Subject], Any]


def function_of(path: Path) -> PathFunction:
    """The function behind a row of the table. peft is imported only for the paths of models with adapters."""
    module, _, name = path.function.partition(":")
    function: PathFunction = getattr(importlib.import_module(f"fsdp_doctor.case.paths.{module}"), name)
    return function


def fix(subject: Subject) -> Any:
    return full_tensors(subject.model)


def load_user_path(name: str) -> tuple[PathFunction, Contract]:
    """Imports ``module:function``. Raises UsageError if it does not import or is no function.

    The function is called with the sharded model alone and returns a mapping, or yields
    (name, tensor). What it promises is what ``fsdp_doctor.promises`` says of it.
    """
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise UsageError(f"--path {name}: cannot import {module_name}: {type(error).__name__}: {error}") from None
    function = getattr(module, attribute, None)
    if not callable(function):
        what = "has no such name" if function is None else f"is a {type(function).__name__}, not a function"
        raise UsageError(f"--path {name}: {attribute or 'an empty name'} in {module_name} {what}")
    contract = getattr(function, "contract", Contract())
    return (lambda subject: function(subject.model)), contract
