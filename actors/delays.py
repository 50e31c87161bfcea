"""Injected delays: random pauses where scheduling could matter, to show that no bit depends on them."""

from __future__ import annotations

import time
from collections.abc import Callable

from htsrl import rng


def random_pauses(longest_ms: float) -> Callable[[], None]:
    """A function that sleeps for up to ``longest_ms`` milliseconds, most often hardly at all; 0 never sleeps."""
    if not longest_ms:
        return lambda: None
    generator = rng.unseeded()

    def pause() -> None:
        time.sleep(generator.random() ** 4 * longest_ms / 1000.0)

    return pause
