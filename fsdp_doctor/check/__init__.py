"""``fsdp-doctor check``: which cases a training configuration amounts to, and what is known of them.

Nothing here imports torch or a framework. ``reading`` makes settings of files, commands and overrides, each of
``frameworks`` makes uses of them, ``configured_model`` and ``config_findings`` say what follows, and ``presentation``
prints it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from fsdp_doctor.check import reading
from fsdp_doctor.check.config_findings import (
    ConfigFinding,
    ConfigFindingKind,
    ConfiguredRun,
    known_failures,
    missing_backends,
    note,
    unknown,
    unknown_keys,
    written_twice,
)
from fsdp_doctor.check.configured_model import ConfiguredModel, with_model
from fsdp_doctor.check.environment_versions import CheckedVersion, VersionSource, installed
from fsdp_doctor.check.frameworks import FRAMEWORKS
from fsdp_doctor.check.frameworks.framework import ALL_VERSIONS, Framework, Given, ModelSettings, version_of
from fsdp_doctor.check.launch_ranks import launched_ranks
from fsdp_doctor.check.named_files import not_read, with_named_files
from fsdp_doctor.check.settings import Settings, Unreadable
from fsdp_doctor.check.use import CANNOT_BE_DETERMINED, Role, Use, merged
from fsdp_doctor.errors import EXIT_BAD_VERDICT, EXIT_OK, CannotRun, UsageError
from fsdp_doctor.matrix.cases import Case

_ANY_RANKS = 2


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """What a configuration amounts to; findings of one kind stand together.

    version, torch: what it was read for, with where that comes from. world_size: the number of ranks that it was read
    for: given, or of the configuration, or the framework's default; None where nothing says it, and then two are
    foretold. read_in: the versions of the framework that its reading rests on. settings: all that was read.
    models: by role, the model that its settings name.
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
        """Whether what every model amounts to is known."""
        return all(use.why_not != CANNOT_BE_DETERMINED for use in self.uses)

    @property
    def exit_code(self) -> int:
        """That nothing is known to fail is said only of what was understood, and is FSDP."""
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
    for all. world_size: goes before what the configuration says. Raises UsageError for what cannot be read or is of no
    framework that is supported.
    """
    settings = with_named_files(reading.read(arguments))
    framework = _framework_of(settings, arguments)
    models: dict[Role, ConfiguredModel] = {}
    version = _version("--framework-version", framework_version, framework.distributions or (framework.name,))
    torch = _version("--torch-version", torch_version, ("torch",))
    try:
        settings = framework.complete(settings)
        ranks, found = (world_size, []) if world_size is not None else _world_size(framework, settings)
        uses: list[Use] = []
        for model in framework.models(settings, Given(framework_version=version.version, world_size=ranks)):
            read, named, more = _read(model, settings)
            uses += read
            models |= {model.role: named} if named else {}
            found += more
        found += framework.findings(settings)
    except Unreadable as error:
        uses, ranks, found = [Use(role="model", why_not=CANNOT_BE_DETERMINED)], world_size, [unknown(str(error))]
    run = ConfiguredRun(torch=str(torch.version or ""), world_size=ranks or _ANY_RANKS)
    found += [
        *(missing_backends(uses) if framework.cpu_collectives else ()),
        *known_failures(uses, run),
        *written_twice(settings),
        *not_read(settings),
        *_asked(uses, version),
    ]
    return CheckResult(
        framework=framework.name,
        uses=tuple(uses),
        findings=tuple(sorted(dict.fromkeys(found), key=_order)),
        version=version,
        torch=torch,
        read_in=framework.read_in,
        world_size=ranks,
        settings=settings,
        models=models,
    )


def cases(result: CheckResult) -> list[Case]:
    """Every case of every use, once, in their order: what ``--probe`` runs."""
    return list(dict.fromkeys(case for one in result.uses for case in one.cases))


def _framework_of(settings: Settings, arguments: Sequence[str]) -> Framework:
    for framework in FRAMEWORKS:
        if framework.recognises(settings):
            return framework
    names = ", ".join(framework.name for framework in FRAMEWORKS)
    raise UsageError(
        f"{', '.join(arguments)}: not a configuration of a supported framework, or not enough of one to know it by; "
        f"these are supported: {names}"
    )


def _version(option: str, given: str | None, distributions: Sequence[str]) -> CheckedVersion:
    if given is None:
        return installed(distributions)
    source: VersionSource = "not known" if given == ALL_VERSIONS else "given"
    return CheckedVersion(of=distributions[0], version=version_of(given, option), source=source)


def _world_size(framework: Framework, settings: Settings) -> tuple[int | None, list[ConfigFinding]]:
    """Without a number of ranks all else can still be said."""
    try:
        ranks = framework.world_size(settings) or launched_ranks(settings)
    except Unreadable as error:
        return None, [unknown(str(error))]
    return ranks if ranks is not None and ranks > 0 else None, []


def _read(
    model: ModelSettings, settings: Settings
) -> tuple[Sequence[Use], ConfiguredModel | None, list[ConfigFinding]]:
    """The uses of one model, and which it is; of one whose settings cannot be read nothing is said but that."""
    unknown_here = [one for section in model.sections for one in unknown_keys(settings, section, model.keys)]
    try:
        read = model.read()
        uses, of_model = with_model(merged(read.uses), read.model)
    except Unreadable as error:
        unread = Use(role=model.role, why_not=CANNOT_BE_DETERMINED)
        return (unread,), None, [unknown(f"{model.role}: {error}"), *unknown_here]
    return uses, read.model, [*read.findings, *of_model, *unknown_here]


def _asked(uses: Sequence[Use], version: CheckedVersion) -> list[ConfigFinding]:
    """Where the version decides and nothing says which it is."""
    if version.version is not None or len({use.role for use in uses}) == len(uses):
        return []
    return [note(f"what this amounts to depends on the version of {version.of}: give --framework-version")]


def _order(finding: ConfigFinding) -> int:
    return get_args(ConfigFindingKind).index(finding.kind)
