"""``fsdp-doctor checkpoint``: verifies, compares and converts checkpoints, and prints their fingerprints."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import json
import logging
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from fsdp_doctor.checkpoints.targets import ConversionTarget
from fsdp_doctor.cli.options import declare_output_file
from fsdp_doctor.cli.output import write
from fsdp_doctor.errors import EXIT_BAD_VERDICT, EXIT_OK, UsageError
from fsdp_doctor.machine.terminal import measure_width, wrap_all
from fsdp_doctor.text import escape_controls, format_count, join_some

if TYPE_CHECKING:
    import torch

    from fsdp_doctor.checkpoints.hub_parts import HubPart
    from fsdp_doctor.checkpoints.optimizer import ParameterOrder
    from fsdp_doctor.checkpoints.troubles import Symptom
    from fsdp_doctor.weights.fingerprints import Fingerprints

_Answer = TypeVar("_Answer")
FINGERPRINT_EXIT_CODES = "Exit codes: 0 done; 2 usage; 4 the output cannot be written."
CONVERT_EXIT_CODES = (
    "Exit codes: 0 written; 1 the checkpoint is damaged; 2 the checkpoint cannot be judged, or a usage error."
)
DIFF_EXIT_CODES = "Exit codes: 0 no difference; 1 a difference; 2 usage; 4 the output cannot be written."
_MOST_NAMES = 12
_DTYPE: Any = typer.Option(
    metavar="DTYPE", help="Cast floating-point tensors to this dtype first, for example bfloat16."
)
_CONFIG: Any = typer.Option(
    metavar="DIR|NAME",
    help=(
        "Directory or name of a model whose config.json names the class.  [default: the checkpoint's own config.json]"
    ),
)
_KEEP_NAMES: Any = typer.Option(
    "--keep-names", help="Keep the names as they were saved; do not ask transformers for others."
)
_PART: Any = typer.Option(
    metavar="KEY",
    help="Part of the checkpoint that is the model: the keys that lead to it, or only the last key, for example ema.",
)
VERIFY_EXIT_CODES = (
    "Exit codes: 0 sound; 1 damaged; 2 the checkpoint cannot be judged, or a usage error; 4 the output cannot be "
    "written."
)


def verify(
    *,
    directory: Annotated[pathlib.Path, typer.Argument(help="A directory of any format, or a file.", metavar="DIR")],
    base: Annotated[
        pathlib.Path | None,
        typer.Option(metavar="DIR", help="The model before training: tensors that equal it were not trained."),
    ] = None,
    against: Annotated[
        pathlib.Path | None,
        typer.Option(metavar="DIR", help="A checkpoint of any format that must have the same weights."),
    ] = None,
    part: Annotated[str | None, _PART] = None,
    json_file: Annotated[
        pathlib.Path | None, declare_output_file("--json", help="Write the findings to this file as JSON.")
    ] = None,
) -> None:
    """Find what is damaged in a checkpoint on disk, without torch, without the model, and without running a pickle.

    Every byte is read once, in bounded memory. The end of the answer says what was not checked.
    """
    from fsdp_doctor.checkpoints.verification import EXIT_CODES, verify as verify_checkpoint

    try:
        found = verify_checkpoint(
            directory,
            compare=functools.partial(_compare_with, directory, base, against, part) if base or against else None,
            progress=_choose_progress(),
            part=part,
        )
    except OSError as error:
        raise UsageError(
            escape_controls(f"cannot read {error.filename or directory}: {error.strerror or error}")
        ) from None
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if json_file is not None:
        write(json_file, found.to_json())
    _print_text(found.to_text())
    raise SystemExit(EXIT_CODES[found.answer])


def _print_text(text: str) -> None:
    write(None, wrap_all(text.splitlines(), measure_width()))


def _compare_with(
    directory: pathlib.Path, base: pathlib.Path | None, against: pathlib.Path | None, part: str | None
) -> list[Symptom]:
    """Returns the differences from the checkpoint ``against``, and the tensors that equal the tensors of ``base``."""
    from fsdp_doctor.checkpoints.troubles import Symptom, Trouble
    from fsdp_doctor.weights.fingerprints import FingerprintError
    from fsdp_doctor.weights.fingerprints.checkpoint_files import compare_checkpoints

    symptoms = []
    for reference in filter(None, (against, base)):
        try:
            found = compare_checkpoints(reference, directory, part=part)
        except FingerprintError as error:
            symptoms.append(Symptom(Trouble.UNCOMPARED, str(error)))
            continue
        if reference is against:
            for each in found.differences:
                file, rows = found.places.get(each.name, ("", None))
                trouble = Trouble.ROUNDED if each.kind == "rounded" else Trouble.DIFFERS
                symptoms.append(Symptom(trouble, each.detail, file, each.name, rows))
        elif found.equal:
            trouble = Trouble.UNTRAINED if len(found.equal) == found.compared else Trouble.PARTLY_UNTRAINED
            what = f"{len(found.equal)} of {found.compared} tensors equal those of {base}: {join_some(found.equal)}"
            symptoms.append(Symptom(trouble, what))
    return symptoms


def _choose_progress() -> Callable[[int, int], None] | None:
    return _show_progress if sys.stderr.isatty() else None


def _show_progress(done: int, total: int) -> None:
    if done == total or done % (64 << 20) < 1 << 20:
        print(f"\r{done >> 20} of {total >> 20} MiB read", end="", file=sys.stderr, flush=True)


def diff(
    *,
    checkpoint: Annotated[
        pathlib.Path, typer.Argument(help="A checkpoint of any format, or a JSON file of fingerprints.")
    ],
    other: Annotated[
        pathlib.Path, typer.Argument(help="Another checkpoint of any format, or a JSON file of fingerprints.")
    ],
    dtype: Annotated[str | None, _DTYPE] = None,
    base: Annotated[
        pathlib.Path | None,
        typer.Option(help="The model before training, which shows weights that were not updated."),
    ] = None,
    strip: Annotated[
        list[str] | None, typer.Option(metavar="PREFIX", help="Remove this prefix from the names of both.")
    ] = None,
    config: Annotated[str | None, _CONFIG] = None,
    part: Annotated[str | None, _PART] = None,
    keep_names: Annotated[bool, _KEEP_NAMES] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    output: Annotated[pathlib.Path | None, declare_output_file(help="Write there, not to stdout.")] = None,
) -> None:
    """Compare the models in two checkpoints, whatever their formats and sharding: which tensors differ, and how.

    Files are streamed; nothing is loaded as a whole. A prefix of all names in one checkpoint is removed, and shown. If
    one checkpoint has the model's names and the other has the Hub's, both are compared under the Hub's names.
    """
    from fsdp_doctor.weights.fingerprints.checkpoint_files import compare_checkpoints

    _check_output(output, checkpoint, other)
    with _raise_usage_errors(checkpoint):
        found = compare_checkpoints(
            checkpoint,
            other,
            dtype=_parse_dtype(dtype),
            base=base,
            strip=strip or (),
            config=config,
            part=part,
            find_parts=None if keep_names else functools.partial(_ask_for_parts, must_know=config is not None),
        )
    different = len(found.differences)
    print(
        f"{'different' if different else 'the same'}: {format_count(different, 'difference')}, "
        f"{format_count(found.compared, 'tensor')} compared",
        file=sys.stderr,
    )
    for note in found.notes:
        print(escape_controls(note), file=sys.stderr)
    if as_json:
        write(output, json.dumps([dataclasses.asdict(each) for each in found.differences], indent=1) + "\n")
    else:
        write(output, "".join(f"{escape_controls(str(difference))}\n" for difference in found.differences))
    raise SystemExit(EXIT_BAD_VERDICT if found.differences else EXIT_OK)


def convert(
    *,
    source: Annotated[pathlib.Path, typer.Argument(help="A checkpoint of any format.")],
    target: Annotated[pathlib.Path, typer.Argument(help="A new directory.")],
    to: Annotated[
        ConversionTarget,
        typer.Option(
            help="hf: safetensors files that transformers and vLLM read. dcp: torch.distributed.checkpoint with the "
            "keys model and optim. torch: whole tensors in files of torch.save. fsdp1, fsdp2: a file of each rank."
        ),
    ],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing directory.")] = False,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="DTYPE", help="Cast the model's floating-point tensors to this dtype, with torch."),
    ] = None,
    world_size: Annotated[
        int | None,
        typer.Option(min=1, help="Number of ranks that will read the checkpoint.  [default: as many as wrote it]"),
    ] = None,
    no_optimizer: Annotated[bool, typer.Option("--no-optimizer", help="Leave the optimizer out.")] = False,
    buffer: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Name of a tensor that FSDP does not divide, or the last part of the name."),
    ] = None,
    mesh_device: Annotated[str, typer.Option(help="Device type of FSDP2's mesh.")] = "cuda",
    largest_file: Annotated[
        int, typer.Option(metavar="BYTES", help="Largest size of a file, with --to hf.")
    ] = 5_000_000_000,
    config: Annotated[str | None, _CONFIG] = None,
    part: Annotated[str | None, _PART] = None,
    keep_names: Annotated[bool, _KEEP_NAMES] = False,
) -> None:
    """Write the model and the optimizer of a checkpoint in another format, bit by bit, without running a pickle.

    The checkpoint is verified while it is read, and the result is verified after it was written. The new directory gets
    its name only at the end.
    """
    from fsdp_doctor.checkpoints.conversion import ConversionError, convert as convert_checkpoint
    from fsdp_doctor.checkpoints.verification import EXIT_CODES

    _parse_dtype(dtype)
    try:
        found = convert_checkpoint(
            source,
            target,
            to,
            overwrite=overwrite,
            dtype=dtype,
            world_size=world_size,
            with_optimizer=not no_optimizer,
            device=mesh_device,
            buffers=buffer or (),
            largest_file=largest_file,
            config=config,
            part=part,
            find_parts=None
            if keep_names
            else lambda place: _ask_in_process(_ask_for_parts, place, config is not None, to is ConversionTarget.HF),
            find_order=lambda config: _ask_in_process(_ask_for_order, config),
            progress=_choose_progress(),
        )
    except ConversionError as error:
        raise UsageError(escape_controls(str(error))) from None
    except OSError as error:
        raise UsageError(escape_controls(f"{error.filename or target}: {error.strerror or error}")) from None
    if not found.files:
        _print_text(found.verification.to_text())
        print(f"nothing was written to {target}", file=sys.stderr)
        raise SystemExit(EXIT_CODES[found.verification.answer])
    if to is ConversionTarget.HF and found.is_adapter:
        print(
            "the model is only an adapter, which is not merged: for peft, name the file adapter_model.safetensors, and "
            "put the job's adapter_config.json beside it",
            file=sys.stderr,
        )
    elif to is ConversionTarget.HF and not (target / "config.json").is_file():
        print(
            "there is no config.json: from_pretrained cannot read the checkpoint without it; repeat the command with "
            "--overwrite and --config DIR, where DIR is a directory that has the model's config.json",
            file=sys.stderr,
        )
    what = "the model and the optimizer" if found.has_optimizer else "the model"
    size = f"{found.num_bytes} bytes in {format_count(len(found.files), 'file')}"
    print(f"written: {what} to {target} ({size})", file=sys.stderr)
    for name, count in found.left_out.items():
        what = f"left out: {name or 'other tensors'} ({format_count(count, 'tensor')})"
        print(escape_controls(what), file=sys.stderr)
    for old, new in found.names[:_MOST_NAMES]:
        print(escape_controls(f"{old} is {new}"), file=sys.stderr)
    if len(found.names) > _MOST_NAMES:
        print(f"and {len(found.names) - _MOST_NAMES} more names", file=sys.stderr)
    raise SystemExit(EXIT_OK)


def _ask_in_process(ask: Callable[..., _Answer], *arguments: Any) -> _Answer:
    """Returns the result of ``ask``, called in a separate process, so that this process does not import
    transformers.
    """
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(ask, *arguments).result()


def _ask_for_parts(config: str, must_know: bool, needs_class: bool = False) -> Mapping[str, HubPart]:
    """Maps each name of a Hub checkpoint to a part of a tensor of the model; empty if the parts are not known.

    Raises UsageError if the parts are needed but not known.

    must_know: whether the parts are needed in any case.
    needs_class: whether the parts are needed if the configuration does not name a class of transformers.
    """
    with _mute_warnings():
        from fsdp_doctor.weights.names import HubNamesUnknown, ModelClassUnknown, NamesError, read_hub_parts

    try:
        with _mute_warnings():
            return read_hub_parts(config)
    except NamesError as error:
        is_needed = must_know or (needs_class and isinstance(error, ModelClassUnknown))
        if is_needed or not isinstance(error, HubNamesUnknown):
            raise UsageError(escape_controls(f"{error}; --keep-names keeps the names as they are")) from None
        print(escape_controls(f"the names stay as they were saved: {error}"), file=sys.stderr)
        return {}


def _ask_for_order(config: str) -> ParameterOrder | None:
    with _mute_warnings():
        from fsdp_doctor.weights.names import NamesError, read_parameter_order

    print("the optimizer numbers its parameters: asking transformers' class for their order", file=sys.stderr)
    try:
        with _mute_warnings():
            return read_parameter_order(config)
    except NamesError as error:
        print(escape_controls(f"the order of the optimizer's parameters is not known: {error}"), file=sys.stderr)
        return None


@contextlib.contextmanager
def _mute_warnings() -> Iterator[None]:
    """Drops warnings in logs, which packages write while transformers imports them."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def fingerprint(
    *,
    checkpoint: Annotated[pathlib.Path, typer.Argument(help="A checkpoint of any format.")],
    dtype: Annotated[str | None, _DTYPE] = None,
    part: Annotated[str | None, _PART] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    output: Annotated[pathlib.Path | None, declare_output_file(help="Write there, not to stdout.")] = None,
) -> None:
    """Print 128 bits for each tensor of the model in a checkpoint, to compare it later, or with a model in training."""
    _check_output(output, checkpoint)
    from fsdp_doctor.weights.fingerprints.checkpoint_files import read_fingerprints

    cast_to = _parse_dtype(dtype)
    with _raise_usage_errors(checkpoint):
        write(output, _render_list(read_fingerprints(checkpoint, cast_to, part), as_json))
    raise SystemExit(EXIT_OK)


def _check_output(output: pathlib.Path | None, *inputs: pathlib.Path) -> None:
    for file in inputs:
        if output is not None and output.resolve() == file.resolve():
            raise UsageError(f"--output names the checkpoint {file}; give another file")


@contextlib.contextmanager
def _raise_usage_errors(path: pathlib.Path) -> Iterator[None]:
    """Raises UsageError for a path that is not a checkpoint or cannot be read."""
    from fsdp_doctor.weights.fingerprints import FingerprintError

    try:
        yield
    except FingerprintError as error:
        raise UsageError(escape_controls(str(error))) from None
    except OSError as error:
        raise UsageError(escape_controls(f"cannot read {error.filename or path}: {error.strerror or error}")) from None


def _parse_dtype(name: str | None) -> torch.dtype | None:
    """Returns the dtype of that name. Raises UsageError if torch has no floating-point dtype of that name."""
    if name is None:
        return None
    import torch

    from fsdp_doctor.weights.fsdp.dtypes import find_meant_dtype

    dtype = getattr(torch, name, None)
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
        names = [str(dtype).removeprefix("torch.") for dtype in dtypes if dtype.is_floating_point]
        meant = str(find_meant_dtype(name)).removeprefix("torch.")
        near = [meant] if meant in names else difflib.get_close_matches(name.lower(), names, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; the dtypes are {', '.join(sorted(names))}"
        raise UsageError(f"--dtype {name}: torch has no floating-point dtype of that name{hint}")
    return dtype


def _render_list(fingerprints: Fingerprints, as_json: bool) -> str:
    if as_json:
        return fingerprints.to_json() + "\n"
    return "".join(
        f"{tensor.hex}  {tensor.dtype:<9} {'x'.join(map(str, tensor.shape)) or 'scalar':<16} {escape_controls(name)}\n"
        for name, tensor in fingerprints.tensors.items()
    )
