"""The errors that reach a user. Each carries one sentence that says what is wrong and what to do about it."""

from __future__ import annotations

from typing import Any


class HtsrlError(Exception):
    """Base class; the command line prints its message without a traceback."""

    exit_status = 1


class ConfigError(HtsrlError):
    """A setting, file or environment was refused before any process started."""

    exit_status = 2


class RunFailed(HtsrlError):
    """A run could not go on: its message holds the failing process's own traceback."""


class NonFinite(RunFailed):
    """A loss or its gradient is NaN or infinite; carries what there is to look at, as numpy arrays and JSON values."""

    def __init__(self, message: str, numbers: dict[str, Any], tensors: dict[str, Any]) -> None:
        super().__init__(message)
        self.numbers = numbers
        self.tensors = tensors


class EnvironmentFailed(RunFailed):
    """An environment raised, or returned something that can't be stored."""
