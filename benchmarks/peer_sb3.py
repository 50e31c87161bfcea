"""Stable-Baselines3 on a workload: ``peer_sb3.py WORKLOAD VARIANT PROGRESS_FILE``, run by its own interpreter.

The environments are htsrl's own adapters behind Gymnasium's interface, so both systems step the same code. Runs until
it is interrupted; writes a line of JSON (steps, seconds) whenever a rollout is complete.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv
from workloads import workload

from htsrl import envs
from htsrl.config import AnyConfig
from htsrl.rng import episode_seed


class Adapter(gymnasium.Env):
    """One of htsrl's environments as Gymnasium's; time limits, which htsrl leaves to its executors, are here."""

    def __init__(self, config: AnyConfig, n: int) -> None:
        spec = envs.describe(config.env, config.environment)
        self._env = envs.make(config.env, config.environment)
        self._n, self._episode, self._limit = n, -1, spec.max_episode_steps or sys.maxsize
        low, high = (0, 255) if spec.observation_kind == "image" else (-np.inf, np.inf)
        self.observation_space = gymnasium.spaces.Box(low, high, spec.observation_shape, spec.observation_dtype.type)
        if spec.action.kind == "box":
            bounds = np.array(spec.action.low, np.float32), np.array(spec.action.high, np.float32)
            self.action_space: gymnasium.Space = gymnasium.spaces.Box(*bounds)
            self._to_env: Callable[[Any], Any] = lambda action: np.asarray(action).reshape(spec.action.shape)
        else:
            assert spec.action.kind == "discrete", spec.action
            self.action_space = gymnasium.spaces.Discrete(spec.action.nvec[0])
            self._to_env = lambda action: int(action) + spec.action.start

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        self._episode += 1
        self._steps = 0
        return self._env.reset(seed=episode_seed(0, self._n, self._episode)), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        obs, reward, terminated, truncated, _ = self._env.step(self._to_env(action))
        self._steps += 1
        return obs, float(reward), terminated, truncated or self._steps >= self._limit, {}

    def close(self) -> None:
        self._env.close()


class Progress(BaseCallback):
    """A line per rollout."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("w", buffering=1)

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        print(json.dumps({"steps": self.num_timesteps, "seconds": time.perf_counter()}), file=self._file)


def main(name: str, variant: str, path: Path) -> None:
    config = workload(name).config()
    makers: list[Any] = [functools.partial(Adapter, config, n) for n in range(config.runtime.num_envs)]
    # Forked children share their parent's pages: the choice that makes this peer smallest
    vector = DummyVecEnv(makers) if variant == "one process" else SubprocVecEnv(makers, start_method="fork")
    image = envs.describe(config.env, config.environment).observation_kind == "image"
    options: Any = config.algorithm
    rows = config.runtime.num_envs * config.runtime.sync_interval
    shared = {"n_steps": config.runtime.sync_interval, "device": "cpu", "seed": 0}
    model: A2C | PPO
    if config.algo == "a2c":
        model = A2C("CnnPolicy" if image else "MlpPolicy", vector, **shared)
    else:
        passes = {"n_epochs": options.epochs, "batch_size": rows // options.minibatches}
        model = PPO("CnnPolicy" if image else "MlpPolicy", vector, **shared, **passes)
    try:
        model.learn(10**12, callback=Progress(path))
    except KeyboardInterrupt:
        vector.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
