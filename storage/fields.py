"""The storage table: every array that processes share, with its shape, dtype, one writer and its readers.

Allocation, the views of every process and the tests come from this table; nothing is shared outside it. Each byte has a
single writer at any time, so no lock exists: executors own their columns, actors the answers to their groups, the run
everything else while all others wait at the barrier.

Row t of a rollout: ``obs[t]`` led to ``action[t]`` led to ``reward[t]``, the end flags ``[t]`` and ``obs[t+1]``. On
termination ``obs[t+1]`` is the next episode's first observation. On truncation ``obs[t+1]`` is the episode's last
observation and row t+1 is not a transition: its action is ignored, the environment resets, ``obs[t+2]`` is the next
episode's first observation. There is no cursor: t and the column are the only index. Of observations that are stacks
of frames, each frame is stored once: `htsrl.storage.observations` writes and reads ``obs[t]`` all the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, cast

import numpy as np

from htsrl.envs.spec import EnvSpec

Role = Literal["run", "executor", "actor", "learner"]

MARK = np.dtype([("time", np.int64), ("phase", np.int32), ("a", np.int32), ("b", np.int32)], align=True)
"""One mark of a timeline: when, by CLOCK_MONOTONIC in nanoseconds, and what, see :mod:`htsrl.storage.trace`."""


@dataclass(frozen=True)
class Field:
    """One shared array."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    writer: Role
    readers: tuple[Role, ...]


def rollout_fields(spec: EnvSpec, T: int, N: int, noise_size: int, state_size: int = 0) -> list[Field]:
    """The fields of one rollout storage; there are two of these.

    ``state_size`` is S of a recurrent policy; without one there are no states.
    """

    def field(name: str, shape: tuple[int, ...], dtype: type | np.dtype, writer: Role, *readers: Role) -> Field:
        return Field(name, shape, np.dtype(dtype), writer, readers)

    observers: tuple[Role, ...] = ("executor", "actor", "run", "learner")
    if spec.stack == 1:
        seen = [field("obs", (T + 1, N, *spec.observation_shape), spec.observation_dtype, *observers)]
    else:
        seen = [
            field("frames", (spec.stack + T, N, *spec.frame_shape), spec.observation_dtype, *observers),
            field("past", (T + 1, N), np.int32, *observers),
        ]
    fields = [
        *seen,
        field("noise", (T, N, noise_size), np.float32, "run", "actor"),
        field("action", (T, N, *spec.action.stored_shape), spec.action.stored_dtype, "actor", "executor", "learner"),
        field("log_prob", (T, N), np.float32, "actor", "learner"),
        field("value", (T, N), np.float32, "actor", "learner"),
        field("reward", (T, N), np.float32, "executor", "learner"),
        field("terminated", (T, N), np.bool_, "executor", "learner"),
        field("truncated", (T, N), np.bool_, "executor", "learner"),
        field("valid", (T, N), np.bool_, "executor", "learner"),
        # An episode's statistics stand at its last row; length 0 everywhere else. Raw rewards, full games.
        field("episode_return", (T, N), np.float64, "executor", "run"),
        field("episode_length", (T, N), np.int32, "executor", "run"),
        field("episode_score", (T, N), np.float32, "executor", "run"),
        field("behaviour_version", (1,), np.int64, "run", "learner"),
    ]
    if state_size:
        # Row t: what is remembered before that row. An answer to it reads row t and writes row t+1, never in place: so
        # it stays a function of what it read, and a row that is answered twice, by another actor after a failure, gets
        # the same bits. An executor that begins an episode in row t+1 then sets that to zeros. (A truncated episode's
        # last observation begins none: its value is asked with what its episode left.) Row 0 is the last one of the
        # interval before, copied by the run, or of the unroll before, copied by its executor.
        fields.append(field("state", (T + 1, N, state_size), np.float32, "actor", "actor", "run", "learner"))
    return fields


def control_fields(groups: int, executors: int, parameters: int) -> list[Field]:
    """The fields that exist once: counters and the published parameters.

    There may be more ``groups`` and ``executors`` than the layout has: room for one that it changes to.
    """

    def field(name: str, shape: tuple[int, ...], dtype: type, writer: Role, *readers: Role) -> Field:
        return Field(name, shape, np.dtype(dtype), writer, readers)

    return [
        # The interval that runs; it grows only while everybody waits.
        field("interval", (1,), np.int64, "run", "executor", "actor"),
        # The layout, see Layout.numbers; it changes only while everybody waits, and an executor's never does.
        field("layout", (3,), np.int64, "run", "actor"),
        # The behaviour parameters and their version; published while everybody waits.
        field("parameters", (parameters,), np.float32, "run", "actor"),
        field("version", (1,), np.int64, "run", "actor"),
        # Rows of each group over the whole run: observations posted, actions answered, steps made. Counters only grow,
        # and messages are mere hints to look at them, so a doubled or lost message changes nothing. (A process that
        # looks without a message relies on stores being seen in their order, as on x86.)
        field("posted", (groups,), np.int64, "executor", "actor", "run"),
        field("answered", (groups,), np.int64, "actor", "executor", "run"),
        field("stepped", (groups,), np.int64, "executor", "run"),
        # Intervals each executor has completed.
        field("finished", (executors,), np.int64, "executor", "run"),
    ]


def trace_fields(lanes: dict[str, int]) -> list[Field]:
    """The fields of a traced run: a ring for each of ``lanes``, "executor 0" and so on, by how many marks it holds."""
    fields = [
        # 0 from where nobody reads marks any more.
        Field("on", (1,), np.dtype(np.int64), "run", ("executor", "actor", "learner")),
    ]
    for lane, capacity in lanes.items():
        writer = cast(Role, lane.split()[0])
        ring, made, pid = trace_field_names(lane)
        fields.append(Field(ring, (capacity,), MARK, writer, ("run",)))
        # Marks made so far, by all processes that had this lane one after the other.
        fields.append(Field(made, (1,), np.dtype(np.int64), writer, ("run",)))
        # The process that has it.
        fields.append(Field(pid, (1,), np.dtype(np.int64), writer, ("run",)))
    return fields


def trace_field_names(lane: str) -> tuple[str, str, str]:
    """Of a lane's ring, its counter and its process."""
    name = lane.replace(" ", "_")
    return f"{name}_marks", f"{name}_made", f"{name}_pid"


def unroll_fields(spec: EnvSpec, T: int, N: int, noise_size: int, slots: int, state_size: int = 0) -> list[Field]:
    """The fields of schedule 'async': a ring of ``slots`` rollouts, [slots, T or T+1, N, ...] each.

    Parameters are taken as they come, so every row says which version acted.
    """
    fields = rollout_fields(spec, T, N, noise_size, state_size)
    rows = [field for field in fields if field.name != "behaviour_version"]
    rows.append(Field("behaviour_version", (T, N), np.dtype(np.int64), "actor", ("run", "learner")))
    return [replace(field, shape=(slots, *field.shape)) for field in rows]


def async_control_fields(groups: int, parameters: int) -> list[Field]:
    """The fields that exist once under schedule 'async'."""

    def field(name: str, shape: tuple[int, ...], dtype: type, writer: Role, *readers: Role) -> Field:
        return Field(name, shape, np.dtype(dtype), writer, readers)

    return [
        # The layout, see Layout.numbers.
        field("layout", (3,), np.int64, "run", "actor"),
        # The newest parameters and those before them, see htsrl.actors.published.
        field("parameters", (2, parameters), np.float32, "run", "actor"),
        field("version", (1,), np.int64, "run", "actor"),
        # Rows of each group, as under the other schedules.
        field("posted", (groups,), np.int64, "executor", "actor", "run"),
        field("answered", (groups,), np.int64, "actor", "executor", "run"),
        field("stepped", (groups,), np.int64, "executor", "run"),
        # Unrolls that each group may collect: the one after them waits until the run releases a slot.
        field("released", (groups,), np.int64, "run", "executor"),
    ]
