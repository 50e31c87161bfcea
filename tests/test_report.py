"""The reporter: files that survive anything, TensorBoard, and what a terminal, a pipe or nobody sees."""

from __future__ import annotations

import io
import json
import math
import os
import random
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from htsrl.config import AnyConfig
from htsrl.envs.spec import ActionSpec, EnvSpec
from htsrl.logfiles import JsonLines, read_json_lines
from htsrl.report import Reporter
from htsrl.rundir import EVALUATIONS, METRICS, RESULT, plain, update_result
from htsrl.settings import configure
from htsrl.terminal import Board, LiveView, PlainView, duration, make_view, number, plain_line, table

SPEC = EnvSpec(
    "gfootball",
    "football",
    (72, 96, 16),
    np.dtype(np.uint8),
    "image",
    ActionSpec("discrete", (19,)),
    frame_skip=4,
    has_score=True,
)
RESULT_VALUES = {
    "steps": 6144,
    "frames": 24576,
    "intervals": 3,
    "episodes": 60,
    "seconds": 30.0,
    "steps_per_second": 204.8,
    "episode_return_mean": 0.94,
    "score_mean": 0.9,
    "reproducible": True,
    "recovered": 0,
    "interrupted": False,
    "checkpoint": "run/checkpoints/steps-6144.safetensors",
}


def record(j: int, **more: Any) -> dict[str, Any]:
    """What a run reports of interval ``j``; numpy's numbers, and no episode at first."""
    return {
        "interval": j,
        "steps": 2048 * (j + 1),
        "frames": 8192 * (j + 1),
        "seconds": 10.0 * (j + 1),
        "episodes": 20 * j,
        "episode_return_mean": np.float32(0.5) if j else math.nan,
        "score_mean": 0.25,
        "policy_lag": np.int64(1),
        "learning_rate": 3e-4,
        "loss/policy": -0.01,
        "loss/value": 0.5,
        "time/rollout": 9.0,
        "time/learn": 6.0,
        "time/wait": 3.0,
        **more,
    }


def small(**settings: Any) -> AnyConfig:
    return configure("gfootball", total_steps=6144, **settings)


# ------------------------------------------------------------------------------------------------------------- files


def test_a_run_leaves_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(small(progress="none"), SPEC, tmp_path)
    reporter.start({"executors": "2"})
    for j in range(3):
        reporter.interval(record(j))
        assert len(list(read_json_lines(tmp_path / METRICS))) == j + 1  # there at once, not at the end
    reporter.evaluation({"steps": 4096, "return_mean": 0.9, "return_std": 0.1, "length_mean": 50.0, "episodes": 10})
    reporter.finish(RESULT_VALUES)
    reporter.close()
    reporter.close()

    first, second, _ = read_json_lines(tmp_path / METRICS)
    assert first["episode_return_mean"] is None  # JSON has no NaN
    assert (second["episode_return_mean"], second["policy_lag"]) == (0.5, 1)
    assert second["steps_per_second"] == pytest.approx(204.8)
    (evaluation,) = read_json_lines(tmp_path / EVALUATIONS)
    assert evaluation == {"steps": 4096, "return_mean": 0.9, "return_std": 0.1, "length_mean": 50.0, "episodes": 10}
    assert json.loads((tmp_path / RESULT).read_text()) == RESULT_VALUES
    assert capsys.readouterr().out.splitlines() == [
        "finished 6,144 steps in 0:30: 204.8 steps/s, 60 episodes",
        "return 0.940, score 0.900 (mean of the last 100 episodes)",
        "checkpoint: run/checkpoints/steps-6144.safetensors",
        f"evaluate it: htsrl eval {tmp_path}",
    ]


def test_tensorboard_has_the_same_names_at_the_same_steps(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reporter = Reporter(small(progress="none"), SPEC, tmp_path)
    for j in range(3):
        reporter.interval(record(j))
    reporter.evaluation({"steps": 4096, "return_mean": 0.9, "episodes": 10})
    reporter.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(each.step, each.value) for each in events.Scalars("loss/value")] == [(2048, 0.5), (4096, 0.5), (6144, 0.5)]
    assert [each.step for each in events.Scalars("episode_return_mean")] == [4096, 6144]
    assert [(each.step, round(each.value, 3)) for each in events.Scalars("eval/return_mean")] == [(4096, 0.9)]
    assert set(record(0)) - {"steps"} | {"steps_per_second"} <= set(events.Tags()["scalars"])


def test_no_tensorboard(tmp_path: Path) -> None:
    reporter = Reporter(small(progress="none", tensorboard=False), SPEC, tmp_path)
    reporter.interval(record(0))
    reporter.close()
    assert not list(tmp_path.glob("events*"))


@pytest.mark.parametrize("rest", ['{"interval": 1, "st', "x" * 10_000])
def test_half_a_line_never_stands_before_another(tmp_path: Path, rest: str) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"interval": 0}\n' + rest)
    assert list(read_json_lines(path)) == ([{"interval": 0}])
    lines = JsonLines(path)
    lines.append({"interval": 1})
    lines.close()
    assert path.read_text() == '{"interval": 0}\n{"interval": 1}\n'


def test_a_line_that_does_not_fit_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = JsonLines(tmp_path / "lines.jsonl")
    lines.append({"interval": 0})
    write, calls = os.write, []

    def disk_full(file: int, data: bytes) -> int:
        calls.append(data)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return write(file, data[:5])

    monkeypatch.setattr(os, "write", disk_full)
    with pytest.raises(OSError, match="No space left"):
        lines.append({"interval": 1})
    monkeypatch.undo()
    assert (tmp_path / "lines.jsonl").read_text() == '{"interval": 0}\n'


def test_results_keep_what_others_wrote(tmp_path: Path) -> None:
    update_result(tmp_path, {"evaluation": {"return_mean": math.inf}})
    update_result(tmp_path, {"steps": np.int64(3), "path": tmp_path})
    assert json.loads((tmp_path / RESULT).read_text()) == {
        "evaluation": {"return_mean": None},
        "steps": 3,
        "path": str(tmp_path),
    }
    assert [path.name for path in tmp_path.iterdir()] == [RESULT]  # no temporary file is left


def test_plain_values() -> None:
    assert plain({"a": np.float64("nan"), "b": [np.arange(2), None, True, "x"]}) == {
        "a": None,
        "b": [[0, 1], None, True, "x"],
    }


# ------------------------------------------------------------------------------------------------- what a person sees


def test_plain_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    reporter = Reporter(small(progress="plain", tensorboard=False), SPEC, tmp_path)
    reporter.start({"executors": "2", "device": "cpu"})
    for j in range(3):
        reporter.interval(record(j))
        now += 3.0
    reporter.note("something to know")
    reporter.finish(RESULT_VALUES | {"interrupted": True, "reproducible": False, "recovered": 2})
    reporter.close()
    output = capsys.readouterr().out
    lines = output.splitlines()
    assert "\033" not in output
    assert lines[0].endswith("ppo on gfootball, 6,144 steps, seed 0")
    assert lines[1] == f"run folder: {tmp_path}"
    assert lines[2].endswith("schedule hts, executors 2, device cpu")
    shown = [line for line in lines if " left" in line]
    assert [line.split()[0] for line in shown] == ["2,048", "6,144"]  # the one 3 s later is left out, the last is not
    assert len({len(line) for line in shown}) == 1
    assert "return   0.500" in shown[1]
    assert "rollout  90% learn  60% wait  30%" in shown[1]
    assert "note: something to know" in lines
    assert "interrupted after 6,144 of 6,144 steps, 0:30: 204.8 steps/s, 60 episodes" in lines
    assert "not reproducible: the environment did not repeat what it did before" in lines
    assert "recovered from 2 failures of processes" in lines
    assert lines[-1] == f"evaluate it: htsrl eval {tmp_path}"


def test_the_last_line_can_be_pasted_into_a_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "my runs"
    run_dir.mkdir()
    reporter = Reporter(small(progress="none", tensorboard=False), SPEC, run_dir)
    reporter.finish(RESULT_VALUES)
    reporter.close()
    assert capsys.readouterr().out.endswith(f"evaluate it: htsrl eval '{run_dir}'\n")


def filled_board(**settings: Any) -> Board:
    board = Board(small(**settings), has_score=True, frame_skip=4)
    for j in range(2):
        board.update(record(j))
    board.evaluation = {"steps": 2048, "return_mean": 0.7, "score_mean": 0.6, "episodes": 10}
    return board


@pytest.mark.parametrize("width", [20, 40, 60, 83, 84, 100, 111, 112, 200])
@pytest.mark.parametrize("filled", [True, False])
def test_the_table_fits_the_terminal(width: int, filled: bool) -> None:
    board = filled_board() if filled else Board(small(), has_score=True, frame_skip=4)
    lines = ["".join(text for text, _ in line) for line in table(board, width).lines]
    assert max(map(len, lines)) < width
    words = " ".join(lines)
    assert all(title in words for title in ("run", "episodes", "learning", "time"))
    if filled:
        assert "67%" in words
        assert re.search(r"return, last.*0\.500", words)
        assert re.search(r"policy loss +-0\.010", words)


def test_a_lag_that_differs_from_row_to_row_is_shown() -> None:
    board = Board(small(schedule="async"), has_score=True, frame_skip=4)
    board.update(record(0, policy_lag=0.75, policy_lag_max=3, policy_lag_histogram=[2, 1, 0, 1]))
    words = " ".join("".join(text for text, _ in line) for line in table(board, 112).lines)
    assert re.search(r"policy lag +0\.750", words)
    assert re.search(r"largest lag +3", words)
    assert "lag 0.750 to  3  rollout" in plain_line(board)


def test_recovered_processes_stand_in_the_table_once_there_are_any():
    def rows(recovered):
        board = filled_board()
        board.recovered = recovered
        return ["".join(text for text, _ in line) for line in table(board, 112).lines]

    assert not any("recovered" in row for row in rows(0))
    assert any(row.split("recovered")[1].split()[0] == "3" for row in rows(3) if "recovered" in row)


def test_the_table_in_ascii() -> None:
    text = "".join(text for line in table(filled_board(), 100, ascii_only=True).lines for text, _ in line)
    assert text.isascii()


def test_speed_shares_and_time_left() -> None:
    board = filled_board()
    assert board.speed == pytest.approx(204.8)
    assert board.shares == pytest.approx({"rollout": 0.9, "learn": 0.6, "wait": 0.3})
    assert board.seconds_left == pytest.approx(10.0)
    for j in range(2, 60):  # a slow beginning is forgotten
        board.update(record(j, seconds=20.0 + j))
    assert board.speed == pytest.approx(2048, rel=0.1)


def test_views_never_draw_random_numbers() -> None:
    states = random.getstate(), str(np.random.get_state())  # noqa: NPY002
    view = LiveView(filled_board(), Console(file=io.StringIO(), force_terminal=True, width=100))
    view.start("two executors")
    view.interval()
    view.finish(["the end"])
    plain_line(filled_board())
    assert states == (random.getstate(), str(np.random.get_state()))  # noqa: NPY002


def test_the_live_table_gives_the_terminal_back() -> None:
    screen = io.StringIO()
    view = LiveView(filled_board(), Console(file=screen, force_terminal=True, width=100))
    view.start("two executors")
    view.interval()
    view.close()
    view.close()
    assert screen.getvalue().rfind("\033[?25h") > screen.getvalue().rfind("\033[?25l") >= 0  # the cursor
    before = screen.getvalue()
    time.sleep(0.05)
    assert screen.getvalue() == before


def test_drawing_is_rationed(monkeypatch: pytest.MonkeyPatch) -> None:
    now, drawn = 0.0, []
    view = LiveView(filled_board(), Console(file=io.StringIO(), force_terminal=True, width=100))
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(view._live, "refresh", lambda: drawn.append(now))
    for _ in range(1000):
        now += 0.01
        view.interval()
    assert 38 <= len(drawn) <= 41  # four a second for ten seconds


def test_an_interval_costs_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "htsrl.terminal.Terminal", lambda **_: Console(file=io.StringIO(), force_terminal=True, width=120)
    )
    reporter = Reporter(small(progress="live"), SPEC, tmp_path)
    reporter.start({})
    reporter.interval(record(0))
    times = []
    for j in range(1, 101):
        began = time.thread_time()
        reporter.interval(record(j))
        times.append(time.thread_time() - began)
    reporter.close()
    assert sorted(times)[50] < 2e-3


def test_auto_is_plain_where_no_terminal_is(monkeypatch: pytest.MonkeyPatch) -> None:
    board = filled_board()
    assert isinstance(make_view("auto", board), PlainView)
    monkeypatch.setattr("htsrl.terminal.Terminal", lambda **_: Console(file=io.StringIO(), force_terminal=True))
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(make_view("auto", board), LiveView)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_view("auto", board), PlainView)


def test_a_closed_pipe_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class ClosedPipe(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    reporter = Reporter(small(progress="plain", tensorboard=False), SPEC, tmp_path)
    monkeypatch.setattr("sys.stdout", ClosedPipe())
    reporter.start({})
    reporter.interval(record(0))
    reporter.finish(RESULT_VALUES)
    reporter.close()
    assert (tmp_path / RESULT).exists()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (math.nan, "-"),
        (0.0, "0"),
        (1, "1"),
        (12345.6, "12,346"),
        (123.45, "123.5"),
        (1.5, "1.50"),
        (0.12345, "0.123"),
        (-0.01, "-0.010"),
        (3.43e-4, "3.4e-04"),
    ],
)
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(None, "-"), (0.4, "0:00"), (61, "1:01"), (3661, "1:01:01")])
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text
