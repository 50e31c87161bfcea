"""Timelines: the rings lose nothing unsaid, a run's trace says what it did, and tracing changes no bit."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from itertools import pairwise, product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from fault_points import meanwhile
from hypothesis import given
from hypothesis import strategies as st
from recording import record
from rollouts import network, rollout, vector_spec
from test_recovery import SMALL, rows, running
from test_resume import interrupted, no_changes

from htsrl import tracefile
from htsrl.cli import main
from htsrl.config import ALGORITHMS
from htsrl.errors import ConfigError
from htsrl.learner import make_algorithm
from htsrl.run import Run
from htsrl.settings import configure
from htsrl.storage.fields import trace_fields
from htsrl.storage.layout import Layout
from htsrl.storage.memory import Arena
from htsrl.storage.trace import ARGUMENTS, PHASES, LaneReader, Phase, close_lane, lane_mark, mark, open_lane, unmarked
from htsrl.timeline import COLOURS, median_interval, read_timeline, summary
from htsrl.training import resume, train

SLACK_US = 0.002
"""Times in a file are rounded to nanoseconds."""


def switched_on(capacity: int, lane: str = "executor 0") -> Arena:
    arena = Arena.create({"trace": trace_fields({lane: capacity})})
    arena.views("trace").on[0] = 1
    return arena


# ----------------------------------------------------------------------------------------------------------- the rings


def test_every_phase_has_arguments_and_a_colour() -> None:
    assert set(get_args(Phase)) == set(ARGUMENTS) == set(COLOURS)


@given(st.lists(st.integers(0, 12), max_size=20), st.integers(2, 9))
def test_a_reader_gets_every_mark_or_their_number(bursts: list[int], capacity: int) -> None:
    arena = switched_on(capacity)
    write, reader = lane_mark(arena, "executor 0"), LaneReader(arena, "executor 0")
    made = expected = 0
    for burst in bursts:
        for _ in range(burst):
            write("step", made, 2 * made)
            made += 1
        marks, lost = reader.take()
        # The slot that comes next may be half written at any moment: it doesn't count
        assert lost == max(0, burst - (capacity - 1))
        expected += lost
        assert marks["a"].tolist() == list(range(expected, made))
        assert marks["b"].tolist() == [2 * a for a in range(expected, made)]
        assert (marks["phase"] == PHASES.index("step")).all()
        assert (np.diff(marks["time"]) >= 0).all()
        expected = made


def test_a_successor_goes_on_behind_the_marks_that_are_there() -> None:
    arena = switched_on(16)
    reader = LaneReader(arena, "executor 0")
    for phase in ("step", "gone"):
        lane_mark(arena, "executor 0")(phase)
    lane_mark(arena, "executor 0")("start")
    marks, lost = reader.take()
    assert ([PHASES[code] for code in marks["phase"]], lost) == (["step", "gone", "start"], 0)


def test_marks_go_nowhere_when_off_or_not_traced() -> None:
    arena = switched_on(16)
    reader, write = LaneReader(arena, "executor 0"), open_lane(arena, "executor 0")
    mark("step", 1, 2)
    arena.views("trace").on[0] = 0
    write("step", 3, 4)
    assert reader.take()[0]["a"].tolist() == [1]
    close_lane()
    arena.views("trace").on[0] = 1
    mark("step", 5, 6)
    assert len(reader.take()[0]) == 0
    assert open_lane(Arena.create({}), "executor 0") is unmarked


def test_the_cpu_time_is_that_of_the_lanes_process() -> None:
    arena = switched_on(16)
    reader = LaneReader(arena, "executor 0")
    assert reader.cpu_ns() == 0  # nobody's yet
    open_lane(arena, "executor 0")
    close_lane()
    reader.cpu_ns()
    before = time.process_time_ns()
    while time.process_time_ns() < before + 20_000_000:
        pass
    used, most = reader.cpu_ns(), time.process_time_ns() - before
    assert 20_000_000 <= used <= most + 5_000_000
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
        arena.views("trace").executor_0_pid[0] = gone.pid
    assert reader.cpu_ns() == 0


# ------------------------------------------------------------------------------------------------------------- the runs


class Trace:
    """A file's events by lane, after the checks that every trace must pass."""

    def __init__(self, path: Path) -> None:
        events: list[dict[str, Any]] = json.loads(path.read_text())
        names = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
        self.lanes: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
        for each in events:
            if each["ph"] == "X":
                self.lanes[names[each["tid"]]].append(each)
        self.intervals = {each["args"]["number"]: each for each in self.lanes.pop("interval")}
        for slices in self.lanes.values():
            # Without overlap, and without a gap: a process is always in some phase
            for one, other in pairwise(slices):
                assert end(one) == pytest.approx(other["ts"], abs=SLACK_US), (one, other)
                # Also in the whole nanoseconds to which Perfetto cuts them
                assert int(one["ts"] * 1000) + int(one["dur"] * 1000) <= int(other["ts"] * 1000)
        for one, other in pairwise(self.intervals.values()):
            assert end(one) == pytest.approx(other["ts"], abs=SLACK_US)

    def of(self, role: str, name: str) -> list[dict[str, Any]]:
        """The slices called ``name`` of all processes of a role."""
        lanes = [slices for lane, slices in self.lanes.items() if lane.split()[0] == role]
        return [each for slices in lanes for each in slices if each["name"] == name]

    def interval_of(self, one: dict[str, Any]) -> int:
        """In which interval a slice lies, all of it."""
        (j,) = (
            j
            for j, interval in self.intervals.items()
            if interval["ts"] - SLACK_US <= one["ts"] and end(one) <= end(interval) + SLACK_US
        )
        return j

    def steps(self) -> Counter[tuple[int, int, int]]:
        """How often each (interval, group, row) was stepped."""
        steps = [each for each in self.of("executor", "step") if each["args"]]
        return Counter((self.interval_of(each), each["args"]["group"], each["args"]["row"]) for each in steps)


def end(one: dict[str, Any]) -> float:
    return one["ts"] + one["dur"]


@pytest.fixture(scope="module")
def untraced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return record(
        tmp_path_factory.mktemp("untraced") / "run", "synthetic:counting", **SMALL | {"epochs": 2}
    ).result.values


@pytest.mark.parametrize("schedule", ["hts", "sync"])
def test_a_trace_shows_every_step_answer_and_gradient_once(
    tmp_path: Path, untraced: dict[str, Any], schedule: str
) -> None:
    actors = {"hts": 2, "sync": 1}[schedule]
    changes = {
        "schedule": schedule,
        "num_actors": actors,
        "epochs": 2,
        "trace": tmp_path / "trace.json",
        "trace_after": 0,
    }
    result = record(tmp_path / "run", "synthetic:counting", **SMALL | changes).result.values
    trace = Trace(tmp_path / "trace.json")
    intervals, N, T = range(result["intervals"]), SMALL["num_envs"], SMALL["sync_interval"]
    assert list(trace.lanes) == ["learner", *(f"actor {a}" for a in range(actors)), "executor 0", "executor 1"]
    assert list(trace.intervals) == list(intervals)

    assert trace.steps() == Counter(product(intervals, range(N), range(T)))  # groups of one replica
    answered: Counter[int] = Counter()
    for each in trace.of("actor", "infer"):
        answered[trace.interval_of(each)] += each["args"]["rows"]
    assert answered == dict.fromkeys(intervals, N * T)
    # Under 'hts' the learner works on the interval before, and on the last one after all
    learned = [each for each in trace.of("learner", "gradient") if end(each) <= end(trace.intervals[intervals[-1]])]
    late = len(trace.of("learner", "gradient")) - len(learned)
    gradients = Counter((trace.interval_of(e), e["args"]["epoch"], e["args"]["minibatch"]) for e in learned)
    assert gradients == Counter(product(intervals[1:] if schedule == "hts" else intervals, range(2), range(4)))
    assert late == (8 if schedule == "hts" else 0)
    # The counting environment's episodes last 11 steps on average; the first ones began before the first interval
    resets = [each for each in trace.of("executor", "reset") if trace.interval_of(each) >= 0]
    assert N * T * len(intervals) / 19 - N <= len(resets) <= result["episodes"]
    for name, slices in trace.lanes.items():
        assert slices[0]["name"] == "start"
        assert all(interval["args"]["cpu_ms"][name] > 0 for interval in trace.intervals.values())

    if schedule == "hts":
        assert result["parameters_sha256"] == untraced["parameters_sha256"]
        assert result["trajectory_sha256"] == untraced["trajectory_sha256"]
    else:
        assert result["parameters_sha256"] != untraced["parameters_sha256"]  # the comparison can fail


def test_a_killed_executors_lane_continues(tmp_path: Path, untraced: dict[str, Any]) -> None:
    path = tmp_path / "trace.json"
    with running(tmp_path / "run", env="synthetic:counting", epochs=2, trace=path, trace_after=0) as run:
        victim = next(child for child in run.crew.children if str(child) == "executor 1")

        def strike(run: Run) -> None:
            signal.pidfd_send_signal(victim.pidfd, signal.SIGKILL)  # without waiting: it will be closed

        with meanwhile(run, rows(0.5), strike):
            run.train(threading.Event())
        assert run.result.values["recovered"] == 1
        for name in ("parameters_sha256", "trajectory_sha256"):
            assert run.result.values[name] == untraced[name]
    trace = Trace(path)
    names = [each["name"] for each in trace.lanes["executor 1"]]
    place = names.index("gone")
    assert names[place : place + 5] == ["gone", "start", "replay", "replay", "replay"]
    assert "gone" not in names[place + 1 :]
    assert "gone" not in [each["name"] for each in trace.lanes["executor 0"]]
    assert [each["args"]["replica"] for each in trace.lanes["executor 1"][place + 2 : place + 5]] == [3, 4, 5]
    steps = trace.steps()
    assert set(steps) == set(product(trace.intervals, range(6), range(16)))
    # At most the step during which it was killed is made twice
    assert sum(steps.values()) - len(steps) <= 1


def test_what_a_resumed_run_traces(tmp_path: Path) -> None:
    """Nothing by itself, and with --trace a file of its own; neither changes a bit."""
    first, second, run_dir = tmp_path / "first.json", tmp_path / "second.json", tmp_path / "run"
    interrupted(run_dir, 3, env="CartPole-v1", trace=first, trace_after=1, trace_intervals=2)
    assert list(Trace(first).intervals) == [1, 2]
    text = first.read_text()
    with pytest.raises(ConfigError, match=r"first\.json exists already; name another file for --trace"):
        resume(run_dir, no_changes(trace=str(first)))
    shutil.copytree(run_dir, tmp_path / "copy")
    with_trace = resume(run_dir, no_changes(trace=str(second), trace_after="1"))
    without = resume(tmp_path / "copy")
    assert with_trace is not None
    assert without is not None
    trace = Trace(second)
    assert list(trace.intervals) == [5, 6, 7]
    assert set(trace.steps().values()) == {1}
    assert first.read_text() == text
    for name in ("parameters_sha256", "trajectory_sha256"):
        assert with_trace.values[name] == without.values[name]


def test_a_run_that_is_killed_leaves_its_complete_intervals(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    command = "train --env CartPole-v1 --total-steps 1000000000 --progress none --no-tensorboard --trace-intervals 1000"
    with subprocess.Popen(
        [sys.executable, "-m", "htsrl", *command.split(), "--trace", str(path), "--run-dir", str(tmp_path / "run")],
        start_new_session=True,
    ) as process:
        while process.poll() is None and (not path.exists() or path.read_bytes().count(b'"name":"interval"') < 3):
            time.sleep(0.002)
        os.killpg(process.pid, signal.SIGKILL)
    text = path.read_text()
    assert text.endswith("}")
    assert isinstance(json.loads(f"{text}]"), list)
    timeline = read_timeline(path)
    assert min(timeline.intervals) == 2
    assert len(timeline.intervals) >= 3
    path.write_text(text[:-20])  # a disk that ran full, or a machine that went down
    assert len(read_timeline(path).intervals) in (len(timeline.intervals), len(timeline.intervals) - 1)


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_gradient_step_of_an_algorithm_is_marked(algo: str) -> None:
    spec = vector_spec()
    model, parameters = network(spec)
    algorithm = make_algorithm(configure("CartPole-v1", algo=algo), model, parameters)
    arena = switched_on(1000, "learner")
    reader = LaneReader(arena, "learner")
    open_lane(arena, "learner")
    metrics = algorithm.update(rollout(spec, model), 0.0, np.random.default_rng(0))
    close_lane()
    marks = [(PHASES[code], epoch, number) for _, code, epoch, number in reader.take()[0].tolist()]
    gradients = [place for phase, *place in marks if phase == "gradient"]
    assert gradients == [place for phase, *place in marks if phase == "optimizer"]
    assert len(set(map(tuple, gradients))) == metrics["loss/gradient_steps"] == len(gradients) > 0
    assert marks[-1][0] == "summary"


# ------------------------------------------------------------------------------------------------------------- the file


def opened(path: Path, notes: list[str], ring: int = 64, **settings: Any) -> tuple[tracefile.TraceFile, Arena]:
    """A trace of one executor, one actor and the learner, whose first interval is 7; ``ring`` is the executor's."""
    config = configure("CartPole-v1", num_envs=1, num_executors=1, trace=path, **settings)
    layout = Layout(1, 1, 1, 1)
    arena = Arena.create({"trace": trace_fields(tracefile.lanes(layout, 4) | {"executor 0": ring})})
    return tracefile.TraceFile(config, layout, arena, 7, notes.append), arena


def test_slices_are_clipped_to_the_window(tmp_path: Path) -> None:
    notes: list[str] = []
    trace, arena = opened(tmp_path / "t.json", notes, trace_after=1, trace_intervals=2)
    write, now = lane_mark(arena, "executor 0"), time.perf_counter_ns
    times = []
    for j in (7, 8, 9, 10, 11):
        write("barrier")
        times.append(now())
        trace.begun(j, times[-1])
        write("step", 0, j)
    read = Trace(tmp_path / "t.json")
    assert list(read.intervals) == [8, 9]
    begin = times[1]
    slices = [(e["name"], e["args"].get("row")) for e in read.lanes["executor 0"]]
    assert slices == [("barrier", None), ("step", 8), ("barrier", None), ("step", 9), ("barrier", None)]
    for lane in read.lanes.values():
        assert lane[0]["ts"] == 0
        assert end(lane[-1]) * 1000 == pytest.approx(times[3] - begin, abs=5)
    assert arena.views("trace").on[0] == 0
    trace.close()
    assert notes == []


def test_marks_that_come_too_fast_are_counted(tmp_path: Path) -> None:
    notes: list[str] = []
    trace, arena = opened(tmp_path / "t.json", notes, ring=8, trace_after=0)
    write = lane_mark(arena, "executor 0")
    for j, count in enumerate((3, 20, 5), start=7):
        for row in range(count):
            write("step", 0, row)
        trace.begun(j, time.perf_counter_ns())
    trace.close()
    slices = Trace(tmp_path / "t.json").lanes["executor 0"]
    rows = [each["args"].get("row", each["name"]) for each in slices]
    assert rows == ["start", 0, 1, "lost", *range(13, 20), *range(5)]  # the open one began, but where it ended is lost
    assert [each["args"]["marks"] for each in slices if each["name"] == "lost"] == [13]
    assert notes == [f"{tmp_path / 't.json'} lacks 13 marks that came too fast to be read: its slices called 'lost'"]


def test_a_run_that_is_too_short_says_so(tmp_path: Path) -> None:
    notes: list[str] = []
    trace, _ = opened(tmp_path / "t.json", notes, trace_after=2)
    trace.begun(7, time.perf_counter_ns())
    trace.begun(8, time.perf_counter_ns())
    trace.close()
    assert notes == [
        f"{tmp_path / 't.json'} is empty: the run ended within the intervals that --trace-after leaves out"
    ]
    with pytest.raises(ConfigError, match="shows no complete interval yet"):
        read_timeline(tmp_path / "t.json")


def test_a_trace_that_grows_too_large_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracefile, "MOST_BYTES", 3000)
    notes: list[str] = []
    trace, arena = opened(tmp_path / "t.json", notes, trace_after=0, trace_intervals=1000)
    write = lane_mark(arena, "actor 0")
    for j in range(7, 100):
        write("infer", 1)
        trace.begun(j, time.perf_counter_ns())
    trace.close()
    assert (tmp_path / "t.json").stat().st_size < 4000
    assert 3 <= len(Trace(tmp_path / "t.json").intervals) < 20
    assert len(notes) == 1
    assert "the timeline ends here" in notes[0]


def test_a_trace_that_cannot_be_written_is_given_up(tmp_path: Path) -> None:
    notes: list[str] = []
    trace, arena = opened(tmp_path / "t.json", notes, trace_after=0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), trace._fd)
    trace.begun(7, time.perf_counter_ns())
    trace.begun(8, time.perf_counter_ns())
    trace.close()
    assert notes == [f"no more timeline in {tmp_path / 't.json'}, the run goes on: bad file descriptor"]
    assert arena.views("trace").on[0] == 0


def test_refused_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trace_intervals needs trace, the file that the timeline goes to"):
        configure("CartPole-v1", trace_intervals=5)
    with pytest.raises(ConfigError, match="trace_intervals must be at least 1, got 0"):
        configure("CartPole-v1", trace="t.json", trace_intervals=0)
    (tmp_path / "there").touch()
    with pytest.raises(ConfigError, match="there exists already"):
        train(configure("CartPole-v1", run_dir=tmp_path / "run", trace=tmp_path / "there"))
    with pytest.raises(ConfigError, match="there is no folder"):
        train(configure("CartPole-v1", run_dir=tmp_path / "run", trace=tmp_path / "no" / "t.json"))
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------------------------------------------- the picture


def written(path: Path) -> Path:
    """A timeline of two intervals of 10 and 20 ms, whose executor steps for a quarter and three quarters of them."""
    writer = {name: tracefile.SLICE[PHASES.index(name)] for name in ("step", "wait", "barrier", "gradient")}
    cpu = json.dumps({"learner": 2.5, "executor 0": 10})
    events = [
        *tracefile.metadata(configure("CartPole-v1"), ["learner", "executor 0"]),
        writer["gradient"](1, 0, 15_000, 0, 0),
        writer["barrier"](1, 15_000, 15_000, -1, -1),
        tracefile.INTERVAL(0, 0, 10_000, 4, cpu),
        writer["step"](2, 0, 2_500, 0, 0),
        writer["wait"](2, 2_500, 9_500, -1, -1),
        tracefile.INTERVAL(0, 10_000, 20_000, 5, cpu),
        writer["step"](2, 12_000, 15_000, 0, 0),
        writer["barrier"](2, 27_000, 3_000, -1, -1),
    ]
    path.write_text("[\n" + ",\n".join(events) + "\n]\n")
    return path


def test_shares_of_the_time(tmp_path: Path) -> None:
    timeline = read_timeline(written(tmp_path / "t.json"))
    assert timeline.title == "ppo on CartPole-v1, hts, 16 replicas x 128 steps"
    assert median_interval(timeline) == 4
    interval = timeline.intervals[5]
    assert (interval.begin, interval.end, interval.cpu["learner"]) == (10, 30, 2.5)
    lanes = {name: lane.within(interval.begin, interval.end) for name, lane in timeline.lanes.items()}
    assert lanes["executor 0"].start.tolist() == [0, 2, 17]
    assert lanes["executor 0"].end.tolist() == [2, 17, 20]
    assert lanes["executor 0"].shares(20) == pytest.approx({"wait": 0.1, "step": 0.75, "barrier": 0.15})
    assert lanes["learner"].shares(20) == pytest.approx({"gradient": 0.25, "barrier": 0.75})
    assert summary(timeline) == [
        "2 intervals of 15 milliseconds on average",
        "  learner       50% busy,  17% CPU: barrier 50%, gradient 50%",
        "  executor      58% busy,  67% CPU: step 58%, wait 32%, barrier 10%",
    ]


def test_a_picture_comes_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path, picture = written(tmp_path / "t.json"), tmp_path / "t.svg"
    assert main(["plot", "--timeline", str(path), "-o", str(picture), "--interval", "5"]) == 0
    assert capsys.readouterr().out.startswith(f"{picture}: interval 5 of 4 to 5\n2 intervals")
    drawn = picture.read_text()
    for colour, used in (("step", True), ("gradient", True), ("barrier", True), ("wait", True), ("infer", False)):
        assert (COLOURS[colour] in drawn) == used


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--timeline", "{trace}", "--interval", "6"], r"--interval must be one of those in .*t\.json, 4 to 5, got 6"),
        (["--timeline", "{trace}", "runs/one"], "--timeline draws one file alone"),
        (["--interval", "5", "runs/one"], "--interval is for --timeline FILE"),
        (["--interval", "-1", "--timeline", "{trace}"], "--interval"),
        (["--timeline", "{other}"], "other is not a timeline of `htsrl train --trace`"),
        (["--timeline", "{other}x"], "otherx can't be read: no such file or directory"),
        ([], "htsrl plot needs RUN_DIR"),
    ],
)
def test_refused_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    pytest.importorskip("matplotlib")
    trace, other = written(tmp_path / "t.json"), tmp_path / "other"
    other.write_text('[\n{"name": "x", "ph": "X", "ts": 1}\n]\n')
    assert main(["plot", *(each.format(trace=trace, other=other) for each in arguments)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error)
