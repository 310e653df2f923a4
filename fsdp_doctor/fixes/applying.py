"""Replaces a framework's functions in this process, if a fix was written for their source."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple, cast

from fsdp_doctor.errors import CannotRun
from fsdp_doctor.fixes import entry
from fsdp_doctor.fixes.entry import FrameworkFix
from fsdp_doctor.fixes.job_hook import read_options, write_event
from fsdp_doctor.fixes.sources import FixedFunction, choose_fixes, find_function
from fsdp_doctor.machine.versions import read_installed_versions


class _Place(NamedTuple):
    """A place that holds a function.

    owner: a class or a module.
    name: the name of the function in the owner.
    """

    owner: type[Any] | ModuleType
    name: str


@dataclass(kw_only=True)
class AppliedFix:
    """A fix that is applied in this process.

    version: the installed version of the framework's distribution.
    places: the class that contains the function, or the modules that contain it, each with the function's name there;
        empty if a patch of the framework decorates the function.
    original: the function that was replaced.
    num_calls: the number of calls so far.
    num_left: the number of calls so far that the original answered.
    """

    fix: FrameworkFix
    version: str
    places: tuple[_Place, ...]
    original: FunctionType
    num_calls: int = field(default=0, init=False)
    num_left: int = field(default=0, init=False)
    _said: set[str] = field(default_factory=set, init=False, repr=False)

    def say_once(self, what: str) -> None:
        """Writes a line to stderr, unless this fix has already written the same line."""
        if what not in self._said:
            self._said.add(what)
            _say(self.fix, what)

    def report_overriding_classes(self) -> None:
        """Reports classes that override the function, and therefore do not run the replacement."""
        for owner, name in self.places:
            for subclass in _list_overriding_classes(owner, name) if isinstance(owner, type) else ():
                write_event("overridden", fix=self.fix.id, by=f"{subclass.__module__}.{subclass.__qualname__}")

    def revert(self) -> None:
        """Puts the original back, also in modules that have imported the replacement."""
        first = self.places[0]
        replacement = getattr(first.owner, first.name)
        for owner, name in (*self.places, *_list_modules_with(replacement)):
            _put(owner, name, self.original)
        del _applied[self.fix.id]


_applied: dict[str, AppliedFix] = {}


def apply(framework: str) -> list[AppliedFix]:
    """Replaces the functions of a framework for which there are fixes, and writes a line to stderr for each.

    All functions are checked before the first is replaced. A second call changes nothing and returns the same fixes.

    Raises UsageError for a framework without fixes. Raises CannotRun if the framework is not installed, if no fix is
    for its version, if the fix was not written for the function's source, if something else has already replaced the
    function, or if a class outside the framework overrides it.
    """
    _apply(choose_fixes(framework))
    return [applied for applied in _applied.values() if applied.fix.framework == framework]


def apply_to_module(module: str, ids: Collection[str]) -> None:
    """Applies the fixes with the given ids whose function is in a module. Raises the same errors as :func:`apply`."""
    frameworks = {fix.framework for fix in entry.FIXES if fix.id in ids and fix.module == module}
    for framework in sorted(frameworks):
        fixes = [fix for fix in choose_fixes(framework) if fix.id in ids]
        _apply([fix for fix in fixes if fix.module == module])


@contextlib.contextmanager
def hold_fix(id: str) -> Iterator[AppliedFix]:
    """Applies a fix until the block ends. A fix that was applied before the block stays applied.

    Raises the same errors as :func:`apply`.
    """
    was_applied = id in _applied
    fixes = [fix for fix in choose_fixes(_find_framework(id)) if fix.id == id]
    if not fixes:
        raise CannotRun(f"fix {id} is not for the installed release of {_find_framework(id)}")
    _apply(fixes)
    applied = _applied[id]
    try:
        yield applied
    finally:
        if not was_applied:
            applied.revert()


def use_fix(id: str) -> Callable[[Any], Callable[..., Any]]:
    """Decorates a framework's function in the patch that ``fsdp-doctor fix FRAMEWORK --diff`` writes."""

    def decorate(original: FunctionType | staticmethod[..., Any]) -> Callable[..., Any]:
        if isinstance(original, staticmethod):
            return staticmethod(decorate(cast(FunctionType, original.__func__)))
        (fix,) = [fix for fix in choose_fixes(_find_framework(id)) if fix.id == id]
        version = read_installed_versions([fix.distribution])[fix.distribution]
        applied = _applied[id] = AppliedFix(fix=fix, version=version, places=(), original=original)
        return _wrap(applied)

    return decorate


def fall_back(reason: str, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Returns the result of the original function for a case that its replacement does not cover.

    Writes each reason to stderr once.
    """
    applied = find_applied(original)
    applied.num_left += 1
    applied.say_once(f"left to the original: {reason}")
    write_event("left", fix=applied.fix.id, reason=reason, **describe_rank())
    return original(*arguments, **options)


def find_applied(original: Callable[..., Any]) -> AppliedFix:
    """Finds the applied fix that replaced a function."""
    return next(applied for applied in _applied.values() if applied.original is original)


def read_global(original: Callable[..., Any], name: str) -> Any:
    """Returns the global variable with the given name in the module of a replaced function."""
    return inspect.unwrap(original).__globals__[name]


def _find_framework(id: str) -> str:
    return next(fix.framework for fix in entry.FIXES if fix.id == id)


def _apply(fixes: Iterable[FrameworkFix]) -> None:
    functions = [find_function(fix) for fix in fixes if fix.id not in _applied]
    found = [_find_original(function) for function in functions]
    for function, (original, places) in zip(functions, found, strict=True):
        fix = function.fix
        applied = AppliedFix(fix=fix, version=function.version, places=places, original=original)
        replacement = _wrap(applied)
        for owner, name in places:
            _put(owner, name, replacement)
        _applied[fix.id] = applied
        _say(fix, f"replaced {fix.target} of {fix.distribution} {function.version}")
        write_event("replaced", fix=fix.id)
        if read_options() is not None:
            atexit.register(applied.report_overriding_classes)


def _find_original(function: FixedFunction) -> tuple[FunctionType, tuple[_Place, ...]]:
    """Returns the function that a fix replaces, and the places at which the replacement must be put.

    Raises CannotRun if the function was already replaced, if an object other than a module refers to it, or if a class
    outside the framework overrides it.
    """
    fix = function.fix
    _, _, path = fix.target.partition(":")
    *classes, name = path.split(".")
    owner: Any = importlib.import_module(fix.module)
    for part in classes:
        owner = getattr(owner, part)
    original = vars(owner).get(name)
    if isinstance(original, staticmethod):
        original = original.__func__
    bare: Any = original
    for _ in range(function.num_wrappers):
        bare = getattr(bare, "__wrapped__", None)
    code = getattr(bare, "__code__", None)
    place = (code.co_filename, code.co_firstlineno) if code is not None else None
    if hasattr(bare, "__wrapped__") or place != (str(function.file), function.first_line):
        where = f"{place[0]}:{place[1]}" if place is not None else repr(original)
        raise CannotRun(
            f"fix {fix.id}: {fix.target} was already replaced, from {where}; remove one of the two replacements"
        )
    if isinstance(owner, ModuleType):
        places = _list_modules_with(original)
        if holder := _find_other_holder(original, places):
            raise CannotRun(
                f"fix {fix.id}: {fix.target} is already held by {holder}, which a replacement does not reach; "
                "apply the fix before this object is made"
            )
        return original, places
    for subclass in _list_overriding_classes(owner, name):
        raise CannotRun(
            f"fix {fix.id}: {subclass.__module__}.{subclass.__qualname__} overrides {name}, so a replacement in "
            f"{owner.__qualname__} would not run; the fix does not know this class"
        )
    return original, (_Place(owner, name),)


def _put(owner: type[Any] | ModuleType, name: str, function: Callable[..., Any]) -> None:
    """Replaces a function of a class or module; a static method stays a static method."""
    is_static = isinstance(vars(owner)[name], staticmethod)
    setattr(owner, name, staticmethod(function) if is_static else function)


def _list_modules_with(function: FunctionType) -> tuple[_Place, ...]:
    """Lists the modules that define or have imported a function, under any name; the defining module comes first."""
    modules = [module for module in sys.modules.values() if isinstance(module, ModuleType)]
    modules.sort(key=lambda module: module.__name__ != function.__module__)
    # A module can be there under two names.
    places = (_Place(module, name) for module in modules for name, value in vars(module).items() if value is function)
    return tuple({(id(place.owner), place.name): place for place in places}.values())


def _find_other_holder(function: FunctionType, places: Iterable[_Place]) -> str:
    """Describes an object that refers to a function, apart from the modules in ``places``; empty if there is none."""
    known = {id(vars(owner)) for owner, _ in places}
    for holder in gc.get_referrers(function):
        if id(holder) not in known and not isinstance(holder, FrameType):
            return f"a {type(holder).__name__}, {repr(holder)[:80]}"
    return ""


def _list_overriding_classes(owner: type[Any], name: str) -> list[type[Any]]:
    """Lists the subclasses outside the owner's package that define the function themselves."""
    package = owner.__module__.partition(".")[0]
    return [
        subclass
        for subclass in _list_subclasses(owner)
        if name in vars(subclass) and subclass.__module__.partition(".")[0] != package
    ]


def _list_subclasses(owner: type[Any]) -> Iterator[type[Any]]:
    subclass: type[Any]
    for subclass in owner.__subclasses__():
        yield subclass
        yield from _list_subclasses(subclass)


def _wrap(applied: AppliedFix) -> Callable[..., Any]:
    module_name, _, name = applied.fix.replacement.partition(":")
    replacement = getattr(importlib.import_module(module_name), name)
    original = applied.original

    @functools.wraps(original)
    def replaced(*arguments: Any, **options: Any) -> Any:
        applied.num_calls += 1
        applied.say_once("called for the first time")
        write_event("called", fix=applied.fix.id, **describe_rank())
        return replacement(original, *arguments, **options)

    return replaced


def describe_rank() -> dict[str, int]:
    """Returns this rank and the number of ranks for an event, and the ranks of this node if the launcher names them."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return {"rank": 0, "world": 1, "first_of_node": 0, "ranks_of_node": 1}
    facts = {"rank": dist.get_rank(), "world": dist.get_world_size()}
    if "LOCAL_RANK" in os.environ and "LOCAL_WORLD_SIZE" in os.environ:
        facts["first_of_node"] = facts["rank"] - int(os.environ["LOCAL_RANK"])
        facts["ranks_of_node"] = int(os.environ["LOCAL_WORLD_SIZE"])
    return facts


def _say(fix: FrameworkFix, what: str) -> None:
    rank = os.environ.get("RANK")
    who = f"rank {rank}, process {os.getpid()}" if rank else f"process {os.getpid()}"
    sys.stderr.write(f"fsdp-doctor: fix {fix.id}: {what} ({who})\n")
    sys.stderr.flush()
