"""Tests what a bundle holds, and what it says where it cannot be made."""

from __future__ import annotations

import json
import pathlib
import zipfile

import pytest
from support import reports
from support.inside import Done, doctor

from fsdp_doctor.bundle.issue import MOST_CHARACTERS
from fsdp_doctor.known.catalogue import read_catalogue
from fsdp_doctor.machine import environment
from fsdp_doctor.matrix.selection import Selection, select
from fsdp_doctor.report.document import convert_report_to_dict
from fsdp_doctor.report.journal import read_report

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_LOG = _ROOT / "examples" / "verl-5995" / "log.txt"
_CONFIG = _ROOT / "examples" / "verl-5995" / "config.txt"
_CASE = "fsdp2/policy/staged/state_dict"
_MOST_LINES = 150


@pytest.fixture(autouse=True)
def _without_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real one asks torch in a process of its own."""
    monkeypatch.setattr(environment, "collect", lambda: environment.collect_without_torch() | {"torch": "2.13.0"})


def _bundle(directory: pathlib.Path, *arguments: str) -> tuple[Done, dict[str, str]]:
    done = doctor("bundle", *arguments, "-o", str(directory / "bug.zip"))
    with zipfile.ZipFile(directory / "bug.zip") as archive:
        return done, {name: archive.read(name).decode() for name in archive.namelist()}


def _report(directory: pathlib.Path, *results: object, **fields: object) -> str:
    file = directory / "report.json"
    file.write_text(json.dumps(convert_report_to_dict(reports.report(*results, **fields))))
    return str(file)


def _broken(reason: str = "it broke") -> object:
    case = select(Selection(case_ids=(_CASE,)))[0]
    return reports.result(case, reason=reason, traceback=reports.TRACEBACK)


def test_of_a_log_and_a_configuration_it_has_answers_case_and_script(tmp_path: pathlib.Path) -> None:
    done, files = _bundle(tmp_path, "--log", str(_LOG), "--config", str(_CONFIG))
    assert done.code == 0, done.stderr
    assert "Known: fsdp2-pinned-policy-half-moved" in files["explain.txt"]
    assert "fsdp2-pinned-policy-half-moved" in files["check.txt"]
    assert "the log shows fsdp2-pinned" in files["case.txt"]
    assert len(files["issue.md"].splitlines()) <= _MOST_LINES
    assert files["issue.md"].count("Before torch 2.9 nothing raises") == 1, "an entry is there once"
    assert "### Versions" in files["issue.md"]
    compile(files["repro.py"], "repro.py", "exec")
    assert set(done.stdout.splitlines()[0].split(": ")[1].split(", ")) == set(files)


def test_an_issue_begins_with_the_failure_its_place_versions_and_reproduction(tmp_path: pathlib.Path) -> None:
    _, files = _bundle(tmp_path, "--log", str(_LOG))
    first = files["issue.md"].splitlines()[:10]
    for begin, content in {
        "- **What:**": "Attempted to set the storage",
        "- **Where:**": "in get_per_tensor_param",
        "- **Versions:**": "torch",
        "- **How to reproduce:**": "torchrun --nproc-per-node 1 minimal.py",
    }.items():
        assert [line for line in first if line.startswith(begin) and content in line], first


def test_an_issue_has_the_short_script_and_the_whole_remedy(tmp_path: pathlib.Path) -> None:
    _, files = _bundle(tmp_path, "--log", str(_LOG))
    assert files["minimal.py"] in files["issue.md"]
    entry = next(entry for entry in read_catalogue() if entry.id == "fsdp2-pinned-policy-half-moved")
    # The answer wraps the text.
    issue = " ".join(files["issue.md"].split())
    assert " ".join(entry.remedy.split()) in issue
    assert " ".join(entry.remedies["verl"].split()) in issue


_WORKERS = """transformers version: 4.57.1
PyTorch version: 2.9.1+cu128
(WorkerDict pid=1187) [rank3]: verl==0.8.0
(WorkerDict pid=1187) Traceback (most recent call last):
(WorkerDict pid=1187)   File "/env/lib/python3.11/site-packages/trl/trainer.py", line 7, in step
(WorkerDict pid=1187) ValueError: no
(WorkerDict pid=1188) ValueError: no
"""


def test_an_issue_names_each_version_of_the_log_and_ranks_for_pids(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text(_WORKERS)
    _, files = _bundle(tmp_path, "--log", str(log))
    head = "\n".join(files["issue.md"].splitlines()[:10])
    assert all(version in head for version in ("torch 2.9.1", "transformers 4.57.1", "verl 0.8.0", "its trl"))
    assert "rank 3" in head
    assert "1187" not in files["issue.md"]
    assert "pid=1187" in files["log.txt"]


def test_a_failure_that_the_catalogue_does_not_know_has_no_short_script(tmp_path: pathlib.Path) -> None:
    _, files = _bundle(tmp_path, "--report", _report(tmp_path, _broken()))
    assert ("repro.py" in files, "minimal.py" in files) == (True, False)


def test_a_log_may_come_from_standard_input(tmp_path: pathlib.Path) -> None:
    done = doctor("bundle", "--log", "-", "-o", str(tmp_path / "bug.zip"), stdin=_LOG.read_text())
    assert done.code == 0, done.stderr
    with zipfile.ZipFile(tmp_path / "bug.zip") as archive:
        assert "Known: fsdp2-pinned-policy-half-moved" in archive.read("explain.txt").decode()
        assert "Attempted to set the storage" in archive.read("log.txt").decode()


def test_a_reports_bundle_has_the_broken_case_and_the_whole_report(tmp_path: pathlib.Path) -> None:
    _, files = _bundle(tmp_path, "--report", _report(tmp_path, _broken()))
    assert files["case.txt"].startswith(f"{_CASE}\n")
    assert "crash: it broke" in files["case.txt"]
    (tmp_path / "again.json").write_text(files["report.json"])
    assert read_report(tmp_path / "again.json").results[0].id == _CASE


def test_a_bundles_environment_is_the_reports_or_names_the_logs_torch(tmp_path: pathlib.Path) -> None:
    environment = {"python": "3.10.9", "torch": "2.6.0", "packages": {"torch": "2.6.0"}}
    _, files = _bundle(tmp_path, "--report", _report(tmp_path, _broken(), environment=environment))
    assert "3.10.9" in files["environment.txt"]
    assert "torch 2.6.0, Python 3.10.9 (of the report)" in files["issue.md"]
    _, files = _bundle(tmp_path, "--log", str(_LOG))
    assert "the log does not name its torch" in files["issue.md"]
    log = tmp_path / "log.txt"
    log.write_text(f"torch version: 2.9.1+cu128\n{_LOG.read_text()}")
    _, files = _bundle(tmp_path, "--log", str(log))
    head = "\n".join(files["issue.md"].splitlines()[:10])
    assert ("torch 2.9.1" in head, "2.13.0" in head) == (True, False)


def test_what_was_replaced_in_a_message_matches_anything_in_the_script(tmp_path: pathlib.Path) -> None:
    _, files = _bundle(tmp_path, "--report", _report(tmp_path, _broken("no answer from 10.0.0.5:29500 here")))
    assert "IPV4_ADDRESS_1" in files["issue.md"]
    assert "IPV4_ADDRESS_1" not in files["repro.py"]
    assert r"no answer from \S+:\d+ here" in files["repro.py"] or r"no answer from \S+:29500 here" in files["repro.py"]


@pytest.mark.parametrize("word", ["x", "`" * 9, "me@nowhere.de ", "</details>"])
def test_an_issue_has_at_most_150_lines_and_fits_into_githubs_limit(tmp_path: pathlib.Path, word: str) -> None:
    log = tmp_path / "log.txt"
    line = word * (3_000 // len(word))
    log.write_text(
        "\n".join(
            ["Traceback (most recent call last):", *[f'  File "a.py", line 1, in {line}'] * 60, f"ValueError: {line}"]
        )
    )
    _, files = _bundle(tmp_path, "--log", str(log), "--report", _report(tmp_path, _broken(line), notes=(line,)))
    assert len(files["issue.md"]) <= MOST_CHARACTERS
    assert 20 < len(files["issue.md"].splitlines()) <= _MOST_LINES
    assert files["issue.md"].splitlines()[-1].startswith("The bundle also holds: ")


def test_of_a_long_log_the_failure_stays_and_the_rest_is_counted(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "log.txt"
    noise = [f"step {number}" for number in range(50_000)]
    failure = ["Traceback (most recent call last):", '  File "a.py", line 1, in f', "ValueError: the one"]
    log.write_text("\n".join([*noise, *failure, *noise]))
    _, files = _bundle(tmp_path, "--log", str(log))
    lines = files["log.txt"].splitlines()
    assert "ValueError: the one" in lines
    assert (lines[0], lines[-1]) == ("step 0", "step 49999")
    assert len(lines) < 1_000
    assert sum("lines left out" in line for line in lines) == 2


def test_the_same_evidence_makes_the_same_file(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for name in "ab":
        _bundle(tmp_path / name, "--log", str(_LOG))
    assert (tmp_path / "a" / "bug.zip").read_bytes() == (tmp_path / "b" / "bug.zip").read_bytes()


def test_the_environment_is_what_the_allow_list_has(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_OWN_VARIABLE", "nobody is to see this")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    _, files = _bundle(tmp_path, "--log", str(_LOG))
    assert "NCCL_DEBUG=INFO" in files["environment.txt"]
    assert all("nobody is to see this" not in text for text in files.values())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "nothing to report; give --log, --config, --report, or a command after --"),
        (("--log", "/nowhere"), "cannot read /nowhere: No such file or directory"),
        (("--log", "/dev/null"), "/dev/null is empty"),
        (("--report", str(_LOG)), "is not a report of fsdp-doctor"),
        (("--config", "/nowhere.yaml"), "cannot read /nowhere.yaml"),
        (("--hang-after", "0", "--log", str(_LOG)), "'--hang-after'"),
    ],
)
def test_what_cannot_be_read_is_one_sentence_and_nothing_is_written(
    tmp_path: pathlib.Path, arguments: tuple[str, ...], sentence: str
) -> None:
    done = doctor("bundle", *arguments, "-o", str(tmp_path / "bug.zip"))
    assert (done.code, done.stderr.count("\n"), done.stdout) == (2, 1, "")
    assert sentence in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_said_first(tmp_path: pathlib.Path) -> None:
    done = doctor("bundle", "--log", str(_LOG), "-o", str(tmp_path / "nowhere" / "bug.zip"))
    assert (done.code, done.stderr.count("\n")) == (2, 1)
    assert "cannot write" in done.stderr


def test_a_disk_that_is_full_is_one_sentence() -> None:
    done = doctor("bundle", "--log", str(_LOG), "-o", "/dev/full")
    assert (done.code, done.stderr.count("\n")) == (4, 1)
    assert "cannot write /dev/full" in done.stderr
