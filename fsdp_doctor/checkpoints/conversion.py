"""A checkpoint of any format in another one: streamed, verified as it is read and as it was written."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_doctor.checkpoints.copying import ConversionError, Copy
from fsdp_doctor.checkpoints.dtypes import is_floating_point
from fsdp_doctor.checkpoints.files import BadFile, sync_directory
from fsdp_doctor.checkpoints.names import strip_wrappers
from fsdp_doctor.checkpoints.optimizer import SavedOptimizer, choose_optimizer
from fsdp_doctor.checkpoints.reading import read_checkpoint
from fsdp_doctor.checkpoints.record import SavedCheckpoint, SavedModel, SavedTensor, choose_model
from fsdp_doctor.checkpoints.targets import ConversionTarget, StatesToWrite, TensorToWrite, lay_out
from fsdp_doctor.checkpoints.verification import Verification, judge

LARGEST_FILE = 5_000_000_000
# What else a directory of the Hub has; copied from the checkpoint where it is there.
_BESIDE = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "added_tokens.json", "chat_template.jinja"),
)


@dataclass(frozen=True, slots=True)
class Conversion:
    """verification: of the source; nothing was written unless it is sound. names: that were changed, old to new."""

    verification: Verification
    files: list[str]
    num_bytes: int
    names: dict[str, str]
    has_optimizer: bool = False


def convert(
    source: pathlib.Path,
    target: pathlib.Path,
    to: ConversionTarget,
    *,
    overwrite: bool = False,
    dtype: str | None = None,
    world_size: int | None = None,
    with_optimizer: bool = True,
    device: str = "cuda",
    buffers: Collection[str] = (),
    largest_file: int = LARGEST_FILE,
    progress: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Writes the model in ``source``, and the optimizer where the target has a place for it, to a new directory.

    The source is verified as it is read, once; if it is not sound, nothing is left. Then what was written is read and
    compared. The directory gets its name at the end, so that an interruption leaves none of that name; what it leaves
    is removed by the next conversion. Host memory: a few MiB. Runs no pickle, and needs no torch but for a cast.

    overwrite: a directory of this name is replaced. dtype: to which the model's floating-point tensors are cast; the
    optimizer is not. world_size: the ranks that are to read it; by default as many as wrote it. device: the type of
    the devices of FSDP2's mesh. buffers: names, or their last parts, of tensors that FSDP does not divide, where the
    files do not say which these are. largest_file: bytes, of Hugging Face files. progress: as of ``verify``.

    Raises ConversionError for what cannot be converted, OSError.
    """
    if target.exists() and not overwrite:
        raise ConversionError(f"{target} exists; name another directory, or say --overwrite")
    source.stat()
    checkpoint = read_checkpoint(source)
    if any(symptom.trouble.value.severity != "warning" for symptom in checkpoint.symptoms):
        return Conversion(judge(checkpoint, source, progress=progress)[0], [], 0, {})
    try:
        model = choose_model(checkpoint)
        if not model.tensors:
            raise ConversionError(f"{source} holds no tensors by name")
        if to is ConversionTarget.HF:
            _leave_out_tied_head(model, checkpoint)
        ranks = world_size or _count_ranks(model)
        if not ranks and to in (ConversionTarget.FSDP1, ConversionTarget.FSDP2):
            raise ConversionError(f"{source} is not of ranks; say with --world-size how many are to read {target}")
        names = {name: strip_wrappers(name) for name in model.tensors}
        if len(set(names.values())) < len(names):
            raise BadFile("has names that differ in a wrapper's prefix alone")
        parameters = model.select_parameters(buffers)
        has_place = with_optimizer and to is not ConversionTarget.HF
        optimizer = choose_optimizer(checkpoint, model, parameters) if has_place else None
        states = _choose_states(model, optimizer, names, parameters, dtype)
        layout = lay_out(to, states, ranks or 1, largest_file, device)
        with _make_partial_directory(target) as directory, contextlib.closing(Copy(directory, layout, _cast)) as copy:
            found, scans = judge(checkpoint, source, progress=progress, sink=copy.write)
            if found.answer != "sound":
                return Conversion(found, [], 0, {})
            copy.compare(scans)
            copy.finish()
            is_of_ranks = to in (ConversionTarget.FSDP1, ConversionTarget.FSDP2)
            _copy_settings(checkpoint, model, directory / "huggingface" if is_of_ranks else directory)
            sync_directory(directory)
            _rename(directory, target)
    except BadFile as error:
        raise ConversionError(error.describe(source)) from None
    changed = {old: new for old, new in names.items() if old != new}
    return Conversion(
        found, [file.name for file in layout.files], layout.num_bytes, changed, states.optimizer is not None
    )


def _count_ranks(model: SavedModel) -> int:
    """That saved it; 0 if nothing says so."""
    return 1 + max((-1 if p.rank is None else p.rank for t in model.tensors.values() for p in t.pieces), default=-1)


def _choose_states(
    model: SavedModel,
    optimizer: SavedOptimizer | None,
    names: Mapping[str, str],
    parameters: Collection[str],
    dtype: str | None,
) -> StatesToWrite:
    updated = {name for group in optimizer.groups for name in group["params"]} if optimizer is not None else set()
    weights = {}
    for old, tensor in model.tensors.items():
        is_sharded = bool(tensor.shape) and (old in parameters or names[old] in updated)
        cast_to = dtype if dtype is not None and is_floating_point(tensor.dtype) else tensor.dtype
        weights[names[old]] = TensorToWrite(tensor, cast_to, is_sharded)
    if optimizer is None:
        return StatesToWrite(weights, None)

    def keep(name: str, leaf: Any) -> Any:
        if not isinstance(leaf, SavedTensor):
            return leaf
        parameter = weights.get(name)
        is_like_it = parameter is not None and parameter.is_sharded and leaf.shape == parameter.shape
        return TensorToWrite(leaf, leaf.dtype, is_like_it)

    state = {name: {slot: keep(name, leaf) for slot, leaf in slots.items()} for name, slots in optimizer.state.items()}
    return StatesToWrite(weights, {"state": state, "param_groups": optimizer.groups})


def _cast(source: str, target: str) -> Callable[[bytes], bytes]:
    """Rounds as torch does, with torch."""
    import torch

    def cast(data: bytes) -> bytes:
        of_source = torch.frombuffer(bytearray(data), dtype=getattr(torch, source))
        result = bytearray(of_source.numel() * getattr(torch, target).itemsize)
        torch.frombuffer(result, dtype=getattr(torch, target)).copy_(of_source)
        return bytes(result)

    return cast


def _leave_out_tied_head(model: SavedModel, checkpoint: SavedCheckpoint) -> None:
    head = model.tensors.get("lm_head.weight")
    ties = any(
        checkpoint.find_setting(state.directory, "config.json").get("tie_word_embeddings") for state in model.states
    )
    if head is not None and ties and any(t.pieces == head.pieces for t in model.tensors.values() if t is not head):
        del model.tensors["lm_head.weight"]


def _copy_settings(checkpoint: SavedCheckpoint, model: SavedModel, directory: pathlib.Path) -> None:
    for name in _BESIDE:
        for state in model.states:
            places = (state.directory, f"{state.directory}/huggingface", "huggingface", ".")
            file = next((f for f in (checkpoint.root / place / name for place in places) if f.is_file()), None)
            if file is not None:
                directory.mkdir(exist_ok=True)
                shutil.copyfile(file, directory / name)


@contextlib.contextmanager
def _make_partial_directory(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """A new directory beside the target; removed at the end, unless it was renamed. One that was left is replaced."""
    directory = target.parent / f".{target.name}.partial"
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / f".{target.name}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConversionError(f"another conversion is writing {target}") from None
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)
            os.unlink(lock.name)


def _rename(directory: pathlib.Path, target: pathlib.Path) -> None:
    old = target.parent / f".{target.name}.old"
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    directory.rename(target)
    sync_directory(target.parent)
    if old.is_dir():
        shutil.rmtree(old)
    else:
        old.unlink(missing_ok=True)
