"""Imported by the fork server alone, once, before it forks the first child.

What is imported here is shared by all executors. Signals that reach a whole process group (a terminal's, a batch
system's) are for the run: it ends its children itself, and they notice when it is gone.
"""

import signal

for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(_number, signal.SIG_IGN)
