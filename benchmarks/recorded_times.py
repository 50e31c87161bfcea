"""Recorded service times as the simulation takes them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from discrete_events import Gamma, Inference, Measured, Times, Work, constant
from workloads import workload

from htsrl.errors import ConfigError

RECORD = Path(__file__).with_name("results") / "service-times.json"


@dataclass(frozen=True)
class Exchange:
    """What ranks pay to add up their gradients at every gradient step, by recursive halving and doubling."""

    latency_s: float
    bytes_per_second: float

    def seconds(self, ranks: int, parameters: int, gradient_steps: int) -> float:
        """Of one update: at each step 2 log2(R) messages, and 2 (R-1)/R of all float32 gradients sent by every rank."""
        data_s = 4 * parameters / self.bytes_per_second
        return gradient_steps * 2 * (math.ceil(math.log2(ranks)) * self.latency_s + (ranks - 1) / ranks * data_s)


def load(path: Path) -> dict[str, Any]:
    """The record that ``simulate.py measure`` keeps.

    Raises:
        ConfigError: there is none, or it is something else.
    """
    try:
        record = json.loads(path.read_text())
        record["messages"], record["workloads"]
    except FileNotFoundError:
        raise ConfigError(f"there are no times in {path}: run `python benchmarks/simulate.py measure` first") from None
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{path} holds no service times: run `python benchmarks/simulate.py measure`") from None
    return record


def family(name: str) -> str:
    """Under which name the times of workload ``name`` are kept: all that sleep share theirs."""
    return "sleep" if workload(name).sleep else name


def times(record: dict[str, Any], name: str, learner_threads: int = 1) -> Times:
    """The times of workload ``name``, with a learner of so many threads.

    Raises:
        ConfigError: they were not measured.
    """
    kept, messages, sleep = record["workloads"].get(family(name)), record["messages"], workload(name).sleep
    if kept is None:
        raise ConfigError(
            f"{name} was not measured: there is {', '.join(record['workloads'])}; "
            f"run `python benchmarks/simulate.py measure --workload {name}`"
        )
    learning = kept["learning"].get(str(learner_threads))
    if learning is None:
        raise ConfigError(
            f"{name} was measured with {', '.join(kept['learning'])} learner threads, not {learner_threads}"
        )
    inference = kept["inference"]
    return Times(
        step=Measured(tuple(kept["steps"]["slices_s"])),
        asleep=Gamma(sleep.mean_s, sleep.shape) if sleep else constant(0.0),
        oversleep_s=messages["oversleep_s"],
        turn_s=messages["turn_s"],
        arrive_s=kept["steps"]["arrive_s"],
        hop_s=messages["hop_s"],
        inference=Inference(
            tuple(inference["buckets"]), tuple(inference["bucket_s"]), inference["more_s"], messages["tell_s"]
        ),
        learning=Work(**learning),
        record=Work(**kept["record"]),
        noise=Work(**kept["noise"]),
        between=Work(**kept["between"]),
    )
