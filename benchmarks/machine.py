"""A simulated machine: processes that compute, sleep and wait for each other, on cores that are shared equally."""

from __future__ import annotations

import math
from collections.abc import Generator
from heapq import heappop, heappush
from itertools import count

Need = tuple[float, float] | None
"""What a process does next: keep so many cores busy for so many seconds (no cores: sleep); None waits to be woken."""
Process = Generator[Need, None, None]
ENDED: Need = (0.0, math.inf)


class Machine:
    """Cores, a clock, and processes: generators that yield what they do next.

    Whenever more cores are wanted than there are, all work at the same lower speed (egalitarian processor sharing). It
    is played exactly: in work done per core wanted, the virtual time, a job's end is known when it begins.
    """

    def __init__(self, cores: float, wake_s: float = 0.0) -> None:
        """``wake_s``: how long it takes until a process that is woken runs."""
        self.now = 0.0
        self.core_s = 0.0
        """Work that all cores did."""
        self._cores, self._wake_s = cores, wake_s
        self._processes: list[Process] = []
        self._waits: list[bool] = []
        self._working: list[tuple[float, int, float]] = []
        """Heap of: virtual time of the end, process, cores."""
        self._asleep: list[tuple[float, int, int]] = []
        """Heap of: time of the end, order among equals, process."""
        self._order = count()

    def add(self, process: Process) -> int:
        """A new process, which begins when the machine runs; returns its number, counted from 0."""
        self._processes.append(process)
        self._waits.append(False)
        number = len(self._processes) - 1
        heappush(self._asleep, (0.0, next(self._order), number))
        return number

    def wake(self, number: int) -> None:
        """Let a process go on if it waits."""
        if self._waits[number]:
            self._waits[number] = False
            heappush(self._asleep, (self.now + self._wake_s, next(self._order), number))

    def run(self) -> None:
        """Until every process has ended or waits; about a microsecond for each thing that one does."""
        processes, waits, working, asleep = self._processes, self._waits, self._working, self._asleep
        virtual = wanted = 0.0
        while working or asleep:
            # Who goes on next, and what the cores did until then
            speed = 1.0 if wanted <= self._cores else self._cores / wanted
            then = self.now + (working[0][0] - virtual) / speed if working else math.inf
            if asleep and asleep[0][0] <= then:
                then, _, who = heappop(asleep)
                virtual += (then - self.now) * speed
                self.core_s += (then - self.now) * speed * wanted
            else:
                virtual, who, cores = heappop(working)
                self.core_s += (then - self.now) * speed * wanted
                wanted -= cores
            self.now = then

            # What it does next
            need = next(processes[who], ENDED)
            if need is None:
                waits[who] = True
            elif need is not ENDED:
                cores, seconds = need
                if cores:
                    wanted += cores
                    heappush(working, (virtual + seconds, who, cores))
                else:
                    heappush(asleep, (then + seconds, next(self._order), who))
