"""Converts a checkpoint from any format to another, as a stream that verifies both what is read and what is written."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from fsdp_doctor.checkpoints.copying import Copy
from fsdp_doctor.checkpoints.dtypes import is_floating_point
from fsdp_doctor.checkpoints.files import BadFile
from fsdp_doctor.checkpoints.hub_parts import HubPart, join_from_hub, split_for_hub
from fsdp_doctor.checkpoints.names import strip_prefixes, strip_wrappers
from fsdp_doctor.checkpoints.optimizer import ParameterOrder, SavedOptimizer, choose_optimizer
from fsdp_doctor.checkpoints.reading import read_checkpoint
from fsdp_doctor.checkpoints.record import (
    Arrangement,
    SavedCheckpoint,
    SavedModel,
    SavedPiece,
    SavedTensor,
    choose_model,
    list_settings_places,
)
from fsdp_doctor.checkpoints.scanning import Scans
from fsdp_doctor.checkpoints.target_directory import (
    ConversionError,
    check_target,
    give_name,
    make_partial_directory,
)
from fsdp_doctor.checkpoints.targets import ConversionTarget, StatesToWrite, TensorToWrite, lay_out
from fsdp_doctor.checkpoints.troubles import Trouble
from fsdp_doctor.checkpoints.verification import Verification, judge

_Pairs: TypeAlias = list[tuple[SavedPiece, SavedPiece, int]]
LARGEST_FILE = 5_000_000_000
# Troubles that the conversion corrects by renaming tensors.
_MENDED = (Trouble.PREFIX, Trouble.WRAPPED)
# Other files that a Hugging Face directory has. They are copied if they exist.
_BESIDE = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "added_tokens.json", "chat_template.jinja"),
)


_OF_ADAPTER = re.compile(r"\.(?:lora|vera|dora|oft|boft|ia3|hada|lokr)_\w+")


@dataclass(frozen=True, slots=True)
class Conversion:
    """Result of a conversion.

    ``verification`` is the verdict on the source; nothing is written unless the source is sound. ``names`` lists the
    changed names, old and new. ``is_adapter`` says whether the model is only an adapter. ``left_out`` lists the parts
    of the source that belong neither to the model nor to its optimizer, with their numbers of tensors.
    """

    verification: Verification
    files: list[str]
    num_bytes: int
    names: list[tuple[str, str]]
    has_optimizer: bool = False
    is_adapter: bool = False
    left_out: dict[str, int] = field(default_factory=dict)


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
    config: str | None = None,
    part: str | None = None,
    find_parts: Callable[[str], Mapping[str, HubPart]] | None = None,
    find_order: Callable[[str], ParameterOrder | None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Writes the model in ``source`` to a new directory, and the optimizer if the target has a place for it.

    The source is read once and verified at the same time. If it is not sound, nothing is left behind. Written data is
    read back and compared. The directory gets its final name only at the end, so an interrupted conversion never leaves
    a directory of that name, and the next conversion removes its leftovers. Host memory: a few MiB. Runs no pickle, and
    needs torch only for a cast.

    overwrite: whether to replace an existing directory; allowed only if a conversion wrote everything in it.
    dtype: the dtype to which the model's floating-point tensors are cast; the optimizer is not cast.
    world_size: the number of ranks that will read the target; by default the number that wrote the source.
    with_optimizer: whether to write the optimizer, if the target has a place for it.
    device: the device type of FSDP2's mesh.
    buffers: names, or last parts of names, of tensors that FSDP does not shard, if the files do not show this.
    largest_file: the size limit of a Hugging Face file in bytes.
    config: see ``read_hub_parts``; by default the config.json next to the source.
    part: see ``read_checkpoint``.
    find_parts: ``read_hub_parts``, which maps between the model's names and the Hub's; without it all names are kept.
    find_order: ``read_parameter_order``, called if the optimizer numbers its parameters and the files do not keep their
        order; without it such an optimizer is refused.
    progress: see ``verify``.

    Raises ConversionError for a checkpoint that cannot be converted, and OSError.
    """
    source.stat()
    check_target(target, source, (), overwrite=overwrite)
    checkpoint = read_checkpoint(source, part)
    check_target(target, source, checkpoint.list_paths(), overwrite=overwrite)
    if any(symptom.trouble.value.severity != "warning" for symptom in checkpoint.symptoms):
        return Conversion(judge(checkpoint, source, progress=progress)[0], [], 0, [])
    with make_partial_directory(target, overwrite=overwrite) as directory:
        try:
            model, renamed = _strip_wrappers(choose_model(checkpoint))
            if not model.tensors:
                raise ConversionError(f"{source} contains no named tensors")
            beside = list_settings_places(checkpoint, model, config)
            tied = _leave_out_tied_head(model, checkpoint) if to is ConversionTarget.HF else []
            config = config or next((str(place) for place in beside if (place / "config.json").is_file()), None)
            if find_parts is not None and config is not None:
                model, changed = _rename_tensors(model, to, functools.partial(find_parts, config))
                renamed += changed
            ranks = world_size or _count_ranks(model)
            if not ranks and to in (ConversionTarget.FSDP1, ConversionTarget.FSDP2):
                raise ConversionError(
                    f"{source} has no ranks; use --world-size to say how many ranks will read {target}"
                )
            parameters = model.select_parameters(buffers)
            has_place = with_optimizer and to is not ConversionTarget.HF
            ask_order = functools.partial(find_order, config) if find_order is not None and config is not None else None
            optimizer = choose_optimizer(checkpoint, model, parameters, ask_order) if has_place else None
            states = _choose_states(model, optimizer, parameters, dtype)
            layout = lay_out(to, states, ranks or 1, largest_file, device)
            with contextlib.closing(Copy(directory, layout, _cast)) as copy:
                found, scans = judge(checkpoint, source, progress=progress, sink=copy.write, mended=_MENDED)
                if found.answer != "sound":
                    return Conversion(found, [], 0, [])
                _check_tied(tied, scans)
                copy.finish()
            is_of_ranks = to in (ConversionTarget.FSDP1, ConversionTarget.FSDP2)
            _copy_settings(beside, directory / "huggingface" if is_of_ranks else directory)
            give_name(directory, target)
        except BadFile as error:
            raise ConversionError(error.describe(source)) from None
    files = [file.name for file in layout.files]
    left_out = {part: count for state in checkpoint.states for part, count in state.left_out.items()}
    is_adapter = all(_OF_ADAPTER.search(name) for name in model.tensors)
    return Conversion(found, files, layout.num_bytes, renamed, states.optimizer is not None, is_adapter, left_out)


def _strip_wrappers(model: SavedModel) -> tuple[SavedModel, list[tuple[str, str]]]:
    """Returns the model without wrapper prefixes, and the changed names, old and new.

    Raises BadFile if two names differ only in such a prefix.
    """
    names = strip_prefixes(model.tensors)
    if len({strip_wrappers(name) for name in names}) < len(names):
        raise BadFile("has names that differ only in a wrapper's prefix")
    tensors = {names[name]: tensor for name, tensor in model.tensors.items()}
    return SavedModel(tensors, model.states), [(old, new) for old, new in names.items() if old != new]


def _rename_tensors(
    model: SavedModel, to: ConversionTarget, find_parts: Callable[[], Mapping[str, HubPart]]
) -> tuple[SavedModel, list[tuple[str, str]]]:
    """Returns the model with other tensor names, and the changed names, old and new.

    The names are the Hub's if the target has the Hugging Face format. For another target, Hub names of whole tensors
    become the model's names. All other names stay as the job saved them.
    """
    if to is not ConversionTarget.HF and any(state.arrangement is not Arrangement.WHOLE for state in model.states):
        return model, []
    parts = find_parts()
    names = [(part.tensor, name) for name, part in parts.items()]
    if to is ConversionTarget.HF:
        tensors = split_for_hub(model.tensors, parts)
    else:
        tensors, names = join_from_hub(model.tensors, parts), [(new, old) for old, new in names]
    return SavedModel(tensors, model.states), [(old, new) for old, new in names if old in model.tensors]


def _count_ranks(model: SavedModel) -> int:
    """Counts the ranks that saved the checkpoint; 0 if their number is unknown."""
    return 1 + max((-1 if p.rank is None else p.rank for t in model.tensors.values() for p in t.pieces), default=-1)


def _choose_states(
    model: SavedModel,
    optimizer: SavedOptimizer | None,
    parameters: Collection[str],
    dtype: str | None,
) -> StatesToWrite:
    updated = {name for group in optimizer.groups for name in group["params"]} if optimizer is not None else set()
    weights = {}
    for name, tensor in model.tensors.items():
        is_sharded = bool(tensor.shape) and (name in parameters or name in updated)
        cast_to = dtype if dtype is not None and is_floating_point(tensor.dtype) else tensor.dtype
        weights[name] = TensorToWrite(tensor, cast_to, is_sharded)
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
    """Returns a function that casts bytes with torch, so that values are rounded as in torch."""
    import torch

    def cast(data: bytes) -> bytes:
        of_source = torch.frombuffer(bytearray(data), dtype=getattr(torch, source))
        result = bytearray(of_source.numel() * getattr(torch, target).itemsize)
        torch.frombuffer(result, dtype=getattr(torch, target)).copy_(of_source)
        return bytes(result)

    return cast


def _leave_out_tied_head(model: SavedModel, checkpoint: SavedCheckpoint) -> _Pairs:
    """Removes a tied head from the model, and returns its pieces paired with those of the embedding.

    The caller must check that the bytes of each pair are equal.
    """
    head = model.tensors.get("lm_head.weight")
    ties = (
        checkpoint.find_setting(state.directory, "config.json").get("tie_word_embeddings") for state in model.states
    )
    if head is None or not any(ties):
        return []
    blocks = {(piece.offsets, piece.shape): piece for piece in head.pieces}
    for name, tensor in model.tensors.items():
        if tensor is not head and tensor.dtype == head.dtype and re.search("emb|wte", name):
            others = {(piece.offsets, piece.shape): piece for piece in tensor.pieces}
            if blocks.keys() == others.keys():
                del model.tensors["lm_head.weight"]
                return [(piece, others[block], head.itemsize) for block, piece in blocks.items()]
    return []


def _check_tied(pairs: _Pairs, scans: Scans) -> None:
    for piece, other, itemsize in pairs:
        found, expected = scans.find(piece, itemsize), scans.find(other, itemsize)
        if found is None or expected is None or found.crc != expected.crc:
            raise BadFile("differs from the embedding, to which config.json ties it", "lm_head.weight")


def _copy_settings(places: Iterable[pathlib.Path], directory: pathlib.Path) -> None:
    for name in _BESIDE:
        file = next((place / name for place in places if (place / name).is_file()), None)
        if file is not None:
            directory.mkdir(exist_ok=True)
            shutil.copyfile(file, directory / name)
