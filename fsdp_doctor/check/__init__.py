"""``fsdp-doctor check``: which cases a training configuration amounts to, and what is known of them.

Nothing here imports torch or a framework. ``reading`` makes settings of files and overrides; a module for each
framework makes uses of them; ``findings`` says what is known; ``report`` prints it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

from fsdp_doctor.check import common, reading, use
from fsdp_doctor.check.frameworks import accelerate, hf_trainer, torchtitan, verl
from fsdp_doctor.check.settings import Unreadable
from fsdp_doctor.check.use import ConfigFinding, Given, Use
from fsdp_doctor.errors import EXIT_BAD_VERDICT, EXIT_OK, UsageError
from fsdp_doctor.matrix.cases import Case

# In this order: what a configuration of one has is never in one of those before it.
_FRAMEWORKS: tuple[ModuleType, ...] = (verl, torchtitan, accelerate, hf_trainer)


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """What was read, for ``report`` and for ``--probe``."""

    framework: str
    uses: tuple[Use, ...]
    findings: tuple[ConfigFinding, ...]

    @property
    def exit_code(self) -> int:
        return EXIT_BAD_VERDICT if any(finding.bad for finding in self.findings) else EXIT_OK


def check(
    arguments: Sequence[str], *, framework_version: str | None = None, world_size: int | None = None
) -> CheckResult:
    """Reads CONFIG arguments. Raises UsageError for what cannot be read or is of no framework that is known here."""
    given = Given(
        framework_version=use.version_of(framework_version) if framework_version is not None else None,
        world_size=world_size,
    )
    settings = reading.read(arguments)
    framework = next((module for module in _FRAMEWORKS if module.recognises(settings)), None)
    if framework is None:
        forms = "; ".join(f"{module.NAME} ({module.KNOWN_BY})" for module in _FRAMEWORKS)
        raise UsageError(f"{', '.join(arguments)}: no framework that is known here; known are {forms}")
    try:
        read = framework.read(settings, given)
    except Unreadable as error:
        raise UsageError(str(error)) from None
    found = (*read.findings, *common.backends(read.uses), *common.known(read.uses))
    return CheckResult(framework=framework.NAME, uses=read.uses, findings=tuple(sorted(found, key=_order)))


def cases(result: CheckResult) -> list[Case]:
    """Every case of every use, once, in their order: what ``--probe`` runs."""
    return list(dict.fromkeys(case for one in result.uses for case in one.cases))


def _order(finding: ConfigFinding) -> int:
    return ("conflict", "known", "unknown", "note").index(finding.kind)
