"""The exceptions that end the program, as a tree.

    FsdpDoctorError
    +-- UsageError      exit 2    the command is invalid: the user must write it differently
    +-- CannotRun       exit 3    the command is valid, but this machine or this job cannot carry it out
    +-- DoctorFault     exit 4    fsdp-doctor itself failed or lost results
    +-- Interrupted     exit 130  a signal asked the program to stop
    +-- OutputClosed    exit 141  the program that read standard output has ended

A failed case raises none of these exceptions: the case gets a verdict (``verdict/``). Every message tells the user in
one or two sentences what is wrong and what to do.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_BAD_VERDICT = 1


class FsdpDoctorError(Exception):
    """Base of the exceptions that end the program. ``exit_code`` is the exit code of the process."""

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
    """Ends the program silently after the reader of its output has closed the pipe, as ``head -1`` does.

    The exit code is the code that shells give for SIGPIPE.
    """

    exit_code = 141
