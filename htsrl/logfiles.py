"""The files that a run's numbers go to: lines of JSON, and TensorBoard events. Neither needs torch."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Set
from functools import partial
from pathlib import Path
from typing import Any

from htsrl.errors import ConfigError
from htsrl.rundir import DIGESTS, EVALUATIONS, METRICS, plain, reason_of

FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
MOST_BYTES = 1 << 20
"""Of a line."""


def open_log(path: Path) -> int:
    """A descriptor of ``path``, to read it and to append to it.

    Raises:
        ConfigError: it can't be opened, or is a link to somewhere else.
    """
    try:
        return os.open(path, FLAGS, 0o666)
    except OSError as error:
        raise ConfigError(f"{path} can't be written to: {reason_of(error)}") from None


def append_whole(file: int, data: bytes) -> None:
    """Append ``data`` with one system call: it outlives this process, whatever happens to it.

    Raises:
        OSError: it could not be written whole; the file is as it was.
    """
    before = os.fstat(file).st_size
    written = 0
    try:
        written = os.write(file, data)
        if written < len(data):  # the disk is full: a second attempt says so
            written += os.write(file, data[written:])
    finally:
        if written < len(data):
            os.ftruncate(file, before)


class JsonLines:
    """A file of one JSON object per line, of which no crash leaves half a line in front of another."""

    def __init__(self, path: Path) -> None:
        """Open ``path`` for appending; a half line, left by a machine that went down, is cut off.

        Raises:
            ConfigError: it can't be opened, or is a link to somewhere else.
        """
        self.path = path
        self._file = open_log(path)
        self._cut_half_line()

    def append(self, record: Mapping[str, Any]) -> None:
        """Write ``record``.

        Raises:
            OSError: the line could not be written whole; the file is as it was.
        """
        append_whole(self._file, json.dumps(plain(dict(record)), allow_nan=False).encode() + b"\n")

    def sync(self) -> None:
        """Return when all lines would outlive this machine going down, too."""
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file; twice is fine."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _cut_half_line(self) -> None:
        end = os.fstat(self._file).st_size
        while end > 0:
            start = max(0, end - 4096)
            newline = os.pread(self._file, end - start, start).rfind(b"\n")
            if newline >= 0:
                os.ftruncate(self._file, start + newline + 1)
                return
            end = start
        os.ftruncate(self._file, 0)


def read_json_lines(path: Path, *counts: str) -> Iterator[dict[str, Any]]:
    """The records of a file that may still be written to: a half line at its end is left out, as is a missing file.

    Every record has ``counts``, which are whole numbers; other numbers are finite and of 64 bits.

    Raises:
        ConfigError: a line is no such record.
    """
    return (record for record, _ in _records(path, *counts))


def _records(path: Path, *counts: str) -> Iterator[tuple[dict[str, Any], int]]:
    """As :func:`read_json_lines`, with the length of each line in bytes."""
    if not path.is_file():
        return
    with path.open("rb") as lines:
        for number, line in enumerate(iter(partial(lines.readline, MOST_BYTES), b""), start=1):
            if not line.endswith(b"\n") and len(line) < MOST_BYTES:
                return
            if not line.strip(b"\0\n"):
                return  # what a file system may leave when the machine goes down
            try:
                record = json.loads(line, parse_int=_int64, parse_float=_finite, parse_constant=_finite)
                if not isinstance(record, dict) or any(type(record[name]) is not int for name in counts):
                    raise ValueError
            except (ValueError, KeyError, TypeError, RecursionError):
                raise ConfigError(f"line {number} of {path} is damaged: it is no record of a run") from None
            yield record, len(line)


def _int64(text: str) -> int:
    """Numbers beyond that are written by nobody, and would not fit where they are used."""
    if len(text) > 20 or not -(1 << 63) <= int(text) < 1 << 63:
        raise ValueError(text)
    return int(text)


def _finite(text: str) -> float:
    """A run writes null for what is not finite."""
    if not math.isfinite(float(text)):
        raise ValueError(text)
    return float(text)


def rewind(run_dir: Path, interval: int, steps: int, repeated: Set[int]) -> None:
    """Take a run's log files back to the start of ``interval``, when ``steps`` had been made.

    ``repeated`` are the steps of evaluations that will be made again. Records stand in their order, so each file is
    cut at the first that goes: that takes neither memory nor room on a disk, which may be why the run ended.

    TensorBoard's files are removed: the reporter writes them again from the other two.

    Raises:
        ConfigError: a line that stays is damaged, or a log file is a link to somewhere else; no file was changed.
    """
    kept: dict[str, tuple[tuple[str, ...], Callable[[int], bool]]] = {
        METRICS: (("interval", "steps"), lambda j: j < interval),
        EVALUATIONS: (("steps",), lambda at: at <= steps and at not in repeated),
        DIGESTS: (("interval",), lambda j: j < interval),
    }
    sizes: dict[Path, int] = {}
    for name, ((count, *others), keep) in kept.items():
        sizes[run_dir / name] = 0
        for record, length in _records(run_dir / name, count, *others):
            if not keep(record[count]):
                break
            sizes[run_dir / name] += length
    for file, size in [(open_log(path), size) for path, size in sizes.items() if path.is_file()]:
        os.ftruncate(file, size)
        os.close(file)
    for events in run_dir.glob("events.out.tfevents.*"):
        events.unlink()


class TensorBoard:
    """TensorBoard scalars.

    Its own writer hands events to a thread, which holds the interpreter's lock for most of its work, and dies with a
    traceback when the disk is full; so events are written here, each as a whole.
    """

    def __init__(self, run_dir: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.0"
        self._file = os.open(run_dir / name, FLAGS, 0o666)
        self._records = RecordWriter(self)
        self._add(self._event(wall_time=time.time(), file_version="brain.Event:2"))

    def append(self, record: Mapping[str, Any]) -> None:
        """Add the numbers of ``record`` at ``record['steps']``; what isn't finite isn't drawn.

        Raises:
            OSError: the event could not be written whole; the file is as it was.
        """
        values = [
            self._summary.Value(tag=tag, simple_value=value)
            for tag, value in record.items()
            if tag != "steps" and isinstance(value, int | float) and math.isfinite(value)
        ]
        summary = self._summary(value=values)
        self._add(self._event(wall_time=time.time(), step=record["steps"], summary=summary))

    def write(self, data: bytes) -> None:
        """For the record writer: append a record."""
        append_whole(self._file, data)

    def close(self) -> None:
        """Close the file; twice is fine."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _add(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
