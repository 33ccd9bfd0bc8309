"""Every error a user can meet, each with the exit code that the command line returns for it.

A code raised inside a notebook survives papermill: the runner looks the exception's class name up in
`EXIT_CODES`, since all that papermill hands on is the name and the message.
"""

from __future__ import annotations


class RagbuildError(Exception):
    """Base of the errors that a user can act on. The message says what, got, expected, and what to do."""

    exit_code = 1


class StepFailed(RagbuildError):
    """A notebook's cell failed (exit code 1)."""

    exit_code = 1


class UsageError(RagbuildError):
    """A wrong argument, an unknown configuration key or a value out of range (exit code 2)."""

    exit_code = 2


class GateFailed(RagbuildError):
    """A quality gate was not passed (exit code 3)."""

    exit_code = 3


class InputRefused(RagbuildError):
    """None of the input can be used (exit code 4)."""

    exit_code = 4


class NothingToMeasure(InputRefused):
    """There is no question to evaluate with. A step that raises it, after writing its empty files, ends well: the build
    says "not evaluated" and goes on (exit code 4 elsewhere)."""


class MissingResource(RagbuildError):
    """A model, service or optional package is missing; the message names the command that gets it (exit 5)."""

    exit_code = 5


class WorkspaceLocked(RagbuildError):
    """Another writer holds the workspace (exit code 6)."""

    exit_code = 6


class DocumentRefused(RagbuildError):
    """One document cannot be used. It is reported and the others go on; never raised to the command line."""

    exit_code = 4


EXIT_CODES: dict[str, int] = {
    cls.__name__: cls.exit_code
    for cls in (
        RagbuildError, StepFailed, UsageError, GateFailed, InputRefused, NothingToMeasure, MissingResource,
        WorkspaceLocked, DocumentRefused,
    )
}  # fmt: skip
