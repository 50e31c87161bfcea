"""Train a policy: the entry points of a run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

from htsrl import determinism, envs
from htsrl.config import AnyConfig
from htsrl.report import Reporter
from htsrl.resolve import resolve
from htsrl.run import Result, Run
from htsrl.rundir import create_run_dir
from htsrl.tomlfile import save_config


def train(config: AnyConfig) -> Result:
    """Train a policy; returns when the step budget is spent, or after an interrupt with a clean checkpoint.

    Raises:
        ConfigError: a setting, the environment or the run's folder is refused; no process was started.
        RunFailed: a child process, an environment or the update failed; all processes have ended.
    """
    spec = envs.describe(config.env, config.environment)
    config = resolve(config, spec)
    run_dir = create_run_dir(config)
    save_config(config, run_dir / "config.toml")
    determinism.enable(threads=int(config.runtime.learner_threads))
    with (
        closing(Reporter(config, spec, run_dir)) as reporter,
        Run(config, spec, run_dir, reporter) as run,
        interrupts() as stop,
    ):
        run.train(stop)
        return run.result


@contextmanager
def interrupts() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C or SIGTERM sets; the second ends the run at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
