"""Takes snapshots of an executor's environments as their episodes grow long; see `htsrl.storage.snapshots`."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from htsrl.actors.ports import Lines
from htsrl.actors.reports import send_note
from htsrl.envs.spec import Restorable
from htsrl.storage.snapshots import MAX_BYTES, Snapshot, SnapshotFile, fingerprint

if TYPE_CHECKING:
    from htsrl.actors.executor import Replica

EVERY = 128
"""Steps of an episode between two snapshots, at least. Shorter episodes are as quick to replay."""
SHARE = 0.05
"""Of the executor's CPU time that may go into snapshots; ours need a tenth of that."""


class Snapshots:
    """Each episode's newest snapshot, which is published once it has a successor to be checked by."""

    def __init__(self, file: SnapshotFile, lines: Lines) -> None:
        self._file, self._lines = file, lines
        self._kept: dict[int, Snapshot] = {}
        self._without: set[int] = set()
        self._spent = 0.0

    def take(self, replica: Replica) -> None:
        """Take a snapshot of ``replica`` if it is time for one, and publish the one before.

        An environment whose snapshots can't be used is reported and not asked again.
        """
        column, episode, steps = replica.column, replica.episode, replica.steps
        kept = self._kept.get(column)
        if kept is not None and kept.episode != episode:
            kept = None
        if steps - (kept.steps if kept else 0) < EVERY or replica.reset_pending or column in self._without:
            return
        if not isinstance(replica.env, Restorable):
            self._without.add(column)
            return
        started = time.thread_time()
        if self._spent > SHARE * started:
            return
        try:
            data = replica.env.snapshot()
            if not isinstance(data, bytes) or len(data) > MAX_BYTES:
                raise ValueError(f"bytes are needed, at most {MAX_BYTES >> 20} MiB")
        except Exception as error:
            self._without.add(column)
            send_note(self._lines, f"an environment's snapshot failed ({error!r}): a resumed run will replay episodes")
            return
        mark = fingerprint(data)
        if kept is not None:
            self._file.write(column, replace(kept, later=steps, fingerprint=mark))
        self._kept[column] = Snapshot(episode, steps, replica.reward, later=steps, fingerprint=mark, data=data)
        self._spent += time.thread_time() - started
