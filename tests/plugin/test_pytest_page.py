"""The tests in docs/pytest.md are tests, and pass."""

from __future__ import annotations

import pathlib
import re

from support.emulation import needs_emulation
from support.places import ROOT
from support.plugin_runs import run_pytest


def test_every_test_on_the_page_passes(tmp_path: pathlib.Path) -> None:
    needs_emulation()
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "pytest.md").read_text(), re.DOTALL | re.MULTILINE)
    for number, block in enumerate(blocks):
        (tmp_path / f"test_page_{number}.py").write_text(block)
    done = run_pytest(tmp_path, "-p", "no:cacheprovider")
    assert {result.outcome for result in done.results.values()} == {"passed"}, done.run.stdout
    assert len({name.split("[")[0] for name in done.results}) == len(blocks) == 5
