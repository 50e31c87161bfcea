"""The convolution of images that are nearly empty: the dense one's values, gradients, and nothing of other rows."""

from __future__ import annotations

from dataclasses import replace

import hypothesis
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from htsrl import envs
from htsrl.actors.inference import InferenceBatch, invariant_buckets
from htsrl.config import NetworkOptions, SyntheticOptions
from htsrl.learner import kfac
from htsrl.models import build_model
from htsrl.models.sparse import SparseConv, few_marks, marked


def layer_of(channels: int, outputs: int, kernel: int, stride: int, padding: int, size: tuple[int, int]) -> SparseConv:
    layer = SparseConv(channels, outputs, kernel, stride, padding, size)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        layer.weight.normal_(generator=generator)
        layer.bias.normal_(generator=generator)
    return layer


def dense(layer: SparseConv, image: torch.Tensor) -> torch.Tensor:
    return F.conv2d(
        image.permute(0, 3, 1, 2).double() / 255,
        layer.weight.double(),
        layer.bias.double(),
        layer.stride,
        layer.padding,
    )


@hypothesis.given(
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(0, 2),
    st.integers(5, 11),
    st.integers(5, 11),
    st.integers(0, 2**31),
    st.sampled_from([0.0, 0.02, 0.5, 1.0]),
)
@hypothesis.settings(deadline=None, max_examples=60)
def test_values_and_gradients_are_those_of_a_dense_convolution(
    channels, kernel, stride, padding, height, width, seed, density
):
    rng = np.random.default_rng(seed)
    shape = (3, height, width, channels)
    image = torch.from_numpy(rng.integers(1, 256, shape, np.uint8) * (rng.random(shape) < density)).byte()
    layer = layer_of(channels, 4, kernel, stride, padding, (height, width))
    sums, right = layer(image), dense(layer, image)
    torch.testing.assert_close(sums.double(), right, rtol=1e-5, atol=1e-5)
    assert sums.is_contiguous(memory_format=torch.channels_last)
    direction = torch.from_numpy(rng.standard_normal(right.shape))
    parameters = [layer.weight, layer.bias]
    ours = torch.autograd.grad((sums * direction).sum(), parameters)
    for one, other in zip(ours, torch.autograd.grad((right * direction).sum(), parameters), strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-4, atol=1e-4)


def football(**options):
    spec = envs.describe("synthetic:football", SyntheticOptions())
    return (
        spec,
        build_model(spec, NetworkOptions(**options), 0),
        build_model(replace(spec, sparse=False), NetworkOptions(**options), 0),
    )


@pytest.mark.parametrize("name", ["football", "impala"])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_network_for_football_is_the_same_with_it(name, precision):
    spec, model, plain = football(network=name, precision=precision)
    obs = torch.from_numpy(few_marks(np.random.default_rng(0), (8, *spec.observation_shape)))
    assert [tuple(p.shape) for p in model.parameters()] == [tuple(p.shape) for p in plain.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), plain.parameters(), strict=True))
    tolerance = 1e-4 if precision == "float32" else 0.03
    for one, other in zip(model(obs), plain(obs), strict=True):
        assert torch.linalg.vector_norm(one - other) <= tolerance * torch.linalg.vector_norm(other)
    assert isinstance(model.trunk[0], SparseConv)
    assert model.row_bytes <= plain.row_bytes


def test_bf16_rounds_what_autocast_would():
    layer = layer_of(4, 8, 8, 4, 0, (24, 20))
    rounded = SparseConv(4, 8, 8, 4, 0, (24, 20), rounded=True)
    rounded.load_state_dict(layer.state_dict())
    image = torch.from_numpy(few_marks(np.random.default_rng(0), (4, 24, 20, 4)))
    actors = SparseConv(4, 8, 8, 4, 0, (24, 20), rounded=True)
    actors.load_state_dict(layer.state_dict())
    actors.bfloat16()
    assert rounded(image).dtype == torch.bfloat16
    assert torch.equal(rounded(image), actors(image))
    assert not torch.equal(rounded(image).float(), layer(image).bfloat16().float())


def test_a_row_does_not_depend_on_the_others():
    """In whatever place, beside rows with other marks and none, alone or among many."""
    layer = layer_of(16, 32, 8, 4, 0, (72, 96))
    image = torch.from_numpy(few_marks(np.random.default_rng(0), (40, 72, 96, 16)))
    together = layer(image)
    for order in (torch.arange(39, -1, -1), torch.arange(40).roll(7)):
        assert torch.equal(layer(image[order]), together[order])
    for size in (1, 3, 8):
        assert torch.equal(torch.cat([layer(some) for some in image.split(size)]), together)
    assert not torch.equal(together[0], together[1])


@pytest.mark.parametrize("shape", [(3, 4, 6, 16), (3, 5, 3, 1), (1, 1, 1, 8), (0, 2, 2, 2)])
def test_marked_finds_every_byte(shape):
    rng = np.random.default_rng(0)
    for density in (0.0, 0.1, 1.0):
        image = rng.integers(1, 256, shape, np.uint8) * (rng.random(shape) < density)
        assert marked(torch.from_numpy(image.astype(np.uint8))).tolist() == np.flatnonzero(image).tolist()


def test_actors_record_it_and_answer_rows_with_any_number_of_marks():
    spec, model, _ = football()
    with torch.inference_mode():
        buckets = invariant_buckets(model, spec, 8, torch.device("cpu"))
    batch = InferenceBatch(model, spec, buckets, torch.device("cpu"))
    assert all(
        isinstance(recorded, torch.jit.ScriptFunction | torch.jit.ScriptModule) for recorded in batch._sample.values()
    )
    rng = np.random.default_rng(1)
    for count in (0, 1, 64, 2000):
        batch.obs[:] = 0
        for row in batch.obs.reshape(len(batch.obs), -1)[:4]:
            row[rng.choice(row.size, count, replace=False)] = 255
        with torch.inference_mode():
            right = model(torch.from_numpy(batch.obs[: buckets[0]]))[1]
        assert np.array_equal(batch.answer(4).value, right[:4].numpy())


def test_kfac_sees_the_image_that_it_stands_for():
    _, model, plain = football()
    obs = torch.from_numpy(few_marks(np.random.default_rng(0), (4, 72, 96, 16)))
    moments = []
    for each in (model, plain):
        blocks = kfac.make_blocks(each)
        with kfac.recording(blocks) as tapes:
            params, _ = each(obs)
            tapes[0].add_moments(params.square().sum(), torch.full((4,), 0.25))
        moments.append(blocks[0])
    one, other = moments
    assert one.name != other.name
    torch.testing.assert_close(one.inputs_now, other.inputs_now)
    torch.testing.assert_close(one.outputs_now, other.outputs_now)
