"""``--resume`` goes on with results that were made under the same conditions, and with no others."""

from __future__ import annotations

import json
import pathlib

import pytest
from program import Run, probe

_CASES = ("--case", "fsdp2/none/staged/unshard", "--case", "fsdp2/none/staged/dcp")


@pytest.fixture(scope="module")
def partial(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A report of the first case, as a run that was killed after it would leave it."""
    directory = tmp_path_factory.mktemp("partial")
    done = probe(directory, *_CASES[:2])
    assert done.code == 0, done.stderr
    data = json.loads((directory / "report.json").read_text())
    return json.dumps(data | {"complete": False, "num_selected": 2})


def _resumed(directory: pathlib.Path, text: str, *arguments: str) -> Run:
    (directory / "report.json").write_text(text)
    return probe(directory, *_CASES, "--resume", *arguments)


def test_a_run_under_the_same_conditions_goes_on(tmp_path: pathlib.Path, partial: str) -> None:
    done = _resumed(tmp_path, partial)
    assert done.code == 0, done.stderr
    data = json.loads((tmp_path / "report.json").read_text())
    assert [result["method"] for result in data["results"]] == ["unshard", "dcp"]
    assert data["results"][0] == json.loads(partial)["results"][0]
    assert data["complete"]


def test_a_resumed_run_uses_the_device_of_its_report(tmp_path: pathlib.Path, partial: str) -> None:
    """Covers ``auto`` that found an accelerator which is not there now, and would find the emulated device."""
    asked_for_auto = partial.replace(" --device cpu", "")
    assert asked_for_auto != partial
    of_a_gpu = json.dumps(json.loads(asked_for_auto) | {"device": "cuda"})
    assert _resumed(tmp_path, asked_for_auto).code == 0
    refused = _resumed(tmp_path, of_a_gpu)
    assert refused.code == 2
    assert "--resume: the report is of 2 ranks of cuda with torch " in refused.stderr
    assert "this run is of 2 ranks of cpu with torch " in refused.stderr
    assert (tmp_path / "report.json").read_text() == of_a_gpu


@pytest.mark.parametrize(
    ("changed", "arguments", "said"),
    [
        ({}, ("--nproc", "1"), "this run is of 1 rank of cpu"),
        ({}, ("--host-memory", "64GiB"), "and options '--nproc 2 --host-memory"),
        ({"torch": "2.6.0"}, (), "the report is of 2 ranks of cpu with torch 2.6.0 and"),
    ],
)
def test_another_number_of_ranks_another_torch_and_other_options_are_refused(
    tmp_path: pathlib.Path, partial: str, changed: dict[str, str], arguments: tuple[str, ...], said: str
) -> None:
    data = json.loads(partial)
    data["environment"]["packages"] |= changed
    refused = _resumed(tmp_path, json.dumps(data), *arguments)
    assert refused.code == 2
    assert said in refused.stderr
    assert "Traceback" not in refused.stderr
