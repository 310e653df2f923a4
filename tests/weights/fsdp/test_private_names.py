"""Private and undocumented names of torch stand in weights/fsdp/private; the emulated device has its own."""

from __future__ import annotations

import ast
import importlib
import pathlib
import re
from collections.abc import Iterator

import pytest
import torch.distributed.checkpoint.state_dict
import torch.distributed.tensor

import fsdp_doctor
from fsdp_doctor.checkpoints import targets
from fsdp_doctor.checkpoints.files import BadFile

_PACKAGE = pathlib.Path(fsdp_doctor.__file__).parent
_HOME = _PACKAGE / "weights" / "fsdp" / "private"
_MODULES = [
    path for path in sorted(_PACKAGE.rglob("*.py")) if _HOME not in path.parents and "emulated" not in path.parts
]
# Not torch's: documented for os, and how every model of transformers says what must not be split.
_OF_OTHERS = {
    "os._exit",
    # What the interpreter calls at its end.
    "threading._shutdown",
    "getattr(model, '_no_split_modules', None)",
    "getattr(type(module), '_tied_weights_keys', None)",
    # What an object of TRL has whose constructor is not called, and how pytest makes an item runnable again.
    "generation._dist",
    "generation._weight_metadata",
    "item._initrequest",
    "item.session._setupstate",
    # Attributes of verl's engine, and a function of TRL's.
    "engine._qat_enabled",
    "engine._is_offload_param",
    "generation._fix_param_name_to_vllm",
    "getattr(utils, '_ChunkedLogProbFunction', self)",
}
# TRL's, os's, and two of torch's that have a test of their own.
_OF_OTHERS_IN_SCRIPTS = {"_dist", "_weight_metadata", "_exit", "__main__", "_runtime_utils", "_local_tensor"}
_DOCUMENTED = {
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.format_utils",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.device_mesh",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.multiprocessing.errors",
    "torch.distributed.fsdp",
    "torch.distributed.fsdp.wrap",
    "torch.distributed.launcher.api",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.distributed.tensor.placement_types",
    "torch.nn.parallel",
    "torch.optim.optimizer",
}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_value_"  # of enum, which documents it


# Public, whatever they begin with.
_OF_NAMED_TUPLES = ("_asdict", "_fields", "_make", "_replace")


def private_uses(tree: ast.Module) -> Iterator[str]:
    """Imports of undocumented modules; underscore names, imported, asked of another object or given to getattr."""
    own = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    attributes = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if _of_torch(a.name) and any(map(_is_private, a.name.split("."))))
        elif isinstance(node, ast.ImportFrom) and _of_torch(node.module or ""):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            documented = node.module in _DOCUMENTED
            yield from (name for name in names if not documented or any(map(_is_private, name.split("."))))
        elif isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in _OF_NAMED_TUPLES:
            if node.attr not in attributes | own and ast.unparse(node) not in _OF_OTHERS:
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and _is_private(str(name.value)) and ast.unparse(node) not in _OF_OTHERS:
                yield ast.unparse(node)


def _of_torch(module: str) -> bool:
    return module.split(".")[0] == "torch"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from torch.distributed._shard.sharded_tensor import ShardedTensor", True),
        ("import torch._C", True),
        ("from torch.distributed.fsdp import _runtime_utils", True),
        ("from torch.utils.weak import TensorWeakRef", True),
        ("torch._foreach_copy_([], [])", True),
        ("handle._local_shard", True),
        ("getattr(model, '_orig_mod', None)", True),
        ("class A:\n    def f(self):\n        return self._own", False),
        ("torch.empty(0).__class__", False),
        ("from torch.distributed.fsdp import fully_shard", False),
    ],
)
def test_the_search_finds_what_is_private(source: str, expected: bool) -> None:
    assert bool(list(private_uses(ast.parse(source)))) == expected


def test_no_other_module_uses_a_private_name_of_torch() -> None:
    uses = {path: list(private_uses(ast.parse(path.read_text(encoding="utf-8")))) for path in _MODULES}
    assert len(uses) > 100
    assert {str(path.relative_to(_PACKAGE)): names for path, names in uses.items() if names} == {}


def test_a_function_on_private_names_says_which_names_it_needs() -> None:
    """Its docstring has a name in double backticks, and with it why no public name does the same."""
    silent = []
    for path in sorted(_HOME.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and "``" not in (ast.get_docstring(node) or ""):
                names = [*private_uses(ast.Module(node.body, [])), *_names_in(ast.unparse(node))]
                silent += [f"{path.name}, line {node.lineno}: {node.name} uses {', '.join(names)}"] if names else []
    assert silent == []


def _names_in(text: str) -> set[str]:
    """The private names that a script uses: attributes, imports, and strings that are such a name."""
    found = re.findall(r"""\.(_[a-z]\w*)|import (_[a-z]\w*)|["'](_[a-z]\w*)["']""", text)
    return {name for names in found for name in names if name}


def test_a_private_name_in_a_script_is_one_whose_loss_is_told() -> None:
    """Names of ``weights.fsdp.private`` raise PrivateApiGone, in tests of theirs."""
    told = {name for path in _HOME.glob("*.py") for name in _names_in(path.read_text(encoding="utf-8"))}
    used = {
        name: str(path.relative_to(_PACKAGE))
        for path in _PACKAGE.rglob("*.jinja")
        for name in _names_in(path.read_text(encoding="utf-8"))
    }
    assert "_handle" in used
    assert {name: path for name, path in used.items() if name not in told | _OF_OTHERS_IN_SCRIPTS} == {}


def test_what_scripts_use_beside_those_is_torchs() -> None:
    module = importlib.import_module("torch.distributed.fsdp._runtime_utils")
    assert callable(module._lazy_init)
    assert hasattr(torch.distributed.tensor.DTensor, "_local_tensor")


def test_the_frame_that_the_recorder_looks_for_is_a_function_of_torchs() -> None:
    text = (_PACKAGE / "resume" / "recorder.py").read_text(encoding="utf-8")
    (name,) = re.findall(r'co_name == "(\w+)"', text)
    assert callable(getattr(torch.distributed.checkpoint.state_dict, name))


@pytest.mark.parametrize("release", ["2.10.1", "2.14.0", "2.14.0.dev20260801", "3.0"])
def test_no_mesh_is_written_for_a_torch_whose_form_is_not_known(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "read_installed_versions", lambda names: {"torch": release})
    with pytest.raises(BadFile, match=re.escape(release)):
        targets._make_mesh(0, 2, "cuda")
