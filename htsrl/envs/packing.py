"""Observations of several parts, packed into one row of bytes: the storage has one field for them, as for any other.

Dict and Tuple spaces are taken apart into their leaves, however deep they are nested. A leaf is stored as it would be
alone: an image as its bytes, everything else as float32, bit for bit. An action mask is one more part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from gymnasium import spaces

from htsrl.envs import checks
from htsrl.envs.spec import PART_ALIGNMENT, ActionSpec, Part
from htsrl.errors import ConfigError

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Leaf:
    """One part of a nested observation, and how it is stored."""

    path: Path
    kind: Literal["vector", "image", "mask"]
    shape: tuple[int, ...]
    dtype: np.dtype
    encode: Callable[[Any], np.ndarray] | None = None

    @property
    def name(self) -> str:
        return ".".join(map(str, self.path))


def leaves_of(space: spaces.Space, path: Path = ()) -> Iterator[tuple[Path, spaces.Space]]:
    """The spaces in ``space`` that hold no others, in the space's own order, and the keys that lead to them."""
    if isinstance(space, spaces.Dict):
        for key, inner in space.spaces.items():
            yield from leaves_of(inner, (*path, key))
    elif isinstance(space, spaces.Tuple):
        for place, inner in enumerate(space.spaces):
            yield from leaves_of(inner, (*path, place))
    else:
        yield path, space


def mask_leaf(path: Path, space: spaces.Space) -> Leaf:
    """The leaf of an action mask; its values are zeros and ones of any type."""
    shape = space.shape or ()

    def encode(mask: Any) -> np.ndarray:
        return checks.action_mask(mask, shape)

    return Leaf(path, "mask", shape, np.dtype(np.uint8), encode)


class Packer:
    """Writes the parts of an observation into a row [bytes] uint8, which is the same array each time.

    Bytes between parts stay zero. ValueError, naming the part, where one is missing or can't be stored as it is.
    """

    def __init__(self, leaves: list[Leaf]) -> None:
        parts: list[Part] = []
        start = 0
        for leaf in leaves:
            parts.append(Part(leaf.name, leaf.kind, leaf.shape, leaf.dtype, start))
            start += -(-math.prod(leaf.shape) * leaf.dtype.itemsize // PART_ALIGNMENT) * PART_ALIGNMENT
        self.parts = tuple(parts)
        self.row = np.zeros(start, np.uint8)
        views = [self.row[part.bytes].view(part.dtype).reshape(part.shape) for part in parts]
        # What each step needs of a leaf, at hand: looking it up costs as much as the rest
        self._leaves = [
            (leaf, leaf.path, leaf.encode, view, leaf.shape, checks.storable(leaf.dtype))
            for leaf, view in zip(leaves, views)
        ]

    def __call__(self, observation: Any) -> np.ndarray:
        ndarray = np.ndarray
        for leaf, path, encode, view, shape, storable in self._leaves:
            try:
                value = observation
                for key in path:
                    value = value[key]
                if encode is not None:
                    value = encode(value)
                if value.__class__ is not ndarray or value.dtype not in storable or value.shape != shape:
                    value = checks.observation(value, shape, leaf.dtype)
                view[...] = value
            except (KeyError, IndexError, TypeError, ValueError) as error:
                missing = isinstance(error, KeyError | IndexError)
                what = "the environment did not return it" if missing else str(error)
                raise ValueError(f"part {leaf.name!r} of the observation: {what}") from error
        return self.row


def refuse_unfit_mask(mask: Part | None, action: ActionSpec, env_id: str) -> None:
    """ConfigError where ``mask`` can't be one for ``action``."""
    if mask is None:
        return
    if action.kind not in ("discrete", "multi_discrete"):
        raise ConfigError(
            f"{env_id}: it has an action mask, and htsrl takes masks for Discrete and MultiDiscrete actions alone"
        )
    if mask.shape != (sum(action.nvec),):
        raise ConfigError(
            f"{env_id}: its action mask is of shape {mask.shape}, and must be of shape {(sum(action.nvec),)}: a 0 or 1 "
            "for every choice of every component"
        )
