"""Runs in this process, and those whose every interval is kept: for tests that look at what stood in the storages."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from htsrl import determinism, envs
from htsrl.config import ALGORITHMS
from htsrl.report import Reporter
from htsrl.resolve import resolve
from htsrl.run import Result, Run
from htsrl.rundir import CONFIG, create_run_dir
from htsrl.settings import configure
from htsrl.storage.observations import observations
from htsrl.tomlfile import save_config

FIELDS = (
    "noise", "action", "log_prob", "value", "reward", "terminated", "truncated", "valid",
    "episode_return", "episode_length", "behaviour_version",
)  # fmt: skip


def all_observations(storage: Any) -> np.ndarray:
    """All observations of a storage [T+1, N, *obs], whether it holds them whole or as frames."""
    T, N = storage.reward.shape
    obs = observations(storage, np.arange((T + 1) * N))
    return obs.reshape(T + 1, N, *obs.shape[1:])


@dataclass
class Recording:
    """Copies of every interval's storage, of its behaviour parameters and metrics, and the run's result."""

    intervals: list[dict[str, np.ndarray]]
    parameters: list[np.ndarray]
    metrics: list[dict[str, float]]
    result: Result

    def stacked(self, name: str) -> np.ndarray:
        """One field over the whole run: [intervals * T, N, ...]; obs without each interval's last row."""
        T = len(self.intervals[0]["reward"])
        return np.concatenate([interval[name][:T] for interval in self.intervals])


class RecordingRun(Run):
    """A run that copies every storage before the learner consumes it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.intervals: list[dict[str, np.ndarray]] = []
        self.behaviours: list[np.ndarray] = []
        super().__init__(*args, **options)

    def begin(self, j: int, behaviour: torch.Tensor, version: int) -> None:
        self.behaviours.append(behaviour.cpu().numpy().copy())
        super().begin(j, behaviour, version)

    def consume(self, j: int, record: dict[str, float]) -> None:
        storage = self.storages[j % 2]
        fields = {name: getattr(storage, name).copy() for name in FIELDS}
        self.intervals.append({"obs": all_observations(storage), **fields})
        super().consume(j, record)


class Metrics(Reporter):
    """A reporter that also keeps the records."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.records: list[dict[str, float]] = []

    def interval(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        super().interval(record)


@contextmanager
def opened(
    kind: type[Run], run_dir: Path, reporter: type[Reporter] = Reporter, delay_ms: float = 0.0, **settings: Any
) -> Iterator[Any]:
    """A run of ``kind`` with ``settings``, from its start to its end; its folder is one that can be resumed."""
    config = configure(run_dir=run_dir, **settings)
    spec = envs.describe(config.env, config.environment)
    config = resolve(config, spec)
    create_run_dir(config)
    save_config(config, run_dir / CONFIG)
    determinism.enable()
    with closing(reporter(config, spec, run_dir)) as made, kind(config, spec, run_dir, made, delay_ms=delay_ms) as run:
        yield run


def known_to(algo: str, settings: dict[str, Any]) -> dict[str, Any]:
    """``settings`` without the number of passes and minibatches where ``algo`` makes one of each."""
    foreign = {"epochs", "minibatches"} - ALGORITHMS[algo].model_fields.keys()
    return {name: value for name, value in settings.items() if name not in foreign}


def record(run_dir: Path, env: str, algo: str = "ppo", **settings: Any) -> Recording:
    """Train with ``settings`` (the flat names of the command line) and keep everything."""
    settings = {"env": env, "algo": algo, "progress": "none", "tensorboard": False} | settings
    with opened(RecordingRun, run_dir, Metrics, **settings) as run:
        run.train(threading.Event())
        return Recording(run.intervals, run.behaviours, run.reporter.records, run.result)
