"""Stable-Baselines3 on a workload: ``peer_sb3.py WORKLOAD VARIANT PROGRESS_FILE``, run by its own interpreter.

Runs until it is interrupted; writes a line of JSON (steps, seconds) whenever a rollout is complete.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

from peer_envs import Adapter
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv
from workloads import workload

from htsrl import envs


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
