"""Tests marked fsdp, and those of docs/pytest.md: one for each scenario, verified bit by bit on every rank."""

from __future__ import annotations

import re

import pytest
from support.emulation import needs_emulation
from support.places import ROOT
from support.plugin_runs import PytestRun, run_pytest

_PAGE = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "pytest.md").read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> PytestRun:
    needs_emulation()
    directory = tmp_path_factory.mktemp("scenarios")
    for number, block in enumerate(_PAGE):
        (directory / f"test_page_{number}.py").write_text(block)
    return run_pytest(directory, "-p", "no:cacheprovider", suites=["scenarios"])


def test_every_test_on_the_page_passes(scenarios: PytestRun) -> None:
    names = re.findall(r"^def (test_\w+)", "\n".join(_PAGE), re.MULTILINE)
    results = {name: result for name, result in scenarios.results.items() if name.split("[")[0] in names}
    assert {result.outcome for result in results.values()} == {"passed"}, scenarios.run.stdout
    assert len({name.split("[")[0] for name in results}) == len(_PAGE) == 5


def test_a_test_is_one_for_each_scenario_with_its_id(scenarios: PytestRun) -> None:
    ids = [f"{s}/{o}/{g}" for s in ("fsdp2", "fsdp1") for o in ("none", "policy") for g in ("unstaged", "staged")]
    ours = {name: result for name, result in scenarios.results.items() if name.startswith("test_ours")}
    assert sorted(ours) == sorted(f"test_ours[{one}]" for one in ids)
    assert {result.outcome for result in ours.values()} == {"passed"}, [r.text for r in ours.values()]


@pytest.mark.parametrize(
    "name", ["test_on_rank_0s_cpu[fsdp2/param/unstaged]", "test_loads[fsdp1-orig/policy/unstaged/fresh]"]
)
def test_what_a_test_promises_is_what_it_is_held_to(scenarios: PytestRun, name: str) -> None:
    assert scenarios[name].outcome == "passed", scenarios[name].text


@pytest.mark.parametrize("name", ["test_extracts_after_a_step", "test_gives_a_function"])
def test_weights_are_compared_with_those_after_the_last_step(scenarios: PytestRun, name: str) -> None:
    results = {case: result for case, result in scenarios.results.items() if case.startswith(f"{name}[")}
    assert len(results) > 3
    assert {result.outcome for result in results.values()} == {"passed"}, [r.text for r in results.values()]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("test_wrong_on_rank_1[fsdp2/none/unstaged]", "wrong: rank 1: 1 of 64 elements differ, the first at 3"),
        ("test_breaks_training[fsdp2/none/unstaged]", "every rank: poisoned: the extraction changed"),
        (
            "test_half_moved_does_not_train[fsdp2/policy/staged]",
            "every rank: poisoned: RuntimeError: attempting to assign a gradient",
        ),
        ("test_loads_nothing[fsdp2/none/unstaged/fresh]", "every rank: incomplete: still what it was before the load"),
        ("test_gives_the_weights_of_before_the_step[fsdp2/none/unstaged]", "every rank: wrong: "),
        (
            "test_gives_a_function_that_keeps_its_weights[fsdp2/none/unstaged]",
            "every rank: wrong: the second call: stale",
        ),
        ("test_checks_twice[fsdp2/none/unstaged]", "fsdp_case.check() was called before"),
    ],
)
def test_what_is_found_on_any_rank_fails_the_test_on_all(scenarios: PytestRun, name: str, reason: str) -> None:
    result = scenarios[name]
    assert result.outcome == "failed"
    assert result.message.startswith(f"Failed: {reason}")
    assert "ranks 0, 1" in result.text
    assert "    fsdp_case.check(" in result.text, "the line of the test is shown"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("test_needs_four_ranks[fsdp2/none/unstaged/hsdp]", "unsupported: hsdp needs an even number of ranks"),
        ("test_contradicts_itself[fsdp2/none/unstaged/unpinned]", "unsupported: only FSDP2's CPUOffloadPolicy"),
    ],
)
def test_a_scenario_that_cannot_be_built_is_skipped_with_the_reason(
    scenarios: PytestRun, name: str, reason: str
) -> None:
    assert scenarios[name].outcome == "skipped"
    assert reason in scenarios[name].message


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("test_has_an_unknown_axis", "there is no axis 'offlod' (did you mean offload?)"),
        ("test_has_an_unknown_value", "offload: unknown value 'polcy' (did you mean policy"),
        ("test_has_a_value_of_the_probe_alone", "'other-run' is not for tests"),
        ("test_has_no_fixture", "is marked fsdp, but has no argument fsdp_case"),
        ("test_has_a_value_without_its_axis", "takes the axes by name"),
    ],
)
def test_an_fsdp_mark_that_means_nothing_is_one_sentence(scenarios: PytestRun, name: str, sentence: str) -> None:
    assert scenarios[name].outcome == "error"
    assert sentence in scenarios[name].message
    assert len(scenarios[name].message.splitlines()) == 1


def test_a_scenario_is_built_once_for_the_tests_that_leave_it_whole(scenarios: PytestRun) -> None:
    outcomes = [scenarios[f"test_has_the_same_model[fsdp2/none/unstaged-{number}]"].outcome for number in range(3)]
    assert outcomes == ["passed"] * 3
