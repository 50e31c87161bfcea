#!/usr/bin/env python3
"""Throughput as one setting varies: the paper's sweeps.

    python benchmarks/sweeps.py                                     # all four
    python benchmarks/sweeps.py --sweep variance,interval --json sweeps.json --plot sweeps.png

interval   steps between two barriers, on CartPole and on steps that sleep
actors     actor processes; whatever their number, the parameters at the end must be the same
replicas   environments, on CartPole and on steps that sleep: what one step costs, and how much memory all of them take
variance   of the time that a step takes, its mean being the same: hts beside sync

Exit status: 0, or 1 if the number of actors changed a bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from facts import chosen, circumstances, number, run_main, save_json, table
from limits import barrier_model
from throughput import measure, ours
from workloads import flags, workload

from htsrl.errors import ConfigError, RunFailed
from htsrl.limits import MOST_PROCESSES

INTERVALS = (1, 4, 16, 64, 128, 512)
ACTORS = (1, 2, 4, 8, 16)
REPLICAS = (4, 16, 64, 256)
SHAPES = (64.0, 16.0, 4.0, 1.0, 0.25)
"""Of the Gamma distribution: the variance of a step's time is mean² / shape."""
SLEEP_MS = 2.0
ACTOR_STEPS = 200_000

Point = dict[str, Any]
"""What was varied, under its own name, and the medians over rounds of what was measured."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", default=",".join(SWEEPS), metavar="S,S", help=f"of {', '.join(SWEEPS)}")
    parser.add_argument("--seconds", type=float, default=5.0, metavar="S", help="a measurement's window (default: 5)")
    parser.add_argument("--rounds", type=int, default=1, metavar="R", help="measurements of each (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to keep all figures")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="curves as a picture")
    given = parser.parse_args()
    if given.seconds <= 0 or given.rounds < 1:
        raise ConfigError("--seconds must be greater than 0 and --rounds at least 1")
    names = chosen(given.sweep, tuple(SWEEPS), "sweep")

    record: dict[str, Any] = {**circumstances(), "seconds": given.seconds, "rounds": given.rounds, "sweeps": {}}
    for name in names:
        print(f"\n{name}", flush=True)
        lines = SWEEPS[name](given.seconds, given.rounds)
        record["sweeps"][name] = lines
        for label, points in lines.items():
            print(f"{label}\n{table([list(points[0]), *([shown(value) for value in p.values()] for p in points)])}")
        if given.json:
            save_json(given.json, record)
    if given.plot:
        plot(record["sweeps"], given.plot)
    digests = {p["parameters"] for points in record["sweeps"].get("actors", {}).values() for p in points}
    return int(len(digests) > 1)


def shown(value: Any) -> str:
    """A figure for the table; digests by their beginning."""
    return value[:12] if isinstance(value, str) else number(value)


# ---------------------------------------------------------------------------------------------------------- the sweeps


def over_intervals(seconds: float, rounds: int) -> dict[str, list[Point]]:
    """Steps per second by the interval between two barriers."""
    lines = {}
    for name in ("cartpole", f"sleep-{SLEEP_MS:g}-1-16"):
        lines[name] = [{"interval": T, **speed(name, "hts", {"sync_interval": T}, seconds, rounds)} for T in INTERVALS]
        if name != "cartpole":
            for point in lines[name]:
                point["model"] = barrier_model(SLEEP_MS / 1000.0, 1.0, 16, point["interval"]).barrier
    return lines


def over_actors(seconds: float, rounds: int) -> dict[str, list[Point]]:
    """Steps per second of whole runs by the number of actors, and the parameters that they end with."""
    each = workload("cartpole")
    points = []
    for actors in ACTORS:
        speeds, digests = [], set()
        for _ in range(rounds):
            with tempfile.TemporaryDirectory(prefix="htsrl-sweep-") as folder:
                settings = {**each.settings, "num_actors": actors, "run_dir": folder, "total_steps": ACTOR_STEPS}
                # One replica a group: with as many groups as actors, each actor has some to serve
                settings |= {"envs_per_group": 1, "progress": "none"}
                command = [sys.executable, "-m", "htsrl", "train", "--algo", each.algo, "--env", each.env]
                done = subprocess.run([*command, *flags(settings)], capture_output=True, text=True)
                if done.returncode:
                    raise RunFailed(f"{actors} actors: {done.stderr.strip()}")
                result = json.loads((Path(folder) / "result.json").read_text())
            speeds.append(result["steps_per_second"])
            digests.add(result["parameters_sha256"])
        points.append(
            {"actors": actors, "steps_per_second": statistics.median(speeds), "parameters": " ".join(sorted(digests))}
        )
        progress(points[-1])
    return {"cartpole": points}


def over_replicas(seconds: float, rounds: int) -> dict[str, list[Point]]:
    """Steps per second, CPU time per step and memory by the number of replicas."""
    lines: dict[str, list[Point]] = {}
    for name in ("cartpole", f"sleep-{SLEEP_MS:g}-1-16"):
        lines[name] = []
        for N in REPLICAS:
            settings: dict[str, Any] = {"num_envs": N}
            if name != "cartpole":
                settings["num_executors"] = N if N <= MOST_PROCESSES else N // 2  # two that share one sleep in turn
            lines[name].append({"replicas": N, **speed(name, "hts", settings, seconds, rounds)})
    return lines


def over_variance(seconds: float, rounds: int) -> dict[str, list[Point]]:
    """How much faster hts is than sync, by the variance of a step's time."""
    points = []
    for shape in SHAPES:
        name = f"sleep-{SLEEP_MS:g}-{shape:g}-16"
        hts, sync = (speed(name, s, {}, seconds, rounds)["steps_per_second"] for s in ("hts", "sync"))
        model = barrier_model(SLEEP_MS / 1000.0, shape, 16, 128)
        points.append(
            {
                "variance_ms2": SLEEP_MS**2 / shape,
                "hts": hts,
                "sync": sync,
                "speed_up": hts / sync,
                "model_speed_up": model.barrier / model.lockstep,
            }
        )
    return {f"sleep-{SLEEP_MS:g}-K-16": points}


def speed(name: str, schedule: str, settings: Mapping[str, Any], seconds: float, rounds: int) -> Point:
    """Medians over ``rounds`` of this system on the workload called ``name``, with ``settings`` over its own."""
    each = workload(name)
    each = dataclasses.replace(each, settings={**each.settings, **settings})
    (contender,) = ours(each, [schedule], {})
    figures = [measure(contender, seconds) for _ in range(rounds)]
    keys = ("steps_per_second", "cpu_seconds_per_1000_steps", "pss_mib", "barrier_share")
    point = {key: statistics.median(figure[key] for figure in figures) for key in keys}
    progress({"workload": name, "schedule": schedule, **settings, **point})
    return point


def progress(point: Point) -> None:
    """Say what has just been measured."""
    print("  " + ", ".join(f"{key} {shown(value)}" for key, value in point.items()), flush=True)


SWEEPS: dict[str, Callable[[float, int], dict[str, list[Point]]]] = {
    "interval": over_intervals,
    "actors": over_actors,
    "replicas": over_replicas,
    "variance": over_variance,
}


def plot(sweeps: dict[str, dict[str, list[Point]]], path: Path) -> None:
    """A panel for each sweep and line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    panels = [(sweep, label, points) for sweep, lines in sweeps.items() for label, points in lines.items()]
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(3.6 * columns, 2.8 * rows))
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis, (sweep, label, points) in zip(axes, panels):
        over = next(iter(points[0]))
        drawn = ("speed_up", "model_speed_up") if sweep == "variance" else ("steps_per_second", "model")
        for key, style in zip(drawn, ("o-", "--")):
            if key in points[0]:
                shown_as = key.replace("_", " ").replace("steps per second", "steps/s")
                axis.plot([p[over] for p in points], [p[key] for p in points], style, label=shown_as)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.yaxis.set_major_formatter(EngFormatter(sep=""))
        axis.set_ylim(bottom=0)
        axis.set_xlabel({"interval": "steps between barriers", "variance_ms2": "variance, ms²"}.get(over, over))
        axis.set_title(f"{sweep}: {label}", fontsize=9, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(run_main(main))
