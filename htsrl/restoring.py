"""What a checkpoint must hold before anything is done with it. A stranger's file is data like any other.

Its checksum only shows that it is whole: whoever writes a file can write that, too. So everything is checked, types,
sizes, ranges and names, and what doesn't fit is a ConfigError, before a file is changed or a process started.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from htsrl.checkpoint import Checkpoint, load_checkpoint
from htsrl.config import AnyConfig
from htsrl.envs.spec import EnvSpec
from htsrl.errors import ConfigError
from htsrl.learner.learner import Learner
from htsrl.storage.snapshots import MAX_BYTES

Count = Annotated[int, Field(ge=0, lt=1 << 53)]
Number = Annotated[int, Field(ge=1, lt=1 << 31)]
Text = Annotated[str, Field(max_length=1000, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
"""Without control characters: a terminal would obey them."""


class ReplicaState(BaseModel):
    """Where a replica stands, beside its actions."""

    model_config = ConfigDict(strict=True)

    episode: Count
    reset_pending: bool


class SnapshotState(BaseModel):
    """A snapshot of a replica's environment, beside its bytes; see :class:`htsrl.storage.snapshots.Snapshot`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    episode: Count
    steps: Count
    reward: float
    later: Count
    fingerprint: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class PolicyLagState(BaseModel):
    """How old the policies were, of a run with schedule 'async'."""

    model_config = ConfigDict(strict=True, extra="forbid")

    rows: Count
    total: Count
    largest: Count
    histogram: Annotated[list[Count], Field(max_length=1000)]


class LayoutState(BaseModel):
    """What ``layout`` auto has found so far; see :func:`htsrl.resolve.layout_state`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    num_executors: Number
    num_actors: Number
    envs_per_group: Number
    settled: bool
    cores: Number


class RunState(BaseModel):
    """The JSON part of a run's checkpoint. Keys of later versions may stand beside these."""

    model_config = ConfigDict(strict=True)

    finished: bool
    result: dict[str, Any] | None
    """What a finished run came to."""
    reproducible: bool
    recovered: Count
    interval: Count
    version: Count
    steps: Count
    episodes: Count
    seconds: Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
    trajectory: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    returns: list[float]
    scores: list[float]
    replicas: list[ReplicaState]
    snapshots: dict[Text, SnapshotState] = Field(default_factory=dict)
    """By replica, of those whose episodes had grown long."""
    versions: dict[Text, Text]
    fingerprint: dict[Text, Text | int]
    policy_lag: PolicyLagState | None = None
    layout: LayoutState | None = None

    @model_validator(mode="after")
    def _finished_with_a_result(self) -> RunState:
        if self.finished and self.result is None:
            raise ValueError("a finished run has a result")
        return self


def load_run_checkpoint(path: Path) -> Checkpoint:
    """Read one checkpoint of a run, and see that its state is one.

    Raises:
        ConfigError: as :func:`load_checkpoint`, or its state isn't a run's.
    """
    checkpoint = load_checkpoint(path)
    try:
        RunState.model_validate(checkpoint.state)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, fault["loc"])) or "state"
        message = f"{fault['msg'][:1].lower()}{fault['msg'][1:]}"
        raise ConfigError(f"the checkpoint {path} can't be used: {where}: {message}") from None
    return checkpoint


def refuse_unfit(run_dir: Path, checkpoint: Checkpoint, config: AnyConfig, spec: EnvSpec) -> None:
    """Refuse a checkpoint of ``run_dir`` from which a run of ``config`` can't go on.

    Raises:
        ConfigError: a tensor is missing, has another shape or type, or holds what it can't; or the counters disagree.
    """
    try:
        learner = Learner(config, spec, torch.device("cpu"))
        _check_counters(checkpoint.state, config, learner.lag)
        _check_episodes(checkpoint, config, spec)
        _check_snapshots(checkpoint)
        _check_recurrent_state(checkpoint, config)
        for steps, named in waiting_evaluations(checkpoint).items():
            if steps > checkpoint.state["steps"]:
                raise ValueError(f"an evaluation after {steps} steps waits, but {checkpoint.state['steps']} were made")
            learner.parameters.load(named)
        learner.restore(checkpoint.group, checkpoint.state["version"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"the checkpoint of {run_dir} doesn't fit its configuration: {error}") from None


def waiting_evaluations(checkpoint: Checkpoint) -> dict[int, dict[str, np.ndarray]]:
    """Parameters by name that wait for their evaluation, by when it is of; ValueError where a name isn't one."""
    waiting: dict[int, dict[str, np.ndarray]] = {}
    for key, array in checkpoint.group("evaluation").items():
        steps, _, name = key.partition("/")
        if not (steps.isascii() and steps.isdecimal() and len(steps) < 17):
            raise ValueError(f"evaluation/{key} does not say after how many steps")
        waiting.setdefault(int(steps), {})[name] = array
    return waiting


def _check_counters(state: dict[str, Any], config: AnyConfig, lag: int) -> None:
    """ValueError where version and steps can't belong to the interval."""
    runtime = config.runtime
    if state["version"] != state["interval"] + lag:
        raise ValueError(f"version {state['version']} after {state['interval']} intervals, with a lag of {lag}")
    most = state["interval"] * runtime.sync_interval * runtime.num_envs
    if state["steps"] > most or most >= 1 << 63:
        raise ValueError(f"{state['steps']} steps after {state['interval']} intervals")
    if runtime.schedule == "async" and state.get("policy_lag") is None:
        raise ValueError("it does not say how old the policies were")


def _check_episodes(checkpoint: Checkpoint, config: AnyConfig, spec: EnvSpec) -> None:
    """ValueError where the episode logs aren't those of ``config`` and ``spec``."""
    logs, action, N = checkpoint.group("episodes"), spec.action, config.runtime.num_envs
    if len(checkpoint.state["replicas"]) != N or logs.keys() != {str(n) for n in range(N)}:
        raise ValueError(f"its episodes are not those of {N} replicas")
    last_obs = checkpoint.tensors.get("last_obs")
    if last_obs is None:
        if config.runtime.schedule != "async":  # there the learner may not have heard of every replica yet
            raise ValueError("last_obs is missing")
    elif (last_obs.shape, last_obs.dtype) != ((N, *spec.observation_shape), spec.observation_dtype):
        raise ValueError(f"last_obs is {last_obs.dtype} {last_obs.shape}")
    for n, actions in logs.items():
        if actions.dtype != action.stored_dtype or actions.shape[1:] != action.stored_shape or not actions.ndim:
            raise ValueError(f"the actions of replica {n} are {actions.dtype} {actions.shape}")
        inside = ~np.isnan(actions) if action.kind == "box" else (actions >= 0) & (actions < action.nvec)
        if not inside.all():
            raise ValueError(f"replica {n} made an action that is outside of its space")


def _check_snapshots(checkpoint: Checkpoint) -> None:
    """ValueError where a snapshot isn't bytes, or not of its replica's episode. The seal vouches for the rest."""
    logs, snapshots = checkpoint.group("episodes"), checkpoint.group("snapshots")
    if snapshots.keys() != checkpoint.state.get("snapshots", {}).keys() or not snapshots.keys() <= logs.keys():
        raise ValueError("its snapshots are not those of its replicas")
    for n, data in snapshots.items():
        about = checkpoint.state["snapshots"][n]
        if data.dtype != np.uint8 or data.ndim != 1 or len(data) > MAX_BYTES:
            raise ValueError(f"the snapshot of replica {n} is {data.dtype} {data.shape}")
        if about["episode"] != checkpoint.state["replicas"][int(n)]["episode"]:
            raise ValueError(f"the snapshot of replica {n} is of another episode")
        if not about["steps"] < about["later"] <= len(logs[n]):
            raise ValueError(f"the snapshot of replica {n} is of step {about['steps']}, its episode has {len(logs[n])}")


def _check_recurrent_state(checkpoint: Checkpoint, config: AnyConfig) -> None:
    """ValueError where the states of a recurrent policy aren't those of its replicas."""
    size, state = config.network.state_size, checkpoint.tensors.get("recurrent_state")
    if not size:
        return
    if state is None or state.dtype != np.float32 or state.shape != (config.runtime.num_envs, size):
        found = "missing" if state is None else f"{state.dtype} {state.shape}"
        raise ValueError(f"recurrent_state is {found}")
    if not np.isfinite(state).all():
        raise ValueError("recurrent_state holds NaN or infinity")
