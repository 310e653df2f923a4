"""Calls in a Python script that configure FSDP, read from its syntax tree; nothing of it is run.

``TrainingArguments(fsdp="full_shard")`` becomes ``fsdp=full_shard``, as on a command line, and of a class that is not
the Trainer's the keywords stand below its name: ``FSDPStrategy.cpu_offload=true``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from fsdp_doctor.check.config_formats import flattened
from fsdp_doctor.check.settings import Expression, Setting
from fsdp_doctor.errors import UsageError

# Several hundred bytes of tree for each byte of text.
_LARGEST = 128 << 10
# Classes whose keywords are the Trainer's arguments: these, and those of TRL and others that are called so.
_ARGUMENT_CLASSES = ("TrainingArguments", "Arguments", "Config")
_STRATEGY_CLASSES = ("FSDPStrategy", "ModelParallelStrategy", "XLAFSDPStrategy", "DeepSpeedStrategy", "FSDP2Strategy")
_TRAINER_CLASSES = ("Trainer", "Fabric")
_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
PLUGIN = "FullyShardedDataParallelPlugin"
# torch's own calls; what a script does with them only running it would show.
TORCH_CALLS = ("fully_shard", "FullyShardedDataParallel", "FSDP")
TORCH = "torch_fsdp"
_OFFLOAD = re.compile(r"(?:\w+\.)*CPUOffload\((?:offload_params=)?(True|False)?\)")


def python_settings(text: str, name: str) -> list[Setting]:
    """The settings of every such call. Raises UsageError for what is not Python, or too large."""
    if len(text) > _LARGEST:
        raise UsageError(f"{name} is larger than {_LARGEST >> 10} KiB, too large for a script that is read as Python")
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise UsageError(f"{name}:{error.lineno or 1}: invalid Python: {error.msg}") from None
    except (ValueError, MemoryError, RecursionError):
        raise UsageError(f"cannot read {name}: it is nested too deeply") from None
    nodes = list(ast.walk(tree))
    constants = _constants(nodes)
    of_lightning = any(module.partition(".")[0] in _LIGHTNING for module in _imported(nodes))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    found = [row for call in calls for row in _of_call(call, constants, name, of_lightning=of_lightning)]
    return sorted(found, key=lambda row: int(row.where.rpartition(":")[2]))


def called_offload(value: Any) -> bool | None:
    """Whether a script's ``CPUOffload(...)`` offloads; None for what is no such call, or does not say it."""
    called = _OFFLOAD.fullmatch(str(value))
    return called[1] == "True" if called else None


def _imported(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str() as module):
                yield module


def _constants(nodes: list[ast.AST]) -> dict[str, ast.expr]:
    """The value of each name that the script assigns once."""
    values: dict[str, list[ast.expr]] = {}
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                values.setdefault(name, []).append(value)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                values.setdefault(name, []).append(value)
    return {name: found[0] for name, found in values.items() if len(found) == 1}


def _of_call(call: ast.Call, constants: dict[str, ast.expr], name: str, *, of_lightning: bool) -> Iterator[Setting]:
    called = _last_name(call.func)
    prefix = _prefix(called, call, of_lightning=of_lightning)
    if prefix is None:
        return
    where = f"{name}:{call.lineno}"
    if prefix:
        yield Setting(f"{prefix}called", True, where)
    for keyword in call.keywords:
        if keyword.arg is None:
            continue
        value = _value(keyword.value, constants)
        at = f"{name}:{keyword.value.lineno}"
        if isinstance(value, dict) and value:
            yield from flattened({f"{prefix}{keyword.arg}": value}, name, lambda _, at=at: at)  # type: ignore[misc]
        else:
            yield Setting(f"{prefix}{keyword.arg}", value, at)


def _prefix(called: str, call: ast.Call, *, of_lightning: bool) -> str | None:
    """What stands before the call's keywords; None for a call that configures nothing of ours."""
    if called in _STRATEGY_CLASSES or called == PLUGIN:
        return f"{called}."
    if called in _TRAINER_CLASSES and of_lightning:
        return "lightning."
    if called.endswith(_ARGUMENT_CLASSES) and any(word.arg in ("fsdp", "fsdp_config") for word in call.keywords):
        return ""
    return f"{TORCH}.{called}." if called in TORCH_CALLS else None


def _last_name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _value(node: ast.expr, constants: dict[str, ast.expr], depth: int = 0) -> Any:
    """The literal that an expression is, or stands for; else its source."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name) if name in constants and depth < 5:
            return _value(constants[name], constants, depth + 1)
        case ast.Dict(keys=keys, values=values) if depth < 5 and all(isinstance(key, ast.Constant) for key in keys):
            names = [str(key.value) for key in keys if isinstance(key, ast.Constant)]
            return {key: _value(value, constants, depth + 1) for key, value in zip(names, values, strict=True)}
        case ast.List(elts=items) | ast.Tuple(elts=items) if depth < 5:
            return [_value(item, constants, depth + 1) for item in items]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
    return Expression(_source(node))


def _source(node: ast.expr) -> str:
    try:
        return ast.unparse(node)[:200]
    except RecursionError:
        return "..."
