"""Errors and exit codes.

A message reads `verb object: what is wrong (expected x, got y)`, names a URI and a line where it can, and never
holds prompt text. The `hint` is the reader's next step.
"""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    """What a process says on leaving; `job_definitions/*.json` decide by these what Batch retries."""

    OK = 0
    USAGE = 2
    INPUT = 65
    """Input or plan is wrong: retrying cannot help."""
    ENGINE_BOOT = 69
    """The engine cannot start: model missing, out of memory at load, bad engine argument."""
    ENGINES_DIED = 70
    """Engines kept dying and the restart budget is spent, or a worker met an error nobody thought of; another host may do
    better."""
    PLAN_EXISTS = 73
    """The run exists already, with other inputs or settings; or there is something where `merge` writes. The submitter
    only."""
    INTERRUPTED = 75
    """Interrupted, or storage gave up after its retries: the same work again is expected to succeed."""
    CONFIG = 78
    """Environment or configuration is wrong."""


class ArrayError(Exception):
    """Base of every error that is meant for people. Anything else that escapes is a bug of ours."""

    exit_code: ClassVar[ExitCode] = ExitCode.CONFIG
    code: ClassVar[str] = "error"

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def to_dict(self) -> dict[str, str]:
        """`code`, `message` and, where there is one, `hint`: how an error crosses processes and how `--json` shows it."""
        found = {"code": self.code, "message": self.message}
        return found if self.hint is None else found | {"hint": self.hint}


class UsageError(ArrayError):
    """The command line or an option's value is wrong."""

    exit_code = ExitCode.USAGE
    code = "usage"


class ConfigError(ArrayError):
    """Environment, configuration, credentials or permissions are wrong."""

    exit_code = ExitCode.CONFIG
    code = "config"


class InputError(ArrayError):
    """Input bytes, a plan or a submission are wrong or do not match each other."""

    exit_code = ExitCode.INPUT
    code = "input"


class PlanExistsError(ArrayError):
    """The run's URI holds a plan made of other inputs or settings."""

    exit_code = ExitCode.PLAN_EXISTS
    code = "plan_exists"


class StorageError(ArrayError):
    """Storage did not answer, or refused, after its retries; the same call later may succeed."""

    exit_code = ExitCode.INTERRUPTED
    code = "storage"


class BatchError(ArrayError):
    """AWS Batch did not answer, or its answer is not known, after retries; the same command later settles it."""

    exit_code = ExitCode.INTERRUPTED
    code = "batch"


class EngineBootError(ArrayError):
    """An engine ended before it was ready."""

    exit_code = ExitCode.ENGINE_BOOT
    code = "engine_boot"


class EnginesDiedError(ArrayError):
    """Engines died more often than the restart budget allows."""

    exit_code = ExitCode.ENGINES_DIED
    code = "engines_died"


class InterruptedRunError(ArrayError):
    """A signal or a Spot notice ended the work early."""

    exit_code = ExitCode.INTERRUPTED
    code = "interrupted"

    def __init__(self, message: str, hint: str | None = None, *, reason: str | None = None) -> None:
        super().__init__(message, hint)
        self.reason = reason
        """One word: a signal's name, or `spot_interruption`."""

    def to_dict(self) -> dict[str, str]:
        found = super().to_dict()
        return found if self.reason is None else found | {"reason": self.reason}
