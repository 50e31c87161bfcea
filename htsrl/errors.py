"""The errors that reach a user. Each carries one sentence that says what is wrong and what to do about it."""


class HtsrlError(Exception):
    """Base class; the command line prints its message without a traceback."""

    exit_status = 1


class ConfigError(HtsrlError):
    """A setting, file or environment was refused before any process started."""

    exit_status = 2


class RunFailed(HtsrlError):
    """A run could not go on: its message holds the failing process's own traceback."""


class EnvironmentFailed(RunFailed):
    """An environment raised, or returned something that can't be stored."""
