"""The executor of schedule 'async': steps replicas as their actions arrive, and waits for nobody but a free slot."""

from __future__ import annotations

from typing import Any

from htsrl.actors.delays import random_pauses
from htsrl.actors.executor import Replica, check_observations, open_rows, request, step_group
from htsrl.actors.mailbox import STOP
from htsrl.actors.ports import ExecutorPorts
from htsrl.actors.reports import reported, send_ready
from htsrl.storage.observations import observation
from htsrl.storage.unrolls import slots_of


def run_async_executor(ports: ExecutorPorts) -> None:
    """Body of an executor process under schedule 'async'."""
    with reported("executor", ports.index, ports.lines):
        # Construct the environments, each at the point where the run stands
        columns = ports.layout.executor_columns[ports.index]
        own_groups = ports.layout.executor_groups[ports.index]
        replicas = [Replica(n, ports) for n in columns]
        for replica, log in zip(replicas, ports.logs):
            replica.start(log, ports.lines)
        groups = {g: [replicas[n - columns.start] for n in ports.layout.groups[g]] for g in own_groups}
        control, slots = ports.arena.views("control"), slots_of(ports.arena.views("unrolls"))
        to_env = replicas[0].to_env
        pause = random_pauses(ports.delay_ms)
        actor_of = ports.layout.actor_of.tolist()
        T = ports.sync_interval
        send_ready(ports.lines)

        # Take over from a predecessor: the rows it had begun, and what it may not have said
        for g in own_groups:
            row = int(control.stepped[g])
            if control.posted[g] > row:
                open_rows(slots[row // T % len(slots)], row % T, groups[g])
        request([g for g in own_groups if control.posted[g] > control.answered[g]], actor_of, ports)
        ports.barrier.post(*own_groups)

        messages = own_groups
        while True:
            for g in messages:
                if g == STOP:
                    return

                # Step a group whose answer has arrived; hand a full unroll to the learner
                row = int(control.stepped[g])
                if control.answered[g] > row:
                    pause()
                    slot = slots[row // T % len(slots)]
                    step_group(slot, row % T, groups[g], to_env)
                    row += 1
                    if row % T == 0:
                        leave_unroll(slot, groups[g])
                    control.stepped[g] = row
                    if row % T == 0:
                        ports.barrier.post(g)

                # Request its next action at once, if the learner has a slot for it
                if control.posted[g] == row and control.released[g] > row // T:
                    if row % T == 0:
                        open_unroll(slots, row // T, groups[g])
                    control.posted[g] = row + 1
                    request([g], actor_of, ports)
            messages = ports.inbox.take()


def open_unroll(slots: list[Any], number: int, replicas: list[Replica]) -> None:
    """Write what ``replicas`` begin unroll ``number`` with: what a recurrent policy remembers, and observations."""
    slot, before = slots[number % len(slots)], slots[(number - 1) % len(slots)]
    if hasattr(slot, "state"):
        own = slice(replicas[0].column, replicas[-1].column + 1)
        slot.state[0, own] = before.state[-1, own]
    open_rows(slot, 0, replicas)


def leave_unroll(slot: Any, replicas: list[Replica]) -> None:
    """Check the observations of a full unroll, and keep the last ones: the slot is the learner's from now on."""
    check_observations(slot, replicas)
    for replica in replicas:
        replica.obs = observation(slot, len(slot.reward), replica.column)
