"""What is left to the machine: device, threads, and the layout of replicas on processes."""

from __future__ import annotations

import math
import os
import resource

import torch

from htsrl.config import AnyConfig
from htsrl.envs.spec import EnvSpec
from htsrl.errors import ConfigError
from htsrl.storage.fields import rollout_fields
from htsrl.storage.layout import Layout
from htsrl.storage.memory import total_bytes

# A process can be handed 256 descriptors at its start; an actor gets one for each executor, and the other way round.
MOST_PROCESSES = 200


def resolve(config: AnyConfig, spec: EnvSpec) -> AnyConfig:
    """Fill in what decides bits and was left to the machine: the device and the learner's threads.

    Raises:
        ConfigError: the device does not exist, or the storages don't fit into this machine's memory.
    """
    refuse_too_large(config, spec)
    device = resolve_device(config.runtime.device)
    threads = config.runtime.learner_threads
    if threads == "auto":
        # Several passes of convolutions keep every core busy. An MLP's gradient loses more by being split than it
        # gains, and one pass leaves the cores to executors and actors.
        heavy = spec.observation_kind == "image" and getattr(config.algorithm, "epochs", 1) > 1
        threads = available_cores() if heavy and device == "cpu" else 1
    runtime = config.runtime.model_copy(update={"device": device, "learner_threads": threads})
    return config.model_copy(update={"runtime": runtime})


def refuse_too_large(config: AnyConfig, spec: EnvSpec) -> None:
    """Refuse storages that this machine's memory can't hold: the system would kill the run when they fill.

    Raises:
        ConfigError: naming needed and available.
    """
    T, N, storages = config.runtime.sync_interval, config.runtime.num_envs, config.runtime.async_slots
    needed = storages * total_bytes({"storage": rollout_fields(spec, T, N, noise_size=0)})
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise ConfigError(
            f"{storages} storages of {N} replicas x {T} steps of {spec.env_id} need {needed / 2**30:.3g} GiB, and this "
            f"machine has {memory / 2**30:.3g}: use fewer --num-envs, or a shorter --sync-interval"
        )


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
    automatic = max(math.ceil(runtime.num_envs / executors / groups_per_executor(spec, executors)), 1)
    automatic = max(min(automatic, runtime.num_envs // runtime.num_actors), 1)
    group = automatic if runtime.envs_per_group == "auto" else runtime.envs_per_group
    layout = Layout(runtime.num_envs, executors, runtime.num_actors, group)
    refuse_too_many_processes(layout)
    return layout


def refuse_too_many_processes(layout: Layout) -> None:
    """Refuse a layout that this process has not enough file handles for.

    Raises:
        ConfigError: naming needed and available.
    """
    if layout.num_executors > MOST_PROCESSES or layout.num_actors > MOST_PROCESSES:
        raise ConfigError(
            f"num_executors and num_actors must be at most {MOST_PROCESSES} each: one executor can own many replicas"
        )
    needed = 64 + 8 * (layout.num_executors + layout.num_actors)
    available, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if available != resource.RLIM_INFINITY and needed > available:
        raise ConfigError(
            f"{layout.num_executors} executors and {layout.num_actors} actors need about {needed} file handles, but "
            f"this shell allows {available}: run `ulimit -n {needed}` first, or use fewer --num-executors"
        )


def automatic_executors(spec: EnvSpec) -> int:
    """Executors for one machine: sleeping environments wait side by side, computing ones share the cores."""
    if spec.sleeps:
        return 64
    if spec.observation_kind == "vector":
        return max(available_cores() // 2, 1)
    return available_cores()


def groups_per_executor(spec: EnvSpec, executors: int) -> int:
    """Two, so that an executor steps one group while the actor answers the other.

    Where steps are cheap and no core would be idle meanwhile, one: fewer messages and forward passes do the same work.
    """
    cheap = spec.observation_kind == "vector" and not spec.sleeps
    return 1 if cheap and available_cores() <= executors + 1 else 2


def available_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))
