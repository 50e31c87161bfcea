"""What is left to the machine: device, threads, and the layout of replicas on processes."""

from __future__ import annotations

import math
import os

import torch

from htsrl.config import AnyConfig
from htsrl.envs.spec import EnvSpec
from htsrl.errors import ConfigError
from htsrl.limits import refuse_what_does_not_fit
from htsrl.storage.layout import Layout


def resolve(config: AnyConfig, spec: EnvSpec) -> AnyConfig:
    """Fill in what decides bits and was left to the machine: the device and the learner's threads.

    Raises:
        ConfigError: the device does not exist, or the machine has less than the run needs.
    """
    device = resolve_device(config.runtime.device)
    threads = config.runtime.learner_threads
    if threads == "auto":
        # Several passes of convolutions keep every core busy. An MLP's gradient loses more by being split than it
        # gains, and one pass leaves the cores to executors and actors.
        heavy = spec.has_images and getattr(config.algorithm, "epochs", 1) > 1
        threads = available_cores() if heavy and device == "cpu" else 1
    runtime = config.runtime.model_copy(update={"device": device, "learner_threads": threads})
    config = config.model_copy(update={"runtime": runtime})
    refuse_what_does_not_fit(config, spec, layout_for(config, spec))
    return config


def resolve_device(device: str) -> str:
    """The torch device for --device."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        parsed = torch.device(device)
    except RuntimeError:
        parsed = None
    if parsed is None or parsed.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device must be auto, cpu, cuda or cuda:NUMBER, got {device!r}")
    if parsed.type == "cuda" and (parsed.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"--device {device} is not there: torch sees {torch.cuda.device_count()} GPUs; use cpu or auto"
        )
    return device


def layout_for(config: AnyConfig, spec: EnvSpec) -> Layout:
    """The layout of replicas on processes; 'auto' values fit the environment and the machine's cores."""
    runtime = config.runtime
    executors = automatic_executors(spec) if runtime.num_executors == "auto" else runtime.num_executors
    executors = min(executors, runtime.num_envs)
    automatic = max(math.ceil(runtime.num_envs / executors / groups_per_executor(spec, runtime.num_actors)), 1)
    automatic = max(min(automatic, runtime.num_envs // runtime.num_actors), 1)
    group = automatic if runtime.envs_per_group == "auto" else runtime.envs_per_group
    return Layout(runtime.num_envs, executors, runtime.num_actors, group)


def automatic_executors(spec: EnvSpec) -> int:
    """Executors for one machine: sleeping environments wait side by side, computing ones share the cores."""
    if spec.sleeps:
        return 64
    if not spec.has_images:
        return max(available_cores() // 2, 1)
    return available_cores()


def groups_per_executor(spec: EnvSpec, actors: int) -> int:
    """Two, so that an executor steps one group while the actor answers the other.

    Where actors and learner use every core that waiting executors leave, one: fewer messages and fewer, larger forward
    passes do the same work.
    """
    return 1 if not spec.sleeps and available_cores() <= actors + 1 else 2


def available_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))
