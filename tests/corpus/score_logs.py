"""Scores `explain` on logs from public threads: ``python tests/corpus/score_logs.py [SET]...``.

``logs.toml`` says where each log is from and what is to be said of it. Half of the logs, by the hash of their names,
was not shown to `explain` until the work on it was done: the score of the unseen half is the one that counts.
"""

from __future__ import annotations

import contextlib
import hashlib
import pathlib
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

ROOT = pathlib.Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from fsdp_doctor.explain import Explanation, explain  # noqa: E402
from fsdp_doctor.explain.text import render_text  # noqa: E402

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = pathlib.Path(__file__).parent
Score: TypeAlias = Literal["right", "weak", "missed", "wrong"]
SETS = ("seen", "unseen", "fresh", "third", "fourth", "fifth", "cited")
SCORES: tuple[Score, ...] = ("right", "weak", "missed", "wrong")
_GRADES = ("known", "likely", "possible", None)


def set_of(row: dict[str, Any]) -> str:
    """Chooses the set by the hash of its name; what was collected later is a set by itself."""
    name: str = row["file"]
    if later := row.get("set"):
        return str(later)
    return "seen" if int(hashlib.sha256(name.encode()).hexdigest(), 16) % 2 == 0 else "unseen"


def logs(which: str | None = None) -> list[dict[str, Any]]:
    rows = tomllib.loads((HERE / "logs.toml").read_text(encoding="utf-8"))["log"]
    return [row for row in rows if which is None or set_of(row) == which]


def scored(row: dict[str, Any]) -> tuple[Score, Explanation]:
    explanation = explain([HERE / "logs" / row["file"]])
    return _score(row, explanation), explanation


def _score(row: dict[str, Any], explanation: Explanation) -> Score:
    """wrong: an entry that it is not is called known, or likely. weak: said with less certainty, or in part."""
    wanted = row.get("entries", [])
    sure = [match for match in explanation.matches if match.grade != "possible"]
    if sure and sure[0].entry.id not in wanted:
        return "wrong"
    said = all(words in render_text(explanation, 10_000) for words in row.get("says", []))
    if not wanted:
        return "right" if said and explanation.showing in row["shows"] else "weak" if said else "missed"
    grades = [match.grade for match in explanation.matches if match.entry.id in wanted]
    if not grades:
        return "weak" if said and row.get("says") else "missed"
    return "right" if said and _GRADES.index(grades[0]) <= _GRADES.index(row.get("grade", "known")) else "weak"


def table(which: str) -> Iterator[str]:
    """Yields the table of one set: the sums, for logs in scope and for the others, and each log that is not right."""
    counts: dict[bool, Counter[Score]] = {True: Counter(), False: Counter()}
    rest = []
    for row in logs(which):
        score, explanation = scored(row)
        counts[row["scope"]][score] += 1
        if score != "right":
            said = ", ".join(f"{match.grade} {match.entry.id}" for match in explanation.matches[:2])
            wanted = ", ".join(row.get("entries", [])) or "/".join(row["shows"])
            rest.append(f"| {row['file']} | {score} | {wanted} | {said or explanation.showing} |")
    yield f"## {which}\n"
    yield f"| | logs | {' | '.join(SCORES)} |\n|---|---|{'---|' * len(SCORES)}"
    for scope, name in ((True, "within the scope"), (False, "others")):
        yield f"| {name} | {counts[scope].total()} | {' | '.join(str(counts[scope][score]) for score in SCORES)} |"
    yield "\n| not right | score | wanted | said |\n|---|---|---|---|"
    yield from rest


def main() -> None:
    with contextlib.suppress(BrokenPipeError):
        for which in sys.argv[1:] or SETS:
            print("\n".join(table(which)), end="\n\n")


if __name__ == "__main__":
    main()
