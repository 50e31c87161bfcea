"""Published parameters that anyone may read at any time: two buffers and a version, and nobody waits.

Version v stands in buffer v % 2. The run writes the buffer that the newest version is not in, and then counts up; a
reader who finds the version unchanged behind its copy has copied nothing else. (Stores are seen in their order, as on
x86.) Parameters of one copy are therefore always of one version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def publish(control: Any, vector: np.ndarray, version: int) -> None:
    """Make ``vector`` [P] float32 the parameters of ``version``, which is one more than the version before it."""
    control.parameters[version % 2] = vector
    control.version[0] = version


def fetch(control: Any, assign: Callable[[torch.Tensor], Any], version: int) -> int:
    """``assign`` the newest parameters [P] to one who holds those of ``version`` (-1: none); returns their version.

    A copy is repeated where a publication came in between: an update takes far longer than a copy.
    """
    while version != (newest := int(control.version[0])):
        assign(torch.from_numpy(control.parameters[newest % 2]))
        if control.version[0] == newest:
            version = newest
    return version
