"""The hooks that pytest loads in every environment with this package.

Every run of pytest imports this module, so it imports nothing else of this package before a test is marked.

PYTEST_DONT_REWRITE: a rank imports this module before its own pytest starts. Without this word, pytest would warn that
the module can no longer be rewritten.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fsdp_doctor.plugin import REGISTERED_AS

if TYPE_CHECKING:
    from fsdp_doctor.plugin.fixtures import FsdpCase, ThisRank

_OLDEST = (8, 4)

_FSDP = (
    "fsdp(strategy=..., offload=..., staging=..., ranks=2, ...): the test runs on that many ranks, once for each "
    "scenario of fsdp-doctor's matrix that the values name, with the fixture fsdp_case."
)
_RANKS = "ranks(number=2, device='auto', timeout=None): the test's body and its fixtures run on that many ranks."


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("fsdp-doctor").addoption(
        "--ranks-device",
        metavar="DEVICE",
        default="auto",
        help="Device of the tests that run on ranks: auto, cuda, xpu, cpu, emulated.",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _FSDP)
    config.addinivalue_line("markers", _RANKS)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("fsdp"):
        from fsdp_doctor.plugin import marks

        marks.parametrize_scenarios(metafunc)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    registered = {line.partition(":")[0].partition("(")[0].strip() for line in config.getini("markers")}
    for mark in {mark.name for item in items for mark in item.iter_markers()} - registered:
        if meant := next((name for name in ("fsdp", "ranks") if _is_misspelt(mark, name)), ""):
            raise pytest.UsageError(
                f"there is no mark {mark!r}: write {meant!r}, or register {mark!r} in pytest's ini-file"
            )
    marked = any(item.get_closest_marker(name) for item in items for name in ("fsdp", "ranks"))
    if config.pluginmanager.has_plugin(REGISTERED_AS) or not marked:
        return
    if pytest.version_tuple < _OLDEST:
        raise pytest.UsageError(f"tests marked fsdp or ranks need pytest 8.4 or newer; this is {pytest.__version__}")
    from fsdp_doctor.plugin.ranks_plugin import RanksPlugin

    config.pluginmanager.register(RanksPlugin(config), REGISTERED_AS)


def _is_misspelt(mark: str, name: str) -> bool:
    """Returns whether the mark is the name with letters in another order or one letter missing: ``fspd``, ``rank``."""
    without_one = {name[:at] + name[at + 1 :] for at in range(len(name))}
    return sorted(mark) == sorted(name) or mark in without_one


@pytest.fixture
def fsdp_case(request: pytest.FixtureRequest) -> FsdpCase:
    """A sharded model and its optimizer in the scenario that the test runs in."""
    from fsdp_doctor.plugin import rank_session

    return rank_session.find_session(request).fsdp_case(request)


@pytest.fixture
def this_rank(request: pytest.FixtureRequest) -> ThisRank:
    """The rank on which the test runs: its number, device and process groups."""
    from fsdp_doctor.plugin import rank_session

    return rank_session.find_session(request).this_rank
