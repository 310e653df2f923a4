"""The engines' own modules, or stand-ins that were written from their source.

An engine is loaded where it is installed, or from ``FSDP_DOCTOR_ENGINE_FILES``: a directory with the packages ``vllm``,
``sglang`` and ``verl`` as in their wheels. Single files of them are loaded, without the imports of the packages. vLLM
0.33.0, SGLang 0.5.23 and verl 0.9.1 were tested in this way. Without an engine, the tests use the stand-ins.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib.util
import io
import logging
import os
import pathlib
import pickle
import sys
from collections.abc import Iterator
from functools import cached_property
from multiprocessing.reduction import ForkingPickler
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import pytest
import torch

Origin = Literal["stand-in", "engine"]

_VLLM = "vllm.distributed.weight_transfer"


@contextlib.contextmanager
def vllm(origin: Origin) -> Iterator[SimpleNamespace]:
    """Yields vLLM's modules base, packed_tensor and m2n_common."""
    names = ("base", "packed_tensor", "m2n_common")
    if origin == "stand-in":
        modules = {f"{_VLLM}.base": _vllm_base()}
    else:
        files = _directory("vllm")
        stubs = {
            "vllm.config.parallel": {"ParallelConfig": object},
            "vllm.config.weight_transfer": {"WeightTransferConfig": object},
            "vllm.utils.nccl": {"unpinned_nccl_env": contextlib.nullcontext},
        }
        paths = {f"{_VLLM}.{name}": files / f"vllm/distributed/weight_transfer/{name}.py" for name in names}
        modules = _loaded(paths, stubs)
    with _in_place(modules):
        yield SimpleNamespace(**{name: modules.get(f"{_VLLM}.{name}") for name in names})


@contextlib.contextmanager
def vllm_reload() -> Iterator[Any]:
    """Yields vLLM's own module ``layerwise``, which reloads weights."""
    package = "vllm.model_executor.model_loader.reload"
    stubs: dict[str, dict[str, Any]] = {
        "vllm.config": {"ModelConfig": object},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.model_executor.layers.attention": {"is_deferred_attention_layer": lambda layer: False},
        "vllm.model_executor.layers.quantization.base_config": {
            "QuantizeMethodBase": type("QuantizeMethodBase", (), {})
        },
        "vllm.model_executor.model_loader.weight_utils": {"default_weight_loader": lambda into, w: into.data.copy_(w)},
    }
    directory = _directory("vllm").joinpath(*package.split("."))
    names = ("types", "sanitize", "utils", "meta", "layerwise")
    modules = _loaded({f"{package}.{name}": directory / f"{name}.py" for name in names}, stubs)
    with _in_place(modules):
        yield modules[f"{package}.layerwise"]


@contextlib.contextmanager
def verl_buckets() -> Iterator[Any]:
    """Yields verl's own module of BucketedWeightSender and BucketedWeightReceiver, set up for shared memory."""
    pytest.importorskip("zmq", exc_type=ImportError)

    async def iterate(items: Any) -> Any:
        for item in items:
            yield item

    device = SimpleNamespace(synchronize=lambda: None, empty_cache=lambda: None)
    of_device = {"get_device_id": lambda: 0, "get_device_name": lambda: "cpu", "is_support_ipc": lambda: False}
    stubs: dict[str, dict[str, Any]] = {
        "verl.utils.device": {**of_device, "get_torch_device": lambda: device},
        "verl.workers.rollout.utils": {"ensure_async_iterator": iterate},
    }
    name = "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer"
    file = _directory("verl").joinpath(*name.split(".")).with_suffix(".py")
    modules = _loaded({name: file}, stubs)
    with _in_place(modules):
        yield modules[name]


@contextlib.contextmanager
def sglang(origin: Origin) -> Iterator[SimpleNamespace]:
    """Yields SGLang's ``deserialize``, and ``load(payload)``, which returns (name, tensor) pairs as the engine does."""
    bucket, utils, patch = "sglang.srt.weight_sync.tensor_bucket", "sglang.srt.utils", "sglang.srt.utils.patch_torch"
    if origin == "stand-in":
        modules = {bucket: _sglang_bucket(bucket), utils: _module(utils, MultiprocessingSerializer=_Serializer)}
    else:
        files = _directory("sglang")
        modules = _loaded({bucket: files / "sglang/srt/weight_sync/tensor_bucket.py"}, {})
        common = _parts_of(
            files / "sglang/srt/utils/common.py",
            {"MultiprocessingSerializer", "SafeUnpickler", "_safe_load_torch_storage"},
            io=io, pickle=pickle, torch=torch, ForkingPickler=ForkingPickler,
        )  # fmt: skip
        modules[utils] = _module(utils, **common)
    modules[patch] = _module(patch, monkey_patch_torch_reductions=lambda: None)
    with _in_place(modules):
        deserialize = modules[utils].MultiprocessingSerializer.deserialize
        yield SimpleNamespace(load=_sglang_loader(origin, modules[bucket], deserialize))


@contextlib.contextmanager
def verl(origin: Origin) -> Iterator[Any]:
    """Yields the module with ShardSpec. verl's module also has derive_dtensor_placement and translate_flat_indices."""
    name = "verl.workers.engine.spec"
    if origin == "stand-in":
        modules = {name: _module(name, ShardSpec=_ShardSpec)}
    else:
        modules = _loaded({name: _directory("verl") / "verl/workers/engine/spec.py"}, {})
    with _in_place(modules):
        yield modules[name]


def _directory(engine: str) -> pathlib.Path:
    """Returns the directory that contains the engine's package."""
    if named := os.environ.get("FSDP_DOCTOR_ENGINE_FILES"):
        return pathlib.Path(named)
    package = importlib.util.find_spec(engine)
    if package is None or package.origin is None:
        pytest.skip(f"{engine} is not installed, and FSDP_DOCTOR_ENGINE_FILES does not name its files")
    return pathlib.Path(package.origin).parent.parent


@contextlib.contextmanager
def _in_place(modules: dict[str, ModuleType]) -> Iterator[None]:
    """Context in which the modules and their packages are in ``sys.modules``."""
    packages = {name.rpartition(".")[0] for name in modules}
    while parents := {name.rpartition(".")[0] for name in packages if "." in name} - packages:
        packages |= parents
    every = {name: _module(name, __path__=[]) for name in packages if name not in modules} | modules
    before = {name: sys.modules.get(name) for name in every}
    sys.modules.update(every)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _module(name: str, **content: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(content)
    return module


def _loaded(paths: dict[str, pathlib.Path], stubs: dict[str, dict[str, Any]]) -> dict[str, ModuleType]:
    """Loads files as modules. Each module can import the stubs and the modules before it."""
    modules = {name: _module(name, **content) for name, content in stubs.items()}
    for name, method in paths.items():
        spec = importlib.util.spec_from_file_location(name, method)
        assert spec is not None
        assert spec.loader is not None
        modules[name] = importlib.util.module_from_spec(spec)
        with _in_place(modules):
            spec.loader.exec_module(modules[name])
    return modules


def _parts_of(path: pathlib.Path, names: set[str], **imported: Any) -> dict[str, Any]:
    """Executes the named definitions of a file, without the file's imports."""
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", None) in names]
    assert len(tree.body) == len(names), f"{path} does not define {names}"
    content = {"__name__": "sglang.srt.utils.common", **imported}
    exec(compile(tree, str(path), "exec"), content)
    return content


def _sglang_loader(origin: Origin, bucket: Any, deserialize: Any) -> Any:
    if origin == "stand-in":
        return lambda payload: bucket.tensors(deserialize(payload))
    path = "sglang/srt/model_executor/model_runner_components/weight_updater.py"
    tree = ast.parse((_directory("sglang") / path).read_text())
    (updater,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "WeightUpdater")
    (method,) = (node for node in updater.body if getattr(node, "name", "") == "_update_weights_from_flattened_bucket")
    content = {name: getattr(bucket, name) for name in ("FlattenedTensorBucket", "FlattenedTensorMetadata")}
    source = "from __future__ import annotations\n" + ast.unparse(method)
    exec(compile(source, path, "exec"), content)

    def load(payload: bytes) -> list[tuple[str, torch.Tensor]]:
        loaded: list[tuple[str, torch.Tensor]] = []
        engine = SimpleNamespace(get_model=lambda: SimpleNamespace(load_weights=loaded.extend))
        content[method.name](engine, deserialize(payload))
        return loaded

    return load


# Written from the engines' source.


def _vllm_base() -> ModuleType:
    @dataclasses.dataclass(frozen=True)
    class Replicate:
        pass

    @dataclasses.dataclass(frozen=True)
    class Shard:
        dim: int

    @dataclasses.dataclass(frozen=True)
    class ParamMeta:
        name: str
        dtype: torch.dtype
        shape: tuple[int, ...]
        owners: tuple[int, ...] | None = dataclasses.field(default=None, kw_only=True)
        mesh_shape: tuple[int, ...] | None = dataclasses.field(default=None, kw_only=True)
        placements: tuple[Any, ...] | None = dataclasses.field(default=None, kw_only=True)

    class WeightSource:
        def __init_subclass__(cls) -> None:
            assert isinstance(cls.__dict__.get("metadata", cached_property(None)), cached_property)

        def implements_iter_full(self) -> bool:
            return type(self).iter_full is not WeightSource.iter_full

        def implements_iter_local(self) -> bool:
            return type(self).iter_local is not WeightSource.iter_local

        def iter_full(self) -> Any:
            raise NotImplementedError

        def iter_local(self) -> Any:
            raise NotImplementedError

    content = {"Replicate": Replicate, "Shard": Shard, "ParamMeta": ParamMeta, "WeightSource": WeightSource}
    return _module(f"{_VLLM}.base", **content)


class _Serializer:
    @staticmethod
    def serialize(value: Any) -> bytes:
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(value)
        return buffer.getvalue()

    @staticmethod
    def deserialize(data: bytes) -> Any:
        return pickle.loads(data)


def _sglang_bucket(name: str) -> ModuleType:
    fields = ("name", "shape", "dtype", "start_idx", "end_idx", "numel")
    metadata = dataclasses.make_dataclass("FlattenedTensorMetadata", fields)
    metadata.__module__ = name

    def tensors(content: Any) -> list[tuple[str, torch.Tensor]]:
        whole = content["flattened_tensor"]
        return [
            (part.name, whole[part.start_idx : part.end_idx].view(part.dtype).reshape(part.shape))
            for part in content["metadata"]
        ]

    return _module(name, FlattenedTensorMetadata=metadata, tensors=tensors)


@dataclasses.dataclass
class _ShardSpec:
    full_shape: tuple[int, ...]
    mesh: Any = None
    placements: Any = None
    place: Any = None
    gather_group: Any = None
