"""The actor of schedule 'async': answers whatever observations wait with the newest parameters there are."""

from __future__ import annotations

import numpy as np

from htsrl.actors.actor import FlatRows, Seats, answer_rows, build_policy, tell_executors, waiting_groups
from htsrl.actors.delays import random_pauses
from htsrl.actors.ports import ActorPorts
from htsrl.actors.published import fetch
from htsrl.actors.reports import reported, send_ready


def run_async_actor(ports: ActorPorts) -> None:
    """Body of an actor process under schedule 'async'."""
    with reported("actor", ports.index, ports.lines):
        # Build the policy
        parameters, batch = build_policy(ports)
        T, N = ports.sync_interval, ports.num_envs
        control, ring = ports.arena.views("control"), ports.arena.views("unrolls")
        seats = Seats(ports.index, N, control)
        slots = len(ring.reward)
        rows, behaviour_version = FlatRows(ring, axes=3), ring.behaviour_version.reshape(-1)
        version = -1
        pause = random_pauses(ports.delay_ms)
        send_ready(ports.lines, buckets=batch.buckets)

        while True:
            # Take all observations that wait
            groups = waiting_groups(ports, control, seats)
            if groups is None:
                return
            pause()
            version = fetch(control, parameters.assign, version)

            for some in seats.batches(groups, batch.largest):
                # Find their rows: each group has its own unroll and step; a slot has T + 1 rows of observations
                steps = {g: int(control.answered[g]) % (slots * T) for g in some}
                index = np.concatenate([seats.columns_of[g] + step * N for g, step in steps.items()])
                obs_index = np.concatenate([seats.columns_of[g] + (step + step // T) * N for g, step in steps.items()])

                # Infer and sample, say with what, and tell their executors
                answer_rows(batch, rows, obs_index, index)
                behaviour_version[index] = version
                for g in some:
                    control.answered[g] += 1
                tell_executors(some, seats.executor_of, ports)
