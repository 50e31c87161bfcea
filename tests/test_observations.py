"""Stacks of frames: each frame is stored once; put together they are the environment's observations, bit for bit."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fault_points import Fault, scripted
from hypothesis import given, settings
from hypothesis import strategies as st
from recording import all_observations, record
from rollouts import DISCRETE
from test_async import recorded
from test_faults import need

from htsrl import envs
from htsrl.actors.actor import FlatRows
from htsrl.async_run import AsyncRun
from htsrl.config import AnyConfig
from htsrl.digests import DIGESTED, Place, Trail, first_difference, row_checksums
from htsrl.envs.spec import EnvSpec
from htsrl.learner.stacks import Stacks
from htsrl.rng import episode_seed
from htsrl.settings import configure
from htsrl.storage.digest import trajectory_digest
from htsrl.storage.fields import rollout_fields, unroll_fields
from htsrl.storage.memory import total_bytes
from htsrl.storage.observations import begin_row, next_row, observation, observations, open_row
from htsrl.storage.unrolls import slots_of
from htsrl.trials import Trial, with_layout, with_other_seed
from htsrl.verify import watch

pytestmark = pytest.mark.usefixtures("quick_children")


# ---------------------------------------------------------------------------------------------- real episodes, by hand


def by_hand(config: AnyConfig, n: int, actions: np.ndarray) -> tuple[np.ndarray, Counter[str]]:
    """What replica ``n`` saw before each of ``actions`` and after the last, from single frames; what happened to it.

    The action after a truncation is ignored: a game begins then.
    """
    spec = envs.describe(config.env, config.environment)
    env = envs.make(config.env, config.environment)
    channels = spec.observation_shape[-1] // spec.stack
    limit = spec.max_episode_steps or np.inf
    happened: Counter[str] = Counter()

    def first() -> list[np.ndarray]:
        seed = episode_seed(config.seed, n, happened["resets"])
        happened["resets"] += 1
        return [env.reset(seed=seed)[..., -channels:].copy()] * spec.stack

    frames, steps, truncated = first(), 0, False
    seen = [np.concatenate(frames, axis=-1)]
    for action in actions:
        if truncated:
            frames, steps, truncated = first(), 0, False
        else:
            obs, _, terminated, _, info = env.step(int(action))
            frames, steps = [*frames[1:], obs[..., -channels:].copy()], steps + 1
            truncated = not terminated and steps >= limit
            happened["truncated"] += truncated
            happened["terminated"] += terminated
            happened["lives"] += info.get("life_lost", False)
            if terminated:
                frames, steps = first(), 0
        seen.append(np.concatenate(frames, axis=-1))
    env.close()
    return np.array(seen), happened


@pytest.mark.parametrize(
    ("env", "chosen", "events"),
    [
        pytest.param(
            "atari:Breakout", {"terminal_on_life_loss": True, "max_episode_steps": 70}, ("lives", "truncated"),
            marks=pytest.mark.atari,
        ),
        pytest.param("atari:Breakout", {"frame_stack": 3}, ("terminated",), marks=pytest.mark.atari),
        pytest.param(
            "gfootball:academy_empty_goal_close", {"max_episode_steps": 21}, ("truncated",), marks=pytest.mark.football
        ),
        ("synthetic:football", {"step_ms": 0.0, "max_episode_steps": 19}, ("terminated", "truncated")),
    ],
)  # fmt: skip
def test_rows_are_stacks_made_by_hand(tmp_path, env, chosen, events):
    """Over ends of intervals and of episodes, lost lives and the rows after truncations."""
    need(env)
    game = env.startswith("atari")
    size = {"num_envs": 2, "sync_interval": 32 if game else 10, "total_steps": 2 * (256 if game else 80)}
    size |= {"epochs": 1, "minibatches": 2, "num_executors": 2, **chosen}
    intervals = record(tmp_path / "run", env, **size).intervals
    config = configure(env, "ppo", **size)
    happened: Counter[str] = Counter()
    for n in range(2):
        actions = np.concatenate([interval["action"][:, n] for interval in intervals])
        expected, events_of = by_hand(config, n, actions)
        happened += events_of
        T = size["sync_interval"]
        for j, interval in enumerate(intervals):
            np.testing.assert_array_equal(interval["obs"][:, n], expected[j * T : (j + 1) * T + 1])
    assert all(happened[event] for event in events), happened


def test_unrolls_are_stacks_made_by_hand(tmp_path):
    """The asynchronous schedule's ring of rollouts, copied side by side for the learner; executors die meanwhile."""
    size = {"num_envs": 3, "sync_interval": 9, "total_steps": 3 * 9 * 8, "step_ms": 0.0, "max_episode_steps": 13}
    layout = {"num_executors": 2, "envs_per_group": 1, "minibatches": 3, "epochs": 1}

    def strike(run: AsyncRun) -> None:
        for moment, e in ((40, 0), (70, 1), (110, 0)):
            while run.control.stepped.sum() < moment and not run.over:
                time.sleep(0.001)
            (child,) = (each for each in run.crew.children if (each.role, each.index) == ("executor", e))
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)

    run = recorded(tmp_path / "run", "synthetic:football", during=strike, delay_ms=2.0, **size, **layout)
    assert run.result.values["recovered"] == 3
    for n, unrolls in enumerate(run.column_of_replicas()):
        expected, _ = by_hand(run.config, n, np.concatenate([fields["action"] for _, fields in unrolls]))
        for k, (_, fields) in enumerate(unrolls):
            column = SimpleNamespace(**{name: array[:, None] for name, array in fields.items() if array.ndim})
            np.testing.assert_array_equal(all_observations(column)[:, 0], expected[9 * k : 9 * (k + 1) + 1])


# ------------------------------------------------------------------------------------------- as if nothing were stacked


@pytest.mark.parametrize(
    ("env", "algo", "changes"),
    [
        ("synthetic:football", "ppo", {"step_ms": 0.0, "max_episode_steps": 11, "kl_penalty": 1.0, "minibatches": 2}),
        ("synthetic:football", "impala", {"step_ms": 0.0, "recurrent": "gru", "recurrent_size": 16}),
        pytest.param(
            "atari:Breakout", "ppo", {"terminal_on_life_loss": True, "epochs": 2, "minibatches": 2},
            marks=pytest.mark.atari,
        ),
        pytest.param("gfootball", "ppo", {"epochs": 1, "minibatches": 2}, marks=pytest.mark.football),
    ],
)  # fmt: skip
def test_a_run_has_the_bits_of_one_that_stores_whole_observations(tmp_path, env, algo, changes):
    """Rows, parameters and losses, in another layout, with delays and with processes killed."""
    need(env)
    config = configure(env, algo, num_envs=4, sync_interval=8, total_steps=4 * 8 * 3, **changes)
    spec = envs.describe(config.env, config.environment)
    assert spec.stack > 1
    whole = trail_of(Trial("1x1", with_layout(config, "1x1")), replace(spec, stack=1))
    faults = [
        Fault("executor", "before stepped", 11),  # in the middle of an interval, a row is made again
        Fault("executor", "after posted", 17, index=1),  # the first of an interval
        Fault("actor", "before answered", 30),
    ]
    with scripted(tmp_path, *faults):
        stacked = trail_of(Trial("2x1x1", with_layout(config, "2x1x1"), delay_ms=1.0), spec)
    assert len(list(tmp_path.iterdir())) == len(faults), "a fault did not strike"
    assert first_difference(whole, stacked) is None


def trail_of(trial: Trial, spec: EnvSpec) -> Trail:
    """Rows, parameters and losses of a run. Digests of trajectories are of what is stored."""
    trail, _ = watch(trial, spec)
    return Trail([{**each, "trajectory": ""} for each in trail.digests], trail.rows)


def test_another_seed_shows_other_stacks():
    config = configure("synthetic:football", "a2c", num_envs=2, sync_interval=8, total_steps=2 * 8 * 2, step_ms=0.0)
    spec = envs.describe(config.env, config.environment)
    one, other = (trail_of(Trial("", each), spec) for each in (config, with_other_seed(config)))
    assert first_difference(one, other) == Place(0, "obs", replica=0, step=0)
    assert one.digests[-1]["parameters"] != other.digests[-1]["parameters"]


def test_each_frame_is_stored_once():
    need("atari:Pong")
    config = configure("atari:Pong", "ppo")
    spec = envs.describe(config.env, config.environment)
    sizes = [total_bytes({"": rollout_fields(each, 128, 16, 6)}) for each in (spec, replace(spec, stack=1))]
    assert sizes[0] == pytest.approx(128 * 16 * 84 * 84, rel=0.05)
    assert sizes[1] == pytest.approx(128 * 16 * 84 * 84 * 4, rel=0.05)


# ----------------------------------------------------------------------------------------------------- made-up rollouts


def empty(spec: EnvSpec, T: int, N: int, slots: int = 0) -> Any:
    """Arrays of a rollout, or of a ring of ``slots``, with what earlier intervals left in them."""
    rng = np.random.default_rng(1)
    fields = unroll_fields(spec, T, N, 1, slots) if slots else rollout_fields(spec, T, N, 1)
    arrays = {each.name: np.zeros(each.shape, each.dtype) for each in fields}
    arrays["frames"][:] = rng.integers(0, 256, arrays["frames"].shape)
    arrays["past"][:] = rng.integers(0, spec.stack, arrays["past"].shape)
    return SimpleNamespace(**arrays)


def play(spec: EnvSpec, storage: Any, rng: np.random.Generator, share: float) -> np.ndarray:
    """Fill ``storage`` as executors do; ``share`` of its rows begin episodes. Returns observations [T+1, N, *obs]."""
    T, N = storage.reward.shape
    obs = np.empty((T + 1, N, *spec.observation_shape), np.uint8)

    def frame() -> np.ndarray:
        return rng.integers(0, 256, spec.frame_shape, np.uint8)

    for n in range(N):
        frames = [frame() for _ in range(spec.stack)]
        obs[0, n] = np.concatenate(frames, axis=-1)
        open_row(storage, 0, n, obs[0, n])
        for t in range(T):
            places = next_row(storage, t, slice(n, n + 1))
            begins = rng.random() < share
            frames = [frame()] * spec.stack if begins else [*frames[1:], frame()]
            if begins:
                begin_row(storage, t + 1, n)
            obs[t + 1, n] = np.concatenate(frames, axis=-1)
            places[n] = obs[t + 1, n]
    return obs


def stacked_spec(stack: int, channels: int) -> EnvSpec:
    return EnvSpec("test", "atari", (2, 3, stack * channels), np.dtype(np.uint8), "image", DISCRETE, stack=stack)


shapes = st.tuples(st.integers(2, 9), st.sampled_from([1, 2, 4, 8]))


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(1, 7), st.integers(1, 3), st.sampled_from([0.0, 0.3, 1.0]), st.integers(0, 99))
def test_any_rows_in_any_order_are_what_was_written(shape, T, N, share, seed):
    spec, rng = stacked_spec(*shape), np.random.default_rng(seed)
    storage = empty(spec, T, N)
    expected = play(spec, storage, rng, share)
    np.testing.assert_array_equal(all_observations(storage), expected)
    flat = expected.reshape(-1, *spec.observation_shape)
    index = rng.integers(0, len(flat), 2 * len(flat) + 1)
    np.testing.assert_array_equal(observations(storage, index), flat[index])
    out = np.empty((len(index), *spec.observation_shape), np.uint8)
    FlatRows(storage).take_observations(index, out)
    np.testing.assert_array_equal(out, flat[index])
    rows = Stacks(storage, torch.device("cpu")).index_select(0, torch.from_numpy(index))
    np.testing.assert_array_equal(rows.numpy(), flat[index])

    # A successor that goes on from a later row finds the earlier ones as they were
    t, n = int(rng.integers(1, T + 1)), int(rng.integers(N))
    open_row(storage, t, n, observation(storage, t, n))
    np.testing.assert_array_equal(all_observations(storage), expected)


@settings(max_examples=20, deadline=None)
@given(shapes, st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 99))
def test_rows_of_a_ring_are_counted_through_its_slots(shape, T, N, slots, seed):
    spec, rng = stacked_spec(*shape), np.random.default_rng(seed)
    ring = empty(spec, T, N, slots)
    expected = np.concatenate([play(spec, slot, rng, 0.3) for slot in slots_of(ring)])
    flat = expected.reshape(-1, *spec.observation_shape)
    index = rng.permutation(len(flat))
    out = np.empty_like(flat)
    FlatRows(ring, axes=3).take_observations(index, out)
    np.testing.assert_array_equal(out, flat[index])


# ----------------------------------------------------------------------------------------------------------- digests


def changes(spec: EnvSpec, storage: Any) -> Iterator[tuple[int, int]]:
    """Change one stored byte after the other; yields the first row and the replica whose observation then differs."""
    T, N = storage.reward.shape
    before = all_observations(storage)
    for array in (storage.frames, storage.past):
        for place in np.ndindex(array.shape):
            kept = array[place]
            array[place] = kept ^ 1
            rows = np.argwhere((all_observations(storage) != before).reshape(T + 1, N, -1).any(-1))
            if len(rows):
                t, n = min(map(tuple, rows.tolist()))
                yield t, n
            array[place] = kept


def test_no_observation_differs_unnoticed():
    """Another frame, or another beginning of an episode, is in the digest, and `verify` names its row."""
    spec = stacked_spec(4, 1)
    spec = replace(spec, observation_shape=(1, 2, 4))
    storage = empty(spec, 5, 2)
    play(spec, storage, np.random.default_rng(3), 0.3)
    digest, rows = trajectory_digest(b"", storage), row_checksums(storage)
    same = [{"interval": 0, **dict.fromkeys(DIGESTED, "")}]
    found = Counter()
    for t, n in changes(spec, storage):
        assert (trajectory_digest(b"", storage) != digest) == (t < 5)
        place = first_difference(Trail(same, [rows]), Trail(same, [row_checksums(storage)]))
        assert place == Place(0, "obs", replica=n, step=t)
        found[t] += 1
    assert set(found) == set(range(6))
    assert trajectory_digest(b"", storage) == digest


def test_the_digest_is_of_observations_not_of_what_stood_there_before():
    spec = stacked_spec(4, 1)
    storages = [empty(spec, 5, 2), empty(spec, 5, 2)]
    storages[1].frames[:], storages[1].past[:] = 7, 2
    for storage in storages:
        play(spec, storage, np.random.default_rng(3), 0.3)
    assert trajectory_digest(b"", storages[0]) == trajectory_digest(b"", storages[1])
