"""One known failure: what it is, how it is recognized, and in which cases of which runs it shows."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping

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


class Trigger(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the matrix, and the runs in which it fails.

    values: the values that an axis may have, ``method`` among them, each also with ``*``; the other axes are free. A
        name behind ``!`` is left out, and a list of such names alone allows all others. With
        ``framework`` among them it is a part of that framework's matrix: its axes, and only device and ranks besides.
    device: the kinds of device. On the CPU offloading moves nothing, so a trigger for the CPU has to name it.
    ranks, shard_group: how many ranks there are, and over how many a parameter is sharded.
    shards: whether all ranks' shards of a parameter are of one size.
    direction: of the methods, also where it names none.
    versions: of a framework and what it is used with, by distribution.
    """

    values: Mapping[str, tuple[str, ...]]
    device: tuple[DeviceKind, ...] = ("emulated", "accelerator")
    ranks: RankRange = RankRange()
    shard_group: RankRange = RankRange()
    shards: tuple[Shards, ...] = ("even", "uneven")
    direction: tuple[Direction, ...] = ("out",)
    versions: Mapping[str, SpecifierSet] = {}

    def contains(self, case: AnyCase, context: RunContext) -> bool:
        """Returns whether the case of that run is in this part; a fix is only where a trigger names it."""
        if context.device_kind not in self.device or context.world_size not in self.ranks:
            return False
        if isinstance(case, FrameworkCase):
            if case.is_fixed or not _match_versions(context.packages, self.versions):
                return False
            values = {**case.scenario.values, "framework": case.scenario.framework, "method": case.method}
            return "framework" in self.values and all(_matches(values.get(a, ""), v) for a, v in self.values.items())
        if "framework" in self.values or (case.method in FIXES and not self._names_methods):
            return False
        # The cheapest conditions come first: a report asks this millions of times.
        return (
            all(
                _matches(case.method if axis == "method" else case.scenario.values[axis], allowed)
                for axis, allowed in self.values.items()
            )
            and find_method(case.method, case.scenario.version).direction in self.direction
            and context.shard_group(case.scenario) in self.shard_group
            and any(shards in self.shards for shards in context.list_possible_shards(case.scenario))
        )

    @property
    def narrowness(self) -> int:
        """Counts the axes that the trigger names; the method counts most. If two entries apply, the narrower one says
        more.
        """
        axes = len(self.values.keys() - {"method"})
        return axes + 3 * self._names_methods

    @property
    def _names_methods(self) -> bool:
        """Returns whether the trigger names methods, and not only those that it leaves out."""
        return any(not pattern.startswith("!") for pattern in self.values.get("method", ()))


def _match_versions(packages: Mapping[str, str], versions: Mapping[str, SpecifierSet]) -> bool:
    """Returns whether the packages are of these versions; one whose version is not known is assumed to be."""
    return all(
        specifier.contains(Version(packages[name]).base_version)
        for name, specifier in versions.items()
        if packages.get(name)
    )


def _matches(value: str, allowed: tuple[str, ...]) -> bool:
    """Returns whether a value is one of those allowed, which may have a ``*``, or none of those behind a ``!``."""
    if f"!{value}" in allowed:
        return False
    named = [pattern for pattern in allowed if not pattern.startswith("!")]
    return (
        not named or value in named or any(fnmatch.fnmatchcase(value, pattern) for pattern in named if "*" in pattern)
    )


class KnownFailure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way in which an extraction or a load fails, with its remedy.

    short_code: ``FD`` and a number, which no other failure ever gets. group: the file that it is in.
    verdict: the one that it has in the matrix, or would have.
    signatures: regular expressions over an exception's ``Type: message``, on one line, for any device.
    frames: further ones over the traceback, for a message that other failures share: one of them has to match. place:
        their meaning in words. Without them the traceback has to go through FSDP, a DTensor or a state dict.
    unless: ones over message and traceback that show another failure.
    contradicted_by: facts with which it does not show: where a log shows one, the entry is no more than possible.
    one_rank: only one rank raises it: where several ranks did, the entry is no more than possible.
    needs: the facts without which it does not show. A log has to show them, or the entry is not known for certain; in
        the matrix they are given.
    check: how to see it where nothing raises; only a silent failure has it.
    symptoms: regular expressions over the verdict's reason, for a failure that is silent elsewhere.
    triggers: the cases and runs in which it shows.
    race: it needs a non-blocking copy that is read before it is done. So it shows for certain on the emulated device,
        perhaps on an accelerator, and never where such a copy finishes at once.
    torch: the versions that show it, as a version specifier; empty for all that were tried.
    versions: the same by distribution, for what a framework does. frameworks: those where it was seen.
    evidence: the id of a case that reproduces it on two ranks, or ``reported``.
    evidence_device: the device that it takes; empty where any but the CPU does, the emulated one too.
    measured: for each device the versions of torch with which a committed run showed it.
    cause, remedy: sentences. code: the remedy in code. remedies: by the framework's distribution, the setting of its
        user's configuration and the release, which go before the code for its maintainer.
    remedy_run: how the remedy was run: the id of a case that follows it and is ``ok``, the test that carries it out
        (``tests/FILE.py::NAME``), or ``not run``. remedies_run: the same by distribution; ``not run`` for the others.
    references: ``owner/repository#number``, or a file of torch.
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
    references: tuple[str, ...] = ()

    @property
    def page(self) -> str:
        """The URL of its page in the published documentation."""
        return f"{DOCUMENTATION}failures/{self.short_code}/"

    @property
    def reproduced(self) -> bool:
        """Returns whether a case of the matrix shows it."""
        return self.evidence != REPORTED

    @property
    def advice(self) -> str:
        """The remedy, with a sentence that says so where nobody has run it."""
        return f"{self.remedy} {_SAID_OF_NOT_RUN}" if self.remedy_run == NOT_RUN else self.remedy

    def advise(self, framework: str) -> str:
        """The remedy for a user of that distribution, as :attr:`advice`; empty if there is none."""
        remedy = self.remedies.get(framework, "")
        is_run = not remedy or self.remedies_run.get(framework, NOT_RUN) != NOT_RUN
        return remedy if is_run else f"{remedy} {_SAID_OF_NOT_RUN}"

    def matches_message(self, message: str) -> bool:
        """Returns whether the exception's text, or its first line, has one of its signatures."""
        texts = list_readings(message)
        return any(
            find_anchor(pattern) in text and pattern.search(text) for pattern in self.signatures for text in texts
        )

    def has_frame(self, traceback: str) -> bool:
        """Returns whether the traceback goes through a place where it is raised."""
        return any(pattern.search(traceback) for pattern in self.frames or (_SHARDED_PLACE,))

    def is_excluded_by(self, text: str) -> bool:
        """Returns whether message and traceback show that it is another failure."""
        return any(pattern.search(text) for pattern in self.unless)

    def is_raised_in(self, file: str) -> bool:
        """Returns whether the file may be of a framework that the entry names, wherever that was checked out."""
        return not set(_WORD.findall(file.lower())).isdisjoint(_WORD.findall(" ".join(self.frameworks).lower()))

    def shows_on(self, torch: str) -> bool:
        """Returns whether that version of torch shows it; an unknown one is assumed to."""
        return not torch or not self.torch or SpecifierSet(self.torch).contains(Version(torch).base_version)

    def shows_with(self, packages: Mapping[str, str]) -> bool:
        """Returns whether those versions of frameworks show it; an unknown one is assumed to."""
        return _match_versions(packages, self.versions)

    def is_triggered_by(self, case: AnyCase, context: RunContext) -> bool:
        """Returns whether one of its triggers contains the case, whatever the entry's versions."""
        return any(trigger.contains(case, context) for trigger in self.triggers)

    def is_expected_in(self, case: AnyCase, context: RunContext) -> bool:
        """Returns whether the case shows it, or in a race may show it."""
        in_time = self.race and context.non_blocking_copies == "at once"
        shows = not in_time and self.is_triggered_by(case, context)
        return shows and self.shows_on(context.torch) and self.shows_with(context.packages)

    def is_certain_in(self, case: AnyCase, context: RunContext) -> bool:
        """Returns whether a case that it is expected in must show it: no race, and no method or model of the user."""
        is_raced = self.race and context.non_blocking_copies == "at any time"
        is_users = isinstance(case, Case) and (is_user_method(case.method) or case.scenario.model.is_custom)
        return not is_raced and not is_users

    def measure_narrowness(self, case: AnyCase, context: RunContext) -> int:
        """The narrowness of its narrowest trigger that contains the case."""
        return max(trigger.narrowness for trigger in self.triggers if trigger.contains(case, context))
