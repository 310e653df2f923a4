"""``fsdp-doctor check``: which cases a training configuration amounts to, and what is known of them.

Nothing here imports torch or a framework. ``reading`` makes settings of files and overrides, each of ``frameworks``
makes uses of them, ``configured_model`` and ``config_findings`` say what follows, and ``presentation`` prints it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from fsdp_doctor.check import reading
from fsdp_doctor.check.config_findings import (
    ConfigFinding,
    ConfigFindingKind,
    known_failures,
    missing_backends,
    unknown,
    unknown_keys,
)
from fsdp_doctor.check.configured_model import with_model
from fsdp_doctor.check.frameworks import FRAMEWORKS
from fsdp_doctor.check.frameworks.framework import Framework, Given, ModelSettings, version_of
from fsdp_doctor.check.settings import Settings, Unreadable
from fsdp_doctor.check.use import Use, merged
from fsdp_doctor.errors import EXIT_BAD_VERDICT, EXIT_OK, UsageError
from fsdp_doctor.matrix.cases import Case


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """What a configuration amounts to; findings of one kind stand together.

    world_size: the number of ranks that it was read for: given, or of the configuration, or the framework's default;
    None where nothing says it.
    """

    framework: str
    uses: tuple[Use, ...]
    findings: tuple[ConfigFinding, ...]
    world_size: int | None = None

    @property
    def exit_code(self) -> int:
        return EXIT_BAD_VERDICT if any(finding.bad for finding in self.findings) else EXIT_OK


def check(
    arguments: Sequence[str], *, framework_version: str | None = None, world_size: int | None = None
) -> CheckResult:
    """Reads CONFIG arguments: files, ``-`` for the standard input, overrides ``a.b=value``.

    framework_version: as 0.7.1, or ``main``; None for all that are known. world_size: goes before what the
    configuration says. Raises UsageError for what cannot be read or is of no framework that is supported.
    """
    version = version_of(framework_version) if framework_version is not None else None
    settings = reading.read(arguments)
    framework = _framework_of(settings, arguments)
    try:
        settings = framework.complete(settings)
        ranks, found = (world_size, []) if world_size is not None else _world_size(framework, settings)
        uses: list[Use] = []
        for model in framework.models(settings, Given(framework_version=version, world_size=ranks)):
            read, more = _read(model, settings)
            uses += read
            found += more
        found += framework.findings(settings)
    except Unreadable as error:
        raise UsageError(str(error)) from None
    found += [*missing_backends(uses), *known_failures(uses)]
    return CheckResult(
        framework=framework.name,
        uses=tuple(uses),
        findings=tuple(sorted(dict.fromkeys(found), key=_order)),
        world_size=ranks,
    )


def cases(result: CheckResult) -> list[Case]:
    """Every case of every use, once, in their order: what ``--probe`` runs."""
    return list(dict.fromkeys(case for one in result.uses for case in one.cases))


def _framework_of(settings: Settings, arguments: Sequence[str]) -> Framework:
    for framework in FRAMEWORKS:
        if framework.recognises(settings):
            return framework
    forms = "; ".join(f"{framework.name} ({framework.known_by})" for framework in FRAMEWORKS)
    raise UsageError(
        f"{', '.join(arguments)}: not a configuration of a supported framework; these are supported, each recognised "
        f"by its settings: {forms}"
    )


def _world_size(framework: Framework, settings: Settings) -> tuple[int | None, list[ConfigFinding]]:
    """Without a number of ranks all else can still be said."""
    try:
        ranks = framework.world_size(settings)
    except Unreadable as error:
        return None, [unknown(str(error))]
    return ranks if ranks is not None and ranks > 0 else None, []


def _read(model: ModelSettings, settings: Settings) -> tuple[Sequence[Use], list[ConfigFinding]]:
    """The uses of one model; of a model whose settings cannot be read nothing is said but that."""
    unknown_here = [one for section in model.sections for one in unknown_keys(settings, section, model.keys)]
    try:
        read = model.read()
        uses, of_model = with_model(merged(read.uses), read.model)
    except Unreadable as error:
        unread = Use(role=model.role, why_not="cannot be determined")
        return (unread,), [unknown(f"{model.role}: {error}"), *unknown_here]
    return uses, [*read.findings, *of_model, *unknown_here]


def _order(finding: ConfigFinding) -> int:
    return get_args(ConfigFindingKind).index(finding.kind)
