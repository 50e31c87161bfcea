"""The benchmarks: their model against known values, what they refuse, and small runs that leave complete records."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from htsrl.config import ALGORITHMS
from htsrl.errors import ConfigError

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def run(script: str, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / script), *map(str, arguments)]
    with subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            out, err = process.communicate(timeout=270)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # so that it ends the runs that it has started
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.fixture
def benchmarks(monkeypatch):
    """The scripts' folder on the path, as when one of them runs."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


# ----------------------------------------------------------------------------------------------------------- the models


@pytest.mark.parametrize(
    ("n", "alpha", "maximum"),
    # E[max over n] of sums of alpha exponential times of mean 1, from 20,000 draws elsewhere
    [
        (16, 1, 3.377),
        (16, 4, 8.240),
        (16, 16, 23.83),
        (16, 64, 78.91),
        (16, 128, 148.7),
        (64, 1, 4.742),
        (64, 16, 26.92),
    ],
)
def test_expected_maximum_of_gamma_sums(benchmarks, n, alpha, maximum):
    from limits import expected_maximum

    assert alpha * expected_maximum(alpha, n, 20_000) == pytest.approx(maximum, rel=0.01)


def test_expected_maximum_of_exponentials_is_the_harmonic_number(benchmarks):
    from limits import expected_maximum

    for n in (1, 4, 64):
        assert expected_maximum(1.0, n, 50_000) == pytest.approx(sum(1 / k for k in range(1, n + 1)), rel=0.01)


def test_barrier_model_lies_between_lockstep_and_no_waiting(benchmarks):
    from limits import barrier_model

    model = barrier_model(mean_s=0.01, shape=1.0, N=16, T=128)
    assert model.no_waiting == pytest.approx(1600)
    assert model.barrier == pytest.approx(16 * 128 / (0.01 * 148.7), rel=0.01)
    assert model.lockstep == pytest.approx(16 / (0.01 * 3.377), rel=0.01)
    one_step = barrier_model(mean_s=0.01, shape=4.0, N=8, T=1)
    assert one_step.barrier == one_step.lockstep < one_step.no_waiting


def test_curve_measures(benchmarks):
    from learning import MOST_POINTS, curve_mean, steps_to_reach, thinned

    rows = [[100 * k, float(k), None, 0.1 * k, 50 * k] for k in range(1, 6)]  # steps, return, score, seconds, episodes
    assert steps_to_reach(rows, "return", 1.0) == 200  # 100 episodes have ended only then
    assert steps_to_reach(rows, "return", 4.5) == 500
    assert steps_to_reach(rows, "return", 6.0) is None
    assert curve_mean(rows, "return") == pytest.approx(3.0)
    assert curve_mean(rows, "score") is None
    long = [[float(k), 0.0, None, 0.0, 0.0] for k in range(1001)]
    assert len(thinned(long)) <= MOST_POINTS
    assert thinned(long)[-1] == long[-1]
    assert thinned([]) == []


def test_schedules_are_compared_after_equal_times(benchmarks):
    from learning import TASKS, algo_of, comparison, summary

    task = TASKS["football-equal-time"]
    assert [algo_of(task, schedule) for schedule in task.schedules] == ["ppo", "impala"]

    def run(schedule, seconds, shared):
        curve = [[100.0 * k, None, k / 10, seconds * k / 10] for k in range(1, 11)]
        return {
            "schedule": schedule, "seed": 0, "algo": algo_of(task, schedule), "value": 1.0, "passed": True,
            "curve": curve, "curve_mean": 0.5, "steps_to_reach": {}, "shared_machine": shared,
            "result": {"steps_per_second": 1000.0 / seconds, "seconds": seconds},
        }  # fmt: skip

    record = {"task": "race", "algo": "ppo", "measure": "score", "milestones": [], "threshold": None}
    record["runs"] = [run("hts", 10.0, False), run("async", 25.0, False)]
    record["comparison"] = comparison(record)
    reached = {schedule: means["after_equal_time"] for schedule, means in record["comparison"].items()}
    assert reached == {"hts": {"seconds": 10.0, "curve": 1.0}, "async": {"seconds": 10.0, "curve": 0.4}}
    first, *lines = summary(record).splitlines()
    assert first.endswith("curve at 10 s")
    assert ["race async (impala)", "0.400"] in [[line[:19], line.split()[-1]] for line in lines]

    record["runs"][0]["shared_machine"] = True  # then times say nothing
    assert not any("after_equal_time" in means for means in comparison(record).values())


def test_the_readme_says_what_was_recorded(benchmarks):
    from readme import filled, learning_table, speed_table

    text = (BENCHMARKS.parent / "README.md").read_text()
    assert filled(filled(text, "results", learning_table()), "speed", speed_table()) == text
    assert filled(text, "speed", ["| a |", "| - |"]) != text
    small = "A\n<!-- speed -->\nWords.\n\n| old |\n| - |\n| 1 |\n<!-- end of speed -->\nB\n"
    assert filled(small, "speed", ["| new |"]) == small.replace("| old |\n| - |\n| 1 |", "| new |")
    with pytest.raises(AssertionError, match="no place for the table of results"):
        filled(small, "results", [])


def test_workloads_are_valid_configurations(benchmarks):
    from workloads import FIXED, flags, workload

    for name in (*FIXED, "sleep-10-1-16", "sleep-0.5-16-64"):
        each = workload(name)
        assert each.config(schedule="sync").runtime.num_envs == each.settings["num_envs"]
        assert all(word.startswith("--") or word for word in flags(each.settings))
    sleeping = workload("sleep-2-16-64")
    assert sleeping.sleep is not None
    assert (sleeping.sleep.mean_s, sleeping.sleep.shape, sleeping.settings["num_executors"]) == (0.002, 16.0, 64)


def test_a_soak_s_verdict(benchmarks):
    from soak import MEASURES, TOLERANCE, Watched, judge, share_of_terminations, slope

    def process(*columns, seconds):
        return Watched("actor 0", 1, seconds, list(zip(*columns)))

    def flat(watched):
        return {name: measure["flat"] for name, measure in judge(watched, 20.0, 100.0).items()}

    seconds = [2.0 * k for k in range(51)]
    level = [100.0] * 51
    warming = [50.0 + min(k, 10) for k in range(51)]  # until second 20
    one_off = [30.0 if k == 25 else 10.0 for k in range(51)]
    assert all(flat(process(warming, level, one_off, level, seconds=seconds)).values())
    leaking = [100.0 + second * TOLERANCE["rss_mib"] / 75 for second in seconds]
    assert flat(process(level, leaking, level, level, seconds=seconds)) == dict.fromkeys(MEASURES, True) | {
        "rss_mib": False
    }
    handles = [10.0 + (second >= 60) for second in seconds]
    assert not flat(process(level, level, handles, level, seconds=seconds))["handles"]
    for gone in (slice(0, 40), slice(15, 51)):  # before the end, or not from the beginning
        assert not any(flat(process(*[level[gone]] * 4, seconds=seconds[gone])).values())
    assert slope([0, 1, 2, 3, 4], [5, 7, 9, 11, 1000]) == 2.0
    assert share_of_terminations(100) == pytest.approx(0.5, abs=0.02)  # its own ends are of both kinds, evenly


def test_the_determinism_matrix_holds_every_algorithm_and_core(benchmarks):
    from determinism import CORES, ENVS, SCHEDULES, matrix

    cells = matrix(ENVS, tuple(ALGORITHMS), SCHEDULES, CORES)
    assert len({str(cell) for cell in cells}) == len(cells)
    for cell in cells:
        config = cell.config()
        assert (config.algo, config.runtime.schedule) == (cell.algo, cell.schedule)
        assert config.network.recurrent == cell.recurrent
    assert {(cell.env, cell.algo) for cell in cells} == {(env, algo) for env in ENVS for algo in ALGORITHMS}
    assert {cell.recurrent for cell in cells} == {"none", "lstm", "gru"}
    assert [cell.recurrent for cell in matrix(["CartPole-v1"], ["ppo", "acktr"], ["hts"], ["none"])] == ["none"] * 2


def test_digests_are_compared_with_golden_ones_of_the_same_settings_and_machine(benchmarks, tmp_path):
    from determinism import compare

    path = tmp_path / "golden.json"
    digests = {"trajectory": "1", "parameters": "2", "losses": "3"}

    def key(**settings):
        return {"cell": "a cell", "settings": json.dumps(settings), "fingerprint": {"torch": "2"}}

    assert compare(path, key(seed=0), digests, accept=False) == "new"
    kept = path.read_text()
    assert compare(path, key(seed=0, since="then"), digests, accept=False) == "same"  # a setting that is new today
    assert compare(path, key(seed=0), digests | {"losses": "4"}, accept=False) == "DIFFERENT"
    assert path.read_text() == kept
    assert compare(path, key(seed=1), digests | {"losses": "4"}, accept=False) == "new"
    assert compare(path, key(seed=0), digests | {"losses": "4"}, accept=True) == "accepted"
    assert compare(path, key(seed=0) | {"fingerprint": {"torch": "3"}}, digests, accept=False) == "new"
    assert [(e["losses"], e["fingerprint"]["torch"]) for e in json.loads(path.read_text())["golden"]] == [
        ("4", "2"), ("4", "2"), ("3", "3")
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("throughput.py", ["--workload", "chess"], "chess is not a workload"),
        ("throughput.py", ["--workload", "cartpole", "--set", "algo=a2c"], "algo is the workload's own, ppo"),
        ("throughput.py", ["--workload", "sleep-0-1-16"], "greater than zero"),
        ("throughput.py", ["--schedules", "hts,fast"], "fast is not a schedule"),
        ("throughput.py", ["--peers", "rival"], "rival is not a peer"),
        ("throughput.py", ["--peers", "sb3", "--peer-python", "nowhere"], "--setup-peers sb3"),
        ("throughput.py", ["--peers", "sample-factory", "--peer-python", "nowhere"], "--setup-peers sample-factory"),
        ("throughput.py", ["--set", "epochs=0"], "epochs must be"),
        ("throughput.py", ["--rounds", "0"], "--rounds"),
        ("learning.py", ["--task", "chess"], "chess is not a task"),
        ("learning.py", ["--schedules", "fast"], "fast is not a schedule"),
        ("learning.py", ["--seeds", "a"], "--seeds"),
        ("learning.py", ["--task", "cartpole-ppo-importance", "--schedules", "sync"], "a task for schedule hts alone"),
        ("contract_cost.py", ["--rows", "0"], "--rows"),
        ("determinism.py", ["--recurrent", "rnn"], "rnn is not a recurrent core"),
        ("determinism.py", ["--layouts", "1x1,99x1"], "--num-executors must be at most"),
        ("faults.py", ["--workloads", "chess"], "chess is not a workload"),
        ("faults.py", ["--minutes", "0"], "--minutes"),
        ("contract_cost.py", ["--spread", "17"], "between 1 and 16"),
        ("sweeps.py", ["--sweep", "seeds"], "seeds is not a sweep"),
        ("sweeps.py", ["--rounds", "0"], "--rounds"),
        ("soak.py", ["--minutes", "0"], "--minutes"),
        ("soak.py", ["--minutes", "1", "--warm-up", "60"], "--warm-up"),
        ("soak.py", ["--set", "epochs=0"], "epochs must be"),
    ],
)
def test_refusals_are_one_sentence(benchmarks, monkeypatch, capsys, script, arguments, words):
    from importlib import import_module

    from facts import run_main

    monkeypatch.setattr(sys, "argv", [script, *arguments])
    assert run_main(import_module(script.removesuffix(".py")).main) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith(f"{script}: error: ")
    assert error.count("\n") == 1


# ----------------------------------------------------------------------------------------------------------- small runs


def test_a_short_throughput_run_leaves_a_complete_record(tmp_path):
    path, picture = tmp_path / "speed.json", tmp_path / "speed.png"
    arguments = ["--workload", "cartpole", "--schedules", "hts,rollout,async", "--seconds", 1, "--rounds", 1]
    done = run("throughput.py", *arguments, "--json", path, "--plot", picture, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads(path.read_text())
    assert {"command", "date", "commit", "machine", "versions", "workloads"} <= record.keys()
    cartpole = record["workloads"]["cartpole"]
    figures = cartpole["medians"]["hts"]
    assert all(math.isfinite(value) for value in figures.values()), figures
    assert figures["seconds"] >= 1
    assert figures["steps_per_second"] == pytest.approx(figures["steps"] / figures["seconds"])
    assert figures["processes"] >= 4  # run, fork server, executor, actor
    assert 0 < figures["pss_mib"] < figures["peak_rss_mib"]
    assert 0 <= figures["barrier_share"] <= 1
    parts = cartpole["limit"]["cpu_seconds_per_1000_steps"]
    assert parts.keys() == {"environment", "inference", "learning"}
    limit = 1000 * cartpole["limit"]["cores"] / sum(parts.values())
    assert cartpole["limit"]["steps_per_second"] == pytest.approx(limit)
    assert figures["of_limit"] * limit == pytest.approx(figures["steps_per_second"])
    assert cartpole["medians"].keys() == {"hts", "rollout", "async"}
    alone = 1000 * cartpole["limit"]["cores"] / (parts["environment"] + parts["inference"])
    assert cartpole["medians"]["rollout"]["of_limit"] * alone == pytest.approx(
        cartpole["medians"]["rollout"]["steps_per_second"]
    )
    assert picture.stat().st_size > 1000
    assert "of limit" in done.stdout


def test_a_peer_is_not_asked_for_what_it_cannot_do(benchmarks):
    from peers import PEERS, refuse_unfit
    from workloads import FIXED

    with pytest.raises(ConfigError, match="sample-factory can't run mujoco"):
        refuse_unfit("sample-factory", "mujoco")
    for name in FIXED:
        refuse_unfit("sb3", name)
    for peer in PEERS.values():
        assert peer.lacks.keys() <= FIXED.keys()


def test_sweeps_vary_one_setting(benchmarks, monkeypatch, tmp_path):
    import sweeps

    measured = []

    def measure(contender, seconds):
        arguments = contender.command(tmp_path)
        measured.append({flag: arguments[arguments.index(flag) + 1] for flag in ("--num-envs", "--sync-interval")})
        return {"steps_per_second": 1.0, "cpu_seconds_per_1000_steps": 1.0, "pss_mib": 1.0, "barrier_share": 0.5}

    monkeypatch.setattr(sweeps, "measure", measure)
    monkeypatch.setattr(sweeps, "ACTORS", (1, 4))
    monkeypatch.setattr(sweeps, "ACTOR_STEPS", 3 * 16 * 128)
    monkeypatch.setattr(
        sys, "argv", ["sweeps.py", "--json", str(tmp_path / "s.json"), "--plot", str(tmp_path / "s.png")]
    )
    assert sweeps.main() == 0
    record = json.loads((tmp_path / "s.json").read_text())["sweeps"]
    intervals = [int(each["--sync-interval"]) for each in measured[: len(sweeps.INTERVALS)]]
    assert intervals == [point["interval"] for point in record["interval"]["cartpole"]] == list(sweeps.INTERVALS)
    assert [int(each["--num-envs"]) for each in measured[12:20]] == [*sweeps.REPLICAS] * 2
    one, four = record["actors"]["cartpole"]
    assert one["parameters"] == four["parameters"]
    assert len(one["parameters"]) == 64
    assert record["variance"]["sleep-2-K-16"][0]["speed_up"] == 1.0
    assert (tmp_path / "s.png").stat().st_size > 1000


def test_learning_keeps_each_run_and_does_none_twice(tmp_path, monkeypatch):
    arguments = ["--task", "cartpole-ppo", "--steps", 4096, "--episodes", 2, "--out", tmp_path / "out"]
    first = run("learning.py", *arguments, "--seeds", "0", "--schedules", "hts", cwd=tmp_path)
    assert first.returncode == 1, first.stderr  # nothing is learned in so few steps
    path = tmp_path / "out" / "learning-cartpole-ppo.json"
    (kept,) = json.loads(path.read_text())["runs"]
    assert kept["passed"] is False
    assert kept["result"]["steps"] == kept["curve"][-1][0] == 4096
    assert kept["evaluation"]["episodes"] == 2
    assert len(kept["result"]["parameters_sha256"]) == 64
    assert kept["config"]["runtime"]["num_envs"] == 16
    assert {"commands", "date", "commit", "machine", "versions", "steps_to_reach", "curve_mean"} <= kept.keys()
    assert path.with_suffix(".png").stat().st_size > 1000

    second = run("learning.py", *arguments, "--seeds", "0", cwd=tmp_path)
    assert "--schedule hts" not in second.stdout
    record = json.loads(path.read_text())
    assert [(each["seed"], each["schedule"]) for each in record["runs"]] == [(0, "hts"), (0, "sync")]
    assert record["runs"][0] == kept
    assert record["comparison"].keys() == {"hts", "sync"}

    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from learning import opened

    assert opened(path, "cartpole-ppo", 4096, 2) == record
    with pytest.raises(ConfigError, match="name another --out"):
        opened(path, "cartpole-ppo", 2048, 2)


def test_faults_are_injected_from_outside_and_judged(benchmarks, tmp_path):
    from signal import SIGKILL

    from faults import (
        Outcome,
        Training,
        as_record,
        command_of,
        judge,
        kill_run,
        read_digests,
        strike,
        wait_for_intervals,
    )
    from workloads import Workload

    intervals = 200  # more than can pass before it is killed
    size = {"num_envs": 4, "sync_interval": 16, "total_steps": 4 * 16 * intervals, "minibatches": 4, "epochs": 1}
    workload = Workload("cartpole", "CartPole-v1", "ppo", size)
    training = Training(tmp_path / "run", *command_of(workload, tmp_path / "run", seed=0))
    assert wait_for_intervals(training, 2)
    faults = [strike(training, "executor", SIGKILL, 0.9)]
    assert wait_for_intervals(training, 3)  # a checkpoint is written every two, after the second's record
    faults.append(kill_run(training))
    assert [fault.kind for fault in faults] == ["executor SIGKILL", "run SIGKILL"]
    training = Training(tmp_path / "run", "resume", str(tmp_path / "run"))
    assert training.process.wait(60) == 0, training.words()
    assert json.loads((tmp_path / "run" / "result.json").read_text())["recovered"] >= 1

    digests = read_digests(tmp_path / "run")
    outcome = Outcome("cartpole", 1.0, faults)
    assert judge(training, outcome, digests, digests) == ""
    assert judge(training, outcome, digests, digests[:-1]) == f"{intervals} intervals instead of {intervals - 1}"
    other = [*digests[:7], (*digests[7][:2], "0"), *digests[8:]]
    outcome.why_not = judge(training, outcome, digests, other)
    assert outcome.why_not == "interval 7 differs: losses"
    outcome.survived = True
    record = as_record([outcome, Outcome("cartpole", 1.0, faults[:1], survived=False)])
    assert (record["injected"], record["survived"]) == (3, 2)
    assert record["faults"]["executor SIGKILL"] | {"seconds_to_react": 0} == {
        "injected": 2, "survived": 1, "seconds_to_react": 0,
    }  # fmt: skip


def test_a_short_soak_leaves_a_complete_record(tmp_path):
    often = ["--set", "eval_every=4096", "--set", "checkpoint_every=4096"]  # once, however slow this machine is
    arguments = ["--minutes", 0.1, "--warm-up", 0, *often, "--json", tmp_path / "soak.json"]
    done = run("soak.py", *arguments, cwd=tmp_path)
    record = json.loads((tmp_path / "soak.json").read_text())
    assert done.returncode == (0 if record["flat"] else 1), done.stderr
    assert record["processes"].keys() == {
        "run", "fork server", "resource tracker", "executor 0", "actor 0", "evaluator"
    }  # fmt: skip
    assert record["ending"]["status"] == 130
    assert record["ending"]["left"] == []
    assert min(record["accomplished"].values()) > 0
    assert all(len(rows[0]) == len(record["sample_columns"]) for rows in record["samples"].values())
    assert "flat" in done.stdout
