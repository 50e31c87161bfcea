"""ACKTR's update against an explicit one, its trust region, its state, and whole runs under the delayed rule."""

from __future__ import annotations

import random
import sys
import time
import types
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from recording import record
from rollouts import BOX, DISCRETE, MULTI, image_spec, network, rollout, vector_spec
from test_a2c import norm_of, plain_gradient
from test_resume import bits, interrupted, no_changes, settings_for
from test_runtime import assert_same_bits, digests
from torch import nn

from htsrl import settings, training
from htsrl.config import ACKTROptions
from htsrl.errors import ConfigError, NonFinite
from htsrl.learner import kfac, minibatches
from htsrl.learner.acktr import ACKTR, Noise, step_size
from htsrl.learner.gradient import accumulate_gradient
from htsrl.learner.minibatches import Rows
from htsrl.models import FlatParameters

WARM = {"cold_updates": 0, "momentum": 0.0, "lr_schedule": "constant"}


def draws(seed=0):
    return np.random.default_rng(seed)


def learner(spec=None, steps=8, net=None, parts=1, **options):
    spec = spec or vector_spec()
    model, parameters = network(spec, **(net or {}))
    if parts > 1:
        parameters = FlatParameters(model, shards=parts)
    return ACKTR(ACKTROptions(**options), model, parameters), rollout(spec, model, steps)


# ----------------------------------------------------------------------------------------------------- the update


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("action", [DISCRETE, MULTI, BOX], ids=["discrete", "multi_discrete", "box"])
def test_a_cold_step_is_along_the_papers_gradient(action, normalize):
    """Actor-critic's gradient, which taking the Fisher matrix's moments on the way must not touch; and momentum."""
    algorithm, data = learner(
        vector_spec(action), max_grad_norm=1e9, normalize_advantage=normalize, gae_lambda=0.9, momentum=0.75,
        cold_updates=2, cold_learning_rate=0.01,
    )  # fmt: skip
    average = dict.fromkeys(dict(algorithm.model.named_parameters()), 0.0)
    for _ in range(2):
        before = {name: p.detach().clone() for name, p in algorithm.model.named_parameters()}
        expected = plain_gradient(algorithm.options, algorithm.model, data)
        metrics = algorithm.update(data, 0.5, draws())
        assert metrics["loss/grad_norm"] == pytest.approx(norm_of(expected), rel=1e-4)
        assert metrics["learning_rate"] == 0.01
        for name, p in algorithm.model.named_parameters():
            average[name] = 0.75 * average[name] + 0.25 * 0.01 * expected[name]
            torch.testing.assert_close(p.detach(), before[name] - average[name], rtol=1e-4, atol=1e-6, msg=name)


def explicit_natural(algorithm, gradients):
    """(F + λ)⁻¹ g with F in full, in float64, from the running factors; log_std's Fisher matrix is 2."""
    damping, natural = algorithm.options.damping, {}
    for block in algorithm.blocks:
        weight, bias = (f"{block.name}.{kind}" for kind in ("weight", "bias"))
        rows = kfac.weight_rows(block.layer, gradients[weight], gradients[bias]).double()
        fisher = torch.kron(block.inputs.double(), block.outputs.double()) + damping * torch.eye(rows.numel())
        solution = torch.linalg.solve(fisher, rows.T.flatten()).view(rows.T.shape).T
        natural[weight], natural[bias] = solution[:, :-1].view_as(gradients[weight]), solution[:, -1]
    if "log_std" in gradients:
        natural["log_std"] = gradients["log_std"].double() / (2.0 + damping)
    return natural


@pytest.mark.parametrize("kl_clip", [1e-6, 1e9])
@pytest.mark.parametrize(
    ("spec", "net"),
    [
        (vector_spec(DISCRETE), {"hidden_sizes": (5,)}),
        (vector_spec(BOX), {"hidden_sizes": (5, 4)}),
        (image_spec(36, 36, 1), {"network": "shared"}),
    ],
    ids=["discrete", "box", "shared"],
)
def test_natural_steps_are_explicit_ones(small_networks, spec, net, kl_clip):
    """Two updates: θ' = θ - m, m = μ m + (1-μ) η v, with v and η by hand from the factors of that update."""
    algorithm, data = learner(
        spec, net=net, kl_clip=kl_clip, cold_updates=0, momentum=0.5, kfac_interval=1, damping=0.05, max_grad_norm=0.1
    )
    networks = [["trunk", "policy", "value"]] if "network" in net else [["policy", "log_std"], ["value"]]
    average = {name: 0.0 for name, _ in algorithm.model.named_parameters()}
    for progress in (0.2, 0.6):
        before = {name: p.detach().clone() for name, p in algorithm.model.named_parameters()}
        gradients = plain_gradient(algorithm.options, algorithm.model, data)
        metrics = algorithm.update(data, progress, draws())
        sizes = []
        for owners in networks:
            names = [name for name in gradients if name.split(".")[0] in owners]
            scale = min(1.0, 0.1 / norm_of({name: gradients[name] for name in names}))
            for name in names:
                gradients[name] = gradients[name] * scale
        natural = explicit_natural(algorithm, gradients)
        largest = 0.25 * (1.0 - progress)
        for owners in networks:
            names = [name for name in gradients if name.split(".")[0] in owners]
            squared = sum(float((natural[name] * gradients[name]).sum()) for name in names)
            size = min(largest, np.sqrt(2.0 * kl_clip / squared))
            sizes.append(size)
            for name in names:
                average[name] = 0.5 * average[name] + 0.5 * size * natural[name]
        assert all(size < 0.9 * largest for size in sizes) == (kl_clip == 1e-6)
        assert metrics["loss/step_size"] == pytest.approx(sizes[0], rel=1e-3)
        assert metrics["learning_rate"] == pytest.approx(largest)
        for name, p in algorithm.model.named_parameters():
            moved = (before[name] - p.detach()).double()
            torch.testing.assert_close(
                moved, average[name], rtol=1e-2, atol=1e-2 * float(average[name].abs().max()) + 1e-8, msg=name
            )


@pytest.fixture
def small_networks(monkeypatch):
    """`shared`, a small convolutional trunk for images of 36x36."""
    from htsrl import models
    from htsrl.models import networks as parts

    choose = models._choose

    def shared(spec, head, options, rng):
        layers = [
            parts.ScaledImage(spec.observation_dtype, options),
            parts.conv(1, 3, 12, 12, 0, 1.0, rng),
            nn.ReLU(inplace=True),
        ]
        trunk = nn.Sequential(*layers, parts.conv(3, 2, 2, 1, 0, 1.0, rng), nn.Tanh(), parts.FlatImage())
        return parts.on_trunk(trunk, 8, head, options, rng)

    def chosen(spec, options):
        return shared if options.network == "shared" else choose(spec, options)

    monkeypatch.setattr(models, "_choose", chosen)
    monkeypatch.setattr("htsrl.config.NETWORKS", ("auto", "shared"))


# ----------------------------------------------------------------------------------------------- the trust region


def test_step_size():
    assert step_size(0.0, 0.25, 0.001) == 0.25
    assert step_size(0.03, 0.25, 0.001) == 0.25
    assert step_size(0.04, 0.25, 0.001) == pytest.approx(np.sqrt(0.05))
    assert step_size(8.0, 0.25, 1.0) == 0.25
    assert step_size(8.0, 1.0, 1.0) == 0.5


@pytest.mark.parametrize("kl_clip", [1e-3, 1e-2])
@pytest.mark.parametrize("action", [DISCRETE, BOX], ids=["discrete", "box"])
def test_a_step_changes_the_distributions_by_kl_clip(action, kl_clip):
    """Where K-FAC is exact: one layer each, a policy that is the same in all states, little damping."""
    spec = vector_spec(action)
    algorithm, data = learner(
        spec, steps=256, net={"hidden_sizes": ()}, **WARM, kl_clip=kl_clip, learning_rate=1e6, damping=1e-5,
        max_grad_norm=1e9,
    )  # fmt: skip
    data = replace(data, valid=torch.ones_like(data.valid), truncated=torch.zeros_like(data.valid))
    obs = data.obs[:-1].flatten(0, 1)
    with torch.no_grad():
        before, value_before = algorithm.model(obs)
    metrics = algorithm.update(data, 0.0, draws())
    assert 0 < metrics["loss/step_size"] < 1e6
    with torch.no_grad():
        after, value_after = algorithm.model(obs)
    if action is DISCRETE:
        old, new = torch.distributions.Categorical(logits=before), torch.distributions.Categorical(logits=after)
        kl = torch.distributions.kl_divergence(old, new).mean()
    else:
        (mean, log_std), (new_mean, new_log_std) = before.chunk(2, -1), after.chunk(2, -1)
        assert not torch.equal(log_std, new_log_std)
        old = torch.distributions.Normal(mean, log_std.exp())
        new = torch.distributions.Normal(new_mean, new_log_std.exp())
        kl = torch.distributions.kl_divergence(old, new).sum(-1).mean()
    assert float(kl) == pytest.approx(kl_clip, rel=0.2)
    critic = 0.5 * (value_after - value_before).square().mean()
    assert float(critic) == pytest.approx(kl_clip, rel=0.2)


def test_networks_that_share_nothing_have_their_own_gradient_norm_and_trust_region(small_networks):
    """A critic that is far off must not make the policy's step small, unless they share layers."""
    moved = {}
    for coefficient in (0.5, 500.0):
        for name, net in (("apart", {}), ("shared", {"network": "shared"})):
            spec = image_spec(36, 36, 1) if net else vector_spec()
            algorithm, data = learner(spec, net=net, **WARM, value_coef=coefficient)
            before = [p.detach().clone() for p in algorithm.model.policy.parameters()]
            metrics = algorithm.update(data, 0.0, draws())
            assert ("loss/critic_step_size" in metrics) == (name == "apart")
            after = [p.detach() for p in algorithm.model.policy.parameters()]
            moved[name, coefficient] = torch.cat([(a - b).flatten() for a, b in zip(after, before, strict=True)])
    assert torch.equal(moved["apart", 0.5], moved["apart", 500.0])
    assert moved["shared", 0.5].norm() > 2 * moved["shared", 500.0].norm()


# ---------------------------------------------------------------------------------------------------- the factors


def test_the_factors_are_those_of_the_networks_own_distribution():
    """Averages over many rows, sampled, against expectations by hand; fillers count for nothing."""
    algorithm, data = learner(steps=2000, net={"hidden_sizes": ()}, cold_updates=1)
    model = algorithm.model
    with torch.no_grad():
        model.policy[0].weight.mul_(100.0)
    rows = data.valid.flatten() > 0
    assert not rows.all()
    obs = data.obs[:-1].flatten(0, 1)[rows]
    with torch.no_grad():
        p = model(obs)[0].softmax(-1)
    a = torch.cat((obs, torch.ones(len(obs), 1)), 1)
    algorithm.update(data, 0.0, draws())
    policy, value = algorithm.blocks
    expected = (torch.diag_embed(p) - p[:, :, None] * p[:, None, :]).mean(0)
    torch.testing.assert_close(policy.outputs, expected, rtol=0.05, atol=0.01)
    torch.testing.assert_close(value.outputs, torch.ones(1, 1), rtol=0.05, atol=0.0)
    for block in (policy, value):
        torch.testing.assert_close(block.inputs, a.T @ a / len(a), rtol=1e-4, atol=1e-4)


def test_running_factors_are_a_mean_and_then_forget():
    algorithm, data = learner(cold_updates=9, factor_decay=0.6)
    block = algorithm.blocks[0]
    expected = 0.0
    for keep in (0.0, 0.5, 0.6, 0.6):
        algorithm.update(data, 0.0, draws())
        expected = keep * expected + (1 - keep) * block.outputs_now
        torch.testing.assert_close(block.outputs, expected)


def test_decompositions_are_made_every_few_updates():
    algorithm, data = learner(cold_updates=2, kfac_interval=3)
    decomposed = []
    for k in range(9):
        before = algorithm.blocks[0].inputs_basis.clone()
        algorithm.update(data, 0.0, draws(k))
        decomposed.append(not torch.equal(before, algorithm.blocks[0].inputs_basis))
    assert decomposed == [k in (2, 5, 8) for k in range(9)]


@pytest.mark.parametrize("rows", [1, 5, 31])
def test_pieces_give_the_update_of_the_whole(monkeypatch, rows):
    spec = image_spec(36, 36, 1)
    whole, data = learner(spec, **WARM, damping=0.1)
    pieces, _ = learner(spec, **WARM, damping=0.1)
    before = whole.parameters.vector.clone()
    first = whole.update(data, 0.0, draws())
    monkeypatch.setattr(minibatches, "PIECE_BYTES", {"cpu": 4 * 36 * 36 * rows})
    sizes = []
    pieces.model.register_forward_hook(lambda module, inputs, output: sizes.append(len(output[1])))
    second = pieces.update(data, 0.0, draws())
    assert sum(sizes) == 32
    assert max(sizes) <= rows
    assert first == pytest.approx(second, rel=1e-3, abs=1e-5)
    assert_same_step(before, whole, pieces)


def assert_same_step(before, one, other):
    """The same factors, and the same step from ``before`` [P], but for rounding."""
    for ours, theirs in zip(one.blocks, other.blocks, strict=True):
        torch.testing.assert_close(ours.inputs, theirs.inputs, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(ours.outputs, theirs.outputs, rtol=1e-3, atol=1e-5)
    steps = [algorithm.parameters.vector - before for algorithm in (one, other)]
    assert float((steps[0] - steps[1]).norm()) < 0.01 * float(steps[0].norm())


@pytest.mark.parametrize("parts", [2, 3, 40])
def test_an_update_shared_by_threads_is_the_whole_one_and_always_the_same(parts, monkeypatch):
    """Whichever thread is faster: each pauses at random before every piece. 40 parts are more than there are rows."""
    spec = image_spec(36, 36, 1)
    whole, data = learner(spec, **WARM, damping=0.1)
    before = whole.parameters.vector.clone()
    first = whole.update(data, 0.0, draws())
    if parts == 2:
        monkeypatch.setattr(minibatches, "PIECE_BYTES", {"cpu": 4 * 36 * 36 * 5})
    states = []
    for seed in range(3):
        shared, _ = learner(spec, parts=parts, **WARM, damping=0.1)
        pauses = random.Random(seed)
        shared.model.register_forward_pre_hook(lambda *_, pauses=pauses: time.sleep(0.005 * pauses.random()))
        assert first == pytest.approx(shared.update(data, 0.0, draws()), rel=1e-3, abs=1e-5)
        assert_same_step(before, whole, shared)
        states.append(shared.state() | {"parameters": shared.parameters.vector})
    for state in states[1:]:
        assert all(torch.equal(tensor, states[0][name]) for name, tensor in state.items())


# ---------------------------------------------------------------------------------------- the algorithm's contract


def test_metrics():
    names = {
        "learning_rate", "loss/total", "loss/policy", "loss/value", "loss/entropy", "loss/fisher_trace",
        "loss/grad_norm", "loss/grad_norm_clipped", "loss/explained_variance", "loss/gradient_steps",
    }  # fmt: skip
    algorithm, data = learner(cold_updates=1)
    cold = algorithm.update(data, 0.5, draws())
    warm = algorithm.update(data, 0.5, draws())
    assert cold.keys() == names
    assert warm.keys() == names | {"loss/step_size", "loss/critic_step_size"}
    assert all(isinstance(value, float) and np.isfinite(value) for value in warm.values())
    assert warm["loss/gradient_steps"] == 1
    assert warm["loss/fisher_trace"] > 0


@pytest.mark.parametrize("parts", [1, 2])
def test_a_step_that_is_not_finite_can_be_made_again_from_what_was_left(parts):
    """Gradient and factors, the same bits from the parameters, rows and noise alone."""
    algorithm, data = learner(**WARM, parts=parts, max_grad_norm=1e-6)
    data.reward[2, 1] = 1e30
    with pytest.raises(NonFinite) as caught:
        algorithm.update(data, 0.25, draws())
    left = caught.value
    columns = {name.removeprefix("minibatch/"): torch.from_numpy(a) for name, a in left.tensors.items() if "/" in name}
    assert len(left.tensors["records"][0]) == len(left.numbers["records"])
    assert left.numbers["records"][4] == "fisher_trace"
    other, _ = learner(**WARM, parts=parts)
    obs, noise = columns.pop("obs"), Noise(columns.pop("action_noise"), columns.pop("value_noise"))
    rows = Rows(**columns | {"index": torch.arange(len(obs))})
    with kfac.recording(other.blocks) as tapes:
        of_parts = [partial(other._loss, tape, noise) for tape in tapes]
        batch = types.SimpleNamespace(obs=obs, length=1, sequences=lambda rows: None)
        accumulate_gradient(other.model, other.parameters, batch, rows, of_parts)
    torch.testing.assert_close(
        other.parameters.vector.grad, algorithm.parameters.vector.grad, rtol=0.0, atol=0.0, equal_nan=True
    )
    assert float(other.parameters.vector.grad.abs().max()) > 1e20, "not clipped"
    for one, two in zip(other.blocks, algorithm.blocks, strict=True):
        assert torch.equal(one.inputs_parts, two.inputs_parts)
        assert torch.equal(one.outputs_parts, two.outputs_parts)


def test_a_fisher_matrix_that_is_not_finite_stops_before_anything_changes():
    """Inputs of 1e20 have a finite gradient where their weights are 0, but no finite second moment."""
    algorithm, data = learner(**WARM)
    with torch.no_grad():
        for network_ in (algorithm.model.policy, algorithm.model.value):
            network_[0].weight.zero_()
            network_[2].weight.zero_()
    data.obs.fill_(1e20)
    with pytest.raises(NonFinite, match="not finite in"):
        algorithm.update(data, 0.0, draws())
    assert all((tensor == 0).all() for tensor in algorithm.state().values())


def test_only_the_generator_that_is_given_decides_the_draws():
    vectors = []
    for seed, global_seed in ((0, 0), (0, 1), (1, 0)):
        algorithm, data = learner(**WARM)
        torch.manual_seed(global_seed)
        algorithm.update(data, 0.0, draws(seed))
        vectors.append(algorithm.parameters.vector)
    assert torch.equal(vectors[0], vectors[1])
    assert not torch.equal(vectors[0], vectors[2])


def test_an_advantaged_action_becomes_more_likely():
    algorithm, data = learner(value_coef=0.0, entropy_coef=0.0)
    flat = {"terminated": torch.ones_like(data.valid), "truncated": torch.zeros_like(data.valid)}
    data = replace(data, reward=(data.action == 1).float(), value=0 * data.value, valid=flat["terminated"], **flat)
    for k in range(40):
        algorithm.update(data, 0.0, draws(k))
    with torch.no_grad():
        assert float(algorithm.model(data.obs[0])[0].softmax(-1)[:, 1].mean()) > 0.6


# ------------------------------------------------------------------------------------------------------ whole runs

SMALL = {"num_envs": 4, "sync_interval": 8, "total_steps": 4 * 8 * 6, "cold_updates": 1, "kfac_interval": 2}


def run(run_dir, executors, actors, env="CartPole-v1", **more):
    layout = {"num_executors": executors, "num_actors": actors, "envs_per_group": 1}
    return record(run_dir, env, "acktr", **layout, **SMALL, **more)


def test_layouts_give_the_same_bits_and_another_seed_or_schedule_does_not(tmp_path):
    one = run(tmp_path / "1x1", 1, 1)
    assert_same_bits(one, run(tmp_path / "4x3", 4, 3))
    assert [metrics["policy_lag"] for metrics in one.metrics] == [1] * 6
    other_seed = run(tmp_path / "seed", 1, 1, seed=1)
    sync = run(tmp_path / "sync", 1, 1, schedule="sync")
    assert len({digests(each)[1] for each in (one, other_seed, sync)}) == 3
    assert digests(other_seed)[0] != digests(one)[0]


def test_layouts_give_the_same_bits_with_continuous_actions_and_two_threads(tmp_path):
    one, four = (run(tmp_path / f"{e}x{a}", e, a, "Pendulum-v1", learner_threads=2) for e, a in ((1, 1), (4, 3)))
    assert_same_bits(one, four)


def test_interrupted_and_resumed_equals_uninterrupted(tmp_path):
    chosen = settings_for(env="CartPole-v1", algo="acktr", cold_updates=1, kfac_interval=4)
    training.train(settings.configure(run_dir=tmp_path / "whole", **chosen))
    interrupted(tmp_path / "stopped", 3, **chosen)
    training.resume(tmp_path / "stopped", no_changes(num_executors=2, envs_per_group=1))
    assert bits(tmp_path / "stopped") == bits(tmp_path / "whole")


def test_a_network_that_k_fac_does_not_know_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    module = types.ModuleType("my_networks")
    module.norm = lambda spec: nn.Sequential(nn.Linear(4, 9), nn.LayerNorm(9))
    monkeypatch.setitem(sys.modules, "my_networks", module)
    chosen = {"env": "CartPole-v1", "network": "my_networks:norm", "run_dir": tmp_path / "run"}
    with pytest.raises(ConfigError, match=r"acktr can't train the layer 'trunk\.1' \(LayerNorm\)"):
        training.train(settings.configure(algo="acktr", **chosen))
    assert list(tmp_path.iterdir()) == []
