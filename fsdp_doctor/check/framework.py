"""Base class of the frameworks whose configurations ``check`` understands.

Each framework consists of a class and a TOML table next to it, with its keys, its defaults and the differences between
its versions.
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

# Keys with the same meaning in newer and older layouts. The first one that is set counts.
Keys: TypeAlias = tuple[str, ...]


class VersionRange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Versions of a framework that treat a configuration the same way.

    ``label`` is the name shown to the user, empty if all versions behave the same. ``versions`` is a version specifier.
    """

    label: str = ""
    versions: str = ""


class KeyTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of one model's settings.

    ``sections`` are the sections with the model's FSDP settings. ``policy`` turns on the offload policy;
    ``param_offload`` and ``optimizer_offload`` turn on the framework's manual offloads. ``replicas`` is the number of
    replicas, and ``shard_group`` is the number of ranks that share one replica; a negative number means all ranks.
    ``adapter`` sets a LoRA rank, a flag, or a table. ``path`` names the model.
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
    """A framework's table, stored as ``NAME.toml`` next to its class. Frameworks may use types with further keys.

    ``read_in`` names the versions whose source the table is based on. ``distributions`` are the framework's packages;
    if no version is given, the version of the first installed package counts. ``section_keys`` are the keys allowed in
    a section of FSDP settings; empty if any key is allowed. ``cpu_collectives`` is true if the framework runs
    collectives on shards that the policy keeps on the CPU, for example to clip gradients. ``versions`` are ranges that
    together cover every version. ``models`` maps each role or name to the table of a model. ``plan`` is a section that
    only ``memory plan`` reads; see ``PlanKeys`` in plan/configured_job.py.
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
    """Loads a framework's table, using the given types for its version ranges and its models."""
    table = pathlib.Path(__file__).with_name("frameworks") / f"{name}.toml"
    return msgspec.toml.decode(table.read_bytes(), type=FrameworkFacts[versions, keys])


@dataclass(frozen=True, kw_only=True)
class ModelReading:
    """Result of reading one model: one use per relevant range of versions, the model itself, and findings about it."""

    uses: Sequence[Use]
    model: ConfiguredModel = field(default_factory=ConfiguredModel)
    findings: Sequence[ConfigFinding] = ()


@dataclass(frozen=True)
class Framework(ABC):
    """Configuration of one framework. Every method may raise UsageError and Unreadable.

    ``version`` is the framework's version, None for all. ``world_size`` is the number of ranks, None if unknown.
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
        """Returns the settings, with the settings of files that a setting names."""
        return settings

    @staticmethod
    def count_ranks(settings: Settings) -> int | None:
        """Returns the number of ranks in the settings or by default; None if the launch command decides."""
        return None

    @abstractmethod
    def read(self, role: Role) -> ModelReading:
        """Reads the settings of the model with this role."""

    def list_models(self) -> Mapping[Role, tuple[str, ...]]:
        """Maps the role of each model in the run to the sections of its FSDP settings.

        The default implementation lists all models of the framework's table.
        """
        models = self.facts.models or {"model": KeyTable()}
        return {role: self.list_keys(role).sections for role in get_args(Role) if role in models}

    def list_section_keys(self) -> Keys:
        """Lists all keys that a section of FSDP settings may have; empty if they are not known."""
        return tuple(self.facts.section_keys.split())

    def find_problems(self) -> Iterable[ConfigFinding]:
        """Finds problems of the configuration as a whole."""
        return ()

    def list_keys(self, role: Role) -> KeyTable:
        """Returns the configuration's keys for the model of a role.

        Raises KeyError if the table has models, but none for this role.
        """
        table: KeyTable = self.facts.models[role] if self.facts.models else KeyTable()
        return table


class FsdpFramework(Framework, Generic[V]):
    """Configuration of a framework that trains with FSDP."""

    @abstractmethod
    def choose_axes(self, role: Role, versions: V) -> Mapping[AxisName, Chosen]:
        """Maps axes of the matrix to the values that the model has under these versions, in display order."""

    @abstractmethod
    def list_extractions(self, role: Role, versions: V, scenario: Scenario) -> Iterable[ExtractionPoint]:
        """Lists the places where these versions extract or load the weights of a model."""

    def list_ranges(self) -> Sequence[V]:
        """Lists the ranges that contain the version; all ranges if no version is given."""
        return select_matching(self.facts.versions or (VersionRange(),), self.version)

    def read_role(
        self, role: Role, findings: Iterable[ConfigFinding] = (), ranges: Sequence[V] | None = None
    ) -> ModelReading:
        """Reads the settings of a model under FSDP, for the given version ranges or for all relevant ranges."""
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
        """Chooses the policy if it is on, otherwise the manual offloads that are on.

        ``default`` is the explanation if no setting decides.
        """
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
        """Makes a note on parallelisms other than FSDP whose degree is greater than 1."""
        rows = [self.settings.find_first(f"{section}.{degree}") for degree in degrees]
        others = [row for row in rows if row and (self.settings.read_number(row.key) or 1) > 1]
        sentence = "the probe has no parallelism other than FSDP; its cases ignore these settings"
        return [note(sentence, *others)] if others else []

    def _shard_group(self, keys: KeyTable) -> int:
        """Returns the size of a shard group; -1 means all ranks.

        Raises Unreadable for 0, by which verl and SkyRL would divide.
        """
        size = self.settings.read_number(*keys.shard_group)
        if size == 0:
            row = self.settings.find_first(*keys.shard_group)
            raise Unreadable(f"{row} is a group without ranks, and the job fails; use -1 for all ranks")
        return -1 if size is None else size


def report_not_under_fsdp(role: Role, because: Because, *findings: ConfigFinding) -> ModelReading:
    """Returns the reading of a model that an engine or a wrapper other than FSDP trains."""
    return ModelReading(uses=(Use(role=role, why_not=f"not under FSDP: {because}"),), findings=findings)


def trains_with_fsdp(row: Setting, with_fsdp: Collection[str], without: Collection[str]) -> bool:
    """Returns whether the engine in ``row`` trains with FSDP. Raises Unreadable for an engine in neither list."""
    if str(row.value) not in (*with_fsdp, *without):
        raise Unreadable(f"{row}: this engine is not known, or has its own FSDP, which is not checked")
    return str(row.value) in with_fsdp


def choose_backend(row: Setting | None, default: str) -> Chosen:
    """Reads a process group backend such as ``cpu:gloo,cuda:nccl``.

    ``default`` explains why the group has only NCCL if nothing is set.
    """
    backends = [part.rpartition(":")[2].strip() for part in str(row.value).split(",")] if row else []
    return Chosen(Backend.MIXED if "gloo" in backends else Backend.DEVICE_ONLY, row or default)


def select_matching(ranges: Sequence[V], version: Version | None) -> list[V]:
    """Selects the ranges that contain the version, or all without a version. A pre-release counts as its release."""
    if version is None:
        return list(ranges)
    return [item for item in ranges if SpecifierSet(item.versions).contains(version.base_version)]
