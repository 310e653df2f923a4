"""Methods that raise what is hard to tell of, on every rank."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn


class Unprintable(Exception):
    """An exception that has neither a text nor a name for debuggers."""

    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


class WithoutNotes(Exception):
    """An exception that raises where the traceback module asks for its notes."""

    @property
    def __notes__(self) -> list[str]:
        raise ValueError("no notes")


class EndsWhoeverReadsIt(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


class OfItsOwnKind(BaseException):
    """Passes every ``except Exception``."""


def unprintable(model: nn.Module) -> Any:
    raise Unprintable


def from_unprintable(model: nn.Module) -> Any:
    try:
        raise Unprintable
    except Unprintable as error:
        raise RuntimeError("what came of it") from error


def without_notes(model: nn.Module) -> Any:
    raise WithoutNotes("the text")


def ends_whoever_reads_it(model: nn.Module) -> Any:
    raise EndsWhoeverReadsIt


def of_its_own_kind(model: nn.Module) -> Any:
    raise OfItsOwnKind("the text")


def keyboard_interrupt(model: nn.Module) -> Any:
    raise KeyboardInterrupt


def generator_exit(model: nn.Module) -> Any:
    raise GeneratorExit("the text")


def generator_exit_while_it_yields(model: nn.Module) -> Any:
    yield from ()
    raise GeneratorExit("the text")


def enormous(model: nn.Module) -> Any:
    raise RuntimeError("begins so" + "x" * (64 << 20))


def no_unicode(model: nn.Module) -> Any:
    raise RuntimeError("half a pair: \ud800")


def deep(model: nn.Module) -> NoReturn:
    deep(model)


def long_chain(model: nn.Module) -> Any:
    error = None
    for _ in range(2000):
        try:
            raise RuntimeError("the text") from error
        except RuntimeError as again:
            error = again
    assert error is not None
    raise error


def healthy(model: nn.Module) -> Any:
    return ((name, parameter.full_tensor()) for name, parameter in model.named_parameters())
