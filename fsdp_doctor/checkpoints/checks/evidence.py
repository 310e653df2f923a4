"""The input of the checks, and helpers that several checks share."""

from __future__ import annotations

import re
import struct
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy

from fsdp_doctor.checkpoints.record import SavedCheckpoint, SavedPiece, SavedTensor, State
from fsdp_doctor.checkpoints.scanning import Scans
from fsdp_doctor.checkpoints.spans import SpanScan
from fsdp_doctor.checkpoints.sums import shift_crc

Samples: TypeAlias = "numpy.ndarray[Any, Any]"
LAYER = re.compile(r"^(?P<stack>.*?\b(?:layers|layer|h|blocks|block))\.(?P<number>\d+)\.(?P<rest>.+)$")
EXPERT = re.compile(r"^(?P<layer>.*\bexperts)\.(?P<number>\d+)\.(?P<rest>.+)$")
LORA = re.compile(r"^(?P<module>.*)\.lora_(?P<half>[AB])(?:\.[^.]+)?\.weight$")
MOMENTS = frozenset({"exp_avg", "exp_avg_sq"})
# MATRIX: usual names of weight matrices. REPEATED_HEADS: names of matrices whose heads a program may repeat to get more
# key-value heads.
MATRIX = re.compile(
    r"(?:^|\.)((q|k|v|o|out|gate|up|down|qkv|gate_up)_proj|embed_tokens|lm_head|wte|fc[12]|w[123]|"
    r"c_(attn|proj|fc)|query|key|value|dense|query_key_value)\.weight$"
)
REPEATED_HEADS = re.compile(r"(?:^|[._])(?:[kv]_proj|key|value|kv|qkv_proj|query_key_value|c_attn|in_proj\w*)\b")
GROUP_SETTING = re.compile(
    r"(?:^|\.)param_groups\.(?P<group>.+)\.(?P<key>lr|initial_lr|eps|weight_decay|betas\.[01]|params\.\d+)$"
)


@dataclass(frozen=True)
class CheckpointEvidence:
    """Checkpoint as it was read, with the scan results of its bytes."""

    checkpoint: SavedCheckpoint
    scans: Scans

    def find_scans(self, tensor: SavedTensor) -> list[tuple[SavedPiece, SpanScan]]:
        """Returns the scanned pieces of a tensor that are not empty, each with its scan."""
        pairs = ((piece, self.scans.find(piece, tensor.itemsize)) for piece in tensor.pieces if piece.numel)
        return [(piece, scan) for piece, scan in pairs if scan is not None]

    def is_zero(self, tensor: SavedTensor) -> bool:
        scans = self.find_scans(tensor)
        return bool(scans) and all(scan.is_zero for _, scan in scans)

    def find_checksum(self, tensor: SavedTensor) -> int | None:
        """Computes the CRC-32 of the tensor's bytes in row order; None if its pieces are not blocks of whole rows, or
        their positions in the tensor are not known.
        """
        if tensor.is_loose:
            return None
        crc, at = 0, 0
        for piece, scan in {piece.offsets: (piece, scan) for piece, scan in sorted(self.find_scans(tensor))}.values():
            rows = piece.rows or (0, 1)
            if scan.crc is None or not piece.is_contiguous or piece.shape[1:] != tensor.shape[1:] or rows[0] != at:
                return None
            crc, at = shift_crc(crc, scan.nbytes) ^ scan.crc, rows[1]
        return crc if at == (tensor.shape or (1,))[0] else None

    def pair_samples(self, one: SavedTensor, other: SavedTensor) -> Iterator[tuple[Samples, Samples]]:
        """Yields finite elements at the same indices of two tensors, for each pair of pieces with the same rows."""
        is_by_rank = one.is_loose or other.is_loose

        def locate(piece: SavedPiece) -> tuple[object, ...]:
            return piece.offsets, piece.shape, piece.rank if is_by_rank else None

        samples = {locate(piece): scan.sample for piece, scan in self.find_scans(other) if piece.is_contiguous}
        for piece, scan in self.find_scans(one):
            pair = scan.sample, samples.get(locate(piece))
            if pair[0] is not None and pair[1] is not None and piece.is_contiguous and len(pair[0]) == len(pair[1]):
                is_there = numpy.isfinite(pair[0]) & numpy.isfinite(pair[1])
                yield pair[0][is_there], pair[1][is_there]

    def find_model_config(self, state: State) -> dict[str, Any]:
        """Reads config.json, in which the settings of ``text_config`` take precedence; empty if the weights are
        quantized.
        """
        config = self.checkpoint.find_setting(state.directory, "config.json")
        inner = config.get("text_config")
        return {} if "quantization_config" in config else config | (inner if isinstance(inner, dict) else {})


def group_families(tensors: Iterable[SavedTensor]) -> Collection[list[SavedTensor]]:
    families: dict[str, list[SavedTensor]] = defaultdict(list)
    for tensor in tensors:
        families[name_family(tensor)].append(tensor)
    return families.values()


def name_family(tensor: SavedTensor) -> str:
    return re.sub(r"\d+", "#", tensor.name)


def measure_size(evidence: CheckpointEvidence, tensor: SavedTensor) -> float:
    sizes = [scan.size for _, scan in evidence.find_scans(tensor) if scan.size is not None]
    return sum(sizes) / len(sizes) if sizes else 0.0


def parse_number(dtype: str, head: bytes) -> float | None:
    code = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}.get(dtype)
    size = struct.calcsize(code) if code else 0
    return float(struct.unpack(code, head[:size])[0]) if code and len(head) >= size else None


def find_rank_file(state: State, rank: int | None) -> str:
    """Finds the file that has the rank in its name. If there is none, returns the directory."""
    return next((path for path in state.files if re.search(rf"(?<!\d)0*{rank}\.\w+$", path)), state.directory)
