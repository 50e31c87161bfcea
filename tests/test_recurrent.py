"""Recurrent policies: every row is answered, stored and learned from with what its episode left, and nothing else."""

from __future__ import annotations

import signal
import sys
import threading
import time
import types
from contextlib import closing, suppress
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from recording import record
from rollouts import BOX, DISCRETE, image_spec, network, rollout, vector_spec
from test_async import RecordingRun as RecordingAsyncRun
from test_async import recorded
from test_recovery import assert_kills_change_no_bit, left_in_peace
from test_resume import bits, interrupted, no_changes, settings_for
from test_runtime import assert_same_bits, digests
from torch import nn

from htsrl import determinism, envs, rng
from htsrl.actors.inference import InferenceBatch, invariant_buckets
from htsrl.checkpoint import list_checkpoints, load_checkpoint, newest_checkpoint, write_checkpoint
from htsrl.config import A2COptions, BatchPPOOptions, IMPALAOptions, NetworkOptions, PPOOptions
from htsrl.errors import ConfigError
from htsrl.evaluation import evaluate, evaluation_batch
from htsrl.learner import A2C, IMPALA, PPO, impala, minibatches
from htsrl.learner.gradient import accumulate_gradient, gradient
from htsrl.learner.minibatches import Rows, deal_columns, make_batch, per_episode
from htsrl.learner.rollout import Memory, Rollout
from htsrl.models import ActorCritic, FlatParameters, build_model
from htsrl.models.recurrent import Core, Sequences, pack
from htsrl.report import Reporter
from htsrl.settings import configure
from htsrl.storage.episodes import begins_after
from htsrl.training import resume, train

pytestmark = pytest.mark.usefixtures("quick_children")

KINDS = ("lstm", "gru")
SMALL = {"num_envs": 4, "sync_interval": 16, "total_steps": 4 * 16 * 5, "recurrent": "lstm", "recurrent_size": 8}
OF = {
    "ppo": {"minibatches": 2, "epochs": 2},
    "a2c": {},
    "impala": {"minibatches": 2},
    "batchppo": {"minibatches": 2, "epochs": 2},
}


# ----------------------------------------------------------------------------------------------------------- the core


def core(kind: str, inputs: int = 5, size: int = 3) -> Core:
    return Core(kind, inputs, size, torch.Generator().manual_seed(1))


def one_step(core: Core, x: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The cells' equations in float64, one gate after the other: output [H] and state [S] after ``x`` [F]."""
    w_in, w_state, b_in, b_state = (w.detach().numpy().astype(np.float64) for w in core.layer.all_weights[0])
    H = core.layer.hidden_size

    def sigmoid(z):
        return 1.0 / (1.0 + np.exp(-z))

    def gate(k, h):
        rows = slice(k * H, (k + 1) * H)
        return w_in[rows] @ x + b_in[rows], w_state[rows] @ h + b_state[rows]

    h = state[:H]
    if core.parts == 1:
        reset, update = (sigmoid(sum(gate(k, h))) for k in (0, 1))
        from_input, from_state = gate(2, h)
        h = (1.0 - update) * np.tanh(from_input + reset * from_state) + update * h
        return h, h
    enter, keep, leave = (sigmoid(sum(gate(k, h))) for k in (0, 1, 3))
    cell = keep * state[H:] + enter * np.tanh(sum(gate(2, h)))
    h = leave * np.tanh(cell)
    return h, np.concatenate([h, cell])


def unrolled(core: Core, features: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    """What ``core`` should say of ``sequences``: each by itself, row by row, from zeros where an episode begins."""
    L, C = sequences.begins.shape
    rows = features.view(L, C, -1)
    columns = []
    for c in range(C):
        state, outputs = sequences.state[c][None], []
        for t in range(L):
            if sequences.begins[t, c]:
                state = torch.zeros_like(state)
            out, state = core.step(rows[t, c][None], state)
            outputs.append(out)
        columns.append(torch.cat(outputs))
    return torch.stack(columns, 1).flatten(0, 1)


def some_sequences(core: Core, L: int = 9, C: int = 4) -> tuple[torch.Tensor, Sequences]:
    """Features [L * C, F] and sequences: one without an end, one that begins anew in every row, and others."""
    draw = np.random.default_rng(3)
    begins = draw.random((L, C)) < 0.3
    begins[:, 0], begins[:, 1], begins[0, 2] = False, True, False
    state = torch.from_numpy(draw.standard_normal((C, core.state_size), np.float32))
    state[torch.from_numpy(begins[0])] = 0.0
    features = torch.from_numpy(draw.standard_normal((L * C, core.layer.input_size), np.float32))
    return features, Sequences(state, begins)


def test_sequences_are_cut_where_episodes_begin():
    begins = np.array([[0, 1], [0, 0], [1, 0], [0, 1]], bool)
    packing = pack(begins)
    # Pieces, the longest first: rows 0 to 2 of sequence 1; 0 and 1 of sequence 0; 2 and 3 of it; row 3 of sequence 1
    assert packing.sequence.tolist() == [1, 0, 0, 1]
    assert packing.first.tolist() == [True, True, False, False]
    assert packing.rows_per_step.tolist() == [4, 3, 1]
    assert packing.order.tolist() == [1, 0, 4, 7, 3, 2, 6, 5]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_the_cell_s_equations(kind):
    made = core(kind)
    draw = np.random.default_rng(0)
    features = draw.standard_normal((6, 5), np.float32)
    state = draw.standard_normal((6, made.state_size), np.float32)
    for bias in made.layer.all_weights[0][2:]:
        nn.init.normal_(bias.detach(), generator=torch.Generator().manual_seed(2))
    out, after = made.step(torch.from_numpy(features), torch.from_numpy(state))
    for row in range(6):
        right_out, right_after = one_step(made, features[row], state[row])
        np.testing.assert_allclose(out[row].detach(), right_out, atol=1e-6)
        np.testing.assert_allclose(after[row].detach(), right_after, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_unrolled_sequences_and_their_gradient_are_those_of_single_steps(kind):
    made = core(kind)
    features, sequences = some_sequences(made)
    features.requires_grad_()
    wanted = [features, *made.parameters()]
    weight = torch.linspace(-1.0, 1.0, 9 * 4 * 3).view(36, 3)
    results = []
    for outputs in (made(features, sequences), unrolled(made, features, sequences)):
        results.append([outputs, *torch.autograd.grad((outputs * weight).sum(), wanted)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_core_keeps_what_it_holds_and_its_weights_come_from_the_seed(kind):
    options = {"recurrent": kind, "recurrent_size": 16}
    states = torch.get_rng_state()
    first, again, other = (dict(network(vector_spec(), seed, **options)[1].items()) for seed in (0, 0, 1))
    assert torch.equal(states, torch.get_rng_state()), "the global generator was used"
    assert all(np.array_equal(first[name], again[name]) for name in first)
    matrices = [name for name in first if name.startswith("core.") and first[name].ndim == 2]
    assert len(matrices) == 2
    assert not any(np.array_equal(first[name], other[name]) for name in matrices)
    for gate in np.split(first["core.layer.weight_hh_l0"], 4 if kind == "lstm" else 3):
        np.testing.assert_allclose(gate @ gate.T, np.eye(16), atol=1e-5)
    forget = first["core.layer.bias_ih_l0"] + first["core.layer.bias_hh_l0"]
    assert forget.sum() == (16 if kind == "lstm" else 0)


# --------------------------------------------------------------------------------------------------------- the models


def test_without_a_core_a_network_is_what_it_was():
    model, flat = network(vector_spec())
    assert (model.core, model.state_size) == (None, 0)
    assert not any("core" in name for name, _ in flat.items())
    obs = torch.randn(4, 4)
    assert all(torch.equal(one, other) for one, other in zip(model(obs), model.step(obs), strict=True))


@pytest.mark.parametrize("action", [DISCRETE, BOX], ids=["discrete", "box"])
def test_a_vector_s_trunk_is_shared_in_front_of_the_core(action):
    model, _ = network(vector_spec(action), recurrent="gru", recurrent_size=8, hidden_sizes=(6, 7))
    params, value, state = model.step(torch.randn(4, 4), *model.blank_state(4))
    assert (params.shape, value.shape, state.shape) == ((4, model.head.param_size), (4,), (4, 8))
    assert model.core.layer.input_size == 7
    assert model.policy.in_features == model.value.in_features == 8


def test_bfloat16_is_for_the_trunk_alone():
    model = build_model(image_spec(84, 84, 4), NetworkOptions(precision="bf16", recurrent="lstm", recurrent_size=8), 0)
    flat = FlatParameters(model, gradients=False)
    flat.assign(flat.vector.clone())
    assert {p.dtype for p in model.core.parameters()} == {torch.float32}
    assert torch.bfloat16 in {p.dtype for p in model.trunk.parameters()}
    obs = torch.zeros(4, 84, 84, 4, dtype=torch.uint8)
    with torch.inference_mode():
        assert {x.dtype for x in model.step(obs, *model.blank_state(4))} == {torch.float32}


def test_a_network_of_the_user_s_own_gets_a_core(monkeypatch):
    module = types.ModuleType("own_trunk")
    module.trunk = lambda spec: nn.Linear(4, 9)
    monkeypatch.setitem(sys.modules, "own_trunk", module)
    model = build_model(vector_spec(), NetworkOptions(network="own_trunk:trunk", recurrent="lstm", recurrent_size=8), 0)
    assert model.core.layer.input_size == 9


# ---------------------------------------------------------------------------------------------------------- inference


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_s_bits_depend_on_its_state_and_not_on_its_company(kind):
    determinism.enable()
    spec, rows = vector_spec(), 16
    model, flat = network(spec, recurrent=kind, recurrent_size=32)
    actor = build_model(spec, NetworkOptions(recurrent=kind, recurrent_size=32), 1)
    parameters = FlatParameters(actor, gradients=False)
    device = torch.device("cpu")
    batch = InferenceBatch(actor, spec, invariant_buckets(actor, spec, rows, device), device)
    parameters.assign(flat.vector.detach())  # what was recorded must follow
    draw = np.random.default_rng(0)
    obs, state = draw.standard_normal((64, 4), np.float32), draw.standard_normal((64, model.state_size), np.float32)
    noise = draw.gumbel(size=(64, 3)).astype(np.float32)

    def answers(size: int, order: np.ndarray) -> list[np.ndarray]:
        found = []
        for start in range(0, 64, size):
            chosen = order[start : start + size]
            for given, rows in ((batch.obs, obs), (batch.noise, noise), (batch.state, state)):
                given[: len(chosen)] = rows[chosen]
            answer = batch.answer(len(chosen))
            found.append((answer.action, answer.log_prob, answer.value, answer.state))
        return [np.concatenate(parts)[np.argsort(order)] for parts in zip(*found)]

    straight = np.arange(64)
    whole = answers(rows, straight)
    for size, order in ((1, straight), (3, straight[::-1]), (rows, np.roll(straight, 5))):
        for one, other in zip(whole, answers(size, order)):
            assert one.tobytes() == other.tobytes(), f"in batches of {size}"
    with torch.inference_mode():
        params, value, after = model.step(torch.from_numpy(obs), torch.from_numpy(state))
    torch.testing.assert_close(torch.from_numpy(whole[2]), value)
    torch.testing.assert_close(torch.from_numpy(whole[3]), after)
    torch.testing.assert_close(
        torch.from_numpy(whole[1]), model.head.log_prob(params, torch.from_numpy(whole[0])).detach()
    )


def test_the_probe_finds_a_core_that_looks_at_other_rows(monkeypatch):
    model, _ = network(vector_spec(), recurrent="gru", recurrent_size=8)
    step = Core.step

    def nosy(self, features, state):
        out, after = step(self, features, state)
        return out, after + 1e-3 * state.mean(0)  # neither action nor value of this row shows it

    assert invariant_buckets(model, vector_spec(), 16, torch.device("cpu"))
    monkeypatch.setattr(Core, "step", nosy)
    with pytest.raises(RuntimeError, match="computes each row by itself"):
        invariant_buckets(model, vector_spec(), 16, torch.device("cpu"))


@pytest.mark.parametrize("stochastic", [False, True])
def test_an_evaluation_remembers_each_episode_and_nothing_of_the_one_before(stochastic):
    config = configure("synthetic:counting", recurrent="lstm", recurrent_size=8)
    spec = envs.describe(config.env, config.environment)
    model, _ = network(spec, recurrent="lstm", recurrent_size=8)
    with torch.no_grad():
        model.policy.weight.mul_(300.0)  # a new policy's choices hardly depend on anything
    episodes, played = 11, []
    for k in range(episodes):
        env, noise = envs.make(config.env, config.environment), rng.generator(5, rng.Stream.EVALUATION_NOISE, k)
        obs, (state,), total, over = env.reset(rng.evaluation_seed(5, k)), model.blank_state(1), 0.0, False
        while not over:
            with torch.inference_mode():
                params, _, state = model.step(torch.from_numpy(obs)[None], state)
            drawn = torch.from_numpy(rng.gumbel(noise, (model.head.noise_size,)))
            action = int((params + drawn if stochastic else params).argmax())
            obs, reward, terminated, truncated, _ = env.step(action)
            total, over = total + reward, terminated or truncated
        played.append(total)
    results = evaluate(evaluation_batch(model, spec), spec, config.environment, 5, episodes, stochastic)
    assert results["return"].tolist() == played


# -------------------------------------------------------------------------------------------------------- minibatches


def memory_of(data: Rollout, model: ActorCritic) -> Rollout:
    """``data`` as a recurrent policy left it: its episodes begin where the flags say so."""
    T, N = data.reward.shape
    begins = np.zeros((T + 1, N), bool)
    begins[1:] = ((data.terminated > 0) | (data.valid == 0)).numpy()
    state = torch.from_numpy(np.random.default_rng(1).standard_normal((N, model.state_size), np.float32))
    memory = Memory(state, begins)
    with torch.no_grad():
        params, value = model(data.obs.flatten(0, 1), memory.sequences(np.arange(N), T + 1))
        log_prob = model.head.log_prob(params[: T * N], data.action.flatten(0, 1))
    return replace(data, memory=memory, value=value.view(T + 1, N), log_prob=log_prob.view(T, N))


def recurrent_rollout(**shape):
    spec = vector_spec()
    model, flat = network(spec, recurrent="lstm", recurrent_size=8)
    feed_forward, _ = network(spec)
    return model, flat, memory_of(rollout(spec, feed_forward, **shape), model)


def test_columns_are_dealt_whole():
    transitions = np.array([[1, 1, 1, 0], [1, 0, 1, 1], [1, 1, 1, 1]], bool)
    index, weight = deal_columns(np.array([2, 0, 3, 1]), 2, transitions)
    assert index.tolist() == [[2, 0, 6, 4, 10, 8], [3, 1, 7, 5, 11, 9]]
    np.testing.assert_allclose(weight, [[1 / 6] * 6, [0, 0.25, 0.25, 0, 0.25, 0.25]])


def test_every_minibatch_is_made_of_whole_columns():
    _, _, data = recurrent_rollout(steps=8, replicas=6)
    batch = make_batch(data, 0.99, 0.95)
    assert batch.enough_for(3) == 3
    rows = batch.rows(*batch.dealt(3, 16, np.random.default_rng(0)))
    seen = []
    for minibatch in rows.minibatches():
        sequences = batch.sequences(minibatch)
        columns = minibatch.index[:2].tolist()
        assert torch.equal(sequences.state, data.memory.state[columns])
        assert np.array_equal(sequences.begins, data.memory.begins[:-1, columns])
        assert torch.equal(minibatch.log_prob.view(8, 2), data.log_prob[:, columns])
        assert float(minibatch.weight.sum()) == pytest.approx(1.0)
        assert ((minibatch.weight > 0).view(8, 2) == (data.valid[:, columns] > 0)).all()
        for named in (batch.named(minibatch), impala.named(data, np.array(columns))):  # what a failure leaves
            assert torch.equal(named["state"], sequences.state)
            assert np.array_equal(named["begins"].numpy(), sequences.begins)
            assert torch.equal(named["obs"].view(8, 2, 4), data.obs[:-1, columns])
        seen += columns
    assert sorted(seen) == list(range(6))
    assert seen != list(range(6))
    torn = Rows(*(column.roll(1, 0) for column in minibatch._columns()))
    with pytest.raises(AssertionError):
        batch.sequences(torn)


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_a_gradient_in_pieces_is_the_gradient(shards, monkeypatch):
    model, _, data = recurrent_rollout(steps=8, replicas=3)
    options = A2COptions()
    results = []
    for rows, threads in ((10_000, 1), (8, shards)):
        monkeypatch.setitem(minibatches.PIECE_BYTES, "cpu", rows * model.row_bytes)
        parameters = FlatParameters(model, shards=threads)
        algorithm = A2C(options, model, parameters)
        batch = make_batch(data, options.discount, options.gae_lambda)
        (everything,) = batch.rows(*batch.dealt(1, 24)).minibatches()
        pieces = [len(piece.index) for piece in everything.pieces(rows, threads, batch.length)]
        assert pieces == ([24] if rows > 24 else [8, 8, 8])  # columns stay whole
        terms = accumulate_gradient(model, parameters, batch, everything, algorithm._loss)
        results.append((terms, gradient(parameters).clone()))
    (terms, whole), (terms_in_pieces, in_pieces) = results
    torch.testing.assert_close(terms_in_pieces, terms)
    torch.testing.assert_close(in_pieces, whole, atol=1e-6, rtol=1e-4)
    assert float(whole.norm()) > 1e-3


@pytest.mark.parametrize("rows", [8, 10_000])
def test_batch_ppo_knows_the_policy_of_every_row(rows, monkeypatch):
    model, flat, data = recurrent_rollout(steps=8, replicas=3)
    monkeypatch.setitem(minibatches.PIECE_BYTES, "cpu", rows * model.row_bytes)
    batch = make_batch(data, 0.99, 0.95)
    with torch.no_grad():
        params, _ = model(data.obs[:-1].flatten(0, 1), data.memory.sequences(np.arange(3), 8))
    torch.testing.assert_close(PPO(BatchPPOOptions(), model, flat)._policy(batch), params)
    # A column that ends with a row that is no transition: no episode's rows, and no weight
    weight = per_episode(np.array([[0, 1, 2]]), np.array([[0.5, 0.5, 0.0]]), np.array([2.0, 2.0, 0.0], np.float32))
    assert weight.tolist() == [[0.5, 0.5, 0.0]]


def test_impala_s_gradient_is_that_of_a2c_where_the_policy_is_the_one_that_acted():
    model, flat, data = recurrent_rollout(steps=8, replicas=3)
    settings = {"gae_lambda": 0.9, "max_grad_norm": 1e9, "optimizer": "adam"}
    gradients = []
    for algorithm in (A2C(A2COptions(**settings), model, flat), IMPALA(IMPALAOptions(**settings), model, flat)):
        before = flat.vector.detach().clone()
        algorithm.update(data, 0.0, np.random.default_rng(0))
        gradients.append(gradient(flat).clone())
        flat.assign(before)
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-4)
    assert float(gradients[0].norm()) > 1e-2


def test_what_an_episode_left_is_nothing_to_the_next():
    """The gradient over rows from an episode's beginning on is the same whatever state the sequence came with."""
    model, flat, data = recurrent_rollout(steps=6, replicas=2)
    begins = np.zeros((7, 2), bool)
    begins[3] = True
    later = torch.zeros(6, 2)
    later[3:] = 1.0
    outcomes = []
    for scale in (0.0, 5.0):
        memory = Memory(scale * data.memory.state, begins)
        params, value = model(data.obs[:-1].flatten(0, 1), memory.sequences(np.arange(2), 6))
        loss = (value * later.flatten()).sum() + (params.sum(-1) * later.flatten()).sum()
        outcomes.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, flat.tensors)]))
    assert torch.equal(*outcomes)


# ------------------------------------------------------------------------------------------------- the running system


@pytest.fixture
def checked_updates(monkeypatch):
    """Checks before each update that the learner's unrolled rows are the stored ones; counts what there was to see."""
    seen = {"updates": 0, "carried": 0, "begins": 0, "bootstraps": 0}

    def checking(update):
        def checked(self, rollout, progress, generator):
            T, N = rollout.reward.shape
            with torch.inference_mode():
                every = rollout.memory.sequences(np.arange(N), T + 1)
                params, value = self.model(rollout.obs.flatten(0, 1), every)
                log_prob = self.model.head.log_prob(params[: T * N], rollout.action.flatten(0, 1))
            torch.testing.assert_close(value.view(T + 1, N), rollout.value, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(log_prob.view(T, N), rollout.log_prob, atol=1e-5, rtol=1e-5)
            seen["updates"] += 1
            seen["carried"] += int((rollout.memory.state != 0.0).any(1).sum())
            seen["begins"] += int(rollout.memory.begins.sum())
            seen["bootstraps"] += int((rollout.truncated * rollout.valid).sum())
            return update(self, rollout, progress, generator)

        return checked

    for algorithm in (PPO, A2C, IMPALA):
        monkeypatch.setattr(algorithm, "update", checking(algorithm.update))
    return seen


@pytest.mark.parametrize(
    ("algo", "kind", "schedule"),
    [("ppo", "lstm", "hts"), ("a2c", "gru", "hts"), ("impala", "lstm", "sync"), ("batchppo", "gru", "hts")],
)
def test_rows_are_answered_with_what_their_episode_left_in_any_layout(tmp_path, checked_updates, algo, kind, schedule):
    settings = SMALL | OF[algo] | {"recurrent": kind, "schedule": schedule, "learning_rate": 0.01}
    actors = 1 if schedule == "sync" else 3
    layouts = [
        {"num_executors": executors, "num_actors": actors, "envs_per_group": group}
        for executors, actors, group in ((1, 1, 4), (4, actors, 1))
    ]
    runs = [
        record(tmp_path / str(k), "synthetic:counting", algo, **layout, **settings) for k, layout in enumerate(layouts)
    ]
    assert_same_bits(*runs)
    assert checked_updates["updates"] == sum(len(run.intervals) for run in runs) > 4
    assert min(checked_updates.values()) > 0, checked_updates
    other_seed = record(tmp_path / "seed", "synthetic:counting", algo, seed=1, **settings)
    assert all(one != other for one, other in zip(digests(other_seed), digests(runs[0])))

    # Slow oracle: each replica by itself, row by row, with a state that knows of nothing but the counted steps
    recording, N = runs[0], SMALL["num_envs"]
    config = configure("synthetic:counting", algo, **settings)
    spec = envs.describe(config.env, config.environment)
    model = build_model(spec, config.network, config.seed)
    flat = FlatParameters(model, gradients=False)
    states = [model.blank_state(1)] * N
    for parameters, interval in zip(recording.parameters, recording.intervals):
        flat.assign(torch.from_numpy(parameters))
        for t in range(SMALL["sync_interval"]):
            for n in range(N):
                obs, step = interval["obs"][t, n], interval["obs"][t, n][2]
                before = model.blank_state(1) if step == 0 else states[n]
                with torch.inference_mode():
                    params, value, *states[n] = model.step(torch.from_numpy(obs)[None], *before)
                    action = model.head.sample(params, torch.from_numpy(interval["noise"][t, n])[None])
                assert float(value) == pytest.approx(float(interval["value"][t, n]), abs=1e-5)
                assert int(action) == int(interval["action"][t, n])


def test_observations_of_parts_and_masks_go_together_with_memory(tmp_path, checked_updates):
    core = {"recurrent": "gru", "recurrent_size": 8, "minibatches": 2, "total_steps": 4 * 16 * 3}
    record(tmp_path / "run", "masked_envs:Rooms-v0", num_executors=2, num_actors=2, **SMALL | core)
    assert min(checked_updates.values()) > 0, checked_updates


def test_a_lost_life_is_not_the_end_of_a_memory():
    # Columns: goes on, loses a life, terminates, is truncated, is at the row after a truncation
    storage = types.SimpleNamespace(
        episode_length=np.array([[0, 0, 7, 7, 0]]),
        terminated=np.array([[False, True, True, False, False]]),
        truncated=np.array([[False, False, False, True, False]]),
        valid=np.array([[True, True, True, True, False]]),
    )
    assert begins_after(storage, 0).tolist() == [False, False, True, False, True]


def test_killed_processes_change_no_bit(tmp_path):
    changes = {"env": "synthetic:counting", "recurrent": "lstm", "recurrent_size": 8, "minibatches": 3}
    expected = left_in_peace(tmp_path / "undisturbed", **changes)
    assert_kills_change_no_bit(tmp_path / "killed", expected, **changes)


def assert_states_follow_each_other(run):
    """Every row's state is what its episode's row before it left, over all unrolls of a replica; values say so, too."""
    config, begun = run.config, 0
    model = build_model(run.spec, config.network, config.seed)
    flat = FlatParameters(model, gradients=False)
    for unrolls in run.column_of_replicas():
        for (_, before), (_, after) in pairwise(unrolls):
            assert before["state"][-1].tobytes() == after["state"][0].tobytes()
        for _, unroll in unrolls:
            first = unroll["obs"][:, 2] == 0  # counted steps of the episode
            begun += int(first.sum())
            assert (unroll["state"] == 0.0).all(1).tolist() == first.tolist()
            for version in np.unique(unroll["behaviour_version"]):
                rows = np.flatnonzero(unroll["behaviour_version"] == version)
                flat.assign(run.versions[int(version)])
                with torch.inference_mode():
                    obs, state = (torch.from_numpy(unroll[name][rows]) for name in ("obs", "state"))
                    _, value, after = model.step(obs, state)
                torch.testing.assert_close(value, torch.from_numpy(unroll["value"][rows]))
                goes_on = ~first[rows + 1]
                torch.testing.assert_close(after[goes_on], torch.from_numpy(unroll["state"][rows + 1][goes_on]))
    assert begun > 2 * run.N


@pytest.mark.parametrize(("algo", "slots"), [("impala", 2), ("ppo", 1)])
def test_unrolls_of_schedule_async_go_on_with_what_was_left(tmp_path, algo, slots):
    def strike(run):
        for role, moment in (("actor", 150), ("executor", 350)):
            while run.control.posted.sum() * 2 < moment and not run.over:  # groups of two
                time.sleep(0.001)
            with suppress(OSError):  # it was being replaced
                child = next(child for child in run.crew.children if child.role == role)
                signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)

    core = {"recurrent": "lstm", "recurrent_size": 8, "learning_rate": 0.01}
    layout = {"num_executors": 2, "num_actors": 2, "envs_per_group": 2}
    run = recorded(
        tmp_path / "run", "synthetic:counting", algo, delay_ms=2.0, during=strike, async_slots=slots, **core, **layout
    )
    assert run.result.values["recovered"] >= 1
    assert_states_follow_each_other(run)
    # Another run goes on from the checkpoint with what the first unrolls that were not taken would have begun with
    at = load_checkpoint(newest_checkpoint(tmp_path / "run"))
    states = at.tensors["recurrent_state"]
    for n, unrolls in enumerate(run.column_of_replicas()):
        assert states[n].tobytes() == unrolls[-1][1]["state"][-1].tobytes()
    longer = run.config.model_copy(update={"total_steps": 2 * run.config.total_steps})
    with (
        closing(Reporter(longer, run.spec, tmp_path)) as reporter,
        RecordingAsyncRun(longer, run.spec, tmp_path, reporter, at) as resumed,
    ):
        resumed.train(threading.Event())
    for n, unrolls in enumerate(resumed.column_of_replicas()):
        assert unrolls[0][1]["state"][0].tobytes() == states[n].tobytes()
    assert_states_follow_each_other(resumed)


@pytest.mark.parametrize(("kind", "schedule"), [("lstm", "hts"), ("gru", "sync")])
def test_a_resumed_run_is_the_run(tmp_path, kind, schedule):
    core = {"recurrent": kind, "recurrent_size": 8}
    settings = settings_for(env="synthetic:counting", schedule=schedule, minibatches=2, **core)
    train(configure(run_dir=tmp_path / "whole", **settings))
    interrupted(tmp_path / "stopped", 3, **settings)
    checkpoint = load_checkpoint(list_checkpoints(tmp_path / "stopped" / "checkpoints")[-1])
    states = checkpoint.tensors["recurrent_state"]
    assert (states != 0).any(1).sum() >= 1, "at least one replica is within an episode"
    resume(tmp_path / "stopped", no_changes(num_executors=2, num_actors=1, envs_per_group=1))
    assert bits(tmp_path / "stopped") == bits(tmp_path / "whole")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda state: None, "recurrent_state is missing"),
        (lambda state: state[:, :-1], r"recurrent_state is float32 \(4, 15\)"),
        (lambda state: state * np.float32(np.nan), "recurrent_state holds NaN"),
    ],
)
def test_a_checkpoint_without_sound_states_is_refused(tmp_path, damage, words):
    settings = settings_for(env="synthetic:counting", recurrent="lstm", recurrent_size=8, minibatches=2)
    interrupted(tmp_path / "run", 1, **settings)
    path = list_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    checkpoint = load_checkpoint(path)
    state = damage(checkpoint.tensors.pop("recurrent_state"))
    if state is not None:
        checkpoint.tensors["recurrent_state"] = state
    write_checkpoint(path, checkpoint)
    with pytest.raises(ConfigError, match=words):
        resume(tmp_path / "run")


# ---------------------------------------------------------------------------------------------------- the memory task


def test_the_memory_task_shows_its_cue_once_and_asks_for_it_at_the_end():
    config = configure("synthetic:memory", num_actions=3, memory_steps=4)
    env = envs.make(config.env, config.environment)
    spec = envs.describe(config.env, config.environment)
    cues = set()
    for seed in range(12):
        first = env.reset(seed)
        cue = int(first[:3].argmax())
        cues.add(cue)
        assert (first.shape, first.dtype) == (spec.observation_shape, spec.observation_dtype)
        assert first.tolist() == [*np.eye(3)[cue], 0.0]
        answer = (cue + seed) % 3
        for step in range(1, 5):
            obs, reward, terminated, truncated, _ = env.step(cue if step < 4 else answer)
            assert obs.tolist() == [0.0, 0.0, 0.0, step / 4]
            assert reward == (step == 4 and answer == cue)
            assert (terminated, truncated) == (step == 4, False)
    assert cues == {0, 1, 2}
    short = configure("synthetic:memory", memory_steps=5, max_episode_steps=4)
    with pytest.raises(ConfigError, match="memory_steps must be at most max_episode_steps"):
        envs.describe(short.env, short.environment)


def test_the_memory_task_is_solved_by_remembering_and_not_without(tmp_path):
    def trained(**network):
        settings = {"num_actions": 3, "memory_steps": 5, "sync_interval": 30, "hidden_sizes": (16,)} | network
        settings |= {"learning_rate": 4e-3, "total_steps": 12_000, "progress": "none", "tensorboard": False}
        return train(configure("synthetic:memory", run_dir=tmp_path / str(len(network)), **settings)).values

    remembering, guessing = trained(recurrent="lstm", recurrent_size=16), trained()
    assert remembering["episode_return_mean"] > 0.85
    assert guessing["episode_return_mean"] < 0.6  # a third is expected of the last 100 episodes, ± 0.05


# ----------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"recurrent": "transformer"}, "recurrent must be one of none, lstm, gru, got transformer"),
        ({"recurrent_size": 32}, "recurrent_size needs recurrent lstm or gru"),
        ({"recurrent": "lstm", "algo": "acktr"}, "acktr needs recurrent none"),
        ({"recurrent": "gru", "recurrent_size": 0}, "recurrent_size must be at least 1"),
        ({"recurrent": "lstm", "num_envs": 8, "minibatches": 3}, "minibatches must divide num_envs = 8, the sequences"),
        ({"recurrent": "lstm", "num_envs": 4, "minibatches": 8}, "tears none apart, got 8; nearest that fit: 4"),
    ],
)
def test_what_can_t_be_is_refused_in_one_sentence(settings, words):
    with pytest.raises(ConfigError) as refusal:
        configure(**{"env": "CartPole-v1"} | settings)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_the_same_minibatches_are_fine_without_a_core():
    assert isinstance(configure("CartPole-v1", num_envs=4, minibatches=8).algorithm, PPOOptions)
