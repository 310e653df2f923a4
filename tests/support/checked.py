"""Configurations to check, and functions that select parts of the results."""

from __future__ import annotations

from fsdp_doctor.check import CheckResult, check
from fsdp_doctor.check.findings import ConfigFinding
from fsdp_doctor.check.use import Use
from fsdp_doctor.known.failures import KnownFailure, Trigger
from fsdp_doctor.matrix.contracts import Direction
from fsdp_doctor.matrix.methods import find_method
from support.places import TESTS

CONFIGS = TESTS / "check" / "configs"
GOOD = (
    *("verl_grpo.yaml", "verl_policy.sh", "verl_fsdp1.yaml", "verl_sft.yaml", "accelerate_v1.yaml"),
    *("accelerate_v2.yaml", "trainer.json", "trl.yaml", "torchtitan.toml", "axolotl.yml", "areal.yaml"),
    *("nemo_rl.yaml", "prime_rl.toml", "skyrl.sh", "swift.sh", "trainer_flags.sh", "accelerate_launch.sh"),
    *("lightning.yaml", "verl_sft_old.sh", "verl_lora.sh"),
)
ACTOR = "actor_rollout_ref.actor"
FSDP2 = f"{ACTOR}.strategy=fsdp2"


def checked(*arguments: str, version: str = "all", world: int | None = None) -> CheckResult:
    """Checks for every version of torch, and for the given or every version of the framework, whatever is installed."""
    named = [str(CONFIGS / argument) if (CONFIGS / argument).is_file() else argument for argument in arguments]
    return check(named, framework_version=version, world_size=world, torch_version="all")


def flag(name: str, value: str = "true", section: str = f"{ACTOR}.fsdp_config") -> str:
    return f"{section}.{name}={value}"


def use_of(result: CheckResult, role: str) -> Use:
    (use,) = [use for use in result.uses if use.role == role]
    return use


def ids(use: Use) -> list[str]:
    """Lists the ids of the extractions."""
    return _of_direction(use, "out")


def loads(use: Use) -> list[str]:
    return _of_direction(use, "in")


def _of_direction(use: Use, direction: Direction) -> list[str]:
    return [case.id for case in use.cases if find_method(case.method, case.scenario.version).direction == direction]


def of_kind(result: CheckResult, kind: str) -> list[ConfigFinding]:
    return [finding for finding in result.findings if finding.kind == kind]


def said(result: CheckResult, kind: str) -> str:
    return "\n".join(finding.sentence for finding in of_kind(result, kind))


def entry(name: str, **trigger: tuple[str, ...]) -> KnownFailure:
    return KnownFailure(
        id=name,
        short_code="FD000",
        group="a",
        title="it breaks",
        verdict="crash",
        cause="a cause",
        remedy="a remedy",
        remedy_run="not run",
        evidence="reported",
        references=("a/b#1",),
        triggers=(Trigger(trigger),),
    )


def cases_of_roles(result: CheckResult) -> dict[str, list[str]]:
    """Maps each role to the ids of its extraction cases. The configuration must have a known version."""
    return {use.role: ids(use) for use in result.uses}
