"""Kills at every point of the protocol: runs go on or are resumed, and end with the bits of one left in peace."""

from __future__ import annotations

import os
import signal
import threading
import time
from itertools import zip_longest
from multiprocessing import forkserver

import psutil
import pytest
from fault_points import Fault, meanwhile, run_process, scripted, trail_of, watched
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_resume import bits

from htsrl import envs, processes
from htsrl.digests import first_difference
from htsrl.evaluation import Evaluator
from htsrl.models import build_model
from htsrl.models.flat import FlatParameters
from htsrl.settings import configure
from htsrl.training import resume, train
from htsrl.trials import with_layout

pytestmark = pytest.mark.usefixtures("quick_children")

LIGHT = {"num_envs": 6, "sync_interval": 8, "total_steps": 6 * 8 * 4, "minibatches": 4, "epochs": 1}
HEAVY = {"num_envs": 3, "sync_interval": 8, "total_steps": 3 * 8 * 3, "minibatches": 2, "epochs": 1}
GAMES = [
    "synthetic:football",
    pytest.param("atari:Pong", marks=pytest.mark.atari),
    pytest.param("gfootball:academy_empty_goal_close", marks=pytest.mark.football),
]


def config_of(env="CartPole-v1", layout="2x1x1", **changes):
    size = HEAVY if envs.family_of(env) in ("atari", "football") else LIGHT
    return with_layout(configure(env, **size | changes), layout)


def need(env):
    packages = {"atari": "ale_py", "football": "gfootball"}
    family = envs.family_of(env)
    if family in packages:
        pytest.importorskip(packages[family], reason=f"needs the extra {family}")


@pytest.fixture(scope="module")
def undisturbed():
    """Trails of runs that nothing happened to."""
    known = {}

    def get(env="CartPole-v1", **changes):
        key = (env, *sorted(changes.items()))
        if key not in known:
            with watched(config_of(env, "1x1", **changes)) as run:
                known[key], _ = trail_of(run)
        return known[key]

    return get


def assert_survived(config, strikes, expected, *faults, **options):
    """Under ``faults``, all of which strike, each process is replaced and no bit changes."""
    with scripted(strikes, *faults, **options), watched(config) as run:
        trail, recovered = trail_of(run)
    assert len(list(strikes.iterdir())) == sum(fault.times for fault in faults), "a fault did not strike"
    assert recovered == sum(fault.times for fault in faults)
    assert first_difference(expected, trail) is None


# ------------------------------------------------------------------------------------------------ executors and actors

EXECUTOR = [
    ("before body", 1),
    ("after progress", 1),  # its replicas are not in place
    ("before ready", 1),
    ("before posted", 2),  # between the first requests of two groups
    ("before request", 1),
    ("after request", 1),
    ("after take", 5),
    ("before reward", 8),
    ("before stepped", 8),  # the step is made
    ("after stepped", 8),  # the next observation is not requested
    ("after posted", 12),
    ("after request", 9),
    ("before finished", 2),
    ("after finished", 2),  # between counter and message
    ("after barrier", 2),
    ("before posted", 25),  # the second interval has just begun
]
ACTOR = [
    ("before body", 1),
    ("before ready", 1),
    ("after take", 1),
    ("after take", 12),
    ("before action", 3),
    ("after action", 3),  # its log-probability is not written
    ("before answered", 4),
    ("after answered", 1),  # between two groups
    ("after answered", 6),
    ("before answer", 4),
    ("after answer", 4),
]
half = len(EXECUTOR) // 2
ROUNDS = [
    tuple(
        Fault(role, *point, index=index)
        for role, index, point in zip(("executor", "executor", "actor"), (0, 1, 0), row)
        if point
    )
    for row in zip_longest(EXECUTOR[:half], EXECUTOR[half:], ACTOR)
]


@pytest.mark.parametrize("faults", ROUNDS, ids=lambda faults: ", ".join(map(str, faults)))
def test_kills_at_every_point_change_no_bit(tmp_path, undisturbed, faults):
    assert_survived(config_of(), tmp_path, undisturbed(), *faults)


def test_kills_in_lock_step_change_no_bit(tmp_path, undisturbed):
    faults = [
        Fault("executor", "after stepped", 9),
        Fault("executor", "before reward", 9, 1),
        Fault("actor", "after answered", 9),
    ]
    sync = {"schedule": "sync"}
    assert_survived(config_of(**sync), tmp_path, undisturbed(**sync), *faults)


@pytest.mark.parametrize("env", GAMES)
def test_killed_games_play_on(tmp_path, undisturbed, env):
    need(env)
    faults = [
        Fault("executor", "before stepped", 20),
        Fault("executor", "after stepped", 5, 1),
        Fault("actor", "after answered", 7),
    ]
    assert_survived(config_of(env), tmp_path, undisturbed(env), *faults)


def test_twice_at_the_same_place(tmp_path, undisturbed):
    faults = [Fault("executor", "before stepped", 5, times=2), Fault("actor", "after take", 3, times=2)]
    assert_survived(config_of(), tmp_path, undisturbed(), *faults)


def test_kills_while_a_killed_executor_is_being_replaced(tmp_path, undisturbed):
    faults = [
        Fault("executor", "before stepped", 20),
        Fault("executor", "after progress", 1, life=2),  # it begins to replay
        Fault("executor", "before ready", 1, life=3),  # it has replayed
    ]
    assert_survived(config_of(), tmp_path, undisturbed(), *faults)


@pytest.mark.parametrize("schedule", ["hts", "sync"])
def test_doubled_messages_change_no_bit(tmp_path, undisturbed, schedule):
    faults = [Fault("executor", "after stepped", 9), Fault("actor", "after answered", 4)]
    layout = {"hts": "2x2x1", "sync": "2x1x1"}[schedule]
    expected = undisturbed(schedule=schedule)
    assert_survived(config_of(layout=layout, schedule=schedule), tmp_path, expected, *faults, doubled=True)


COUNTING = {"num_envs": 5, "sync_interval": 6, "total_steps": 5 * 6 * 3, "minibatches": 5}
POINTS = {
    "executor": (
        "after take",
        "after progress",
        "before ready",
        "before posted",
        "after reward",
        "after stepped",
        "before request",
    ),
    "actor": ("after take", "before ready", "before action", "after answered", "before answer"),
}


@st.composite
def scripts(draw):
    """Up to six faults of any executor, actor and point, also of processes that have replaced others."""
    faults = []
    for _ in range(draw(st.integers(1, 6))):
        role = draw(st.sampled_from(["executor", "actor"]))
        point, count = draw(st.sampled_from(POINTS[role])), draw(st.integers(1, 20))
        faults.append(Fault(role, point, count, index=draw(st.integers(0, 1)), life=draw(st.integers(1, 2))))
    return faults


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(faults=scripts(), layout=st.sampled_from(["2x2x1", "2x2x2", "2x1x3"]))
def test_any_script_of_kills_changes_no_bit(tmp_path_factory, undisturbed, faults, layout):
    strikes = tmp_path_factory.mktemp("strikes")
    expected = undisturbed("synthetic:counting", **COUNTING)
    with scripted(strikes, *faults), watched(config_of("synthetic:counting", layout, **COUNTING)) as run:
        trail, recovered = trail_of(run)
    assert recovered <= len(list(strikes.iterdir()))  # one that was struck after the last barrier is not replaced
    assert first_difference(expected, trail) is None


# ------------------------------------------------------------------------------------------------------------- hanging

STOPPED_TOO_LONG_S = 3.0


@pytest.mark.parametrize(
    ("schedule", "faults"),
    [
        ("hts", [Fault("executor", "after stepped", 9, number=signal.SIGSTOP)]),
        # Outsiders may stop a process where they stopped the one before it
        (
            "hts",
            [
                Fault("actor", "before answered", 5, number=signal.SIGSTOP),
                Fault("actor", "before answered", 1, number=signal.SIGSTOP, life=2),
            ],
        ),
        # The first actor leaves half of a last row to the second, which must be found to have work
        (
            "sync",
            [
                Fault("actor", "after answered", 7 * 6 + 3),
                Fault("actor", "before answered", 1, number=signal.SIGSTOP, life=2),
            ],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else ", ".join(map(str, value)),
)
def test_stopped_processes_are_replaced(tmp_path, undisturbed, schedule, faults):
    config = config_of(schedule=schedule, step_timeout=STOPPED_TOO_LONG_S)
    assert_survived(config, tmp_path, undisturbed(schedule=schedule), *faults)


def test_a_run_that_is_suspended_and_continued_blames_nobody(undisturbed):
    def signal_all(run, number):
        for child in run.crew.children:
            signal.pidfd_send_signal(child.pidfd, number)

    def suspend(run):
        signal_all(run, signal.SIGSTOP)
        time.sleep(0.3 * STOPPED_TOO_LONG_S)  # the supervisor sees how far they are
        with run.crew.changes:  # and stands still, too
            time.sleep(1.5 * STOPPED_TOO_LONG_S)
            signal_all(run, signal.SIGCONT)

    with watched(config_of(step_timeout=STOPPED_TOO_LONG_S)) as run, meanwhile(run, 30, suspend):
        trail, recovered = trail_of(run)
    assert recovered == 0
    assert first_difference(undisturbed(), trail) is None


def test_a_replay_may_take_longer_than_a_step(tmp_path, undisturbed):
    sleep = {"num_envs": 2, "sync_interval": 16, "total_steps": 2 * 16 * 4, "minibatches": 2}
    config = config_of("synthetic:sleep", step_ms=30.0, step_timeout=1.2, **sleep)
    expected = undisturbed("synthetic:sleep", step_ms=0.0, **sleep)
    assert_survived(config, tmp_path, expected, Fault("executor", "before stepped", 56))


# ---------------------------------------------------------------------------------------------------------- all at once


def test_all_children_killed_at_the_same_moment(undisturbed):
    def kill_all(run):
        with run.crew.changes:
            for child in run.crew.children:
                child.kill()

    with watched(config_of()) as run, meanwhile(run, 50, kill_all):
        trail, recovered = trail_of(run)
    assert recovered == 3
    assert first_difference(undisturbed(), trail) is None


def test_fifty_recoveries_take_neither_descriptors_nor_memory():
    config = config_of("synthetic:counting", max_restarts=1000, total_steps=100_000_000)
    stop, taken = threading.Event(), []

    def kill_again_and_again(run):
        us, server = psutil.Process(), psutil.Process(forkserver._forkserver._forkserver_pid)
        try:
            for k in range(51):
                with run.crew.changes:
                    while not all(child.ready for child in run.crew.children):
                        run.crew.changes.wait(10)
                    taken.append((us.num_fds(), server.num_fds(), us.memory_info().rss))
                    run.crew.children[0].kill()  # the one that has lived the longest
                    while run.crew.recovered == k:
                        run.crew.changes.wait(10)
        finally:
            stop.set()

    with watched(config) as run, meanwhile(run, 30, kill_again_and_again):
        run.train(stop)
    assert run.result.values["recovered"] == 51
    ours, servers, memory = zip(*taken)
    # A file may just be open while it is written
    assert min(ours[-10:]) == min(ours[:10])
    assert min(servers[-10:]) == min(servers[:10])
    assert memory[50] - memory[10] < 8 * 2**20


def test_a_child_that_is_gone_before_the_run_looks_at_it_is_replaced(undisturbed, monkeypatch):
    start, gone = processes.start, []

    def start_and_kill(body, ports, name):
        process = start(body, ports, name)
        if not gone and "executor" in name:
            process.kill()
            process.join()
            gone.append(name)
        return process

    monkeypatch.setattr(processes, "start", start_and_kill)
    with watched(config_of()) as run:
        trail, recovered = trail_of(run)
    assert gone
    assert recovered == 1
    assert first_difference(undisturbed(), trail) is None


# -------------------------------------------------------------------------------------------------------- the evaluator


def test_an_evaluator_may_die_as_often_as_its_evaluations_succeed_in_the_end(tmp_path):
    config = configure("synthetic:counting", **LIGHT, eval_every=48, eval_episodes=2, run_dir=tmp_path)
    spec = envs.describe(config.env, config.environment)
    parameters = dict(FlatParameters(build_model(spec, config.network, config.seed)).items())
    evaluator, arrived = Evaluator(config, spec), []
    try:
        for steps in (1, 2, 3):
            evaluator.request(steps, parameters)
            os.kill(evaluator._process.pid, signal.SIGKILL)
            while len(arrived) < steps:
                assert evaluator.busy
                arrived += evaluator.results(wait_s=1.0)
    finally:
        evaluator.stop()
    assert [each.pop("steps") for each in arrived] == [1, 2, 3]
    assert arrived[0] == arrived[1] == arrived[2]
    assert len(evaluator.take_events()) == 3


# ---------------------------------------------------------------------------------------------------- the run's process

TRAINED = LIGHT | {
    "total_steps": 6 * 8 * 6,
    "checkpoint_every": 1,
    "record_digests": True,
    "progress": "none",
    "tensorboard": False,
}


def run_to_its_death(function, *arguments, fault, strikes):
    """Call ``function`` in a process that ``fault`` kills; nothing of it stays behind."""
    process = processes.start(run_process, (function, arguments, fault, strikes), "run")
    process.join()
    assert process.exitcode == -signal.SIGKILL, "the fault did not strike"
    children = psutil.Process(forkserver._forkserver._forkserver_pid).children(recursive=True)
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive


def bits_with_digests(run_dir):
    return bits(run_dir), (run_dir / "digests.jsonl").read_text()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What undisturbed runs left behind."""
    known = {}

    def get(env, settings):
        if env not in known:
            run_dir = tmp_path_factory.mktemp("whole") / "run"
            train(configure(env, run_dir=run_dir, **settings))
            known[env] = bits_with_digests(run_dir)
        return known[env]

    return get


def assert_resumed(tmp_path, expected, config, points):
    """Kill the run, and each time that it is resumed, at the next of ``points``; then resume it to its end."""
    run_dir, strikes = config.output.run_dir, tmp_path / "strikes"
    strikes.mkdir()
    function, arguments = train, (config,)
    for point, count in points:
        run_to_its_death(function, *arguments, fault=Fault("run", point, count), strikes=strikes)
        function, arguments = resume, (run_dir,)
    resume(run_dir)
    assert len(list(strikes.iterdir())) == len(points)
    assert bits_with_digests(run_dir) == expected
    assert not list(run_dir.rglob("*.tmp"))
    assert len(list((run_dir / "checkpoints").iterdir())) <= config.output.keep_checkpoints


RENAME = "os:replace steps-"
LIVES = {
    "before and after publishing": [
        ("before htsrl.run:Run.begin", 1),
        ("before htsrl.run:Run.begin", 3),
        ("before htsrl.crew:Crew.begin_interval", 2),
        ("after htsrl.run:Run.begin", 2),
    ],
    "around a checkpoint": [
        ("before htsrl.run:save_checkpoint", 2),
        (f"before {RENAME}", 2),  # written, not renamed
        (f"after {RENAME}", 2),  # the oldest is not removed
        ("after htsrl.run:save_checkpoint", 1),
    ],
    "around learning": [
        ("before htsrl.learner.learner:Learner.learn", 1),
        ("after htsrl.learner.learner:Learner.learn", 2),
        ("after htsrl.report:Reporter.interval", 2),  # its digests are not recorded
        ("before htsrl.crew:Crew.await_barrier", 3),
    ],
    "around resuming and the end": [
        ("before htsrl.report:Reporter.interval", 3),
        ("before htsrl.training:rewind", 1),
        ("after os:ftruncate", 1),  # one of the files is taken back
        ("before htsrl.report:Reporter.finish", 1),  # the last checkpoint is there, the result not
    ],
}


@pytest.mark.parametrize("points", LIVES.values(), ids=LIVES)
def test_a_killed_run_is_resumed_to_the_same_bits(tmp_path, whole, points):
    config = configure("CartPole-v1", run_dir=tmp_path / "run", **TRAINED)
    assert_resumed(tmp_path, whole("CartPole-v1", TRAINED), config, points)


@pytest.mark.parametrize("env", GAMES)
def test_killed_runs_of_games_are_resumed_to_the_same_bits(tmp_path, whole, env):
    need(env)
    settings = TRAINED | HEAVY
    config = configure(env, run_dir=tmp_path / "run", **settings)
    points = [(f"before {RENAME}", 2), ("after htsrl.run:Run.begin", 2)]
    assert_resumed(tmp_path, whole(env, settings), config, points)
