"""Replaces a framework's functions in this process, where their source is one that a fix was written for."""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from packaging.specifiers import SpecifierSet

from fsdp_doctor.errors import CannotRun
from fsdp_doctor.fixes.entry import FrameworkFix, list_fixes
from fsdp_doctor.machine.versions import read_installed_versions


@dataclass(kw_only=True)
class AppliedFix:
    """A fix in this process. num_calls, num_left: calls so far, and those that the original answered."""

    fix: FrameworkFix
    version: str
    num_calls: int = field(default=0, init=False)
    num_left: int = field(default=0, init=False)
    _said: set[str] = field(default_factory=set, init=False, repr=False)

    def say_once(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            _say(self.fix, what)


_applied: dict[str, AppliedFix] = {}


def apply(framework: str) -> list[AppliedFix]:
    """Replaces the functions of a framework that a fix was written for, and writes a line to stderr for each.

    All are looked at before one is replaced. A second call changes nothing, and returns the same.

    Raises UsageError for a framework without fixes; CannotRun where the framework is not installed, no fix is for its
    version, the function's source is not one of those that the fix was written for, somebody else has replaced it, or
    a class outside of the framework overrides it.
    """
    found = [fix for fix in _choose(framework) if fix.id not in _applied]
    places = [_find_original(fix) for fix in found]
    for fix, (owner, name, original) in zip(found, places, strict=True):
        applied = AppliedFix(fix=fix, version=_read_version(fix))
        setattr(owner, name, _wrap(applied, original))
        _applied[fix.id] = applied
        _say(fix, f"replaced {fix.target} of {fix.distribution} {applied.version}")
    return [applied for applied in _applied.values() if applied.fix.framework == framework]


def fall_back(reason: str, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Calls the original, for what its replacement does not do, and says so once for each reason."""
    applied = next(one for one in _applied.values() if one.fix.target.endswith(f":{original.__qualname__}"))
    applied.num_left += 1
    applied.say_once(f"left to the original: {reason}")
    return original(*arguments, **options)


def _choose(framework: str) -> list[FrameworkFix]:
    fixes = list_fixes(framework)
    version = _read_version(fixes[0])
    chosen = [fix for fix in fixes if SpecifierSet(fix.versions).contains(version, prereleases=True)]
    if not chosen:
        ranges = " or ".join(sorted({fix.versions for fix in fixes}))
        raise CannotRun(f"no fix is for {fixes[0].distribution} {version}; the fixes are for {ranges}")
    return chosen


def _read_version(fix: FrameworkFix) -> str:
    versions = read_installed_versions([fix.distribution])
    if not versions:
        raise CannotRun(f"{fix.distribution} is not installed here: run this with the Python of the job")
    return versions[fix.distribution]


def _find_original(fix: FrameworkFix) -> tuple[type[Any], str, FunctionType]:
    """The class that has the function, the function's name in it, and the function, if it is the known one."""
    module_name, _, path = fix.target.partition(":")
    *classes, name = path.split(".")
    module = importlib.import_module(module_name)
    owner: Any = module
    for part in classes:
        owner = getattr(owner, part, None)
    original = vars(owner).get(name) if owner is not None else None
    version = _read_version(fix)
    if original is None:
        raise CannotRun(
            f"fix {fix.id}: {fix.distribution} {version} has no {fix.target}; it is no release that is known"
        )
    code = getattr(original, "__code__", None)
    if hasattr(original, "__wrapped__") or code is None or code.co_filename != module.__file__:
        where = f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(original)
        raise CannotRun(f"fix {fix.id}: {fix.target} was replaced already, from {where}; take out one of the two")
    try:
        source = inspect.getsource(original)
    except OSError:
        raise CannotRun(f"fix {fix.id}: the source of {fix.target} cannot be read, so it is not replaced") from None
    digest = hashlib.sha256(source.encode()).hexdigest()
    if digest not in fix.sources:
        raise CannotRun(
            f"fix {fix.id}: the source of {fix.target} is not that of {' or '.join(sorted(set(fix.sources.values())))} "
            f"(sha256 {digest[:12]}): it is not replaced; install that release, or make the change by hand"
        )
    package = module_name.partition(".")[0]
    for subclass in _list_subclasses(owner):
        if name in vars(subclass) and subclass.__module__.partition(".")[0] != package:
            raise CannotRun(
                f"fix {fix.id}: {subclass.__module__}.{subclass.__qualname__} overrides {name}, so a replacement in "
                f"{owner.__qualname__} would not be what runs; the fix does not know that class"
            )
    return owner, name, original


def _list_subclasses(owner: type[Any]) -> Iterator[type[Any]]:
    subclass: type[Any]
    for subclass in owner.__subclasses__():
        yield subclass
        yield from _list_subclasses(subclass)


def _wrap(applied: AppliedFix, original: FunctionType) -> Callable[..., Any]:
    module_name, _, name = applied.fix.replacement.partition(":")
    replacement = getattr(importlib.import_module(module_name), name)

    @functools.wraps(original)
    def replaced(*arguments: Any, **options: Any) -> Any:
        applied.num_calls += 1
        applied.say_once("called for the first time")
        return replacement(original, *arguments, **options)

    return replaced


def _say(fix: FrameworkFix, what: str) -> None:
    rank = os.environ.get("RANK")
    who = f"rank {rank}, process {os.getpid()}" if rank else f"process {os.getpid()}"
    sys.stderr.write(f"fsdp-doctor: fix {fix.id}: {what} ({who})\n")
    sys.stderr.flush()
