"""``htsrl plot``: one line per run against steps and time, evaluations, and what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from htsrl.cli import main
from htsrl.errors import ConfigError
from htsrl.logfiles import JsonLines
from htsrl.plot import Curves, plot_runs
from htsrl.rundir import CONFIG, EVALUATIONS, METRICS
from htsrl.settings import configure
from htsrl.tomlfile import save_config


def make_run(run_dir: Path, env: str = "CartPole-v1", intervals: int = 30, score: bool = False) -> Path:
    """A run's folder; its first interval saw no episode end."""
    run_dir.mkdir(parents=True)
    save_config(configure(env), run_dir / CONFIG)
    metrics, evaluations = JsonLines(run_dir / METRICS), JsonLines(run_dir / EVALUATIONS)
    for j in range(intervals):
        record = {"interval": j, "steps": 100 * (j + 1), "seconds": 2.0 * (j + 1)}
        metrics.append(record | {"episode_return_mean": j if j else None} | ({"score_mean": j / 30} if score else {}))
    evaluations.append({"steps": 250, "return_mean": 7.0} | ({"score_mean": 0.5} if score else {}))
    metrics.close()
    evaluations.close()
    return run_dir


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture_comes_out(tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str) -> None:
    pytest.importorskip("matplotlib")
    runs = [make_run(tmp_path / "one"), make_run(tmp_path / "two", "gfootball", score=True)]
    picture = tmp_path / f"curves.{suffix}"
    assert main(["plot", *map(str, runs), "-o", str(picture)]) == 0
    assert capsys.readouterr().out == f"{picture}: 2 runs\n"
    assert picture.stat().st_size > 10_000
    if suffix == "svg":
        assert b"two" in picture.read_bytes()


def test_curves_align_values_and_evaluations_with_steps_and_time() -> None:
    intervals: list[dict[str, Any]] = [
        {"steps": 100, "seconds": 2.0, "episode_return_mean": None},
        {"steps": 200, "seconds": 4.0, "episode_return_mean": 1.0},
        {"steps": 300, "seconds": 8.0, "episode_return_mean": 2.0},
    ]
    curves = Curves("run", intervals, [{"steps": 250, "return_mean": 7.0}])
    np.testing.assert_array_equal(np.stack(curves.of("return")), [[200, 300], [4, 8], [1, 2]])
    np.testing.assert_array_equal(np.stack(curves.evaluated("return")), [[250], [6], [7]])
    assert [len(each) for each in curves.of("score")] == [0, 0, 0]


def test_a_run_that_is_being_written_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run_dir = make_run(tmp_path / "run")
    with (run_dir / METRICS).open("a") as metrics:
        metrics.write('{"interval": 30, "ste')
    plot_runs([run_dir], tmp_path / "curves.png")


def test_refusals(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run_dir = make_run(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"curves\.xyz can't be written: Format 'xyz' is not supported"):
        plot_runs([run_dir], tmp_path / "curves.xyz")
    with pytest.raises(ConfigError, match="can't be written: No such file or directory"):
        plot_runs([run_dir], tmp_path / "nowhere" / "curves.png")
    empty = make_run(tmp_path / "empty", intervals=0)
    with pytest.raises(ConfigError, match="has no finished interval yet"):
        plot_runs([empty], tmp_path / "curves.png")


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ConfigError, match=r"plot needs matplotlib: pip install 'htsrl\[plot\]'"):
        plot_runs([make_run(tmp_path / "run")], tmp_path / "curves.png")
