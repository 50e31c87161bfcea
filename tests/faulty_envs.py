"""Gymnasium environments that do what environments shouldn't: ``faulty_envs:Raises-v0`` with this folder on the path.

`Steady` is the well-behaved one. The others are the same until their fault, which strikes at step 37 of every episode
whose seed is odd: a replayed episode meets it again. With the variable FAULT_ONCE naming a file that doesn't exist, it
strikes once over all processes: whoever creates the file.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

FAULT_STEP = 37


class Steady(gymnasium.Env):
    """Four numbers that depend on seed and actions; rewards 0 to 3; terminates after 40 to 64 steps."""

    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        assert seed is not None, "every episode gets a seed"
        self.seed = self.state = seed
        self.steps = 0
        return self.observe(), {}

    def step(self, action: int) -> tuple[Any, Any, bool, bool, dict]:
        self.steps += 1
        self.state = (self.state * 1103515245 + 12345 + action) & 0x7FFFFFFF
        if self.steps == FAULT_STEP and self.seed % 2 and claim():
            return self.fault()
        return self.outcome()

    def fault(self) -> tuple[Any, Any, bool, bool, dict]:
        return self.outcome()

    def outcome(self) -> tuple[Any, Any, bool, bool, dict]:
        return self.observe(), float(self.state >> 29), self.steps == 40 + self.seed % 25, False, {}

    def observe(self) -> Any:
        return np.array([self.state >> shift & 0xFF for shift in (7, 15, 23)] + [self.steps], np.float32)


class Raises(Steady):
    def fault(self) -> tuple[Any, Any, bool, bool, dict]:
        raise RuntimeError("the robot fell over")


class RaisesInReset(Steady):
    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        if seed is not None and seed % 2 and claim():
            raise RuntimeError("the robot didn't get up")
        return super().reset(seed=seed)


class RaisesInInit(Steady):
    def __init__(self) -> None:
        raise RuntimeError("there is no robot")


class RaisesInChild(Steady):
    """Can be described in the main process, but not be built in an executor."""

    def __init__(self) -> None:
        if multiprocessing.parent_process() is not None and claim():
            raise RuntimeError("the robot is elsewhere")


class ReusesBuffers(Steady):
    """Returns the same array and the same info each time, and empties them on reset."""

    def __init__(self) -> None:
        self.buffer = np.zeros(4, np.float32)
        self.info: dict[str, Any] = {}

    def observe(self) -> Any:
        if self.steps == 0:
            self.info.clear()
        self.buffer[:] = super().observe()
        return self.buffer

    def outcome(self) -> tuple[Any, Any, bool, bool, dict]:
        observation, reward, terminated, truncated, _ = super().outcome()
        self.info["steps"] = self.steps
        return observation, reward, terminated, truncated, self.info


class WrongShape(Steady):
    """One number, which would spread over the whole row."""

    def fault(self) -> tuple[Any, Any, bool, bool, dict]:
        observation, *rest = self.outcome()
        return (observation[:1], *rest)


class AlwaysWrongShape(Steady):
    def observe(self) -> Any:
        return super().observe()[:3]


class NanObservation(Steady):
    def fault(self) -> tuple[Any, Any, bool, bool, dict]:
        observation, *rest = self.outcome()
        return (observation * np.nan, *rest)


class InfReward(Steady):
    def fault(self) -> tuple[Any, Any, bool, bool, dict]:
        observation, _, *rest = self.outcome()
        return (observation, np.inf, *rest)


class OldApi(Steady):
    """Four values, as before Gymnasium."""

    def outcome(self) -> Any:
        observation, reward, terminated, _, info = super().outcome()
        return observation, reward, terminated, info


class Clock(Steady):
    """Shows the time: a replay can't reproduce it."""

    def observe(self) -> Any:
        return np.append(super().observe()[:3], np.float32(time.perf_counter() % 1000.0))


class Constant(Steady):
    """Reward 1 for ever: its value is 1 / (1 - discount) in every state, however often it is truncated."""

    def outcome(self) -> tuple[Any, Any, bool, bool, dict]:
        return self.observe(), 1.0, False, False, {}


class Hangs(Steady):
    def fault(self) -> tuple[Any, Any, bool, bool, dict]:
        time.sleep(1e6)
        return self.outcome()


class Exits(Steady):
    def fault(self) -> tuple[Any, Any, bool, bool, dict]:
        os._exit(13)


class Crashes(Steady):
    """As an engine in C++ does."""

    def fault(self) -> tuple[Any, Any, bool, bool, dict]:
        signal.raise_signal(signal.SIGSEGV)
        return self.outcome()


class HugeReward(Steady):
    """Finite in float32, but its square is not."""

    def fault(self) -> tuple[Any, Any, bool, bool, dict]:
        observation, _, *rest = self.outcome()
        return (observation, 1e30, *rest)


class HangsInReset(Steady):
    """In the one after the fault."""

    broken = False

    def fault(self) -> tuple[Any, Any, bool, bool, dict]:
        self.broken = True
        return self.outcome()

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        if self.broken:
            time.sleep(1e6)
        return super().reset(seed=seed)


class HangsInInit(Steady):
    """In an executor alone."""

    def __init__(self) -> None:
        if multiprocessing.parent_process() is not None and claim():
            time.sleep(1e6)


class HangsInEvaluator(Steady):
    def step(self, action: int) -> tuple[Any, Any, bool, bool, dict]:
        if multiprocessing.current_process().name == "evaluator":
            time.sleep(1e6)
        return super().step(action)


class HoldsTheGil(Steady):
    """Hangs in C code that lets no other thread of Python run."""

    def fault(self) -> tuple[Any, Any, bool, bool, dict]:
        library = ctypes.PyDLL(None)
        while True:
            library.sleep(1_000_000)


class Slow(Steady):
    """Takes its time, but gets there."""

    def fault(self) -> tuple[Any, Any, bool, bool, dict]:
        time.sleep(2.0)
        return self.outcome()


def claim() -> bool:
    """True where this fault may strike now."""
    path = os.environ.get("FAULT_ONCE")
    if path is None:
        return True
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


ENVS: list[Any] = [Steady, *Steady.__subclasses__()]
for _env in ENVS:
    gymnasium.register(f"{_env.__name__}-v0", entry_point=_env)
