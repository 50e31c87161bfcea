"""The actor: answers whatever observations wait with one batched forward pass. Owns no environment."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from htsrl import determinism
from htsrl.actors.delays import random_pauses
from htsrl.actors.inference import InferenceBatch, invariant_buckets, rows_at_once
from htsrl.actors.mailbox import STOP
from htsrl.actors.ports import ActorPorts
from htsrl.actors.reports import reported, send_ready
from htsrl.models import build_model
from htsrl.models.flat import FlatParameters
from htsrl.storage.layout import Layout


def run_actor(ports: ActorPorts) -> None:
    """Body of an actor process."""
    with reported("actor", ports.index, ports.lines):
        # Build the policy, and find the batch sizes that don't change a row's bits
        determinism.enable(threads=1)
        device = torch.device(ports.device)
        model = build_model(ports.spec, ports.network, ports.seed).to(device)
        parameters = FlatParameters(model, gradients=False)
        layout, T = ports.layout, ports.sync_interval
        own_groups = np.flatnonzero(layout.actor_of == ports.index)
        rows_wanted = rows_at_once(ports.spec, layout.num_envs, device)
        buckets = invariant_buckets(model, ports.spec, rows_wanted, device)
        batch = InferenceBatch(model, ports.spec, buckets, device)
        control = ports.arena.views("control")
        storages = [flat_rows(ports.arena.views(name)) for name in ("even", "odd")]
        columns_of = [np.array(group) for group in layout.groups]
        version = -1
        pause = random_pauses(ports.delay_ms)
        send_ready(ports.lines, buckets=buckets)

        while True:
            # Take the observations that wait (all of them, if the schedule is lock-step)
            groups = waiting_groups(ports, control, own_groups)
            if groups is None:
                return
            pause()
            if version != control.version[0]:
                parameters.vector.copy_(torch.from_numpy(control.parameters))
                version = int(control.version[0])
            interval = int(control.interval[0])
            storage = storages[interval % 2]

            # Find their rows
            steps = control.answered[groups] - interval * T
            rows_of_groups = [t * layout.num_envs + columns_of[g] for g, t in zip(groups.tolist(), steps.tolist())]
            index = np.concatenate(rows_of_groups)

            # Infer and sample, as many rows at once as a batch holds; scatter the answers
            for start in range(0, len(index), batch.largest):
                rows = index[start : start + batch.largest]
                np.take(storage.obs, rows, axis=0, out=batch.obs[: len(rows)], mode="clip")
                np.take(storage.noise, rows, axis=0, out=batch.noise[: len(rows)], mode="clip")
                answer = batch.answer(len(rows))
                storage.action[rows] = answer.action
                storage.log_prob[rows] = answer.log_prob
                storage.value[rows] = answer.value
            control.answered[groups] += 1

            # Tell their executors
            post_answers(groups, layout, ports)


def waiting_groups(ports: ActorPorts, control: Any, own_groups: np.ndarray) -> np.ndarray | None:
    """The groups that have an unanswered observation; blocks while there are none; None when the run stops.

    Schedule 'sync' waits for all groups that still have rows to make in this interval.
    """
    waiting: np.ndarray = np.empty(0, np.int64)
    while True:
        numbers = ports.inbox.take()
        if (numbers == STOP).any():
            return None
        numbers = np.unique(numbers.astype(np.int64))  # after a recovery, a message may have been sent twice
        numbers = numbers[control.posted[numbers] > control.answered[numbers]]
        if not ports.lockstep:
            if len(numbers):
                return numbers
            continue
        waiting = np.union1d(waiting, numbers)
        end = (int(control.interval[0]) + 1) * ports.sync_interval
        if len(waiting) and len(waiting) == (control.answered[own_groups] < end).sum():
            return waiting


def post_answers(groups: np.ndarray, layout: Layout, ports: ActorPorts) -> None:
    """One message to each executor that has an answer."""
    if len(ports.executors) == 1:
        ports.executors[0].post_array(groups.astype(np.uint32))
        return
    executors = layout.executor_of[groups]
    for e in np.unique(executors).tolist():
        ports.executors[e].post_array(groups[executors == e].astype(np.uint32))


class flat_rows:
    """A storage's fields with time and columns as one axis: row t * N + n."""

    def __init__(self, storage: Any) -> None:
        for name in ("obs", "noise", "action", "log_prob", "value"):
            array = getattr(storage, name)
            setattr(self, name, array.reshape(-1, *array.shape[2:]))

    obs: np.ndarray
    noise: np.ndarray
    action: np.ndarray
    log_prob: np.ndarray
    value: np.ndarray
