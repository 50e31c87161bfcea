"""The trail of a run, digests and checksums of every interval, and the first place where two runs differ."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from htsrl.errors import ConfigError
from htsrl.logfiles import read_json_lines
from htsrl.rundir import DIGESTS
from htsrl.storage.digest import losses_digest, parameters_digest
from htsrl.storage.observations import observations

DIGESTED = ("trajectory", "parameters", "losses")
"""What a record of ``digests.jsonl`` has a digest of."""
ROW_FIELDS = ("obs", "action", "log_prob", "value", "reward", "terminated", "truncated", "valid")
"""What is compared row by row, in the order in which a step brings it about."""

Digests = Mapping[str, Any]
"""``interval`` and, in hexadecimal, the DIGESTED ones."""
RowChecksums = Mapping[str, np.ndarray]
"""By field: [T, N] uint32; obs [T+1, N]."""


@dataclass
class Trail:
    """What a run did, interval by interval: enough to find the first bit that another run does differently."""

    digests: list[Digests] = field(default_factory=list)
    rows: list[RowChecksums] = field(default_factory=list)

    def summary(self) -> dict[str, str]:
        """One digest of each kind for the whole run."""
        losses = hashlib.sha256("".join(each["losses"] for each in self.digests).encode()).hexdigest()
        return {**{name: self.digests[-1][name] for name in DIGESTED}, "losses": losses}


@dataclass(frozen=True)
class Place:
    """Where two runs differ."""

    interval: int
    field: str
    """One of ROW_FIELDS or DIGESTED, or ``end`` where one run has fewer intervals."""
    replica: int | None = None
    step: int | None = None
    """Row of the interval, from 0; T for the observation after its last step."""

    def __str__(self) -> str:
        row = "" if self.replica is None else f", replica {self.replica}, step {self.step}"
        return f"interval {self.interval}{row}: {self.field}"


def interval_digests(
    j: int, trajectory: bytes, parameters: Mapping[str, np.ndarray], metrics: Mapping[str, float]
) -> dict[str, int | str]:
    """The record of interval j.

    Args:
        j: the interval.
        trajectory: the chained digest after it.
        parameters: by name, after learning from it.
        metrics: what learning from it reported; the losses among them count.
    """
    return {
        "interval": j,
        "trajectory": trajectory.hex(),
        "parameters": parameters_digest(parameters.items()),
        "losses": losses_digest(metrics),
    }


def row_checksums(storage: Any) -> RowChecksums:
    """CRC-32 of every row of every field of a full storage: costs milliseconds, and four bytes per row and field."""
    T, N = storage.reward.shape
    checksums = {"obs": np.empty((T + 1, N), np.uint32)}
    for t in range(T + 1):
        checksums["obs"][t] = crc32_of_rows(observations(storage, np.arange(t * N, (t + 1) * N)))
    for name in ROW_FIELDS[1:]:
        array = getattr(storage, name)
        checksums[name] = crc32_of_rows(array.reshape(T * N, -1)).reshape(T, N)
    return checksums


def crc32_of_rows(rows: np.ndarray) -> np.ndarray:
    """[R] uint32 of ``rows`` [R, ...]."""
    data = np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8)
    return np.fromiter((zlib.crc32(row.data) for row in data), np.uint32, len(data))


def first_difference(one: Trail, other: Trail) -> Place | None:
    """The first place where two trails differ, in the order in which things happen; None where they don't.

    Within an interval the earliest step comes first, then the lowest replica, then the field's order in a row: the
    replicas of an interval don't know of each other. What was learned from the interval comes after its rows.
    """
    for j, (rows, other_rows) in enumerate(zip(one.rows, other.rows)):
        found = []
        for order, name in enumerate(ROW_FIELDS):
            step, replica = np.nonzero(rows[name] != other_rows[name])
            if len(step):
                found.append((int(step[0]), int(replica[0]), order))
        if found:
            t, n, order = min(found)
            return Place(j, ROW_FIELDS[order], replica=n, step=t)
        for name in DIGESTED:
            if one.digests[j][name] != other.digests[j][name]:
                return Place(j, name)
    if len(one.digests) != len(other.digests):
        return Place(min(len(one.digests), len(other.digests)), "end")
    return None


def read_digests(run_dir: Path) -> dict[int, Digests]:
    """The recorded digests of a run by interval; a half line at the end, of a run that still goes on, is left out.

    Raises:
        ConfigError: the run has recorded none, or a line is not a record.
    """
    path = run_dir / DIGESTS
    records: dict[int, Digests] = {}
    for record in read_json_lines(path, "interval"):
        if not all(isinstance(record.get(name), str) for name in DIGESTED):
            raise ConfigError(f"the record of interval {record['interval']} in {path} is not one of digests")
        records[record["interval"]] = {name: record[name] for name in DIGESTED}
    if not records:
        raise ConfigError(f"{run_dir} has recorded no digests; train with --record-digests, then it can be replayed")
    return records
