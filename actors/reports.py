"""How children report: that they are ready, or why they can't go on. JSON over a pipe, never pickle."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import reduction
from typing import Any

from htsrl.actors.ports import Lines


class EnvironmentFault(Exception):
    """An environment raised or returned nonsense; ``context`` says which replica, episode, step, seed and action."""

    def __init__(self, context: dict[str, Any]) -> None:
        super().__init__(context)
        self.context = context


class Stack:
    """An anonymous file into which a child dumps its stack: on request, even in a call that hangs, and in a crash."""

    REQUEST = signal.SIGUSR1
    SECONDS = 0.5
    """Time to write it."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("htsrl-stack") if fd is None else fd

    def dump_on_request(self) -> None:
        """In the child: write the stack here whenever REQUEST arrives, and when C code crashes."""
        faulthandler.enable(file=self.fd)
        faulthandler.register(self.REQUEST, file=self.fd, all_threads=True)

    def read(self) -> str:
        """In the run: what was dumped."""
        return os.pread(self.fd, 1 << 16, 0).decode(errors="replace").strip()

    def close(self) -> None:
        os.close(self.fd)

    def __reduce__(self) -> tuple:
        return _rebuild_stack, (reduction.DupFd(self.fd),)


def _rebuild_stack(duplicate: Any) -> Stack:
    return Stack(duplicate.detach())


@contextmanager
def reported(role: str, index: int, lines: Lines) -> Iterator[None]:
    """Run a child's body: send the run the reason when it fails."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the fork server leaves Python's own handler to its children
    lines.stack.dump_on_request()
    try:
        yield
    except EOFError:
        os._exit(0)  # the run closed the mailboxes
    except EnvironmentFault as fault:
        cause = fault.__cause__ or fault
        _send(lines, {"kind": "environment", "role": role, "index": index, "traceback": _format(cause)} | fault.context)
        os._exit(1)
    except BaseException as error:
        _send(lines, {"kind": "internal", "role": role, "index": index, "traceback": _format(error)})
        os._exit(1)


def send_ready(lines: Lines, **facts: Any) -> None:
    """Tell the run that this child is ready to work."""
    _send(lines, {"kind": "ready"} | facts)


def signs_of_life(lines: Lines) -> Callable[[], None]:
    """A function to call whenever something has been done: at most once a second it tells the run that this goes on.

    For what may take long as a whole, and of which only a part can hang: coming up, replaying, evaluating.
    """
    last = 0.0

    def alive() -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= 1.0:
            last = now
            _send(lines, {"kind": "progress"})

    return alive


def send_unreproducible(lines: Lines, replica: int) -> None:
    """Tell the run that replaying a replica's seed and actions led to another observation."""
    _send(lines, {"kind": "unreproducible", "replica": replica})


def send_note(lines: Lines, text: str) -> None:
    """Tell the run something that a person should know; the same from many replicas is shown once."""
    _send(lines, {"kind": "note", "text": text})


def _send(lines: Lines, report: dict[str, Any]) -> None:
    with suppress(OSError):  # the run does not listen any more
        lines.reports.send_bytes(json.dumps(report, default=str).encode())


def _format(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)).rstrip()
