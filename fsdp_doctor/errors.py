"""The exceptions that end the program, as a tree.

    FsdpDoctorError
    +-- UsageError      exit 2    the command has no meaning: the user must write it differently
    +-- CannotRun       exit 3    the command is valid, but this machine or this job cannot carry it out
    +-- DoctorFault     exit 4    the doctor itself broke or lost results
    +-- Interrupted     exit 130  a signal asked the program to stop
    +-- OutputClosed    exit 141  the program that read standard output has ended

A case that fails raises none of these: it gets a verdict (``verdict/``). Every message tells the user in one or two
sentences what is wrong and what to do.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_BAD_VERDICT = 1


class FsdpDoctorError(Exception):
    """Ends the command. ``exit_code`` is the exit code of the process."""

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
    """Ends the program silently after its reader has closed the pipe, as in ``fsdp-doctor list | head -1``.

    The exit code is the one that shells give for SIGPIPE.
    """

    exit_code = 141
