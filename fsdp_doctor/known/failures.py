"""Describes one known failure: what it is, how to recognize it, and which cases of which runs show it."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Callable, Mapping

import msgspec
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from fsdp_doctor.known.clues import CLUES, ClueName
from fsdp_doctor.known.run_context import DeviceKind, RunContext, Shards
from fsdp_doctor.known.signatures import find_anchor, list_readings
from fsdp_doctor.matrix.cases import AnyCase, Case
from fsdp_doctor.matrix.contracts import Direction
from fsdp_doctor.matrix.frameworks.framework_scenarios import FrameworkCase
from fsdp_doctor.matrix.methods import FIXES, find_method, is_user_method
from fsdp_doctor.verdict.classification import VerdictKind

REPORTED = "reported"
NOT_RUN = "not run"
_SAID_OF_NOT_RUN = "This remedy was not run."
# The published documentation, as [project.urls] of pyproject.toml names it.
DOCUMENTATION = "https://fsdp-doctor.github.io/fsdp-doctor/"
_WORD = re.compile(r"[a-z][a-z0-9]{2,}")
_SHARDED_PLACE = re.compile(rf"{CLUES['sharded place'].shown.pattern}|{CLUES['fsdp'].shown.pattern}")


class RankRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Numbers of ranks from ``min`` to ``max``, both included; without ``max`` there is no upper limit."""

    min: int = 1
    max: int | None = None

    def __contains__(self, ranks: int) -> bool:
        return self.min <= ranks and (self.max is None or ranks <= self.max)


class Trigger(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """A part of the matrix, and the runs in which its cases fail.

    values: the allowed values by axis; the methods stand under ``method``. A value may contain ``*``. A value after
        ``!`` is excluded; an axis for which only excluded values are given allows every other value. An axis that is
        not named may have any value. If ``framework`` is named, the trigger is a part of that framework's matrix, and
        only ``device``, ``ranks`` and ``versions`` restrict it further.
    device: the kinds of device. Offloading moves nothing on the CPU, so ``cpu`` is not among the defaults.
    ranks: the numbers of ranks.
    shard_group: the numbers of ranks over which a parameter is sharded.
    shards: whether the shards of a parameter have the same size on all ranks.
    direction: the directions of the methods. A method of another direction is excluded even if it is named.
    versions: the versions of a framework and of the packages that it uses, by distribution.
    """

    values: Mapping[str, tuple[str, ...]]
    device: tuple[DeviceKind, ...] = ("emulated", "accelerator")
    ranks: RankRange = RankRange()
    shard_group: RankRange = RankRange()
    shards: tuple[Shards, ...] = ("even", "uneven")
    direction: tuple[Direction, ...] = ("out",)
    versions: Mapping[str, SpecifierSet] = {}

    def contains(self, case: AnyCase, context: RunContext) -> bool:
        """Returns whether the trigger contains the case in a run with these facts.

        A method of this library (one that ``--fix`` adds) is contained only if the trigger names methods.
        """
        if context.device_kind not in self.device or context.world_size not in self.ranks:
            return False
        if isinstance(case, FrameworkCase):
            if case.is_fixed or not _match_versions(context.packages, self.versions):
                return False
            values = {**case.scenario.values, "framework": case.scenario.framework, "method": case.method}
            return "framework" in self.values and all(allows(values.get(axis, "")) for axis, allows in self._allowed)
        # The cheapest conditions come first: a report asks this millions of times.
        if "framework" in self.values or (case.method in FIXES and not self._names_methods):
            return False
        by_axis = case.scenario.values
        for axis, allows in self._allowed:
            if not allows(case.method if axis == "method" else by_axis[axis]):
                return False
        return (
            find_method(case.method, case.scenario.version).direction in self.direction
            and context.shard_group(case.scenario) in self.shard_group
            and any(shards in self.shards for shards in context.list_possible_shards(case.scenario))
        )

    def may_contain(self, method: str) -> bool:
        """Returns whether the trigger contains cases of the method, whatever the cases' other values and their runs
        are.
        """
        is_ours = method in FIXES and "framework" not in self.values
        return _matches(method, self.values.get("method", ())) and (self._names_methods or not is_ours)

    @property
    def narrowness(self) -> int:
        """The number of axes that the trigger names, plus 3 if it names methods. Of two entries with triggers for a
        case, the entry with the narrower trigger is shown.
        """
        axes = len(self.values.keys() - {"method"})
        return axes + 3 * self._names_methods

    @functools.cached_property
    def _allowed(self) -> tuple[tuple[str, Callable[[str], bool]], ...]:
        """The axes that are named, each with a function that returns whether a value is allowed."""
        return tuple((axis, functools.cache(functools.partial(_matches, allowed=v))) for axis, v in self.values.items())

    @property
    def _names_methods(self) -> bool:
        """Returns whether the trigger names methods, and does not only exclude some."""
        return any(not pattern.startswith("!") for pattern in self.values.get("method", ()))


def _match_versions(packages: Mapping[str, str], versions: Mapping[str, SpecifierSet]) -> bool:
    """Returns whether the packages have these versions. A package of unknown version is assumed to have one of them."""
    return all(
        specifier.contains(Version(packages[name]).base_version)
        for name, specifier in versions.items()
        if packages.get(name)
    )


def _matches(value: str, allowed: tuple[str, ...]) -> bool:
    """Returns whether a value is allowed, by names that may contain ``*`` and excluded names that begin with ``!``."""
    if f"!{value}" in allowed:
        return False
    named = [pattern for pattern in allowed if not pattern.startswith("!")]
    return (
        not named or value in named or any(fnmatch.fnmatchcase(value, pattern) for pattern in named if "*" in pattern)
    )


class KnownFailure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """One way in which an extraction or a load fails, with its remedy.

    short_code: ``FD`` and a number, which no other failure ever gets.
    group: the name of the file that contains the entry, without its number.
    verdict: the verdict of a case that shows the failure.
    signatures: regular expressions over the exception's ``Type: message``, on one line, for any device.
    frames: regular expressions over the traceback, for a message that other failures share. At least one must match.
        Without frames, the traceback must go through FSDP, a DTensor or a state dict.
    place: the meaning of ``frames`` in words.
    unless: regular expressions over message and traceback that show another failure.
    contradicted_by: facts that speak against the failure: if a log shows one, the entry is no more than possible.
    one_rank: whether only one rank raises the failure: if several ranks did, the entry is no more than possible.
    needs: facts that the failure requires. The entry is known for certain only if the log shows them; in the matrix
        they always hold.
    check: a way to see a failure that raises nothing. Only silent failures have it.
    symptoms: regular expressions over the verdict's reason, for a failure that is silent outside the matrix.
    triggers: the cases and runs that show the failure.
    race: whether the failure needs a non-blocking copy that is read before it is done. Such a failure is certain on the
        emulated device, possible on an accelerator, and impossible where copies finish at once.
    torch: the versions of torch that show the failure, as a version specifier; empty for all versions that were tried.
    versions: the versions of other distributions that show the failure.
    frameworks: the frameworks in which the failure was seen.
    evidence: the id of a case that reproduces the failure on two ranks, or ``reported``.
    evidence_device: the device that the reproducing case needs; empty if any device except the CPU suffices.
    measured: for each device, the versions of torch with which a committed run showed the failure.
    cause, remedy: sentences for the user.
    code: the remedy as code.
    remedies: by distribution of a framework, the setting and the release that help its users. They are shown before the
        code, which is for the framework's maintainers.
    remedy_run: the way in which the remedy was tried: the id of a case that follows it and is ``ok``, the test that
        carries it out (``tests/FILE.py::NAME``), or ``not run``.
    remedies_run: the same for ``remedies``, by distribution; ``not run`` for a distribution that is missing.
    remedy_settings: by distribution, the switches that its remedy sets, each by the last part of its name.
    references: issues as ``owner/repository#number``, or files of torch.
    """

    id: str
    short_code: str
    group: str
    title: str
    verdict: VerdictKind
    cause: str
    remedy: str
    remedy_run: str
    evidence: str
    evidence_device: str = ""
    measured: tuple[str, ...] = ()
    signatures: tuple[re.Pattern[str], ...] = ()
    frames: tuple[re.Pattern[str], ...] = ()
    place: str = ""
    unless: tuple[re.Pattern[str], ...] = ()
    needs: tuple[ClueName, ...] = ()
    contradicted_by: tuple[ClueName, ...] = ()
    one_rank: bool = False
    check: str = ""
    symptoms: tuple[re.Pattern[str], ...] = ()
    triggers: tuple[Trigger, ...] = ()
    race: bool = False
    torch: str = ""
    versions: Mapping[str, SpecifierSet] = {}
    frameworks: tuple[str, ...] = ()
    code: str = ""
    remedies: Mapping[str, str] = {}
    remedies_run: Mapping[str, str] = {}
    remedy_settings: Mapping[str, Mapping[str, bool]] = {}
    references: tuple[str, ...] = ()

    @property
    def page(self) -> str:
        """The URL of the failure's page in the published documentation."""
        return f"{DOCUMENTATION}failures/{self.short_code}/"

    @property
    def reproduced(self) -> bool:
        """Returns whether a case of the matrix reproduces the failure."""
        return self.evidence != REPORTED

    @property
    def advice(self) -> str:
        """The remedy, followed by a warning if nobody has tried it."""
        return f"{self.remedy} {_SAID_OF_NOT_RUN}" if self.remedy_run == NOT_RUN else self.remedy

    def advise(self, framework: str) -> str:
        """Returns the remedy for users of a framework, with the warning of :attr:`advice`; empty if there is none."""
        remedy = self.remedies.get(framework, "")
        is_run = not remedy or self.remedies_run.get(framework, NOT_RUN) != NOT_RUN
        return remedy if is_run else f"{remedy} {_SAID_OF_NOT_RUN}"

    def matches_message(self, message: str) -> bool:
        """Returns whether one of the signatures matches the exception's text or its first line."""
        texts = list_readings(message)
        return any(anchor in text and pattern.search(text) for anchor, pattern in self._anchored for text in texts)

    def has_frame(self, traceback: str) -> bool:
        """Returns whether the traceback goes through a place that raises this failure."""
        return any(pattern.search(traceback) for pattern in self.frames or (_SHARDED_PLACE,))

    def is_excluded_by(self, text: str) -> bool:
        """Returns whether message and traceback show another failure instead."""
        return any(pattern.search(text) for pattern in self.unless)

    def is_raised_in(self, file: str) -> bool:
        """Returns whether the file may belong to one of the entry's frameworks, judged by the words of its path."""
        return not set(_WORD.findall(file.lower())).isdisjoint(_WORD.findall(" ".join(self.frameworks).lower()))

    def shows_on(self, torch: str) -> bool:
        """Returns whether this version of torch shows the failure; True for an unknown version."""
        return not torch or not self.torch or SpecifierSet(self.torch).contains(Version(torch).base_version)

    def shows_with(self, packages: Mapping[str, str]) -> bool:
        """Returns whether these versions of frameworks show the failure; an unknown version counts as showing it."""
        return _match_versions(packages, self.versions)

    def is_triggered_by(self, case: AnyCase, context: RunContext) -> bool:
        """Returns whether one of the triggers contains the case. Does not compare the entry's ``torch`` and
        ``versions``.
        """
        return self._is_of_method(case.method) and any(trigger.contains(case, context) for trigger in self.triggers)

    def is_expected_in(self, case: AnyCase, context: RunContext) -> bool:
        """Returns whether the case shows the failure or, in a race, may show it."""
        # Nine in ten entries are of other methods, and a report asks for each of its cases.
        if not self._is_of_method(case.method):
            return False
        in_time = self.race and context.non_blocking_copies == "at once"
        shows = not in_time and self.is_triggered_by(case, context)
        return shows and self.shows_on(context.torch) and self.shows_with(context.packages)

    def is_certain_in(self, case: AnyCase, context: RunContext) -> bool:
        """Returns whether an expected failure must show in the case: no race decides it, and neither method nor model
        is a user's.
        """
        is_raced = self.race and context.non_blocking_copies == "at any time"
        is_users = isinstance(case, Case) and (is_user_method(case.method) or case.scenario.model.is_custom)
        return not is_raced and not is_users

    def shows_as(self, kind: str) -> bool:
        """Returns whether a case with this verdict may show the failure.

        Only the emulated device detects a race of two streams. On other devices a race may show as wrong values.
        """
        return kind == self.verdict or (self.verdict == "race" and kind == "wrong")

    def measure_narrowness(self, case: AnyCase, context: RunContext) -> int:
        """Returns the narrowness of the narrowest trigger that contains the case."""
        return max(trigger.narrowness for trigger in self.triggers if trigger.contains(case, context))

    @functools.cached_property
    def _anchored(self) -> tuple[tuple[str, re.Pattern[str]], ...]:
        """The signatures as (anchor, pattern); see :func:`find_anchor`."""
        return tuple((find_anchor(pattern), pattern) for pattern in self.signatures)

    @functools.cached_property
    def _is_of_method(self) -> Callable[[str], bool]:
        """Function that returns whether some case of a method may show the failure."""
        return functools.cache(lambda method: any(trigger.may_contain(method) for trigger in self.triggers))
