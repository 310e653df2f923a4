"""Counts the configurations in configs.toml that `fsdp-doctor check` reads rightly, in both halves of the corpus.

    python tests/corpus/score_configs.py --files DIR [--download] [--half seen|unseen|last|third|fourth] [--verbose]

The files are read from DIR/OWNER+REPOSITORY@COMMIT/PATH; with --download those that are missing are taken from GitHub.
Half of the corpus was kept unseen while `check` was written: which half a file is in, a digest of its name decides. The
others were collected later, from the same and other repositories.

A configuration counts as *right* if framework, models and ranks are as expected, or if it was refused where that is
expected; as *asked* if `check` said that it cannot determine what it could have read; as *misread* otherwise, and as
*misread silently* if it was told "nothing known to break" all the same.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import pathlib
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from typing import Any

from fsdp_doctor.check import CheckResult, check
from fsdp_doctor.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MANIFEST = pathlib.Path(__file__).with_name("configs.toml")
HALVES = ("seen", "unseen", "last", "third", "fourth")
_SHOWN = ("strategy", "offload", "model", "sharding")
_DEFAULTS = {"model": "qwen3", "sharding": "full"}


def configs() -> list[dict[str, Any]]:
    return list(tomllib.loads(MANIFEST.read_text())["config"])


def half(config: dict[str, Any]) -> str:
    """``seen`` or ``unseen``; another one for what was collected only when `check` was done."""
    if "part" in config:
        return str(config["part"])
    name = f"{config['repository'].replace('/', '+')}/{config['path']}"
    return "seen" if hashlib.sha256(name.encode()).digest()[0] % 2 == 0 else "unseen"


def judged(config: dict[str, Any], root: pathlib.Path) -> tuple[str, str]:
    """``right``, ``asked``, ``misread`` or ``misread silently``, and what was read."""
    with _inside(root):
        try:
            result = check([config["path"]], framework_version=config.get("version", "all"), torch_version="all")
        except UsageError as error:
            refused = f"refused: {error}"[:200]
            return ("right" if isinstance(config["expected"], str) else "asked"), refused
    read = _read(result)
    if _is_right(config, result):
        return "right", read
    if not result.determined:
        return "asked", read
    return ("misread silently" if result.exit_code == 0 else "misread"), read


def _is_right(config: dict[str, Any], result: CheckResult) -> bool:
    expected = config["expected"]
    if expected == "refused":
        return not result.under_fsdp
    if expected == "undetermined":
        return not result.determined
    if expected == "not FSDP":
        return result.determined and not result.under_fsdp
    models = {(use.role, _short(use)) for use in result.uses}
    named = config["framework"].lower() in result.framework.lower()
    return named and models == set(expected.items()) and result.world_size == config.get("ranks")


def _short(use: Any) -> str:
    if use.scenario is None:
        return str(use.why_not)
    values = {axis: use.scenario.values[axis] for axis in _SHOWN}
    return "/".join(value for axis, value in values.items() if value != _DEFAULTS.get(axis))


def _read(result: CheckResult) -> str:
    models = ", ".join(f"{use.title}={_short(use)}" for use in result.uses)
    unknown = "; ".join(finding.sentence for finding in result.findings if finding.kind == "unknown")
    return f"{result.framework}: {models}; {result.world_size} ranks; {unknown}"


@contextlib.contextmanager
def _inside(root: pathlib.Path) -> Iterator[None]:
    before = pathlib.Path.cwd()
    os.chdir(root)
    try:
        yield
    finally:
        os.chdir(before)


def _download(config: dict[str, Any], root: pathlib.Path) -> None:
    for path in (config["path"], *config.get("also", ())):
        file = root / path
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            url = f"https://raw.githubusercontent.com/{config['repository']}/{config['commit']}/{path}"
            with urllib.request.urlopen(url, timeout=60) as answer:
                file.write_bytes(answer.read())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=pathlib.Path, required=True)
    parser.add_argument("--download", action="store_true")
    parser.add_argument("--half", choices=HALVES)
    parser.add_argument("--verbose", action="store_true", help="also print what each file was read as")
    options = parser.parse_args()
    counts: dict[str, Counter[str]] = {which: Counter() for which in HALVES}
    for config in configs():
        which = half(config)
        if options.half not in (None, which):
            continue
        root = options.files / f"{config['repository'].replace('/', '+')}@{config['commit'][:12]}"
        if options.download:
            _download(config, root)
        file = root / config["path"]
        if not file.exists() or hashlib.sha256(file.read_bytes()).hexdigest() != config["sha256"]:
            counts[which]["missing"] += 1
            continue
        verdict, read = judged(config, root)
        counts[which][verdict] += 1
        if options.verbose:
            print(f"{which} {verdict}: {config['repository']}/{config['path']}\n    {config['expected']}\n    {read}")
    for which, verdicts in counts.items():
        if verdicts:
            parts = ", ".join(f"{number} {name}" for name, number in sorted(verdicts.items()))
            print(f"{which}: {sum(verdicts.values())} configurations: {parts}")


if __name__ == "__main__":
    main()
