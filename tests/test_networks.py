from __future__ import annotations

import sys
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rollouts import BOX, DISCRETE, MULTI, image_spec, network, vector_spec
from torch import nn

from htsrl.config import NetworkOptions
from htsrl.errors import ConfigError
from htsrl.models import FlatParameters, build_model, networks
from htsrl.models.networks import ScaledImage

CNNS = [("nature", (84, 84, 4)), ("football", (72, 96, 16)), ("impala", (30, 41, 3))]


def images(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape, np.uint8))


def sha(model: nn.Module) -> int:
    return hash(tuple(p.detach().contiguous().numpy().tobytes() for p in model.parameters()))


@pytest.mark.parametrize("rows", [4, 8, 20])
@pytest.mark.parametrize("action", [DISCRETE, MULTI, BOX], ids=["discrete", "multi_discrete", "box"])
def test_mlp_in_inference_mode(action, rows):
    model = build_model(vector_spec(action), NetworkOptions(), 0)
    with torch.inference_mode():
        params, value = model(torch.randn(rows, 4))
    assert params.shape == (rows, model.head.param_size)
    assert value.shape == (rows,)
    assert params.dtype == value.dtype == torch.float32


@pytest.mark.parametrize(("name", "shape"), CNNS)
def test_cnn_in_inference_mode(name, shape):
    model = build_model(image_spec(*shape), NetworkOptions(network=name), 0)
    for rows in (4, 8):
        with torch.inference_mode():
            params, value = model(images(rows, *shape))
        assert params.shape == (rows, 3)
        assert value.shape == (rows,)


@pytest.mark.parametrize(("name", "shape"), CNNS)
def test_images_stay_channels_last(name, shape):
    """No layer's input, output or weight is ever in another order, so no kernel reorders behind the scenes."""
    model, parameters = network(image_spec(*shape), network=name)
    seen = []

    def note(module, inputs, output):
        for x in (*inputs, output):
            if x.dim() == 4:
                seen.append(x.is_contiguous(memory_format=torch.channels_last))

    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.ReLU | nn.MaxPool2d):
            module.register_forward_hook(note)
        if isinstance(module, nn.Conv2d):
            assert module.weight.is_contiguous(memory_format=torch.channels_last)
            assert module.weight.grad.is_contiguous(memory_format=torch.channels_last)
            start = parameters.vector.untyped_storage()
            assert module.weight.untyped_storage().data_ptr() == start.data_ptr()
    params, value = model(images(4, *shape))
    (params.sum() + value.sum()).backward()
    assert len(seen) >= 9
    assert all(seen)
    assert parameters.vector.grad.abs().sum() > 0


def test_the_image_is_viewed_and_the_features_are_flattened_without_a_copy():
    model = build_model(image_spec(84, 84, 4), NetworkOptions(), 0)
    obs = images(4, 84, 84, 4)
    scaled = model.trunk[0](obs)
    torch.testing.assert_close(scaled, obs.permute(0, 3, 1, 2).float() / 255)
    features = model.trunk[:7](obs)
    flat = model.trunk[7](features)
    assert flat.data_ptr() == features.data_ptr()
    assert flat.is_contiguous()
    assert flat.shape == (4, 7 * 7 * 64)


def test_float_images_are_not_scaled_and_not_written():
    image = torch.rand(4, 40, 40, 3)
    before = image.clone()
    torch.testing.assert_close(ScaledImage(np.dtype(np.float32), NetworkOptions())(image), before.permute(0, 3, 1, 2))
    spec = replace(image_spec(40, 40, 3), observation_dtype=np.dtype(np.float32))
    build_model(spec, NetworkOptions(), 0)(image)
    assert torch.equal(image, before)


def test_nature_cnn_has_the_papers_layers():
    model = build_model(image_spec(84, 84, 4), NetworkOptions(), 0)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if name.endswith("weight")}
    assert list(shapes.values()) == [(32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3), (512, 3136), (3, 512), (1, 512)]


def test_impala_cnn_has_the_papers_size():
    model = build_model(image_spec(84, 84, 4), NetworkOptions(network="impala"), 0)
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert [m.out_channels for m in convolutions] == [16] * 5 + [32] * 5 + [32] * 5
    assert {tuple(m.kernel_size) for m in convolutions} == {(3, 3)}
    fully_connected = next(m for m in model.trunk if isinstance(m, nn.Linear))
    assert (fully_connected.in_features, fully_connected.out_features) == (11 * 11 * 32, 256)


def test_policy_and_value_of_the_mlp_share_nothing():
    model, _ = network(vector_spec(), hidden_sizes=(5, 7), activation="relu")
    assert [m.out_features for m in model.policy if isinstance(m, nn.Linear)] == [5, 7, 3]
    assert [m.out_features for m in model.value if isinstance(m, nn.Linear)] == [5, 7, 1]
    assert isinstance(model.policy[1], nn.ReLU)
    model(torch.randn(4, 4))[1].sum().backward()
    grads = {name: float(p.grad.abs().sum()) for name, p in model.named_parameters()}
    assert all((value == 0) == name.startswith("policy") for name, value in grads.items() if name != "value.0.bias")


def test_initialisation():
    """Orthogonal with gain √2, near-uniform policy, zero biases, the given deviation."""
    model = build_model(vector_spec(BOX), NetworkOptions(initial_log_std=-0.7), 0)
    hidden = model.policy[2].weight.detach()
    torch.testing.assert_close(hidden @ hidden.T, 2.0 * torch.eye(64), atol=1e-4, rtol=0)
    assert float(torch.linalg.matrix_norm(model.policy[-1].weight.detach(), 2)) == pytest.approx(0.01, rel=1e-4)
    assert float(model.value[-1].weight.detach().norm()) == pytest.approx(1.0, rel=1e-4)
    assert all((p == 0).all() for name, p in model.named_parameters() if name.endswith("bias"))
    params, _ = model(torch.randn(6, 4))
    torch.testing.assert_close(params[:, 2:], torch.full((6, 2), -0.7))
    assert model.log_std is not None
    assert build_model(vector_spec(), NetworkOptions(), 0).log_std is None


@pytest.mark.parametrize("name", ["nature", "impala"])
def test_features_keep_their_scale(name):
    model = build_model(image_spec(84, 84, 4), NetworkOptions(network=name), 0)
    with torch.no_grad():
        features = model.trunk(images(8, 84, 84, 4))
    assert 0.1 < float(features.square().mean().sqrt()) < 3.0


def test_initial_parameters_depend_on_the_seed_alone():
    spec, options = image_spec(72, 96, 16), NetworkOptions()
    first = sha(build_model(spec, options, 3))
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.manual_seed(77)
    torch.set_num_threads(3 - min(threads, 2))
    try:
        during = torch.get_rng_state()
        assert sha(build_model(spec, options, 3)) == first
        assert torch.equal(torch.get_rng_state(), during), "the global generator is nobody's"
        assert torch.get_num_threads() == 3 - min(threads, 2)
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(state)
    assert sha(build_model(spec, options, 4)) != first


@pytest.mark.parametrize(
    ("spec", "name", "floats"),
    [
        (vector_spec(size=300), "mlp", 300),
        (vector_spec(), "mlp", 64),
        (image_spec(84, 84, 4), "nature", 84 * 84 * 4),
        (image_spec(84, 84, 4), "impala", 84 * 84 * 16),
    ],
)
def test_the_widest_row_is_known(spec, name, floats):
    assert build_model(spec, NetworkOptions(network=name), 0).row_bytes == 4 * floats


def test_auto_goes_by_the_observations():
    assert isinstance(build_model(vector_spec(), NetworkOptions(), 0).trunk, nn.Flatten)
    for shape in ((84, 84, 4), (72, 96, 16)):
        trunk = build_model(image_spec(*shape), NetworkOptions(), 0).trunk
        assert trunk[1].weight.shape == (32, shape[-1], 8, 8)


@pytest.mark.parametrize(
    ("spec", "name", "message"),
    [
        (image_spec(84, 84, 4), "mlp", "which are images of shape 84x84x4: use 'nature', 'football' or 'impala'"),
        (vector_spec(), "nature", "which are vectors of shape 4: use 'mlp'"),
        (vector_spec(), "impala", "which are vectors of shape 4: use 'mlp'"),
        (image_spec(35, 84, 4), "auto", "at least 36x36 pixels and those of test are 35x84x4: use 'impala'"),
        (image_spec(10, 10, 3), "football", "at least 36x36 pixels"),
    ],
)
def test_networks_that_do_not_fit(spec, name, message):
    with pytest.raises(ConfigError, match=message):
        build_model(spec, NetworkOptions(network=name), 0)


def test_the_smallest_images():
    assert build_model(image_spec(36, 36, 1), NetworkOptions(), 0)(images(4, 36, 36, 1))[0].shape == (4, 3)
    model = build_model(image_spec(5, 3, 1), NetworkOptions(network="impala"), 0)
    assert model(images(4, 5, 3, 1))[0].shape == (4, 3)


# ------------------------------------------------------------------------------------------- a network of the user's


@pytest.fixture
def mine(monkeypatch):
    module = types.ModuleType("my_networks")
    module.good = lambda spec: nn.Sequential(nn.Linear(spec.observation_shape[0], 9), nn.Tanh())
    module.wrong = lambda spec: nn.Flatten(0)
    module.broken = lambda spec: nn.Linear(99, 9)
    module.norm = lambda spec: nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9))
    module.drop = lambda spec: nn.Sequential(nn.Linear(4, 9), nn.Dropout(0.1))
    monkeypatch.setitem(sys.modules, "my_networks", module)


@pytest.mark.usefixtures("mine")
def test_a_network_of_ones_own():
    options = NetworkOptions(network="my_networks:good")
    state = torch.get_rng_state()
    model = build_model(vector_spec(BOX), options, 1)
    assert torch.equal(torch.get_rng_state(), state)
    params, value = model(torch.randn(4, 4))
    assert params.shape == (4, 4)
    assert value.shape == (4,)
    torch.manual_seed(5)
    assert sha(build_model(vector_spec(BOX), options, 1)) == sha(model), "its own initialisers are seeded by the run"
    torch.set_rng_state(state)
    assert sha(build_model(vector_spec(BOX), options, 2)) != sha(model)
    FlatParameters(model)


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:f", "can't be imported: ModuleNotFoundError: No module named"),
        (".no_package:f", "can't be imported: TypeError"),
        ("my_networks:missing", "can't be imported: .*missing"),
        ("my_networks:wrong", r"must turn 4 observations \[4, 4\] into float32 features \[4, F\]"),
        ("my_networks:broken", "doesn't work for test"),
        ("my_networks:norm", "BatchNorm1d .* does not treat rows one by one"),
        ("my_networks:drop", "Dropout .* does not treat rows one by one"),
    ],
)
def test_a_network_of_ones_own_that_fails(name, message):
    with pytest.raises(ConfigError, match=message):
        build_model(vector_spec(), NetworkOptions(network=name), 0)


def test_a_network_of_ones_own_is_found_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "here_only.py").write_text("from torch import nn\ndef f(spec): return nn.Linear(4, 3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert build_model(vector_spec(), NetworkOptions(network="here_only:f"), 0).custom


def test_network_names_are_checked():
    with pytest.raises(ValueError, match="must be one of auto, mlp, nature, football, impala or module:function"):
        NetworkOptions(network="resnet")


# ------------------------------------------------------------------------------------------------------------- bfloat16


@pytest.mark.parametrize(("name", "shape"), CNNS)
def test_bf16_is_near_float32_and_gives_float32(name, shape):
    spec = image_spec(*shape)
    obs = images(8, *shape)
    exact, rounded = (build_model(spec, NetworkOptions(network=name, precision=p), 0) for p in ("float32", "bf16"))
    assert sha(exact) == sha(rounded)
    (params, value), (near_params, near_value) = exact(obs), rounded(obs)
    assert near_params.dtype == near_value.dtype == torch.float32
    for near, right in ((near_value, value), (near_params, params)):
        assert 0 < torch.linalg.vector_norm(near - right) < 0.03 * torch.linalg.vector_norm(right)


def test_wrong_kernels_are_refused(monkeypatch):
    """PyTorch 2.13's own for AMX are, where this machine has it; elsewhere this stands in for them."""
    monkeypatch.setattr(networks.BlockConv, "forward", lambda self, x: F.conv2d(x, self.weight.new_ones(32, 64, 2, 2)))
    with pytest.raises(ConfigError, match="bfloat16 kernels are off"):
        build_model(image_spec(84, 84, 4), NetworkOptions(precision="bf16"), 0)


def test_an_actor_rounds_the_weights_once_and_answers_as_the_learner_would():
    spec = image_spec(84, 84, 4)
    options = NetworkOptions(precision="bf16")
    learner, actor = build_model(spec, options, 0), build_model(spec, options, 1)
    newest, copy = FlatParameters(learner), FlatParameters(actor, gradients=False)
    obs = images(8, 84, 84, 4)
    copy.assign(newest.vector)
    assert {p.dtype for p in actor.trunk.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in actor.policy.parameters()} == {torch.float32}
    for _ in range(2):
        with torch.inference_mode():
            assert torch.equal(actor(obs)[0], learner(obs)[0])
        newest.vector.mul_(1.5)
        copy.load(dict(newest.items()))
    assert all(np.array_equal(a, b) for (_, a), (_, b) in zip(newest.items(), copy.items(), strict=True))


def test_bf16_gradients_are_float32_in_the_one_vector():
    model, parameters = network(image_spec(84, 84, 4), precision="bf16")
    params, value = model(images(4, 84, 84, 4))
    (params.square().sum() + value.sum()).backward()
    assert parameters.vector.grad.dtype == torch.float32
    assert all(p.grad.abs().sum() > 0 for p in model.trunk.parameters())


def test_bf16_is_refused_for_vectors():
    with pytest.raises(ConfigError, match="precision bf16 pays for networks that read images"):
        build_model(vector_spec(DISCRETE), NetworkOptions(precision="bf16"), 0)
