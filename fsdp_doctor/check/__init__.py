"""Implements ``fsdp-doctor check``: finds the cases that a training configuration selects, and their known failures.

Its modules import neither torch nor a framework. ``reading`` turns files, launch commands and overrides into settings.
``frameworks`` interpret the settings, ``findings`` describe the problems, and ``presentation`` prints the result.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from packaging.version import InvalidVersion, Version

from fsdp_doctor.check import frameworks, reading
from fsdp_doctor.check.findings import (
    ConfigFinding,
    ConfiguredModel,
    ConfiguredRun,
    FindingKind,
    apply_model,
    find_known_failures,
    find_missing_backends,
    find_replaced_values,
    find_unknown_keys,
    note,
    report_unknown,
)
from fsdp_doctor.check.framework import Framework
from fsdp_doctor.check.launch_commands import NOT_READ, count_launched_ranks
from fsdp_doctor.check.settings import Setting, Settings, Unreadable
from fsdp_doctor.check.use import CANNOT_BE_DETERMINED, Role, Use, merge_equal
from fsdp_doctor.errors import EXIT_BAD_VERDICT, EXIT_OK, CannotRun, UsageError
from fsdp_doctor.known.catalogue import read_catalogue
from fsdp_doctor.machine.versions import read_installed_versions
from fsdp_doctor.matrix.cases import Case

VersionSource: TypeAlias = Literal["given", "installed here", "not known"]
# Number of ranks assumed for predictions if the configuration does not give one.
_DEFAULT_RANKS = 2
# Shard group sizes that represent all possible sizes: all ranks, one, and some.
_SHARD_GROUPS = (-1, 1, 2)
# Stands for a checkout of the main branch, which is newer than every release.
_NEWEST = Version("9999")


@dataclass(frozen=True, kw_only=True)
class CheckedVersion:
    """Version for which a configuration is checked.

    ``of`` is the name of the distribution. ``version`` is None for all versions. ``asked`` is true if the user gave the
    version by an option.
    """

    of: str
    version: Version | None = None
    source: VersionSource = "not known"
    asked: bool = False

    def __str__(self) -> str:
        return f"{self.of} {self.version}, {self.source}" if self.version else f"every version of {self.of}"


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """Result of checking a configuration. Findings of the same kind are adjacent.

    ``version`` and ``torch`` are the versions for which the configuration was read. ``read_in`` names the versions of
    the framework whose sources this program's rules are based on. ``world_size`` comes from an option, from the
    configuration, or from the framework's default; if it is None, predictions assume two ranks. ``packages`` are known
    versions of other packages.
    ``settings`` are all settings that were read. ``models`` maps each role to the configured model.
    """

    framework: str
    uses: tuple[Use, ...]
    findings: tuple[ConfigFinding, ...]
    version: CheckedVersion
    torch: CheckedVersion
    read_in: str
    world_size: int | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    settings: Settings = field(default_factory=Settings)
    models: Mapping[Role, ConfiguredModel] = field(default_factory=dict)

    @property
    def under_fsdp(self) -> bool:
        return any(use.scenario is not None for use in self.uses)

    @property
    def determined(self) -> bool:
        """Returns whether every model could be read, with every setting that may decide how the model is trained."""
        is_read = all(use.why_not != CANNOT_BE_DETERMINED for use in self.uses)
        return is_read and not any(finding.decides for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """Exit code of the command: 1 if a finding is bad; else 0 if FSDP is used and all was understood; else 3."""
        if any(finding.bad for finding in self.findings):
            return EXIT_BAD_VERDICT
        return EXIT_OK if self.under_fsdp and self.determined else CannotRun.exit_code


def check(
    arguments: Sequence[str],
    *,
    framework_version: str | None = None,
    world_size: int | None = None,
    torch_version: str | None = None,
) -> CheckResult:
    """Checks a configuration, given as files, ``-`` for standard input, and overrides such as ``a.b=value``.

    ``framework_version`` and ``torch_version`` are versions such as 0.7.1, ``main``, or ``all``; None means the
    installed version, or all versions if none is installed. ``world_size`` overrides the configured number of ranks.
    Raises UsageError for input that cannot be read or that belongs to no supported framework.
    """
    settings = reading.read(arguments)
    kind = next((kind for kind in frameworks.FRAMEWORKS if kind.recognizes(settings)), None)
    if kind is None:
        names = ", ".join(kind.facts.name for kind in frameworks.FRAMEWORKS)
        raise UsageError(
            f"{', '.join(arguments)}: this is not a configuration of a supported framework, or not enough of it to "
            f"recognize the framework; supported are: {names}"
        )
    facts = kind.facts
    version = _find_version("--framework-version", framework_version, facts.distributions or (facts.name,))
    torch = _find_version("--torch-version", torch_version, ("torch",))
    run = functools.partial(_check_as, kind, version=version, torch=torch, world_size=world_size)
    keys = dict.fromkeys(key for table in facts.models.values() for key in table.shard_group)
    sizes = [row for key in keys if (row := settings.find_first(key)) is not None]
    strange = [row for row in sizes if not str(row.value).removeprefix("-").isdecimal()]
    if not strange:
        return run(settings)
    # If the size cannot be read, report only the findings that hold for every size.
    first, *others = [
        run(Settings.join(settings, [Setting(row.key, size, "supposed") for row in strange])) for size in _SHARD_GROUPS
    ]
    said = [{(finding.kind, finding.entry or finding.sentence) for finding in result.findings} for result in others]
    common = [one for one in first.findings if all((one.kind, one.entry or one.sentence) in other for other in said)]
    sentence = "this number cannot be read; the findings here hold for any number"
    return dataclasses.replace(
        first, findings=(*common, report_unknown(sentence, *strange, decides=True)), settings=settings
    )


def _check_as(
    kind: type[Framework],
    settings: Settings,
    *,
    version: CheckedVersion,
    torch: CheckedVersion,
    world_size: int | None,
) -> CheckResult:
    """Checks the settings as a configuration of the given framework."""
    facts = kind.facts
    uses: list[Use] = []
    models: dict[Role, ConfiguredModel] = {}
    findings: list[ConfigFinding] = []
    ranks = world_size
    try:
        settings = kind.complete(settings)
        if ranks is None:
            ranks = _read_world_size(kind, settings, findings)
        framework = kind(settings, version.version, ranks)
        for role, sections in framework.list_models().items():
            strange = [
                row for name in sections for row in find_unknown_keys(settings, name, framework.list_section_keys())
            ]
            try:
                one_model = framework.read(role)
                with_model, of_model = apply_model(merge_equal(one_model.uses), one_model.model)
            except Unreadable as error:
                uses.append(Use(role=role, why_not=CANNOT_BE_DETERMINED))
                findings += [report_unknown(f"{role}: {error}"), *strange]
                continue
            uses += with_model
            models[role] = one_model.model
            findings += [*one_model.findings, *of_model, *strange]
        findings += framework.find_problems()
    except Unreadable as error:
        uses, models, ranks = [Use(role="model", why_not=CANNOT_BE_DETERMINED)], {}, world_size
        findings = [report_unknown(str(error))]
    if facts.cpu_collectives:
        findings += find_missing_backends(uses)
    run = ConfiguredRun(
        torch=str(torch.version or ""), world_size=ranks or _DEFAULT_RANKS, packages=_find_packages(version)
    )
    findings += [*find_known_failures(uses, run), *find_replaced_values(settings), *_find_not_read(settings)]
    if version.version is None and len({use.role for use in uses}) < len(uses):
        findings.append(
            note(f"the meaning of this setting depends on the version of {version.of}: give --framework-version")
        )
    return CheckResult(
        framework=facts.name,
        uses=tuple(uses),
        findings=tuple(sorted(dict.fromkeys(findings), key=lambda f: get_args(FindingKind).index(f.kind))),
        version=version,
        torch=torch,
        read_in=facts.read_in,
        world_size=ranks,
        packages=run.packages,
        settings=settings,
        models=models,
    )


def _find_packages(version: CheckedVersion) -> dict[str, str]:
    """Returns, by name, the versions of the packages on which known failures depend.

    The framework has the checked version, even if another version is installed. Returns an empty dict if the user asked
    for all versions.
    """
    if version.source == "not known" and version.asked:
        return {}
    names = {name for entry in read_catalogue() for name in entry.versions}
    return read_installed_versions(names) | ({version.of: str(version.version)} if version.version else {})


def set_ranks(result: CheckResult, world_size: int) -> CheckResult:
    """Returns the result of the same configuration for another number of ranks, without findings.

    Raises Unreadable if a setting cannot be read.
    """
    framework = frameworks.find_framework(result.framework)(result.settings, result.version.version, world_size)
    readings = {role: framework.read(role) for role in framework.list_models()}
    return dataclasses.replace(
        result,
        world_size=world_size,
        uses=tuple(use for reading in readings.values() for use in reading.uses),
        models={role: reading.model for role, reading in readings.items()},
        findings=(),
    )


def list_cases(result: CheckResult) -> list[Case]:
    """Lists the cases that ``--probe`` runs: the cases of all uses in order, without duplicates."""
    return list(dict.fromkeys(case for use in result.uses for case in use.cases))


def parse_version(text: str, option: str) -> Version | None:
    """Parses the version that an option gives; returns None for ``all``.

    Raises UsageError for a text that is no version.
    """
    if text == "all":
        return None
    if text in ("main", "latest"):
        return _NEWEST
    try:
        return Version(text)
    except InvalidVersion:
        raise UsageError(f"{option} {text}: this is not a version; use one like 0.7.1, or main, or all") from None


def _find_version(option: str, given: str | None, distributions: Sequence[str]) -> CheckedVersion:
    """Returns the version that an option gives, or else the version of the first installed distribution.

    Raises UsageError if the option does not give a version.
    """
    if given is not None:
        version = parse_version(given, option)
        return CheckedVersion(
            of=distributions[0], version=version, source="given" if version else "not known", asked=True
        )
    for distribution in distributions:
        try:
            version = Version(importlib.metadata.version(distribution))
        except (importlib.metadata.PackageNotFoundError, InvalidVersion):
            continue
        return CheckedVersion(of=distribution, version=version, source="installed here")
    return CheckedVersion(of=distributions[0])


def _read_world_size(kind: type[Framework], settings: Settings, findings: list[ConfigFinding]) -> int | None:
    """Returns the number of ranks; None if it is not configured or cannot be read.

    A number that cannot be read is added to ``findings``.
    """
    try:
        ranks = kind.count_ranks(settings) or count_launched_ranks(settings)
    except Unreadable as error:
        findings.append(report_unknown(str(error)))
        return None
    return ranks if ranks is not None and ranks > 0 else None


def _find_not_read(settings: Settings) -> list[ConfigFinding]:
    """Reports configuration files that a setting names but that cannot be read here, and launch commands not used."""
    missing = (
        "this names a file that cannot be read here, so its settings are not known; give the file's location as "
        "another argument"
    )
    findings = [report_unknown(missing, row) for row in reading.find_missing_files(settings)]
    if others := settings.find_first(NOT_READ):
        findings.append(note("several commands look like the training command; only the last one is read", others))
    return findings
