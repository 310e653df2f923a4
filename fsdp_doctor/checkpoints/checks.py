"""The table of checks: each looks at a checkpoint that was read and scanned, and yields what is wrong."""

from __future__ import annotations

import itertools
import math
import pathlib
import re
import statistics
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from fsdp_doctor.checkpoints.model_types import knows_model
from fsdp_doctor.checkpoints.names import strip_wrappers
from fsdp_doctor.checkpoints.record import (
    Arrangement,
    SavedCheckpoint,
    SavedPiece,
    SavedTensor,
    State,
    parse_optimizer_slot,
)
from fsdp_doctor.checkpoints.scanning import PAGE_BYTES, Scans, SpanScan
from fsdp_doctor.checkpoints.sums import shift_crc
from fsdp_doctor.checkpoints.troubles import Symptom, Trouble
from fsdp_doctor.text import join_some

# Pairs of boxes are compared one by one.
_MOST_BOXES = 2000
_MOMENTS = {"exp_avg", "exp_avg_sq"}
_LAYER = re.compile(r"^(?P<stack>.*?\b(?:layers|layer|h|blocks|block))\.(?P<number>\d+)\.(?P<rest>.+)$")
_EXPERT = re.compile(r"^(?P<layer>.*\bexperts)\.(?P<number>\d+)\.(?P<rest>.+)$")
_LORA = re.compile(r"^(?P<module>.*)\.lora_(?P<half>[AB])(?:\.[^.]+)?\.weight$")
_EMBEDDING = re.compile(
    r"(?:^|\.)(embed_tokens|wte|word_embeddings|tok_embeddings|embed_in|lm_head|embed_out)\.weight$"
)
_MATRIX = re.compile(r"(?:^|\.)((q|k|v|o|gate|up|down)_proj|embed_tokens|lm_head|wte)\.weight$")
# What every layer of a class has if one has it.
_OF_EVERY_LAYER = re.compile(
    r"(^|\.)((q|k|v|o|out|gate|up|down)_proj|fc[12]|c_(attn|proj|fc)|query|key|value|dense|\w*norm|ln_\d)\.(weight|bias)$"
)
# A vocabulary is padded by less than this part of its rows.
_MOST_PADDING = 1 / 8
# Of a config.json: the embedding is narrower than the layers.
_PROJECTIONS = frozenset({"embedding_size", "word_embed_proj_dim"})
# How many matrices say what is usual, and by which factor one is of another order.
_FEWEST_LIKE, _OTHER_ORDER, _SAME_ORDER = 3, 500.0, 16.0
_PROJECTION = re.compile(
    r"(model\.|model\.language_model\.|language_model\.model\.)?layers\.\d+\.(self_attn|mlp)\."
    r"(?P<kind>(q|k|v|o|gate|up|down)_proj)\.weight"
)
# Of a config.json: its projections have other shapes, or not the same in all layers.
_OTHER_SHAPES = frozenset(
    {
        *("kv_lora_rank", "attn_output_gate", "global_head_dim", "num_global_key_value_heads", "layer_config"),
        *("intermediate_size_mlp", "block_configs", "hybrid_override_pattern", "swa_num_key_value_heads"),
        *("swa_head_dim", "num_kv_shared_layers", "linear_num_key_heads", "first_k_dense_replace"),
    }
)
_MASK = re.compile(r"mask|inv_freq")
# Its square is zero in float32.
_SQUARE_IS_ZERO = 1e-18
_COUNTERS = frozenset({"step", "last_epoch", "_step_count", "global_step"})
_STEP_FOLDER = re.compile(r"(?:checkpoint|global_step|step)[-_](\d+)")


@dataclass(frozen=True)
class CheckpointEvidence:
    """Evidence for the checks: the checkpoint as it was read, and facts about its bytes."""

    checkpoint: SavedCheckpoint
    scans: Scans

    def find_scans(self, tensor: SavedTensor) -> list[tuple[SavedPiece, SpanScan]]:
        """The pieces that have elements and were read."""
        pairs = ((piece, self.scans.find(piece, tensor.itemsize)) for piece in tensor.pieces if piece.numel)
        return [(piece, scan) for piece, scan in pairs if scan is not None]

    def is_zero(self, tensor: SavedTensor) -> bool:
        scans = self.find_scans(tensor)
        return bool(scans) and all(scan.is_zero for _, scan in scans)

    def find_checksum(self, tensor: SavedTensor) -> int | None:
        """The CRC-32 of all its bytes, in the order of rows; None if its pieces are not blocks of whole rows."""
        crc, at = 0, 0
        for piece, scan in {piece.offsets: (piece, scan) for piece, scan in sorted(self.find_scans(tensor))}.values():
            rows = piece.rows or (0, 1)
            if scan.crc is None or not piece.is_contiguous or piece.shape[1:] != tensor.shape[1:] or rows[0] != at:
                return None
            crc, at = shift_crc(crc, scan.nbytes) ^ scan.crc, rows[1]
        return crc if at == (tensor.shape or (1,))[0] else None

    def find_model_config(self, state: State) -> dict[str, Any]:
        """The facts of config.json, those of the text model first; empty if the weights are quantized."""
        config = self.checkpoint.find_setting(state.directory, "config.json")
        inner = config.get("text_config")
        return {} if "quantization_config" in config else config | (inner if isinstance(inner, dict) else {})


_Check: TypeAlias = Callable[[CheckpointEvidence, State], Iterator[Symptom]]


def run_checks(evidence: CheckpointEvidence) -> list[Symptom]:
    found = [symptom for state in evidence.checkpoint.states for check in CHECKS for symptom in check(evidence, state)]
    return found + [symptom for check in CHECKS_OF_ALL for symptom in check(evidence)]


# What the ranks' pieces make


def find_gaps(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Elements that no piece has, or several have. Replicas are equal blocks."""
    is_of_ranks = state.arrangement in (Arrangement.RANK_FILES, Arrangement.SHARDED_SAFETENSORS)
    if (
        state.arrangement is Arrangement.WHOLE
        or (is_of_ranks and state.is_incomplete)
        or evidence.checkpoint.is_one_file
    ):
        return
    for tensor in state.tensors.values():
        boxes = sorted({(p.offsets, p.shape) for p in tensor.pieces if p.numel})
        file = tensor.file
        if any(o + n > size for box in boxes for o, n, size in zip(*box, tensor.shape, strict=True)):
            yield Symptom(Trouble.OVERLAP, f"a piece reaches out of the shape {list(tensor.shape)}", file, tensor.name)
        elif len(boxes) > _MOST_BOXES:
            evidence.checkpoint.unchecked.append(f"{tensor.name}: whether its {len(boxes)} pieces overlap")
        elif tensor.shape and all(o[1:] == boxes[0][0][1:] and s[1:] == tensor.shape[1:] for o, s in boxes):
            yield from _sweep_rows(tensor, file, [(o[0], o[0] + s[0]) for o, s in boxes])
        elif any(_do_overlap(one, two) for one, two in itertools.combinations(boxes, 2)):
            yield Symptom(Trouble.OVERLAP, "pieces of it overlap", file, tensor.name)
        elif (covered := sum(math.prod(s) for _, s in boxes)) < tensor.numel:
            missing = tensor.numel - covered
            yield Symptom(Trouble.GAP, f"{missing} of {tensor.numel} elements are in no file", file, tensor.name)


def _do_overlap(one: tuple[Sequence[int], Sequence[int]], two: tuple[Sequence[int], Sequence[int]]) -> bool:
    return all(max(a, b) < min(a + n, b + m) for a, n, b, m in zip(*one, *two, strict=True))


def _sweep_rows(tensor: SavedTensor, file: str, ranges: list[tuple[int, int]]) -> Iterator[Symptom]:
    at = 0
    for begin, end in [*sorted(ranges), (tensor.shape[0], tensor.shape[0])]:
        if begin > at:
            yield Symptom(Trouble.GAP, "these rows are in no file", file, tensor.name, (at, begin))
        elif begin < at and end > begin:
            yield Symptom(Trouble.OVERLAP, "several pieces have these rows", file, tensor.name, (begin, min(at, end)))
        at = max(at, end)


def find_foreign_ranks(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Files of ranks in which another rank's tensors are: the mesh and the process group inside say whose."""
    if state.arrangement is not Arrangement.RANK_FILES:
        return
    first_with: dict[int, str] = {}
    for path in state.files:
        file = evidence.checkpoint.files.get(path)
        found = re.search(r"(\d+)\.\w+$", path)
        if file is None or found is None or len(file.ranks) != 1:
            continue
        (inside,), rank = file.ranks, int(found[1])
        other = first_with.setdefault(inside, path)
        if other != path:
            yield Symptom(Trouble.COPIED_RANK, f"{other} holds what rank {inside} saved, too", path, rank=rank)
        elif inside != rank:
            yield Symptom(Trouble.FOREIGN_RANK, f"it holds what rank {inside} saved", path, rank=rank)


def compare_ranks(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Tensors that some ranks lack, and copies of a tensor that differ between ranks."""
    ranks = {piece.rank for tensor in state.tensors.values() for piece in tensor.pieces}
    yield from _compare_keys(state)
    for tensor in state.tensors.values():
        slot = parse_optimizer_slot(tensor)
        # Of FSDP1's flat parameters each rank has another part, which nothing in the file says.
        if state.roles[tensor.path] == "other" or (slot and slot[1] == "step") or "flat_param" in tensor.name:
            continue
        here = {piece.rank for piece in tensor.pieces}
        if state.arrangement is Arrangement.RANK_FILES and here != ranks:
            others = ranks - here
            if len(others) < len(here):
                what = f"it is not there, and {len(here)} of {len(ranks)} ranks have it"
                for rank in sorted(others, key=str):
                    yield Symptom(Trouble.RANKS_DISAGREE, what, _find_file(state, rank), tensor.name, rank=rank)
            else:
                what = f"rank {join_some(sorted(map(str, here)))} alone has it, of {len(ranks)} ranks"
                yield Symptom(Trouble.RANKS_DISAGREE, what, tensor.file, tensor.name)
        values: dict[Any, tuple[SavedPiece, int | None]] = {}
        for piece, scan in evidence.find_scans(tensor) if state.arrangement is not Arrangement.WHOLE else ():
            first, crc = values.setdefault((piece.offsets, piece.shape, piece.strides), (piece, scan.crc))
            if crc != scan.crc and piece.is_contiguous:
                what = f"it differs from the copy in {first.file}"
                yield Symptom(Trouble.REPLICAS_DIFFER, what, piece.file, tensor.name, rank=piece.rank)


def _compare_keys(state: State) -> Iterator[Symptom]:
    """Lists what only some ranks have of the counters, schedulers and settings beside the tensors."""
    if state.arrangement is not Arrangement.RANK_FILES or state.is_incomplete:
        return
    by_key: dict[str, set[int | None]] = defaultdict(set)
    for path, rank in state.values:
        if len(path) > 1:
            by_key[path[0]].add(rank)
    for tensor in state.tensors.values():
        if len(tensor.path) > 1:
            by_key[tensor.path[0]] |= {piece.rank for piece in tensor.pieces}
    ranks = {int(found[1]): path for path in state.files if (found := re.search(r"(\d+)\.\w+$", path))}
    for key, here in by_key.items():
        # A rank may keep what belongs to it alone: several have what belongs to all.
        for rank in sorted(ranks.keys() - here) if len(here) * 2 >= len(ranks) else ():
            what = f"{key} is not there, and {len(here)} of {len(ranks)} ranks have it"
            yield Symptom(Trouble.RANKS_DISAGREE, what, ranks[rank], key, rank=rank)


def _find_file(state: State, rank: int | None) -> str:
    """Rank in the name; the directory if its name does not say one."""
    return next((path for path in state.files if re.search(rf"(?<!\d)0*{rank}\.\w+$", path)), state.directory)


def compare_steps(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Counters that must be the same on all ranks, and those of parameters that mostly are."""
    values: dict[tuple[str, ...], dict[tuple[str, int | None], float]] = defaultdict(dict)
    for (path, rank), number in state.values.items():
        if path and path[-1] in _COUNTERS and isinstance(number, int | float):
            values[path]["", rank] = number
    for tensor in state.tensors.values():
        if tensor.last_name == "step" and tensor.numel == 1:
            for piece, scan in evidence.find_scans(tensor):
                if (value := _parse_number(tensor.dtype, scan.head)) is not None:
                    values[tensor.path][piece.file, piece.rank] = value
    for path, by_rank in values.items():
        if len(set(by_rank.values())) > 1:
            counts = Counter(by_rank.values())
            common, most = counts.most_common(1)[0]
            numbers = sorted({f"{number:g}" for number in by_rank.values()})
            what = f"the ranks have {join_some(numbers)}"
            (file, rank), number = next(item for item in by_rank.items() if item[1] != common)
            if 2 * most > len(by_rank):
                what = f"it is {number:g}, and {most} of {len(by_rank)} ranks have {common:g}"
            yield Symptom(Trouble.STEPS, what, file or _find_file(state, rank), ".".join(path), rank=rank)
    of_parameters = (numbers for path, numbers in values.items() if state.judge_keys(path) == "optimizer")
    steps = {number for numbers in of_parameters for number in numbers.values()}
    if len(steps) > 1:
        what = f"the parameters' steps are between {min(steps):g} and {max(steps):g}"
        yield Symptom(Trouble.STEPS_VARY, what, state.directory)


def _parse_number(dtype: str, head: bytes) -> float | None:
    code = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}.get(dtype)
    size = struct.calcsize(code) if code else 0
    return float(struct.unpack(code, head[:size])[0]) if code and len(head) >= size else None


# Values


def find_nonfinite(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    for tensor in state.tensors.values():
        if _MASK.search(tensor.last_name):
            continue
        for piece, scan in evidence.find_scans(tensor):
            if scan.num_huge:
                row = _locate_row(piece, scan.first_bad or 0) if piece.is_contiguous else None
                what = f"{scan.num_huge} values are beyond 1e38"
                yield Symptom(Trouble.HUGE, what, piece.file, tensor.name, row, piece.rank)
            if not scan.num_nan + scan.num_inf + scan.num_minus_inf or scan.first_bad is None:
                continue
            parts = {"NaN": scan.num_nan, "inf": scan.num_inf, "-inf": scan.num_minus_inf}
            what = "it holds " + ", ".join(f"{count} {kind}" for kind, count in parts.items() if count)
            may_be_mask = tensor.last_name != "weight" and state.roles[tensor.path] != "optimizer"
            is_bad = scan.num_nan or scan.num_inf or not may_be_mask
            row = _locate_row(piece, scan.first_bad) if piece.is_contiguous else None
            yield Symptom(
                Trouble.NONFINITE if is_bad else Trouble.INFINITE, what, piece.file, tensor.name, row, piece.rank
            )


def _locate_row(piece: SavedPiece, element: int) -> tuple[int, int] | None:
    if not piece.shape:
        return None
    row = piece.offsets[0] + element // math.prod(piece.shape[1:])
    return row, row + 1


def find_other_sizes(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Matrices whose values are of another order than those like it, and those whose bits are of another dtype."""
    matrices = [tensor for tensor in state.select("model") if len(tensor.shape) > 1 and tensor.numel]
    for tensor in matrices:
        for piece, scan in evidence.find_scans(tensor):
            if scan.looks_split:
                what = "its bytes are those of bfloat16, two values for each of float32"
                yield Symptom(Trouble.OTHER_BITS, what, piece.file, tensor.name, piece.rows, piece.rank)
    for members in _group_families(each for each in matrices if not _LORA.match(each.parameter)):
        sizes = [(tensor, size) for tensor in members if (size := _measure(evidence, tensor))]
        if len(sizes) < _FEWEST_LIKE:
            continue
        median = statistics.median(size for _, size in sizes)
        far = [(tensor, size) for tensor, size in sizes if not 1 / _OTHER_ORDER < size / median < _OTHER_ORDER]
        near = [size for _, size in sizes if 1 / _SAME_ORDER < size / median < _SAME_ORDER]
        if len(far) + len(near) < len(sizes) or len(far) * 3 > len(sizes):
            continue  # they differ anyway
        for tensor, size in far:
            what = f"its values are of the size {size:.2g}, and those of {len(near)} like it of {median:.2g}"
            yield Symptom(Trouble.MAGNITUDE, what, tensor.file, tensor.name)


def _measure(evidence: CheckpointEvidence, tensor: SavedTensor) -> float:
    sizes = [scan.size for _, scan in evidence.find_scans(tensor) if scan.size is not None]
    return sum(sizes) / len(sizes) if sizes else 0.0


def find_equal_layers(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Layers all of whose matrices are the same, bit by bit."""
    layers: dict[tuple[str, int], dict[str, SavedTensor]] = defaultdict(dict)
    for tensor in state.select("model"):
        if (found := _LAYER.match(tensor.parameter)) and len(tensor.shape) > 1 and tensor.numel:
            layers[found["stack"], int(found["number"])][found["rest"]] = tensor
    seen: dict[tuple[Any, ...], int] = {}
    for (stack, number), tensors in sorted(layers.items()):
        sums = [(rest, evidence.find_checksum(tensor)) for rest, tensor in sorted(tensors.items())]
        if len(sums) < 2 or any(crc is None for _, crc in sums) or all(map(evidence.is_zero, tensors.values())):
            continue
        other = seen.setdefault((stack, *sums), number)
        if other != number:
            what = f"its {len(sums)} matrices are those of layer {other}, bit by bit"
            yield Symptom(Trouble.EQUAL_LAYERS, what, next(iter(tensors.values())).file, f"{stack}.{number}")


def find_zeros(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Matrices, ranks' rows and blocks of the file that are zero where others like them are not."""
    matrices = (tensor for tensor in state.select("model") if len(tensor.shape) > 1 and tensor.numel)
    for members in _group_families(each for each in matrices if not _LORA.match(each.parameter)):
        zero = [tensor for tensor in members if evidence.is_zero(tensor)]
        for tensor in zero if len(zero) < len(members) else ():
            what = f"it is zero, and of {len(members)} tensors like it {len(members) - len(zero)} are not"
            yield Symptom(Trouble.ZERO_MATRIX, what, tensor.file, tensor.name)
    for tensor in state.tensors.values():
        scans = evidence.find_scans(tensor)
        if all(scan.is_zero for _, scan in scans):
            continue
        is_matrix = len(tensor.shape) > 1 and state.roles[tensor.path] == "model"
        for piece, scan in scans:
            if scan.is_zero and is_matrix and state.arrangement is not Arrangement.WHOLE:
                is_last = piece.offsets[0] + piece.shape[0] == tensor.shape[0]
                is_padding = is_last and piece.shape[0] < tensor.shape[0] * _MOST_PADDING
                trouble = Trouble.ZERO_ROWS if is_padding and _EMBEDDING.search(tensor.name) else Trouble.ZERO_RANK
                yield Symptom(trouble, "these rows are zero", piece.file, tensor.name, piece.rows, piece.rank)
            elif not scan.is_zero and piece.is_contiguous and is_matrix:
                yield from _judge_zero_runs(evidence, tensor, piece, scan)


def _judge_zero_runs(
    evidence: CheckpointEvidence, tensor: SavedTensor, piece: SavedPiece, scan: SpanScan
) -> Iterator[Symptom]:
    file = evidence.checkpoint.files[piece.file]
    row_bytes = piece.numel // piece.shape[0] * tensor.itemsize
    for begin, end in scan.zero_runs:
        # The zero bytes of the elements beside the run belong to it.
        first, after = -(-begin // row_bytes), end // row_bytes
        rows = piece.offsets[0] + first, piece.offsets[0] + after
        slack = max(tensor.itemsize, 8)
        if begin > first * row_bytes - slack and end - after * row_bytes < slack:
            may_be_padding = _EMBEDDING.search(tensor.name) and after == piece.shape[0]
            whose = "" if may_be_padding else _describe_share(piece.shape[0], first, after)
            if not whose and not _EMBEDDING.search(tensor.name) and (after - first) * 8 >= piece.shape[0]:
                whose = f", {after - first} of {piece.shape[0]} that follow one another"
            trouble = Trouble.ZERO_RANK if whose else Trouble.ZERO_ROWS
            yield Symptom(trouble, f"these rows are zero{whose}", piece.file, tensor.name, rows, piece.rank)
            continue
        # A checksum that is right says that the zeros were saved.
        if file.has_checksums:
            continue
        from_page = begin and -(piece.begin + begin) % PAGE_BYTES < slack
        to_page = end < scan.nbytes and (piece.begin + end) % PAGE_BYTES < slack
        at_end = end == scan.nbytes and piece.begin + end == file.size
        is_block = from_page or to_page or at_end
        what = f"the bytes {piece.begin + begin} to {piece.begin + end} of the file are zero"
        what += ", from page to page" if is_block else ", from within one row to within another"
        trouble = Trouble.ZERO_BLOCK if is_block else Trouble.ZERO_ROWS
        yield Symptom(trouble, what, piece.file, tensor.name, rows, piece.rank)


def _describe_share(rows: int, first: int, after: int) -> str:
    """Words for whose rows they are, if they are all of one rank of a job of 2 to 1024."""
    for world in (2**power for power in range(10, 0, -1)):
        share = -(-rows // world)
        if share > 1 and first % share == 0 and after == min(first + share, rows):
            return f", which rank {first // share} of {world} would hold"
    return ""


def find_experts(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Experts that are missing, or all the same."""
    config = evidence.find_model_config(state)
    keys = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    said = next((config[key] for key in keys if isinstance(config.get(key), int)), None)
    experts: dict[tuple[str, str], dict[int, SavedTensor]] = defaultdict(dict)
    for tensor in state.select("model"):
        if found := _EXPERT.match(tensor.parameter):
            experts[found["layer"], found["rest"]][int(found["number"])] = tensor
    for (layer, rest), by_number in experts.items():
        name, file = f"{layer}.*.{rest}", next(iter(by_number.values())).file
        expected = said or max(by_number) + 1
        if missing := sorted(set(range(expected)) - by_number.keys()):
            what = f"of {expected} experts {len(missing)} are missing: {join_some(list(map(str, missing)))}"
            yield Symptom(Trouble.EXPERTS, what, file, name)
        matrices = [tensor for tensor in by_number.values() if len(tensor.shape) > 1 and not evidence.is_zero(tensor)]
        sums = [evidence.find_checksum(tensor) for tensor in matrices]
        if None not in sums and len(set(sums)) < len(sums):
            what = f"{len(sums)} of its experts have {len(set(sums))} different values"
            yield Symptom(Trouble.EQUAL_EXPERTS, what, file, name)


def find_lora(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Halves without the other, a rank that adapter_config.json denies, and B that never moved from zero."""
    halves: dict[str, dict[str, SavedTensor]] = defaultdict(dict)
    for tensor in state.select("model"):
        if found := _LORA.match(tensor.parameter):
            halves[found["module"]][found["half"]] = tensor
    config = evidence.checkpoint.find_setting(state.directory, "adapter_config.json")
    for module, by_half in halves.items():
        file = next(iter(by_half.values())).file
        if len(by_half) == 1:
            yield Symptom(Trouble.LORA_PAIR, f"it has lora_{next(iter(by_half))} alone", file, module)
        elif not config.get("rank_pattern") and by_half["A"].shape[0] != config.get("r", by_half["A"].shape[0]):
            what = f"lora_A has {by_half['A'].shape[0]} rows, and adapter_config.json says r = {config['r']}"
            yield Symptom(Trouble.SHAPE, what, file, module)
    matrices = [by_half["B"] for by_half in halves.values() if "B" in by_half]
    zero = [tensor for tensor in matrices if evidence.is_zero(tensor)]
    if zero and len(zero) < len(matrices):
        for tensor in zero:
            what = f"it is zero, and {len(matrices) - len(zero)} of {len(matrices)} are not"
            yield Symptom(Trouble.LORA_ZERO, what, tensor.file, tensor.name)
    elif zero:
        step = evidence.checkpoint.find_setting(state.directory, "trainer_state.json").get("global_step")
        trouble = Trouble.LORA_ZERO if isinstance(step, int) and step > 0 else Trouble.LORA_START
        after = f" after {step} steps" if trouble is Trouble.LORA_ZERO else ""
        yield Symptom(trouble, f"all {len(zero)} lora_B are zero{after}", zero[0].file)


# Names, shapes, settings


def find_wrapped_names(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    names = {state.get_saved_name(tensor): tensor.parameter for tensor in state.select("model")}
    wrapped = [name for name, parameter in names.items() if parameter != name or strip_wrappers(name) != name]
    if wrapped:
        is_hub = evidence.checkpoint.find_setting(state.directory, "config.json") or ".safetensors" in state.files[0]
        is_hub = is_hub and state.arrangement is Arrangement.WHOLE
        trouble = Trouble.PREFIX if is_hub else Trouble.WRAPPED
        what = f"{len(wrapped)} of {len(names)} names have a wrapper's prefix, such as {wrapped[0]}"
        yield Symptom(trouble, what, state.files[0])


def find_flat_shards(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Local shards that were saved in the place of whole weights: flat or empty."""
    if state.arrangement is Arrangement.RANK_FILES:
        return
    of_matrices = {_name_family(tensor) for tensor in state.select("model") if len(tensor.shape) > 1}
    for tensor in state.select("model"):
        name = tensor.parameter
        is_like_matrices = _name_family(tensor) in of_matrices or _MATRIX.search(name)
        if "flat_param" in name:
            yield Symptom(Trouble.FLAT, "it is the flat parameter of FSDP1, and no weight", state.files[0], name)
        elif not tensor.numel and name.endswith("weight"):
            yield Symptom(Trouble.FLAT, "it has no elements", tensor.file, name)
        elif len(tensor.shape) == 1 and "float" in tensor.dtype and is_like_matrices:
            what = f"it is flat, of {tensor.shape[0]} elements, where a matrix belongs"
            yield Symptom(Trouble.FLAT, what, tensor.file, name)


def compare_with_config(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    config = evidence.find_model_config(state)
    vocabulary, hidden = config.get("vocab_size"), config.get("hidden_size", config.get("n_embd"))
    has_projection = _PROJECTIONS & config.keys()
    for tensor in state.select("model"):
        name, file = tensor.parameter, tensor.file
        if len(tensor.shape) == 2 and _EMBEDDING.search(name):
            rows, columns = tensor.shape
            if isinstance(hidden, int) and columns != hidden and not has_projection:
                yield Symptom(Trouble.SHAPE, f"it has {columns} columns, and hidden_size is {hidden}", file, name)
            if isinstance(vocabulary, int) and rows != vocabulary:
                trouble = Trouble.PADDED if rows > vocabulary and rows % 8 == 0 else Trouble.SHAPE
                yield Symptom(trouble, f"it has {rows} rows, and vocab_size is {vocabulary}", file, name)
    embedding = next(
        (t for t in state.select("model") if re.search(r"(?:^|\.)(embed_tokens|wte)\.weight$", t.parameter)), None
    )
    head = next((t for t in state.select("model") if t.parameter == "lm_head.weight"), None)
    if not isinstance(vocabulary, int) and head and embedding and not has_projection and head.shape != embedding.shape:
        what = f"it is {list(head.shape)}, and {embedding.parameter} is {list(embedding.shape)}"
        is_padded = head.shape[1:] == embedding.shape[1:] and abs(head.shape[0] - embedding.shape[0]) < 1024
        yield Symptom(Trouble.PADDED if is_padded else Trouble.SHAPE, what, head.file, head.parameter)
    yield from _compare_projections(state, config)


def _compare_projections(state: State, config: dict[str, Any]) -> Iterator[Symptom]:
    """The projections of the text model's layers, of which config.json says how many rows and columns they have."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if not isinstance(hidden, int) or not isinstance(heads, int) or config.keys() & _OTHER_SHAPES:
        return
    groups = config.get("num_key_value_heads") or heads
    width = config.get("head_dim") or hidden // heads
    expected: dict[str, tuple[int, int]] = {}
    if isinstance(groups, int) and isinstance(width, int):
        of_queries, of_keys = heads * width, groups * width
        expected |= {"q_proj": (of_queries, hidden), "k_proj": (of_keys, hidden), "v_proj": (of_keys, hidden)}
        expected["o_proj"] = hidden, of_queries
    if isinstance(inner := config.get("intermediate_size"), int) and not config.get("moe_intermediate_size"):
        expected |= {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    found: dict[str, list[SavedTensor]] = defaultdict(list)
    for tensor in state.select("model"):
        if (match := _PROJECTION.fullmatch(tensor.parameter)) and match["kind"] in expected and len(tensor.shape) == 2:
            found[match["kind"]].append(tensor)
    of_mlp = {kind: {tensor.shape for tensor in found[kind]} for kind in ("gate_proj", "up_proj", "down_proj")}
    is_pruned = all(len(shapes) == 1 for shapes in of_mlp.values()) and (
        of_mlp["gate_proj"] == of_mlp["up_proj"] == {shape[::-1] for shape in of_mlp["down_proj"]}
    )
    for kind, tensors in found.items():
        for tensor in tensors:
            if tensor.shape == expected[kind]:
                continue
            what = f"it is {list(tensor.shape)}, and by config.json it would be {list(expected[kind])}"
            is_smaller = kind in of_mlp and is_pruned and math.prod(tensor.shape) < math.prod(expected[kind])
            trouble = Trouble.PRUNED if is_smaller and hidden in tensor.shape else Trouble.SHAPE
            if state.arrangement is Arrangement.SHARDED_SAFETENSORS and tensor.shape[0] < expected[kind][0]:
                trouble, what = Trouble.MISSING_RANK, f"{what}: the last shards are missing"
            yield Symptom(trouble, what, tensor.file, tensor.parameter)


def find_missing_tensors(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Layers, tensors of one layer, and heads that a model of this kind has."""
    config = evidence.find_model_config(state)
    names = {tensor.parameter: tensor for tensor in state.select("model")}
    if any(_LORA.match(name) for name in names) or not state.files or state.is_incomplete:
        return
    stacks: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in names:
        if found := _LAYER.match(name):
            stacks[found["stack"]][int(found["number"])].add(re.sub(r"\d+", "#", found["rest"]))
    for stack, layers in stacks.items():
        said = config.get("num_hidden_layers", config.get("n_layer")) if len(stacks) == 1 else None
        expected = max(said if isinstance(said, int) else 0, max(layers) + 1)
        beyond = sorted(number for number in layers if isinstance(said, int) and number >= said)
        if beyond and not config.keys() & {"num_nextn_predict_layers", "mtp_num_hidden_layers"}:
            what = f"layer {join_some(list(map(str, beyond)))} is there, and num_hidden_layers is {said}"
            yield Symptom(Trouble.EXTRA_LAYERS, what, state.files[0], stack)
        if missing := sorted(set(range(expected)) - layers.keys()):
            what = f"of {expected} layers {len(missing)} are missing: number {join_some(list(map(str, missing)))}"
            yield Symptom(Trouble.MISSING_TENSOR, what, state.files[0], stack)
        forms = Counter(frozenset(rests) for rests in layers.values())
        small, *more = sorted(forms, key=len)
        is_of_all = len(layers) == 2 and bool(config) and all(map(_OF_EVERY_LAYER.search, [*more, small][0] - small))
        if len(more) == 1 and small < more[0] and forms[small] == 1 and (forms[more[0]] > 1 or is_of_all):
            (number,) = (number for number, rests in layers.items() if rests == small)
            for rest in sorted(more[0] - small):
                name = f"{stack}.{number}.{rest}"
                yield Symptom(Trouble.MISSING_TENSOR, "the other layers have it", state.files[0], name)
    embedding = next((names[name] for name in names if re.search(r"(?:^|\.)(embed_tokens|wte)\.weight$", name)), None)
    head, ties = names.get("lm_head.weight"), config.get("tie_word_embeddings")
    is_causal = any(str(kind).endswith("ForCausalLM") for kind in config.get("architectures") or ())
    if ties is False and head is None and embedding is not None and is_causal:
        what = "it is missing, and config.json does not tie it to the embedding"
        yield Symptom(Trouble.MISSING_TENSOR, what, state.files[0], "lm_head.weight")
    outside = [name for name in names if not _LAYER.match(name)]
    has_norm = "norm" not in "".join(names) or any(re.search(r"norm|ln_", name) for name in outside)
    parts = {"embedding": any(re.search(r"emb|wte", name) for name in outside), "norm behind the layers": has_norm}
    for part, is_there in parts.items() if is_causal and stacks and not _PROJECTIONS & config.keys() else ():
        if not is_there:
            trouble = Trouble.MISSING_TENSOR if knows_model(config) else Trouble.UNUSUAL
            yield Symptom(trouble, f"no tensor is named as the {part}", state.files[0])
    if ties is True and head is not None and embedding is not None:
        sums = evidence.find_checksum(head), evidence.find_checksum(embedding)
        if None not in sums and sums[0] != sums[1]:
            what = f"it differs from {embedding.parameter}, to which config.json ties it"
            yield Symptom(Trouble.TIED, what, head.file, "lm_head.weight")


def find_mixed_dtypes(_: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    for members in _group_families(tensor for tensor in state.select("model") if len(tensor.shape) > 1):
        (common, count), *others = Counter(tensor.dtype for tensor in members).most_common()
        for tensor in members if others and count * 3 >= len(members) * 2 else ():
            if tensor.dtype != common:
                what = f"it is {tensor.dtype}, and {count} tensors like it are {common}"
                yield Symptom(Trouble.DTYPES, what, tensor.file, tensor.name)


def _group_families(tensors: Iterable[SavedTensor]) -> Collection[list[SavedTensor]]:
    families: dict[str, list[SavedTensor]] = defaultdict(list)
    for tensor in tensors:
        families[_name_family(tensor)].append(tensor)
    return families.values()


def _name_family(tensor: SavedTensor) -> str:
    return re.sub(r"\d+", "#", tensor.name)


# All states together


def compare_optimizer(evidence: CheckpointEvidence) -> Iterator[Symptom]:
    """Parameters without the optimizer's state that others of their layer have."""
    states = evidence.checkpoint.states
    with_state: set[str] = set()
    for state in states:
        slots = [slot for tensor in state.select("optimizer") if (slot := parse_optimizer_slot(tensor))]
        yield from _compare_moments(evidence, state)
        ids = {f"{key}" for (path, _), key in state.values.items() if path[-2:-1] == ("params",)}
        with_state |= {name for name, _ in slots}
        if lacking := sorted(ids - {name for name, _ in slots}) if slots else []:
            what = f"of {len(ids)} parameters {len(lacking)} have no state: {join_some(lacking)}"
            yield Symptom(Trouble.NO_OPTIMIZER, what, state.directory)
    model = {tensor.parameter: tensor for state in states for tensor in state.select("model") if len(tensor.shape) > 0}
    has_training_state = any(state.label == "extra_state" for state in states) or any(
        pathlib.PurePath(path).name == "trainer_state.json" for path in evidence.checkpoint.settings
    )
    if model and not with_state and has_training_state:
        yield Symptom(Trouble.NO_OPTIMIZER, "there is no state of an optimizer", ".")
    families_with_state = {re.sub(r"\d+", "#", name) for name in with_state}
    layers_with_state = {found.group(1, 2) for name in with_state if (found := _LAYER.match(name))}
    for name, tensor in model.items() if with_state & model.keys() else ():
        found = _LAYER.match(name)
        is_like_others = re.sub(r"\d+", "#", name) in families_with_state and not _EXPERT.match(name)
        if name not in with_state and is_like_others and found and found.group(1, 2) in layers_with_state:
            what = "the optimizer has no state of it, and has of others in its layer"
            yield Symptom(Trouble.OPTIMIZER, what, tensor.file, name)


def _judge_moments(evidence: CheckpointEvidence, by_kind: dict[str, SavedTensor], step: float | None) -> str:
    """Says what is wrong with the moments of Adam, whose second is a mean of squares; empty if nothing is."""
    first, second = by_kind.get("exp_avg"), by_kind.get("exp_avg_sq")
    if first is None or second is None:
        return ""
    if negative := sum(scan.num_negative for _, scan in evidence.find_scans(second)):
        return f"{negative} values of a mean of squares are negative"
    has_first = bool(evidence.find_scans(first)) and not evidence.is_zero(first)
    if has_first and evidence.is_zero(second) and (_measure(evidence, first) or 1.0) > _SQUARE_IS_ZERO:
        return "it is zero, and exp_avg is not"
    if step == 0 and has_first:
        return "the step is 0, and there are moments"
    return ""


def _compare_moments(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Parameters that lack one of the two moments that Adam keeps of others, or have them in different shapes."""
    moments: dict[str, dict[str, SavedTensor]] = defaultdict(dict)
    for tensor in state.select("optimizer"):
        if slot := parse_optimizer_slot(tensor):
            moments[slot[0]][slot[1]] = tensor
    steps = _read_steps(evidence, state, moments)
    has_both = [name for name, by_kind in moments.items() if by_kind.keys() >= _MOMENTS]
    for name, by_kind in moments.items():
        present = _MOMENTS & by_kind.keys()
        tensors = [by_kind[kind] for kind in sorted(present)]
        if has_both and len(present) == 1 and by_kind.keys() <= {*_MOMENTS, "step"}:
            what = f"it has no {min(_MOMENTS - present)}, which {len(has_both)} of {len(moments)} have"
            yield Symptom(Trouble.OPTIMIZER, what, tensors[0].file, name)
        elif (what := _judge_moments(evidence, by_kind, steps.get(name))) and len(tensors) == 2:
            yield Symptom(Trouble.MOMENTS, what, by_kind["exp_avg_sq"].file, by_kind["exp_avg_sq"].name)
        elif len(tensors) == 2 and tensors[0].shape != tensors[1].shape:
            what = f"its moments are {list(tensors[0].shape)} and {list(tensors[1].shape)}"
            yield Symptom(Trouble.OPTIMIZER, what, tensors[0].file, name)


def _read_steps(
    evidence: CheckpointEvidence, state: State, moments: dict[str, dict[str, SavedTensor]]
) -> dict[str, float]:
    steps: dict[str, float] = {}
    for name, by_kind in moments.items():
        tensor = by_kind.get("step")
        if tensor is not None and tensor.numel == 1:
            for _, scan in evidence.find_scans(tensor):
                if (value := _parse_number(tensor.dtype, scan.head)) is not None:
                    steps[name] = value
    for (path, _), plain in state.values.items():
        if path[-1:] == ("step",) and len(path) > 2 and isinstance(plain, int | float):
            steps.setdefault(path[-2], plain)
    return steps


def compare_trainer_step(evidence: CheckpointEvidence) -> Iterator[Symptom]:
    for path, settings in evidence.checkpoint.settings.items():
        place = pathlib.PurePath(path)
        folder = _STEP_FOLDER.fullmatch((evidence.checkpoint.root.resolve() / place).parent.name)
        step = settings.get("global_step") if isinstance(settings, dict) else None
        if place.name == "trainer_state.json" and folder and step != int(folder[1]):
            yield Symptom(Trouble.STEP_NAME, f"global_step is {step}", path)


def find_missing_settings(evidence: CheckpointEvidence) -> Iterator[Symptom]:
    settings = {pathlib.PurePath(path) for path in evidence.checkpoint.settings}
    for state in evidence.checkpoint.states:
        here = pathlib.PurePath(state.directory)
        is_model = state.label == "model" and any(file.endswith(".safetensors") for file in state.files)
        others = {here / "tokenizer.json", here / "generation_config.json"} & settings
        if is_model and others and here / "config.json" not in settings:
            yield Symptom(Trouble.SETTINGS, "config.json is missing", state.directory)
        if state.label == "adapter_model" and here / "adapter_config.json" not in settings:
            yield Symptom(Trouble.SETTINGS, "adapter_config.json is missing", state.directory)


def compare_with_shards(evidence: CheckpointEvidence) -> Iterator[Symptom]:
    """Files that HuggingFaceStorageWriter made of the shards in ``sharded``, which are still there."""
    states = {(state.directory, state.label): state for state in evidence.checkpoint.states}
    for (directory, label), shards in states.items():
        place = pathlib.PurePath(directory)
        made = states.get((str(place.parent), "model"))
        if label != "shards" or place.name != "sharded" or made is None:
            continue
        for path, tensor in made.tensors.items():
            other = shards.tensors.get(path, SavedTensor(path, tensor.dtype, ()))
            sums = {evidence.find_checksum(each) for each in (tensor, other)}
            if other.shape != tensor.shape or (None not in sums and len(sums) > 1):
                yield Symptom(Trouble.DIFFERS, f"it differs from what lies in {directory}", tensor.file, tensor.name)
        for path in shards.tensors.keys() - made.tensors.keys():
            yield Symptom(Trouble.MISSING_TENSOR, f"it lies in {directory} alone", made.files[0], ".".join(path))


CHECKS: tuple[_Check, ...] = (
    find_foreign_ranks,
    find_gaps,
    compare_ranks,
    compare_steps,
    find_nonfinite,
    find_other_sizes,
    find_zeros,
    find_equal_layers,
    find_experts,
    find_lora,
    find_wrapped_names,
    find_flat_shards,
    compare_with_config,
    find_missing_tensors,
    find_mixed_dtypes,
)
CHECKS_OF_ALL: tuple[Callable[[CheckpointEvidence], Iterator[Symptom]], ...] = (
    compare_optimizer,
    compare_trainer_step,
    find_missing_settings,
    compare_with_shards,
)
