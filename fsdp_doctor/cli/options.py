"""What the command line says, read into values; what it cannot mean is refused in one sentence."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import pathlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer

from fsdp_doctor.bench import request as bench
from fsdp_doctor.errors import UsageError
from fsdp_doctor.machine import devices, launch
from fsdp_doctor.machine.devices import RunDevice
from fsdp_doctor.matrix.axes import AXIS
from fsdp_doctor.matrix.cases import Case
from fsdp_doctor.matrix.paths import is_user_path
from fsdp_doctor.matrix.selection import Selection, select
from fsdp_doctor.probe.baseline import Baseline
from fsdp_doctor.report.formats import FORMATS, Format
from fsdp_doctor.report.journal import journal_of, read_report

_PANEL = "Selection"
_BUILT_IN_MODELS = tuple(name for name in AXIS["model"].values if name != "custom")


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The selected cases, and the directory of a model of the user's own."""

    cases: tuple[Case, ...]
    model: pathlib.Path | None


def _option(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=_PANEL, **more)


def _axis(name: str) -> Any:
    return Annotated[list[str] | None, _option(f"--{name}", help=f"{', '.join(AXIS[name].values)}.")]


# One row for each option that selects cases: its type, with the text of its help, and its default.
_SELECTING: dict[str, tuple[Any, Any]] = {
    **{
        name: (_axis(name), None)
        for name in ("strategy", "offload", "staging", "dims", "phase", "backend", "sharding", "pinning", "transfer")
    },
    "model": (
        Annotated[
            list[str] | None,
            _option("--model", help=f"{', '.join(_BUILT_IN_MODELS)}; or a Hugging Face configuration's directory."),
        ],
        None,
    ),
    "path": (
        Annotated[
            list[str] | None,
            _option(
                "--path",
                help="Only this path, of `fsdp-doctor list --paths`; module:function adds a function of your own.",
            ),
        ],
        None,
    ),
    "case": (Annotated[list[str] | None, _option("--case", metavar="ID", help="One case by its id.")], None),
    "expression": (
        Annotated[str, _option("-k", metavar="EXPR", help="Words in case ids, joined by and, or, not.")],
        "",
    ),
    "full": (Annotated[bool, _option("--full", help="Every axis, not only the default matrix.")], False),
    "fix": (Annotated[bool, _option("--fix", help="Run full_tensors beside the paths of each scenario.")], False),
    "last_failed": (
        Annotated[
            pathlib.Path | None,
            _option("--last-failed", metavar="REPORT", help="The bad cases of an earlier JSON report."),
        ],
        None,
    ),
}


def selecting(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options that select cases; it is called with what they chose as ``choose``.

    ``choose`` is a function, so that a command can do without a selection.
    """
    own = [p for p in inspect.signature(command).parameters.values() if p.name != "choose"]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in _SELECTING.items()
    ]

    @functools.wraps(command)
    def with_selection(**arguments: Any) -> None:
        asked = {name: arguments.pop(name) for name in _SELECTING}
        command(choose=lambda: _choose(**asked), **arguments)

    hints = inspect.get_annotations(command, eval_str=True)
    own = [p.replace(annotation=hints[p.name], kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
    with_selection.__signature__ = inspect.Signature([*added, *own])  # type: ignore[attr-defined]
    with_selection.__annotations__ = {p.name: p.annotation for p in (*added, *own)}
    return with_selection


def _choose(
    *,
    model: list[str] | None,
    path: list[str] | None,
    case: list[str] | None,
    expression: str,
    full: bool,
    fix: bool,
    last_failed: pathlib.Path | None,
    **axes: list[str] | None,
) -> Chosen:
    built_in, directory = _models(_split(model))
    asked = {name: tuple(_split(values)) for name, values in {**axes, "model": built_in}.items() if values}
    selection = Selection(
        axes=asked,
        case_ids=(*(case or ()), *(_bad_cases(last_failed) if last_failed else ())),
        paths=tuple(_split(path)),
        expression=expression,
        full=full,
        fix=fix,
        custom_model=directory is not None,
    )
    return Chosen(cases=tuple(select(selection)), model=directory)


def _split(values: list[str] | None) -> list[str]:
    """An option can be repeated, and each of its values can be several with commas between."""
    return [part.strip() for value in values or () for part in value.split(",") if part.strip()]


def _bad_cases(file: pathlib.Path) -> tuple[str, ...]:
    bad = tuple(result.id for result in read_report(file).bad)
    if not bad:
        raise UsageError(f"--last-failed: {file} has no bad case")
    return bad


def _models(values: list[str]) -> tuple[list[str], pathlib.Path | None]:
    """Separates built-in models from a directory."""
    built_in = [value for value in values if value in _BUILT_IN_MODELS]
    directories = [_model_directory(value) for value in values if value not in _BUILT_IN_MODELS]
    if len(directories) > 1:
        raise UsageError("--model takes one directory")
    if not directories:
        return built_in, None
    return [*built_in, "custom"], directories[0]


def _model_directory(value: str, built_in: tuple[str, ...] = _BUILT_IN_MODELS) -> pathlib.Path:
    directory = pathlib.Path(value).expanduser()
    if not directory.is_dir():
        known = ", ".join(built_in)
        raise UsageError(f"--model {value}: neither a built-in model ({known}) nor a directory")
    config = directory / "config.json"
    if not config.is_file():
        raise UsageError(f"--model {value}: the directory has no config.json")
    try:
        data = json.loads(config.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"--model {value}: config.json cannot be read: {error}") from None
    if not isinstance(data, dict) or "model_type" not in data:
        raise UsageError(f"--model {value}: config.json names no model_type, so it is no Hugging Face configuration")
    return directory.resolve()


def benchmark(
    *,
    model: str,
    layers: int | None,
    strategy: list[str] | None,
    offload: list[str] | None,
    dtype: list[str] | None,
    bucket_bytes: str | None,
    path: list[str] | None,
    repeat: int,
    device: str,
    json_file: pathlib.Path | None,
) -> bench.BenchOptions:
    if device not in devices.NAMES:
        raise UsageError(f"--device {device}: use {', '.join(devices.NAMES)}")
    if json_file is not None and launch.is_rank_zero():
        check_writable(json_file)
    return bench.BenchOptions(
        model=model,
        directory=None if model in bench.SHAPES else _model_directory(model, tuple(bench.SHAPES)),
        layers=None if layers is None else int(positive("--layers", layers)),
        strategies=_words("--strategy", strategy, bench.STRATEGIES, "fsdp2"),
        offloads=_words("--offload", offload, tuple(bench.OFFLOADS), "none"),
        dtypes=_words("--dtype", dtype, bench.DTYPES, "bf16"),
        bucket_bytes=size("--bucket-bytes", bucket_bytes) if bucket_bytes is not None else None,
        paths=_bench_paths(_split(path)),
        repeat=int(positive("--repeat", repeat)),
        device=device,
        json_file=json_file,
    )


def _bench_paths(names: list[str]) -> tuple[str, ...]:
    known = list(dict.fromkeys(name for of_strategy in bench.PATHS.values() for name in of_strategy))
    for name in names:
        if not is_user_path(name) and name not in known:
            raise UsageError(f"there is no path {name!r}; use {', '.join(known)}, or module:function of your own")
    return tuple(names)


def _words(option: str, values: list[str] | None, known: tuple[str, ...], default: str) -> tuple[str, ...]:
    chosen = _split(values) or [default]
    for value in chosen:
        if value not in known:
            raise UsageError(f"{option} {value}: use {', '.join(known)}")
    return tuple(dict.fromkeys(chosen))


def device(name: str, memory: str | None, *, late_completion: bool) -> RunDevice:
    if name not in devices.NAMES:
        raise UsageError(f"--device {name}: use {', '.join(devices.NAMES)}")
    limit = size("--device-memory", memory) if memory is not None else None
    return RunDevice(type=name, memory=limit, late_completion=late_completion)


def output_format(value: str) -> Format | Literal["auto"]:
    if value == "auto":
        return "auto"
    for name in FORMATS:
        if name == value:
            return name
    raise UsageError(f"--format {value}: use {', '.join(FORMATS)}")


def baseline(value: str) -> Baseline:
    """What ``--expect`` names: the catalogue, or a report, which is read."""
    return "known" if value == "known" else read_report(pathlib.Path(value))


def positive(option: str, value: float) -> float:
    if value <= 0:
        raise UsageError(f"{option} must be more than 0, not {value:g}")
    return value


def size(option: str, text: str) -> int:
    """Bytes of a size like 512MiB, 8GiB or 1000000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", text, re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"{option} {text}: not a size; use one like 8GiB")
    unit = (match[2] or "").lower()
    step = 1024 if unit.endswith("i") else 1000
    return int(float(match[1]) * step ** (" kmgt".index(unit[0]) if unit else 0))


def check_outputs(outputs: Mapping[Format, pathlib.Path]) -> None:
    """Every file that the run is to write, and that no two are one."""
    if len({file.resolve() for file in outputs.values()}) < len(outputs):
        raise UsageError(f"two of {', '.join(f'--{name}' for name in outputs)} name the same file")
    for file in outputs.values():
        check_writable(file)
    if "json" in outputs:
        check_writable(journal_of(outputs["json"]))


def check_writable(file: pathlib.Path) -> None:
    """Before the run, not after it."""
    existed = file.exists()
    try:
        with open(file, "a"):
            pass
        if not existed:
            file.unlink()
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror or error}") from None


def rows_of(cases: tuple[Case, ...]) -> list[dict[str, str]]:
    """The selection as data, for ``list --json``."""
    return [{"id": case.id, "path": case.path, **dataclasses.asdict(case.scenario)} for case in cases]
