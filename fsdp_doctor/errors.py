"""The exceptions that end the program, as a tree.

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

EXIT_OK = 0
EXIT_BAD_VERDICT = 1


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
