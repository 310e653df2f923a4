"""verl's receiver of weights as a process of its own, for verl_sync.py."""

from __future__ import annotations

import ast
import functools
import importlib.util
import multiprocessing
import pathlib
import sys
import types
import uuid
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias

import torch
import zmq

_ROLLOUT = "verl.workers.rollout"
_SOCKET_WAIT_MS = 20_000
_WAIT_S = 90
_PIECE = 1 << 24

Sums: TypeAlias = dict[str, int]
Order: TypeAlias = Literal["receive", "sum", "forget", "end"]


def load_transfer(synchronize: Callable[[], Any] | None) -> types.ModuleType:
    """Imports verl's ``bucketed_weight_transfer`` from its file.

    The module's package imports vLLM. The module needs one function of another module, which imports Ray and a web
    server, so this function is taken from verl's source.

    synchronize: waits for a device that verl does not know and that has no CUDA IPC; None for CUDA.
    """
    spec = importlib.util.find_spec("verl")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    directory = pathlib.Path(spec.submodule_search_locations[0]) / "workers/rollout"
    file = directory / "utils.py"
    body = ast.parse(file.read_text()).body
    wanted = [node for node in body if getattr(node, "name", None) == "ensure_async_iterator"]
    utils = types.ModuleType(f"{_ROLLOUT}.utils")
    exec(compile(ast.Module(wanted, []), str(file), "exec"), vars(utils))
    sys.modules.setdefault(utils.__name__, utils)
    name = f"{_ROLLOUT}.vllm_rollout.bucketed_weight_transfer"
    spec = importlib.util.spec_from_file_location(name, directory / "vllm_rollout/bucketed_weight_transfer.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # A process whose peer has died raises, instead of waiting for ever.
    zmq.Context.instance().setsockopt(zmq.RCVTIMEO, _SOCKET_WAIT_MS)
    zmq.Context.instance().setsockopt(zmq.LINGER, 0)
    if synchronize is not None:
        device = types.SimpleNamespace(synchronize=synchronize, empty_cache=_do_nothing, ipc_collect=_do_nothing)
        vars(module).update(get_torch_device=lambda: device, is_support_ipc=lambda: False)
    return module


def _do_nothing() -> None:
    pass


def add_up(tensor: torch.Tensor) -> int:
    """Returns a sum over the bytes of a tensor that also depends on the places of the bytes."""
    words = tensor.detach().reshape(-1).view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for piece in words.split(_PIECE):
        places = torch.arange(1, piece.numel() + 1, dtype=torch.int64, device=tensor.device)
        total = total * 31 + (piece.to(torch.int64) * places).sum()
    return int(total)


class Receiver:
    """A process that holds a rollout's weights on this rank's device, and takes them from verl's sender.

    index: the index of the CUDA device; None to receive through shared memory on the CPU.
    """

    def __init__(self, index: int | None, use_shm: bool) -> None:
        self.handle = f"ipc:///tmp/verl-sync-{uuid.uuid4().hex}.sock"
        self.index = index
        self.use_shm = use_shm
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_run, args=(other, self.handle, index, use_shm), daemon=True)
        self._process.start()
        other.close()

    def tell(self, order: Order) -> None:
        self._pipe.send(order)

    def wait(self) -> Any:
        """Returns the answer to the oldest order. Raises RuntimeError if the receiver raised, is dead or is silent."""
        if not self._pipe.poll(_WAIT_S):
            raise RuntimeError("the receiver does not answer")
        try:
            answer, error = self._pipe.recv()
        except EOFError:
            raise RuntimeError("the receiver has died") from None
        if error is not None:
            raise RuntimeError(f"the receiver: {error}")
        return answer

    def ask(self, order: Order) -> Any:
        self.tell(order)
        return self.wait()

    def stop(self) -> None:
        self._process.kill()
        self._process.join()
        # Not every release of verl removes its socket.
        pathlib.Path(self.handle.removeprefix("ipc://")).unlink(missing_ok=True)


def _run(pipe: Any, handle: str, index: int | None, use_shm: bool) -> None:
    answer: Any
    try:
        # verl's modules ask for the device when they are imported.
        transfer = load_transfer(None if index is not None else _do_nothing)
        device = torch.device("cpu")
        if index is not None:
            torch.cuda.set_device(index)
            device = torch.device("cuda", index)
            torch.zeros(1, device=device)
    except BaseException as error:
        pipe.send((None, f"{type(error).__name__}: {error}"))
        raise
    pipe.send(("ready", None))
    held: dict[str, torch.Tensor] = {}
    while (order := pipe.recv()) != "end":
        answer = None
        try:
            match order:
                case "receive":
                    receiver = transfer.BucketedWeightReceiver(zmq_handle=handle, device=device, use_shm=use_shm)
                    receiver.receive_weights(functools.partial(_take, held))
                case "sum":
                    answer = {name: add_up(tensor) for name, tensor in held.items()}
                case "forget":
                    held.clear()
                    if index is not None:
                        torch.cuda.empty_cache()
        except Exception as error:
            pipe.send((None, f"{type(error).__name__}: {error}"))
        else:
            pipe.send((answer, None))


def _take(held: dict[str, torch.Tensor], weights: Iterable[tuple[str, torch.Tensor]], *_: object) -> None:
    """Copies a bucket into the rollout's tensors, as an engine's ``load_weights`` does."""
    for name, tensor in weights:
        if name in held:
            held[name].copy_(tensor, non_blocking=True)
        else:
            held[name] = tensor.clone()
