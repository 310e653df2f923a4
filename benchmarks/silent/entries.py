"""The published errors of the benchmark, and the decorator that adds one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

_Defined = TypeVar("_Defined", bound=Callable[..., Any])


class Published(NamedTuple):
    """A published error.

    source: the address of the issue or pull request that reports the error.
    mended_by: the address of the change that mended the error; empty if there is none.
    names: words for the tensor or the value that is wrong, of which the finding must have one.
    first_run: the outcome before fsdp-doctor was changed for the error, if its author had not seen fsdp-doctor's code;
        empty for any other error.
    """

    name: str
    about: str
    source: str
    mended_by: str
    names: tuple[str, ...]
    code: Any
    first_run: str = ""


ERRORS: dict[str, Published] = {}


def publish(
    source: str, mended_by: str = "", *, names: tuple[str, ...], about: str = "", first_run: str = ""
) -> Callable[[_Defined], _Defined]:
    """Makes a class or a function an entry of the benchmark.

    about: a description of the error; empty for the first line of the docstring.
    """

    def enter(defined: _Defined) -> _Defined:
        name = defined.__name__
        told = about or (defined.__doc__ or "").strip().splitlines()[0]
        ERRORS[name] = Published(name, told, _address(source), _address(mended_by), names, defined, first_run)
        return defined

    return enter


def _address(source: str) -> str:
    """Writes ``owner/repository#12`` as an address."""
    repository, _, number = source.partition("#")
    return f"https://github.com/{repository}/issues/{number}" if number else source
