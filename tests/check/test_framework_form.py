"""Every framework of `fsdp-doctor check` has the one form, and what follows from its settings is said for all alike."""

from __future__ import annotations

import ast
import pathlib

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import fsdp_doctor.check
from fsdp_doctor.check import cases, check, frameworks
from fsdp_doctor.check.frameworks import (
    accelerate,
    axolotl,
    hf_trainer,
    lightning,
    nemo_rl,
    prime_rl,
    skyrl,
    torchtune,
)
from fsdp_doctor.check.frameworks.framework import (
    Framework,
    Given,
    KeyTable,
    ModelReading,
    ModelSettings,
    VersionRange,
    in_question,
    version_of,
)
from fsdp_doctor.check.frameworks.verl import releases, roles
from fsdp_doctor.check.settings import Settings
from fsdp_doctor.check.use import Chosen, extraction, use_of
from fsdp_doctor.errors import UsageError

ACTOR = "actor_rollout_ref.actor"
RANGES: dict[str, tuple[VersionRange, ...]] = {
    "accelerate": accelerate._VERSIONS,
    "transformers": hf_trainer._VERSIONS,
    "verl, legacy workers": tuple(one for one in releases._RELEASES if not one.own_strategy),
    "verl, engine": (
        VersionRange(label="before it", versions=SpecifierSet("<0.6")),
        *(one for one in releases._RELEASES if one.engine),
    ),
    "verl, its old SFT trainer": (
        *releases._OLD_SFT,
        VersionRange(label="after it", versions=SpecifierSet(">=0.8")),
    ),
    "axolotl": axolotl._VERSIONS,
    "Lightning": lightning._VERSIONS,
    "NeMo-RL": nemo_rl._VERSIONS,
    "prime-rl": prime_rl._VERSIONS,
    "SkyRL": skyrl._VERSIONS,
    "torchtune": torchtune._VERSIONS,
}
VERSIONS = ("0.0.1", "0.7.1", "0.8", "0.8.1.dev0", "0.9.0", "0.9.1", "0.12rc1", "1.6.9", "1.7", "4.57", "5.0", "5.9.1")


# Versions


@pytest.mark.parametrize("ranges", RANGES.values(), ids=RANGES)
@pytest.mark.parametrize("version", [*VERSIONS, "5.10.0.dev0", "6", "main", "latest"])
def test_every_version_is_in_exactly_one_range(ranges: tuple[VersionRange, ...], version: str) -> None:
    assert len(in_question(ranges, version_of(version))) == 1


def test_without_a_version_every_range_is_in_question() -> None:
    assert in_question(accelerate._VERSIONS, None) == list(accelerate._VERSIONS)


def test_main_is_newer_than_every_release_and_a_pre_release_is_what_it_leads_to() -> None:
    assert version_of("main") > Version("2026.12")
    since = [VersionRange(label="since 0.9", versions=SpecifierSet(">=0.9"))]
    assert in_question(since, version_of("v0.9.0rc1")) == since
    assert in_question(since, version_of("0.9.0.dev3+g1234")) == since
    assert in_question(since, version_of("0.8.9")) == []


@pytest.mark.parametrize("text", ["new", "", "0.7.x", "v", "1..2"])
def test_what_is_not_a_version_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="this is not a version"):
        version_of(text)


# The form


def _toy(read_settings: list[Given]) -> Framework:
    """A framework with one model and one switch."""

    def models(settings: Settings, given: Given) -> list[ModelSettings]:
        def read() -> ModelReading:
            read_settings.append(given)
            uses = [
                use_of(
                    "model",
                    versions.label,
                    {
                        "strategy": Chosen("fsdp2"),
                        "offload": KeyTable(policy=("toy.offload",)).offload(settings, "the default"),
                    },
                    lambda scenario: [extraction("checkpoint", scenario, "state_dict")],
                )
                for versions in in_question(ranges, given.framework_version)
            ]
            return ModelReading(uses=uses)

        return [ModelSettings(role="model", sections=("toy",), keys=("offload", "ranks"), read=read)]

    ranges = [
        VersionRange(label="before 2", versions=SpecifierSet("<2")),
        VersionRange(label="since 2", versions=SpecifierSet(">=2")),
    ]
    return Framework(
        name="toy",
        read_in="1 to 3",
        recognises=lambda settings: bool(settings.below("toy")),
        models=models,
        world_size=lambda settings: settings.number("toy.ranks"),
    )


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> list[Given]:
    """What is given to the toy framework, each time that it is read."""
    given: list[Given] = []
    monkeypatch.setattr(fsdp_doctor.check, "FRAMEWORKS", (*frameworks.FRAMEWORKS, _toy(given)))
    return given


def test_a_framework_is_added_by_one_record(toy: list[Given]) -> None:
    result = check(["toy.offload=true", "toy.ranks=3"])
    assert result.framework == "toy"
    assert [case.id for case in cases(result)] == ["fsdp2/policy/unstaged/state_dict"]
    assert [use.versions for use in result.uses] == [""], "ranges that do the same are told once"
    assert [given.world_size for given in toy] == [3]


def test_a_key_that_the_table_of_a_framework_lacks_is_said(toy: list[Given]) -> None:
    (found,) = [one for one in check(["toy.offload=true", "toy.ofload=1"]).findings if one.kind == "unknown"]
    assert found.sentence.startswith("'ofload' is not a known key of toy")
    assert found.settings == ("toy.ofload=1 (command line)",)


def test_a_setting_that_cannot_be_read_leaves_its_model_undetermined_and_says_which(toy: list[Given]) -> None:
    result = check(["toy.offload=${env}", "toy.ofload=1"])
    assert [(use.scenario, use.why_not) for use in result.uses] == [(None, "cannot be determined")]
    sentences = [one.sentence for one in result.findings]
    assert "model: toy.offload=${env} (command line) is neither true nor false" in sentences
    assert len(sentences) == 2, "the key that is not known is said beside it"


def test_no_framework_reads_another_ones_module() -> None:
    folder = pathlib.Path(frameworks.__file__).parent
    shared = {"framework", "fsdp_section"}
    names = {path.stem if path.is_file() else path.name for path in folder.iterdir()} - shared - {"__init__"}
    read = set()
    for module in folder.rglob("*.py"):
        own = module.relative_to(folder).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith(f"{frameworks.__name__}."):
                other = str(node.module).removeprefix(f"{frameworks.__name__}.").split(".")[0]
                if own != "__init__" and other != own:
                    read.add(other)
            elif isinstance(node, ast.ImportFrom) and node.module == frameworks.__name__:
                read |= {name.name for name in node.names} - {own}
    assert read == shared
    assert {"verl", "accelerate", "hf_trainer", "torchtitan"} <= names


# The number of ranks


@pytest.mark.parametrize(
    ("arguments", "given", "expected"),
    [
        ([f"{ACTOR}.strategy=fsdp2", "trainer.n_gpus_per_node=4", "trainer.nnodes=2"], None, 8),
        ([f"{ACTOR}.strategy=fsdp2", "trainer.n_gpus_per_node=4", "trainer.nnodes=2"], 3, 3),
        (["engine.strategy=fsdp2"], None, None),
        (["distributed_type=FSDP", "num_processes=6"], None, 6),
        (["distributed_type=FSDP"], 2, 2),
        (["distributed_type=FSDP", "num_processes=-1"], None, None),
        (["trainer.strategy=fsdp", "trainer.devices='0,1'", "trainer.num_nodes=3"], None, 6),
        (["trainer.strategy=fsdp", "trainer.devices=-1", "trainer.num_nodes=3"], None, None),
        (["trainer.model.fsdp_cpu_offload=true", "trainer_gpu_ids=[2, 3]"], None, 2),
        (["base_model=small", "datasets=[]", "fsdp_version=2", "num_processes=4"], None, 4),
        (["base_model=small", "datasets=[]", "fsdp_version=2", "nproc_per_node=4", "nnodes=2"], None, 8),
        (["fsdp=full_shard", "output_dir=out"], None, None),
        (["training.enable_cpu_offload=true"], 4, 4),
    ],
)
def test_the_result_has_the_number_of_ranks_that_it_was_read_for(
    arguments: list[str], given: int | None, expected: int | None
) -> None:
    assert check(arguments, world_size=given).world_size == expected


@pytest.mark.parametrize(
    ("arguments", "row"),
    [
        (["distributed_type=FSDP", "num_processes=many"], "num_processes=many"),
        ([f"{ACTOR}.strategy=fsdp2", "trainer.nnodes=many"], "trainer.nnodes=many"),
    ],
)
def test_a_number_of_ranks_that_cannot_be_read_is_said_and_the_rest_is_read(arguments: list[str], row: str) -> None:
    result = check(arguments)
    assert result.world_size is None
    assert cases(result)
    assert [one.sentence for one in result.findings if one.kind == "unknown"] == [
        f"{row} (command line) is not a whole number"
    ]
    assert check(arguments, world_size=2).world_size == 2


def test_a_key_that_a_version_does_not_read_cannot_stop_it() -> None:
    asked = ["fsdp=full_shard", "output_dir=out", "fsdp_config.state_dict_type=${oc.env:TYPE}"]
    assert cases(check(asked, framework_version="5.9"))
    assert not cases(check(asked, framework_version="5.10"))


def test_a_models_settings_are_found_in_newer_and_older_layouts() -> None:
    assert roles.CRITIC.keys("param_offload") == (
        "critic.fsdp.param_offload",
        "critic.model.fsdp_config.param_offload",
    )
