"""What is left to the machine: device, threads, and the layout of replicas on processes."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import torch

from htsrl.config import AnyConfig
from htsrl.envs.spec import EnvSpec
from htsrl.errors import ConfigError
from htsrl.limits import MOST_PROCESSES, refuse_what_does_not_fit
from htsrl.storage.layout import Layout
from htsrl.tuning import Space, Tuner, settings_of


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
    actors = 1 if runtime.num_actors == "auto" else runtime.num_actors
    automatic = max(math.ceil(runtime.num_envs / executors / groups_per_executor(spec, actors)), 1)
    automatic = max(min(automatic, runtime.num_envs // actors), 1)
    group = automatic if runtime.envs_per_group == "auto" else runtime.envs_per_group
    return Layout(runtime.num_envs, executors, actors, group)


def tuner_for(config: AnyConfig, spec: EnvSpec, found: Mapping[str, Any] | None) -> Tuner | None:
    """What finds the layout of a run with ``layout`` auto; None for other runs.

    Args:
        config: the run's configuration; values that it gives are not touched.
        spec: its environment.
        found: what a checkpoint says, see :func:`layout_state`. It is where the search begins or, on a machine like
            the one where it came to its end, what it found.
    """
    runtime = config.runtime
    if runtime.layout != "auto":
        return None
    first, settled = layout_for(config, spec), False
    fixed = {name for name in settings_of(first) if getattr(runtime, name) != "auto"}
    if runtime.schedule == "sync" or runtime.device != "cpu":  # each actor on a GPU would take memory for a context
        fixed.add("num_actors")
    if found is not None:
        known = {name: found[name] for name in settings_of(first) if name not in fixed}
        before = layout_for(config.model_copy(update={"runtime": runtime.model_copy(update=known)}), spec)
        if fits(config, spec, before):
            same = settings_of(before).items() <= found.items() and found["cores"] == available_cores()
            first, settled = before, found["settled"] and same
    executors, actors, _ = first.numbers
    if "num_executors" not in fixed:
        executors = min(max(2 * available_cores(), 2 * executors), runtime.num_envs, MOST_PROCESSES)
    if "num_actors" not in fixed:
        actors = min(max(2, available_cores() // 2, actors), runtime.num_envs)
    while executors > first.num_executors and not fits(config, spec, Layout(runtime.num_envs, executors, actors, 1)):
        executors = max(executors // 2, first.num_executors)
    return Tuner(Space(runtime.num_envs, executors, actors, frozenset(fixed)), first, settled)


def layout_state(tuner: Tuner) -> dict[str, Any]:
    """What a checkpoint says of the search for a layout, for :func:`tuner_for`."""
    return {**settings_of(tuner.best), "settled": tuner.settled, "cores": available_cores()}


def fits(config: AnyConfig, spec: EnvSpec, layout: Layout) -> bool:
    """Whether this machine has what a run of ``config`` in ``layout`` needs."""
    try:
        refuse_what_does_not_fit(config, spec, layout)
    except ConfigError:
        return False
    return True


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
