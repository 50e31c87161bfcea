"""The actor: answers whatever observations wait with one batched forward pass. Owns no environment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from htsrl import determinism
from htsrl.actors.delays import random_pauses
from htsrl.actors.inference import InferenceBatch, invariant_buckets, rows_at_once
from htsrl.actors.mailbox import STOP
from htsrl.actors.ports import ActorPorts
from htsrl.actors.reports import reported, send_ready, signs_of_life
from htsrl.models import build_model
from htsrl.models.flat import FlatParameters
from htsrl.storage import trace
from htsrl.storage.layout import Layout
from htsrl.storage.observations import frame_places, is_stacked
from htsrl.storage.stacks import Frames


def run_actor(ports: ActorPorts) -> None:
    """Body of an actor process."""
    with reported("actor", ports.index, ports.lines):
        # Build the policy, and find the batch sizes that don't change a row's bits
        mark = trace.open_lane(ports.arena, f"actor {ports.index}")
        mark("start")
        parameters, batch = build_policy(ports)
        N, T = ports.num_envs, ports.sync_interval
        control = ports.arena.views("control")
        seats = Seats(ports.index, N, control)
        storages = [FlatRows(ports.arena.views(name)) for name in ("even", "odd")]
        at_once = N if ports.lockstep else batch.largest
        version = -1
        pause = random_pauses(ports.delay_ms)
        send_ready(ports.lines, buckets=batch.buckets)

        while True:
            # Take the observations that wait (all of them, if the schedule is lock-step)
            mark("wait")
            groups = waiting_groups(ports, control, seats)
            if groups is None:
                return
            pause()
            if version != control.version[0]:
                mark("load", int(control.version[0]))
                parameters.assign(torch.from_numpy(control.parameters))
                version = int(control.version[0])
            interval = int(control.interval[0])
            storage = storages[interval % 2]

            for some in seats.batches(groups, at_once):
                # Find their rows
                mark("find", len(some))
                found = [seats.columns_of[g] + (int(control.answered[g]) - interval * T) * N for g in some]
                index = np.concatenate(found) if len(found) > 1 else found[0]

                # Infer and sample, and tell their executors, which step while the next ones are answered
                answer_rows(batch, storage, index, index)
                mark("post", len(some))
                for g in some:
                    control.answered[g] += 1
                tell_executors(some, seats.executor_of, ports)


class Seats:
    """Which columns and which executor every group has, and which groups are this actor's, in the layout of now."""

    columns_of: list[np.ndarray]
    executor_of: list[int]
    is_own: list[bool]
    own: np.ndarray
    """[groups of this actor]"""

    def __init__(self, actor: int, num_envs: int, control: Any) -> None:
        self._actor, self._num_envs, self._control = actor, num_envs, control
        self._numbers: list[int] = []
        self.look()

    def look(self) -> None:
        """Read the layout again: it may be another one since the last barrier."""
        numbers = self._control.layout.tolist()
        if numbers != self._numbers:
            self._numbers = numbers
            layout = Layout(self._num_envs, *numbers)
            self.columns_of = [np.array(group) for group in layout.groups]
            self.executor_of = layout.executor_of.tolist()
            self.is_own = (layout.actor_of == self._actor).tolist()
            self.own = np.flatnonzero(self.is_own)

    def batches(self, groups: list[int], rows: int) -> Iterator[list[int]]:
        """``groups`` in lists of together at most ``rows`` rows; a group with more has one of its own."""
        some: list[int] = []
        size = 0
        for g in groups:
            more = len(self.columns_of[g])
            if some and size + more > rows:
                yield some
                some, size = [], 0
            some.append(g)
            size += more
        yield some


def build_policy(ports: ActorPorts) -> tuple[FlatParameters, InferenceBatch]:
    """The network's parameters, whatever they are as yet, and the batch in which it answers."""
    alive = signs_of_life(ports.lines)
    alive()  # torch is loaded
    determinism.enable()
    device = torch.device(ports.device)
    alive()
    model = build_model(ports.spec, ports.network, ports.seed).to(device)
    alive()
    parameters = FlatParameters(model, gradients=False)
    rows_wanted = rows_at_once(ports.spec, ports.num_envs, device)
    buckets = invariant_buckets(model, ports.spec, rows_wanted, device)
    return parameters, InferenceBatch(model, ports.spec, buckets, device)


def answer_rows(batch: InferenceBatch, storage: FlatRows, obs_index: np.ndarray, index: np.ndarray) -> None:
    """Answer the rows ``obs_index`` [K] of observations and states, rows ``index`` [K] of all else; scatter."""
    for start in range(0, len(index), batch.largest):  # as many at once as a batch holds
        obs_rows, rows = obs_index[start : start + batch.largest], index[start : start + batch.largest]
        trace.mark("gather", len(rows))
        storage.take_observations(obs_rows, batch.obs[: len(rows)])
        np.take(storage.noise, rows, axis=0, out=batch.noise[: len(rows)], mode="clip")
        if batch.recurrent:
            np.take(storage.state, obs_rows, axis=0, out=batch.state[: len(rows)], mode="clip")
        trace.mark("infer", len(rows))
        answer = batch.answer(len(rows))
        trace.mark("scatter", len(rows))
        storage.action[rows] = answer.action
        storage.log_prob[rows] = answer.log_prob
        storage.value[rows] = answer.value
        if batch.recurrent:
            storage.state[obs_rows + storage.columns] = answer.state


def tell_executors(groups: list[int], executor_of: list[int], ports: ActorPorts) -> None:
    """Post the numbers of ``groups`` to their executors."""
    numbers: dict[int, list[int]] = {}
    for g in groups:
        numbers.setdefault(executor_of[g], []).append(g)
    for e, own in numbers.items():
        ports.executors[e].post(*own)


def waiting_groups(ports: ActorPorts, control: Any, seats: Seats) -> list[int] | None:
    """The groups that have an unanswered observation; blocks while there are none; None when the run stops.

    Schedule 'sync' waits for all groups that still have rows to make in this interval.
    """
    waiting: set[int] = set()
    while True:
        numbers = set(ports.inbox.take())  # after a recovery, a message may have been sent twice
        if STOP in numbers:
            return None
        waiting |= {g for g in numbers if control.posted[g] > control.answered[g]}
        # In this order: a row that waits is of the layout that is read after it. A message from before the last change
        # may speak of a group that has become another actor's
        seats.look()
        waiting = {g for g in waiting if seats.is_own[g]}
        if not waiting:
            continue
        if not ports.lockstep:
            return sorted(waiting)
        end = (int(control.interval[0]) + 1) * ports.sync_interval
        if len(waiting) == (control.answered[seats.own] < end).sum():
            return sorted(waiting)


class FlatRows:
    """A storage's fields with its first ``axes``, time and columns, as one axis: row t * N + n."""

    def __init__(self, storage: Any, axes: int = 2) -> None:
        self.columns = storage.reward.shape[axes - 1]
        """N"""
        self._frames = None
        if is_stacked(storage):
            self._past, self._stack = storage.past, storage.frames.shape[axes - 2] - storage.reward.shape[axes - 2]
            self._frames = Frames(storage.frames, self._stack, torch.device("cpu"))
        for name in ("obs", "noise", "action", "log_prob", "value", "state"):
            if hasattr(storage, name):  # states, only of a recurrent policy; observations, where they are whole
                array = getattr(storage, name)
                setattr(self, name, array.reshape(-1, *array.shape[axes:]))

    def take_observations(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Copy the observations of ``rows`` [B] to ``out`` [B, *obs]."""
        if self._frames is None:
            np.take(self.obs, rows, axis=0, out=out, mode="clip")
        else:
            out[:] = self._frames.at(torch.from_numpy(frame_places(self._past, self._stack, rows))).numpy()

    obs: np.ndarray
    noise: np.ndarray
    action: np.ndarray
    log_prob: np.ndarray
    value: np.ndarray
    state: np.ndarray
