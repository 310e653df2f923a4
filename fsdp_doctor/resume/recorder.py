"""Runs in the processes of the user's job, and records the state of this rank before each optimizer step.

``sitecustomize`` executes this file after torch is imported. The file needs only the standard library and torch; for
tensors on a device, and on the emulated device, it also needs this package. It calls no collectives, and never raises
into the job: an error of the recorder is written as the last line of the record.

The record is a file of JSON lines, one for each step; ``records`` reads it. Steps are counted by the first optimizer
that steps; a step of another optimizer belongs to the preceding step of the first optimizer. A line has the state
before the step, the gradients, the generators at the first forward since the last step, and the batches that entered
the model since the last step.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import gc
import hashlib
import inspect
import json
import os
import random
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

# Names of classes that keep averages of weights.
_AVERAGES = re.compile(r"EMA|Ema(?![a-z])|(?:^|_)ema(?:_|$)|ExponentialMoving|WeightAverag|ModelAverag")
# Frameworks for which a remedy may differ, and what keeps state that is not seen.
_FRAMEWORKS = ("trl", "verl", "torchtitan", "lightning", "transformers", "accelerate")
_UNSEEN = ("deepspeed", "ray")
_LONGEST_LIST = 64
# The heap is searched only at the first steps: with many objects it takes seconds.
_SEARCHED_STEPS = 2
_SECONDS_FOR_THREADS = 60
_SECONDS_FOR_RANKS = 120


def digest_bytes(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def digest(tensor: torch.Tensor) -> str:
    """Returns a digest of this rank's part of a tensor: "empty" if it has no elements, "zeros" if all are zero."""
    with torch.no_grad():
        local = tensor.detach()
        if hasattr(local, "to_local"):
            local = local.to_local()
        if hasattr(local, "__tensor_flatten__"):
            return digest_bytes(
                " ".join(digest(getattr(local, name)) for name in local.__tensor_flatten__()[0]).encode()
            )
        if local.numel() == 0:
            return "empty"
        if not local.any():
            return "zeros"
        flat = local.contiguous().reshape(-1).view(torch.uint8)
        if flat.device.type == "cpu":
            return digest_bytes(flat.numpy())
        return _sum_on_device(flat)


def _sum_on_device(flat: torch.Tensor) -> str:
    """Returns a 128-bit checksum of the bytes, computed on their device so that they are not copied to the host."""
    with _importable_package():
        from fsdp_doctor.weights.fingerprints.block_sums import BlockSums
        from fsdp_doctor.weights.fingerprints.keyed_sum import make_range_block
    lanes = torch.zeros(1, 2, dtype=torch.int64, device=flat.device)
    BlockSums([make_range_block(0, flat, 0)], flat.device).add(lanes)
    return "-".join(f"{lane & (2**64 - 1):016x}" for lane in lanes[0].tolist())


@contextlib.contextmanager
def _importable_package() -> Iterator[None]:
    """Appends this package's directory to ``sys.path``, for an interpreter in which the package is not installed."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if root not in sys.path:
        sys.path.append(root)
    yield


def describe(value: Any) -> Any:
    """Describes a value as JSON: a tensor by its digest or its only element, an unknown object by its type."""
    match value:
        case torch.Tensor():
            return describe(value.item()) if value.numel() == 1 and not hasattr(value, "to_local") else digest(value)
        case Mapping():
            return {str(key): describe(each) for key, each in value.items()}
        case list() | tuple() if len(value) < _LONGEST_LIST:
            return [describe(each) for each in value]
        case list() | tuple():
            return digest_bytes(json.dumps([describe(each) for each in value]).encode())
        case float():
            return value if value - value == 0 else str(value)  # JSON has no infinity
        case int() | bool() | str() | None:
            return value
        case _:
            return type(value).__name__


def read_generators() -> dict[str, str]:
    """Maps each random number generator to a digest of its state: ``torch``, ``python``, ``numpy`` and ``device``."""
    states = {
        "torch": digest_bytes(torch.default_generator.get_state().numpy()),
        "python": digest_bytes(repr(random.getstate()).encode()),
    }
    if "numpy" in sys.modules:
        _, keys, position, *_ = sys.modules["numpy"].random.get_state()
        states["numpy"] = digest_bytes(keys.tobytes() + str(position).encode())
    if (device := _find_device()) is not None:
        states["device"] = digest_bytes(torch.get_device_module(device).get_rng_state().cpu().numpy())
    return states


def _unwrap(name: str) -> str:
    with _importable_package():
        from fsdp_doctor.checkpoints.names import strip_wrappers
    return strip_wrappers(name)


def _digest_all(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    return {_unwrap(name): digest(tensor) for name, tensor in tensors if tensor.device.type != "meta"}


class _Heap:
    """The modules, schedulers, scalers and averages on the heap, in the same order in every run of a program.

    roots: modules that have parameters and are not children of another module.
    schedulers, scalers, averages: the objects of each kind, by name.
    """

    def __init__(self) -> None:
        gc.collect()
        found: dict[str, list[Any]] = {"module": [], "scheduler": [], "scaler": [], "average": [], "loader": []}
        classes: dict[type, str] = {}
        for each in gc.get_objects():
            kind = type(each)
            if kind not in classes:
                classes[kind] = _classify(kind)
            if classes[kind]:
                found[classes[kind]].append(each)
        inner = {id(child) for module in found["module"] for child in module.children()}
        roots = [each for each in found["module"] if id(each) not in inner and _count(each.parameters())]
        self.roots: list[nn.Module] = sorted(roots, key=lambda root: (_count(root.parameters()), type(root).__name__))
        self.schedulers = _number(found["scheduler"])
        self.scalers = _number(found["scaler"])
        self.averages = _number(found["average"])
        self.epochs = sorted(filter(None, map(_count_batches, found["loader"])))


def _classify(kind: type) -> str:
    if issubclass(kind, nn.Module):
        return "module"
    if issubclass(kind, torch.optim.lr_scheduler.LRScheduler):
        return "scheduler"
    if issubclass(kind, torch.amp.GradScaler):
        return "scaler"
    if issubclass(kind, torch.utils.data.DataLoader):
        return "loader"
    return "average" if _AVERAGES.search(kind.__name__) and not issubclass(kind, type) else ""


def _number(objects: Sequence[Any]) -> dict[str, Any]:
    """Names objects by their classes; the second and further objects of a class get a number."""
    named: dict[str, Any] = {}
    counts: collections.Counter[str] = collections.Counter()
    for each in objects:
        name = type(each).__name__
        counts[name] += 1
        named[f"{name} {counts[name]}" if counts[name] > 1 else name] = each
    return named


def _count(values: Iterable[Any]) -> int:
    return sum(1 for _ in values)


def _count_batches(loader: Any) -> int:
    with contextlib.suppress(Exception):
        return len(loader)
    return 0


def _read_object(value: Any) -> dict[str, Any]:
    """Reads the state of a scheduler, a scaler or an average: its state dict, or else its attributes."""
    state = value.state_dict() if callable(getattr(value, "state_dict", None)) else getattr(value, "__dict__", {})
    return {str(key): describe(each) for key, each in state.items()}


class StepRecorder:
    """Writes the record of this rank.

    record: the directory of the records.
    stop: the number of steps after which the process ends; 0 for no end.
    job: the directory into which the job saves.
    """

    def __init__(self, record: str, stop: int, job: str) -> None:
        self._record, self._stop, self._job = record, stop, job
        self._file: Any = None
        # Those through which the optimizer is stepped.
        self._frameworks: list[str] = []
        self._main: Optimizer | None = None
        self._loaded: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        # The first module that was called for training.
        self._model: nn.Module | None = None
        self._heap: _Heap | None = None
        self._line: dict[str, Any] = {}
        self._steps = 0
        self._forwards = 0
        self._batches: list[list[str]] = []
        self._generators: dict[str, str] | None = None
        self._files = self._list_files()
        self._seconds = 0.0
        self._broken = False

    def install(self) -> None:
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        self._watch_loads()
        self._find_root()
        atexit.register(self._say_why_nothing)

    def _watch_loads(self) -> None:
        load = Optimizer.load_state_dict

        @functools.wraps(load)
        def load_seen(optimizer: Optimizer, *arguments: Any, **options: Any) -> Any:
            self._loaded.add(optimizer)
            return load(optimizer, *arguments, **options)

        Optimizer.load_state_dict = load_seen  # type: ignore[method-assign, assignment]

    def _find_root(self) -> None:
        """Records the batches of the first module that is called for training and has trainable parameters."""
        call = nn.Module.__call__

        def call_first(module: nn.Module, *arguments: Any, **options: Any) -> Any:
            if module.training and torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
                nn.Module.__call__ = call  # type: ignore[method-assign]
                self._watch_batches(module)
            return call(module, *arguments, **options)

        nn.Module.__call__ = call_first  # type: ignore[method-assign]

    def _watch_batches(self, module: nn.Module) -> None:
        self._model = module
        wrapped = False
        with contextlib.suppress(Exception), _importable_package():
            from fsdp_doctor.weights.fsdp.private import wrap_compiled_call

            wrapped = wrap_compiled_call(module, self._before_forward)
        if not wrapped:
            module.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def _before_forward(self, module: nn.Module, arguments: Any, options: Any) -> None:
        if module.training:
            self._guard(self._take_batch, arguments, options)

    def _take_batch(self, arguments: Any, options: Any) -> None:
        self._forwards += 1
        if self._generators is None:
            self._generators = read_generators()
        self._batches.append([digest(tensor) for tensor in _list_tensors([arguments, options])])

    def _before_step(self, optimizer: Optimizer, arguments: Any, options: Any) -> Any:
        """Records the state before the step. If the step has a closure, records after the closure's first call.

        Returns the step's arguments with a closure that records; None if the arguments stay unchanged.
        """
        closure = arguments[1] if len(arguments) > 1 else options.get("closure")
        if closure is None:
            self._guard(self._take_step, optimizer)
            return None
        called = False

        def record_after_first() -> Any:
            nonlocal called
            result = closure()
            if not called:
                called = True
                self._guard(self._take_step, optimizer)
            return result

        if len(arguments) > 1:
            return (arguments[0], record_after_first, *arguments[2:]), options
        return arguments, {**options, "closure": record_after_first}

    def _take_step(self, optimizer: Optimizer) -> None:
        if self._is_no_step(optimizer):
            return
        if self._main is None or optimizer is self._main:
            self._main = optimizer
            self._write_line()
            self._steps += 1
            if self._steps <= _SEARCHED_STEPS:
                self._heap = _Heap()
            assert self._heap is not None
            self._line = {
                "step": self._steps,
                "batches": self._batches,
                "generators": self._generators or read_generators(),
                "written": self._list_written(),
                "epochs": self._heap.epochs,
                "schedulers": {name: _read_object(each) for name, each in self._heap.schedulers.items()},
                "scalers": {name: _read_object(each) for name, each in self._heap.scalers.items()},
                "averages": {name: _read_object(each) for name, each in self._heap.averages.items()},
            }
            self._batches, self._generators = [], None
        self._add_optimizer(optimizer)

    def _is_no_step(self, optimizer: Optimizer) -> bool:
        """Returns whether the step only makes the optimizer create its state, from gradients that are zero.

        Torch takes such a step in ``_init_optim_state``.
        """
        frames: list[FrameType] = []
        frame = inspect.currentframe()
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        if any(frame.f_code.co_name == "_init_optim_state" for frame in frames):
            return True
        packages = {str(frame.f_globals.get("__name__", "")).partition(".")[0] for frame in frames}
        self._frameworks = [name for name in _FRAMEWORKS if name in packages]
        if self._batches:
            return False
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        return all(digest(gradient) in ("zeros", "empty") for gradient in gradients)

    def _add_optimizer(self, optimizer: Optimizer) -> None:
        """Adds an optimizer's parameters, state, gradients and options, and the other tensors of its model."""
        assert self._heap is not None
        trained = [(number, p) for number, group in enumerate(optimizer.param_groups) for p in group["params"]]
        ids = {id(p) for _, p in trained}
        names: dict[int, str] = {}
        line = self._line
        for root in self._heap.roots:
            mine = {id(p): _unwrap(name) for name, p in root.named_parameters() if id(p) in ids}
            names |= mine
            if optimizer is self._main:
                is_model = bool(mine) or any(module is self._model for module in root.modules())
                if is_model:
                    self._add_model(root, ids)
                else:
                    self._line["averages"][type(root).__name__] = _digest_all(root.named_parameters())
        which = len(line.setdefault("optimizers", []))
        line["optimizers"].append(type(optimizer).__name__)
        # A load by a function of the optimizer's own class is not seen.
        is_seen = type(optimizer).load_state_dict is Optimizer.load_state_dict
        if is_seen and optimizer not in self._loaded:
            line.setdefault("not_loaded", []).append(which)
        labels = {id(p): names.get(id(p), f"optimizer {which} parameter {at}") for at, (_, p) in enumerate(trained)}
        for number, p in trained:
            label = labels[id(p)]
            line.setdefault("groups", {})[label] = f"optimizer {which} group {number}"
            line.get("others", {}).pop(label, None)
            line.setdefault("weights", {})[label] = digest(p)
            line.setdefault("rounded", {})[label] = digest(p.detach().bfloat16().to(p.dtype))
            line.setdefault("state", {})[label] = {
                str(key): describe(value) for key, value in optimizer.state.get(p, {}).items()
            }
            if p.grad is not None:
                line.setdefault("gradients", {})[label] = digest(p.grad)
        for number, group in enumerate(optimizer.param_groups):
            line.setdefault("options", {})[f"optimizer {which} group {number}"] = {
                key: describe(value) for key, value in group.items() if key != "params"
            }

    def _add_model(self, root: nn.Module, trained: Collection[int]) -> None:
        """Adds the persistent buffers of a model, and the parameters whose ids are not in ``trained``."""
        # The names of buffers that no state dict has, so none restores.
        transient: set[str] = set()
        with contextlib.suppress(Exception), _importable_package():
            from fsdp_doctor.weights.fsdp.private import list_module_tensors

            transient = {each.prefix + name for each in list_module_tensors(root) for name in each.non_persistent}
        saved = ((name, buffer) for name, buffer in root.named_buffers() if name not in transient)
        self._line.setdefault("buffers", {}).update(_digest_all(saved))
        rest = ((name, p) for name, p in root.named_parameters() if id(p) not in trained)
        self._line.setdefault("others", {}).update(_digest_all(rest))

    def _after_step(self, optimizer: Optimizer, arguments: Any, options: Any) -> None:
        if optimizer is self._main and self._stop and self._steps >= self._stop and not self._broken:
            self._guard(self._end)
            leave(self._record)

    def _end(self) -> None:
        """Writes the final record, with the weights after the last step."""
        assert self._main is not None
        self._write_line()
        self._steps += 1
        self._line = {"step": self._steps, "written": self._list_written()}
        weights = {p: digest(p) for group in self._main.param_groups for p in group["params"]}
        last = self._last_names
        self._line["weights"] = dict(zip(last, weights.values(), strict=False))
        self._line["ended"] = True
        self._write_line()
        self._file.close()

    def _list_files(self) -> dict[str, int]:
        """Maps each file of the job's directory to its modification time in nanoseconds."""
        files: dict[str, int] = {}
        for directory, _, names in os.walk(self._job):
            for name in names:
                with contextlib.suppress(OSError):
                    file = os.path.join(directory, name)
                    files[os.path.relpath(file, self._job)] = os.stat(file).st_mtime_ns
        return files

    def _list_written(self) -> list[str]:
        before, self._files = self._files, self._list_files()
        return sorted(name for name, time in self._files.items() if before.get(name) != time)[:_LONGEST_LIST]

    def _write_line(self) -> None:
        if not self._line:
            return
        self._last_names = list(self._line.get("weights", {}))
        self._write({**self._line, "seconds": self._seconds})
        self._line = {}

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            # Of two processes of one rank the first that trains is the job's.
            self._file = open(os.path.join(self._record, f"rank{_read_rank()}.jsonl"), "x")
            device = _find_device()
            facts = {
                "rank": _read_rank(),
                "ranks": dist.get_world_size() if _is_rank() else int(os.environ.get("WORLD_SIZE") or 1),
                "torch": torch.__version__,
                "device": device.type if device is not None else "cpu",
                "unseen": [name for name in _UNSEEN if name in sys.modules],
                "frameworks": self._frameworks,
            }
            self._file.write(json.dumps({"facts": facts}) + "\n")
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def _guard(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls a function of the recorder; an exception in it ends the record but not the job."""
        if self._broken:
            return
        begin = time.perf_counter()
        try:
            function(*arguments)
        except Exception as error:
            self._broken = True
            with contextlib.suppress(Exception):
                self._write({"error": f"{type(error).__name__}: {error}"})
        self._seconds += time.perf_counter() - begin

    def _say_why_nothing(self) -> None:
        """Records the number of forwards at the end of a rank that took no optimizer step."""
        if self._steps or self._broken or not (self._forwards or _is_rank()):
            return
        with contextlib.suppress(Exception):
            self._write({"no_step": True, "forwards": self._forwards})


def _list_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Lists the tensors in nested mappings, lists and tuples."""
    match value:
        case torch.Tensor():
            yield value
        case Mapping():
            yield from _list_tensors(list(value.values()))
        case list() | tuple():
            for each in value:
                yield from _list_tensors(each)


def _is_rank() -> bool:
    return bool(dist.is_available() and dist.is_initialized())


def _read_rank() -> int:
    return dist.get_rank() if _is_rank() else int(os.environ.get("RANK") or 0)


def _find_device() -> torch.device | None:
    """Returns the available accelerator, or None; ``current_accelerator`` alone does not show that it is available."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def leave(record: str) -> None:
    """Ends this process after all ranks have called ``leave`` and the job's threads have finished their saves.

    None of the job's code runs any more: a SystemExit would reach the job's handlers, and some handlers save. The ranks
    wait for each other by files in the directory ``record``, because a failed rank would never join a collective. The
    waits have a time limit.
    """
    with contextlib.suppress(Exception):
        if _find_device() is not None:
            torch.accelerator.synchronize()
    with contextlib.suppress(Exception):
        open(os.path.join(record, f"left{_read_rank()}"), "w").close()
        ranks, end = dist.get_world_size() if _is_rank() else 1, time.monotonic() + _SECONDS_FOR_RANKS
        while sum(name.startswith("left") for name in os.listdir(record)) < ranks and time.monotonic() < end:
            time.sleep(0.02)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    watchdog = threading.Timer(_SECONDS_FOR_THREADS, os._exit, (0,))
    watchdog.daemon = True
    watchdog.start()
    # The interpreter calls this function at its end: it waits for threads, and for the tasks of executors. It must run
    # in the main thread, because in any other thread it would wait for the main thread's end.
    threading._shutdown()  # type: ignore[attr-defined]
    os._exit(0)


def start(imported: str) -> None:
    """Starts recording after torch has been imported.

    The environment variable FSDP_DOCTOR_RESUME is a JSON object: the options of :class:`StepRecorder`, and the flags
    ``deterministic`` and ``emulated``.
    """
    options = json.loads(os.environ["FSDP_DOCTOR_RESUME"])
    try:
        if options.pop("deterministic"):
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.backends.cudnn.benchmark = False
        if options.pop("emulated") and "LOCAL_RANK" in os.environ:
            with _importable_package():
                from fsdp_doctor.resume.emulation import prepare
            prepare()
        StepRecorder(**options).install()
    except Exception as error:
        with open(os.path.join(options["record"], f"failed-{os.getpid()}"), "w") as file:
            file.write(f"{type(error).__name__}: {error}")
