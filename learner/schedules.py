"""Schedules: pure functions of how much of the step budget has been used."""

from __future__ import annotations

from typing import Literal


def learning_rate(initial: float, schedule: Literal["constant", "linear"], progress: float) -> float:
    """The learning rate at ``progress`` in 0..1; 'linear' falls from ``initial`` to 0."""
    if schedule == "constant":
        return initial
    return initial * (1.0 - min(max(progress, 0.0), 1.0))
