"""Environments made for tests and benchmarks. What happens depends on seed and actions alone, never on the clock.

``synthetic:sleep``
    A step sleeps for a Gamma-distributed time: shape ``step_shape``, mean ``step_ms`` (the step-time model of Liu et
    al. 2020). Observations are ``observation_size`` pseudo-random numbers that depend on all actions so far; the reward
    is 0 or 1. It never ends by itself.

``synthetic:counting``
    Observations say where they come from: [low 16 bits of the seed, tag of the episode, step, last action], float32, so
    that a storage can be checked row by row against `Counting.Episode`. Episodes last 3 to 19 steps and end in
    both ways, by termination and by the environment's own truncation. ``observation_size`` doesn't matter.

``synthetic:memory``
    The first observation shows a cue, one of ``num_actions``; ``memory_steps`` steps later the episode ends, with a
    reward of 1 if the last action was the cue, and all other rewards are 0. Observations are the cue as ``num_actions``
    zeros and ones, all zeros after the first, and the share of the episode that is over: who doesn't remember the cue
    gets 1 / ``num_actions`` on average. ``step_shape`` and ``observation_size`` don't matter.

``synthetic:football``
    Football's shapes, 19 actions and cost, for machines without the engine: a step works for ``step_ms`` (by default 2)
    milliseconds of CPU time, a reset for seven times that. The active player runs with the ball where the directional
    actions lead; carrying it into the goal on the right scores. Episodes last 400 steps at most. ``step_shape``,
    ``observation_size`` and ``num_actions`` don't matter.
"""

from __future__ import annotations

import ctypes
import difflib
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from htsrl.config import SyntheticOptions
from htsrl.envs.football_views import HEIGHT, LAYERS, WIDTH, Minimap, picture
from htsrl.envs.spec import ActionSpec, Environment, EnvSpec
from htsrl.errors import ConfigError
from htsrl.rng import Stream, generator


class Sleep:
    """``synthetic:sleep``."""

    BLOCK = 256  # durations drawn at once
    OBSERVATIONS = 64

    def __init__(self, options: SyntheticOptions) -> None:
        self._shape = options.step_shape
        self._scale = (options.step_ms or 0.0) / 1000.0 / options.step_shape
        if self._scale:
            sleep_exactly()
        table = generator(0, Stream.ENVIRONMENT, self.OBSERVATIONS)
        self._table = table.standard_normal((self.OBSERVATIONS, options.observation_size), dtype=np.float32)
        self.reset(0)

    def reset(self, seed: int) -> np.ndarray:
        self._rng = generator(seed, Stream.ENVIRONMENT)
        self._state = int(self._rng.integers(1 << 31))
        self._durations: list[float] = []
        return self._observation()

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        if self._scale:
            if not self._durations:
                self._durations = (self._rng.standard_gamma(self._shape, self.BLOCK) * self._scale).tolist()
            time.sleep(self._durations.pop())
        # A linear congruential generator that every action disturbs; its high bits are the good ones.
        self._state = (self._state * 1103515245 + 12345 + action) & 0x7FFFFFFF
        return self._observation(), float(self._state >> 24 & 1), False, False, {}

    def _observation(self) -> np.ndarray:
        return self._table[self._state >> 25]

    def render(self) -> None:
        return None

    def close(self) -> None:
        return None


def sleep_exactly() -> None:
    """Have this thread's sleeps end in time. Linux otherwise ends them up to 50 µs late: 2.5% of a step of 2 ms."""
    if sys.platform == "linux":
        PR_SET_TIMERSLACK = 29
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, *(ctypes.c_ulong(number) for number in (1, 0, 0, 0)))


class Counting:
    """``synthetic:counting``."""

    @dataclass(frozen=True)
    class Episode:
        """Everything about the episode of ``seed``, as functions: what a storage should hold."""

        seed: int
        tag: int
        length: int
        truncates: bool

        @classmethod
        def of(cls, seed: int) -> Counting.Episode:
            tag, length, truncates = generator(seed, Stream.ENVIRONMENT).integers([0, 3, 0], [1 << 23, 20, 2]).tolist()
            return cls(seed, tag, length, bool(truncates))

        def observation(self, step: int, last_action: int) -> np.ndarray:
            """[4] float32 after ``step`` steps; -1 is the last action of a new episode."""
            return np.array([self.seed & 0xFFFF, self.tag, step, last_action], np.float32)

        def reward(self, step: int, action: int) -> float:
            """Of the ``step``-th step, counted from 1; exact in float32."""
            return step + action / 64.0

    def __init__(self) -> None:
        self.reset(0)

    def reset(self, seed: int) -> np.ndarray:
        self._episode = self.Episode.of(seed)
        self._step = 0
        return self._episode.observation(0, -1)

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._step += 1
        episode, over = self._episode, self._step == self._episode.length
        return (
            episode.observation(self._step, action),
            episode.reward(self._step, action),
            over and not episode.truncates,
            over and episode.truncates,
            {},
        )

    def render(self) -> None:
        return None

    def close(self) -> None:
        return None


class Memory:
    """``synthetic:memory``."""

    def __init__(self, options: SyntheticOptions) -> None:
        self._choices, self._length = options.num_actions, options.memory_steps
        self.reset(0)

    def reset(self, seed: int) -> np.ndarray:
        self._cue = int(generator(seed, Stream.ENVIRONMENT).integers(self._choices))
        self._step = 0
        return self._observation()

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._step += 1
        over = self._step == self._length
        return self._observation(), float(over and action == self._cue), over, False, {}

    def _observation(self) -> np.ndarray:
        observation = np.zeros(self._choices + 1, np.float32)
        if self._step == 0:
            observation[self._cue] = 1.0
        observation[-1] = self._step / self._length
        return observation

    def render(self) -> None:
        return None

    def close(self) -> None:
        return None


class Football:
    """``synthetic:football``. The array that ``reset`` and ``step`` return is the same each time."""

    PLAYERS = 11
    LENGTH = 400
    STRIDE = 0.01
    # Field directions of actions 1 to 8, clockwise from left, as in gfootball's default action set.
    DIRECTIONS = ((-1, 0), (-1, -1), (0, -1), (1, -1), (1, 0), (1, 1), (0, 1), (-1, 1))

    def __init__(self, options: SyntheticOptions) -> None:
        self._work_s = (2.0 if options.step_ms is None else options.step_ms) / 1000.0
        self._view = Minimap(4)
        self.reset(0)

    def reset(self, seed: int) -> np.ndarray:
        _work(7 * self._work_s)
        rng = generator(seed, Stream.ENVIRONMENT)
        limits = np.array([1.0, 1.0 / 2.25])
        self._players = rng.uniform(-limits, limits, (2 * self.PLAYERS, 2))
        self._velocities = rng.uniform(-self.STRIDE / 2, self.STRIDE / 2, (2 * self.PLAYERS, 2))
        self._active = int(rng.integers(1, self.PLAYERS))
        self._players[self._active, 0] = rng.uniform(0.5, 0.8)
        self._step = 0
        return self._view.fill(self._state())

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        _work(self._work_s)
        self._step += 1
        self._players += self._velocities
        outside = np.abs(self._players) > (1.0, 1.0 / 2.25)
        self._velocities[outside] *= -1.0
        if 1 <= action <= 8:
            self._players[self._active] += np.multiply(self.DIRECTIONS[action - 1], self.STRIDE)
        x, y = self._players[self._active].tolist()
        out = abs(y) > 1.0 / 2.25 or x < -1.0
        goal = x >= 1.0 and abs(y) < 0.15
        done = out or x >= 1.0 or self._step == self.LENGTH
        return self._view.push(self._state()), float(goal), done, False, {"score": int(goal)}

    def _state(self) -> dict[str, Any]:
        """The part of gfootball's observation that the minimap shows."""
        return {
            "left_team": self._players[: self.PLAYERS],
            "right_team": self._players[self.PLAYERS :],
            "ball": np.append(self._players[self._active], 0.0),
            "left_agent_controlled_player": [self._active],
        }

    def render(self) -> np.ndarray:
        return picture(self._state())

    def close(self) -> None:
        return None


def describe(env: str, options: SyntheticOptions) -> EnvSpec:
    """Raises ConfigError where there is no such environment."""
    name = _name(env)
    shapes = {
        "sleep": (options.observation_size,),
        "counting": (4,),
        "memory": (options.num_actions + 1,),
        "football": (HEIGHT, WIDTH, 4 * LAYERS),
    }
    image = name == "football"
    limit = options.max_episode_steps
    if name == "memory" and limit is not None and limit < options.memory_steps:
        raise ConfigError(
            f"memory_steps must be at most max_episode_steps ({limit}), got {options.memory_steps}: episodes would be "
            "truncated before anything is asked"
        )
    return EnvSpec(
        env_id=env,
        family="synthetic",
        observation_shape=shapes[name],
        observation_dtype=np.dtype(np.uint8 if image else np.float32),
        observation_kind="image" if image else "vector",
        action=ActionSpec("discrete", nvec=(19 if image else options.num_actions,)),
        max_episode_steps=options.max_episode_steps,
        has_score=image,
        stack=4 if image else 1,
        sparse=image,
        sleeps=name == "sleep" and bool(options.step_ms),
    )


def make(env: str, options: SyntheticOptions, *, render: bool = False) -> Environment:
    """An environment for an executor. Raises what `describe` raises."""
    name = _name(env)
    if name == "sleep":
        return Sleep(options)
    if name == "memory":
        return Memory(options)
    return Counting() if name == "counting" else Football(options)


def _name(env: str) -> str:
    names = ("sleep", "counting", "memory", "football")
    name = env.partition(":")[2]
    if name not in names:
        matches = difflib.get_close_matches(name, names, n=1) or names
        raise ConfigError(f"There is no environment {env!r}. Did you mean synthetic:{' or synthetic:'.join(matches)}?")
    return name


def _work(seconds: float) -> None:
    """Keeps the CPU busy for a time of this thread's own, so that waiting for a core doesn't count."""
    if seconds:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass
