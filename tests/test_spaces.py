"""Observations and actions of every supported space, as rows of a storage and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from htsrl.envs.spaces import Actions, Observations, encode_actions, encode_observations
from htsrl.errors import ConfigError

SEEDS = st.integers(0, 2**31 - 1)
SHAPES = st.lists(st.integers(1, 4), min_size=0, max_size=3).map(tuple)
FLOATS = st.sampled_from([np.float16, np.float32, np.float64])


def stored(observations: Observations, observation: Any) -> np.ndarray:
    """As an executor does it; a shape that would only broadcast is an error."""
    encoded = observation if observations.encode is None else observations.encode(observation)
    assert np.shape(encoded) == observations.shape
    row = np.empty(observations.shape, observations.dtype)
    row[...] = encoded
    return row


def given_to_environment(actions: Actions, action: np.ndarray) -> object:
    """As an executor does it: an int with start added, or an array in the space's shape."""
    spec = actions.spec
    assert action.shape == spec.stored_shape
    if spec.kind == "discrete":
        return int(action) + spec.start
    action = action.astype(spec.stored_dtype).reshape(spec.shape)
    return action if actions.decode is None else actions.decode(action)


@given(SHAPES, FLOATS, SEEDS)
def test_boxes_are_flat_float32(shape: tuple[int, ...], dtype: type, seed: int) -> None:
    space = spaces.Box(-5.0, 5.0, shape, dtype, seed=seed)
    observations = encode_observations(space, "X")
    sample = space.sample()
    assert observations.kind == "vector"
    assert np.array_equal(stored(observations, sample), sample.reshape(-1).astype(np.float32))


def test_vectors_of_numbers_cost_nothing() -> None:
    assert encode_observations(spaces.Box(-np.inf, np.inf, (4,), np.float64), "X").encode is None
    assert encode_observations(spaces.Box(0, 255, (8, 9, 3), np.uint8), "X").encode is None
    assert encode_actions(spaces.Box(-1.0, 1.0, (3,)), "X").decode is None
    assert encode_actions(spaces.MultiDiscrete([3, 4]), "X").decode is None


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((8, 9), (8, 9, 1)),
        ((8, 9, 3), (8, 9, 3)),
        ((9, 9, 9), (9, 9, 9)),
        ((4, 8, 9), (8, 9, 4)),
        ((1, 8, 9), (8, 9, 1)),
        ((2, 8, 9, 3), (8, 9, 6)),
        ((2, 3, 8, 9), (8, 9, 6)),
    ],
)
def test_bytes_of_two_to_four_dimensions_are_images(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    space = spaces.Box(0, 255, shape, np.uint8, seed=0)
    observations = encode_observations(space, "X")
    image = space.sample()
    row = stored(observations, image)
    assert (row.shape, row.dtype, observations.kind) == (expected, np.uint8, "image")
    for y, x in ((0, 0), (7, 3), (2, 8)):
        # A pixel keeps its place, and its channels their order, oldest frame first.
        if len(shape) == 2 or shape == expected:
            channels = np.atleast_1d(image[y, x])
        elif shape[-1] == 3:
            channels = image[:, y, x].reshape(-1)
        else:
            channels = image[..., y, x].reshape(-1)
        assert np.array_equal(row[y, x], channels)
    if len(shape) == 3 and observations.encode is not None:
        assert np.shares_memory(observations.encode(image), image)


@given(st.integers(1, 9), st.integers(-5, 5), SEEDS)
def test_discrete_is_one_hot(n: int, start: int, seed: int) -> None:
    space = spaces.Discrete(n, start=start, seed=seed)
    sample = space.sample()
    assert np.array_equal(stored(encode_observations(space, "X"), sample), np.eye(n, dtype=np.float32)[sample - start])


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(-3, 3)), min_size=1, max_size=4), SEEDS)
def test_multi_discrete_is_one_hot_per_component(components: list[tuple[int, int]], seed: int) -> None:
    nvec, start = np.array(components).T
    space = spaces.MultiDiscrete(nvec, start=start, seed=seed)
    observations = encode_observations(space, "X")
    for _ in range(2):  # the second finds the array of the first
        sample = space.sample()
        parts = [
            np.eye(n, dtype=np.float32)[value - first] for n, first, value in zip(nvec, start, sample, strict=True)
        ]
        assert np.array_equal(stored(observations, sample), np.concatenate(parts))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), SEEDS)
def test_multi_binary_is_zeros_and_ones(shape: list[int], seed: int) -> None:
    space = spaces.MultiBinary(shape, seed=seed)
    sample = space.sample()
    assert np.array_equal(stored(encode_observations(space, "X"), sample), sample.reshape(-1).astype(np.float32))


@given(st.integers(1, 9), st.integers(-5, 5))
def test_discrete_actions(n: int, start: int) -> None:
    space = spaces.Discrete(n, start=start)
    actions = encode_actions(space, "X")
    assert actions.spec.nvec == (n,)
    given_actions = [given_to_environment(actions, np.array(action)) for action in range(n)]
    assert given_actions == list(range(start, start + n))
    assert all(space.contains(action) for action in given_actions)


@given(
    st.one_of(
        st.lists(st.integers(1, 5), min_size=1, max_size=4).map(spaces.MultiDiscrete),
        st.sampled_from(
            [
                spaces.MultiDiscrete(np.array([[2, 3], [4, 5]])),
                spaces.MultiDiscrete([3, 4], dtype=np.int32, start=[-1, 7]),
                spaces.MultiDiscrete([3, 4], dtype=np.int8),
                spaces.MultiBinary(3),
                spaces.MultiBinary([2, 2]),
            ]
        ),
    ),
    SEEDS,
)
def test_multi_discrete_actions(space: spaces.MultiDiscrete | spaces.MultiBinary, seed: int) -> None:
    actions = encode_actions(space, "X")
    nvec = np.array(actions.spec.nvec)
    action = np.random.Generator(np.random.Philox(seed)).integers(nvec)
    received = given_to_environment(actions, action)
    assert space.contains(received)
    assert isinstance(received, np.ndarray)
    assert np.array_equal(received.reshape(-1) - getattr(space, "start", np.zeros(1)).reshape(-1), action)


@given(SHAPES, FLOATS, SEEDS)
def test_box_actions_lie_within_the_true_bounds(shape: tuple[int, ...], dtype: type, seed: int) -> None:
    random = np.random.Generator(np.random.Philox(seed))
    low: np.ndarray = np.asarray(random.normal(size=shape) - 1.0).astype(dtype)
    high: np.ndarray = np.asarray(low + random.random(shape)).astype(dtype)
    space = spaces.Box(low, high, dtype=dtype)
    actions = encode_actions(space, "X")
    wild = random.normal(scale=10.0, size=actions.spec.stored_shape).astype(np.float32)
    clipped = np.clip(wild, *np.array([actions.spec.low, actions.spec.high], np.float32))
    received = given_to_environment(actions, clipped)
    assert space.contains(received)


def test_box_actions_without_bounds() -> None:
    spec = encode_actions(spaces.Box(-np.inf, np.array([1.0, np.inf]), (2,), np.float64), "X").spec
    assert (spec.low, spec.high) == ((-np.inf, -np.inf), (1.0, np.inf))


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(5),
        spaces.Sequence(spaces.Discrete(2)),
        spaces.Graph(spaces.Discrete(2), None),
        spaces.OneOf([spaces.Discrete(2)]),
    ],
)
def test_other_spaces_are_refused_by_name(space: spaces.Space) -> None:
    name = type(space).__name__
    with pytest.raises(ConfigError, match=rf"Mine-v0: observations of {name}.*takes Box, Discrete"):
        encode_observations(space, "Mine-v0")
    with pytest.raises(ConfigError, match=rf"Mine-v0: actions of {name}.*takes Discrete"):
        encode_actions(space, "Mine-v0")


def test_integer_boxes_and_empty_spaces_are_refused() -> None:
    with pytest.raises(ConfigError, match="floating-point Box"):
        encode_actions(spaces.Box(0, 3, (2,), np.int64), "X")
    with pytest.raises(ConfigError, match="holds nothing"):
        encode_actions(spaces.Box(0.0, 1.0, (0,)), "X")
    with pytest.raises(ConfigError, match="holds nothing"):
        encode_observations(spaces.Box(0.0, 1.0, (0,)), "X")
