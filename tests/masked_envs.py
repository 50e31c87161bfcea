"""Gymnasium environments whose observations have parts, or whose actions have masks: ``masked_envs:Rooms-v0``.

`Rooms` raises where it is given an action that its mask forbids, so that a single one anywhere ends a run. Its state is
a function of seed and actions. Episodes last 5 to 20 steps and end in both ways, with a mask that allows nothing.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

ACTIONS = 6


class Rooms(gymnasium.Env):
    """A Dict of an image, numbers, a choice and a mask."""

    observation_space: spaces.Space = spaces.Dict(
        camera=spaces.Box(0, 255, (36, 37, 2), np.uint8),
        sensors=spaces.Dict(wind=spaces.Box(-9.0, 9.0, (3,), np.float64), room=spaces.Discrete(4, start=1)),
        action_mask=spaces.MultiBinary(ACTIONS),
    )
    action_space: spaces.Space = spaces.Discrete(ACTIONS)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        assert seed is not None
        self.seed = self.state = seed
        self.steps = 0
        return self.outcome()[0], self.info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self.obey(action)
        self.steps += 1
        self.state = (self.state * 1103515245 + 12345 + int(np.sum(action))) & 0x7FFFFFFF
        return self.outcome()

    def obey(self, action: Any) -> None:
        if not self.mask()[action]:
            raise RuntimeError(f"action {action} is forbidden")

    def outcome(self) -> tuple[Any, float, bool, bool, dict]:
        over = self.steps == 5 + self.seed % 16
        return (
            self.observe(),
            float(self.state >> 29),
            over and self.seed % 2 == 0,
            over and self.seed % 2 == 1,
            self.info(),
        )

    def info(self) -> dict:
        return {}

    def observe(self) -> Any:
        camera = np.full((36, 37, 2), self.state >> 7 & 0xFF, np.uint8)
        camera[self.steps] = 255
        sensors = {"wind": np.array([self.state >> 15 & 7, self.steps, -1.5]), "room": 1 + (self.state >> 18) % 4}
        return {"camera": camera, "sensors": sensors, "action_mask": self.mask()}

    def mask(self) -> np.ndarray:
        """Half of the actions, and nothing once the episode is over."""
        if self.steps >= 5 + self.seed % 16:
            return np.zeros(ACTIONS, np.int8)
        return np.roll(np.array([1, 0, 1, 0, 0, 1], np.int8), self.state >> 20)


class Numbers(Rooms):
    """Numbers alone; its mask is in ``info``."""

    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)

    def observe(self) -> Any:
        return np.array([self.state >> shift & 0xF for shift in (7, 15, 23)] + [self.steps], np.float32)

    def info(self) -> dict:
        return {"action_mask": self.mask()}


class Levers(Numbers):
    """Two choices at once, of 2 and of 4; the mask holds both, one behind the other."""

    action_space = spaces.MultiDiscrete([2, 4])

    def obey(self, action: Any) -> None:
        if not (self.mask()[:2][action[0]] and self.mask()[2:][action[1]]):
            raise RuntimeError(f"action {action} is forbidden")

    def mask(self) -> np.ndarray:
        mask = super().mask()
        if mask.any():
            mask[:] = [1, self.state >> 21 & 1, 0, 1, self.state >> 22 & 1, 0]
        return mask


class Forgets(Numbers):
    """Has no mask after its third step."""

    def info(self) -> dict:
        return super().info() if self.steps < 3 else {}


class Surprises(Numbers):
    """Has a mask from its third step on."""

    def obey(self, action: Any) -> None:
        pass

    def info(self) -> dict:
        return super().info() if self.steps >= 3 else {}


class ForbidsAll(Numbers):
    def mask(self) -> np.ndarray:
        return super().mask() * (self.steps != 3)


class Shortens(Numbers):
    def mask(self) -> np.ndarray:
        return super().mask()[: ACTIONS - (self.steps == 3)]


class Doubts(Numbers):
    """Neither forbids nor allows."""

    def info(self) -> dict:
        return {"action_mask": self.mask() * (0.5 if self.steps == 3 else 1.0)}


class Loses(Rooms):
    """A part of its observation is missing."""

    def observe(self) -> Any:
        observation = super().observe()
        if self.steps == 3:
            del observation["sensors"]["wind"]
        return observation


class Overflows(Rooms):
    """A number in its observation is not finite."""

    def observe(self) -> Any:
        observation = super().observe()
        if self.steps == 3:
            observation["sensors"]["wind"][1] = np.nan
        return observation


class Switches(Rooms):
    """Several yes-or-no actions."""

    observation_space = spaces.Tuple([spaces.Box(-9.0, 9.0, (2,)), spaces.Discrete(3)])
    action_space = spaces.MultiBinary(3)

    def obey(self, action: Any) -> None:
        assert self.action_space.contains(action), action

    def observe(self) -> Any:
        return np.array([self.state >> 15 & 7, self.steps], np.float32), self.state % 3


class Stretched(Switches):
    """Continuous actions between bounds of different widths; raises at the bounds, where clipping leads."""

    action_space = spaces.Box(np.array([-3.0, -0.01], np.float32), np.array([1.0, 0.03], np.float32))

    def obey(self, action: Any) -> None:
        super().obey(action)
        if (action == self.action_space.low).any() or (action == self.action_space.high).any():
            raise RuntimeError(f"action {action} was clipped")


ENVS: list[Any] = [
    Rooms, Numbers, Levers, Forgets, Surprises, ForbidsAll, Shortens, Doubts, Loses, Overflows, Switches, Stretched
]  # fmt: skip
for _env in ENVS:
    gymnasium.register(f"{_env.__name__}-v0", entry_point=_env)
