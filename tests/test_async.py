"""Schedule 'async': nothing is lost or torn, the lag is what it says, the queue is bounded, failures are survived."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from contextlib import suppress
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recording import known_to, opened

from htsrl import processes, rng
from htsrl.actors.published import fetch, publish
from htsrl.async_run import LARGEST_LAG, AsyncRun, PolicyLag
from htsrl.checkpoint import load_checkpoint, newest_checkpoint
from htsrl.envs.synthetic import Counting
from htsrl.errors import EnvironmentFailed
from htsrl.models import build_model
from htsrl.models.flat import FlatParameters
from htsrl.rng import episode_seed
from htsrl.settings import Layer, configure
from htsrl.storage.fields import Field
from htsrl.storage.layout import Layout
from htsrl.storage.memory import Arena
from htsrl.storage.unrolls import UnrollQueue
from htsrl.training import resume, train

SMALL = {
    "schedule": "async", "num_envs": 8, "sync_interval": 12, "total_steps": 8 * 12 * 12, "minibatches": 4,
    "progress": "none", "tensorboard": False,
}  # fmt: skip


class RecordingRun(AsyncRun):
    """Keeps what was taken, what was learned from, and every version of the parameters."""

    slow, over = False, False

    def __init__(self, *args, **kwargs):
        self.taken, self.batches, self.records, self.versions, self.most_waiting = [], [], [], {}, 0
        super().__init__(*args, **kwargs)

    def gather(self, unrolls):
        full = self.control.stepped // self.T
        assert (full <= self.control.released).all()
        self.most_waiting = max(self.most_waiting, self.crew.queue.columns + self.N)
        self.taken.append(unrolls)
        super().gather(unrolls)

    def consume(self, j, record):
        assert self.learner.version == j
        self.versions[j] = self.learner.newest.clone()
        self.batches.append({name: array.copy() for name, array in vars(self.batch).items()})
        super().consume(j, record)
        self.records.append(record)
        while self.slow and self.crew.queue.columns < self.config.runtime.async_slots * self.N:
            self.crew.check()
            time.sleep(0.001)

    def column_of_replicas(self):
        """[N] lists of (unroll number, columns' fields as a dict), in the order in which they were learned from."""
        found = [[] for _ in range(self.N)]
        for unrolls, batch in zip(self.taken, self.batches, strict=True):
            column = 0
            for unroll in unrolls:
                for n in unroll.columns:
                    found[n].append((unroll.number, {name: array[:, column] for name, array in batch.items()}))
                    column += 1
            assert column == self.N
        return found


def recorded(run_dir, env, algo="ppo", delay_ms=0.0, slow=False, during=None, **changes):
    """A run to its end; ``during`` is called with it in a thread of its own.

    A ``slow`` learner takes as long for an update as the executors need to fill every slot that there is.
    """
    chosen = {"env": env, "algo": algo} | known_to(algo, SMALL | changes)
    with opened(RecordingRun, run_dir, delay_ms=delay_ms, **chosen) as run:
        run.slow = slow
        thread = threading.Thread(target=during or (lambda run: None), args=(run,))
        thread.start()
        try:
            run.train(threading.Event())
        finally:
            run.over = True
            thread.join()
    return run


# ------------------------------------------------------------------------------------------------------ the right rows


def assert_unrolls_follow_each_other(run):
    """Every replica's are learned from in order, each begins where the one before ended, none is left out."""
    for unrolls in run.column_of_replicas():
        assert [number for number, _ in unrolls] == list(range(len(unrolls)))
        for (_, before), (_, after) in pairwise(unrolls):
            np.testing.assert_array_equal(before["obs"][-1], after["obs"][0])


def assert_rows_are_the_counting_environments(run):
    """Every row is what the counting environment must have said there."""
    for n, unrolls in enumerate(run.column_of_replicas()):
        k, step, last_action, over = 0, 0, -1, False
        for row in ({name: array[t] for name, array in unroll.items()} for _, unroll in unrolls for t in range(run.T)):
            episode = Counting.Episode.of(episode_seed(0, n, k))
            np.testing.assert_array_equal(row["obs"], episode.observation(step, last_action))
            assert row["valid"] == (not over)
            if over:
                assert (row["reward"], row["terminated"], row["truncated"]) == (0, False, False)
                k, step, last_action, over = k + 1, 0, -1, False
                continue
            step, last_action = step + 1, int(row["action"])
            assert row["reward"] == episode.reward(step, last_action)
            ended = step == episode.length
            assert row["terminated"] == (ended and not episode.truncates)
            assert row["truncated"] == (ended and episode.truncates)
            over = ended and episode.truncates
            if row["terminated"]:
                k, step, last_action = k + 1, 0, -1


def assert_versions_are_what_they_say(run):
    """Versions never fall; a row's value and action are those of its version; the lag is measured from them."""
    config = run.config
    model = build_model(run.spec, config.network, config.seed)
    flat = FlatParameters(model, gradients=False)
    columns = run.column_of_replicas()
    assert any(columns)  # the slowest replicas may have none: their executors are killed while the others go on
    for n, unrolls in enumerate(columns):
        versions = [version for _, unroll in unrolls for version in unroll["behaviour_version"]]
        assert (np.diff(versions) >= 0).all()
        for number, unroll in unrolls:
            noise = rng.gumbel(rng.generator(0, rng.Stream.ACTION_NOISE, n, number), (run.T, model.head.noise_size))
            for version in np.unique(unroll["behaviour_version"]):
                rows = unroll["behaviour_version"] == version
                flat.assign(run.versions[int(version)])
                with torch.inference_mode():
                    params, value = model(torch.from_numpy(unroll["obs"][:-1][rows]))
                    action = model.head.sample(params, torch.from_numpy(noise[rows]))
                torch.testing.assert_close(value, torch.from_numpy(unroll["value"][rows]))
                assert action.tolist() == unroll["action"][rows].tolist()
    for version, (batch, record) in enumerate(zip(run.batches, run.records, strict=True)):
        lags = [version - acted for acted, valid in zip(batch["behaviour_version"].flat, batch["valid"].flat) if valid]
        assert record["policy_lag_max"] == max(lags)
        assert record["policy_lag_histogram"] == [lags.count(lag) for lag in range(max(lags) + 1)]
    total = run.result.values["policy_lag"]
    assert sum(total["histogram"]) == run.result.values["steps"] == sum(int(b["valid"].sum()) for b in run.batches)
    assert total["max"] == max(record["policy_lag_max"] for record in run.records)


@pytest.mark.parametrize(
    ("env", "algo", "layout"),
    [
        ("synthetic:counting", "ppo", (3, 2, 2)),  # says where each row is from
        ("CartPole-v1", "impala", (2, 1, 4)),  # has other values and actions in every row
        ("CartPole-v1", "a2c", (1, 1, 8)),
    ],
)
def test_rows_versions_and_lags_are_what_they_say(tmp_path, env, algo, layout):
    executors, actors, group = layout
    run = recorded(
        tmp_path / "run", env, algo, delay_ms=2.0,
        num_executors=executors, num_actors=actors, envs_per_group=group,
    )  # fmt: skip
    assert_unrolls_follow_each_other(run)
    if env == "synthetic:counting":
        assert_rows_are_the_counting_environments(run)
    assert_versions_are_what_they_say(run)
    assert run.most_waiting <= 2 * run.N
    assert run.result.values["reproducible"] is False
    means = [json.loads(line)["policy_lag"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert means[0] == 0  # every slot was released with the first parameters
    assert max(means) > 0


def test_killed_children_are_replaced_and_no_row_is_lost(tmp_path):
    struck = []

    def strike(run):
        choose = random.Random(0)
        for k, moment in enumerate(range(60, 8 * 12 * 10, 130)):
            while run.control.posted.sum() * 2 < moment and not run.over:  # groups of two
                time.sleep(0.001)
            role = ("executor", "actor")[k % 2]
            with suppress(OSError):  # it was being replaced
                child = choose.choice([child for child in list(run.crew.children) if child.role == role])
                signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
                struck.append(str(child))

    run = recorded(
        tmp_path / "run", "synthetic:counting", during=strike,
        delay_ms=2.0, num_executors=2, num_actors=2, envs_per_group=2,
    )  # fmt: skip
    assert {name.split()[0] for name in struck} == {"executor", "actor"}
    assert run.result.values["recovered"] >= 2
    assert_unrolls_follow_each_other(run)
    assert_rows_are_the_counting_environments(run)
    assert_versions_are_what_they_say(run)


# ------------------------------------------------------------------------------------------------------------ the queue


@pytest.mark.parametrize("slots", [1, 3])
def test_a_slow_learner_holds_the_executors_up(tmp_path, slots):
    """With one group: what is collected once a slot is free is learned from when all slots before it have been."""
    run = recorded(
        tmp_path / "run", "CartPole-v1", "impala", slow=True,
        async_slots=slots, num_executors=1, envs_per_group=8,
    )  # fmt: skip
    assert run.result.values["policy_lag"]["max"] == slots
    assert run.most_waiting == slots * run.N
    lags = [record["policy_lag_max"] for record in run.records]
    assert lags[-1] == slots, "the lag does not stay"


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 9), st.integers(1, 4), st.lists(st.integers(0, 3), min_size=1, max_size=40), st.data())
def test_the_queue_gives_every_column_once_in_the_order_of_arrival(num_envs, group, arrivals, data):
    layout = Layout(num_envs, 1, 1, group)
    T, first = 4, 7
    stepped = np.full(len(layout.groups), first * T)
    queue = UnrollQueue(layout, stepped, T)
    arrived, taken = [], []
    for steps in arrivals:
        g = data.draw(st.integers(0, len(layout.groups) - 1))
        before = stepped[g] // T
        stepped[g] += steps
        for _ in range(data.draw(st.integers(1, 2))):  # a message may come twice
            queue.look(g)
        arrived += [(n, u) for u in range(before, stepped[g] // T) for n in layout.groups[g]]
        assert queue.columns == len(arrived) - len(taken)
        unrolls = queue.take(data.draw(st.integers(0, queue.columns)))
        taken += [(n, unroll.number) for unroll in unrolls for n in unroll.columns]
        assert taken == arrived[: len(taken)]


# ------------------------------------------------------------------------------------------------------- parameters

P, VERSIONS = 300_000, 150


def publish_constants(arena):
    control = arena.views("control")
    for version in range(1, VERSIONS):
        publish(control, np.full(P, version, np.float32), version)
        time.sleep(0.001)


def control_block():
    one = Field("parameters", (2, P), np.dtype(np.float32), "run", ())
    return Arena.create({"control": [one, Field("version", (1,), np.dtype(np.int64), "run", ())]})


@pytest.mark.parametrize("publications", [0, 1, 2, 3])
def test_a_copy_during_which_parameters_are_published_is_made_again(publications):
    arena = control_block()
    control, copies = arena.views("control"), []

    class Vector:
        """Meets publications in the middle of its first copy."""

        def __init__(self):
            self.half = torch.empty(2, P // 2)

        def copy_(self, source):
            self.half[0] = source[: P // 2]
            for _ in range(0 if copies else publications):
                version = int(control.version[0]) + 1
                publish(control, np.full(P, version, np.float32), version)
            self.half[1] = source[P // 2 :]
            copies.append(int(source[0]))

    publish(control, np.full(P, 5, np.float32), 5)
    vector = Vector()
    version = fetch(control, vector.copy_, -1)
    assert version == 5 + publications
    assert (vector.half == version).all()
    assert fetch(control, vector.copy_, version) == version
    assert len(copies) == 1 + (publications > 0)
    arena.close()


def test_parameters_are_never_torn():
    """While another process publishes, every vector that is read consists of one number: its version."""
    arena = control_block()
    writer = processes.start(publish_constants, arena, "publisher")
    vector, version, seen = torch.empty(P), -1, []
    while version < VERSIONS - 1:
        version = fetch(arena.views("control"), vector.copy_, version)
        low, high = torch.aminmax(vector)
        assert float(low) == float(high) == version
        if not seen or version > seen[-1]:
            seen.append(version)
    writer.join()
    arena.close()
    assert len(seen) > 3
    assert seen == sorted(seen)


def test_policy_lag_counts():
    lag = PolicyLag()
    lag.add(np.array([0, 2, 2]))
    lag.add(np.array([], int))
    lag.add(np.array([1, LARGEST_LAG + 5, 1]))
    assert lag.histogram == [1, 2, 2, *[0] * (LARGEST_LAG - 3), 1]
    assert (lag.rows, lag.largest, lag.mean) == (6, LARGEST_LAG + 5, (0 + 2 + 2 + 1 + 36 + 1) / 6)


# ------------------------------------------------------------------------------------------------------ ends of a run


def test_a_faulty_environment_stops_the_run_with_its_reason(tmp_path):
    with pytest.raises(EnvironmentFailed, match=r"(?s)step 3[67].*the robot fell over"):
        recorded(tmp_path / "run", "faulty_envs:Raises-v0", num_executors=2)


def test_an_interrupted_run_goes_on_from_its_checkpoint(tmp_path, capsys):
    run_dir = tmp_path / "run"

    class Stopping(AsyncRun):
        def consume(self, j, record):
            super().consume(j, record)
            if j == 4:
                stop.set()

    stop = threading.Event()
    with opened(Stopping, run_dir, env="synthetic:counting", **SMALL) as run:
        run.train(stop)
    before = run.result
    assert before.interrupted
    assert before.values["intervals"] == 5
    at = load_checkpoint(newest_checkpoint(run_dir))
    capsys.readouterr()
    after = resume(run_dir, Layer({}, str))
    assert "with new trajectories" in capsys.readouterr().err
    assert not after.interrupted
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [record["interval"] for record in records] == list(range(after.values["intervals"]))
    assert records[5]["steps"] > before.values["steps"] == records[4]["steps"] == at.state["steps"]
    assert after.values["steps"] >= SMALL["total_steps"]
    assert sum(after.values["policy_lag"]["histogram"]) == after.values["steps"]
    # Replicas went on within their episodes
    assert sum(replica["episode"] for replica in at.state["replicas"]) > 8
    assert after.values["episodes"] > before.values["episodes"]
    assert resume(run_dir, Layer({}, str)) is None


def test_train_says_that_a_run_is_not_reproducible(tmp_path, capsys):
    config = configure(
        env="CartPole-v1", algo="impala", run_dir=tmp_path / "run", eval_every=400, eval_episodes=2,
        **SMALL | {"progress": "plain", "total_steps": 800},
    )  # fmt: skip
    result = train(config)
    out = capsys.readouterr().out
    assert "note: schedule async is not reproducible" in out
    assert "not reproducible: schedule async depends on timing" in out
    assert "policy lag" in out
    written = json.loads((tmp_path / "run" / "result.json").read_text())
    assert written["reproducible"] is False
    assert written["policy_lag"] == result.values["policy_lag"]
    evaluations = [json.loads(line) for line in (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()]
    assert len(evaluations) == 2
