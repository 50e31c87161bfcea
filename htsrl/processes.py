"""How child processes are born: forked from a small, clean server process.

The server has imported numpy and gymnasium but not torch: an executor starts in milliseconds, shares those pages, and
inherits neither threads nor a GPU context.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_ONE_AT_A_TIME = threading.Lock()


def launch(module: str) -> None:
    """Start the fork server, if it does not run: with ``module`` loaded, whose pages all children then share."""
    with _ONE_AT_A_TIME, _one_blas_thread(), _children_ignore_main():
        _CONTEXT.set_forkserver_preload(["htsrl.nursery", module])
        forkserver.ensure_running()


def start(body: Callable[[Any], None], ports: Any, name: str) -> BaseProcess:
    """Start a process that runs ``body(ports)``; from any thread."""
    process = _CONTEXT.Process(target=body, args=(ports,), name=name)
    with _ONE_AT_A_TIME, _children_ignore_main():
        process.start()
    return process


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
