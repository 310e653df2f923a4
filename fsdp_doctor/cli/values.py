"""The values of options: numbers, sizes, words of a closed set, devices, formats, directories of models."""

from __future__ import annotations

import json
import os
import pathlib
import re
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Literal, TypeVar, cast, get_args

from fsdp_doctor.errors import UsageError
from fsdp_doctor.machine import devices
from fsdp_doctor.matrix.contracts import Direction

if TYPE_CHECKING:
    from fsdp_doctor.probe.baseline import Baseline
    from fsdp_doctor.report.formats import Format

_Number = TypeVar("_Number", int, float)


def split(values: Iterable[str] | None) -> list[str]:
    """An option can be repeated, and each of its values can be several, separated by commas."""
    return [part.strip() for value in values or () for part in value.split(",") if part.strip()]


def positive(option: str, value: _Number) -> _Number:
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


def words(option: str, values: list[str] | None, known: Collection[str], default: str) -> tuple[str, ...]:
    """The given values, each once, or the default. Raises UsageError for one that is not known."""
    chosen = split(values) or split([default])
    for value in chosen:
        if value not in known:
            raise UsageError(f"{option}: unknown value {value!r}; use one of {', '.join(known)}")
    return tuple(dict.fromkeys(chosen))


def direction(word: str) -> Direction:
    if word not in get_args(Direction):
        raise UsageError(f"--direction: unknown value {word!r}; use one of {', '.join(get_args(Direction))}")
    return cast(Direction, word)


def device(name: str) -> str:
    if name not in devices.NAMES:
        raise UsageError(f"--device: unknown value {name!r}; use one of {', '.join(devices.NAMES)}")
    return name


def output_format(value: str) -> Format | Literal["auto"]:
    from fsdp_doctor.report.formats import FORMATS

    if value == "auto":
        return "auto"
    for name in FORMATS:
        if name == value:
            return name
    raise UsageError(f"--format: unknown value {value!r}; use one of {', '.join(FORMATS)}")


def baseline(value: str) -> Baseline:
    """What ``--expect`` names: the catalogue, or a TOML file of expectations or a report, which is read."""
    from fsdp_doctor.report.expected_failures import read_expected_failures
    from fsdp_doctor.report.journal import read_report

    if value == "known":
        return "known"
    file = pathlib.Path(value)
    return read_expected_failures(file) if file.suffix == ".toml" else read_report(file)


def model_directory(value: str, built_in: Collection[str]) -> pathlib.Path:
    """The directory of a Hugging Face configuration. Raises UsageError where it does not hold one."""
    directory = pathlib.Path(os.path.expanduser(value))
    # Not the path's own question, which fails for a name that is too long.
    if not os.path.isdir(directory):
        raise UsageError(f"--model {value}: neither a built-in model ({', '.join(built_in)}) nor a directory")
    config = directory / "config.json"
    if not config.is_file():
        raise UsageError(f"--model {value}: the directory has no config.json")
    try:
        data = json.loads(config.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"--model {value}: cannot read config.json: {error}") from None
    if not isinstance(data, dict) or "model_type" not in data:
        raise UsageError(
            f"--model {value}: config.json has no model_type, so it is not a Hugging Face model configuration"
        )
    return directory.resolve()
