"""The catalogue: entries are complete, match the messages as reported, and are expected in the cases that they name."""

from __future__ import annotations

import fnmatch
import re
import sys

import pytest
from support.places import TESTS

from fsdp_doctor.errors import UsageError
from fsdp_doctor.known.catalogue import (
    BrokenCase,
    KnownFailure,
    find_entry,
    find_shown_entry,
    list_expected_failures,
    match_message,
    read_catalogue,
    read_entries,
)
from fsdp_doctor.known.clues import CLUES
from fsdp_doctor.known.failures import RankRange
from fsdp_doctor.known.run_context import RunContext
from fsdp_doctor.known.signatures import find_anchor, list_readings
from fsdp_doctor.matrix.axes import AXES
from fsdp_doctor.matrix.cases import AnyCase
from fsdp_doctor.matrix.frameworks.framework_matrix import FrameworkMatrix, read_matrix
from fsdp_doctor.matrix.methods import FIX, METHOD_NAMES
from fsdp_doctor.matrix.selection import Selection, select
from fsdp_doctor.verdict.classification import MEANING

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_MESSAGES: dict[str, list[str]] = tomllib.loads((TESTS / "known" / "messages.toml").read_text())["messages"]
_REPRODUCED = [entry for entry in read_catalogue() if entry.reproduced]


# Of frameworks that their entries speak of, the newest of these that shows it is taken.
_PACKAGES = [{"accelerate": version, "peft": "0.21.2", "verl": "0.9.1"} for version in ("1.6.0", "1.12.0", "1.15.0")]


def _case(case_id: str) -> AnyCase:
    return select(Selection(case_ids=(case_id,)))[0]


def _context(entry: KnownFailure, torch: str) -> RunContext:
    """Returns where the evidence of an entry is to show it."""
    packages = next(packages for packages in reversed(_PACKAGES) if entry.shows_with(packages))
    return RunContext(torch=torch, device=entry.evidence_device or "emulated", packages=packages)


_VALUES = {"method": METHOD_NAMES} | {axis.name: tuple(axis.values) for axis in AXES}


def _values_of(matrix: FrameworkMatrix) -> dict[str, tuple[str, ...]]:
    axes = {axis.name: tuple(axis.values) for axis in matrix.axes}
    return axes | {"framework": (matrix.name,), "method": tuple(method.name for method in matrix.methods)}


def test_there_are_at_least_45_entries_each_under_its_own_id() -> None:
    ids = [entry.id for entry in read_catalogue()]
    assert len(ids) >= 45
    assert len(set(ids)) == len(ids)


def test_a_short_code_is_of_one_entry_and_is_never_given_again() -> None:
    given = tomllib.loads((TESTS / "known" / "codes.toml").read_text())
    assert list(given) == [f"FD{number:03}" for number in range(1, len(given) + 1)]
    assert len(set(given.values())) == len(given)
    for entry in read_catalogue():
        assert given.get(entry.short_code) == entry.id, f"{entry.id}: the next free code is FD{len(given) + 1:03}"


def test_an_entry_has_cause_remedy_references_and_means_of_recognition() -> None:
    for entry in read_catalogue():
        assert entry.verdict in MEANING, entry.id
        assert all((entry.title, entry.cause, entry.remedy, entry.references)), entry.id
        assert entry.signatures or entry.check, entry.id
        assert set(entry.needs) <= set(CLUES), entry.id
        assert bool(entry.frames) == bool(entry.place), entry.id
        assert not entry.title.endswith("."), entry.id
        assert "turn offload off" not in entry.remedy.lower(), entry.id


def test_a_switch_that_a_remedy_sets_is_in_its_text() -> None:
    for entry in read_catalogue():
        for framework, switches in entry.remedy_settings.items():
            text = entry.remedies[framework].lower()
            for name, on in switches.items():
                assert re.search(rf"\b{name}(?:=|: ){str(on).lower()}\b", text), (entry.short_code, name)
    switched = {name for entry in read_catalogue() for each in entry.remedy_settings.values() for name in each}
    assert {"offload_policy", "cpu_offload", "fsdp_offload_params"} <= switched


def test_a_trigger_names_axes_and_values_that_there_are() -> None:
    for entry in read_catalogue():
        for trigger in entry.triggers:
            framework = trigger.values.get("framework", ())
            values = _values_of(read_matrix(framework[0])) if framework else _VALUES
            for axis, patterns in trigger.values.items():
                for pattern in patterns:
                    assert fnmatch.filter(values[axis], pattern.removeprefix("!")), f"{entry.id}: {axis}={pattern}"


@pytest.mark.parametrize(
    ("ranks", "inside"), [(RankRange(), (1, 2, 64)), (RankRange(min=2), (2, 64)), (RankRange(max=1), (1,))]
)
def test_a_range_of_ranks_has_both_ends(ranks: RankRange, inside: tuple[int, ...]) -> None:
    assert tuple(number for number in (0, 1, 2, 64) if number in ranks) == inside


@pytest.mark.parametrize("entry", _REPRODUCED, ids=lambda entry: entry.id)
def test_the_evidence_is_a_case_that_the_entry_is_expected_in(entry: KnownFailure) -> None:
    torch = "" if not entry.torch else next(v for v in ("2.11.0", "2.13.0") if entry.shows_on(v))
    assert list_expected_failures(_case(entry.evidence), _context(entry, torch))[0] is entry


def test_the_message_as_reported_finds_its_entry_first() -> None:
    for name, message in ((name, text) for name, texts in _MESSAGES.items() for text in texts):
        matches = match_message(message)
        if find_entry(name).frames:
            assert matches == [], message
            assert next(entry.id for entry in read_catalogue() if entry.matches_message(message)) == name
        else:
            assert matches[0].id == name, message


def test_every_signature_has_a_reported_message_that_it_matches() -> None:
    texts = [text for texts in _MESSAGES.values() for text in texts]
    for entry in read_catalogue():
        for pattern in entry.signatures:
            assert any(entry.matches_message(text) for text in texts), f"{entry.id}: no message for {pattern.pattern}"


@pytest.mark.parametrize(
    ("message", "traceback", "expected"),
    [
        (
            "RuntimeError: No backend type associated with device type cpu",
            "in clip_grad_norm_",
            "clip-grad-cpu-shard-nccl-only",
        ),
        (
            "RuntimeError: No backend type associated with device type cpu",
            "in full_tensor",
            "full-tensor-cpu-shard-nccl-only",
        ),
        ("torch.OutOfMemoryError: CUDA out of memory.", "in _broadcast_state_dict", "dsd-load-oom-broadcast"),
        ("torch.OutOfMemoryError: CUDA out of memory.", "in full_tensor", "full-gather-runs-out-of-memory"),
        (
            "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0, cpu",
            'File "torch/optim/adamw.py", line 220, in step',
            "optim-on-wrong-device-after-offload",
        ),
    ],
)
def test_of_entries_with_one_message_the_traceback_decides(message: str, traceback: str, expected: str) -> None:
    assert match_message(message, traceback)[0].id == expected


@pytest.mark.parametrize(
    ("key", "value", "wrong"),
    [
        ("cuase", "'x'", "`cuase`"),
        ("cause", "3", "'int'"),
        ("verdict", "'crashed'", "$.verdict"),
        ("signatures", "['(']", "unterminated"),
        ("versions", "{ torch = 'new' }", "$.versions"),
        ("needs", "['gpu']", "$.needs"),
        ("check", "'peft 0.21: it is empty.'", "versions does not name peft"),
        ("triggers", "[{ device = 'tpu' }]", "$.triggers[0].device"),
        ("triggers", "[{ ranks = { least = 2 } }]", "`least`"),
    ],
)
def test_a_mistake_in_an_entry_is_named_with_its_file_and_entry(key: str, value: str, wrong: str) -> None:
    fields = {
        "short_code": "'FD000'",
        "id": "'broken'",
        "title": "'t'",
        "verdict": "'crash'",
        "cause": "'c'",
        "remedy": "'r'",
        "remedy_run": "'not run'",
        "evidence": "'e'",
    }
    text = "[[failure]]\n{}\n"
    (entry,) = read_entries(text.format("\n".join(f"{name} = {written}" for name, written in fields.items())), "1_a")
    assert (entry.id, entry.group) == ("broken", "a")
    with pytest.raises(ValueError, match=r"^1_a\.toml, entry broken: ") as raised:
        read_entries(text.format("\n".join(f"{k} = {v}" for k, v in {**fields, key: value}.items())), "1_a")
    assert wrong in str(raised.value)


def test_an_entry_that_does_not_exist_is_refused_with_the_nearest_ones() -> None:
    with pytest.raises(UsageError, match="fsdp2-pinned-policy-half-moved"):
        find_entry("fsdp2-pinned-policy-halfmoved")


@pytest.mark.parametrize("name", ["FD014", "fd014", "FD14", "fd14"])
def test_a_short_code_is_found_in_any_case_and_without_zeros(name: str) -> None:
    assert find_entry(name).short_code == "FD014"


def test_a_code_beyond_the_last_is_refused_with_the_last() -> None:
    last = max(entry.short_code for entry in read_catalogue())
    with pytest.raises(UsageError, match=last):
        find_entry("FD9999")


def test_the_fix_is_expected_to_fail_only_after_weights_are_lost() -> None:
    cases = select(Selection(level="full", methods=(FIX,)))
    expected = {entry.id for case in cases for entry in list_expected_failures(case, RunContext())}
    assert expected == {"nonblocking-offload-uneven-shards"}


def test_what_was_extracted_wrong_outranks_what_the_next_step_said() -> None:
    broken = BrokenCase(
        kind="misplaced",
        reasons=("on cpu where cuda was promised: model.norm.weight",),
        messages=(
            "RuntimeError: attempting to assign a gradient with device type 'cpu' to a tensor with device type 'cuda'",
        ),
    )
    entry = find_shown_entry(_case("fsdp2/policy/staged/parameters.full_tensor"), broken, RunContext())
    assert entry is not None
    assert entry.id == "half-moved-gathers-on-the-host"


def test_what_a_signature_matches_has_its_anchor_in_it() -> None:
    messages = [reading for texts in _MESSAGES.values() for text in texts for reading in list_readings(text)]
    for pattern in (pattern for entry in read_catalogue() for pattern in entry.signatures):
        matching = [text for text in messages if pattern.search(text)]
        assert matching, pattern.pattern
        assert all(find_anchor(pattern) in text for text in matching), pattern.pattern
