"""``fsdp-doctor check``: the cases that a training configuration amounts to, and what is known of them.

Nothing here imports torch or a framework. ``reading`` makes settings of files, launch commands and overrides; each of
``frameworks`` makes uses of them; ``findings`` and ``configured_model`` hold what follows; ``presentation`` prints it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from fsdp_doctor.check import reading
from fsdp_doctor.check.configured_model import ConfiguredModel, apply_model
from fsdp_doctor.check.findings import (
    ConfigFinding,
    ConfiguredRun,
    FindingKind,
    find_known_failures,
    find_missing_backends,
    find_replaced_values,
    find_unknown_keys,
    note,
    unknown,
)
from fsdp_doctor.check.frameworks import FRAMEWORKS
from fsdp_doctor.check.frameworks.framework import CheckedVersion, Framework, Given, checked_version
from fsdp_doctor.check.launch_commands import NOT_READ, count_launched_ranks
from fsdp_doctor.check.settings import Settings, Unreadable
from fsdp_doctor.check.use import CANNOT_BE_DETERMINED, Role, Use, merge_equal
from fsdp_doctor.errors import EXIT_BAD_VERDICT, EXIT_OK, CannotRun, UsageError
from fsdp_doctor.matrix.cases import Case

# The number of ranks of the predictions where the configuration says none.
_DEFAULT_RANKS = 2


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """The answer to a configuration; findings of one kind are adjacent.

    version, torch: what it was read for. world_size: the number of ranks that it was read for: given, or of the
    configuration, or the framework's default; None where nothing says it, and then the predictions are for two.
    read_in: the versions of the framework whose sources the reading rests on. settings: all that was read. models: by
    role, the model that the settings name.
    """

    framework: str
    uses: tuple[Use, ...]
    findings: tuple[ConfigFinding, ...]
    version: CheckedVersion
    torch: CheckedVersion
    read_in: str
    world_size: int | None = None
    settings: Settings = field(default_factory=Settings)
    models: Mapping[Role, ConfiguredModel] = field(default_factory=dict)

    @property
    def under_fsdp(self) -> bool:
        return any(use.scenario is not None for use in self.uses)

    @property
    def determined(self) -> bool:
        """Whether every model could be read."""
        return all(use.why_not != CANNOT_BE_DETERMINED for use in self.uses)

    @property
    def exit_code(self) -> int:
        """Success only where everything was understood, and is FSDP."""
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
    """Reads CONFIG arguments: files, ``-`` for the standard input, overrides ``a.b=value``.

    framework_version, torch_version: as 0.7.1, or ``main``, or ``all``; None for the one that is installed here, or
    for all. world_size: the number of ranks, whatever the configuration says. Raises UsageError for what cannot be
    read, or belongs to no supported framework.
    """
    settings = reading.read(arguments)
    framework = _recognize(settings, arguments)
    version = checked_version("--framework-version", framework_version, framework.distributions or (framework.name,))
    torch = checked_version("--torch-version", torch_version, ("torch",))
    models: Mapping[Role, ConfiguredModel] = {}
    findings: list[ConfigFinding] = []
    ranks = world_size
    try:
        settings = framework.complete(settings)
        if ranks is None:
            ranks = _read_world_size(framework, settings, findings)
        uses, models = _read_models(framework, settings, Given(version.version, ranks), findings)
        findings += framework.findings(settings)
    except Unreadable as error:
        uses, ranks = [Use(role="model", why_not=CANNOT_BE_DETERMINED)], world_size
        findings = [unknown(str(error))]
    if framework.cpu_collectives:
        findings += find_missing_backends(uses)
    run = ConfiguredRun(torch=str(torch.version or ""), world_size=ranks or _DEFAULT_RANKS)
    findings += [*find_known_failures(uses, run), *find_replaced_values(settings), *_find_not_read(settings)]
    if version.version is None and len({use.role for use in uses}) < len(uses):
        findings.append(note(f"what this amounts to depends on the version of {version.of}: give --framework-version"))
    return CheckResult(
        framework=framework.name,
        uses=tuple(uses),
        findings=tuple(sorted(dict.fromkeys(findings), key=lambda f: get_args(FindingKind).index(f.kind))),
        version=version,
        torch=torch,
        read_in=framework.read_in,
        world_size=ranks,
        settings=settings,
        models=models,
    )


def with_ranks(result: CheckResult, world_size: int) -> CheckResult:
    """The uses and models of the same configuration on another number of ranks, without findings.

    Raises Unreadable.
    """
    framework = next(framework for framework in FRAMEWORKS if framework.name == result.framework)
    given = Given(result.version.version, world_size)
    readings = {role: framework.read(role, result.settings, given) for role in framework.models(result.settings, given)}
    return dataclasses.replace(
        result,
        world_size=world_size,
        uses=tuple(use for reading in readings.values() for use in reading.uses),
        models={role: reading.model for role, reading in readings.items()},
        findings=(),
    )


def cases(result: CheckResult) -> list[Case]:
    """Every case of every use, once, in their order: what ``--probe`` runs."""
    return list(dict.fromkeys(case for use in result.uses for case in use.cases))


def _recognize(settings: Settings, arguments: Sequence[str]) -> Framework:
    for framework in FRAMEWORKS:
        if framework.recognizes(settings):
            return framework
    names = ", ".join(framework.name for framework in FRAMEWORKS)
    raise UsageError(
        f"{', '.join(arguments)}: not a configuration of a supported framework, or not enough of one to know it by; "
        f"these are supported: {names}"
    )


def _read_world_size(framework: Framework, settings: Settings, findings: list[ConfigFinding]) -> int | None:
    """None where nothing says it, or it cannot be read, which is a finding: all else can still be read."""
    try:
        ranks = framework.world_size(settings) or count_launched_ranks(settings)
    except Unreadable as error:
        findings.append(unknown(str(error)))
        return None
    return ranks if ranks is not None and ranks > 0 else None


def _read_models(
    framework: Framework, settings: Settings, given: Given, findings: list[ConfigFinding]
) -> tuple[list[Use], dict[Role, ConfiguredModel]]:
    """The uses of every model, and the model itself by role; a model whose settings cannot be read has one use."""
    uses: list[Use] = []
    models: dict[Role, ConfiguredModel] = {}
    for role, sections in framework.models(settings, given).items():
        strange = [row for section in sections for row in find_unknown_keys(settings, section, framework.keys)]
        try:
            reading = framework.read(role, settings, given)
            with_model, of_model = apply_model(merge_equal(reading.uses), reading.model)
        except Unreadable as error:
            uses.append(Use(role=role, why_not=CANNOT_BE_DETERMINED))
            findings += [unknown(f"{role}: {error}"), *strange]
            continue
        uses += with_model
        models[role] = reading.model
        findings += [*reading.findings, *of_model, *strange]
    return uses, models


def _find_not_read(settings: Settings) -> list[ConfigFinding]:
    """Findings on named files that are not here, and on further launch commands."""
    missing = "this names a file that cannot be read here, so what it sets is not known; give it beside"
    findings = [unknown(missing, row) for row in reading.find_missing_files(settings)]
    if others := settings.first(NOT_READ):
        findings.append(note("of several commands that look like the training the last is read", others))
    return findings
