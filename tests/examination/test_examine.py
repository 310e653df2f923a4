"""``examine`` in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp_doctor import examine


def test_without_a_process_group_a_plain_model_is_reported_as_not_fsdp() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    (finding,) = examine(model, torch.optim.AdamW(model.parameters()), raise_on_bad=True).findings
    assert (finding.kind, finding.severity) == ("not-fsdp", "note")
    assert finding.sentence.startswith("The Sequential is not an FSDP model")


def test_the_examination_prints_as_it_does_for_rich(capsys: pytest.CaptureFixture[str]) -> None:
    import rich

    examination = examine(nn.Linear(2, 2))
    rich.print(examination)
    shown = capsys.readouterr().out
    assert "2 parameters, 0 buffers" in shown
    assert "2 parameters, 0 buffers" in str(examination)
    assert len(repr(examination)) < 500


def test_the_table_is_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    name = "a_module_with_a_long_name" * 3
    text = str(examine(nn.ModuleDict({name: nn.Linear(2, 2), "norm": nn.LayerNorm(2, dtype=torch.bfloat16)})))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80, text
    assert [line for line in lines if line != line.rstrip()] == []
    assert "…" not in text
    assert "placements" not in text, "no tensor has any"


def test_every_entry_that_a_finding_names_is_in_the_catalogue() -> None:
    import inspect
    import re

    from fsdp_doctor.examination import findings, model_findings
    from fsdp_doctor.known import catalogue

    source = inspect.getsource(findings) + inspect.getsource(model_findings)
    kinds = set(re.findall(r'kind="([^"]+)"', source))
    named = set(re.findall(r'"([a-z0-9]+(?:-[a-z0-9]+){3,})"', source)) - kinds
    assert len(named) >= 18
    assert not named - {entry.id for entry in catalogue.read_catalogue()}
