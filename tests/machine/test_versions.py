"""Tests what is installed against what is needed: by release, and in one sentence where it is too old or missing."""

from __future__ import annotations

import importlib.metadata

import pytest

from fsdp_doctor.errors import CannotRun
from fsdp_doctor.machine.versions import is_at_least, require


@pytest.mark.parametrize(
    "installed",
    ["2.6", "2.10.0", "2.6.0+cu124", "2.6.0a0+git1234", "2.6.0.dev20250101"],
)
def test_a_release_and_what_is_built_towards_it_are_new_enough(installed: str) -> None:
    assert is_at_least(installed, "2.6")


@pytest.mark.parametrize("installed", ["2.5.9+cu130", "1.13", "2"])
def test_what_comes_before_it_is_not(installed: str) -> None:
    assert not is_at_least(installed, "2.6")


@pytest.mark.parametrize(
    ("package", "oldest", "sentence"),
    [
        ("packaging", "9999.1", "is too old; fsdp-doctor needs packaging 9999.1 or newer"),
        ("no-such-package", "1.2", "no-such-package is not installed; install no-such-package 1.2 or newer"),
    ],
)
def test_a_package_that_is_missing_or_too_old_is_refused(package: str, oldest: str, sentence: str) -> None:
    with pytest.raises(CannotRun, match=sentence):
        require(package, oldest)


def test_a_package_that_is_new_enough_is_accepted() -> None:
    require("packaging", importlib.metadata.version("packaging"))
