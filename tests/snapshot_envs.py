"""Gymnasium environments with a long episode, which offer snapshots that are right, wrong or none.

All of them play the same episode. With the variable COUNT_STEPS naming a file, each step of any of them adds a byte.
"""

from __future__ import annotations

import json
import os
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Plain(gymnasium.Env):
    """Four numbers that depend on seed and actions, the last one on what happened 300 steps ago; never ends."""

    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        self.state = self.hidden = seed or 0
        self.steps = 0
        return self.observe(), {}

    def step(self, action: int) -> tuple[Any, Any, bool, bool, dict]:
        if "COUNT_STEPS" in os.environ:
            with open(os.environ["COUNT_STEPS"], "ab") as file:
                file.write(b".")
        self.steps += 1
        self.state = (self.state * 1103515245 + 12345 + action) & 0x7FFFFFFF
        self.hidden = self.state if self.steps % 300 == 0 else self.hidden
        return self.observe(), np.float32(self.state / 2**31), False, False, {}

    def observe(self) -> Any:
        return np.array(
            [self.state >> 7 & 0xFF, self.state >> 15 & 0xFF, self.hidden >> 7 & 0xFF, self.steps], np.float32
        )


class Right(Plain):
    def snapshot(self) -> bytes:
        return json.dumps([self.state, self.hidden, self.steps]).encode()

    def restore(self, snapshot: bytes) -> None:
        self.state, self.hidden, self.steps = json.loads(snapshot)


class Forgetful(Right):
    """Forgets the number that changes rarely."""

    def restore(self, snapshot: bytes) -> None:
        self.state, _, self.steps = json.loads(snapshot)


class Secretive(Right):
    """Does not even write it down: only what comes of it can show."""

    def snapshot(self) -> bytes:
        return json.dumps([self.state, self.steps]).encode()

    def restore(self, snapshot: bytes) -> None:
        self.state, self.steps = json.loads(snapshot)


class Refusing(Right):
    def restore(self, snapshot: bytes) -> None:
        self.steps = 10**6
        raise RuntimeError("not today")


class Deadly(Right):
    def restore(self, snapshot: bytes) -> None:
        os._exit(7)


class Wordy(Right):
    """Not bytes."""

    def snapshot(self) -> Any:
        return "somewhere"


class Failing(Right):
    """Can say where it is at the beginning, but not later."""

    def snapshot(self) -> bytes:
        if self.steps > 1:
            raise RuntimeError("lost")
        return super().snapshot()


ENVS: list[Any] = [Plain, Right, *Right.__subclasses__()]
for _env in ENVS:
    gymnasium.register(f"{_env.__name__}-v0", entry_point=_env)
gymnasium.register(
    "Wrapped-v0",
    entry_point=Right,
    additional_wrappers=(
        gymnasium.envs.registration.WrapperSpec(
            "Clip", "gymnasium.wrappers:ClipReward", {"min_reward": 0.0, "max_reward": 1.0}
        ),
    ),
)
