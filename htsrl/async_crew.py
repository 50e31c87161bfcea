"""The crew under schedule 'async': no barrier, but a queue of full unrolls.

Children are replaced as under the other schedules: an executor replays the episodes of its replicas, up to the rows of
the unrolls that the learner has not taken yet.
"""

from __future__ import annotations

from htsrl.actors.async_actor import run_async_actor
from htsrl.actors.async_executor import run_async_executor
from htsrl.crew import Crew
from htsrl.storage.episodes import EpisodeLog, continued
from htsrl.storage.unrolls import Unroll, UnrollQueue, slots_of


class AsyncCrew(Crew):
    """All child processes of one asynchronous run; they begin to work as soon as they are up."""

    executor_body = staticmethod(run_async_executor)
    actor_body = staticmethod(run_async_actor)

    def _prepare(self) -> None:
        """Unrolls wait in a queue; the logs are those before the first row that the learner has not taken."""
        self._slots = slots_of(self._arena.views("unrolls"))
        self.queue = UnrollQueue(self._layout, self._control.stepped, self._config.runtime.sync_interval)

    def take(self, columns: int) -> list[Unroll]:
        """Wait for ``columns`` columns of full unrolls, and take them in the order of their arrival."""
        with self.changes:
            while self.queue.columns < columns:
                self.check()
                self.changes.wait()
            self.check()
            return self.queue.take(columns)

    def release(self, g: int) -> None:
        """Let group ``g`` collect one more unroll. Hold ``changes`` while this and the episode logs change."""
        self._control.released[g] += 1
        self._to_executor[int(self._layout.executor_of[g])][1].post(g)

    def _arrived(self, numbers: list[int]) -> None:
        for g in numbers:
            self.queue.look(g)

    def _standing(self, e: int) -> dict[int, EpisodeLog]:
        control, T, slots = self._control, self._config.runtime.sync_interval, self._slots
        standing = {}
        for g in self._layout.executor_groups[e]:
            full, row = divmod(int(control.stepped[g]), T)
            for n in self._layout.groups[g]:
                log = self._logs.logs[n]
                for unroll in range(int(control.released[g]) - len(slots), full):
                    log = continued(log, slots[unroll % len(slots)], n, T)
                standing[n] = continued(log, slots[full % len(slots)], n, row)
        return standing

    def _executor_progress(self, e: int) -> tuple[int, bool]:
        control, own = self._control, self._layout.executor_groups[e]
        posted, answered, stepped = control.posted[own], control.answered[own], control.stepped[own]
        free = control.released[own] > stepped // self._config.runtime.sync_interval
        busy = (answered > stepped) | ((posted == stepped) & free)
        return int((posted + stepped).sum()), not bool(busy.any())
