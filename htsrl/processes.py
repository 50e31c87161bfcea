"""How child processes are born: forked from a small, clean server process.

The server has imported numpy and gymnasium but not torch: an executor starts in milliseconds, shares those pages, and
inherits neither threads nor a GPU context.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from importlib import import_module
from multiprocessing import forkserver, reduction, resource_tracker, util
from multiprocessing.process import BaseProcess
from typing import Any

from htsrl.actors.mailbox import Inbox, mailbox
from htsrl.errors import RunFailed

RUN_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""For the run alone, when they reach its whole process group."""
ATTEMPTS = 5
# A fork server that lives answers within milliseconds, once it has imported what it should.
IMPORT_TIMEOUT_S = 180.0
ANSWER_TIMEOUT_S = 10.0
# The system takes names of sockets up to 107 bytes, and multiprocessing appends two names of its own.
LONGEST_FOLDER = 107 - len("/pymp-12345678/listener-12345678")

_CONTEXT = multiprocessing.get_context("forkserver")
_ONE_AT_A_TIME = threading.Lock()
_STARTED: weakref.WeakSet[BaseProcess] = weakref.WeakSet()
_ANSWERED: set[int] = set()
"""Fork servers that have started a process."""


def launch(module: str) -> None:
    """Start the fork server, if it does not run: with ``module`` loaded, whose pages all children then share.

    Raises:
        RunFailed: the system refuses.
    """
    with _ONE_AT_A_TIME, _one_blas_thread(), _children_ignore_main():
        _CONTEXT.set_forkserver_preload(["htsrl.nursery", module])
        try:
            _ensure_server()
        except OSError as error:
            raise RunFailed(f"the server that starts executors and actors can't be started: {error}") from error


def start(body: Callable[[Any], None], ports: Any, name: str) -> BaseProcess:
    """Start a process that runs ``body(ports)``, is called ``name`` in lists of processes, and ends when this one does.

    From any thread. What ``body``'s module imports is loaded there, when the process watches over this one already.
    It is tried again if the fork server, which is then launched anew, or the child is killed on the way. A child does
    nothing before this process knows it, so that there are never two of it.

    Raises:
        RunFailed: the system refuses, or no attempt succeeded.
    """
    with _ONE_AT_A_TIME, _one_blas_thread(), _children_ignore_main():
        for attempt in range(ATTEMPTS):
            time.sleep(0.1 * attempt)  # a server that dies is there for a moment longer
            try:
                known, knows = mailbox()
                with closing(known), closing(knows), closing(_Parcel(ports)) as parcel, _server_must_answer():
                    _ensure_server()
                    arguments = (known, body.__module__, body.__qualname__, parcel, name)
                    process = _CONTEXT.Process(target=_begin, args=arguments, name=name)
                    _STARTED.add(process)
                    process.start()
                    _ANSWERED.add(_server())
                    knows.post(0)
                    return process
            except (EOFError, OSError) as error:  # end of file: the server could not fork, or was killed
                reason = str(error) if isinstance(error, OSError) else "the system allows no further process"
    raise RunFailed(f"{name} can't be started: {reason} (see `ulimit -u` and `ulimit -n`)")


class _Parcel:
    """What a child is given, in a file in memory that it reads when it comes to that.

    A pipe holds 64 KiB, and whoever writes more waits for the child, which may be stopped.
    """

    def __init__(self, content: Any) -> None:
        self._content = content
        self._file = -1

    def __reduce__(self) -> tuple:
        # Here, where multiprocessing takes in descriptors that belong to a process about to start
        packed = reduction.ForkingPickler.dumps(self._content)
        self.close()  # that of an attempt before
        self._file = os.memfd_create("htsrl-parcel")
        with open(self._file, "wb", closefd=False) as file:
            file.write(packed)
        return _Parcel._arrived, (reduction.DupFd(self._file),)

    @staticmethod
    def _arrived(file: Any) -> Any:
        with open(file.detach(), "rb") as packed:
            packed.seek(0)
            return reduction.ForkingPickler.loads(packed.read())

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def join(process: BaseProcess) -> None:
    """Wait until the fork server has said how ``process``, which has ended, did so."""
    with _server_must_answer():
        process.join()


def _ensure_server() -> None:
    """Start the fork server, if it does not run. It ignores what is for the run, but only once it has come so far."""
    _have_short_folder()
    with _signals_blocked():
        resource_tracker.ensure_running()  # multiprocessing's own: it unblocks some of them behind it
    with _signals_blocked():
        forkserver.ensure_running()


def _have_short_folder() -> None:
    """Have the fork server's socket in /tmp where the folder for temporary files has too long a name for it."""
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if config.get("tempdir") is None and len(os.fsencode(tempfile.gettempdir())) > LONGEST_FOLDER:
        folder = tempfile.mkdtemp(prefix="pymp-", dir="/tmp")
        util.Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-100)
        config["tempdir"] = folder


@contextmanager
def _server_must_answer() -> Iterator[None]:
    """Kill a fork server that is stopped: whoever waits for its answer is told that it is gone."""

    def kill() -> None:
        with suppress(ProcessLookupError):
            os.kill(_server(), signal.SIGKILL)

    timer = threading.Timer(ANSWER_TIMEOUT_S if _server() in _ANSWERED else IMPORT_TIMEOUT_S, kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _server() -> int:
    """The fork server's process, and 0 if there is none."""
    return forkserver._forkserver._forkserver_pid or 0  # type: ignore[attr-defined]


def _kill_all() -> None:
    for process in list(_STARTED):
        with suppress(ValueError):  # it has ended and is closed
            if process.pid is not None:
                process.kill()


# An interpreter that leaves in disorder joins its children, and they would wait for it
util.Finalize(None, _kill_all, exitpriority=10)


def _begin(known: Inbox, module: str, body: str, ports: Any, name: str) -> None:
    """In the child."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    _end_with(parent.sentinel)
    try:
        known.take()
    except EOFError:
        return  # given up: there may be another in its place
    known.close()
    with suppress(OSError), open("/proc/self/comm", "w") as comm:
        comm.write(name[:15])  # the most that the system keeps
    getattr(import_module(module), body)(ports)


def _end_with(pipe: int) -> None:
    """Have the system kill this process as soon as the other end of ``pipe`` is closed, however that happens.

    A thread that watches it, as where the system knows no better, never runs while an environment holds the
    interpreter's lock in a call that hangs, or while the process is stopped.
    """
    try:
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    except OSError:
        threading.Thread(target=_leave_with, args=(pipe,), daemon=True).start()
    if _closed(pipe, 0):  # before this
        os._exit(1)


def _leave_with(pipe: int) -> None:
    _closed(pipe, None)
    os._exit(1)


def _closed(pipe: int, milliseconds: int | None) -> bool:
    """Whether the other end is closed, after waiting for that as long."""
    poll = select.poll()
    poll.register(pipe, 0)
    return bool(poll.poll(milliseconds))


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
def _signals_blocked() -> Iterator[None]:
    """For what is started meanwhile, and inherits the mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, RUN_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
