"""What a full disk ends leaves no half of a file, and what was there stays."""

from __future__ import annotations

import contextlib
import pathlib
import resource
import signal
from collections.abc import Iterator

import pytest

from fsdp_doctor.report.whole_file import replace_file


@contextlib.contextmanager
def no_file_above_a_page() -> Iterator[None]:
    """The kernel refuses to write more, as a full disk does; to pytest's own output, too."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


def test_what_cannot_be_written_whole_leaves_what_was_there(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "page.html"
    replace_file(file, "before")
    with no_file_above_a_page(), pytest.raises(OSError, match="File too large"):
        replace_file(file, b"x" * 100_000)
    assert file.read_text() == "before"
    assert [one.name for one in tmp_path.iterdir()] == ["page.html"]
