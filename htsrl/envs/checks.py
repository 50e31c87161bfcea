"""What an environment may return, so that nothing is stored as something else than was meant.

Storing casts: a picture of 0.0 to 1.0 would become all zeros, 256 would become 0, one number would spread over a row.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import numpy as np

ACTION_MASK = "action_mask"
"""The key, of a Dict observation or of ``info``, under which a mask stands."""
_FLAGS = (bool, np.bool_)
_WHOLE = (int, np.integer)
_NUMBERS = (float, np.floating, *_WHOLE, *_FLAGS)


@cache
def storable(dtype: np.dtype) -> frozenset[np.dtype]:
    """The dtypes of observations that may be stored as ``dtype``: for floats all real numbers, else what loses nothing.

    float64 is rounded to float32, as everywhere; whatever overflows becomes infinite, and is found at the barrier.
    """
    casting: Literal["same_kind", "safe"] = "same_kind" if dtype.kind == "f" else "safe"
    every = {np.dtype(code) for code in "?bBhHiIlLqQefdg"}
    return frozenset(each for each in every if np.can_cast(each, dtype, casting))


def observation(value: Any, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """``value`` as an array; ValueError where a row of ``shape`` and ``dtype`` can't hold it as it is."""
    array = np.asarray(value)
    if array.shape != shape:
        raise ValueError(f"the environment returned an observation of shape {array.shape}, but its space says {shape}")
    if array.dtype.newbyteorder("=") not in storable(dtype):
        raise ValueError(
            f"the environment returned an observation of {array.dtype}, which can't be stored as {dtype} without loss"
        )
    return array


def number(what: str, value: Any) -> float:
    """``value``, a real number of Python or numpy, as a float; TypeError for anything else."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if not isinstance(value, _NUMBERS):
        raise TypeError(f"the environment returned {_shown(value)} as {what}, which must be one number")
    return float(value)


def flag(what: str, value: Any) -> bool:
    """``value`` as a bool; TypeError where it is neither: whoever returns values in another order is found by this."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if isinstance(value, _FLAGS) or (isinstance(value, _WHOLE) and value in (0, 1)):
        return bool(value)
    raise TypeError(f"the environment returned {_shown(value)} as {what}, which must be True or False")


def action_mask(value: Any, shape: tuple[int, ...]) -> np.ndarray:
    """``value`` as zeros and ones, uint8 of ``shape``; ValueError where it is something else."""
    mask = np.asarray(value)
    if mask.shape != shape:
        raise ValueError(f"the environment returned an action mask of shape {mask.shape}, which must be {shape}")
    allowed = mask == 1
    if not (allowed | (mask == 0)).all():
        raise ValueError(f"the environment returned the action mask {_shown(value)}, which must be zeros and ones")
    return allowed.view(np.uint8)


def no_mask(info: Any) -> None:
    """ValueError where ``info`` holds an action mask, of an environment whose description has none."""
    if info and ACTION_MASK in info:
        raise ValueError(
            f"the environment returned info[{ACTION_MASK!r}], which must come with every observation, the first of all "
            "included, or never"
        )


def some_action(mask: np.ndarray, first: np.ndarray) -> None:
    """ValueError where ``mask`` [A] uint8 allows no choice of a component; ``first`` are their first places in it."""
    if not np.maximum.reduceat(mask, first).all():
        raise ValueError("the environment returned an action mask that allows no action, in an episode that goes on")


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
