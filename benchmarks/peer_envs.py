"""htsrl's environments behind Gymnasium's interface, so that other systems step the same code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

from htsrl import envs
from htsrl.config import AnyConfig
from htsrl.rng import episode_seed


class Adapter(gymnasium.Env):
    """Replica ``n`` of a configuration; time limits, which htsrl leaves to its executors, are here."""

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
