"""`fsdp-doctor check` reads a configuration, and reports what is known of the cases that it amounts to."""

from __future__ import annotations

import io
import pathlib
import re
import sys

import pytest
from support.checked import ACTOR, CONFIGS, FSDP2, GOOD, checked, flag, said, use_of

from fsdp_doctor.check import cases, check, presentation, reading
from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.cases import parse_case_id
from fsdp_doctor.matrix.paths import PATH_NAMES, paths_for

# Reading


@pytest.mark.parametrize("file", GOOD)
def test_every_case_that_is_named_can_be_given_to_probe(file: str) -> None:
    found = cases(checked(file))
    assert found
    for case in found:
        assert parse_case_id(case.id, PATH_NAMES) == case
        assert case.path in {path.name for path in paths_for(case.scenario)}


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        ("broken.yaml", "broken.yaml:4: invalid YAML: "),
        ("broken.toml", "broken.toml:3: invalid TOML: Invalid value"),
        ("broken.json", "broken.json:2: invalid JSON: Expecting value"),
        ("binary.yaml", "is not a text file in UTF-8"),
        ("empty.yaml", "is empty"),
        (
            "deepspeed.yaml",
            "not a configuration of a supported framework, or not enough of one to know it by; these are supported",
        ),
        ("accelerate_v3.yaml", "accelerate_v3.yaml:4): the version of FSDP in fsdp_config must be 1 or 2"),
        ("nosuch.yaml", "cannot read nosuch.yaml: No such file"),
    ],
)
def test_what_cannot_be_read_is_one_sentence_with_its_line(file: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=re.escape(sentence)) as raised:
        checked(file)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        (".yaml", "a: &a\n  b: *a\n"),
        (".yaml", "- a\n- b\n"),
        (".yaml", "a: !!python/object:os.system x\n"),
        (".yaml", "a: 2026-99-99\n"),
        (".yaml", "a: \x07\n"),
        (".yaml", "a: " + "[" * 5000 + "\n"),
        (".json", "[" * 100_000),
        (".json", "[1, 2]"),
        (".json", '{"a": ' + "1" * 5000 + "}"),
        (".toml", "a = " + "[" * 100_000),
        (".txt", "there is nothing here: at all\nor is there\n"),
        (
            ".yaml",
            "a0: &a0 {b: 1, c: 2}\n" + "".join(f"a{i + 1}: &a{i + 1} {{b: *a{i}, c: *a{i}}}\n" for i in range(40)),
        ),
    ],
)
def test_hostile_text_is_a_usage_error(suffix: str, text: str, tmp_path: pathlib.Path) -> None:
    file = tmp_path / f"config{suffix}"
    file.write_text(text)
    with pytest.raises(UsageError):
        check([str(file)])


def test_a_pasted_report_gives_its_overrides_with_their_lines() -> None:
    settings = reading.read([str(CONFIGS / "verl_issue.md")])
    found = {row.key: (row.value, row.where.rpartition(":")[2]) for row in settings}
    assert found[f"{ACTOR}.fsdp_config.offload_policy"] == (True, "18")  # from the variable offload
    assert found[f"{ACTOR}.strategy"] == ("fsdp2", "16")  # quoted; not the line that is commented out
    assert found["actor_rollout_ref.model.path"] == ("Qwen/Qwen3-4B", "15")  # a variable's own default
    assert found[f"{ACTOR}.fsdp_config.fsdp_size"] == (-1, "19")  # ++
    assert found["trainer.use_legacy_worker_impl"] == ("disable", "22")  # +
    assert found["data.train_files"] == (["gsm8k/train.parquet"], "14")


def test_two_quoted_overrides_on_a_line_are_two_settings(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text("python main.py 'a.b=True' \"c.d=[x, y]\" `e.f=1`, and g.h=2.\n")
    rows = {row.key: row.value for row in reading.read([str(file)]) if not row.key.startswith("launch.")}
    assert rows == {"a.b": True, "c.d": ["x", "y"], "e.f": 1, "g.h": 2}


def test_the_standard_input_may_be_a_whole_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    data = (CONFIGS / "verl_fsdp1.yaml").read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    result = check(["-"], framework_version="0.9.0")
    assert use_of(result, "actor").scenario is not None
    assert "standard input:3" in presentation.as_text(result)


def test_a_fenced_block_of_a_report_is_read_in_its_own_format_and_keeps_its_lines(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "report.md"
    file.write_text("It hangs with:\n\n```yaml\nfsdp_config:\n  fsdp_version: 2\n```\n\nSee: above.\n")
    assert [str(row) for row in reading.read([str(file)])] == [f"fsdp_config.fsdp_version=2 ({file}:5)"]
    assert use_of(check([str(file)], framework_version="1.7"), "model").scenario.strategy == "fsdp2"


def test_an_override_replaces_a_file_wherever_it_stands_and_a_tilde_takes_away() -> None:
    key = f"{ACTOR}.fsdp_config.offload_policy"
    for order in (("verl_issue.md", f"{key}=false"), (f"{key}=false", "verl_issue.md"), ("verl_issue.md", f"~{key}")):
        scenario = use_of(checked(*order, version="0.9.0"), "actor").scenario
        assert scenario is not None
        assert scenario.offload == "none"


def test_a_section_that_is_replaced_as_a_whole_loses_what_was_in_it() -> None:
    result = checked("verl_issue.md", f"{ACTOR}.fsdp_config=null", version="0.9.0")
    assert use_of(result, "actor").scenario.offload == "none"


def test_a_later_file_replaces_an_earlier_one(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "later.yaml"
    file.write_text("actor_rollout_ref: {actor: {strategy: fsdp}}\n")
    result = checked("verl_grpo.yaml", str(file), version="0.9.0")
    assert use_of(result, "actor").scenario.strategy == "fsdp1"


def test_an_interpolation_is_followed_inside_the_file_and_otherwise_said() -> None:
    followed = use_of(checked("verl_grpo.yaml", version="0.9.0"), "ref")
    assert followed.scenario.strategy == "fsdp2"
    result = checked(FSDP2, flag("offload_policy", "${oc.env:OFFLOAD}"))
    assert use_of(result, "actor").scenario is None
    assert "${oc.env:OFFLOAD} (command line) is neither true nor false" in said(result, "unknown")
    assert cases(result) == []


def test_what_decides_which_models_there_are_must_be_readable() -> None:
    result = checked("algorithm.use_kl_in_reward=${oc.env:KL}", FSDP2)
    assert "use_kl_in_reward=${oc.env:KL} (command line) is neither true nor false" in said(result, "unknown")
    assert (cases(result), result.exit_code) == ([], 3)


def test_a_reference_to_itself_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="refers to itself"):
        checked("actor_rollout_ref.actor.strategy=${a.b}", "a.b=${a.b}")
