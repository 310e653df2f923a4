"""The commands. The one module that prints errors and exits; torch is imported only by what runs."""

from __future__ import annotations

import json
import os
import pathlib
import re
import sys
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fsdp_doctor import __version__, launch
from fsdp_doctor.cases import AXES, AXIS
from fsdp_doctor.errors import CannotRun, DoctorFault, FsdpDoctorError, UsageError
from fsdp_doctor.paths import PATHS
from fsdp_doctor.selection import Selection, select

if TYPE_CHECKING:
    from fsdp_doctor.run import Options

app = typer.Typer(
    name="fsdp-doctor",
    help="Which FSDP offload and weight-extraction combinations work here, which crash, hang or lie.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
_EXIT_CODES = (
    "Exit codes: 0 nothing bad; 1 a bad verdict, or one that --expect does not have; 2 usage; "
    "3 cannot run here; 4 the doctor's own fault; 130 interrupted."
)
_SELECT, _RUN, _OUT = "Selection", "Run", "Output"


def _axis(name: str) -> Any:
    return typer.Option(
        f"--{name}",
        help=f"{', '.join(AXIS[name].values)}. Several: repeat, or commas.",
        rich_help_panel=_SELECT,
    )


Strings = list[str]
Strategy = Annotated[Strings | None, _axis("strategy")]
Offload = Annotated[Strings | None, _axis("offload")]
Staging = Annotated[Strings | None, _axis("staging")]
Dims = Annotated[Strings | None, _axis("dims")]
Phase = Annotated[Strings | None, _axis("phase")]
Backend = Annotated[Strings | None, _axis("backend")]
Sharding = Annotated[Strings | None, _axis("sharding")]
Pinning = Annotated[Strings | None, _axis("pinning")]
Transfer = Annotated[Strings | None, _axis("transfer")]
Model = Annotated[
    Strings | None,
    typer.Option(
        "--model",
        help=f"{', '.join(v for v in AXIS['model'].values if v != 'custom')}; "
        "or the directory of a Hugging Face configuration or checkpoint.",
        rich_help_panel=_SELECT,
    ),
]
PathOption = Annotated[
    Strings | None,
    typer.Option(
        "--path",
        help="A path by name (`fsdp-doctor list --paths`): only the named ones. "
        "module:function adds an extraction function of your own.",
        rich_help_panel=_SELECT,
    ),
]
CaseOption = Annotated[
    Strings | None,
    typer.Option("--case", metavar="ID", help="One case by its id. Repeatable.", rich_help_panel=_SELECT),
]
Expression = Annotated[
    str,
    typer.Option("-k", metavar="EXPR", help="Words in case ids, joined by and, or, not.", rich_help_panel=_SELECT),
]
Full = Annotated[bool, typer.Option("--full", help="Every axis, not only the default matrix.", rich_help_panel=_SELECT)]
Fix = Annotated[
    bool,
    typer.Option("--fix", help="Run full_tensors beside the paths of each scenario.", rich_help_panel=_SELECT),
]
LastFailed = Annotated[
    pathlib.Path | None,
    typer.Option(
        "--last-failed",
        metavar="REPORT",
        help="The bad cases of an earlier JSON report.",
        rich_help_panel=_SELECT,
    ),
]


@app.command(epilog=_EXIT_CODES)
def probe(
    strategy: Strategy = None,
    offload: Offload = None,
    staging: Staging = None,
    model: Model = None,
    dims: Dims = None,
    phase: Phase = None,
    backend: Backend = None,
    sharding: Sharding = None,
    pinning: Pinning = None,
    transfer: Transfer = None,
    path: PathOption = None,
    case: CaseOption = None,
    expression: Expression = "",
    full: Full = False,
    fix: Fix = False,
    last_failed: LastFailed = None,
    device: Annotated[str, typer.Option(help="auto, cuda, xpu or cpu.", rich_help_panel=_RUN)] = "auto",
    nproc: Annotated[
        int | None,
        typer.Option(help="Ranks to start where torchrun did not. Default: one per accelerator, 2 without."),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for one case.")] = 60.0,
    start_timeout: Annotated[float, typer.Option(help="Seconds for starting the workers.")] = 300.0,
    grace: Annotated[float, typer.Option(help="Seconds for the other ranks once one is in trouble.")] = 5.0,
    host_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Host memory that one worker may hold, as 8GiB.")
    ] = None,
    confirm: Annotated[bool, typer.Option("--confirm", help="Run each bad case again in fresh workers.")] = False,
    format: Annotated[
        str,
        typer.Option(help="On stdout: auto (table on a terminal, else lines), table, lines, json, markdown, junit."),
    ] = "auto",
    json_file: Annotated[pathlib.Path | None, typer.Option("--json", metavar="FILE", help="The whole report.")] = None,
    markdown: Annotated[pathlib.Path | None, typer.Option(metavar="FILE", help="For a GitHub issue.")] = None,
    junit: Annotated[pathlib.Path | None, typer.Option(metavar="FILE", help="JUnit XML.")] = None,
    svg: Annotated[pathlib.Path | None, typer.Option(metavar="FILE", help="A picture of the matrix.")] = None,
    expect: Annotated[
        pathlib.Path | None,
        typer.Option(metavar="REPORT", help="Verdicts that are expected; others are exit code 1."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the partial report of --json.")] = False,
    host_name: Annotated[bool, typer.Option("--host-name", help="Put this machine's name into the report.")] = False,
) -> None:
    """Run the matrix under torchrun, or start torchrun on this node."""
    from fsdp_doctor.report.journal import read_report
    from fsdp_doctor.run import Options

    _check_torch()
    builtin, directory = _models(model)
    asked = _asked(
        strategy=strategy, offload=offload, staging=staging, model=builtin, dims=dims, phase=phase,
        backend=backend, sharding=sharding, pinning=pinning, transfer=transfer,
    )  # fmt: skip
    cases = _cases(asked, directory, path, case, expression, full, fix, last_failed)
    outputs = {
        name: file
        for name, file in (("json", json_file), ("markdown", markdown), ("junit", junit), ("svg", svg))
        if file is not None
    }
    if resume and json_file is None:
        raise UsageError("--resume goes on with the report that --json names; give --json FILE")
    options = Options(
        cases=tuple(cases),
        device=_device(device),
        model=directory,
        timeout=_positive("--timeout", timeout),
        start_timeout=_positive("--start-timeout", start_timeout),
        grace=_positive("--grace", grace),
        host_memory=_size(host_memory) if host_memory is not None else None,
        confirm=confirm,
        format=_format(format),
        outputs=outputs,
        expect=read_report(expect) if expect else None,
        resume_from=read_report(json_file) if resume and json_file and json_file.exists() else None,
        host_name=host_name,
    )
    if launch.is_rank_zero():
        for file in outputs.values():
            _check_writable(file)
    if launch.under_torchrun():
        raise SystemExit(_supervise(options))
    if nproc is not None and nproc < 1:
        raise UsageError(f"--nproc must be at least 1, not {nproc}")
    raise SystemExit(launch.start_torchrun(sys.argv[1:], nproc or launch.num_ranks(options.device)))


@app.command("list")
def list_(
    strategy: Strategy = None,
    offload: Offload = None,
    staging: Staging = None,
    model: Model = None,
    dims: Dims = None,
    phase: Phase = None,
    backend: Backend = None,
    sharding: Sharding = None,
    pinning: Pinning = None,
    transfer: Transfer = None,
    path: PathOption = None,
    case: CaseOption = None,
    expression: Expression = "",
    full: Full = False,
    fix: Fix = False,
    last_failed: LastFailed = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    paths: Annotated[
        bool, typer.Option("--paths", help="The extraction paths and what they promise, not the cases.")
    ] = False,
    axes: Annotated[bool, typer.Option("--axes", help="The axes and their values, not the cases.")] = False,
) -> None:
    """Print the selected cases, without running or importing anything."""
    if paths:
        _print_paths(as_json)
        return
    if axes:
        _print_axes(as_json)
        return
    builtin, directory = _models(model)
    asked = _asked(
        strategy=strategy, offload=offload, staging=staging, model=builtin, dims=dims, phase=phase,
        backend=backend, sharding=sharding, pinning=pinning, transfer=transfer,
    )  # fmt: skip
    cases = _cases(asked, directory, path, case, expression, full, fix, last_failed)
    if as_json:
        rows = [
            {"id": one.id, "path": one.path, **{axis.name: getattr(one.scenario, axis.name) for axis in AXES}}
            for one in cases
        ]
        print(json.dumps(rows, indent=1))
        return
    for one in cases:
        print(one.id)
    print(f"{len(cases)} cases in {len({one.scenario for one in cases})} scenarios", file=sys.stderr)


@app.command()
def report(
    file: Annotated[pathlib.Path, typer.Argument(help="A JSON report, complete or partial.")],
    format: Annotated[str, typer.Option(help="table, lines, json, markdown, junit or svg.")] = "auto",
    output: Annotated[
        pathlib.Path | None, typer.Option("--output", "-o", metavar="FILE", help="Instead of stdout.")
    ] = None,
) -> None:
    """Make any format again from a JSON report."""
    import shutil

    from fsdp_doctor.report import formats
    from fsdp_doctor.report.journal import read_report
    from fsdp_doctor.report.layout import summary

    name = _format(format)
    found = read_report(file)
    tty = output is None and sys.stdout.isatty()
    text = formats.render(
        found,
        name if name != "auto" else "table",
        width=shutil.get_terminal_size((132, 24)).columns,
        color=tty and "NO_COLOR" not in os.environ,
    )
    if output is not None:
        _check_writable(output)
        output.write_text(text)
    else:
        sys.stdout.write(text)
    print(summary(found), file=sys.stderr)


@app.command()
def env(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    host_name: Annotated[bool, typer.Option("--host-name", help="With this machine's name.")] = False,
) -> None:
    """Print the environment block of a report alone; works where torch cannot be imported."""
    from fsdp_doctor.environment import collect, lines_of

    facts = collect(host_name)
    print(json.dumps(facts, indent=1) if as_json else "\n".join(lines_of(facts)))


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Which FSDP offload and weight-extraction combinations work here, which crash, hang or lie."""
    if show:
        print(f"fsdp-doctor {__version__}")
        raise typer.Exit


def main() -> None:
    """The entry point. Under torchrun every rank comes here, and rank 0 speaks for all of them."""
    try:
        _usage_errors_once(app)
    except FsdpDoctorError as error:
        if not launch.is_rank_zero() and isinstance(error, CannotRun):
            # Most likely rank 0 says the same. If it does, torchrun ends this process meanwhile.
            time.sleep(2)
        print(f"fsdp-doctor: {error}", file=sys.stderr)
        launch.tell_torchrun(str(error))
        raise SystemExit(error.exit_code) from None
    except Exception as error:
        traceback.print_exc()
        sentence = f"its own fault, {type(error).__name__}: {error}; please report the traceback above"
        print(f"fsdp-doctor: {sentence}", file=sys.stderr)
        launch.tell_torchrun(sentence)
        raise SystemExit(DoctorFault.exit_code) from None


def _usage_errors_once(command: Callable[[], None]) -> None:
    """Each rank reads the same command line: only rank 0 complains of it, the others just end."""
    if launch.is_rank_zero():
        command()
        return
    with open(os.devnull, "w") as nowhere:
        sys.stderr = nowhere
        try:
            command()
        except UsageError:
            raise SystemExit(0) from None
        except SystemExit as request:
            # typer's own complaints end in SystemExit(2); what ran under _supervise() has its code.
            raise SystemExit(0 if sys.stderr is nowhere else request.code) from None
        finally:
            sys.stderr = sys.__stderr__


def _supervise(options: Options) -> int:
    """From here on this rank speaks for itself."""
    from fsdp_doctor.run import on_this_rank

    sys.stderr = sys.__stderr__
    code = on_this_rank(options)
    if code:
        launch.tell_torchrun(f"exit code {code}: a verdict is bad, or not the expected one")
    return code


def _asked(**axes: Strings | None) -> dict[str, tuple[str, ...]]:
    return {name: tuple(_split(values)) for name, values in axes.items() if values}


def _split(values: Strings) -> Strings:
    return [part.strip() for value in values for part in value.split(",") if part.strip()]


def _models(values: Strings | None) -> tuple[Strings | None, pathlib.Path | None]:
    """Separates built-in models from a directory. Raises UsageError for neither."""
    builtin, directories = [], []
    for value in _split(values or []):
        if value in AXIS["model"].values and value != "custom":
            builtin.append(value)
        else:
            directories.append(_model_directory(value))
    if len(directories) > 1:
        raise UsageError("--model takes one directory")
    if not directories:
        return builtin or None, None
    return [*builtin, "custom"], directories[0]


def _model_directory(value: str) -> pathlib.Path:
    directory = pathlib.Path(value).expanduser()
    known = ", ".join(name for name in AXIS["model"].values if name != "custom")
    if not directory.is_dir():
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


def _cases(
    axes: dict[str, tuple[str, ...]],
    directory: pathlib.Path | None,
    paths: Strings | None,
    case_ids: Strings | None,
    expression: str,
    full: bool,
    fix: bool,
    last_failed: pathlib.Path | None,
) -> list[Any]:
    ids = list(case_ids or [])
    if last_failed is not None:
        from fsdp_doctor.report.journal import read_report

        ids += [result.id for result in read_report(last_failed).bad]
        if not ids:
            raise UsageError(f"--last-failed: {last_failed} has no bad case")
    return select(
        Selection(
            axes=axes,
            case_ids=tuple(ids),
            paths=tuple(_split(paths or [])),
            expression=expression,
            full=full,
            fix=fix,
            custom_model=directory is not None,
        )
    )


def _device(value: str) -> str:
    if value not in ("auto", "cuda", "xpu", "cpu"):
        raise UsageError(f"--device {value}: use auto, cuda, xpu or cpu")
    return value


def _format(value: str) -> str:
    from fsdp_doctor.report.formats import FORMATS

    if value != "auto" and value not in FORMATS:
        raise UsageError(f"--format {value}: use {', '.join(FORMATS)}")
    return value


def _positive(option: str, value: float) -> float:
    if value <= 0:
        raise UsageError(f"{option} must be more than 0 seconds, not {value:g}")
    return value


def _size(text: str) -> int:
    """Bytes of a size like 512MiB, 8GiB or 1000000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", text, re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"--host-memory {text}: not a size; use one like 8GiB")
    unit = (match[2] or "").lower()
    step = 1024 if unit.endswith("i") else 1000
    return int(float(match[1]) * step ** (" kmgt".index(unit[0]) if unit else 0))


def _check_writable(file: pathlib.Path) -> None:
    """Before the run, not after it."""
    existed = file.exists()
    try:
        with open(file, "a"):
            pass
        if not existed:
            file.unlink()
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror or error}") from None


def _check_torch() -> None:
    """Without importing it: the version that is installed, against the oldest that works."""
    import importlib.metadata

    for package, oldest in (("torch", (2, 6)), ("transformers", (4, 56))):
        wanted = ".".join(str(part) for part in oldest)
        try:
            installed = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise CannotRun(f"{package} is not installed here; install {package} {wanted} or newer") from None
        numbers = tuple(int(number) for number in re.findall(r"\d+", installed)[:2])
        if numbers < oldest:
            raise CannotRun(f"{package} {installed} is too old; fsdp-doctor needs {package} {wanted} or newer")


def _print_paths(as_json: bool) -> None:
    if as_json:
        import dataclasses

        print(json.dumps([dataclasses.asdict(path) for path in PATHS], indent=1))
        return
    for path in PATHS:
        c = path.contract
        versions = "+".join(f"fsdp{version}" for version in path.fsdp)
        print(f"{path.name}  [{versions}]\n    {path.summary}")
        print(f"    promises: {c.form}, device {c.device}, dtype {c.dtype}, ranks {c.ranks}, keys {c.keys}")
        if path.used_by:
            print(f"    used by: {path.used_by}")


def _print_axes(as_json: bool) -> None:
    if as_json:
        print(json.dumps({axis.name: axis.values for axis in AXES}, indent=1))
        return
    for axis in AXES:
        print(f"{axis.name}  (default {axis.default})")
        for value, meaning in axis.values.items():
            print(f"    {value:<24}{meaning}")
