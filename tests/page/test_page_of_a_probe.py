"""``fsdp-doctor probe --html``: the page of one run."""

from __future__ import annotations

import pathlib

from program import probe


def test_a_probe_writes_the_page_of_its_run(tmp_path: pathlib.Path) -> None:
    page = tmp_path / "page.html"
    run = probe(tmp_path, "--case", "fsdp2/none/unstaged/state_dict", "--html", str(page))
    assert run.code == 0, run.stderr
    assert '"paths":["state_dict"]' in page.read_text()
