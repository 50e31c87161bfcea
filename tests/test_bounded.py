"""What a long run remembers stays small, or is said: endless episodes, short intervals, files of a million lines."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import htsrl.run
from htsrl.plot import MOST_POINTS, thinned
from htsrl.settings import configure
from htsrl.storage.episodes import EpisodeLog, EpisodeLogs
from htsrl.terminal import MOST_IN_WINDOW, WINDOW_SECONDS, Board
from htsrl.training import train


def interval(T, N, start):
    """A storage of T rows in which no episode ends; the action of row t and replica n is start + t, n."""
    rows = np.arange(start, start + T)
    return SimpleNamespace(
        reward=np.zeros((T, N)),
        obs=np.stack([np.arange(start, start + T + 1)] * N, axis=1),
        action=np.stack([rows * 10 + n for n in range(N)], axis=1),
        valid=np.ones((T, N), bool),
        truncated=np.zeros((T, N), bool),
        episode_length=np.zeros((T, N), int),
    )


def test_the_log_of_an_endless_episode_has_few_pieces_and_every_action():
    T, N, intervals = 5, 2, 3000
    logs = EpisodeLogs([EpisodeLog(0, (np.empty(0, int),)) for _ in range(N)], 0)
    copied = 0
    for j in range(intervals):
        before = logs.logs
        logs.advance(interval(T, N, j * T))
        kept = {id(piece) for piece in before[0].pieces}
        copied += sum(len(piece) for piece in logs.logs[0].pieces if id(piece) not in kept)
        if j == 1000:
            early = logs.logs
    assert logs.interval == intervals
    for n, log in enumerate(logs.logs):
        assert len(log.pieces) <= np.log2(T * intervals)
        np.testing.assert_array_equal(log.actions, np.arange(T * intervals) * 10 + n)
        assert log.last_obs == T * intervals
        np.testing.assert_array_equal(early[n].actions, np.arange(1001 * T) * 10 + n)  # it never changes
    assert copied <= T * intervals * np.log2(T * intervals)

    ending = interval(T, N, 0)
    ending.episode_length[2, 0] = 7
    logs.advance(ending)
    assert [(log.episode, len(log.actions)) for log in logs.logs] == [(1, 2), (0, T * intervals + T)]


def test_long_logs_are_said(tmp_path, monkeypatch, capsys):
    """4 replicas x 64 actions of 8 bytes after the first interval, twice that after the second, and so on."""
    monkeypatch.setattr(htsrl.run, "LONG_LOGS_BYTES", 2048)
    config = configure(
        "faulty_envs:Constant-v0", num_envs=4, sync_interval=64, total_steps=4 * 64 * 6, epochs=1, minibatches=1,
        checkpoint_every=1, progress="none", run_dir=tmp_path / "run",
    )  # fmt: skip
    train(config)
    notes = [line for line in capsys.readouterr().err.splitlines() if "episodes that have not ended" in line]
    assert len(notes) == 3
    assert all("--max-episode-steps" in note for note in notes)


def test_the_board_s_window_is_bounded_and_right():
    board = Board(configure("CartPole-v1", total_steps=10**9), has_score=False, frame_skip=1)
    times = {"time/rollout": 8e-5, "time/learn": 5e-5, "time/wait": 1e-5}
    for k in range(1, 400_001):  # 40 seconds
        board.update({"steps": 10 * k, "seconds": 1e-4 * k, **times})
    assert len(board._window) <= MOST_IN_WINDOW + 3
    assert board._window[-1][0] - board._window[0][0] == pytest.approx(WINDOW_SECONDS, rel=0.01)
    assert board.speed == pytest.approx(100_000)
    assert board.shares == pytest.approx({"rollout": 0.8, "learn": 0.5, "wait": 0.1})


@pytest.mark.parametrize("count", [0, 1, 2 * MOST_POINTS - 1, 2 * MOST_POINTS, 100_003])
def test_curves_are_thinned_while_they_are_read(count):
    kept = [record["steps"] for record in thinned({"steps": k} for k in range(count))]
    assert len(kept) <= 2 * MOST_POINTS
    if count:
        assert (kept[0], kept[-1]) == (0, count - 1)
        steps = np.diff(kept[:-1])
        assert (steps == steps[:1]).all()
        assert len(kept) >= min(count, MOST_POINTS)
