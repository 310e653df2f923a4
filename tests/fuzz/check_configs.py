"""Feeds `fsdp-doctor check` with texts of every kind, guided by coverage.

    python -m venv ../fuzz && ../fuzz/bin/pip install atheris pyyaml packaging typing_extensions
    PYTHONPATH=. ../fuzz/bin/python tests/fuzz/check_configs.py CORPUS -max_total_time=1800 -rss_limit_mb=300

CORPUS is a folder of inputs, which grows; with no files in it, it is begun with those of tests/check/configs. The first
byte of an input chooses the suffix of the file that it would be. A find is any exception but UsageError, more than two
seconds for each started megabyte, or more than 300 MB, which libFuzzer ends. What was found is in
tests/check/test_config_bounds.py.
"""

from __future__ import annotations

import os
import pathlib
import sys
import time

import atheris

with atheris.instrument_imports(include=["fsdp_doctor"]):
    from fsdp_doctor.check import check, presentation, reading
    from fsdp_doctor.errors import UsageError

_SUFFIXES = (".yaml", ".json", ".toml", ".sh")
_SECONDS_PER_MB = 2.0
_SEEDS = pathlib.Path(__file__).parents[1] / "check" / "configs"
_given: tuple[str, str] = ("", "")


def one_input(data: bytes) -> None:
    """Returns what `check` does with a file that has ``data[1:]`` in it."""
    global _given
    text = data[1:].decode("utf-8", errors="ignore").replace("\0", "")
    if not text.strip():
        return
    _given = (f"config{_SUFFIXES[data[0] % len(_SUFFIXES)]}", text)
    refused = ""
    started = time.process_time()
    try:
        result = check(["config"], framework_version="all", torch_version="all")
        presentation.render_text(result)
        presentation.render_json(result)
    except UsageError as error:
        refused = str(error)
    assert "\n" not in refused, "a message of several lines"
    seconds = time.process_time() - started
    assert seconds < _SECONDS_PER_MB * (1 + len(text) // (1 << 20)), f"{seconds:.1f} s for {len(text)} characters"


def _seed(corpus: pathlib.Path) -> None:
    corpus.mkdir(exist_ok=True)
    if any(corpus.iterdir()):
        return
    for file in sorted(_SEEDS.iterdir()):
        if file.suffix in _SUFFIXES:
            kind = bytes([_SUFFIXES.index(file.suffix)])
            (corpus / file.name).write_bytes(kind + file.read_bytes())


def main() -> None:
    # The one thing that is not as in the program: no file is written, and none that a text names is followed.
    reading.read_text = lambda argument: _given
    os.path.isfile = lambda path: False
    folders = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    if folders:
        _seed(pathlib.Path(folders[0]))
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
