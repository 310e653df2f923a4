"""Verdict on a stored checkpoint: what is damaged, how that affects a load, and what was not checked."""

from __future__ import annotations

import pathlib
import shlex
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Literal, TypeAlias

import msgspec

from fsdp_doctor.checkpoints.checks import run_checks
from fsdp_doctor.checkpoints.checks.evidence import CheckpointEvidence
from fsdp_doctor.checkpoints.reading import read_checkpoint
from fsdp_doctor.checkpoints.record import SavedCheckpoint, State
from fsdp_doctor.checkpoints.scanning import Scans, Sink, scan
from fsdp_doctor.checkpoints.troubles import Symptom, Trouble, TroubleSeverity
from fsdp_doctor.text import escape_controls, format_count, join_some

SoundnessAnswer: TypeAlias = Literal["sound", "damaged", "cannot be judged"]
EXIT_CODES: dict[SoundnessAnswer, int] = {"sound": 0, "damaged": 1, "cannot be judged": 2}
# Findings of one kind in one file that the text shows; JSON has all of them.
_MOST_SHOWN = 3
_MOST_LISTED = 12
_ONLY_AGAINST = (
    "whether the weights are from the expected step, and whether tensors of equal shapes were exchanged: no --against, "
    "no --base"
)


class CheckpointFinding(msgspec.Struct, omit_defaults=True):
    """One problem that was found: its effect on a load, and a remedy.

    ``rows`` are the first row and the row after the last.
    """

    trouble: str
    severity: TroubleSeverity
    what: str
    load: str
    remedy: str
    file: str = ""
    tensor: str = ""
    rows: tuple[int, int] | None = None
    rank: int | None = None


class Verification(msgspec.Struct):
    """Result of a verification.

    ``states`` describes what was found in the directory. ``num_bytes`` counts the bytes that were read. ``unchecked``
    lists what the answer does not cover.
    """

    path: str
    answer: SoundnessAnswer
    states: list[str]
    num_tensors: int
    num_files: int
    num_bytes: int
    findings: list[CheckpointFinding]
    unchecked: list[str]

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode() + "\n"

    def to_text(self) -> str:
        lines = [self._write_headline()]
        groups: dict[tuple[str, str], list[CheckpointFinding]] = {}
        for finding in self.findings:
            groups.setdefault((finding.trouble, finding.file), []).append(finding)
        for of_group in groups.values():
            lines += [_write_sentence(finding) for finding in of_group[:_MOST_SHOWN]]
            if len(of_group) > _MOST_SHOWN:
                lines.append(f"  and {len(of_group) - _MOST_SHOWN} more of this kind in this file")
            lines += [f"  a load: {of_group[0].load}", f"  do: {of_group[0].remedy}"]
        lines.append(f"read: {join_some(self.states, _MOST_LISTED) or 'nothing'}")
        lines += [f"not checked: {each}" for each in self.unchecked[-_MOST_LISTED:]]
        if len(self.unchecked) > _MOST_LISTED:
            lines.append(f"not checked: {len(self.unchecked) - _MOST_LISTED} more, which --json lists")
        return "".join(f"{escape_controls(line)}\n" for line in lines)

    def _write_headline(self) -> str:
        counts = {kind: sum(f.severity == kind for f in self.findings) for kind in ("damage", "refused", "warning")}
        names = {"damage": "damage", "refused": "unreadable", "warning": "warning"}
        parts = [f"{count} x {names[kind]}" for kind, count in counts.items() if count]
        size = (
            f"{format_count(self.num_tensors, 'tensor')}, {format_count(self.num_files, 'file')}, "
            f"{format_count(self.num_bytes, 'byte')} read"
        )
        return f"{self.answer}: {self.path} ({', '.join([*parts, size])})"


def verify(
    path: pathlib.Path,
    *,
    compare: Callable[[], Sequence[Symptom]] | None = None,
    progress: Callable[[int, int], None] | None = None,
    part: str | None = None,
) -> Verification:
    """Verifies all files below a directory, or a single file, and reads each byte once.

    ``compare`` finds differences from a reference. ``progress`` is called with the number of bytes read and the total,
    by one thread at a time. ``part``: see ``read_checkpoint``. Raises FileNotFoundError if there is no such path.
    """
    path.stat()
    return judge(read_checkpoint(path, part), path, compare=compare, progress=progress)[0]


def judge(
    checkpoint: SavedCheckpoint,
    path: pathlib.Path,
    *,
    compare: Callable[[], Sequence[Symptom]] | None = None,
    progress: Callable[[int, int], None] | None = None,
    sink: Sink | None = None,
    mended: Collection[Trouble] = (),
) -> tuple[Verification, Scans]:
    """Scans and checks a checkpoint whose metadata was read; returns the verdict and the scans.

    ``sink`` receives all bytes as they are read. ``mended`` are troubles to ignore, because the caller corrects them.
    """
    num_bytes = sum(member.nbytes for file in checkpoint.files.values() for member in file.members)
    done, lock = 0, threading.Lock()

    def count(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes
            if progress is not None:
                progress(done, num_bytes)

    scans = scan(checkpoint, count, sink)
    symptoms = run_checks(CheckpointEvidence(checkpoint, scans))
    symptoms = [*checkpoint.symptoms, *scans.symptoms, *symptoms, *(compare() if compare else ())]
    order: dict[TroubleSeverity, int] = {"damage": 0, "refused": 1, "warning": 2}
    findings = sorted(
        (_make_finding(symptom, path) for symptom in symptoms if symptom.trouble not in mended),
        key=lambda finding: order[finding.severity],
    )
    kinds = {finding.severity for finding in findings}
    found = Verification(
        path=str(path),
        answer="damaged" if "damage" in kinds else "cannot be judged" if "refused" in kinds else "sound",
        states=list(map(_describe, checkpoint.states)),
        num_tensors=sum(len(state.tensors) for state in checkpoint.states),
        num_files=len(checkpoint.files),
        num_bytes=scans.nbytes,
        findings=findings,
        unchecked=[
            *checkpoint.unchecked,
            *_list_without_checksums(checkpoint),
            *([] if compare else [_ONLY_AGAINST]),
        ],
    )
    return found, scans


def _describe(state: State) -> str:
    where = pathlib.PurePath(state.directory, state.label)
    left_out = "".join(
        f"; {part or 'others'}: {count} that do not belong to the model" for part, count in state.left_out.items()
    )
    return f"{where} ({state.arrangement.value}; {len(state.tensors)} tensors{left_out})"


def _make_finding(symptom: Symptom, path: pathlib.Path) -> CheckpointFinding:
    kind = symptom.trouble.value
    remedy = kind.remedy.value.replace("PATH", shlex.quote(str(path)))
    return CheckpointFinding(
        symptom.trouble.name.lower(),
        kind.severity,
        symptom.what,
        kind.load,
        f"{remedy}: {kind.hint}" if kind.hint else remedy,
        *symptom[2:],
    )


def _write_sentence(finding: CheckpointFinding) -> str:
    place = [finding.file, finding.tensor]
    if finding.rows is not None:
        first, after = finding.rows
        place.append(f"row {first}" if after == first + 1 else f"rows {first} to {after - 1}")
    if finding.rank is not None:
        place.append(f"rank {finding.rank}")
    return ": ".join(
        filter(None, (finding.severity, ", ".join(filter(None, place)), f"{finding.what} [{finding.trouble}]"))
    )


def _list_without_checksums(checkpoint: SavedCheckpoint) -> list[str]:
    files = [file for file in checkpoint.files.values() if file.members and not file.has_checksums]
    kinds = {
        "safetensors has no checksum": [file for file in files if file.path.endswith(".safetensors")],
        "these files were saved without checksums": [file for file in files if not file.path.endswith(".safetensors")],
    }
    num_files = format_count(len(checkpoint.files), "file")
    return [
        f"{why}: a changed value in {len(of_kind)} of {num_files} is found only with --against"
        for why, of_kind in kinds.items()
        if of_kind
    ]
