"""The base class of every framework whose configurations ``check`` understands.

A framework is one class, and beside it one table with its keys, its defaults and the versions that differ.
"""

from __future__ import annotations

import functools
import pathlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar, get_args, overload

import msgspec
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from fsdp_doctor.check.findings import ConfigFinding, ConfiguredModel, note
from fsdp_doctor.check.settings import Setting, Settings, Unreadable
from fsdp_doctor.check.use import Because, Chosen, ExtractionPoint, OffloadChoice, Role, Use, make_use
from fsdp_doctor.matrix.axes import AxisName, Backend, Model, Sharding
from fsdp_doctor.matrix.cases import Scenario

# Keys that mean the same in newer and older layouts: the first that is set counts.
Keys: TypeAlias = tuple[str, ...]


class VersionRange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Versions of a framework that treat a configuration alike.

    label: its name for the user, empty where all versions are alike. versions: a version specifier.
    """

    label: str = ""
    versions: str = ""


class KeyTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of one model's settings.

    sections: those of its FSDP settings. policy: whether it is under the policy. param_offload, optimizer_offload:
    whether the framework moves them. replicas: how many times it is replicated, in ranks. shard_group: in how many
    ranks it is sharded; a negative number is all. adapter: a rank, which is positive with one, or a flag, or a table.
    path: of the model.
    """

    sections: Keys = ()
    policy: Keys = ()
    param_offload: Keys = ()
    optimizer_offload: Keys = ()
    replicas: Keys = ()
    shard_group: Keys = ()
    adapter: Keys = ()
    path: Keys = ()


V = TypeVar("V", bound=VersionRange)
M = TypeVar("M", bound=KeyTable)


class FrameworkFacts(msgspec.Struct, Generic[V, M], frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A framework's table, ``NAME.toml`` beside its class. Its own types of ranges and models have further keys.

    read_in: the versions of its source that it was read in. distributions: its packages; the version of the first that
    is installed is taken where none is given. section_keys: the words that a section of FSDP settings can have; empty
    where any can be there. cpu_collectives: whether it runs collectives over shards that the policy keeps on the CPU,
    as to clip gradients. versions: ranges that together hold every version. models: by role, or by name.
    plan: what ``memory plan`` reads besides; ``PlanKeys`` in plan/configured_job.py has the keys.
    """

    name: str
    read_in: str
    distributions: tuple[str, ...] = ()
    section_keys: str = ""
    cpu_collectives: bool = True
    versions: tuple[V, ...] = ()
    models: Mapping[str, M] = {}
    plan: Mapping[str, Any] = {}


@overload
def load_facts(name: str) -> FrameworkFacts[VersionRange, KeyTable]: ...
@overload
def load_facts(name: str, versions: type[V]) -> FrameworkFacts[V, KeyTable]: ...
@overload
def load_facts(name: str, versions: type[V], keys: type[M]) -> FrameworkFacts[V, M]: ...
def load_facts(name: str, versions: Any = VersionRange, keys: Any = KeyTable) -> Any:
    """Reads a framework's table, with its ranges of versions and its models as those types."""
    table = pathlib.Path(__file__).with_name("frameworks") / f"{name}.toml"
    return msgspec.toml.decode(table.read_bytes(), type=FrameworkFacts[versions, keys])


@dataclass(frozen=True, kw_only=True)
class ModelReading:
    """The uses of one model, one for each range of versions in question; the model itself; and findings on it."""

    uses: Sequence[Use]
    model: ConfiguredModel = field(default_factory=ConfiguredModel)
    findings: Sequence[ConfigFinding] = ()


@dataclass(frozen=True)
class Framework(ABC):
    """A configuration of one framework. Every method can raise UsageError and Unreadable.

    version: of the framework, None for all. world_size: the number of ranks, None where nothing says it.
    """

    facts: ClassVar[FrameworkFacts[Any, Any]]
    settings: Settings
    version: Version | None = None
    world_size: int | None = None

    @staticmethod
    @abstractmethod
    def recognizes(settings: Settings) -> bool:
        """Returns whether the settings are a configuration of this framework."""

    @staticmethod
    def complete(settings: Settings) -> Settings:
        """The settings with those of files that a setting names."""
        return settings

    @staticmethod
    def count_ranks(settings: Settings) -> int | None:
        """The number of ranks by the settings, or the framework's default; None for that of the launch command."""
        return None

    @abstractmethod
    def read(self, role: Role) -> ModelReading:
        """The uses of one of the models."""

    def list_models(self) -> Mapping[Role, tuple[str, ...]]:
        """Maps the role of each model of the run to the sections of its FSDP settings; by default each of the table."""
        models = self.facts.models or {"model": KeyTable()}
        return {role: self.list_keys(role).sections for role in get_args(Role) if role in models}

    def list_section_keys(self) -> Keys:
        """Names all keys that a section of FSDP settings can have; empty where they are not known."""
        return tuple(self.facts.section_keys.split())

    def find_problems(self) -> Iterable[ConfigFinding]:
        """Findings on the configuration as a whole."""
        return ()

    def list_keys(self, role: Role) -> KeyTable:
        """The keys of a model. Raises KeyError for a role that the table lacks, unless it has no models at all."""
        table: KeyTable = self.facts.models[role] if self.facts.models else KeyTable()
        return table


class FsdpFramework(Framework, Generic[V]):
    """A configuration of a framework that trains with FSDP."""

    @abstractmethod
    def choose_axes(self, role: Role, versions: V) -> Mapping[AxisName, Chosen]:
        """The values of the axes that a model has under those versions, in the order in which they are shown."""

    @abstractmethod
    def list_extractions(self, role: Role, versions: V, scenario: Scenario) -> Iterable[ExtractionPoint]:
        """Lists the places where those versions extract the weights of a model, or load them."""

    def list_ranges(self) -> Sequence[V]:
        """The ranges that contain the version; all of them where none is given."""
        return select_matching(self.facts.versions or (VersionRange(),), self.version)

    def read_role(
        self, role: Role, findings: Iterable[ConfigFinding] = (), ranges: Sequence[V] | None = None
    ) -> ModelReading:
        """The reading of a model under FSDP. ranges: of versions; None for all in question."""
        uses = [
            make_use(
                role,
                versions.label,
                self.choose_axes(role, versions),
                functools.partial(self.list_extractions, role, versions),
            )
            for versions in (self.list_ranges() if ranges is None else ranges)
        ]
        return ModelReading(uses=uses, model=self.read_model(role), findings=tuple(findings))

    def read_model(self, role: Role) -> ConfiguredModel:
        keys = self.list_keys(role)
        path, ranks = self.settings.find_first(*keys.path), self._shard_group(keys)
        if self.world_size is None:
            return ConfiguredModel(path=path)
        if not 0 < ranks < self.world_size:
            ranks = max(1, self.world_size // (self.settings.read_number(*keys.replicas) or 1))
        return ConfiguredModel(path=path, ranks=ranks)

    def choose_offload(self, role: Role, default: str) -> OffloadChoice:
        """The policy if it is on, or else the manual offloads that are. default: where no setting says anything."""
        keys = self.list_keys(role)
        policy = self.settings.find_first(*keys.policy)
        if self.settings.read_flag(*keys.policy):
            return OffloadChoice(policy=policy)
        return OffloadChoice(
            param=self.settings.find_first_true(*keys.param_offload),
            optimizer=self.settings.find_first_true(*keys.optimizer_offload),
            default=str(policy or default),
        )

    def choose_sharding(self, role: Role) -> Chosen:
        keys = self.list_keys(role)
        replicas, group = self.settings.read_number(*keys.replicas) or 1, self._shard_group(keys)
        row = self.settings.find_first(*keys.replicas) or self.settings.find_first(*keys.shard_group)
        if self.world_size and 0 < group < self.world_size:
            return Chosen(Sharding.SIZE1 if group == 1 else Sharding.HSDP, f"{row} of {self.world_size} ranks")
        return Chosen(Sharding.HSDP, row) if replicas > 1 else Chosen(Sharding.FULL)

    def choose_model(self, role: Role) -> Chosen:
        keys = self.list_keys(role).adapter
        row = self.settings.find_first(*keys)
        if row is None or isinstance(row.value, dict):
            row = next((row for key in keys for row in self.settings.list_below(key)), row)
            has_adapter = row is not None
        else:
            is_flag = isinstance(row.value, bool)
            has_adapter = bool(row.value if is_flag else self.settings.read_number(*keys))
        return Chosen(Model.QWEN3_LORA, row) if has_adapter else Chosen(Model.QWEN3)

    def find_other_parallelisms(self, section: str, degrees: Sequence[str]) -> list[ConfigFinding]:
        """A note on the degrees of other parallelisms that are more than 1."""
        rows = [self.settings.find_first(f"{section}.{degree}") for degree in degrees]
        others = [row for row in rows if row and (self.settings.read_number(row.key) or 1) > 1]
        sentence = "the probe has no parallelism other than FSDP; its cases ignore these settings"
        return [note(sentence, *others)] if others else []

    def _shard_group(self, keys: KeyTable) -> int:
        """Raises Unreadable for 0, by which verl and SkyRL divide (create_device_mesh)."""
        size = self.settings.read_number(*keys.shard_group)
        if size == 0:
            row = self.settings.find_first(*keys.shard_group)
            raise Unreadable(f"{row} is a group without ranks, and the job fails; use -1 for all ranks")
        return -1 if size is None else size


def report_not_under_fsdp(role: Role, because: Because, *findings: ConfigFinding) -> ModelReading:
    """The reading of a model that another engine or wrapper trains."""
    return ModelReading(uses=(Use(role=role, why_not=f"not under FSDP: {because}"),), findings=findings)


def trains_with_fsdp(row: Setting, with_fsdp: Collection[str], without: Collection[str]) -> bool:
    """Returns whether the named engine moves the model first. Raises Unreadable for an engine in neither list."""
    if str(row.value) not in (*with_fsdp, *without):
        raise Unreadable(f"{row}: this engine is not known, or has its own FSDP, which is not checked")
    return str(row.value) in with_fsdp


def choose_backend(row: Setting | None, default: str) -> Chosen:
    """The process group that a setting names, as ``cpu:gloo,cuda:nccl``; default: why it is NCCL alone without one."""
    backends = [part.rpartition(":")[2].strip() for part in str(row.value).split(",")] if row else []
    return Chosen(Backend.MIXED if "gloo" in backends else Backend.DEVICE_ONLY, row or default)


def select_matching(ranges: Sequence[V], version: Version | None) -> list[V]:
    """The ranges that contain the version; all of them where none is given. A pre-release counts as its release."""
    if version is None:
        return list(ranges)
    return [item for item in ranges if SpecifierSet(item.versions).contains(version.base_version)]
