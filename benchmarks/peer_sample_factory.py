"""Sample Factory's APPO on a workload: ``peer_sample_factory.py WORKLOAD VARIANT PROGRESS_FILE``, by its interpreter.

Runs until it is interrupted; writes a line of JSON (steps, seconds) whenever its learner has finished an iteration.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from peer_envs import Adapter
from sample_factory.algo.runners.runner import AlgoObserver, Runner
from sample_factory.algo.utils.misc import ExperimentStatus
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner
from workloads import Workload, workload

from htsrl import envs
from htsrl.config import AnyConfig


class ChannelsFirst(gymnasium.ObservationWrapper):
    """Images as [C, H, W], the only form that Sample Factory's convolutions take."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        height, width, channels = env.observation_space.shape or ()
        self.observation_space = gymnasium.spaces.Box(0, 255, (channels, height, width), np.uint8)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(observation.transpose(2, 0, 1))


class Progress(AlgoObserver):
    """A line per iteration of the learner."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)
        self._written = 0

    def on_training_step(self, runner: Runner, training_iteration_since_resume: int) -> None:
        steps = runner.env_steps.get(0, 0)
        if steps > self._written:
            self._written = steps
            print(json.dumps({"steps": steps, "seconds": time.perf_counter()}), file=self._file)


def settings(each: Workload, variant: str, folder: Path) -> dict[str, Any]:
    """The workload in Sample Factory's terms, without what it adds on its own: recurrence and normalisation."""
    config = each.config()
    options: Any = config.algorithm
    N, T = config.runtime.num_envs, config.runtime.sync_interval
    epochs, minibatches = getattr(options, "epochs", 1), getattr(options, "minibatches", 1)
    image = envs.describe(config.env, config.environment).observation_kind == "image"
    # A worker that sleeps with one replica keeps its others from their step
    workers = N if each.sleep else 2
    return {
        "algo": "APPO",
        "env": "workload",
        "train_dir": folder,
        "experiment": "throughput",
        "restart_behavior": "overwrite",
        "device": "cpu",
        "seed": 0,
        "async_rl": variant == "async",
        "num_workers": workers,
        "num_envs_per_worker": N // workers,
        "worker_num_splits": 1 if each.sleep else 2,
        "rollout": T,
        "batch_size": N * T // minibatches,
        "num_batches_per_epoch": minibatches,
        "num_epochs": epochs,
        "max_policy_lag": 1000,
        "use_rnn": False,
        "normalize_input": False,
        "normalize_returns": False,
        "with_vtrace": False,
        "obs_scale": 255.0 if image else 1.0,
        "nonlinearity": "relu" if image else "tanh",
        "actor_critic_share_weights": image,
        "encoder_conv_architecture": "convnet_atari",
        "encoder_conv_mlp_layers": (512,),
        "encoder_mlp_layers": (64, 64),
        "save_every_sec": 10**6,
        "experiment_summaries_interval": 10**6,
    }


def make(config: AnyConfig, name: str, cfg: Any, place: Any, render_mode: str | None = None) -> gymnasium.Env:
    """An environment for the worker at ``place``, and None for one that is only looked at."""
    env = Adapter(config, place["env_id"] if place else 0)
    return ChannelsFirst(env) if len(env.observation_space.shape or ()) == 3 else env


def main(name: str, variant: str, path: Path) -> None:
    each = workload(name)
    register_env("workload", functools.partial(make, each.config()))
    arguments = []
    for key, values in settings(each, variant, path.parent / "sample-factory").items():
        arguments += [f"--{key}", *(str(value) for value in (values if isinstance(values, tuple) else [values]))]
    parser, _ = parse_sf_args(arguments)
    _, runner = make_runner(parse_full_cfg(parser, arguments))
    runner.register_observer(Progress(path))
    if runner.init() == ExperimentStatus.SUCCESS:
        runner.run()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
