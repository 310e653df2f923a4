"""``fsdp-doctor checkpoint fingerprint``: of a checkpoint, or two side by side."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from fsdp_doctor.cli.files import check_distinct, check_writable, write
from fsdp_doctor.errors import EXIT_BAD_VERDICT, EXIT_OK, UsageError

if TYPE_CHECKING:
    import torch

    from fsdp_doctor.fingerprints import Fingerprints

NAME = "fingerprint"
EXIT_CODES = "Exit codes: 0 done, or no difference; 1 a difference; 2 usage; 4 the output cannot be written."


def run(
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
    output: Annotated[pathlib.Path | None, typer.Option(metavar="FILE", help="Write there, not to stdout.")] = None,
) -> None:
    """Print 128 bits for each tensor of a checkpoint, or compare two checkpoints tensor by tensor.

    Files are streamed; nothing is loaded as a whole. A JSON file is what this command, or Fingerprints.to_json, wrote.
    """
    if output is not None:
        check_distinct({"the checkpoint": checkpoint, "--output": output})
        if other is not None:
            check_distinct({"the other checkpoint": other, "--output": output})
        check_writable(output)
    left = _read(checkpoint, dtype)
    if other is None:
        write(output, _listed(left, as_json))
        raise SystemExit(EXIT_OK)
    from fsdp_doctor.fingerprints import FingerprintError, compare_fingerprints

    try:
        found = compare_fingerprints(left, _read(other, dtype), called=(str(checkpoint), str(other)))
    except FingerprintError as error:
        raise UsageError(str(error)) from None
    if as_json:
        write(output, json.dumps([dataclasses.asdict(difference) for difference in found], indent=1) + "\n")
    else:
        write(output, "".join(f"{difference}\n" for difference in found))
    print(f"{len(found)} of {len(left.tensors)} tensors differ", file=sys.stderr)
    raise SystemExit(EXIT_BAD_VERDICT if found else EXIT_OK)


def _read(path: pathlib.Path, dtype: str | None) -> Fingerprints:
    """Of a checkpoint, or as they were written. Raises UsageError for what is neither."""
    from fsdp_doctor.fingerprints import FingerprintError, Fingerprints, fingerprint_checkpoint
    from fsdp_doctor.load import LoadError

    try:
        if path.suffix == ".json" and path.is_file():
            if dtype is not None:
                raise FingerprintError(f"{path} holds sums, which --dtype {dtype} cannot be applied to")
            return Fingerprints.from_json(path.read_text(encoding="utf-8"))
        return fingerprint_checkpoint(path, dtype=_dtype(dtype))
    except (FingerprintError, LoadError) as error:
        raise UsageError(str(error)) from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no text") from None
    except OSError as error:
        raise UsageError(f"cannot read {error.filename or path}: {error.strerror or error}") from None


def _dtype(name: str | None) -> torch.dtype | None:
    import torch

    if name is None:
        return None
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise UsageError(f"--dtype {name}: torch has no floating-point dtype of that name")
    return found


def _listed(found: Fingerprints, as_json: bool) -> str:
    if as_json:
        return found.to_json() + "\n"
    return "".join(
        f"{one.hex}  {one.dtype:<9} {'x'.join(map(str, one.shape)) or 'scalar':<16} {name}\n"
        for name, one in found.tensors.items()
    )
