"""A start that can't finish says which process did not come up, and why, within a bounded time."""

from __future__ import annotations

import re
import time

import pytest
from test_runtime import our_children

from htsrl import envs
from htsrl.errors import EnvironmentFailed, RunFailed
from htsrl.evaluation import Evaluator
from htsrl.models import FlatParameters, build_model
from htsrl.settings import configure
from htsrl.training import train

SMALL = {
    "num_envs": 4, "sync_interval": 16, "total_steps": 4 * 16 * 2, "minibatches": 4, "epochs": 1, "num_executors": 1,
    "progress": "none", "tensorboard": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def start_seconds():
    """How long a child needs on this machine, as it is now, to load torch and come up."""
    config = configure("faulty_envs:Steady-v0", eval_every=1)
    started = time.monotonic()
    evaluator = Evaluator(config, envs.describe(config.env, config.environment))
    evaluator._reports.poll(120)
    evaluator.stop()
    return time.monotonic() - started


@pytest.mark.parametrize(
    ("env", "network", "kind", "words"),
    [
        ("RaisesInChild-v0", "auto", EnvironmentFailed, r"failed in construction: replica 0.*the robot is elsewhere"),
        ("Steady-v0", "faulty_nets:raises_in_child", RunFailed, r"actor 0 failed.*the network is elsewhere"),
        ("Steady-v0", "missing_in_child:linear", RunFailed, r"actor 0 failed.*No module named 'robots'"),
        ("missing_in_child:Steady-v0", "auto", EnvironmentFailed, r"construction.*No module named 'robots'"),
    ],
)
def test_what_can_not_be_built_in_a_child_is_named_with_its_traceback(tmp_path, env, network, kind, words):
    env = env if ":" in env else f"faulty_envs:{env}"
    with pytest.raises(kind, match=f"(?s){words}") as failure:
        train(configure(env, run_dir=tmp_path / "run", network=network, **SMALL))
    assert "Traceback" in str(failure.value)
    assert not our_children()


def test_a_constructor_that_hangs_is_named_with_its_stack(tmp_path):
    started = time.monotonic()
    with pytest.raises(RunFailed) as failure:
        train(configure("faulty_envs:HangsInInit-v0", run_dir=tmp_path / "run", start_timeout=2.0, **SMALL))
    assert time.monotonic() - started < 100
    message = str(failure.value)  # on a slow machine it also names the actor, which is not up within two seconds either
    assert re.search(r"executor 0 did not come up: no sign of life for \d+ s \(--start-timeout\):\n", message)
    assert re.search(r"faulty_envs\.py\", line \d+ in __init__", message)
    assert not our_children()


def test_a_network_that_hangs_in_an_actor_is_named_with_its_stack(tmp_path, start_seconds):
    settings = {"network": "faulty_nets:hangs_in_child", "start_timeout": 3.0 * start_seconds}
    with pytest.raises(RunFailed, match=r"(?s)actor 0 did not come up.*faulty_nets\.py\", line \d+ in hangs_in_child"):
        train(configure("faulty_envs:Steady-v0", run_dir=tmp_path / "run", **settings, **SMALL))
    assert not our_children()


def outcome_of(evaluator, parameters):
    """Events and results of an evaluator that is given one request, until it has nothing to do."""
    events, results = [], []
    evaluator.request(100, parameters)
    deadline = time.monotonic() + 120
    while evaluator.busy:
        results += evaluator.results(wait_s=0.2)
        events += evaluator.take_events()
        assert time.monotonic() < deadline
    return events, results


@pytest.mark.parametrize(
    ("env", "network", "limits", "words"),
    [
        ("Steady-v0", "faulty_nets:hangs_in_evaluator", {"start_timeout": 1.0}, r"did not come up within \d+ s"),
        ("HangsInEvaluator-v0", "auto", {"step_timeout": 1.0}, r"has made no progress for \d+ s.*faulty_envs.*in step"),
    ],
)
def test_an_evaluator_that_hangs_twice_is_given_up(env, network, limits, words):
    config = configure(f"faulty_envs:{env}", network=network, eval_every=100, eval_episodes=8, **limits)
    spec = envs.describe(config.env, config.environment)
    model = build_model(spec, config.network, config.seed)
    evaluator = Evaluator(config, spec)
    try:
        events, results = outcome_of(evaluator, dict(FlatParameters(model, gradients=False).items()))
    finally:
        evaluator.stop()
    assert results == []
    again, off = events
    assert re.search(rf"(?s){words}.*; the evaluator is started again", again)
    assert re.search(rf"(?s){words}.*; evaluation is switched off, training goes on", off)


def test_a_slow_evaluation_that_goes_on_is_left_alone():
    """Every step takes its time, and all of them many times what one may."""
    config = configure("synthetic:sleep", step_ms=20.0, max_episode_steps=40, eval_every=1, eval_episodes=8)
    config = config.model_copy(update={"runtime": config.runtime.model_copy(update={"step_timeout": 3.0})})
    spec = envs.describe(config.env, config.environment)
    model = build_model(spec, config.network, config.seed)
    evaluator = Evaluator(config, spec)
    try:
        started = time.monotonic()
        events, results = outcome_of(evaluator, dict(FlatParameters(model, gradients=False).items()))
        assert time.monotonic() - started > 5.0
    finally:
        evaluator.stop()
    assert events == []
    assert results[0]["episodes"] == 8
