"""`fsdp-doctor check` refuses in one sentence what it cannot read: closed streams, odd files, text without settings."""

from __future__ import annotations

import pathlib
import sys

import pytest

from fsdp_doctor.check import check, reading
from fsdp_doctor.errors import UsageError


def test_a_closed_standard_input_is_refused_in_a_program_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UsageError, match="standard input is closed; give a file instead of -"):
        check(["-"])


def test_a_block_that_is_not_closed_is_read_to_the_end(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "report.md"
    file.write_text("My configuration:\n\n~~~yaml\ndistributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n")
    assert next(str(row) for row in reading.read([str(file)])) == f"distributed_type=FSDP ({file}:4)"


def test_a_home_that_there_is_not_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"cannot read ~no-such-user-here/config\.yaml"):
        check(["~no-such-user-here/config.yaml"])


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("config.yaml", "- a\n- b\n", "does not contain settings: expected names with values"),
        ("config.json", "[1, 2]", "does not contain settings: expected names with values"),
        ("notes.txt", "nothing here\n", "no settings found in"),
        ("config.json", '{"a":' * 3000 + "1" + "}" * 3000, "it is nested too deeply"),
        ("config.yaml", "a: " + "x" * (4 << 20), "is larger than 4 MiB, too large for a training configuration"),
        ("config.json", '{"a": {' + ",".join(f'"k{i}": 1' for i in range(20_001)) + "}}", "more than 20,000 settings"),
    ],
)
def test_a_file_without_settings_is_told_what_was_expected(
    tmp_path: pathlib.Path, name: str, text: str, sentence: str
) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(UsageError) as raised:
        check([str(file)])
    assert sentence in str(raised.value)
    assert str(file) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_named_like_an_override_is_a_file(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run=1").write_text("a.b=2\n")
    assert [str(row) for row in reading.read(["run=1"])] == ["a.b=2 (run=1:1)"]
