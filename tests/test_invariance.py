"""No bit depends on layout, timing, the company of a row in its batch, or on what is written and shown."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from recording import record
from test_runtime import assert_same_bits

from htsrl import determinism, envs, trials, verify
from htsrl.actors.inference import InferenceBatch, invariant_buckets
from htsrl.digests import Trail, first_difference
from htsrl.models import FlatParameters, build_model
from htsrl.settings import configure

SMALL = {"num_envs": 4, "sync_interval": 8, "total_steps": 4 * 8 * 3, "minibatches": 2, "epochs": 1}


def trail(config, layout, delay_ms=0.0) -> Trail:
    """What a run of ``config`` in ``layout`` does."""
    trial = trials.Trial(layout, trials.with_layout(config, layout), delay_ms)
    return verify.watch(trial, envs.describe(config.env, config.environment))[0]


# ------------------------------------------------------------------------------------------------- layouts and delays


@pytest.mark.parametrize(
    ("env", "precision"),
    [
        pytest.param("atari:Pong", "float32", marks=pytest.mark.atari),
        pytest.param("gfootball", "float32", marks=pytest.mark.football),
        pytest.param("gfootball", "bf16", marks=pytest.mark.football),
    ],
)
def test_games_give_the_same_bits_in_any_layout_and_with_delays(env, precision):
    package, extra = {"atari:Pong": ("ale_py", "atari"), "gfootball": ("gfootball", "football")}[env]
    pytest.importorskip(package, reason=f"needs the extra {extra}")
    config = configure(env, precision=precision, **SMALL)
    reference = trail(config, "1x1")
    assert len(reference.digests) == 3
    assert first_difference(reference, trail(config, "3x2x1", delay_ms=2.0)) is None


COUNTING = configure("synthetic:counting", num_envs=5, sync_interval=7, total_steps=5 * 7 * 3, minibatches=5, epochs=1)
known: list[Trail] = []


@st.composite
def layouts(draw: st.DrawFn) -> str:
    """Executors x actors x replicas per group."""
    executors, actors = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    return f"{executors}x{actors}x{draw(st.integers(1, -(-5 // executors)))}"


@settings(
    max_examples=5, deadline=None, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(layouts(), st.sampled_from([0.0, 1.0, 5.0]))
def test_any_layout_grouping_and_delay_gives_the_same_bits(layout, delay_ms):
    if not known:
        known.append(trail(COUNTING, "1x1"))
    assert first_difference(known[0], trail(COUNTING, layout, delay_ms)) is None


# ------------------------------------------------------------------------------------------------------------ batches


def rows_of(env, options, replicas, steps) -> np.ndarray:
    """[steps * replicas, *obs]: what replicas see under random actions, in (step, replica) order."""
    spec = envs.describe(env, options)
    rng = np.random.default_rng(0)
    running = [envs.make(env, options) for _ in range(replicas)]
    rows = [[np.array(each.reset(seed=n), spec.observation_dtype) for n, each in enumerate(running)]]
    for _ in range(steps - 1):
        row = [each.step(int(rng.integers(spec.action.nvec[0])))[0] for each in running]
        rows.append([np.array(obs, spec.observation_dtype) for obs in row])
    for each in running:
        each.close()
    return np.array(rows).reshape(steps * replicas, *spec.observation_shape)


@pytest.mark.parametrize(
    ("env", "network", "precision"),
    [
        ("CartPole-v1", "mlp", "float32"),
        ("synthetic:football", "nature", "float32"),
        ("synthetic:football", "football", "bf16"),
        ("synthetic:football", "impala", "float32"),
        ("synthetic:football", "impala", "bf16"),
    ],
)
def test_the_logits_of_a_row_are_the_same_in_batches_of_one_three_and_all(env, network, precision):
    replicas, steps = 16, 4
    config = configure(
        env, network=network, precision=precision, **({"step_ms": 0.0} if env.startswith("synthetic") else {})
    )
    spec = envs.describe(env, config.environment)
    determinism.enable()  # as in an actor
    model = build_model(spec, config.network, seed=0)
    FlatParameters(model, gradients=False)
    device = torch.device("cpu")
    batch = InferenceBatch(model, spec, invariant_buckets(model, spec, replicas, device), device)
    rows = rows_of(env, config.environment, replicas, steps)
    noise = np.random.default_rng(1).gumbel(size=(len(rows), model.head.noise_size)).astype(np.float32)

    def answers(size: int, order: np.ndarray) -> list[np.ndarray]:
        """Logits, actions, log-probabilities and values of all rows, in their own order, ``size`` at a time."""
        found = []
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            batch.obs[: len(chosen)] = rows[chosen]
            batch.noise[: len(chosen)] = noise[chosen]
            answer = batch.answer(len(chosen))
            padded = next(bucket for bucket in batch.buckets if bucket >= len(chosen))
            with torch.inference_mode():
                logits, _ = model(torch.from_numpy(batch.obs[:padded]))
            logits = logits[: len(chosen)].numpy()
            found.append((logits, answer.action.copy(), answer.log_prob.copy(), answer.value.copy()))
        back = np.argsort(order)
        return [np.concatenate(parts)[back] for parts in zip(*found)]

    straight = np.arange(len(rows))
    whole = answers(replicas, straight)
    assert len(np.unique(whole[0], axis=0)) > 1
    for size, order in ((1, straight), (3, straight), (3, straight[::-1]), (replicas, np.roll(straight, 5))):
        for name, one, other in zip(("logits", "action", "log_prob", "value"), whole, answers(size, order)):
            np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8), f"{name} in batches of {size}")


# --------------------------------------------------------------------------------------------------- what is written


def test_what_is_written_and_shown_changes_no_bit(tmp_path, capsys):
    quiet = record(tmp_path / "quiet", "CartPole-v1", **SMALL)
    busy = {
        "progress": "plain", "tensorboard": True, "record_digests": True, "checkpoint_every": 32, "eval_every": 32,
        "eval_episodes": 2, "eval_stochastic": True,
    }  # fmt: skip
    loud = record(tmp_path / "loud", "CartPole-v1", **busy, **SMALL)
    assert_same_bits(quiet, loud)
    assert (tmp_path / "loud" / "evaluations.jsonl").read_text()
