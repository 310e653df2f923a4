"""Declares and reads options: groups of options, choices, sizes, files to write, models, ranks."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os
import pathlib
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NoReturn

import typer
from typing_extensions import get_type_hints

from fsdp_doctor.cli.output import check_writable
from fsdp_doctor.errors import UsageError
from fsdp_doctor.machine import devices, launch, versions
from fsdp_doctor.machine.devices import RunDevice
from fsdp_doctor.matrix.axes import describe_nearest
from fsdp_doctor.matrix.model_shapes import MODEL_SHAPES

if TYPE_CHECKING:
    from fsdp_doctor.probe.baseline import Baseline

VERBOSE: Any = typer.Option(
    "--verbose", "-v", help="In the table: show every failure, also known ones, with its stack, remedy and commands."
)
_NEEDED = {"torch": "2.6", "transformers": "4.56"}
_OUTPUTS = "fsdp_doctor.outputs"


def flatten(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces each parameter of ``command`` that is a dataclass by the fields, of which typer makes options.

    A field's annotation is ``Annotated[type, typer.Option(...)]``. ``PANEL`` of the dataclass names the panel of the
    help that lists its options.
    """
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        if not dataclasses.is_dataclass(hints[name]):
            parameters.append(parameter.replace(annotation=hints[name]))
            continue
        group = groups[name] = hints[name]
        types = get_type_hints(group, include_extras=True)
        for field in dataclasses.fields(group):
            types[field.name].__metadata__[0].rich_help_panel = group.PANEL
            parameters.append(parameter.replace(name=field.name, annotation=types[field.name], default=field.default))

    @functools.wraps(command)
    def call(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
        command(**values)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def split(values: Iterable[str] | None) -> list[str]:
    """Splits the values of a repeatable option at commas, and returns each word once."""
    words = (part.strip() for value in values or () for part in value.split(","))
    return list(dict.fromkeys(filter(None, words)))


def declare_words(*names: str, help: str, metavar: str | None = None) -> Any:
    """Declares an option with any words. The option can be repeated, or take several words separated by commas."""
    return typer.Option(*names, help=help, metavar=metavar, callback=split)


def declare_choice(known: Iterable[str], *names: str, help: str = "", default: str = "") -> Any:
    """Declares an option whose value is one of ``known``.

    An option whose type is a list can be repeated, or take several values separated by commas.

    known: the values, or a mapping from each value to its meaning.
    default: the default of a list, as it is written on the command line.
    """
    words = list(known)

    def check(option: typer.CallbackParam, value: Any) -> Any:
        several = getattr(option, "multiple", False)
        chosen = split(value or [default]) if several else [value] if value is not None else []
        for word in chosen:
            if word not in words:
                raise typer.BadParameter(f"{word!r} is not one of {', '.join(words)}{describe_nearest(word, words)}")
        return chosen if several else value

    def complete() -> list[Any]:
        return list(known.items()) if isinstance(known, Mapping) else words

    text = " ".join(filter(None, [help, f"{', '.join(words)}."]))
    shown = f"{text}  [default: {default}]" if default else text
    return typer.Option(*names, help=shown, callback=check, autocompletion=complete)


def declare_size(*names: str, help: str, show_default: str | bool = True) -> Any:
    """Declares an option whose value is a number of bytes, written as 512MiB, 8GiB or 1000000."""
    return typer.Option(*names, help=help, metavar="SIZE", parser=parse_bytes, show_default=show_default)


def parse_bytes(text: str, option: str | None = None) -> int:
    """Reads a number of bytes. Raises typer.BadParameter if the text is not a size.

    option: the option that the error names; None for the option that is being read.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", str(text), re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise typer.BadParameter(f"{text!r} is not a size; use one like 8GiB", param_hint=option)
    unit = (match[2] or "").lower()
    step = 1024 if unit.endswith("i") else 1000
    return int(float(match[1]) * step ** (" kmgt".index(unit[0]) if unit else 0))


def declare_output_file(*names: str, help: str, metavar: str = "FILE") -> Any:
    """Declares an option for a file to write. The file is refused if it is not writable or another option names it."""
    return typer.Option(*names, help=help, metavar=metavar, callback=_check_output)


def _check_output(
    context: typer.Context, option: typer.CallbackParam, file: pathlib.Path | None
) -> pathlib.Path | None:
    if file is None or context.resilient_parsing or not launch.is_rank_zero():
        return file
    outputs = context.meta.setdefault(_OUTPUTS, {})
    other = outputs.setdefault(file.resolve(), option.opts[0])
    if other != option.opts[0]:
        raise typer.BadParameter(f"{other} names the same file")
    check_writable(file)
    return file


def declare_model_shape(*, help: str = "") -> Any:
    """Declares an option for a model without weights: a built-in shape, or the directory of a configuration."""

    def check(value: str | None) -> str | None:
        if value is None or value in MODEL_SHAPES:
            return value
        return str(find_model_directory(value, MODEL_SHAPES))

    text = f"{', '.join(MODEL_SHAPES)}; or the directory of a Hugging Face configuration.{help}"
    return typer.Option(help=text, callback=check, autocompletion=lambda: list(MODEL_SHAPES))


def find_model_directory(value: str, built_in: Collection[str]) -> pathlib.Path:
    """Returns the path of a directory with a Hugging Face configuration. Raises UsageError for any other directory."""
    directory = pathlib.Path(os.path.expanduser(value))
    # pathlib's is_dir raises for a name that is too long.
    if not value.strip() or not os.path.isdir(directory):
        hint = ""
        if re.fullmatch(r"[\w.-]+/[\w.-]+", value):
            hint = f"; of a model of the Hub: `hf download {value} config.json --local-dir DIR`, then --model DIR"
        raise UsageError(f"--model {value}: neither a built-in model ({', '.join(built_in)}) nor a directory{hint}")
    try:
        data = json.loads((directory / "config.json").read_text())
    except FileNotFoundError:
        raise UsageError(f"--model {value}: the directory has no config.json") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"--model {value}: cannot read config.json: {error}") from None
    if not isinstance(data, dict) or "model_type" not in data:
        raise UsageError(f"--model {value}: config.json has no model_type, so it is not a Hugging Face configuration")
    return directory.resolve()


def read_expectation(value: str | None, *, strict: bool = False) -> Baseline:
    """Reads the expected verdicts that ``--expect`` names: the catalogue (default), a file of expectations, or a
    report.

    With ``strict``, nothing bad is expected. Raises UsageError for ``strict`` together with a value.
    """
    from fsdp_doctor.report.expected_failures import read_expected_failures
    from fsdp_doctor.report.journal import read_report

    if strict and value is not None:
        raise UsageError("--strict expects that nothing is bad, and --expect something else; give one of them")
    if strict:
        return "nothing bad"
    if value is None or value == "known":
        return "known"
    file = pathlib.Path(value)
    return read_expected_failures(file) if file.suffix == ".toml" else read_report(file)


def declare_report_format(*beside: str, help: str = "") -> Any:
    """Declares an option for a format of reports.

    beside: words that the option accepts in addition to the formats.
    """
    from fsdp_doctor.report.formats import FORMATS

    return declare_choice((*beside, *FORMATS), help=help)


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    PANEL: ClassVar[str] = "Ranks and devices"

    device: Annotated[
        str, declare_choice(devices.NAMES, help="auto is the accelerator that torch sees, or else emulated. One of")
    ] = "auto"
    nproc: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of ranks to start when not run under torchrun.  "
            "[default: one per accelerator, or 2 without one]",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(RankOptions):
    device_memory: Annotated[int | None, declare_size(help="Memory that each device has, for example 2GiB.")] = None
    no_late_completion: Annotated[
        bool,
        typer.Option("--no-late-completion", help="Let non-blocking copies of the emulated device finish immediately."),
    ] = False

    @property
    def run_device(self) -> RunDevice:
        return RunDevice(type=self.device, memory=self.device_memory, late_completion=not self.no_late_completion)


def check_versions() -> None:
    """Raises CannotRun if torch or transformers is missing or too old, without importing them."""
    for package, oldest in _NEEDED.items():
        versions.require(package, oldest)


def start_ranks(
    ranks: RankOptions, arguments: Sequence[str] | None = None, *, jobs: int | None = 1, num_cases: int = 0
) -> NoReturn:
    """Runs this program again on several ranks of this node, and exits with the exit code of rank 0.

    arguments: the arguments of the program; None for the arguments of this command line.
    jobs: the number of groups of ranks that run at the same time; None for as many as fit on this machine.
    num_cases: the number of cases that the groups share; needed if ``jobs`` is None.
    """
    # Before torch is imported, which reads it: several ranks share the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from fsdp_doctor.probe import worker

    worker.import_what_cases_need()
    nproc = ranks.nproc or launch.choose_num_ranks(ranks.device)
    num_groups = launch.choose_num_groups(ranks.device, nproc, num_cases) if jobs is None else jobs
    raise SystemExit(launch.start_ranks(sys.argv[1:] if arguments is None else arguments, nproc, num_groups))
