"""How child processes are born: forked from a small, clean server process.

The server has imported numpy and gymnasium but not torch: an executor starts in milliseconds, shares those pages, and
inherits neither threads nor a GPU context.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from typing import Any

from htsrl.actors.mailbox import Inbox, mailbox
from htsrl.errors import RunFailed

ATTEMPTS = 5
# A fork server that lives answers within milliseconds, once it has imported what it should.
SERVER_TIMEOUT_S = 180.0

_CONTEXT = multiprocessing.get_context("forkserver")
_ONE_AT_A_TIME = threading.Lock()


def launch(module: str) -> None:
    """Start the fork server, if it does not run: with ``module`` loaded, whose pages all children then share."""
    with _ONE_AT_A_TIME, _one_blas_thread(), _children_ignore_main():
        _CONTEXT.set_forkserver_preload(["htsrl.nursery", module])
        forkserver.ensure_running()


def start(body: Callable[[Any], None], ports: Any, name: str) -> BaseProcess:
    """Start a process that runs ``body(ports)``; from any thread.

    It is tried again if the fork server, which is then launched anew, or the child is killed on the way. A child does
    nothing before this process knows it, so that there are never two of it.

    Raises:
        RunFailed: no attempt succeeded.
    """
    with _ONE_AT_A_TIME, _one_blas_thread(), _children_ignore_main():
        for attempt in range(ATTEMPTS):
            time.sleep(0.1 * attempt)  # a server that dies is there for a moment longer
            known, knows = mailbox()
            with closing(known), closing(knows), _server_must_answer():
                process = _CONTEXT.Process(target=_begin, args=(known, body, ports), name=name)
                try:
                    process.start()
                    knows.post(0)
                    return process
                except (EOFError, OSError) as error:
                    reason = error
    raise RunFailed(f"the process {name} can't be started: {reason!r}")


def join(process: BaseProcess) -> None:
    """Wait until the fork server has said how ``process``, which has ended, did so."""
    with _server_must_answer():
        process.join()


def _begin(known: Inbox, body: Callable[[Any], None], ports: Any) -> None:
    """In the child."""
    try:
        known.take()
    except EOFError:
        return  # given up: there may be another in its place
    known.close()
    body(ports)


@contextmanager
def _server_must_answer() -> Iterator[None]:
    """Kill a fork server that is stopped: whoever waits for its answer is told that it is gone."""

    def kill() -> None:
        server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        if server is not None:
            with suppress(ProcessLookupError):
                os.kill(server, signal.SIGKILL)

    timer = threading.Timer(SERVER_TIMEOUT_S, kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _one_blas_thread() -> Iterator[None]:
    """For the fork server, which inherits the environment: BLAS pools in every executor would only cost memory."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _children_ignore_main() -> Iterator[None]:
    """Keep children from importing the user's script again: it may import torch, or start a run of its own."""
    main = sys.modules["__main__"]
    names = ("__file__", "__spec__")
    hidden: dict[str, Any] = {name: main.__dict__.pop(name) for name in names if name in main.__dict__}
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.update(hidden)
