"""The script of a framework's case: a copy of its adapter, and of the interface that the adapter implements."""

from __future__ import annotations

import ast
import pathlib

import jinja2

from fsdp_doctor import __version__
from fsdp_doctor.matrix.frameworks.adapters import locate_adapter
from fsdp_doctor.matrix.frameworks.framework_scenarios import FrameworkCase
from fsdp_doctor.repro.expectation import Expectation
from fsdp_doctor.repro.script import read_node_text

_ROOM = pathlib.Path(__file__).parent
_ADAPTERS = _ROOM.parent / "frameworks"
_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(_ROOM), undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
_INTERFACE = ("FileFormat", "SavedFiles", "Extracted", "Extractor", "FrameworkSession", "NotInStandInError", "StandIn")


def render_framework_script(case: FrameworkCase, expectation: Expectation, file_name: str = "repro.py") -> str:
    """The text of a script that runs ``case`` on two GPUs, and ends with 0 if the case ends as expected."""
    scenario, place = case.scenario, locate_adapter(case.scenario.framework)
    packages = ("torch", *scenario.matrix.distributions)
    adapter = place.file.read_text(encoding="utf-8")
    interface = (_ADAPTERS / "adapter.py").read_text(encoding="utf-8")
    text: str = _TEMPLATES.get_template("framework.py.jinja").render(
        case=case,
        kind=case.definition.kind,
        model=scenario.values["model"],
        configuration=repr(dict(scenario.values)),
        scratch=case.id.replace("/", "-").replace(":", "-"),
        expected=expectation,
        file_name=file_name,
        version=__version__,
        versions=", ".join(f"{name} {expectation.versions.get(name, 'any')}" for name in packages),
        imports=_select_imports(adapter),
        interface=_select_definitions(interface, _INTERFACE),
        adapter="\n\n\n".join(filter(None, (_select_borrowed(adapter), _select_adapter(adapter)))),
    )
    return text + "\n"


def _select_imports(source: str) -> str:
    """The imports at the top that are neither of fsdp-doctor nor in every script."""
    nodes = [node for node in ast.parse(source).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    modules = [ast.unparse(node) for node in nodes]
    return "\n".join(line for line in modules if "fsdp_doctor" not in line and "__future__" not in line)


def _select_definitions(source: str, names: tuple[str, ...]) -> str:
    """The statements of a module that define one of the names."""
    nodes = [node for node in ast.parse(source).body if _name_defined(node) in names and not _takes_shims(node)]
    return "\n\n\n".join(read_node_text(source, node) for node in nodes)


def _select_borrowed(source: str) -> str:
    """The definitions that an adapter imports from another one."""
    texts = []
    for node in ast.parse(source).body:
        room, _, module = (getattr(node, "module", None) or "").rpartition(".")
        if isinstance(node, ast.ImportFrom) and room == "fsdp_doctor.frameworks" and module.startswith("on_"):
            other = (_ADAPTERS / f"{module}.py").read_text(encoding="utf-8")
            texts.append(_select_definitions(other, tuple(alias.name for alias in node.names)))
    return "\n\n\n".join(filter(None, texts))


def _select_adapter(source: str) -> str:
    """The module without its imports, and without the parts that only the emulated device needs."""
    parts = []
    for node in ast.parse(source).body[1:]:
        if isinstance(node, (ast.Import, ast.ImportFrom)) or _takes_shims(node):
            continue
        if isinstance(node, ast.ClassDef) and [ast.unparse(base) for base in node.bases] == ["Adapter"]:
            build = next(part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "build")
            parts.append(f"class {node.name}:\n{read_node_text(source, build)}")
        else:
            parts.append(read_node_text(source, node))
    return "\n\n\n".join(parts)


def _takes_shims(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and any(argument.arg == "shims" for argument in node.args.args)


def _name_defined(node: ast.stmt) -> str:
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
            return name
    return ""
