"""The sweep with real environments, whose torch is this one's under another number."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import sys
import sysconfig

import pytest
from program import Run, Started, doctor, user_methods
from support import inside
from support.places import ROOT
from support.reports import every_kind, report
from support.wheels import index_with_torch

from fsdp_doctor.emulated import build
from fsdp_doctor.errors import CannotRun, UsageError
from fsdp_doctor.report.document import Report
from fsdp_doctor.report.journal import read_report, write_report
from fsdp_doctor.report.versions import sweeping
from fsdp_doctor.report.versions.sweeping import Program, Sweep, find_reason, read_exact_versions

_CASE = "fsdp2/none/unstaged/summon_full_params"
_OPTIONS = ("--", "--device", "cpu", "--case", _CASE, "--expect", "known")


@dataclasses.dataclass(frozen=True)
class _Swept:
    directory: pathlib.Path
    variables: dict[str, str]
    run: Run

    def again(self, *arguments: str) -> Run:
        return doctor("report", "sweep", "--directory", str(self.directory), *arguments, env=self.variables)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> _Swept:
    """A sweep over a version that there is and one that there is not."""
    directory = tmp_path_factory.mktemp("sweep")
    variables = index_with_torch(directory / "wheels", "2.98.1")
    reports = directory / "reports"
    done = doctor("report", "sweep", "--torch", "2.99,2.98", "--directory", str(reports), *_OPTIONS, env=variables)
    return _Swept(reports, variables, done)


def test_a_version_that_does_not_install_is_a_row_saying_so(swept: _Swept) -> None:
    assert swept.run.code == 3, swept.run.stderr
    missing, there = swept.run.stdout.splitlines()
    assert missing.startswith("torch 2.99\ttorch 2.99 does not install: ")
    assert "torch==2.99" in missing
    assert there.startswith("torch 2.98\t1 case on 2 ranks of cpu: 1 wrong\t")
    found = read_report(swept.directory / "torch2.98.json")
    assert (found.complete, found.environment["packages"]["torch"]) == (True, "2.98.1")
    nothing = read_report(swept.directory / "torch2.99.json")
    assert (nothing.results, nothing.complete) == ((), False)
    assert nothing.ended in missing


def test_it_leaves_reports_and_logs_and_no_environment(swept: _Swept) -> None:
    names = {file.name for file in swept.directory.iterdir()}
    assert names == {f"torch{version}.{kind}" for version in ("2.98", "2.99") for kind in ("json", "log")}
    assert _CASE in (swept.directory / "torch2.98.log").read_text()


def test_both_are_in_the_merged_report(swept: _Swept) -> None:
    files = [str(swept.directory / f"torch{version}.json") for version in ("2.98", "2.99")]
    merged = swept.directory.parent / "merged.json"
    done = inside.doctor("report", "merge", *files, "--json", str(merged), "--cases")
    assert done.code == 0, done.stderr
    first, second, third = json.loads(merged.read_text())["environments"], *done.stdout.splitlines()
    assert [one["complete"] for one in first] == [True, False]
    assert second.startswith("torch 2.99, not run\tincomplete\ttorch 2.99 does not install: ")
    assert third.split("\t")[0] == _CASE


def test_a_complete_report_is_neither_run_again_nor_written_over(swept: _Swept) -> None:
    before = (swept.directory / "torch2.98.json").read_bytes()
    again = swept.again("--torch", "2.98", *_OPTIONS)
    assert (again.code, again.stderr) == (0, "")
    other = swept.again("--torch", "2.98", "--", "--device", "cpu", "--direction", "in")
    assert other.code == 2
    assert str(swept.directory / "torch2.98.json") in other.stderr
    assert (swept.directory / "torch2.98.json").read_bytes() == before


def test_sigterm_ends_it_and_leaves_no_environment_and_no_process(swept: _Swept, tmp_path: pathlib.Path) -> None:
    arguments = ("report", "sweep", "--torch", "2.98", "--directory", str(tmp_path), *_OPTIONS)
    started = Started(sys.executable, "-m", "fsdp_doctor", *arguments, env=swept.variables)
    assert started.first_message() == "fsdp-doctor: torch 2.98: installing\n"
    os.kill(started.pid, signal.SIGTERM)
    done = started.wait()
    assert (done.code, done.left) == (130, []), done.stderr
    assert done.stderr.startswith("fsdp-doctor: stopped by SIGTERM; the finished cases are kept")
    assert [file.name for file in tmp_path.iterdir()] == ["torch2.98.log"]


def test_a_sweep_keeps_results_at_ctrl_c_and_resumes_from_them(swept: _Swept, tmp_path: pathlib.Path) -> None:
    fifo, reports = tmp_path / "fifo", tmp_path / "reports"
    os.mkfifo(fifo)
    variables = swept.variables | {"FSDP_DOCTOR_TEST_FIFO": str(fifo), "FSDP_DOCTOR_TEST_RANK": "0"}
    selection = ("--strategy", "fsdp2", "--offload", "none", "--staging", "unstaged", "--method", "state_dict")
    options = ("--device", "cpu", *selection, *user_methods("processes:keeps_the_run_busy"), "--timeout", "8")
    command = ("report", "sweep", "--torch", "2.98", "--directory", str(reports), "--", *options)
    started = Started(sys.executable, "-m", "fsdp_doctor", *command, env=variables)
    started.told(fifo)
    started.interrupt()
    done = started.wait()
    assert (done.code, done.left) == (130, []), done.stderr
    assert "fsdp-doctor: stopped by SIGINT; the finished cases are kept" in done.stderr
    assert sorted(file.name for file in reports.iterdir()) == [f"torch2.98.{kind}" for kind in ("json", "log")]
    (kept,) = read_report(reports / "torch2.98.json").results
    # Of rank 0 nobody reads any more: the run is not kept busy, but hangs until its deadline.
    again = doctor(*command, env=variables | {"FSDP_DOCTOR_TEST_RANK": "none"})
    whole = read_report(reports / "torch2.98.json")
    assert (again.code, whole.complete) == (1, True)
    assert [whole.results[0], whole.results[1].verdict.kind] == [kept, "hang"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--torch "),
        (("--torch", ","), "--torch "),
        (("--torch", "newest"), "'newest'"),
        (("--torch", "2.98", "--", "--no-such-option"), "--no-such-option"),
        (("--torch", "2.98", "--", "--json", "a.json"), "--json"),
        (("--torch", "2.98", "--directory", "/dev/null/sweep"), "/dev/null/sweep"),
    ],
)
def test_a_sweep_that_cannot_mean_anything_is_refused_before_it_installs(
    arguments: tuple[str, ...], said: str, tmp_path: pathlib.Path
) -> None:
    done = doctor("report", "sweep", *arguments, cwd=tmp_path)
    assert done.code == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("*/*"))


def test_what_ran_is_kept_where_the_version_no_longer_installs(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> pathlib.Path:
        raise CannotRun("[Errno 28] No space left on device")

    monkeypatch.setattr(sweeping, "make_environment", refuse)
    sweep = Sweep(versions=("2.98",), requirements=(), options=("--fix",), directory=tmp_path)
    partial = dataclasses.replace(_partial(), command="fsdp-doctor probe --fix --json elsewhere.json --resume")
    write_report(sweep.name_file(sweep.list_packages()[0]), partial)
    sweeping.check(sweep)
    (one,) = sweeping.run(sweep)
    assert one.trouble == "torch 2.98 does not install: [Errno 28] No space left on device"
    assert read_report(sweep.name_file(sweep.list_packages()[0])) == partial


def _partial() -> Report:
    return report(*every_kind(), num_selected=20, complete=False, ended="stopped by SIGINT")


def test_a_version_without_a_compiler_for_its_device_reports_the_reason(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    program = Program(pathlib.Path(sys.executable), ROOT)
    why = program.probe(["--device", "emulated", "--case", _CASE], tmp_path / "log")
    assert isinstance(why, CannotRun)
    assert "CXX=no-such-compiler" in str(why)


def test_a_value_that_the_probe_does_not_take_ends_the_sweep(tmp_path: pathlib.Path) -> None:
    program = Program(pathlib.Path(sys.executable), ROOT)
    with pytest.raises(UsageError, match="'zebra'"):
        program.probe(["--device", "cpu", "--case", "zebra/none/unstaged/dcp"], tmp_path / "log")


def test_what_is_installed_for_a_checkout_is_what_its_pyproject_asks_for(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = tmp_path / "fsdp_doctor-0.0.1.dist-info"
    stale.mkdir()
    (stale / "METADATA").write_text("Metadata-Version: 2.1\nName: fsdp-doctor\nVersion: 0.0.1\nRequires-Dist: typer\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert any(each.startswith("msgspec>=") for each in sweeping.read_package_requirements())


def test_a_report_is_named_by_everything_that_was_asked_for(tmp_path: pathlib.Path) -> None:
    sweep = Sweep(versions=("2.98",), requirements=("transformers==5.0", "./my pkg"), options=(), directory=tmp_path)
    assert [sweep.name_file(each).name for each in sweep.list_packages()] == ["torch2.98-transformers5.0-.mypkg.json"]


def test_a_package_named_twice_is_tried_in_both_versions_with_each_torch(tmp_path: pathlib.Path) -> None:
    wanted = ("accelerate==1.12.0", "peft<0.22", "accelerate==1.15.0")
    sweep = Sweep(versions=("2.97", "2.98"), requirements=wanted, options=(), directory=tmp_path)
    names = [str(packages) for packages in sweep.list_packages()]
    assert names[:2] == ["torch 2.97 accelerate==1.12.0 peft<0.22", "torch 2.97 accelerate==1.15.0 peft<0.22"]
    assert len({sweep.name_file(packages) for packages in sweep.list_packages()}) == len(names) == 4


def test_a_version_that_does_not_install_reports_its_exact_requirements() -> None:
    wanted = ("transformers==5.23.0", "accelerate>=1", "./mine", "a==1 ; python_version > '3'")
    assert read_exact_versions(wanted) == {"transformers": "5.23.0", "a": "1"}


def test_how_the_device_is_given_does_not_make_it_another_request(tmp_path: pathlib.Path) -> None:
    sweep = Sweep(versions=("2.98",), requirements=(), options=("--device=cpu", "-k", "a"), directory=tmp_path)
    on_the_cpu = dataclasses.replace(_partial(), command="fsdp-doctor probe -k a --resume", device="cpu")
    write_report(sweep.name_file(sweep.list_packages()[0]), on_the_cpu)
    sweeping.check(sweep)
    for other in ({"command": "fsdp-doctor probe -k b"}, {"device": "emulated"}):
        write_report(sweep.name_file(sweep.list_packages()[0]), dataclasses.replace(on_the_cpu, **other))
        with pytest.raises(UsageError, match="--directory"):
            sweeping.check(sweep)


def test_uvs_reason_is_one_line() -> None:
    printed = "  \u00d7 No solution found:\n  \u2570\u2500\u25b6 Because there is no torch==2.99,\n      it is bad.\n"
    assert find_reason(printed) == "No solution found: Because there is no torch==2.99, it is bad."


def test_a_sweep_without_uv_is_refused_before_it_installs(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    done = inside.doctor("report", "sweep", "--torch", "2.98", "--directory", "sweep", cwd=tmp_path, env={"PATH": ""})
    assert (done.code, done.stdout) == (2, "")
    assert "'fsdp-doctor[sweep]'" in done.stderr
    assert list(tmp_path.glob("sweep/*")) == []


def test_the_oldest_torch_with_an_emulated_device_is_what_the_device_says() -> None:
    assert sweeping.OLDEST_EMULATED_TORCH == build.OLDEST_TORCH
