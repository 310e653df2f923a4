"""Context in which weights may move but must not change: an offload, a reload, a weight sync, a save."""

from __future__ import annotations

import ast
import contextlib
import inspect
import linecache
import os
from collections.abc import Iterator

import torch
from torch import nn

from fsdp_doctor.text import join_some
from fsdp_doctor.weights.fingerprints.block_sums import BlockSums
from fsdp_doctor.weights.fingerprints.keyed_sum import make_range_block
from fsdp_doctor.weights.fsdp import private, reader
from fsdp_doctor.weights.fsdp.decorators import disable_autograd
from fsdp_doctor.weights.fsdp.forms import describe_form, refuse

_MOST_CALLS = 6


class WeightsChanged(RuntimeError):
    """Error that :func:`unchanged` raises.

    names: the tensors that changed.
    rank: the rank of this process.
    """

    def __init__(self, message: str, names: list[str], rank: int) -> None:
        super().__init__(message)
        self.names, self.rank = names, rank


@contextlib.contextmanager
def unchanged(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
    """Context that checks that this rank's shards have the same values at its end as at its beginning, even if they
    move.

    Use it around code that moves, saves or sends weights, such as an offload, a rollout and the reload. Do not use it
    around code that changes weights on purpose, such as a step, swapping in an average, or merging adapters.

    Any rank may use it alone: there is no collective. At the beginning, the sums of shards on a device are only
    launched, on the current stream, without waiting, so the context does not hide a race between a copy and the host.
    The end of the context waits for the device, so put code that might read the weights too early into the context.
    Shards in host memory are summed on the host, at the speed of the CPU. A copy into host memory that began before the
    context must have arrived.

    Raises WeightsChanged, which names the tensors, the rank and the calls in the body; UnreadableTensors for tensors
    that are not dense. An exception of the body passes through.

    model: a model under FSDP1, FSDP2 or DDP, or a plain model. Its parameters and buffers are compared by 128 bits of
        each shard, see ``fsdp_doctor.weights.fingerprints.keyed_sum``.
    optimizer: an optimizer whose state is compared, too.
    """
    where = _find_body()
    before = _Sums(model, optimizer)
    yield
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    after = _Sums(model, optimizer)
    was, now = before.read(), after.read()
    changed = [name for name in was if now.get(name) != was[name]]
    if changed:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        raise WeightsChanged(
            f"rank {rank}: {len(changed)} of {len(was)} tensors changed, or disappeared: {join_some(changed)}. {where}",
            changed,
            rank,
        )


class _Sums:
    """Sums of all shards. The constructor launches them without waiting for the device."""

    @disable_autograd
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        by_device: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
        shards = list(_list_shards(model, optimizer))
        # Codes are compared as they lie; what does not lie there cannot be.
        refuse({name: form for name, tensor in shards if (form := describe_form(tensor))})
        for name, tensor in shards:
            if tensor.device.type != "meta":
                by_device.setdefault(tensor.device, []).append((name, tensor))
        self._parts = []
        for device, shards in by_device.items():
            blocks = [make_range_block(at, tensor.contiguous(), 0) for at, (_, tensor) in enumerate(shards)]
            rows = torch.zeros(len(shards), 2, dtype=torch.int64, device=device)
            BlockSums(blocks, device).add(rows)
            # The sum of zeros is that of any number of them.
            forms = [(name, f"{tensor.dtype} {tensor.numel()}") for name, tensor in shards]
            self._parts.append((forms, rows))

    def read(self) -> dict[str, tuple[object, ...]]:
        """Returns by name the facts that must be the same afterwards. Waits for the device."""
        return {
            name: (form, *row)
            for forms, rows in self._parts
            for (name, form), row in zip(forms, rows.tolist(), strict=True)
        }


def _list_shards(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, torch.Tensor]]:
    contents = reader.read(model)
    for tensor in (*contents.parameters, *contents.buffers, *contents.transient_buffers):
        local = private.read_local_tensor(tensor.tensor)
        yield (tensor.names[0], local if tensor.form else local.detach())
    for unit in contents.fsdp1_units:
        for number, memory in enumerate(unit.memories):
            yield (f"{unit.flat_name}{f' (copy {number})' if number else ''}", memory)
    groups = optimizer.param_groups if optimizer is not None else ()
    for number, p in enumerate(p for group in groups for p in group["params"]):
        assert optimizer is not None
        for key, value in optimizer.state.get(p, {}).items():
            if isinstance(value, torch.Tensor):
                yield (f"{key} of the optimizer's parameter {number}", private.read_local_tensor(value).detach())


def _find_body() -> str:
    """Finds where the context is used, and the calls in its body as written; only the place if the source is
    missing.
    """
    frame = inspect.currentframe()
    # Behind this function, the context's own, and contextlib's.
    for _ in range(3):
        frame = frame.f_back if frame is not None else None
    if frame is None:
        return ""
    file, line = frame.f_code.co_filename, frame.f_lineno
    place = f"{os.path.basename(file)}, line {line}"
    with contextlib.suppress(SyntaxError):
        tree = ast.parse("".join(linecache.getlines(file, frame.f_globals)))
        around = [
            node for node in ast.walk(tree) if isinstance(node, ast.With) and node.lineno <= line <= node.body[0].lineno
        ]
        if around:
            body = max(around, key=lambda node: node.lineno).body
            calls = [node for statement in body for node in ast.walk(statement) if isinstance(node, ast.Call)]
            calls.sort(key=lambda call: (call.lineno, call.col_offset))
            shown = [f"{ast.unparse(call)} (line {call.lineno})" for call in calls]
            return f"Between, in {place}: {join_some(shown, _MOST_CALLS) or 'no call'}"
    return f"Between: the body of the context in {place}"
