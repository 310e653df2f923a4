"""Settings of all tests: which start processes, which are of the second tier, and what they share of what costs much.

A test whose file imports what starts them (``_START_PROCESSES``) is marked ``processes``.
Any other one belongs to ``make check`` and fails if it starts a process. ``make test`` runs the first tier, which a
change needs to be trusted; ``make test-all`` the second.
"""

from __future__ import annotations

import gc
import os
import pathlib
import signal
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
# A shell has what it starts in the background ignore Ctrl-C; what tests start from here would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from support.places import SHARED_DIRECTORY

if TYPE_CHECKING:
    from support.ranks import Groups

_START_PROCESSES = (
    *("program", "support.hosts", "support.ranks", "support.forked", "support.plugin_runs"),
    "support.resumed",
)
# Below tests/. So is a file that waits for the default matrix.
_SECOND_TIER = (
    # Whole matrices, whole suites, every script, frozen commands.
    *("benchmarks/", "examples/", "fuzz/", "plan/test_plan_accuracy.py", "plan/test_plan_command.py", "random_models/"),
    *("probe/test_default_matrix.py", "repro/test_minimal_scripts.py", "repro/test_scripts_run.py", "resume/"),
    *("checkpoints/test_classes_of_transformers.py", "checkpoints/test_convert", "emulated/test_pytorch_suite.py"),
    *("checkpoints/test_written_by_frameworks.py", "report/versions/test_sweep.py", "weights/save/test_save_commit.py"),
    # The frameworks, their fixes, and commands in many processes, for which ten minutes leave no time.
    *("fixes/test_fix_command.py", "fixes/test_fix_that_explain_names.py", "fixes/test_fixed_findings.py"),
    *("fixes/test_framework_fixes.py", "fixes/test_patched_releases.py", "fixes/test_verl_example.py"),
    *("frameworks/test_adapters_from_outside.py", "frameworks/test_framework_", "frameworks/test_other_frameworks.py"),
    *("bundle/test_bundle_command.py", "case/test_consumers.py", "case/test_divided_experts.py"),
    *("case/test_quantized_models.py", "checkpoints/test_remedies.py", "cli/test_interpreters.py"),
    *("emulated/test_emulated_build.py", "known/test_remedies_in_jobs.py", "weights/names/test_families.py"),
    *("cli/test_standard_streams.py", "examination/test_memory_command.py", "matrix/test_new_axis_values.py"),
    *("plugin/", "probe/test_saved_runs.py", "probe/test_torchrun.py", "probe/test_two_hosts.py"),
    *("report/page/test_page.py", "weights/extract/test_probes.py"),
)
# The files of the first tier that take longest; after the others, one worker would be left with them.
_LONGEST = (
    *("probe/test_emulation.py", "probe/test_isolation.py", "case/test_planted_", "probe/test_launch.py"),
    *("probe/test_interruption.py", "explain/test_explain_processes.py", "probe/test_expectation.py"),
    *("weights/load/test_load_optimizer_state.py", "corpus/test_log_forms.py", "known/test_expected_of_catalogue.py"),
    *("repro/test_script_text.py", "probe/test_jobs.py"),
)
_EVENTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec"})
_started: list[str] | None = None


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shared = tempfile.TemporaryDirectory()
        os.environ[SHARED_DIRECTORY] = shared.name
        config.add_cleanup(shared.cleanup)


def pytest_collectstart() -> None:
    # Thousands of tests and what they import stay to the end. To look through them for garbage takes half a second
    # each time: not while they are collected, and not when a test asks for it.
    gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and _starts_processes(item):
            item.add_marker("processes")
        if _is_of_second_tier(item):
            item.add_marker("second_tier")
    items.sort(key=_turn)


def _is_of_second_tier(item: pytest.Item) -> bool:
    return _name_file(item).startswith(_SECOND_TIER) or hasattr(getattr(item, "module", None), "default_matrix")


def _name_file(item: pytest.Item) -> str:
    return item.path.relative_to(pathlib.Path(__file__).parent).as_posix()


def _turn(item: pytest.Item) -> tuple[int, int]:
    """The default matrix comes first, then the files that take longest, each after those that take longer.

    The files that wait for the default matrix follow the others that start processes. Last comes what takes no time,
    when one worker has nothing long any more.
    """
    if item.path.stem == "test_default_matrix":
        return 0, 0
    name = _name_file(item)
    if (place := next((place for place, long in enumerate(_LONGEST) if name.startswith(long)), None)) is not None:
        return 1, place
    if not item.get_closest_marker("processes"):
        return 4, 0
    return (3 if hasattr(getattr(item, "module", None), "default_matrix") else 2), 0


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


def _starts_processes(item: pytest.Function) -> bool:
    return any(getattr(value, "__module__", "") in _START_PROCESSES for value in vars(item.module).values())


def _note_a_started_process(event: str, arguments: tuple[Any, ...]) -> None:
    if _started is not None and event in _EVENTS:
        _started.append(f"{event} {arguments[:2]}")
        raise RuntimeError(f"a test that is not marked `processes` starts one: {_started[-1]}")


sys.addaudithook(_note_a_started_process)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    global _started
    _started = None if item.get_closest_marker("processes") else []
    try:
        result = yield
        if _started:
            pytest.fail(f"it started a process: {_started}", pytrace=False)
        return result
    finally:
        _started = None


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    from support.ranks import Groups

    groups = Groups()
    yield groups
    groups.end()
