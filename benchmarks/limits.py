"""How fast a workload could possibly be here: the cost of each part alone, and the model of the barrier."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import SimpleNamespace

import numpy as np
import torch
from workloads import Workload, workload

from htsrl import determinism, envs
from htsrl.actors.actor import FlatRows
from htsrl.actors.executor import action_converter
from htsrl.actors.inference import InferenceBatch, invariant_buckets, rows_at_once
from htsrl.config import AnyConfig
from htsrl.envs.spec import EnvSpec
from htsrl.learner.learner import Learner
from htsrl.models import FlatParameters, build_model
from htsrl.resolve import resolve
from htsrl.rng import episode_seed
from htsrl.storage.fields import rollout_fields
from htsrl.storage.observations import begin_row, next_row, observation, open_row

# ------------------------------------------------------------------------------------------------- model of the barrier


@dataclass(frozen=True)
class BarrierModel:
    """Steps per second of N sleeping replicas, were cores unlimited and everything but sleeping free."""

    lockstep: float
    """All wait for all at every step."""
    barrier: float
    """All wait for all once per interval: T·N / E[max over N of Gamma(T·K)]."""
    no_waiting: float
    """Nobody waits for anybody: N / mean."""


def barrier_model(mean_s: float, shape: float, N: int, T: int, draws: int = 20_000) -> BarrierModel:
    """The model of Liu et al. 2020, claim 1, by Monte Carlo. The sum of T Gamma(K) times is Gamma(T·K)."""
    return BarrierModel(
        lockstep=N / (mean_s * expected_maximum(shape, N, draws)),
        barrier=N * T / (mean_s * T * expected_maximum(T * shape, N, draws)),
        no_waiting=N / mean_s,
    )


def expected_maximum(shape: float, n: int, draws: int) -> float:
    """E[max of n], each Gamma of ``shape`` and mean 1; the same for the same arguments."""
    rng = np.random.default_rng(0)
    total, block = 0.0, 1000
    for start in range(0, draws, block):
        rows = min(block, draws - start)
        total += float((rng.standard_gamma(shape, (rows, n)) / shape).max(axis=1).sum())
    return total / draws


# -------------------------------------------------------------------------------------------- each part, measured alone


@dataclass(frozen=True)
class Costs:
    """Seconds per environment step, each part alone: CPU-seconds in one thread.

    On a GPU, inference and learning by the clock, from the call until the GPU has done its work.
    """

    environment: float
    """Stepping (and resetting) all replicas in turn, observations written into a storage."""
    inference: float
    """The actor's forward pass and sampling for all replicas in one batch."""
    learning: float
    """The learner's update on a full storage, all epochs."""
    device: str = "cpu"
    """Where inference and learning are done."""


def steps_limit(costs: Costs, cores: int) -> float:
    """Steps per second, were everything always at work and nothing else to do.

    Cores do all of it, or step environments while a GPU beside them infers and learns: then the slower of the two
    counts.
    """
    on_device = costs.inference + costs.learning
    if costs.device == "cpu":
        return cores / (costs.environment + on_device)
    return min(cores / costs.environment, 1.0 / on_device)


class Bench:
    """A workload's parts without its processes: one storage, the replicas, the policy's batch and the learner."""

    def __init__(self, config: AnyConfig) -> None:
        self.spec: EnvSpec = envs.describe(config.env, config.environment)
        # The learner asserts the lag between data and parameters; with data of our own, 'sync' has the simplest: none
        runtime = config.runtime.model_copy(update={"schedule": "sync", "learner_threads": 1})
        self.config = resolve(config.model_copy(update={"runtime": runtime}), self.spec)
        self.T, self.N = runtime.sync_interval, runtime.num_envs
        determinism.enable()
        self.device = device = torch.device(self.config.runtime.device)
        self.learner = Learner(self.config, self.spec, device)
        # As an actor has it
        self.model = build_model(self.spec, self.config.network, self.config.seed).to(device)
        FlatParameters(self.model, gradients=False)
        at_once = rows_at_once(self.spec, self.N, device)
        self.buckets = invariant_buckets(self.model, self.spec, at_once, device)
        self.batch = InferenceBatch(self.model, self.spec, self.buckets, device)
        fields = rollout_fields(self.spec, self.T, self.N, self.model.head.noise_size, self.model.state_size)
        self.storage = SimpleNamespace(**{each.name: np.zeros(each.shape, each.dtype) for each in fields})
        self.storage.valid[:] = True
        self.replicas = [
            envs.make(config.env, config.environment, masked=self.spec.mask_in_info) for _ in range(self.N)
        ]
        # Where they stand: intervals follow each other as in a run, not always from the first steps of an episode
        self.rng = np.random.default_rng(0)
        self.lengths, self.episodes = [0] * self.N, itertools.count()
        self.obs = [env.reset(seed=episode_seed(0, n, next(self.episodes))) for n, env in enumerate(self.replicas)]

    def fill(self) -> int:
        """Play the next interval with random actions into the storage; returns its steps."""
        storage, spec, rng, lengths = self.storage, self.spec, self.rng, self.lengths
        to_env = action_converter(spec.action, self.config.network.squash_actions)
        if spec.action.kind == "box":
            storage.action[:] = rng.standard_normal(storage.action.shape)
        else:
            storage.action[:] = rng.integers(0, spec.action.nvec, (*storage.action.shape[:2], len(spec.action.nvec)))[
                (..., 0) if spec.action.kind == "discrete" else ...
            ]
        limit = spec.max_episode_steps or sys.maxsize
        for n, obs in enumerate(self.obs):
            open_row(storage, 0, n, obs)
        for t in range(self.T):
            next_obs = next_row(storage, t, slice(0, self.N))
            for n, action in enumerate(to_env(storage.action[t])):
                obs, reward, terminated, truncated, _ = self.replicas[n].step(action)
                storage.reward[t, n] = reward
                storage.terminated[t, n] = terminated
                lengths[n] += 1
                if terminated or truncated or lengths[n] >= limit:
                    obs = self.replicas[n].reset(seed=episode_seed(0, n, next(self.episodes)))
                    begin_row(storage, t + 1, n)
                    lengths[n] = 0
                next_obs[n] = obs
        self.obs = [observation(storage, self.T, n) for n in range(self.N)]
        return self.T * self.N

    def infer(self) -> int:
        """Answer the storage's first rows, one batch for all replicas; returns the steps that stand for."""
        rows = min(self.T, 8)
        storage = FlatRows(self.storage)
        for t in range(rows):
            for start in range(0, self.N, self.batch.largest):
                part = slice(start, min(start + self.batch.largest, self.N))
                size = part.stop - part.start
                storage.take_observations(np.arange(part.start, part.stop) + t * self.N, self.batch.obs[:size])
                self.batch.noise[:size] = self.storage.noise[t, part]
                answer = self.batch.answer(size)
                self.storage.log_prob[t, part], self.storage.value[t, part] = answer.log_prob, answer.value
        return rows * self.N

    def answer(self, rows: int) -> None:
        """Answer ``rows`` waiting rows as an actor does: in as few batches as hold them."""
        for start in range(0, rows, self.batch.largest):
            self.batch.answer(min(self.batch.largest, rows - start))

    def learn(self) -> int:
        """One update on the full storage; returns the steps it stands for."""
        self.storage.behaviour_version[0] = self.learner.version
        self.learner.learn(self.storage, 0.0)
        return self.T * self.N

    def costs(self, seconds: float) -> Costs:
        """Measure each part for about ``seconds`` of wall-clock time."""
        clock = time.process_time if self.device.type == "cpu" else self.device_clock
        try:
            environment = seconds_per_step(self.fill, seconds, time.process_time)
            inference = seconds_per_step(self.infer, seconds, clock)
            learning = seconds_per_step(self.learn, seconds, clock)
        finally:
            self.close()
        return Costs(environment, inference, learning, str(self.device))

    def device_clock(self) -> float:
        """The time when the GPU has done all that it was asked for."""
        torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def close(self) -> None:
        """Close the environments."""
        for env in self.replicas:
            env.close()


def seconds_per_step(part: Callable[[], int], seconds: float, clock: Callable[[], float]) -> float:
    """Time per step of ``part()``, which returns its steps, by ``clock``; about ``seconds`` of measuring.

    The first call warms up unless it fills the time.
    """
    end = time.perf_counter() + seconds
    before = clock()
    steps = part()
    first = (clock() - before) / steps
    if time.perf_counter() >= end:
        return first
    before, steps = clock(), 0
    while steps == 0 or time.perf_counter() < end:
        steps += part()
    return (clock() - before) / steps


def main() -> None:
    """``limits.py WORKLOAD SECONDS SETTINGS``: print the costs as JSON; a process of its own, so nothing lingers."""
    chosen: Workload = workload(sys.argv[1])
    # Sleeping costs no CPU: enough intervals to see the rest would take minutes, so shorten the sleep
    shorter = {"step_ms": 0.01} if chosen.sleep else {}
    costs = Bench(chosen.config(**json.loads(sys.argv[3]), **shorter)).costs(float(sys.argv[2]))
    print(json.dumps(asdict(costs)), flush=True)
    os._exit(0)  # some engines fail when the interpreter takes them apart


if __name__ == "__main__":
    main()
