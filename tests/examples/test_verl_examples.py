"""examples/verl-*: each file is what the command in its README makes now, and each remedy is one."""

from __future__ import annotations

import pathlib
import re
import sys
from dataclasses import dataclass

import pytest
from program import Run, default_matrix, forked_doctor, probe, run, torchrun_script
from support.emulation import needs_emulation
from support.forked import run_script
from support.inside import Done, doctor
from support.places import ROOT

from fsdp_doctor.examination.memory_records import DeviceMemory, read_memory_file
from fsdp_doctor.matrix.selection import Selection, select


@dataclass(frozen=True, kw_only=True)
class Example:
    name: str
    explain_code: int
    check: tuple[str, ...]
    case: str
    remedy: str
    report: dict[str, tuple[str, ...]]
    message: str

    @property
    def directory(self) -> pathlib.Path:
        return ROOT / "examples" / self.name

    def text(self, file: str) -> str:
        return (self.directory / file).read_text(encoding="utf-8")


_EXAMPLES = (
    Example(
        name="verl-5995",
        explain_code=0,
        check=("config.txt", "--torch-version", "2.9"),
        case="fsdp2/policy/staged/state_dict",
        remedy="fsdp2/policy/unstaged/remedy:weights",
        report={"strategy": ("fsdp2",), "offload": ("policy",)},
        message='RuntimeError: Attempted to set the storage of a tensor on device "cpu"',
    ),
    Example(
        name="verl-4657",
        explain_code=1,  # a line without a traceback: likely, and not known
        check=("config.txt", "--framework-version", "0.7.0", "--torch-version", "2.9"),
        case="fsdp1/param/unstaged/weights_info",
        remedy="fsdp1/param/unstaged/remedy:weights",
        report={"strategy": ("fsdp1",), "offload": ("param",)},
        message="AssertionError: Expects tensor to be on the compute device",
    ),
)
_each = pytest.mark.parametrize("example", _EXAMPLES, ids=lambda example: example.name)


def _doctor(example: Example, *arguments: str) -> Done:
    return doctor(*arguments, env={"COLUMNS": "120"}, cwd=example.directory)


@_each
def test_explain_prints_what_is_kept(example: Example) -> None:
    done = _doctor(example, "explain", "log.txt")
    assert (done.code, done.stdout) == (example.explain_code, example.text("explain.txt"))


@_each
def test_check_prints_what_is_kept_and_finds_the_failure(example: Example) -> None:
    done = _doctor(example, "check", *example.check)
    assert (done.code, done.stdout) == (1, example.text("check.txt"))
    assert "Known failures" in done.stdout


@_each
def test_repro_writes_the_script_that_is_kept_but_for_versions(example: Example, tmp_path: pathlib.Path) -> None:
    done = _doctor(example, "repro", example.case, "--out", str(tmp_path / "repro.py"))
    assert done.code == 0, done.stderr

    def without_versions(text: str) -> str:
        docstring, _, rest = text.partition('\n"""\n')
        return " ".join(re.sub(r"torch\s\S+,\stransformers\s\S+", "", docstring).split()) + rest

    assert without_versions((tmp_path / "repro.py").read_text()) == without_versions(example.text("repro.py"))


@_each
def test_the_script_reproduces_the_failure(example: Example, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "repro.py"
    script.write_text(example.text("repro.py"))
    done = run_script(script)
    assert done.codes == [0, 0], done.output
    assert example.message in done.output


@_each
def test_the_remedy_is_ok(example: Example, tmp_path: pathlib.Path) -> None:
    environment = {"PYTHONPATH": f"{ROOT}:{example.directory}"}
    done = probe(tmp_path, "--case", example.remedy, device="emulated", env=environment)
    assert done.kind("remedy:weights") == "ok", done.stdout


@_each
def test_the_report_has_the_verdicts_that_the_matrix_gives_here(example: Example) -> None:
    selected = {case.id for case in select(Selection(axes=example.report, fix=True))}
    results = [result for result in default_matrix().results if result.id in selected]
    assert len(results) == len(selected)
    kept = dict(re.findall(r"^\| `(\S+)` \| (?:\*\*)?(\w+)", example.text("report.md"), re.MULTILINE))
    # Of two grids of one report the later one is kept: staged comes after unstaged.
    here = {result.case.method: result.verdict.kind for result in results}
    assert {path: here[path] for path in kept if path in here} == {path: kept[path] for path in kept if path in here}
    assert len(kept) > 10


def test_a_reported_script_needs_nothing_of_ours(tmp_path: pathlib.Path) -> None:
    """The script runs on the CPU, where an offload moves nothing: it says what it needs, and judges nothing."""
    (tmp_path / "repro.py").write_text(_EXAMPLES[0].text("repro.py"))
    done = torchrun_script(tmp_path / "repro.py", tmp_path)
    assert done.code == 1
    assert "AssertionError: start it on 2 accelerators" in done.stderr
    assert "PASS" not in done.stdout


# verl-4726: what an extraction leaves on the device, in bytes.

_KEPT_ON_GPU = ROOT / "examples" / "verl-4726"
KEPT, GIVEN_BACK = "keep_on_gpu:kept", "keep_on_gpu:given_back"
_JOB = (
    *("memory", "measure", "--device", "emulated", "--strategy", "fsdp1", "--offload", "param+optimizer"),
    *("--staging", "unstaged", "--method", f"{KEPT},{GIVEN_BACK}"),
)


@pytest.fixture(scope="module")
def json_file(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("keep") / "ledgers.json"


@pytest.fixture(scope="module")
def done(json_file: pathlib.Path) -> Run:
    needs_emulation()
    return forked_doctor(*_JOB, "--json", str(json_file), env={"PYTHONPATH": str(_KEPT_ON_GPU)})


@pytest.fixture(scope="module")
def ledgers(done: Run, json_file: pathlib.Path) -> dict[tuple[str, str], DeviceMemory]:
    assert done.code == 1, done.stderr
    found = read_memory_file(json_file.read_text()).ledgers
    return {
        (memory.stage, memory.method): memory.device
        for memory in found
        if memory.rank == 0 and memory.device is not None
    }


def test_what_a_method_loads_and_does_not_offload_stays_on_the_device(
    ledgers: dict[tuple[str, str], DeviceMemory],
) -> None:
    shards = ledgers["trained", ""].held["parameters"]
    assert "parameters" not in ledgers["offloaded", ""].held
    for stage in ("extracted", "offloaded again"):
        assert ledgers[stage, KEPT].held["parameters"] == shards
        assert "parameters" not in ledgers[stage, GIVEN_BACK].held
    assert ledgers["extracted", GIVEN_BACK].at_peak["parameters"] == shards


def test_the_probe_says_that_the_method_changed_where_the_shards_are(done: Run) -> None:
    (line,) = [line for line in done.stdout.splitlines() if KEPT in line and "poisoned" in line]
    assert "_flat_param" in line


def test_the_readme_has_the_lines_that_are_printed(done: Run) -> None:
    printed = [line.split() for line in done.stdout.splitlines()]
    text = (_KEPT_ON_GPU / "README.md").read_text()
    quoted = [line.split() for line in text.split("```")[3].splitlines() if line.strip()]
    assert quoted
    for words in quoted:
        assert any(line[: len(words)] == words for line in printed), words


# verl-4229: a rollout worker that loads the model which it does not need.

_REDUNDANT_LOAD = ROOT / "examples" / "verl-4229"
_VERSIONS = ("--framework-version", "0.7.0", "--torch-version", "2.9")
_REMEDY = "actor_rollout_ref.actor.fsdp_config.param_offload=True"


def _rollout_doctor(*arguments: str) -> Done:
    return doctor(*arguments, env={"COLUMNS": "120"}, cwd=_REDUNDANT_LOAD)


def _rollout_text(file: str) -> str:
    return (_REDUNDANT_LOAD / file).read_text(encoding="utf-8")


def test_check_finds_the_settings_that_meet() -> None:
    done = _rollout_doctor("check", "config.txt", *_VERSIONS)
    assert (done.stdout, done.code) == (_rollout_text("check.txt"), 1)
    assert "actor_rollout_ref.actor.fsdp_config.fsdp_size=1 (config.txt:3)" in done.stdout
    assert "issue 4229" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [(_REMEDY, *_VERSIONS), ("--framework-version", "0.9.0"), ("~async_training", *_VERSIONS)],
    ids=["the remedy", "a version that does not load it", "not asynchronous"],
)
def test_check_finds_it_nowhere_else(arguments: tuple[str, ...]) -> None:
    assert "issue 4229" not in _rollout_doctor("check", "config.txt", *arguments).stdout


def test_the_plan_has_the_model_on_the_device_at_the_engines_start() -> None:
    arguments = ("memory", "plan", "--config", "config.txt", "--gpu-memory", "24GiB")
    done = _rollout_doctor(*arguments, "--framework-version", "0.7.0")
    assert (done.stdout, done.code) == (_rollout_text("plan.txt"), 1)
    assert "rollout worker: engine starts  does not fit" in done.stdout
    assert "that it never uses 5.7" in done.stdout
    newer = _rollout_doctor(*arguments, "--framework-version", "0.9.0")
    assert "rollout worker: engine starts\n" in newer.stdout


def test_the_two_processes_are_as_the_example_shows_them() -> None:
    needs_emulation()
    (command,) = re.findall(r"\| `python (engine_beside_trainer[^`]*)`", _rollout_text("README.md"))
    done = run(sys.executable, *command.split(), env={"PYTHONPATH": str(ROOT)}, cwd=_REDUNDANT_LOAD)
    assert (done.stdout, done.code) == (_rollout_text("rollout.txt"), 1), done.stderr
    loaded, _, alone = done.stdout.partition("FSDP model not loaded")
    assert "Free memory on device" in loaded
    assert "the engine started" in alone
