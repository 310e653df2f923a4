"""A run that other processes saved is gone on with: by as many ranks bit by bit as if it had never stopped."""

from __future__ import annotations

import pathlib
from typing import cast

import pytest
from program import Run, probe, user_methods

from fsdp_doctor.errors import UsageError
from fsdp_doctor.machine import devices
from fsdp_doctor.machine.devices import RunDevice
from fsdp_doctor.machine.launch import Place
from fsdp_doctor.machine.signals import Interruption
from fsdp_doctor.matrix.cases import Case, make_scenario
from fsdp_doctor.probe.checkpoint_writers import CheckpointWriters, choose_num_writers
from fsdp_doctor.probe.deadlines import Limits
from fsdp_doctor.probe.job import Job

_ONE_STATE = ("--direction", "in", "--offload", "none", "--staging", "unstaged")
_METHODS = ("--method", "dcp.load.model+optimizer,rank_files.model+optimizer")
_STRATEGIES = ("fsdp2", "fsdp1")


def _result(run: Run, strategy: str, checkpoint: str, method: str) -> tuple[str, str]:
    """The verdict and its reason."""
    verdict = run.result(f"{strategy}/none/unstaged/fresh/{checkpoint}/{method}").verdict
    return verdict.kind, verdict.reason


@pytest.fixture(scope="module")
def of_as_many(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return probe(
        tmp_path_factory.mktemp("of_as_many"), *_ONE_STATE, *_METHODS, "--checkpoint", "other-run", device="emulated"
    )


@pytest.fixture(scope="module", params=[(2, 1), (1, 2), (2, 3)], ids=lambda pair: f"{pair[0]} to {pair[1]}")
def of_others(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    saved_by, ranks = request.param
    numbers = ("--nproc", str(ranks), "--saved-by", str(saved_by))
    directory = tmp_path_factory.mktemp("of_others")
    return probe(directory, *_ONE_STATE, *_METHODS, "--checkpoint", "other-world", *numbers, device="emulated")


@pytest.mark.parametrize("method", ["dcp.load.model+optimizer", "rank_files.model+optimizer"])
@pytest.mark.parametrize("strategy", _STRATEGIES)
def test_as_many_ranks_go_on_as_the_run_that_was_saved(of_as_many: Run, strategy: str, method: str) -> None:
    assert _result(of_as_many, strategy, "other-run", method) == ("ok", "")


@pytest.mark.parametrize("strategy", _STRATEGIES)
def test_another_number_of_ranks_loads_a_distributed_checkpoint(of_others: Run, strategy: str) -> None:
    assert _result(of_others, strategy, "other-world", "dcp.load.model+optimizer") == ("ok", "")


@pytest.mark.parametrize("strategy", _STRATEGIES)
def test_files_of_another_number_of_ranks_are_refused_on_every_rank(of_others: Run, strategy: str) -> None:
    kind, reason = _result(of_others, strategy, "other-world", "rank_files.model+optimizer")
    assert kind == "refused"
    assert reason.startswith("FileNotFoundError")
    assert "the checkpoint/rank_files/model_world_size_" in reason


def test_nothing_is_left_of_a_saved_run(of_as_many: Run, of_others: Run) -> None:
    assert of_as_many.left == of_others.left == []
    assert of_as_many.code == of_others.code == 0


@pytest.fixture(scope="module")
def by_own_loaders(tmp_path_factory: pytest.TempPathFactory) -> Run:
    names = ("loads_all", "loads_another_moment", "loads_all_and_trains_otherwise")
    selected = (*_ONE_STATE, "--strategy", "fsdp2", "--checkpoint", "other-run,other-world", "-k", "faults")
    return probe(tmp_path_factory.mktemp("own"), *selected, *user_methods(*(f"saving:{name}" for name in names)))


@pytest.mark.parametrize("checkpoint", ["other-run", "other-world"])
@pytest.mark.parametrize(
    ("loader", "kind"),
    [("loads_all", "ok"), ("loads_another_moment", "wrong"), ("loads_all_and_trains_otherwise", "poisoned")],
)
def test_a_loader_of_ones_own_is_held_against_the_saved_run(
    by_own_loaders: Run, checkpoint: str, loader: str, kind: str
) -> None:
    assert by_own_loaders.kind(f"/{checkpoint}/faults.saving:{loader}") == kind


def test_the_report_tells_how_many_ranks_saved(of_as_many: Run, by_own_loaders: Run) -> None:
    note = "A checkpoint of other-world is saved by 3 ranks."
    assert by_own_loaders.report is not None
    assert of_as_many.report is not None
    assert note in by_own_loaders.report.notes
    assert note not in of_as_many.report.notes


def test_the_number_that_loads_is_no_other_number(tmp_path: pathlib.Path) -> None:
    run = probe(tmp_path, *_ONE_STATE, *_METHODS, "--checkpoint", "other-world", "--saved-by", "2")
    assert run.code == 2
    assert "--saved-by 2 is this run's own number of ranks; use --checkpoint other-run for it" in run.stderr


@pytest.mark.parametrize(("ranks", "there_are", "number"), [(2, 8, 3), (8, 8, 7), (2, 2, 1), (1, 1, 0)])
def test_another_number_is_one_more_where_each_has_a_device(
    monkeypatch: pytest.MonkeyPatch, ranks: int, there_are: int, number: int
) -> None:
    monkeypatch.setattr(devices, "count", lambda device_type: there_are)
    assert choose_num_writers(None, ranks, "cuda") == number
    assert choose_num_writers(5, ranks, "cuda") == 5
    with pytest.raises(UsageError):
        choose_num_writers(ranks, ranks, "cuda")


@pytest.mark.parametrize(("saved_by", "num_nodes", "kind"), [(0, 1, "unsupported"), (0, 2, None)])
def test_one_device_has_no_other_number_of_ranks(
    tmp_path: pathlib.Path, saved_by: int, num_nodes: int, kind: str | None
) -> None:
    """A case of several nodes says itself why it cannot be run."""
    scenario = make_scenario(
        {"strategy": "fsdp2", "offload": "none", "staging": "unstaged", "phase": "fresh", "checkpoint": "other-world"}
    )
    job = Job(
        device=RunDevice(type="cpu"),
        cases=(Case(scenario, "dcp.load"),),
        user_methods=(),
        custom_model=None,
        scratch=tmp_path,
    )
    place = Place(rank=0, world_size=num_nodes, local_rank=0, num_nodes=num_nodes)
    # No process is started, so none could be interrupted.
    result = CheckpointWriters(place, job, Limits(), cast(Interruption, None), saved_by=saved_by).write_for(0)
    assert (result.verdict.kind if result is not None else None) == kind
