"""K-FAC's factors against exact Fisher matrices where they are exact, and against slow oracles where they are not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from rollouts import BOX, DISCRETE, MULTI, image_spec, network, vector_spec
from torch import nn

from htsrl.errors import ConfigError
from htsrl.learner import kfac, minibatches
from htsrl.models import FlatParameters
from htsrl.models.networks import ActorCritic, on_trunk


def on(trunk, features, obs, action=DISCRETE, seed=0):
    """An ActorCritic on ``trunk``, as build_model would leave it for observations like ``obs``."""
    spec = vector_spec(action)
    model, _ = network(spec)
    options = type("Options", (), {"initial_log_std": 0.0, "recurrent": "none"})
    model = on_trunk(trunk, features, model.head, options, torch.Generator().manual_seed(seed))
    model.blank = torch.zeros_like(obs[:4])
    model.row_bytes = 4 * obs[0].numel()
    FlatParameters(model)
    return model


def normal(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, np.float32))


def moments(model, obs, log_likelihood, weight):
    """The blocks of ``model`` by name, with the moments of one pass over ``obs``."""
    blocks = kfac.make_blocks(model)
    with kfac.recording(blocks) as (tape,):
        tape.add_moments(log_likelihood(*model(obs)), weight)
    return {block.name: block for block in blocks}


def fisher_of(block, model, obs, log_likelihood, weight):
    """Σ_m weight[m] ∇ ∇ᵀ, ∇ of row m's log-likelihood by the layer's W column by column, as in A ⊗ G: [I*O, I*O]."""
    total = 0
    for m in range(len(obs)):
        parameters = [p for p in (block.layer.weight, block.layer.bias) if p is not None]
        gradients = torch.autograd.grad(log_likelihood(*model(obs[m : m + 1]), m), parameters)
        rows = kfac.weight_rows(block.layer, gradients[0], gradients[1] if len(gradients) > 1 else None)
        column = rows.T.flatten()
        total = total + weight[m] * torch.outer(column, column)
    return total


# -------------------------------------------------------------------------------------------- where K-FAC is exact


def every_action(model, obs):
    """Each row of ``obs`` with each action, weighted by its probability: expectations instead of samples."""
    with torch.no_grad():
        probabilities = model(obs)[0].softmax(-1)
    choices = probabilities.shape[1]
    action = torch.arange(choices).repeat(len(obs))
    return obs.repeat_interleave(choices, 0), action, probabilities.flatten() / len(obs)


@pytest.mark.parametrize("bias", [True, False])
def test_one_softmax_layer_and_one_observation(bias):
    """A ⊗ G is E[a aᵀ ⊗ g gᵀ] exactly, because the input is the same in every row."""
    obs = normal(1, 4)
    model = on(nn.Flatten(), 4, obs)
    if not bias:
        model.policy.bias = None
    with torch.no_grad():
        model.policy.weight.mul_(100.0)  # far from uniform
    obs, action, weight = every_action(model, obs)
    assert weight.max() > 2 * weight.min()

    def log_likelihood(params, value, m=slice(None)):
        return model.head.log_prob(params, action[m].reshape(-1)).sum()

    block = moments(model, obs, log_likelihood, weight)["policy"]
    expected = fisher_of(block, model, obs, log_likelihood, weight)
    assert expected.shape == ((4 + bias) * 3,) * 2
    torch.testing.assert_close(torch.kron(block.inputs_now, block.outputs_now), expected, rtol=1e-4, atol=1e-6)


def test_a_uniform_softmax_layer_and_any_observations():
    """Where the policy is the same everywhere, its derivatives don't depend on the input."""
    obs = normal(30, 4)
    model = on(nn.Flatten(), 4, obs)
    with torch.no_grad():
        model.policy.weight.zero_()
        model.policy.bias.copy_(torch.tensor([1.0, 0.0, -1.0]))
    obs, action, weight = every_action(model, obs)

    def log_likelihood(params, value, m=slice(None)):
        return model.head.log_prob(params, action[m].reshape(-1)).sum()

    block = moments(model, obs, log_likelihood, weight)["policy"]
    expected = fisher_of(block, model, obs, log_likelihood, weight)
    torch.testing.assert_close(torch.kron(block.inputs_now, block.outputs_now), expected, rtol=1e-3, atol=1e-5)


def test_every_layer_of_a_deep_linear_critic():
    """Derivatives of a linear network's output are the same for all inputs, so all blocks are Gauss-Newton's."""
    obs = normal(20, 4)
    model = on(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), 3, obs).requires_grad_(True)
    noise = torch.tensor([1.0, -1.0]).repeat(len(obs))  # two values with the mean and variance of the normal noise
    obs, weight = obs.repeat_interleave(2, 0), torch.full((40,), 1 / 40)

    def log_likelihood(params, value, m=slice(None)):
        return -0.5 * (value - value.detach() - noise[m]).square().sum()

    blocks = moments(model, obs, log_likelihood, weight)
    for name in ("trunk.0", "trunk.1", "value"):
        block = blocks[name]
        expected = fisher_of(block, model, obs, log_likelihood, weight)
        torch.testing.assert_close(
            torch.kron(block.inputs_now, block.outputs_now), expected, rtol=1e-3, atol=1e-5, msg=name
        )
    assert blocks["policy"].outputs_now.abs().max() == 0, "what the likelihood doesn't depend on has no curvature"


def test_sampled_factors_come_close_to_exact_ones():
    """Of a policy that is not uniform: A and G each are what they are said to be, whatever their product is."""
    obs = normal(8, 4)
    model = on(nn.Sequential(nn.Linear(4, 5), nn.Tanh()), 5, obs)
    with torch.no_grad():
        model.policy.weight.mul_(100.0)
        probabilities = model(obs)[0].softmax(-1)
    expected = (torch.diag_embed(probabilities) - probabilities[:, :, None] * probabilities[:, None, :]).mean(0)
    many = obs.repeat(2000, 1)
    noise = torch.from_numpy(np.random.default_rng(1).gumbel(size=(len(many), 3)).astype(np.float32))

    def log_likelihood(params, value):
        return model.head.log_prob(params, model.head.sample(params.detach(), noise)).sum()

    block = moments(model, many, log_likelihood, torch.full((len(many),), 1 / len(many)))["policy"]
    torch.testing.assert_close(block.outputs_now, expected, rtol=0.05, atol=0.01)
    features = torch.cat((model.trunk(obs), torch.ones(8, 1)), 1)
    torch.testing.assert_close(block.inputs_now, features.T @ features / 8, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------ a layer's tensors

LAYERS = [
    (nn.Linear(3, 5), (3,)),
    (nn.Linear(3, 5, bias=False), (3,)),
    (nn.Linear(3, 5), (4, 2, 3)),  # at each of 4 x 2 positions
    (nn.Conv2d(2, 5, 3), (2, 6, 5)),
    (nn.Conv2d(2, 5, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)), (2, 7, 6)),
    (nn.Conv2d(2, 5, 3, padding=1, bias=False), (2, 4, 5)),
]


def oracle_patches(layer, x):
    """[M, S, I] by slicing out each patch, channels first, in the order of a weight's elements."""
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = layer.kernel_size, layer.stride, layer.padding, layer.dilation
    x = np.pad(x.numpy(), ((0, 0), (0, 0), (ph, ph), (pw, pw)))
    rows = []
    for top in range(0, x.shape[2] - dh * (kh - 1), sh):
        for left in range(0, x.shape[3] - dw * (kw - 1), sw):
            patch = x[:, :, top : top + dh * kh : dh, left : left + dw * kw : dw]
            assert patch.shape[2:] == (kh, kw)
            ones = np.ones((len(x), int(layer.bias is not None)), np.float32)
            rows.append(np.concatenate((patch.reshape(len(x), -1), ones), 1))
    return np.stack(rows, 1)


@pytest.mark.parametrize(("layer", "shape"), [case for case in LAYERS if isinstance(case[0], nn.Conv2d)])
def test_patches_are_those_of_the_oracle(layer, shape):
    x = normal(3, *shape).contiguous(memory_format=torch.channels_last)
    expected = oracle_patches(layer, x)
    np.testing.assert_array_equal(kfac.input_rows(layer, x).numpy(), expected)


@pytest.mark.parametrize(("layer", "shape"), LAYERS)
def test_rows_belong_together(layer, shape):
    """Σ g aᵀ over rows and positions is the layer's gradient, so inputs and derivatives stand at the same positions."""
    x = normal(3, *shape)
    out = layer(x)
    g = normal(*out.shape, seed=1)
    gradients = torch.autograd.grad(out, [p for p in (layer.weight, layer.bias) if p is not None], g)
    expected = kfac.weight_rows(layer, gradients[0], gradients[1] if len(gradients) > 1 else None)
    a, g = kfac.input_rows(layer, x), kfac.output_rows(layer, g)
    torch.testing.assert_close(torch.einsum("mso,msi->oi", g, a), expected, rtol=1e-4, atol=1e-5)


class Wrapped(nn.Module):
    """``layer`` on observations of its own shape, with its outputs flattened."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x).flatten(1)


@pytest.mark.parametrize("rows_at_once", [1, 2, 99])
@pytest.mark.parametrize(("layer", "shape"), LAYERS)
def test_moments_are_means_over_positions_and_sums_of_derivatives(monkeypatch, layer, shape, rows_at_once):
    obs, weight = normal(5, *shape), torch.tensor([0.1, 0.4, 0.0, 0.3, 0.2])
    model = on(Wrapped(layer), layer(obs)[0].numel(), obs)
    a = kfac.input_rows(layer, obs)
    monkeypatch.setattr(minibatches, "PIECE_BYTES", {"cpu": 4 * a[0].numel() * rows_at_once})
    c = normal(5, model(obs)[0].shape[1], seed=2)
    blocks = moments(model, obs, lambda params, value: (params * c).sum() + value.square().sum(), weight)
    # The derivatives by hand, one row at a time
    outputs = 0
    for m in range(len(obs)):
        out = layer(obs[m : m + 1]).detach().requires_grad_(True)
        features = out.flatten(1)
        loss = (model.policy(features) * c[m]).sum() + model.value(features).square().sum()
        g = kfac.output_rows(layer, torch.autograd.grad(loss, out)[0])[0]
        outputs = outputs + weight[m] * g.T @ g
    block = blocks["trunk.layer"]
    expected = torch.einsum("m,msi,msj->ij", weight, a, a) / a.shape[1]
    torch.testing.assert_close(block.inputs_now, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(block.outputs_now, outputs, rtol=1e-4, atol=1e-5)
    trace = sum(float(b.inputs_now.trace() * b.outputs_now.trace()) for b in blocks.values())
    assert float(kfac.fisher_trace(list(blocks.values()))) == pytest.approx(trace, rel=1e-5)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_moments_add_up_over_pieces_and_parts(parts):
    obs, weight = normal(7, 4), torch.full((7,), 1 / 7)
    model = on(nn.Sequential(nn.Linear(4, 5), nn.Tanh()), 5, obs)

    def log_likelihood(params, value):
        return params.square().sum() + value.sum()

    whole = moments(model, obs, log_likelihood, weight)
    blocks = kfac.make_blocks(model, parts)
    for _ in range(2):  # the second time starts at zero again
        with kfac.recording(blocks) as tapes:
            for k, some in enumerate((slice(0, 3), slice(3, 5), slice(5, 7))):
                tapes[k % parts].add_moments(log_likelihood(*model(obs[some])), weight[some])
    for block in blocks:
        torch.testing.assert_close(block.inputs_now, whole[block.name].inputs_now)
        torch.testing.assert_close(block.outputs_now, whole[block.name].outputs_now)


@pytest.mark.parametrize("name", ["nature", "impala"])
def test_a_relu_that_writes_over_a_layers_output_changes_nothing(name):
    spec = image_spec(36, 36, 2)
    model, _ = network(spec, network=name)
    careful, _ = network(spec, network=name)
    for module in careful.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    obs = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (5, 36, 36, 2), np.uint8))
    weight = torch.full((5,), 0.2)

    def log_likelihood(params, value):
        return params.square().sum() + value.square().sum()

    ours = moments(model, obs, log_likelihood, weight)
    theirs = moments(careful, obs, log_likelihood, weight)
    assert sum(module.inplace for module in model.modules() if isinstance(module, nn.ReLU)) > 0
    for name, block in ours.items():
        torch.testing.assert_close(block.outputs_now, theirs[name].outputs_now, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(block.inputs_now, theirs[name].inputs_now, rtol=1e-4, atol=1e-7)
    # What a derivative by the output after the ReLU would not give
    first = next(module for module in careful.modules() if isinstance(module, nn.Conv2d))
    seen = []
    hook = first.register_forward_hook(lambda layer, inputs, output: seen.append(output))
    (g,) = torch.autograd.grad(log_likelihood(*careful(obs)), seen)
    hook.remove()
    rows = kfac.output_rows(first, g)
    expected = torch.einsum("mso,msp->op", rows, rows) / 5
    torch.testing.assert_close(next(iter(ours.values())).outputs_now, expected, rtol=1e-4, atol=1e-7)


def test_hooks_are_gone_afterwards():
    model, _ = network(vector_spec())
    blocks = kfac.make_blocks(model)
    with kfac.recording(blocks):
        assert all(len(block.layer._forward_hooks) == 1 for block in blocks)
    assert all(not module._forward_hooks for module in model.modules())
    with pytest.raises(RuntimeError), kfac.recording(blocks):
        model(torch.zeros(4, 99))  # doesn't fit
    assert all(not module._forward_hooks for module in model.modules())


# ----------------------------------------------------------------------------------------------------- the inverse


@pytest.mark.parametrize("damping", [1e-3, 0.1])
@pytest.mark.parametrize(("layer", "shape"), LAYERS)
def test_the_natural_gradient_is_the_explicit_solution(layer, shape, damping):
    obs = normal(4, *shape)
    model = on(Wrapped(layer), layer(obs)[0].numel(), obs)
    (block,) = [block for block in kfac.make_blocks(model) if block.name == "trunk.layer"]
    for factor in (block.inputs, block.outputs):
        rows = normal(len(factor) + 1, len(factor), seed=3)
        factor.copy_(rows.T @ rows / len(rows))
    for p in (layer.weight, layer.bias):
        if p is not None:
            p.grad.copy_(normal(*p.shape, seed=4))

    def rows():
        return kfac.weight_rows(layer, layer.weight.grad, None if layer.bias is None else layer.bias.grad)

    gradient = rows().double()
    kfac.decompose(block)
    kfac.precondition(block, damping)
    fisher = torch.kron(block.inputs.double(), block.outputs.double()) + damping * torch.eye(gradient.numel())
    expected = torch.linalg.solve(fisher, gradient.T.flatten()).view(gradient.T.shape).T
    torch.testing.assert_close(rows().double(), expected, rtol=2e-3, atol=2e-3 * float(expected.abs().max()))


def test_a_singular_factor_is_damped():
    obs = normal(4, 3)
    model = on(nn.Flatten(), 3, obs)
    block = kfac.make_blocks(model)[0]
    block.inputs.copy_(torch.ones_like(block.inputs))
    block.outputs.zero_()
    block.layer.weight.grad.fill_(1.0)
    block.layer.bias.grad.fill_(2.0)
    kfac.decompose(block)
    assert block.inputs_values.min() >= 0
    kfac.precondition(block, 0.5)
    torch.testing.assert_close(block.layer.weight.grad, torch.full_like(block.layer.weight, 2.0))
    torch.testing.assert_close(block.layer.bias.grad, torch.full_like(block.layer.bias, 4.0))


@pytest.mark.parametrize("spread", [0.0, 0.001])
def test_a_factor_of_few_rows_is_decomposed(spread):
    """Most of its eigenvalues are 0, as behind a ReLU after a few frames that are nearly the same."""
    block = kfac.make_blocks(on(nn.Flatten(), 512, normal(64, 512)))[0]
    for seed in range(4):
        rows = (normal(512, seed=seed) + spread * normal(64, 512, seed=100 + seed)).clamp(min=0.0)
        rows = kfac.input_rows(block.layer, rows)[:, 0]
        block.inputs.copy_(rows.T @ rows / 64)
        kfac.decompose(block)
        again = (block.inputs_basis * block.inputs_values) @ block.inputs_basis.T
        torch.testing.assert_close(again, block.inputs, rtol=0.0, atol=1e-5 * float(block.inputs_values.max()))


def test_running_factors():
    obs = normal(4, 3)
    block = kfac.make_blocks(on(nn.Flatten(), 3, obs))[0]
    for k, keep in enumerate((0.0, 0.5, 0.75)):
        block.inputs_now.fill_(4.0 * (k + 1))
        block.outputs_now.fill_(-4.0 * (k + 1))
        kfac.average(block, keep)
    expected = 0.75 * (0.5 * 4 + 0.5 * 8) + 0.25 * 12
    assert torch.equal(block.inputs, torch.full_like(block.inputs, expected))
    assert torch.equal(block.outputs, torch.full_like(block.outputs, -expected))


# --------------------------------------------------------------------------------------------- what is not known


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(self.layer(x))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.scale


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))


class Folded(nn.Module):
    """Takes the observation's numbers two at a time as rows."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x.view(-1, 2)).view(-1, 4)


class Image(nn.Module):
    """``convolution`` [1 to 4 channels] on the observation as a 2x2 image."""

    def __init__(self, convolution):
        super().__init__()
        self.convolution = convolution

    def forward(self, x):
        return self.convolution(x.view(-1, 1, 2, 2).expand(-1, 2, 2, 2)).mean((2, 3))


@pytest.mark.parametrize(
    ("trunk", "words"),
    [
        (
            nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)),
            "layer 'trunk.1' \\(LayerNorm\\) .*: it knows Linear, and Con",
        ),
        (Scaled(), "layer 'trunk' \\(Scaled\\) .*: it knows Linear"),
        (Image(nn.ConvTranspose2d(2, 4, 1)), "'trunk.convolution' \\(ConvTranspose2d\\)"),
        (
            Image(nn.Conv2d(2, 4, 1, groups=2)),
            "'trunk.convolution' \\(Conv2d\\) .*: it knows Linear, and Conv2d with one",
        ),
        (Image(nn.Conv2d(2, 4, 2, padding="same")), "'trunk.convolution' \\(Conv2d\\)"),
        (Image(nn.Conv2d(2, 4, 2, padding=1, padding_mode="reflect")), "'trunk.convolution' \\(Conv2d\\)"),
        (nn.MultiheadAttention(4, 2), "MultiheadAttention"),
        (Twice(), "layer 'trunk.layer' \\(Linear\\) .*: one pass uses it 2 times"),
        (Tied(), "layer 'trunk.second' \\(Linear\\) .*: it shares a parameter with trunk.first"),
        (Folded(), "layer 'trunk.layer' \\(Linear\\) .*: 4 observations reach it as 8 rows"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_layers_that_are_not_known_are_refused_in_one_sentence(trunk, words):
    with pytest.raises(ConfigError, match=f"^acktr can't train the {words}" if words[0] == "l" else words) as refusal:
        kfac.make_blocks(on(trunk, 4, normal(4, 4)))
    assert "\n" not in str(refusal.value)
    assert str(refusal.value).endswith("change the network or use another algorithm")


@pytest.mark.parametrize("action", [DISCRETE, MULTI, BOX], ids=["discrete", "multi_discrete", "box"])
@pytest.mark.parametrize(
    ("spec", "name", "layers"), [(vector_spec, "mlp", 6), (image_spec, "nature", 6), (image_spec, "impala", 18)]
)
def test_the_networks_of_the_package_are_known(spec, name, layers, action):
    spec = vector_spec(action) if spec is vector_spec else image_spec(36, 36, 1, action=action)
    model, parameters = network(spec, network=name)
    blocks = kfac.make_blocks(model)
    assert len(blocks) == layers
    covered = sum(p.numel() for block in blocks for p in block.layer.parameters())
    assert covered + (2 if action is BOX else 0) == len(parameters)


def test_a_network_that_computes_in_bfloat16_is_not_known():
    """The settings refuse it before; this is what would hold if they didn't."""
    model, _ = network(image_spec(84, 84, 4), precision="bf16")
    with pytest.raises(ConfigError, match=r"'trunk\.1' \(BlockConv\)"):
        kfac.make_blocks(model)


def test_a_layer_that_is_never_used_changes_nothing():
    class Spare(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.spare, self.dead_end = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            self.dead_end(x)
            return self.used(x)

    obs = normal(4, 4)
    model = on(Spare(), 4, obs)
    assert isinstance(model, ActorCritic)
    blocks = moments(model, obs, lambda params, value: params.sum() + value.sum(), torch.full((4,), 0.25))
    assert [blocks[f"trunk.{name}"].outputs_now.abs().max() > 0 for name in ("used", "spare", "dead_end")] == [
        True, False, False
    ]  # fmt: skip
