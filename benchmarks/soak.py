#!/usr/bin/env python3
"""Does a long run stay as it is? Memory, file handles and threads of each of its processes, watched from outside.

    python benchmarks/soak.py --minutes 4
    python benchmarks/soak.py --minutes 60 --set num_executors=2 --json soak.json

Trains on episodes of a few steps that end in both ways, with evaluations, checkpoints and TensorBoard, so that minutes
hold what else takes weeks. Exit status 0 if every process stayed flat after the warm-up, the run ended cleanly when it
was asked to, and nothing was left behind; 1 if not. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from facts import circumstances, number, run_main, save_json, table
from throughput import overrides
from tree import Tree, kib
from workloads import flags

from htsrl.envs.synthetic import Counting
from htsrl.errors import ConfigError, RunFailed
from htsrl.logfiles import read_json_lines
from htsrl.rundir import EVALUATIONS, METRICS
from htsrl.settings import configure

RESULT = Path(__file__).resolve().parent / "results" / "soak.json"
ENV = "synthetic:counting"
SETTINGS = {
    "num_envs": 128, "sync_interval": 32, "max_episode_steps": 5, "epochs": 1, "minibatches": 4, "hidden_sizes": (16,),
    "eval_every": 40_000, "checkpoint_every": 40_000,
}  # fmt: skip
SAMPLE_S = 2.0
MISSED_S = 5 * SAMPLE_S
"""A process that was not seen for longer at the beginning or the end was not there."""
FIRST_SAMPLE_TIMEOUT_S = 120.0
END_TIMEOUT_S = 60.0
MOST_SAMPLES = 60
"""Of a process that are kept in the record."""

MEASURES = ("pss_mib", "rss_mib", "handles", "threads")
TOLERANCE = {"rss_mib": 2.0, "handles": 0.5, "threads": 0.5}
"""How much a measure's fitted line may rise over the whole time after the warm-up. PSS has none: it also rises when
another program that maps the same libraries ends."""


@dataclass
class Watched:
    """What was seen of one process."""

    name: str
    pid: int
    seconds: list[float] = field(default_factory=list)
    samples: list[tuple[float, ...]] = field(default_factory=list)
    """Of MEASURES, as often as ``seconds``."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=4.0, metavar="M", help="how long (default: 4)")
    parser.add_argument("--warm-up", type=float, metavar="S", help="seconds that don't count (default: a third)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="another setting of the run")
    parser.add_argument(
        "--json", type=Path, default=RESULT, metavar="FILE", help=f"the record (default: {RESULT.name})"
    )
    given = parser.parse_args()
    seconds = 60.0 * given.minutes
    warm_up = seconds / 3 if given.warm_up is None else given.warm_up
    if seconds <= 0 or not 0 <= warm_up < seconds:
        raise ConfigError("--minutes must be greater than 0, and --warm-up shorter than that")
    settings: dict[str, Any] = {**SETTINGS, **dict(overrides(given.set))}
    configure(ENV, **settings)  # refused before anything is started

    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        run_dir, scratch = Path(folder) / "run", Path(folder) / "tmp"
        scratch.mkdir()
        watched, speeds, ending = soak(run_dir, scratch, settings, seconds)
        done = accomplished(run_dir, int(settings["checkpoint_every"]))
    judged = {each.name: judge(each, warm_up, speeds[-1][0]) for each in watched}
    flat = all(measure["flat"] for measures in judged.values() for measure in measures.values())
    ok = flat and ending["status"] == 130 and not ending["left"]
    save_json(
        given.json,
        circumstances()
        | {"env": ENV, "settings": settings, "seconds": seconds, "warm_up_seconds": warm_up, "tolerance": TOLERANCE}
        | {"terminations_of_ends": share_of_terminations(int(settings["max_episode_steps"]))}
        | {"flat": flat, "ending": ending, "accomplished": done, "processes": judged}
        | {"steps_per_second": thinned([[round(second), round(speed)] for second, speed in speeds])}
        | {"sample_columns": ("seconds", *MEASURES), "samples": {each.name: rows_of(each) for each in watched}},
    )
    print("\n".join(report(judged, speeds, done, ending, warm_up, flat)))
    return 0 if ok else 1


def soak(
    run_dir: Path, scratch: Path, settings: dict[str, Any], seconds: float
) -> tuple[list[Watched], list[tuple[float, float]], dict[str, Any]]:
    """Train for ``seconds``; returns what was seen of each process, steps/s over time, and how it ended."""
    train = ["train", "--env", ENV, "--total-steps", str(10**12), "--run-dir", str(run_dir), "--progress", "plain"]
    shared = files_in("/dev/shm")
    process = subprocess.Popen(
        [sys.executable, "-m", "htsrl", *train, *flags(settings)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(scratch)},
    )
    tree = Tree(process.pid)
    watched: dict[int, Watched] = {}
    speeds: list[tuple[float, float]] = []
    try:
        began = wait_for_first_interval(process, run_dir)
        steps_before, before = 0, began
        for sample in itertools.count(1):
            time.sleep(max(began + sample * SAMPLE_S - time.monotonic(), 0.0))
            now = time.monotonic()
            if process.poll() is not None:
                raise RunFailed(f"the run ended by itself: {process.stderr.read() if process.stderr else ''}")
            for each in tree.processes():
                look(each, watched, now - began)
            steps = last_steps(run_dir)
            speeds.append((now - began, (steps - steps_before) / (now - before)))
            steps_before, before = steps, now
            if now - began >= seconds:
                break
        asked = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.wait(END_TIMEOUT_S)
        took = time.monotonic() - asked
    finally:
        tree.end(process)
    _, alive = psutil.wait_procs([each for each in tree.processes() if each.pid != process.pid], timeout=10)
    left = [f"process {each.pid}" for each in alive]
    # torch's optimizers import its compiler, which makes a folder for all programs of a user
    left += [path.name for path in scratch.iterdir() if not path.name.startswith("torchinductor_")]
    left += sorted(files_in("/dev/shm") - shared)
    return list(watched.values()), speeds, {"status": process.returncode, "seconds": took, "left": left}


def wait_for_first_interval(process: subprocess.Popen, run_dir: Path) -> float:
    """Returns when, by the monotonic clock.

    Raises:
        RunFailed: it did not come.
    """
    deadline = time.monotonic() + FIRST_SAMPLE_TIMEOUT_S
    while not last_steps(run_dir):
        if process.poll() is not None or time.monotonic() > deadline:
            said = process.stderr.read() if process.poll() is not None and process.stderr is not None else "slow"
            raise RunFailed(f"the run did not start: {said}")
        time.sleep(0.05)
    return time.monotonic()


def look(process: psutil.Process, watched: dict[int, Watched], seconds: float) -> None:
    """Take a sample of ``process``, unless it has just ended."""
    place = Path(f"/proc/{process.pid}")
    try:
        name = name_of(place)
        handles, threads = len(os.listdir(place / "fd")), len(os.listdir(place / "task"))
    except OSError:
        return
    memory = [kib(process.pid, "smaps_rollup", key) / 1024 for key in ("Pss:", "Rss:")]
    if process.pid not in watched and any(each.name == name for each in watched.values()):
        name = f"{name} again ({process.pid})"
    each = watched.setdefault(process.pid, Watched(name, process.pid))
    each.seconds.append(seconds)
    each.samples.append((*memory, handles, threads))


def name_of(place: Path) -> str:
    """The role of a process of a run, and its number."""
    command = (place / "cmdline").read_bytes().decode(errors="replace")
    name = (place / "comm").read_text().strip()
    if name.startswith(("executor-", "actor-", "evaluator")):
        return name.replace("-", " ")
    if "forkserver" in command:
        return "fork server"
    return "resource tracker" if "resource_tracker" in command else "run"


def last_steps(run_dir: Path) -> int:
    """Steps of the newest record; 0 where there is none."""
    try:
        with (run_dir / METRICS).open("rb") as lines:
            lines.seek(max(lines.seek(0, os.SEEK_END) - 4096, 0))
            whole = [line for line in lines.read().splitlines(keepends=True)[1:] if line.endswith(b"\n")]
    except OSError:
        return 0
    return json.loads(whole[-1])["steps"] if whole else 0


def files_in(folder: str) -> set[str]:
    return set(os.listdir(folder)) if os.path.isdir(folder) else set()


def share_of_terminations(limit: int) -> float:
    """Of the ends of episodes that are truncated after ``limit`` steps; the law of the environment, by 10,000 seeds."""
    episodes = [Counting.Episode.of(seed) for seed in range(10_000)]
    return sum(each.length <= limit and not each.truncates for each in episodes) / len(episodes)


def accomplished(run_dir: Path, checkpoint_every: int) -> dict[str, int]:
    """What the run did, from its files; how often it was evaluated and written down."""
    (last,) = deque(read_json_lines(run_dir / METRICS), maxlen=1)
    return {
        "steps": last["steps"],
        "intervals": last["interval"] + 1,
        "episode_ends": last["episodes"],
        "evaluations": sum(1 for _ in read_json_lines(run_dir / EVALUATIONS)),
        "checkpoints": last["steps"] // checkpoint_every,
    }


# ----------------------------------------------------------------------------------------------------------- judgement


def judge(each: Watched, warm_up: float, end: float) -> dict[str, dict[str, Any]]:
    """Per measure: at the first sample after the warm-up and at the last, what its line rises by, and if it is flat.

    A process that was not there from the warm-up to the ``end`` is not flat: it has died, or taken another's place.
    """
    first = next((k for k, second in enumerate(each.seconds) if second >= warm_up), len(each.seconds))
    seconds = each.seconds[first:]
    if len(seconds) < 3 or each.seconds[0] > max(warm_up, MISSED_S) or each.seconds[-1] < end - MISSED_S:
        return {name: {"first": None, "last": None, "rise": None, "flat": False} for name in MEASURES}
    most = {name: TOLERANCE.get(name, math.inf) for name in MEASURES}
    verdict = {}
    for column, name in enumerate(MEASURES):
        values = [sample[column] for sample in each.samples[first:]]
        rise = slope(seconds, values) * (seconds[-1] - seconds[0])
        verdict[name] = {"first": values[0], "last": values[-1], "rise": rise, "flat": rise <= most[name]}
    return verdict


def slope(x: list[float], y: list[float]) -> float:
    """The median of the slopes between all pairs of points (Theil 1950, Sen 1968): single outliers don't move it."""
    return statistics.median(
        (y[k] - y[i]) / (x[k] - x[i]) for i, k in itertools.combinations(range(len(x)), 2) if x[k] > x[i]
    )


# ------------------------------------------------------------------------------------------------------------- reports


def report(
    judged: dict[str, dict[str, dict[str, Any]]],
    speeds: list[tuple[float, float]],
    done: dict[str, int],
    ending: dict[str, Any],
    warm_up: float,
    flat: bool,
) -> Iterator[str]:
    """The table and the verdict."""
    heads = [f"{name.replace('_', ', ').replace('mib', 'MiB')}" for name in MEASURES]
    rows = [["process", *itertools.chain(*([head, "rise"] for head in heads)), "flat"]]
    for process, measures in sorted(judged.items()):
        cells = itertools.chain(*([figure(each["last"]), figure(each["rise"], "+")] for each in measures.values()))
        rows.append([process, *cells, "yes" if all(each["flat"] for each in measures.values()) else "NO"])
    yield table(rows)
    yield ""
    yield ", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in done.items())
    half = len(speeds) // 2
    early, late = (statistics.median(speed for _, speed in part) for part in (speeds[:half], speeds[half:]))
    yield f"steps/s: {number(early)} in the first half, {number(late)} in the second (not judged)"
    ended = f"asked to end, it did after {ending['seconds']:.1f} s with status {ending['status']}"
    yield f"{ended}, and left behind {', '.join(ending['left']) or 'nothing'}"
    limits = f"{TOLERANCE['rss_mib']:g} MiB of RSS, {TOLERANCE['handles']:g} handles or threads"
    verdict = "flat: no process rose" if flat else "NOT flat: a process rose"
    yield f"{verdict} by more than {limits} over the time after the warm-up ({warm_up:.0f} s)"


def figure(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.1f}"


def rows_of(each: Watched) -> list[list[float]]:
    return thinned([[round(s), *(round(v, 1) for v in values)] for s, values in zip(each.seconds, each.samples)])


def thinned(rows: list[list[float]]) -> list[list[float]]:
    """At most MOST_SAMPLES of ``rows``, evenly, with the last."""
    stride = -(-len(rows) // MOST_SAMPLES)
    return rows[:: -stride or None][::-1] if rows else []


if __name__ == "__main__":
    sys.exit(run_main(main))
