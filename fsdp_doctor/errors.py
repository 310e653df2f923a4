"""The exceptions that end the program, as a tree, and parts of their sentences.

    FsdpDoctorError
    +-- UsageError      exit 2    the command cannot mean anything: say it differently
    +-- CannotRun       exit 3    the command is fine, this machine or this job cannot do it
    +-- DoctorFault     exit 4    the doctor itself broke or lost results
    +-- Interrupted     exit 130  a signal asked the program to stop
    +-- OutputClosed    exit 141  the program that read standard output has ended

A case that breaks is none of these: it is a verdict (``verdict/``). Every message is one
sentence or two for the user: what is wrong, and what to do.
"""

from __future__ import annotations

from collections.abc import Collection

EXIT_OK = 0
EXIT_BAD_VERDICT = 1


def join_some(names: Collection[str], most: int = 5) -> str:
    """The first names, joined by commas, and how many more there are."""
    first = ", ".join(list(names)[:most])
    more = len(names) - most
    return f"{first} and {more} more" if more > 0 else first


def read_first_line(error: BaseException) -> str:
    """The first line of an exception's message, or the exception's type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def escape_controls(text: str) -> str:
    """The text with what a terminal obeys, or takes for the end of a line, as escapes: a name may have anything."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


class FsdpDoctorError(Exception):
    """The command ends here; ``exit_code`` says which kind of end it is."""

    exit_code = 4


class UsageError(FsdpDoctorError):
    exit_code = 2


class CannotRun(FsdpDoctorError):
    exit_code = 3


class DoctorFault(FsdpDoctorError):
    exit_code = 4


class Interrupted(FsdpDoctorError):
    exit_code = 130


class OutputClosed(FsdpDoctorError):
    """Nothing is printed: ``fsdp-doctor list | head -1`` is no mistake. The code is a shell's for SIGPIPE."""

    exit_code = 141
