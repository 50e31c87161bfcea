"""The model of larger systems: closed form, discrete events, measured times and the plan made from them."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from htsrl.errors import ConfigError

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    """The scripts' folder on the path, as when one of them runs."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


class Scripted:
    """Step times [alpha, N] that are given, not drawn."""

    def __init__(self, *rows):
        self.times = np.array(rows, float)
        self.mean_s, self.shape = float(self.times.mean()), math.inf

    def draw(self, rng, size):
        assert self.times.shape == size
        return self.times

    def scaled(self, factor):
        return Scripted(*(factor * self.times))


def played(setup, times, beside=()):
    from discrete_events import play

    return play(setup, times, np.random.default_rng(0), beside)


# ---------------------------------------------------------------------------------------------------- the closed form


@pytest.mark.parametrize(
    ("n", "alpha", "formula", "monte_carlo"),
    # F + euler / (n f(F)), and E[max] from 20,000 draws, both computed elsewhere
    [
        (16, 1, 3.350, 3.377),
        (16, 4, 8.298, 8.240),
        (16, 16, 24.01, 23.83),
        (16, 64, 79.35, 78.91),
        (16, 128, 149.4, 148.7),
        (64, 1, 4.736, 4.742),
        (64, 16, 27.05, 26.92),
        (64, 128, 156.5, 156.1),
    ],
)
def test_closed_form_of_the_barrier(n, alpha, formula, monte_carlo):
    from barrier import exact_interval, expected_interval

    assert expected_interval(n, alpha, 1.0) == pytest.approx(formula, rel=5e-4)
    assert expected_interval(n, alpha, 1.0) == pytest.approx(monte_carlo, rel=0.01)
    assert exact_interval(n, alpha, 1.0) == pytest.approx(monte_carlo, rel=5e-3)


@pytest.mark.parametrize("shape", [0.5, 1.0, 16.0])
@pytest.mark.parametrize(("n", "alpha"), [(16, 8), (200, 1), (1000, 32)])
def test_closed_form_for_gamma_steps_agrees_with_drawing_them(n, alpha, shape):
    from barrier import exact_interval, expected_interval

    mean_s = 0.002
    steps = np.random.default_rng(0).standard_gamma(shape, (400, n, alpha)) * mean_s / shape
    drawn = steps.sum(axis=2).max(axis=1).mean()
    assert expected_interval(n, alpha, 1 / mean_s, shape) == pytest.approx(drawn, rel=0.03)
    assert exact_interval(n, alpha, 1 / mean_s, shape) == pytest.approx(drawn, rel=0.03)
    # alpha steps of Gamma(K) are one step of Gamma(alpha K) with alpha times the mean
    one = expected_interval(n, 1, 1 / (alpha * mean_s), alpha * shape)
    assert expected_interval(n, alpha, 1 / mean_s, shape) == pytest.approx(one, rel=1e-9)


def test_closed_form_at_its_edges():
    from barrier import exact_interval, expected_interval

    assert expected_interval(1, 7, beta=100.0) == pytest.approx(0.07)  # nobody to wait for
    assert exact_interval(5, 1, 1.0) == pytest.approx(sum(1 / k for k in range(1, 6)), rel=1e-4)
    assert expected_interval(4, 1, 1.0) == pytest.approx(1.964, rel=1e-3)  # known to be 6% low
    for wrong in [(0, 1, 1.0), (4, 0, 1.0), (4, 1, -1.0), (4, 1, 1.0, 0.0)]:
        with pytest.raises(ValueError, match="at least 1"):
            expected_interval(*wrong)


# ---------------------------------------------------------------------------------------------------- plays by hand


def test_one_replica_with_constant_times_by_hand():
    from discrete_events import Inference, Setup, Times, Work, constant, simulate

    times = Times(
        step=constant(2.0),
        asleep=constant(0.3),
        oversleep_s=0.02,
        turn_s=0.1,
        arrive_s=0.25,
        hop_s=0.01,
        inference=Inference((4,), (0.5,), 0.4, tell_s=0.05),
        learning=Work(fixed_s=1.0, row_s=0.5),
        between=Work(replica_s=0.125),
    )
    one = played(Setup(1, 3, 1), times)
    # A step: the actor wakes, answers and tells; the executor wakes, steps and sleeps
    assert one.rollout_s == pytest.approx(3 * (0.01 + 0.55 + 0.01 + 2.1 + 0.32) + 0.25)
    assert one.stepping_s == pytest.approx(3 * 2.42)
    assert one.core_s == pytest.approx(3 * (0.55 + 2.1) + 0.25)
    assert one.steps == (3,)
    # Learning 1 + 3 x 0.5 s hides behind the rollout under hts and follows it under sync
    between = 0.125 + 0.05 + 3 * 0.01
    assert simulate(Setup(1, 3, 1), times).interval_s == pytest.approx(one.rollout_s + between)
    sync = simulate(Setup(1, 3, 1, schedule="sync"), times)
    assert sync.interval_s == pytest.approx(one.rollout_s + 2.5 + between)
    assert sync.steps_per_second == pytest.approx(3 / sync.interval_s)
    assert sync.learner_busy == pytest.approx(2.5 / sync.interval_s)
    slow = dataclasses.replace(times, learning=Work(fixed_s=20.0))
    assert simulate(Setup(1, 3, 1), slow).interval_s == pytest.approx(20.0 + between)


def test_who_waits_for_whom_by_hand():
    from discrete_events import Setup, Times

    times = Times(Scripted([1, 3], [3, 1]))
    assert played(Setup(2, 2, 2), times).rollout_s == 4.0  # each goes on as soon as it can
    assert played(Setup(2, 2, 2, schedule="sync"), times).rollout_s == 6.0  # the slower one, twice
    assert played(Setup(2, 2, 1), times).rollout_s == 8.0  # one executor steps both
    assert played(Setup(2, 2, 1, group=2), times).rollout_s == 8.0
    uneven = played(Setup(2, 2, 2), Times(Scripted([1, 3], [1, 3])))
    assert (uneven.rollout_s, uneven.arrived_s, uneven.stepping_s) == (6.0, 4.0, 4.0)


def test_an_executor_steps_one_group_while_the_other_is_answered():
    from discrete_events import Inference, Setup, Times, constant

    times = Times(constant(1.0), inference=Inference((1, 2), (1.0, 1.0), 1.0))
    # Both answered at 1; first group stepped at 2, answered at 3, stepped at 4; second at 3, 4, 5
    two = played(Setup(2, 2, 1), times)
    assert (two.rollout_s, two.turns, two.stepping_s) == (5.0, 3, 4.0)
    # As one group: answer 1, steps 2, twice
    assert played(Setup(2, 2, 1, group=2), times).rollout_s == 6.0
    # First come, first served: of three, one always waits to be stepped, so that only the first answer is waited for
    assert played(Setup(3, 4, 1), Times(constant(1.0), inference=Inference((3,), (1.0,), 1.0))).rollout_s == 13.0
    # Under sync both are answered together: 1 + 2, twice
    assert played(Setup(2, 2, 1, schedule="sync"), times).rollout_s == 6.0


def test_groups_share_actors_evenly():
    from discrete_events import Inference, Setup, Times, constant

    times = Times(constant(0.0), inference=Inference((1,), (1.0,), 1.0))
    # A row at a time: four rows take one actor four turns' time, two actors two
    assert played(Setup(4, 3, 4), times).rollout_s == 12.0
    assert played(Setup(4, 3, 4, actors=2), times).rollout_s == 6.0


def test_cores_are_shared_by_all_that_can_run():
    from discrete_events import Setup, Times, constant

    times = Times(constant(1.0))
    assert played(Setup(2, 3, 2, cores=2), times).rollout_s == 3.0
    assert played(Setup(2, 3, 2, cores=1), times).rollout_s == 6.0
    assert played(Setup(3, 2, 3, cores=2), times).rollout_s == 3.0
    # A learner of 3 core-seconds beside a step of 1 on a single core: half speed until 2, then alone
    beside = played(Setup(1, 1, 1, cores=1), times, beside=[(1.0, 3.0)])
    assert (beside.rollout_s, beside.learner_s, beside.core_s) == (2.0, 4.0, 4.0)
    # One that keeps two cores busy leaves a third of two cores' speed each: 1.5 times as long
    wide = played(Setup(1, 2, 1, cores=2), times, beside=[(2.0, 4.0)])
    assert (wide.rollout_s, wide.learner_s) == (3.0, 5.0)
    # Sleep needs no core
    asleep = Times(constant(0.0), asleep=constant(1.0))
    assert played(Setup(8, 2, 8, cores=1), asleep).rollout_s == 2.0


def test_cost_of_padded_batches():
    from discrete_events import Inference

    inference = Inference((4, 8), (1.0, 1.5), more_s=1.25, tell_s=0.25)
    costs = [(1, 1.0), (4, 1.0), (5, 1.5), (8, 1.5), (9, 2.25), (12, 2.25), (13, 2.75), (16, 2.75), (17, 3.5)]
    for rows, cost in costs:
        assert inference.turn_s(rows, 0) == pytest.approx(cost), rows
    assert inference.turn_s(8, 3) == pytest.approx(1.5 + 0.75)


@pytest.mark.parametrize("schedule", ["hts", "sync"])
@pytest.mark.parametrize(("executors", "group", "actors"), [(1, 1, 1), (3, 2, 1), (13, 1, 1), (4, 4, 2), (5, 1, 3)])
def test_every_group_makes_every_step_once(executors, group, actors, schedule):
    from discrete_events import Gamma, Inference, Setup, Times

    if schedule == "sync":
        actors = 1
    setup = Setup(13, 9, executors, actors, group, cores=3, schedule=schedule)
    step, nap = Gamma(0.003), Gamma(0.002, 4.0)
    times = Times(step, asleep=nap, turn_s=1e-5, hop_s=1e-5, inference=Inference((4, 8), (2e-3, 3e-3), 2e-3, 1e-5))
    one = played(setup, times, beside=[(1.5, 0.05), (1.0, 0.01)])
    assert set(one.steps) == {9}
    assert one.stepping_s <= one.arrived_s <= one.rollout_s
    # No work is lost: steps, messages and the learner, and at least as many batches as actors' turns
    rng = np.random.default_rng(0)
    work = step.draw(rng, (9, 13)).sum() + len(one.steps) * 9 * 1e-5 + 1.5 * 0.05 + 0.01
    assert one.core_s >= work + one.turns * 2e-3
    assert one.core_s <= 3 * max(one.rollout_s, one.learner_s) * (1 + 1e-9)


def test_refused_layouts():
    from discrete_events import Setup, Times, constant

    with pytest.raises(ValueError, match="between 1 and 2"):
        played(Setup(2, 1, 3), Times(constant(1.0)))
    with pytest.raises(ValueError, match="one actor"):
        played(Setup(4, 1, 2, actors=2, schedule="sync"), Times(constant(1.0)))


# ------------------------------------------------------------------------------------------------------- many intervals


@pytest.mark.parametrize(("n", "alpha", "shape"), [(16, 16, 1.0), (16, 32, 16.0), (64, 8, 1.0)])
def test_without_costs_the_simulation_is_the_closed_form(n, alpha, shape):
    from barrier import bounds, exact_interval, expected_interval
    from discrete_events import Gamma, Setup, Times, simulate

    setup, times = Setup(n, alpha, n), Times(Gamma(0.01, shape))
    outcome = simulate(setup, times, turns=150_000, intervals=1000)
    assert outcome.interval_s == pytest.approx(expected_interval(n, alpha, 100.0, shape), rel=0.02)
    assert outcome.interval_s == pytest.approx(exact_interval(n, alpha, 100.0, shape), rel=0.02)
    assert outcome.stepping + outcome.barrier == pytest.approx(1.0)
    assert bounds(setup, times).interval_s == pytest.approx(expected_interval(n, alpha, 100.0, shape))


@pytest.mark.parametrize(
    ("n", "mean_s", "shape", "lockstep", "barrier"),
    # Steps per second of sleeping replicas, by Monte Carlo elsewhere
    [(16, 0.01, 1, 471, 1384), (16, 0.002, 16, 5369, 7697), (64, 0.002, 1, 6718, 26094)],
)
def test_sleeping_replicas_under_both_schedules(n, mean_s, shape, lockstep, barrier):
    from discrete_events import Gamma, Setup, Times, constant, simulate

    times = Times(constant(0.0), asleep=Gamma(mean_s, shape))
    hts = simulate(Setup(n, 128, n), times, turns=50_000, intervals=24)
    sync = simulate(Setup(n, 128, n, schedule="sync"), times, turns=50_000, intervals=6)
    assert hts.steps_per_second == pytest.approx(barrier, rel=0.03)
    assert sync.steps_per_second == pytest.approx(lockstep, rel=0.03)


def test_alpha_of_one_is_lockstep():
    from discrete_events import Gamma, Inference, Setup, Times, simulate

    times = Times(Gamma(0.01), hop_s=1e-4, inference=Inference((16,), (1e-3,), 1e-3))
    hts = simulate(Setup(16, 1, 16, schedule="hts"), times, intervals=500)
    sync = simulate(Setup(16, 1, 16, schedule="sync"), times, intervals=500)
    assert hts == sync
    free = Times(Gamma(0.01))
    one, many = (simulate(Setup(16, T, 16, schedule="sync"), free, turns=64_000, intervals=4000 // T) for T in (1, 50))
    assert one.steps_per_second == pytest.approx(many.steps_per_second, rel=0.02)


def test_longer_intervals_wait_less():
    from discrete_events import Gamma, Inference, Setup, Times, simulate

    times = Times(Gamma(0.01), hop_s=1e-5, inference=Inference((16,), (1e-4,), 1e-4))
    outcomes = [simulate(Setup(16, T, 16), times, turns=30_000, intervals=2000 // T) for T in (1, 4, 16, 64)]
    speeds = [each.steps_per_second for each in outcomes]
    assert speeds == sorted(speeds)
    assert speeds[-1] > 2 * speeds[0]
    waits = [each.barrier for each in outcomes]
    assert waits == sorted(waits, reverse=True)


def test_shares_add_up_and_seeds_decide():
    from discrete_events import Gamma, Inference, Setup, Times, Work, simulate

    times = Times(Gamma(0.01), inference=Inference((16,), (1e-3,), 1e-3), learning=Work(row_s=1e-3), between=Work(0.01))
    setup = Setup(16, 8, 4, cores=3)
    one, again, other = (simulate(setup, times, seed) for seed in (1, 1, 2))
    assert one == again
    assert one != other
    assert one.stepping + one.inference + one.barrier + one.learning == pytest.approx(1.0)
    assert min(one.stepping, one.inference, one.barrier, one.learning) > 0
    assert 1 < one.cores_busy <= 3


def test_ranks_wait_for_the_slowest_in_the_exchange():
    from discrete_events import Gamma, Setup, Times, Work, constant, simulate

    # Constant times: ranks cost their exchange, where learning is what all wait for
    times = Times(constant(1.0), learning=Work(fixed_s=5.0), exchange_s=0.5)
    assert simulate(Setup(2, 3, 2, ranks=4), times).interval_s == pytest.approx(5.5)
    assert simulate(Setup(2, 3, 2, ranks=4), times).steps_per_second == pytest.approx(4 * 6 / 5.5)
    assert simulate(Setup(2, 3, 2, ranks=4, schedule="sync"), times).interval_s == pytest.approx(3 + 5.5)
    # Random times: the more ranks, the slower the slowest; without a learner nobody hears of other ranks
    random = Times(Gamma(1.0), learning=Work(fixed_s=4.0))
    one, many = (simulate(Setup(2, 4, 2, ranks=ranks), random, intervals=200).interval_s for ranks in (1, 16))
    assert many > 1.1 * one
    free = Times(Gamma(1.0))
    one, many = (simulate(Setup(2, 4, 2, ranks=ranks), free, intervals=400).interval_s for ranks in (1, 4))
    assert many > one  # an update that takes no time still ends with the slowest rank's interval before


def test_bounds_by_hand():
    from barrier import bounds
    from discrete_events import Inference, Setup, Times, Work, constant

    times = Times(
        constant(1.0),
        inference=Inference((4,), (0.4,), 0.4),
        learning=Work(row_s=0.125, cores=2.0),
        record=Work(fixed_s=0.5),
        between=Work(fixed_s=0.25),
    )
    found = bounds(Setup(8, 10, 4, group=2, cores=4), times)
    assert found.rollout == pytest.approx(10 * (2 * 1.0 + 0.4))
    assert found.cores == pytest.approx((10 * 8 * 1.1 + 80 * 0.125 * 2 + 0.5) / 4)
    assert found.inference == pytest.approx(10 * 8 * 0.1)
    assert found.learning == pytest.approx(80 * 0.125 + 0.5)
    assert found.interval_s == pytest.approx(max(found.rollout, found.cores) + 0.25)
    # With two groups, one is stepped while the other is answered
    assert bounds(Setup(8, 10, 4, group=1, cores=4), times).rollout == pytest.approx(10 * 2 * 1.0)
    sync = bounds(Setup(8, 10, 4, group=2, cores=4, schedule="sync"), times)
    assert sync.interval_s == pytest.approx(10 * (2.0 + 0.8) + 10.0 + 0.5 + 0.25)


# --------------------------------------------------------------------------------------------------------------- a plan


def site(**changes):
    from planner import Site

    return Site(**{"hosts": 2, "cores_per_host": 8, "most_ranks": 8} | changes)


def test_candidates_fit_the_site():
    from planner import candidates

    several = list(candidates(100, 4, site(), [1, 2]))
    assert [each[0].setup.ranks for each in several] == [2, 4, 8]
    for each in (one for group in several for one in group):
        setup = each.setup
        assert setup.ranks * setup.replicas >= 100
        assert setup.cores == 16 / setup.ranks
        assert 1 <= setup.actors <= setup.executors <= setup.cores
        assert each.threads <= setup.cores
        assert setup.group * 2 >= setup.replicas / setup.executors
    unlimited = [one for group in candidates(1000, 4, site(hosts=1, cores_per_host=math.inf), [1]) for one in group]
    assert max(each.setup.executors for each in unlimited) == 200  # as many as one run can have


def test_recommended_is_the_smallest_that_is_fast_enough():
    from discrete_events import Setup, Times, constant
    from planner import Candidate, recommended, simulated

    def choice(alpha, ranks, speed):
        return dataclasses.replace(
            simulated(Candidate(Setup(4, alpha, 4, ranks=ranks), 1), 8, Times(constant(1.0)), 100),
            steps_per_second=speed,
        )

    found = {1: [choice(1, 2, 90.0)], 4: [choice(4, 4, 96.0), choice(4, 2, 95.5)], 8: [choice(8, 1, 100.0)]}
    assert recommended(found, 0.05) is found[4][1]
    assert recommended(found, 0.2) is found[1][0]
    assert recommended(found, 0.0) is found[8][0]


@pytest.mark.parametrize("part", ["environment", "inference", "learning", "record", "barrier"])
def test_what_binds_gains_most(part):
    from discrete_events import Gamma, Inference, Setup, Times, Work
    from planner import Candidate, gains, simulated

    much = {"environment": (10.0, 100.0), "barrier": (10.0, 0.3)}.get(part, (1.0, 100.0))
    inference, learning, record = (5.0 * (part == name) + 0.01 for name in ("inference", "learning", "record"))
    times = Times(
        Gamma(*much),
        inference=Inference((64,), (inference,), inference),
        learning=Work(row_s=learning / 16),
        record=Work(row_s=record / 16),
    )
    best = simulated(Candidate(Setup(16, 2, 16), 1), 16, times, 2000)
    found = gains(best, times, 2000)
    assert max(found, key=found.get) == part, found
    assert all(gain > 0.9 for gain in found.values())
    if part == "barrier":  # with half the waiting; the learner has time
        assert found[part] == pytest.approx(1 / (1 - best.outcome.barrier / 2))


def test_exchange_between_ranks_by_hand():
    from recorded_times import Exchange

    network = Exchange(latency_s=1e-3, bytes_per_second=1e6)
    assert network.seconds(1, 250_000, 16) == 0.0
    assert network.seconds(4, 250_000, 16) == pytest.approx(16 * 2 * (2 * 1e-3 + 0.75 * 1.0))


# ------------------------------------------------------------------------------------------------------------ the times


RECORD = {
    "messages": {"turn_s": 7e-6, "tell_s": 4e-6, "hop_s": 5e-6, "oversleep_s": 5e-5},
    "workloads": {
        name: {
            "observation_bytes": 16,
            "parameters": 10_000,
            "gradient_steps": 4,
            "learning": {"1": {"fixed_s": 1e-3, "row_s": 1e-5, "cores": 1.0}},
            "record": {"replica_s": 1e-6, "row_s": 1e-8},
            "noise": {"replica_s": 1e-6, "row_s": 1e-8},
            "between": {"replica_s": 1e-6, "row_s": 1e-8},
            "inference": {"buckets": [4, 16], "bucket_s": [5e-5, 6e-5], "more_s": 6e-5},
            "steps": {"slices_s": [1e-5, 2e-5, 6e-5], "arrive_s": 1e-6},
        }
        for name in ("cartpole", "sleep")
    },
}


def test_recorded_times_become_the_simulation_s():
    from recorded_times import times

    cartpole, sleeping = times(RECORD, "cartpole"), times(RECORD, "sleep-2-16-64")
    assert cartpole.step.mean_s == pytest.approx(3e-5)
    assert set(cartpole.step.draw(np.random.default_rng(0), (100,))) == {1e-5, 2e-5, 6e-5}
    assert cartpole.step.scaled(2.0).mean_s == pytest.approx(6e-5)
    assert cartpole.asleep.mean_s == 0.0
    assert (sleeping.asleep.mean_s, sleeping.asleep.shape, sleeping.oversleep_s) == (0.002, 16.0, 5e-5)
    assert cartpole.learning.seconds(16, 10) == pytest.approx(1e-3 + 160 * 1e-5)
    assert cartpole.inference.turn_s(5, 2) == pytest.approx(6e-5 + 2 * 4e-6)
    with pytest.raises(ConfigError, match="pong was not measured"):
        times(RECORD, "pong")
    with pytest.raises(ConfigError, match="not 2"):
        times(RECORD, "cartpole", 2)


def test_slices_keep_the_mean_and_the_spread():
    from service_times import SLICES, slices

    sample = np.random.default_rng(0).gamma(3.0, 0.01, 10_007)
    kept = np.array(slices(sample, 2 * sample.mean()))
    assert len(kept) == SLICES
    assert kept.mean() == pytest.approx(2 * sample.mean())
    assert kept.std() == pytest.approx(2 * sample.std(), rel=0.02)
    assert slices(np.array([3.0, 1.0]), 2.0) == [1.0, 3.0]


def test_an_executor_alone_is_timed_turn_by_turn():
    from service_times import REGULAR, T, executor_alone
    from workloads import workload

    sleeping = workload("sleep-1-1-4").config(step_ms=1.0, step_shape=REGULAR)
    turns = executor_alone(sleeping, replicas=4, group=2, seconds=0.0)
    assert turns.cpu_s.shape == turns.idle_s.shape == (2, T - 1, 2)
    assert turns.cpu_s.mean() > 1e-6
    # A turn steps two replicas, and sleeping is no core time; a clock's grain and wake-ups are not asserted
    assert np.median(turns.idle_s) > 0.0015
    assert np.median(turns.cpu_s) < 0.0015


# -------------------------------------------------------------------------------------------------------- the commands


def run(*arguments: object, timeout: float = 250) -> str:
    command = [sys.executable, str(BENCHMARKS / "simulate.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_measure_keeps_all_that_a_simulation_needs(tmp_path, monkeypatch, capsys):
    import service_times
    import simulate
    from recorded_times import load, times

    path = tmp_path / "times.json"
    monkeypatch.setattr(service_times, "measured_messages", lambda seconds: RECORD["messages"])  # eight processes less
    arguments = ["--workload", "cartpole", "--seconds", "0.02", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / "simulate.py"), "measure", *arguments])
    assert simulate.main() == 0
    assert "cartpole: step" in capsys.readouterr().out
    record = load(path)
    assert {"command", "date", "commit", "machine", "versions"} <= record.keys()
    kept = record["workloads"]["cartpole"]
    assert kept["steps"]["group"] == kept["steps"]["replicas"] == kept["inference"]["buckets"][-1] == 16
    assert kept["gradient_steps"] == 16
    every = times(record, "cartpole")
    assert 1e-6 < every.step.mean_s < 1e-3
    assert 1e-5 < every.inference.turn_s(16, 1) < 1e-1
    assert every.learning.seconds(16, 128) > 1e-3


def test_plan_and_validate_from_a_record(tmp_path):
    times, plan, picture, runs = (tmp_path / name for name in ("times.json", "plan.json", "plan.png", "runs.json"))
    times.write_text(json.dumps(RECORD))
    arguments = ["--replicas", "8,64", "--alpha", "1,4,16", "--hosts", 2, "--cores-per-host", 4, "--max-ranks", 8]
    shown = run("plan", "--workload", "cartpole", *arguments, "--times", times, "--json", plan, "--plot", picture)
    plans = json.loads(plan.read_text())["plans"]
    assert [(each["replicas"], each["cores"]) for each in plans] == [(8, 8), (64, 8), (8, None), (64, None)]
    for each in plans:
        assert [one["alpha"] for one in each["by_alpha"]] == [1, 4, 16]
        best = each["best"]
        assert best["steps_per_second"] >= 0.95 * max(one["steps_per_second"] for one in each["by_alpha"])
        assert 0 < best["steps_per_second"] < 1.05 * each["limit"]
        assert each["binds"] in ("cores", *each["gains_if_twice_as_fast"])
        assert best["storage_gib_per_rank"] * 2**30 >= 2 * (best["alpha"] + 1) * 16 * each["replicas"] / best["ranks"]
    assert "cartpole, 64 replicas, unlimited cores" in shown
    assert picture.stat().st_size > 1000

    shown = run(
        "validate",
        "--workload",
        "cartpole",
        "--schedules",
        "hts",
        "--alpha",
        64,
        "--seconds",
        0.5,
        "--times",
        times,
        "--json",
        runs,
    )
    (kept,) = json.loads(runs.read_text())["runs"]
    assert kept["setup"]["executors"] >= 1
    ratio = kept["simulated"]["steps_per_second"] / kept["measured"]["steps_per_second"]
    assert kept["errors"]["simulated"] == pytest.approx(ratio - 1)
    assert "mean error" in shown


def test_the_model_command_needs_no_measurement():
    shown = run("model", "--replicas", "16", "--alpha", "1,16", "--mean-ms", "2")
    assert "16 x 16" in shown
    assert "48.02" in shown  # 24.01 steps of 2 ms


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["model", "--replicas", "0"], "--replicas must be whole numbers greater than 0"),
        (["model", "--mean-ms", "0"], "--mean-ms"),
        (["measure", "--workload", "chess"], "chess is not a workload to measure"),
        (["measure", "--seconds", "0"], "--seconds"),
        (["validate", "--times", "nowhere.json"], "simulate.py measure"),
        (["plan", "--times", "nowhere.json"], "simulate.py measure"),
        (["plan", "--times", str(Path(__file__))], "holds no service times"),
        (["plan", "--hosts", "0"], "--hosts"),
        (["plan", "--hosts", "16", "--max-ranks", "8"], "--max-ranks must be at least --hosts"),
        (["plan", "--hosts", "16", "--replicas", "8"], "--hosts must be at most --replicas"),
        (["plan", "--within", "1"], "--within"),
        (["plan", "--alpha", "4,x"], "--alpha"),
        (["plan", "--faster", "learning=0"], "--faster wants PART=FACTOR"),
        (["plan", "--faster", "luck=2"], "environment, inference, learning, record"),
        (["plan", "--sites", "moon"], "moon is not a site"),
        (["plan", "--workload", "chess"], "chess is not a workload"),
    ],
)
def test_refusals_are_one_sentence(monkeypatch, capsys, tmp_path, arguments, words):
    import simulate
    from facts import run_main

    record = tmp_path / "times.json"
    record.write_text(json.dumps(RECORD))
    if arguments[0] != "measure" and arguments[0] != "model" and "--times" not in arguments:
        arguments = [*arguments, "--times", str(record)]
    monkeypatch.setattr(sys, "argv", ["simulate.py", *arguments])
    assert run_main(simulate.main) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("simulate.py: error: ")
    assert error.count("\n") == 1
