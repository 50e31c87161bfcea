"""Imported by the fork server alone, once, before it forks the first child.

What is imported here is shared by all executors. Signals that reach a whole process group (a terminal's, a batch
system's) are for the run: it ends its children itself, and they notice when it is gone.
"""

import atexit
import contextlib
import os
import signal
from multiprocessing import forkserver

from htsrl.processes import RUN_SIGNALS

for _number in RUN_SIGNALS:
    signal.signal(_number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, RUN_SIGNALS)  # blocked by the run, so that none struck before this line


_run = os.getppid()


@atexit.register
def remove_socket() -> None:
    """Delete the server's socket and its folder, if the run was killed before it could. Children never come here."""
    if os.getppid() == _run:
        return
    address = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]
    if address and os.path.isabs(address):
        with contextlib.suppress(OSError):
            os.unlink(address)
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(address))
