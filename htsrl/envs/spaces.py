"""Gymnasium spaces as rows of a storage: observations become one array of a fixed shape, actions arrays of numbers.

An encoder turns what the environment returns into something that ``row[...] = observation`` stores (the cast to the
row's dtype happens there); a decoder turns a stored action into what the environment's space contains. Both are
``None`` where there is nothing to do, so that small environments pay nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from gymnasium import spaces

from htsrl.envs.checks import ACTION_MASK
from htsrl.envs.packing import Leaf, Packer, leaves_of, mask_leaf
from htsrl.envs.spec import ActionSpec, Part
from htsrl.errors import ConfigError

SUPPORTED_OBSERVATIONS = "Box, Discrete, MultiDiscrete and MultiBinary observations, and Dict and Tuple of these"
SUPPORTED_ACTIONS = "Discrete, MultiDiscrete, MultiBinary and floating-point Box actions"


@dataclass(frozen=True)
class Observations:
    """How one observation space is stored."""

    shape: tuple[int, ...]
    dtype: np.dtype
    kind: Literal["vector", "image", "packed"]
    encode: Callable[[Any], np.ndarray] | None = None
    parts: tuple[Part, ...] = ()
    """Of packed observations; see `htsrl.envs.packing`."""

    @property
    def mask(self) -> Part | None:
        """The part that is an action mask."""
        return next((part for part in self.parts if part.kind == "mask"), None)


@dataclass(frozen=True)
class Actions:
    """How one action space is stored, and how a stored action is given to the environment."""

    spec: ActionSpec
    decode: Callable[[np.ndarray], np.ndarray] | None = None


def encode_observations(space: spaces.Space, env_id: str) -> Observations:
    """The stored form of ``space``.

    uint8 boxes of two to four dimensions are images [H, W, C]; every other box is flattened to a float32 vector;
    Discrete becomes one one-hot vector, MultiDiscrete one per component, MultiBinary a vector of zeros and ones. Dict
    and Tuple are packed: all of these side by side, and a Dict's ``action_mask``.

    Raises:
      ConfigError: the space is of another kind, or empty.
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return _packed(space, env_id)
    if isinstance(space, spaces.Box):
        if space.dtype == np.uint8 and 2 <= len(space.shape) <= 4:
            stored = _image(space.shape)
        elif len(space.shape) == 1:
            stored = _vector(space.shape[0])
        else:
            stored = _vector(int(np.prod(space.shape)), lambda observation: np.reshape(observation, -1))
    elif isinstance(space, spaces.Discrete):
        stored = _one_hot(np.array([space.n]), np.array([space.start]))
    elif isinstance(space, spaces.MultiDiscrete):
        stored = _one_hot(space.nvec.reshape(-1), space.start.reshape(-1))
    elif isinstance(space, spaces.MultiBinary):
        stored = _vector(int(np.prod(space.shape)), lambda observation: np.reshape(observation, -1))
    else:
        raise ConfigError(
            f"{env_id}: observations of {_named(space)} aren't supported; htsrl takes {SUPPORTED_OBSERVATIONS}, and "
            "gymnasium.wrappers.FlattenObservation makes a Box of most others."
        )
    if 0 in stored.shape:
        raise ConfigError(f"{env_id}: its observation space {space} holds nothing.")
    return stored if stored.encode is None else replace(stored, encode=_of_shape(space.shape or (), stored.encode))


def _packed(space: spaces.Space, env_id: str) -> Observations:
    """The leaves of a nested space, in its order, as one row of bytes."""
    leaves = []
    for path, inner in leaves_of(space):
        if path == (ACTION_MASK,):
            leaves.append(mask_leaf(path, inner))
            continue
        stored = encode_observations(inner, env_id)
        assert stored.kind != "packed"
        leaves.append(Leaf(path, stored.kind, stored.shape, stored.dtype, stored.encode))
    if all(leaf.kind == "mask" for leaf in leaves):
        raise ConfigError(f"{env_id}: its observation space {_named(space)} holds nothing to see.")
    packer = Packer(leaves)
    return Observations(packer.row.shape, packer.row.dtype, "packed", packer, packer.parts)


def _of_shape(shape: tuple[int, ...], encode: Callable[[Any], np.ndarray]) -> Callable[[Any], np.ndarray]:
    """``encode`` for ``shape`` alone: another shape of the same size would end up in another order."""

    def encode_checked(observation: Any) -> np.ndarray:
        if np.shape(observation) != shape:
            raise ValueError(
                f"the environment returned an observation of shape {np.shape(observation)}, but its space says {shape}"
            )
        return encode(observation)

    return encode_checked


def encode_actions(space: spaces.Space, env_id: str) -> Actions:
    """The stored form of ``space``.

    Raises:
      ConfigError: the space is of another kind, empty, or an integer box.
    """
    if isinstance(space, spaces.Discrete):
        stored = Actions(ActionSpec("discrete", nvec=(int(space.n),), start=int(space.start)))
    elif isinstance(space, spaces.MultiDiscrete):
        stored = _components("multi_discrete", space.nvec, space.start.astype(space.dtype))
    elif isinstance(space, spaces.MultiBinary):
        stored = _components("multi_binary", np.full(space.shape, 2), np.zeros(space.shape, space.dtype))
    elif isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        stored = _bounded(space.low, space.high)
    else:
        raise ConfigError(
            f"{env_id}: actions of {_named(space)} aren't supported; htsrl takes {SUPPORTED_ACTIONS}, so wrap the "
            "environment into one that has those."
        )
    if 0 in stored.spec.stored_shape:
        raise ConfigError(f"{env_id}: its action space {space} holds nothing.")
    return stored


def _components(kind: Literal["multi_discrete", "multi_binary"], nvec: np.ndarray, start: np.ndarray) -> Actions:
    """Several choices at once; the environment receives start + action in start's dtype."""
    spec = ActionSpec(kind, nvec=tuple(int(n) for n in nvec.reshape(-1)), shape=nvec.shape)
    if start.any():
        return Actions(spec, lambda action: action.astype(start.dtype) + start)
    return Actions(spec, None if start.dtype == np.int64 else lambda action: action.astype(start.dtype))


def _bounded(low: np.ndarray, high: np.ndarray) -> Actions:
    """Real numbers; the executor has clipped them to the bounds in float32."""
    with np.errstate(over="ignore"):
        bounds = [tuple(float(bound) for bound in side.astype(np.float32).reshape(-1)) for side in (low, high)]
    spec = ActionSpec("box", low=bounds[0], high=bounds[1], shape=low.shape)
    if low.dtype == np.float32:
        return Actions(spec)
    # Bounds that were rounded to float32 can lie a little outside the true ones.
    return Actions(spec, lambda action: np.asarray(np.clip(action.astype(low.dtype), low, high)))


def _vector(size: int, encode: Callable[[Any], np.ndarray] | None = None) -> Observations:
    return Observations((size,), np.dtype(np.float32), "vector", encode)


def _image(shape: tuple[int, ...]) -> Observations:
    """uint8 images [H, W], [H, W, C], [C, H, W], or stacks of S of them in front, as [H, W, C] or [H, W, S * C]."""
    if len(shape) == 2:
        return Observations((*shape, 1), np.dtype(np.uint8), "image", lambda image: np.expand_dims(image, -1))
    # Channels are the shorter end; where both are equal, Gymnasium's own order [H, W, C] decides.
    channels_first = shape[-3] < shape[-1]
    if len(shape) == 3:
        if not channels_first:
            return Observations(shape, np.dtype(np.uint8), "image")
        channels, height, width = shape
        return Observations(
            (height, width, channels), np.dtype(np.uint8), "image", lambda image: np.transpose(image, (1, 2, 0))
        )
    stack, *rest = shape
    height, width, channels = (rest[1], rest[2], rest[0]) if channels_first else rest
    order = (2, 3, 0, 1) if channels_first else (1, 2, 0, 3)
    stored = (height, width, stack * channels)
    return Observations(stored, np.dtype(np.uint8), "image", lambda images: np.transpose(images, order).reshape(stored))


def _one_hot(nvec: np.ndarray, start: np.ndarray) -> Observations:
    """Components with values start[i] .. start[i] + nvec[i] - 1 as one-hot vectors, one behind the other."""
    size = int(nvec.sum())
    first = np.cumsum(nvec) - nvec
    vector = np.zeros(size, np.float32)

    def encode(observation: Any) -> np.ndarray:
        choice = np.reshape(observation, -1) - start
        if (choice < 0).any() or (choice >= nvec).any():
            raise ValueError(f"the environment returned the observation {observation}, which is outside of its space")
        vector.fill(0.0)
        vector[choice + first] = 1.0
        return vector

    return _vector(size, encode)


def _named(space: spaces.Space) -> str:
    """``space`` in one line that stays readable for large dictionaries."""
    text = str(space)
    return text if len(text) <= 120 else f"{type(space).__name__}(...)"
