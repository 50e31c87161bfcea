"""Observations of several parts as rows of bytes and back, and the networks that read them."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from rollouts import BOX, DISCRETE, MULTI, vector_spec

from htsrl import determinism, envs
from htsrl.actors.inference import InferenceBatch, bucket_sizes, invariant_buckets, probe_rows, random_rows
from htsrl.config import GymnasiumOptions, NetworkOptions
from htsrl.envs.packing import refuse_unfit_mask
from htsrl.envs.spaces import encode_observations
from htsrl.envs.spec import ActionSpec, EnvSpec
from htsrl.errors import ConfigError
from htsrl.models import FlatParameters, build_model, unpack
from htsrl.models.heads import MASKED_LOGIT
from htsrl.settings import configure

DEFAULT = GymnasiumOptions()
LEAVES = st.one_of(
    st.builds(
        lambda shape, dtype: spaces.Box(-9.0, 9.0, shape, dtype),
        st.lists(st.integers(1, 3), max_size=3).map(tuple),
        st.sampled_from([np.float32, np.float64, np.float16]),
    ),
    st.builds(lambda shape: spaces.Box(0, 255, shape, np.uint8), st.tuples(st.integers(1, 5), st.integers(1, 5))),
    st.builds(lambda n: spaces.Box(0, 255, (2, 3, n), np.uint8), st.integers(1, 3)),
    st.builds(spaces.Discrete, st.integers(1, 5)),
    st.builds(spaces.MultiBinary, st.integers(1, 5)),
)
NESTED = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from("abcd"), inner, min_size=1, max_size=3).map(spaces.Dict),
        st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple),
    ),
    max_leaves=6,
)


def packed_spec(space: spaces.Space, action: ActionSpec = DISCRETE) -> EnvSpec:
    """As `envs.describe` makes it."""
    stored = encode_observations(space, "X")
    return replace(
        vector_spec(action), observation_shape=stored.shape, observation_dtype=stored.dtype,
        observation_kind=stored.kind, parts=stored.parts,
    )  # fmt: skip


def leaf_of(observation: Any, name: str) -> Any:
    for key in name.split("."):
        observation = observation[int(key) if isinstance(observation, tuple) else key]
    return observation


@given(NESTED.filter(lambda space: isinstance(space, spaces.Dict | spaces.Tuple)), st.integers(0, 2**31 - 1))
def test_every_part_comes_back_as_it_would_be_stored_alone(space, seed):
    space.seed(seed)
    packed = encode_observations(space, "X")
    spec = packed_spec(space)
    for _ in range(2):  # the second finds the row of the first
        observation = space.sample()
        row = packed.encode(observation)
        assert (row.shape, row.dtype, packed.kind) == (packed.shape, np.uint8, "packed")
        parts = unpack(spec, torch.from_numpy(np.stack([row * 0, row])))
        assert list(parts) == [part.name for part in packed.parts]
        for part in packed.parts:
            inner = space
            for key in part.name.split("."):
                inner = inner[int(key) if isinstance(inner, spaces.Tuple) else key]
            alone = encode_observations(inner, "X")
            value = leaf_of(observation, part.name)
            wanted = np.asarray(value if alone.encode is None else alone.encode(value)).astype(alone.dtype)
            assert (part.shape, part.dtype, part.kind) == (alone.shape, alone.dtype, alone.kind)
            assert parts[part.name][1].numpy().tobytes() == wanted.tobytes()
            assert not parts[part.name][0].numpy().any()


def test_parts_do_not_overlap_and_floats_are_aligned():
    space = spaces.Dict(
        a=spaces.Box(0, 255, (3, 3), np.uint8), b=spaces.Box(0, 1, (2,)), action_mask=spaces.MultiBinary(3)
    )
    packed = encode_observations(space, "X")
    taken = np.zeros(packed.shape, int)
    for part in packed.parts:
        taken[part.bytes] += 1
        assert part.start % 4 == 0
    assert taken.max() == 1
    assert taken.sum() == 9 + 8 + 3
    assert packed.shape[0] % 4 == 0
    assert packed.mask is not None
    assert packed.mask.shape == (3,)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda obs: obs.pop("b"), "part 'b' of the observation: the environment did not return it"),
        (lambda obs: obs["in"].pop("c"), "part 'in.c' of the observation: the environment did not return it"),
        (lambda obs: obs.update(b=np.zeros(3, np.float32)), r"part 'b'.*shape \(3,\), but its space says \(2,\)"),
        (lambda obs: obs.update(a=np.ones((3, 3))), "part 'a'.*observation of float64, which can't be stored as uint8"),
        (lambda obs: obs.update({"in": 3}), "part 'in.c'"),
        (
            lambda obs: obs.update(action_mask=np.ones(2)),
            r"part 'action_mask'.*mask of shape \(2,\), which must be \(3,\)",
        ),
        (lambda obs: obs.update(action_mask=[0, 1, 2]), r"mask \[0, 1, 2\].*which must be zeros and ones"),
        (lambda obs: obs.update(action_mask=[0, np.nan, 1]), "which must be zeros and ones"),
    ],
)
def test_what_can_not_be_packed_is_named(change, words):
    space = spaces.Dict(
        {
            "a": spaces.Box(0, 255, (3, 3), np.uint8),
            "b": spaces.Box(0, 1, (2,)),
            "in": spaces.Dict(c=spaces.Discrete(2)),
            "action_mask": spaces.MultiBinary(3),
        }
    )
    encode = encode_observations(space, "X").encode
    observation = dict(space.sample(), action_mask=[True, 0.0, 1])
    observation["in"] = dict(observation["in"])
    encode(observation)
    change(observation)
    with pytest.raises(ValueError, match=words):
        encode(observation)


def test_spaces_that_can_not_be_packed_are_refused():
    with pytest.raises(ConfigError, match=r"observations of Text.*Dict and Tuple of these"):
        encode_observations(spaces.Dict(a=spaces.Text(3), b=spaces.Discrete(3)), "X")
    for empty in (spaces.Dict(action_mask=spaces.MultiBinary(3)), spaces.Dict(), spaces.Tuple([])):
        with pytest.raises(ConfigError, match="holds nothing to see"):
            encode_observations(empty, "X")
    mask = encode_observations(spaces.Dict(a=spaces.Discrete(2), action_mask=spaces.MultiBinary(3)), "X").mask
    refuse_unfit_mask(mask, DISCRETE, "X")
    for action, words in (
        (MULTI, r"of shape \(3,\), and must be of shape \(5,\)"),
        (BOX, "Discrete and MultiDiscrete"),
    ):
        with pytest.raises(ConfigError, match=words):
            refuse_unfit_mask(mask, action, "X")


def test_an_environment_of_gymnasium_s_own_is_described():
    spec = envs.describe("Blackjack-v1", DEFAULT)
    assert [(part.name, part.shape, part.kind) for part in spec.parts] == [
        ("0", (32,), "vector"), ("1", (11,), "vector"), ("2", (2,), "vector"),
    ]  # fmt: skip
    assert not spec.has_images
    assert spec.mask is None
    assert isinstance(hash(spec), int)


# ------------------------------------------------------------------------------------------------------------- networks


def rooms(**options) -> tuple[EnvSpec, Any]:
    spec = envs.describe("masked_envs:Rooms-v0", DEFAULT)
    return spec, build_model(spec, NetworkOptions(**options), 0)


@pytest.mark.parametrize("network", ["auto", "nature", "impala"])
def test_every_part_is_seen_and_the_mask_acts_on_the_logits(network):
    spec, model = rooms(network=network)
    rows = torch.from_numpy(random_rows(spec, np.random.default_rng(0), 16))
    params, value = model(rows)
    assert (params.shape, value.shape) == ((16, 6), (16,))
    allowed = unpack(spec, rows)["action_mask"].bool()
    assert (params[~allowed] == MASKED_LOGIT).all()
    assert (params[allowed].abs() < 10).all()
    for part in spec.parts:
        changed = rows.clone()
        changed[:, part.bytes] = torch.from_numpy(random_rows(spec, np.random.default_rng(1), 16))[:, part.bytes]
        assert torch.equal(model(changed)[1], value) == (part.kind == "mask"), part.name
    (params[allowed].sum() + value.sum()).backward()
    assert all(parameter.grad.any() for name, parameter in model.named_parameters())


def test_an_image_alone_with_its_mask_is_read_as_without():
    """The same layers, the same initial weights, the same bits: packing changes nothing but the place of the bytes."""
    image = spaces.Box(0, 255, (36, 40, 3), np.uint8)
    plain = replace(
        vector_spec(), observation_shape=(36, 40, 3), observation_dtype=np.dtype(np.uint8), observation_kind="image"
    )
    packed = packed_spec(spaces.Dict(observation=image, action_mask=spaces.MultiBinary(3)))
    rows = torch.from_numpy(random_rows(packed, np.random.default_rng(0), 8))
    rows[:, packed.mask.bytes] = 1
    one, other = build_model(plain, NetworkOptions(), 0), build_model(packed, NetworkOptions(), 0)
    for got, wanted in zip(other(rows), one(unpack(packed, rows)["observation"].contiguous())):
        assert torch.equal(got, wanted)


def test_vectors_are_the_mlp_s():
    spec = packed_spec(spaces.Dict(a=spaces.Box(-1, 1, (2,)), b=spaces.Box(-1, 1, (2,))))
    rows = torch.from_numpy(random_rows(spec, np.random.default_rng(0), 8))
    together = rows.view(torch.float32)
    one, other = build_model(vector_spec(), NetworkOptions(), 0), build_model(spec, NetworkOptions(), 0)
    for got, wanted in zip(other(rows), one(together)):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    ("env", "options", "message"),
    [
        ("Rooms", {"network": "mlp"}, "which have images among their parts: use 'nature'"),
        ("Switches", {"network": "nature"}, "which have vectors among their parts: use 'mlp'"),
        ("Rooms", {"precision": "bf16"}, "precision bf16 is for observations that are one image"),
        ("Rooms", {"squash_actions": True}, "squash_actions is for continuous .Box. actions, and those of .*discrete"),
        ("Switches", {"state_dependent_std": True}, "state_dependent_std is for continuous .* multi_binary"),
    ],
)
def test_options_that_do_not_fit(env, options, message):
    spec = envs.describe(f"masked_envs:{env}-v0", DEFAULT)
    with pytest.raises(ConfigError, match=message):
        build_model(spec, NetworkOptions(**options), 0)


def test_squashing_needs_bounds():
    for low, high in (((-np.inf,), (1.0,)), ((0.0,), (np.inf,)), ((1.0,), (1.0,))):
        spec = vector_spec(ActionSpec("box", low=low, high=high, shape=(1,)))
        with pytest.raises(ConfigError, match="squash_actions brings actions between their bounds"):
            build_model(spec, NetworkOptions(squash_actions=True), 0)


def test_a_network_of_ones_own_reads_parts_by_name(monkeypatch):
    class Trunk(torch.nn.Module):
        def __init__(self, spec):
            super().__init__()
            self.spec, self.layer = spec, torch.nn.Linear(3, 5)

        def forward(self, rows):
            return self.layer(unpack(self.spec, rows)["sensors.wind"])

    module = ModuleType("of_parts")
    module.trunk = Trunk
    monkeypatch.setitem(sys.modules, "of_parts", module)
    spec, model = rooms(network="of_parts:trunk")
    rows = torch.from_numpy(random_rows(spec, np.random.default_rng(0), 8))
    assert (model(rows)[0][~unpack(spec, rows)["action_mask"].bool()] == MASKED_LOGIT).all()


def test_a_row_s_answer_does_not_depend_on_its_company():
    determinism.enable()
    spec, model = rooms()
    FlatParameters(model, gradients=False)
    device = torch.device("cpu")
    buckets = invariant_buckets(model, spec, 8, device)
    assert set(buckets) <= set(bucket_sizes(64))
    batch = InferenceBatch(model, spec, buckets, device)
    rows, *_ = probe_rows(spec, model.head, 8)
    noise = np.random.default_rng(1).gumbel(size=(8, 6)).astype(np.float32)
    found = []
    for size in (1, 3, 8):
        answers = []
        for start in range(0, 8, size):
            chosen = slice(start, min(start + size, 8))
            count = chosen.stop - start
            batch.obs[:count], batch.noise[:count] = rows[chosen], noise[chosen]
            answer = batch.answer(count)
            answers.append([column[:count].copy() for column in (answer.action, answer.log_prob, answer.value)])
        found.append([np.concatenate(columns).tobytes() for columns in zip(*answers)])
    assert found[0] == found[1] == found[2]
    allowed = rows[:, spec.mask.bytes]
    actions = np.frombuffer(found[0][0], np.int64)
    assert allowed[np.arange(8), actions].all()


def test_the_network_s_deviations_start_where_they_are_told():
    spec = vector_spec(BOX)
    options = {"state_dependent_std": True, "initial_log_std": -1.5}
    model = build_model(spec, NetworkOptions(**options), 0)
    params, _ = model(torch.randn(64, 4))
    torch.testing.assert_close(params[:, 2:], torch.full((64, 2), -1.5), atol=0.1, rtol=0)
    assert params[:, 2:].std() > 0, "they depend on the observation"
    assert "log_std" not in dict(model.named_parameters())
    assert configure("Pendulum-v1", **options).network.state_dependent_std
