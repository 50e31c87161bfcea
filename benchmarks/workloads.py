"""The throughput benchmark's workloads: environments with fixed settings, the same for this system and its peers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from htsrl.config import AnyConfig
from htsrl.errors import ConfigError
from htsrl.settings import configure

PPO = {"num_envs": 16, "sync_interval": 128, "epochs": 4, "minibatches": 4}
FOOTBALL = PPO | {"epochs": 2, "minibatches": 8}


@dataclass(frozen=True)
class Sleep:
    """A step sleeps for a Gamma-distributed time."""

    mean_s: float
    shape: float


@dataclass(frozen=True)
class Workload:
    """One workload; settings have the names of ``htsrl train`` and stand over the preset's."""

    name: str
    env: str
    algo: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    sleep: Sleep | None = None
    """What the steps do, where they sleep: the barrier model is then the limit, not the cores."""

    def config(self, **settings: Any) -> AnyConfig:
        """The configuration of a run, with ``settings`` over the workload's own.

        Raises:
            ConfigError: a setting is unknown or has a value that it can't have.
        """
        for name in ("env", "algo"):
            if name in settings:
                raise ConfigError(f"{name} is the workload's own, {getattr(self, name)} of {self.name}: leave it out")
        return configure(self.env, self.algo, **{**self.settings, **settings})


FIXED = {
    each.name: each
    for each in (
        Workload("cartpole", "CartPole-v1", "ppo", PPO | {"hidden_sizes": (64, 64)}),
        Workload("pong", "atari:Pong", "ppo", PPO | {"network": "nature"}),
        Workload("pong-a2c", "atari:Pong", "a2c", {"num_envs": 16, "sync_interval": 20, "network": "nature"}),
        Workload("football", "gfootball:academy_3_vs_1_with_keeper", "ppo", FOOTBALL | {"network": "football"}),
        Workload("football-synthetic", "synthetic:football", "ppo", FOOTBALL | {"network": "football"}),
        Workload("mujoco", "HalfCheetah-v5", "ppo", PPO | {"hidden_sizes": (64, 64)}),
    )
}
SLEEP = "sleep-M-K-N"
NAMES = (*FIXED, SLEEP)


def workload(name: str) -> Workload:
    """The workload called ``name``; ``sleep-10-1-16`` is 16 replicas whose steps sleep 10 ms, Gamma of shape 1.

    Raises:
        ConfigError: there is none.
    """
    if name in FIXED:
        return FIXED[name]
    found = re.fullmatch(r"sleep-(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?)-(\d+)", name)
    if not found:
        raise ConfigError(
            f"{name} is not a workload; there is {', '.join(FIXED)}, and {SLEEP} "
            "(mean in ms, shape, replicas: sleep-10-1-16)"
        )
    mean_ms, shape, replicas = float(found[1]), float(found[2]), int(found[3])
    if not (mean_ms and shape and replicas):
        raise ConfigError(f"{name}: mean, shape and number of replicas must be greater than zero")
    settings = {
        "num_envs": replicas,
        "sync_interval": 128,
        "epochs": 1,
        "minibatches": 1,
        "hidden_sizes": (64, 64),
        # An executor for each replica: one that sleeps must not keep another from its step
        "num_executors": replicas,
        "step_ms": mean_ms,
        "step_shape": shape,
        "observation_size": 16,
        "num_actions": 6,
        # Rows in which an environment is reset don't sleep: without a time limit, the model is exact
        "max_episode_steps": None,
    }
    return Workload(name, "synthetic:sleep", "ppo", settings, Sleep(mean_ms / 1000.0, shape))


def flags(settings: Mapping[str, Any]) -> list[str]:
    """``settings`` as flags of ``htsrl train``."""
    arguments = []
    for name, value in settings.items():
        values = [str(each) for each in value] if isinstance(value, tuple | list) else [str(value).lower()]
        arguments += [f"--{name.replace('_', '-')}", *values]
    return arguments
