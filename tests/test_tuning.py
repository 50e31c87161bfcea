"""`--layout auto`: the search finds what is fast and knows when to stop; no bit of a run depends on where it goes."""

from __future__ import annotations

import json
import math
import signal
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from fault_points import Fault, scripted
from hypothesis import given
from hypothesis import strategies as st
from recording import record
from test_recovery import disturbed, result_of, rows, running
from test_resume import bits, interrupted, no_changes, resume_until
from test_runtime import assert_same_bits, digests
from test_snapshots import N as LONG
from test_snapshots import T, counted
from test_snapshots import run as run_long

from htsrl import crew, resolve, tuning
from htsrl.actors.actor import Seats, waiting_groups
from htsrl.actors.mailbox import mailbox
from htsrl.checkpoint import list_checkpoints, load_checkpoint
from htsrl.cli import main
from htsrl.errors import ConfigError
from htsrl.resolve import layout_for, layout_state, tuner_for
from htsrl.run import Run
from htsrl.settings import configure
from htsrl.storage.layout import Layout
from htsrl.training import resume, train
from htsrl.tuning import MARGIN, SHARE, Space, Tuner, beats, is_decided, is_measured

SPACE = Space(16, most_executors=8, most_actors=4)
FIRST = Layout(16, 1, 1, 16)


# ---------------------------------------------------------------------------------------------------------- the search


def drive(tuner, seconds, intervals=10_000, start_s=0.01):
    """Run ``intervals`` that take ``seconds(layout)``; returns the layouts in their order, with all intervals' time."""
    path, total = [tuner.layout], 0.0
    for left in reversed(range(intervals)):
        before, took = tuner.layout, seconds(tuner.layout)
        total += took
        if tuner.completed(took, left, lambda layout: start_s) != before:
            tuner.changed(start_s)
            total += start_s
            path.append(tuner.layout)
    return path, total


def hill(executors, groups, actors):
    """Intervals that are the shorter, the nearer a layout is to these numbers, counting doublings."""

    def seconds(layout):
        found = layout.num_executors, len(layout.executor_groups[0]), layout.num_actors
        return 0.1 * (1 + sum(abs(math.log2(a / b)) for a, b in zip(found, (executors, groups, actors))) / 5)

    return seconds


@pytest.mark.parametrize("top", [(1, 1, 1), (4, 1, 1), (2, 4, 1), (4, 2, 2), (8, 1, 4)])
def test_it_climbs_to_the_fastest(top):
    tuner = Tuner(SPACE, FIRST)
    path, _ = drive(tuner, hill(*top))
    best = tuner.best
    assert (best.num_executors, len(best.executor_groups[0]), best.num_actors) == top
    assert tuner.settled
    assert tuner.layout == path[-1] == best
    assert set(path) == tuner.times.keys()
    assert len(path) <= 3 * len(set(path))
    speedup = hill(*top)(FIRST) / hill(*top)(best)
    assert tuner.outcome()["speedup"] == pytest.approx(speedup)
    assert f"{best.num_executors} executor" in tuner.sentence()


def test_what_is_given_stays():
    for name in ("num_executors", "num_actors", "envs_per_group"):
        first = Layout(16, 2, 1, 4)
        path, _ = drive(Tuner(Space(16, 8, 4, frozenset({name})), first), hill(4, 4, 2))
        assert len(set(path)) > 3
        assert {tuning.settings_of(layout)[name] for layout in path} == {tuning.settings_of(first)[name]}


@given(st.integers(1, 70), st.data())
def test_neighbours_are_layouts_in_which_everybody_has_something_to_do(num_envs, data):
    most_executors, most_actors = data.draw(st.integers(1, num_envs)), data.draw(st.integers(1, num_envs))
    executors, actors = data.draw(st.integers(1, most_executors)), data.draw(st.integers(1, most_actors))
    per_group = data.draw(st.integers(1, max(min(-(-num_envs // executors), num_envs // actors), 1)))
    layout = Layout(num_envs, executors, actors, per_group)
    for other in Space(num_envs, most_executors, most_actors).neighbours(layout):
        assert 1 <= other.num_executors <= min(most_executors, 2 * executors)
        assert 1 <= other.num_actors <= min(most_actors, 2 * actors, len(other.groups))


def test_it_is_kept_where_nothing_is_clearly_faster():
    tuner = Tuner(SPACE, FIRST)
    path, _ = drive(tuner, lambda layout: 0.1 if layout == FIRST else 0.1 / (1 + MARGIN) + 1e-6)
    assert set(path) == {FIRST, *SPACE.neighbours(FIRST)}
    assert tuner.best == FIRST
    assert "as at the start: none was faster" in tuner.sentence()
    assert not beats(1.0 / (1 + MARGIN) + 1e-6, 1.0)
    assert beats(1.0 / (1 + MARGIN) - 1e-6, 1.0)


def test_one_that_is_faster_because_the_machine_was_busy_before_does_not_win():
    intervals = iter(range(10_000))
    tuner = Tuner(SPACE, FIRST)
    path, _ = drive(tuner, lambda layout: 0.2 if next(intervals) < 8 else 0.1)
    assert tuner.best == FIRST
    assert path[:3] == [FIRST, SPACE.neighbours(FIRST)[0], FIRST]  # measured again
    assert tuner.times[FIRST] == 0.1


@pytest.mark.parametrize(("intervals", "start_s"), [(60, 0.01), (10_000, 100.0)])
def test_nothing_is_tried_that_may_cost_too_much(intervals, start_s):
    tuner = Tuner(SPACE, FIRST)
    path, _ = drive(tuner, hill(4, 1, 1), intervals, start_s)
    assert path == [FIRST]
    assert tuner.settled
    assert "the run is too short to try others" in tuner.sentence()


def test_a_slow_layout_is_left_before_all_its_intervals_are_over():
    slow = Layout(16, 2, 1, 16)
    tuner, counted = Tuner(Space(16, 2, 1, frozenset({"num_actors", "envs_per_group"})), FIRST), []
    drive(tuner, lambda layout: counted.append(layout) or (0.2 if layout.num_executors == 2 else 0.1), start_s=0.01)
    wanted = next(count for count in range(1, 100) if is_measured([0.1] * count))
    assert counted.count(slow) == tuning.WARM_UP + wanted // 2 + 1
    assert wanted > 3


def test_how_much_is_measured():
    assert not is_measured([5.0, 5.0])
    assert is_measured([5.0, 5.0, 5.0])
    assert not is_measured([0.01] * 29)
    assert is_measured([0.01] * 31)
    assert is_measured([0.1] * 11)
    assert not is_decided([2.0, 0.5], to_beat=1.0, wanted=5)
    assert is_decided([2.0, 0.5, 2.0, 1.0], to_beat=1.0, wanted=5)
    assert is_decided([0.5] * 5, to_beat=1.0, wanted=5)


@given(st.lists(st.floats(0.5, 2.0), min_size=40, max_size=40), st.floats(0.0, 3.0), st.integers(10, 2000))
def test_what_is_lost_is_bounded(factors, start_s, intervals):
    """However much slower than the best a layout next to it is, up to the worst that is thought possible."""
    tuner, table = Tuner(SPACE, FIRST), {FIRST: 1.0}

    def seconds(layout):
        if layout not in table:
            table[layout] = table[tuner.best] * min(factors[len(table) % len(factors)], tuning.SLOWEST)
        return table[layout]

    drive(tuner, seconds, intervals, start_s)
    assert tuner.lost_s <= SHARE * intervals * table[FIRST]
    if tuner.settled:
        assert not any(beats(each, tuner.times[tuner.best]) for each in tuner.times.values())


# ------------------------------------------------------------------------------------------- what an actor makes of it


def test_an_actor_answers_the_groups_that_are_its_own_now():
    control = SimpleNamespace(layout=np.array([1, 2, 1]), posted=np.array([1, 1]), answered=np.array([0, 0]))
    inbox, post = mailbox()
    ports, seats = SimpleNamespace(inbox=inbox, lockstep=False), Seats(0, 2, control)
    post.post(1, 0)  # the first from before the layout changed to two actors
    assert waiting_groups(ports, control, seats) == [0]
    control.layout[:] = 2, 1, 1
    post.post(1)
    assert waiting_groups(ports, control, seats) == [1]
    assert seats.executor_of == [0, 1]
    post.post(0)
    inbox.drop()
    inbox.drop()  # there is nothing left, and it doesn't wait
    post.post(1)
    assert inbox.take() == [1]


# ------------------------------------------------------------------------------------------------ what a machine allows

SPEC = SimpleNamespace(sleeps=False, has_images=False)


def tuner_of(monkeypatch, cores=8, found=None, fits=lambda layout: True, **settings):
    monkeypatch.setattr(resolve, "available_cores", lambda: cores)
    monkeypatch.setattr(resolve, "fits", lambda config, spec, layout: fits(layout))
    return tuner_for(configure("CartPole-v1", layout="auto", device="cpu", **settings), SPEC, found)


def test_the_space_of_a_machine(monkeypatch):
    assert tuner_for(configure("CartPole-v1"), SPEC, None) is None
    assert tuner_of(monkeypatch).space == Space(16, 16, 4)
    assert tuner_of(monkeypatch, cores=2).space == Space(16, 4, 2)
    assert tuner_of(monkeypatch, num_executors=3).space == Space(16, 3, 4, frozenset({"num_executors"}))
    assert "num_actors" in tuner_of(monkeypatch, schedule="sync").space.fixed
    assert tuner_of(monkeypatch, fits=lambda layout: layout.num_executors <= 8).space.most_executors == 8


def test_a_found_layout_is_where_it_goes_on(monkeypatch):
    tuner = tuner_of(monkeypatch)
    drive(tuner, hill(8, 1, 1))
    state = layout_state(tuner)
    again = tuner_of(monkeypatch, found=state)
    assert again.settled
    assert again.layout == tuner.best != layout_for(configure("CartPole-v1"), SPEC)
    # Values that are given, another machine, and one that doesn't allow it
    assert tuner_of(monkeypatch, found=state, num_executors=2).layout.num_executors == 2
    assert not tuner_of(monkeypatch, found=state, num_executors=2).settled
    assert not tuner_of(monkeypatch, cores=4, found=state).settled
    assert tuner_of(monkeypatch, found=state, fits=lambda layout: layout.num_executors < 8).layout.num_executors == 4
    assert not tuner_of(monkeypatch, found=state | {"settled": False}).settled
    # A stranger's numbers
    wild = tuner_of(monkeypatch, found=state | {"num_executors": 10**6, "envs_per_group": 10**6})
    assert wild.layout.num_executors == 16


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"schedule": "async"}, "layout auto is for schedule hts and sync"),
        ({"num_executors": 2, "num_actors": 1, "envs_per_group": 4}, "layout auto has nothing to find"),
        ({"num_executors": 2, "schedule": "sync", "envs_per_group": 4}, "layout auto has nothing to find"),
        ({"trace": "trace.json"}, "trace needs layout rule"),
    ],
)
def test_what_it_cannot_do_is_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        configure("CartPole-v1", layout="auto", **settings)


# ------------------------------------------------------------------------------------------------------------ the runs

SMALL = {"num_envs": 6, "sync_interval": 16, "total_steps": 6 * 16 * 20, "minibatches": 4, "epochs": 1}


@pytest.fixture
def restless(monkeypatch, quick_children):
    """On two cores, every interval tries another layout or goes back to one: each is faster than those before."""
    monkeypatch.setattr(resolve, "available_cores", lambda: 2)
    for name, value in {"SHARE": math.inf, "LEAST": 1, "SECONDS": 0.0, "FIRST_WARM_UP": 0, "WARM_UP": 0}.items():
        monkeypatch.setattr(tuning, name, value)
    monkeypatch.setattr(
        Run, "interval_seconds", lambda run: run.tuner.times.get(run.layout, 0.9 ** len(run.tuner.times))
    )


def layouts_of(records):
    return [tuple(each[f"layout/{name}"] for name in ("executors", "groups", "actors")) for each in records]


@pytest.mark.parametrize("env", ["synthetic:counting", "CartPole-v1"])
def test_no_bit_depends_on_the_layouts_that_are_tried(tmp_path, restless, env):
    fixed = record(tmp_path / "fixed", env, num_executors=1, **SMALL)
    tuned = record(tmp_path / "tuned", env, layout="auto", **SMALL)
    assert_same_bits(fixed, tuned)
    tried = layouts_of(tuned.metrics)
    assert len(set(tried)) >= 6
    assert {actors for _, _, actors in tried} == {1, 2}
    assert max(executors for executors, _, _ in tried) == 4
    assert [each["policy_lag"] for each in tuned.metrics] == [1] * len(tried)
    assert len(set(tried)) - 1 <= tuned.result.values["layout"]["tried"] <= len(set(tried))
    assert digests(record(tmp_path / "seed", env, layout="auto", seed=1, **SMALL)) != digests(fixed)


def test_a_sync_run_keeps_its_one_actor(tmp_path, restless):
    fixed = record(tmp_path / "fixed", "synthetic:counting", schedule="sync", num_executors=1, **SMALL)
    tuned = record(tmp_path / "tuned", "synthetic:counting", schedule="sync", layout="auto", **SMALL)
    assert_same_bits(fixed, tuned)
    assert len(set(layouts_of(tuned.metrics))) >= 4
    assert {actors for _, _, actors in layouts_of(tuned.metrics)} == {1}


AUTO = {"layout": "auto", "num_executors": "auto", "num_actors": "auto", "envs_per_group": "auto"}


COUNTING = {"env": "synthetic:counting", "total_steps": 6 * 16 * 8}


@pytest.fixture(scope="module")
def expected(tmp_path_factory, quick_children):
    """What runs of COUNTING in one layout come to."""
    with running(tmp_path_factory.mktemp("fixed") / "run", **COUNTING) as run:
        return result_of(run)


def test_kills_while_it_searches_change_no_bit(tmp_path, restless, expected):
    moments = [rows(k / 10) for k in range(1, 10)]
    with running(tmp_path / "tuned", **COUNTING, **AUTO) as run:
        with disturbed(run, moments, signal.SIGKILL) as sent:
            result = result_of(run)
        assert len(sent) >= 3
        assert run.result.values["reproducible"]
        assert run.result.values["layout"]["tried"] >= 4
    assert result == expected


@pytest.mark.parametrize(
    ("fault", "replaced"),
    [
        (Fault("executor", "before ready", index=1), {1}),  # it has just been added
        (Fault("executor", "after barrier", 1), {0, 1}),  # before or after it was told to stop
        (Fault("executor", "after barrier", 1, number=signal.SIGSTOP), {0}),  # it never reads that
        (Fault("actor", "after answer", 16, number=signal.SIGSTOP), {1}),  # of the first interval's last row
        (Fault("actor", "before ready", index=1), {1}),
    ],
    ids=str,
)
def test_a_change_of_the_layout_survives(tmp_path, restless, expected, monkeypatch, fault, replaced):
    monkeypatch.setattr(crew, "STOP_TIMEOUT_S", 0.5)
    (tmp_path / "strikes").mkdir()
    with (
        scripted(tmp_path / "strikes", fault),
        running(tmp_path / "run", step_timeout=3.0, **COUNTING, **AUTO | {"envs_per_group": 2}) as run,
    ):
        assert result_of(run) == expected
        assert run.result.values["recovered"] in replaced
    assert len(list((tmp_path / "strikes").iterdir())) == 1


def test_a_run_that_was_stopped_while_it_searched_goes_on_searching(tmp_path, restless):
    whole = {"env": "synthetic:counting", "record_digests": True, **SMALL}
    train(configure(run_dir=tmp_path / "fixed", progress="none", **whole))
    interrupted(tmp_path / "run", 3, layout="auto", **whole)
    state = load_checkpoint(list_checkpoints(tmp_path / "run" / "checkpoints")[-1]).state["layout"]
    assert (state["settled"], state["num_executors"]) == (False, 2)
    resume_until(tmp_path / "run", 5)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    executors, _, actors = layouts_of(records)[4]
    assert (executors, actors) == (state["num_executors"], state["num_actors"])
    resume(tmp_path / "run", no_changes())
    (result, metrics, _), (expected, plain, _) = bits(tmp_path / "run"), bits(tmp_path / "fixed")
    assert len(set(layouts_of(metrics))) >= 4
    assert result == expected
    assert [{name: each[name] for name in fixed} for each, fixed in zip(metrics, plain)] == plain
    assert (tmp_path / "run" / "digests.jsonl").read_bytes() == (tmp_path / "fixed" / "digests.jsonl").read_bytes()
    # Recorded digests can be replayed by a run that searches, too
    assert main(["verify", "--against", str(tmp_path / "run")]) == 0


def test_what_was_found_is_kept_by_a_resumed_run(tmp_path, restless, monkeypatch, capsys):
    monkeypatch.setattr(Run, "interval_seconds", lambda run: {1: 1.0, 2: 0.5, 4: 0.6}[run.layout.num_executors])
    given = {"num_actors": 1, "envs_per_group": 1}
    interrupted(tmp_path / "run", 4, env="CartPole-v1", layout="auto", progress="plain", **given)
    line = "note: layout: 2 executors with 4 groups, 1 actor: measured 100% faster than 1 executor with 4 groups"
    assert line in capsys.readouterr().out
    resume(tmp_path / "run", no_changes())
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [executors for executors, _, _ in layouts_of(records)] == [1, 2, 1, 4, 2, 2, 2, 2]
    found = json.loads((tmp_path / "run" / "result.json").read_text())["layout"]
    assert (found["num_executors"], found["settled"], found["tried"]) == (2, True, 0)


def test_a_run_that_goes_by_the_rule_may_be_resumed_with_a_search(tmp_path, restless):
    train(configure("CartPole-v1", run_dir=tmp_path / "fixed", progress="none", **SMALL))
    interrupted(tmp_path / "run", 2, env="CartPole-v1", **SMALL)
    result = resume(tmp_path / "run", no_changes(layout="auto"))
    assert result.values["layout"]["tried"] >= 4
    assert bits(tmp_path / "run")[0] == bits(tmp_path / "fixed")[0]


def test_an_environment_that_does_not_repeat_itself_ends_the_search(tmp_path, restless, capsys):
    with running(tmp_path / "run", env="faulty_envs:Clock-v0", progress="plain", **AUTO) as run:
        run.train(threading.Event())
        assert run.result.values["reproducible"] is False
        assert run.result.values["layout"]["settled"]
        assert run.layout == run.tuner.best
    out = "".join(capsys.readouterr()).replace("\n", " ")
    assert out.count("does not repeat itself:") == 1
    assert "layout: 1 executor with 1 group, 1 actor: the environment does not repeat itself" in out


def test_long_episodes_change_hands_by_snapshots(tmp_path, monkeypatch, restless):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    whole = run_long(tmp_path / "fixed", "Plain")
    monkeypatch.setattr(tuning, "FIRST_WARM_UP", 11)
    monkeypatch.setattr(Run, "interval_seconds", lambda run: 1.0)  # so it goes back at once
    with counted(tmp_path / "steps"):
        tuned = run_long(tmp_path / "tuned", "Right", layout="auto", num_actors=1, envs_per_group=1)
    assert tuned["layout"]["tried"] == 2
    assert tuned["trajectory_sha256"] == whole["trajectory_sha256"]
    replayed = (tmp_path / "steps").stat().st_size - 1 - LONG * T * 16  # one in the description
    assert 2 * LONG * 128 <= replayed < LONG * T * 12


def test_an_actor_tells_of_as_many_rows_as_a_batch_holds():
    control = SimpleNamespace(layout=np.array([2, 1, 2]))  # eight replicas in four groups of two
    seats = Seats(0, 8, control)
    assert [columns.tolist() for columns in seats.columns_of] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    for most, batches in ((8, [[0, 1, 3]]), (5, [[0, 1], [3]]), (4, [[0, 1], [3]]), (2, [[0], [1], [3]])):
        assert list(seats.batches([0, 1, 3], most)) == batches
    assert list(seats.batches([2, 3], 1)) == [[2], [3]]  # a group that is larger than a batch
