"""``fsdp-doctor checkpoint``: fingerprints of a checkpoint, or of two side by side."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from fsdp_doctor.cli.options import output_file
from fsdp_doctor.cli.output import write
from fsdp_doctor.errors import EXIT_BAD_VERDICT, EXIT_OK, UsageError

if TYPE_CHECKING:
    from fsdp_doctor.fingerprints import Fingerprints

EXIT_CODES = "Exit codes: 0 done, or no difference; 1 a difference; 2 usage; 4 the output cannot be written."


VERIFY_EXIT_CODES = "Exit codes: 0 sound; 1 damaged; 2 it cannot be judged, or usage; 4 the output cannot be written."


def verify(
    *,
    directory: Annotated[pathlib.Path, typer.Argument(help="A directory of any format, or a file.", metavar="DIR")],
    json_file: Annotated[pathlib.Path | None, output_file("--json", help="Write the findings there as JSON.")] = None,
) -> None:
    """Find what is damaged in a checkpoint on disk, without torch, without the model, and without running a pickle.

    Every byte is read once, in bounded memory. What the answer does not cover is said at the end.
    """
    from fsdp_doctor.checkpoints.verification import EXIT_CODES as EXIT_CODES_OF, verify as verify_checkpoint

    try:
        found = verify_checkpoint(directory, progress=_show_progress if sys.stderr.isatty() else None)
    except OSError as error:
        raise UsageError(f"cannot read {error.filename or directory}: {error.strerror or error}") from None
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if json_file is not None:
        write(json_file, found.to_json())
    write(None, found.to_text())
    raise SystemExit(EXIT_CODES_OF[found.answer])


def _show_progress(done: int, total: int) -> None:
    if done == total or done % (64 << 20) < 1 << 20:
        print(f"\r{done >> 20} of {total >> 20} MiB read", end="", file=sys.stderr, flush=True)


def fingerprint(
    *,
    checkpoint: Annotated[
        pathlib.Path,
        typer.Argument(
            help="A checkpoint: a file or directory of safetensors or torch.save, or a DCP; or a JSON of it."
        ),
    ],
    other: Annotated[pathlib.Path | None, typer.Argument(help="Another one, to be compared.")] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="Cast floating-point tensors to it first, as in bfloat16.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    output: Annotated[pathlib.Path | None, output_file(help="Write there, not to stdout.")] = None,
) -> None:
    """Print 128 bits for each tensor of a checkpoint, or compare two checkpoints tensor by tensor.

    Files are streamed; nothing is loaded as a whole. A JSON file is what this command, or Fingerprints.to_json, wrote.
    """
    for file in filter(None, (checkpoint, other)):
        if output is not None and output.resolve() == file.resolve():
            raise UsageError(f"--output names the checkpoint {file}; give another file")
    left = _read(checkpoint, dtype)
    if other is None:
        write(output, _listed(left, as_json))
        raise SystemExit(EXIT_OK)
    from fsdp_doctor.fingerprints import FingerprintError, compare_fingerprints

    try:
        differences = compare_fingerprints(left, _read(other, dtype), called=(str(checkpoint), str(other)))
    except FingerprintError as error:
        raise UsageError(str(error)) from None
    if as_json:
        write(output, json.dumps([dataclasses.asdict(difference) for difference in differences], indent=1) + "\n")
    else:
        write(output, "".join(f"{difference}\n" for difference in differences))
    print(f"{len(differences)} of {len(left.tensors)} tensors differ", file=sys.stderr)
    raise SystemExit(EXIT_BAD_VERDICT if differences else EXIT_OK)


def _read(path: pathlib.Path, dtype: str | None) -> Fingerprints:
    """Reads fingerprints, or makes them of a checkpoint. Raises UsageError for a file that is neither."""
    import torch

    from fsdp_doctor.fingerprints import FingerprintError, Fingerprints, fingerprint_checkpoint
    from fsdp_doctor.load import LoadError

    cast_to = getattr(torch, dtype, None) if dtype is not None else None
    if dtype is not None and not (isinstance(cast_to, torch.dtype) and cast_to.is_floating_point):
        raise UsageError(f"--dtype {dtype}: torch has no floating-point dtype of that name")
    try:
        if path.suffix != ".json" or not path.is_file():
            return fingerprint_checkpoint(path, dtype=cast_to)
        if dtype is not None:
            raise UsageError(f"{path} holds sums, which --dtype {dtype} cannot be applied to")
        return Fingerprints.from_json(path.read_text(encoding="utf-8"))
    except (FingerprintError, LoadError) as error:
        raise UsageError(str(error)) from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no text") from None
    except OSError as error:
        raise UsageError(f"cannot read {error.filename or path}: {error.strerror or error}") from None


def _listed(fingerprints: Fingerprints, as_json: bool) -> str:
    if as_json:
        return fingerprints.to_json() + "\n"
    return "".join(
        f"{tensor.hex}  {tensor.dtype:<9} {'x'.join(map(str, tensor.shape)) or 'scalar':<16} {name}\n"
        for name, tensor in fingerprints.tensors.items()
    )
