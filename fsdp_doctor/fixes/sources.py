"""Finds a framework's function in its installed file, without an import, and checks whether its source is known."""

from __future__ import annotations

import ast
import hashlib
import pathlib
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet

from fsdp_doctor.errors import CannotRun
from fsdp_doctor.fixes.entry import FrameworkFix, list_fixes
from fsdp_doctor.machine.imports import find_source_file
from fsdp_doctor.machine.versions import read_installed_versions

# Decorators of frameworks' functions that call the function in a function of their own.
_WRAPPING = ("torch.no_grad()",)


@dataclass(frozen=True, kw_only=True)
class FixedFunction:
    """A function of an installed release for which a fix was written.

    version: the installed version.
    release: the releases that have the same source.
    file: the file of the module.
    first_line: the line of the function or of its first decorator, counted from 1.
    num_wrappers: the number of the function's decorators that put another function around it.
    """

    fix: FrameworkFix
    version: str
    release: str
    file: pathlib.Path
    first_line: int
    num_wrappers: int


def choose_fixes(framework: str) -> list[FrameworkFix]:
    """Returns the fixes for the installed release of a framework.

    Raises UsageError for a framework without fixes. Raises CannotRun if the framework is not installed, or if no fix is
    for its release.
    """
    fixes = list_fixes(framework)
    version = _read_version(fixes[0])
    chosen = [fix for fix in fixes if is_for(fix, version)]
    if not chosen:
        ranges = " or ".join(sorted({fix.versions for fix in fixes}))
        raise CannotRun(f"no fix is for {fixes[0].distribution} {version}; the fixes are for {ranges}")
    return chosen


def is_for(fix: FrameworkFix, version: str) -> bool:
    """Returns whether a release is in a fix's range. Its source may still differ from the known sources."""
    return SpecifierSet(fix.versions).contains(version, prereleases=True)


def find_function(fix: FrameworkFix) -> FixedFunction:
    """Finds the function that a fix replaces, in the installed release.

    Raises CannotRun if the release has no such function, or if the fix was not written for the function's source.
    """
    module, _, path = fix.target.partition(":")
    version = _read_version(fix)
    what = f"{fix.distribution} {version}"
    try:
        file = find_source_file(module)
    except ModuleNotFoundError:
        file = None
    if file is None:
        raise CannotRun(f"fix {fix.id}: {what} has no module {module}; the release is not known")
    text = file.read_text(encoding="utf-8")
    nodes: list[ast.AST] = [ast.parse(text)]
    for name in path.split("."):
        nodes = [
            child
            for node in nodes
            for child in ast.iter_child_nodes(node)
            if isinstance(child, (ast.ClassDef, ast.FunctionDef)) and child.name == name
        ]
    if len(nodes) != 1 or not isinstance(nodes[0], ast.FunctionDef):
        raise CannotRun(f"fix {fix.id}: {what} has no {fix.target}; the release is not known")
    function = nodes[0]
    first_line = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
    source = "".join(text.splitlines(keepends=True)[first_line - 1 : function.end_lineno])
    digest = hashlib.sha256(source.encode()).hexdigest()
    if digest not in fix.sources:
        known = " or ".join(sorted(set(fix.sources.values())))
        raise CannotRun(
            f"fix {fix.id}: the source of {fix.target} in {file} is not that of {known} (sha256 "
            f"{digest[:12]}), so the function is not replaced; install this release, or make the change by "
            "hand"
        )
    return FixedFunction(
        fix=fix,
        version=version,
        release=fix.sources[digest],
        file=file,
        first_line=first_line,
        num_wrappers=sum(ast.unparse(decorator) in _WRAPPING for decorator in function.decorator_list),
    )


def _read_version(fix: FrameworkFix) -> str:
    versions = read_installed_versions([fix.distribution])
    if not versions:
        raise CannotRun(f"{fix.distribution} is not installed here: run this command with the Python of the job")
    return versions[fix.distribution]
