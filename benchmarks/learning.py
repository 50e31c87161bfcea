#!/usr/bin/env python3
"""Learning curves: trains the recorded tasks under each schedule and seed, evaluates the end, keeps the curves.

    python benchmarks/learning.py                                      # every task
    python benchmarks/learning.py --task cartpole-ppo --seeds 0 --schedules hts
    python benchmarks/learning.py --task cartpole-fast-learner cartpole-slow-learner --schedules hts,sync,async

Each run is ``htsrl train`` and then ``htsrl eval``. A finished run is written into ``learning-TASK.json`` at once and
not done again, so the script may be interrupted and started anew. Exit status: 0 all thresholds reached, 1 not.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from facts import ROOT, chosen, circumstances, number, run_main, save_json, table
from workloads import flags

from htsrl import envs
from htsrl.config import FAMILIES
from htsrl.errors import ConfigError, RunFailed
from htsrl.logfiles import read_json_lines

SCHEDULES = ("hts", "sync", "async")
CURVE_COLUMNS = ("steps", "return", "score", "seconds")
MOST_POINTS = 200
RECENT = 100
"""Episodes in the running mean that a curve shows; before so many have ended, it reaches nothing."""


@dataclass(frozen=True)
class Task:
    """One line of the table of tasks."""

    env: str
    algo: str
    steps: int
    measure: str
    """'return' or 'score'."""
    threshold: float | None
    """What the final evaluation's mean must reach; None where schedules are compared, whatever comes out."""
    milestones: tuple[float, ...]
    """Levels of the running mean over training episodes whose first crossing is compared between schedules."""
    stochastic: bool
    """Whether evaluation samples actions: where the paper or the family's custom does."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What differs from the preset."""
    async_settings: Mapping[str, Any] = field(default_factory=dict)
    """What differs under schedule async, beside that."""
    async_algo: str | None = None
    """Another algorithm under schedule async, with its own preset."""
    async_steps: int | None = None
    """Another budget under schedule async, where schedules are compared after equal times."""
    pause_ms: float = 0.0
    """Of the learner after every update, see slow_learner.py."""
    schedules: tuple[str, ...] = SCHEDULES
    """Those that its settings are for."""
    most: float | None = None
    """What it must not exceed, where nothing can be learned: so that what another task is solved by is known."""


def memory(threshold: float, most: float | None = None, **settings: Any) -> Task:
    """Remember which of two cues was shown eight steps ago. Who guesses is right half of the time, ± 0.05."""
    sizes = {"num_actions": 2, "memory_steps": 8, "hidden_sizes": (32,), "sync_interval": 64, "learning_rate": 3e-3}
    settings = sizes | settings
    return Task("synthetic:memory", "ppo", 100_000, "return", threshold, (0.8, 0.95), False, settings, most=most)


IMPORTANCE = {"delay": "importance"}
BF16 = {"precision": "bf16"}
CARTPOLE_PPO = Task("CartPole-v1", "ppo", 200_000, "return", 475.0, (195.0, 400.0, 475.0), False)
FOOTBALL_PPO = Task("gfootball:academy_empty_goal_close", "ppo", 200_000, "score", 0.9, (0.4, 0.8, 0.9), True)
TASKS = {
    "cartpole-ppo": CARTPOLE_PPO,
    "cartpole-batchppo": Task("CartPole-v1", "batchppo", 400_000, "return", 475.0, (195.0, 400.0, 475.0), False),
    "cartpole-a2c": Task("CartPole-v1", "a2c", 400_000, "return", 475.0, (195.0, 400.0, 475.0), False),
    "cartpole-impala": Task("CartPole-v1", "impala", 400_000, "return", 475.0, (195.0, 400.0, 475.0), False),
    "cartpole-acktr": Task("CartPole-v1", "acktr", 400_000, "return", 475.0, (195.0, 400.0, 475.0), False),
    "football-empty-goal": FOOTBALL_PPO,
    "cartpole-ppo-importance": replace(CARTPOLE_PPO, settings=IMPORTANCE, schedules=("hts",)),
    "football-empty-goal-importance": replace(FOOTBALL_PPO, settings=IMPORTANCE, schedules=("hts",)),
    "football-empty-goal-bf16": replace(FOOTBALL_PPO, settings=BF16, schedules=("hts",)),
    "memory-ppo-lstm": memory(0.95, recurrent="lstm", recurrent_size=32),
    "memory-ppo-gru": memory(0.95, recurrent="gru", recurrent_size=32),
    "memory-ppo": memory(0.35, most=0.65),
    "pendulum-ppo": Task("Pendulum-v1", "ppo", 300_000, "return", -250.0, (-1000.0, -500.0, -250.0), False),
    "halfcheetah-ppo": Task("HalfCheetah-v5", "ppo", 1_000_000, "return", 1500.0, (500.0, 1000.0, 1500.0), False),
    "halfcheetah-batchppo": Task(
        "HalfCheetah-v5", "batchppo", 1_000_000, "return", 2000.0, (500.0, 1000.0, 2000.0), False
    ),
    "hopper-batchppo": Task("Hopper-v5", "batchppo", 1_000_000, "return", 1500.0, (500.0, 1000.0, 1500.0), False),
    # What users would pick instead: V-trace without a barrier, with as much time. It takes more steps in it.
    "football-equal-time": replace(
        FOOTBALL_PPO, threshold=None, async_algo="impala", async_steps=400_000, schedules=("hts", "async")
    ),
    # The paper's central claim: what stale policies cost, and that it grows with the time that learning takes. Systems
    # without a barrier let trajectories wait; here sixteen for each replica.
    "cartpole-fast-learner": Task(
        "CartPole-v1", "a2c", 400_000, "return", None, (195.0, 475.0), False, async_settings={"async_slots": 16}
    ),
    "cartpole-slow-learner": Task(
        "CartPole-v1",
        "a2c",
        400_000,
        "return",
        None,
        (195.0, 475.0),
        False,
        async_settings={"async_slots": 16},
        pause_ms=10.0,
    ),
    "pong-ppo": Task("atari:Pong", "ppo", 1_500_000, "return", 15.0, (-15.0, 0.0, 15.0), True, BF16),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", nargs="+", metavar="NAME", help=f"of {', '.join(TASKS)} (default: all)")
    parser.add_argument("--seeds", default="0,1,2", metavar="S,S", help="seeds (default: 0,1,2)")
    parser.add_argument(
        "--schedules", default="hts,sync", metavar="S,S", help="of hts, sync, async (default: hts,sync)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR", help="for results")
    parser.add_argument("--runs", type=Path, default=Path("runs") / "learning", metavar="DIR", help="for run folders")
    parser.add_argument("--steps", type=int, metavar="N", help="another budget than the task's, for a try")
    parser.add_argument("--episodes", type=int, default=100, metavar="N", help="of the final evaluation (default: 100)")
    parser.add_argument("--shared", action="store_true", help="other programs use the machine: draw no wall-clock time")
    parser.add_argument("--again", action="store_true", help="also do runs that the result file already holds")
    given = parser.parse_args()

    schedules = chosen(given.schedules, SCHEDULES, "schedule")
    fitting = [name for name, task in TASKS.items() if set(schedules) & set(task.schedules)]
    names = chosen(",".join(given.task), tuple(TASKS), "task") if given.task else fitting
    try:
        seeds = sorted({int(seed) for seed in given.seeds.split(",")})
    except ValueError:
        raise ConfigError(f"--seeds must be whole numbers with commas between them, got {given.seeds}") from None
    for option, value in (("--steps", given.steps), ("--episodes", given.episodes), ("--seeds", min(seeds) + 1)):
        if value is not None and value < 1:
            raise ConfigError(f"{option} must not be less than {0 if option == '--seeds' else 1}")
    for name in names:
        if name not in fitting:
            raise ConfigError(f"{name} is a task for schedule {', '.join(TASKS[name].schedules)} alone")
        env = TASKS[name].env
        envs.describe(env, FAMILIES[envs.family_of(env)]())  # refused before the first run, not after hours

    failed = False
    for name in names:
        path = given.out / f"learning-{name}.json"
        record = opened(path, name, given.steps or TASKS[name].steps, given.episodes)
        for seed in seeds:
            # Schedules alternate, so that a machine that drifts treats them alike
            for schedule in (each for each in schedules if each in TASKS[name].schedules):
                done = [run for run in record["runs"] if (run["seed"], run["schedule"]) == (seed, schedule)]
                if done and not given.again:
                    continue
                run = trained(TASKS[name], name, seed, schedule, record, given.runs) | {"shared_machine": given.shared}
                others = [each for each in record["runs"] if each not in done]
                record["runs"] = sorted([*others, run], key=lambda each: (each["seed"], each["schedule"]))
                record["comparison"] = comparison(record)
                save_json(path, record)
                plot(record, path.with_suffix(".png"))
        print(f"\n{summary(record)}\n\n{path}", flush=True)
        failed |= not all(run["passed"] for run in record["runs"])
    return int(failed)


def opened(path: Path, name: str, steps: int, episodes: int) -> dict[str, Any]:
    """The task's record: the one in ``path``, or a new one.

    Raises:
        ConfigError: ``path`` holds runs of another budget, which can't stand in one table with these.
    """
    task = TASKS[name]
    fresh = {
        "task": name,
        "env": task.env,
        "algo": task.algo,
        "steps": steps,
        "measure": task.measure,
        "threshold": task.threshold,
        "most": task.most,
        "milestones": list(task.milestones),
        "pause_ms": task.pause_ms,
        "evaluation": {"episodes": episodes, "stochastic": task.stochastic},
        "curve_columns": list(CURVE_COLUMNS),
        "curve": f"mean of the last {RECENT} training episodes, sampled actions",
        "runs": [],
    }
    if not path.exists():
        return fresh
    record = json.loads(path.read_text())
    for key in ("steps", "evaluation"):
        if record[key] != fresh[key]:
            raise ConfigError(f"{path} holds runs with {key} = {record[key]}, not {fresh[key]}; name another --out")
    return record


def trained(task: Task, name: str, seed: int, schedule: str, record: dict[str, Any], runs: Path) -> dict[str, Any]:
    """Train and evaluate one run; returns its part of the record."""
    run_dir = unused(runs / f"{name}-{schedule}-{seed}")
    algo, steps = algo_of(task, schedule), record["steps"]
    if schedule == "async" and task.async_steps and steps == task.steps:
        steps = task.async_steps
    train = ["train", "--algo", algo, "--env", task.env, "--total-steps", str(steps)]
    train += ["--seed", str(seed), "--schedule", schedule, "--run-dir", str(run_dir), "--no-tensorboard"]
    train += flags({**task.settings, **(task.async_settings if schedule == "async" else {})})
    evaluate = ["eval", str(run_dir), "--episodes", str(record["evaluation"]["episodes"]), "--json"]
    evaluate += ["--stochastic"] if task.stochastic else []
    where = circumstances()
    htsrl(train, pause_ms=task.pause_ms)
    evaluation = json.loads(htsrl(evaluate, capture=True))
    result = json.loads((run_dir / "result.json").read_text())
    curve = curve_of(run_dir)
    config = tomllib.loads((run_dir / "config.toml").read_text())
    config.pop("output")
    value = evaluation[f"{task.measure}_mean"]
    reached = {f"{level:g}": steps_to_reach(curve, task.measure, level) for level in task.milestones}
    return {
        "seed": seed,
        "schedule": schedule,
        "algo": algo,
        "value": value,
        "passed": passes(task, value),
        "steps_to_reach": reached,
        "curve_mean": curve_mean(curve, task.measure),
        "evaluation": evaluation,
        "result": {key: result[key] for key in result if key not in ("checkpoint", "evaluation")},
        "commands": [
            " ".join([*program(pause_ms), *words]) for pause_ms, words in ((task.pause_ms, train), (0, evaluate))
        ],
        **where,
        "config": config,
        "curve": [row[: len(CURVE_COLUMNS)] for row in thinned(curve)],
    }


def algo_of(task: Task, schedule: str) -> str:
    """The algorithm that ``task`` runs under ``schedule``."""
    return (task.async_algo or task.algo) if schedule == "async" else task.algo


def program(pause_ms: float) -> list[str]:
    """The words in front of a command's own."""
    return ["python", "benchmarks/slow_learner.py", f"{pause_ms:g}"] if pause_ms else ["htsrl"]


def passes(task: Task, value: float | None) -> bool:
    """Whether the final evaluation's mean ``value`` is where it should be."""
    if task.threshold is None:
        return True
    return value is not None and task.threshold <= value <= (math.inf if task.most is None else task.most)


def htsrl(arguments: list[str], capture: bool = False, pause_ms: float = 0.0) -> str:
    """Run the command line, with a learner that pauses so long; returns what it printed, if captured.

    Raises:
        RunFailed: it ended with an error, which it has printed itself.
    """
    print(f"\n$ {' '.join([*program(pause_ms), *arguments])}", flush=True)
    module = [str(Path(__file__).with_name("slow_learner.py")), str(pause_ms)] if pause_ms else ["-m", "htsrl"]
    command = [sys.executable, *module, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE if capture else None, text=True)
    if done.returncode == 130:
        raise KeyboardInterrupt
    if done.returncode:
        raise RunFailed(f"`htsrl {arguments[0]}` ended with status {done.returncode}")
    return done.stdout or ""


def unused(folder: Path) -> Path:
    """``folder``, or it with a number behind it where that exists."""
    candidates = (folder.with_name(f"{folder.name}-{k}" if k > 1 else folder.name) for k in range(1, 10_000))
    return next(each for each in candidates if not each.exists())


# -------------------------------------------------------------------------------------------------------------- curves


def curve_of(run_dir: Path) -> list[list[float | None]]:
    """[intervals][steps, return, score, seconds, episodes] of a run; None for what is not known yet."""
    keys = ("steps", "episode_return_mean", "score_mean", "seconds", "episodes")
    return [[each.get(key) for key in keys] for each in read_json_lines(run_dir / "metrics.jsonl")]


def steps_to_reach(curve: list[list[float | None]], measure: str, level: float) -> float | None:
    """Steps at which the running mean of ``measure`` first was at least ``level``; None if never."""
    column = CURVE_COLUMNS.index(measure)
    for row in curve:
        value, episodes = row[column], row[-1]
        if value is not None and episodes is not None and episodes >= RECENT and value >= level:
            return row[0]
    return None


def curve_mean(curve: list[list[float | None]], measure: str) -> float | None:
    """The running mean averaged over the run's steps: the area under the curve, in the measure's own unit."""
    column = CURVE_COLUMNS.index(measure)
    total = weight = before = 0.0
    for row in curve:
        steps, value = row[0], row[column]
        assert steps is not None
        if value is not None:
            total += value * (steps - before)
            weight += steps - before
        before = steps
    return total / weight if weight else None


def after(seconds: float, run: dict[str, Any], measure: str) -> float | None:
    """The running mean of ``measure`` when ``run`` had lasted for ``seconds``; None before there is one."""
    column, clock = CURVE_COLUMNS.index(measure), CURVE_COLUMNS.index("seconds")
    values = [row[column] for row in run["curve"] if row[clock] <= seconds]
    return values[-1] if values else None


def thinned(curve: list[list[float | None]]) -> list[list[float | None]]:
    """At most MOST_POINTS rows of ``curve``, the last among them, evenly spread."""
    stride = math.ceil(len(curve) / MOST_POINTS)
    rows = curve[::-1][::stride][::-1] if stride else []
    return [[None if value is None else round(value, 4) for value in row] for row in rows]


# ------------------------------------------------------------------------------------------------------------- reports


def comparison(record: dict[str, Any]) -> dict[str, Any]:
    """Means over each schedule's seeds; those of steps to a milestone are None where one run never reached it.

    Where the machine did nothing else, also the running means when the shortest of all runs ended.
    """
    compared = {}
    shortest = None
    if not any(run["shared_machine"] for run in record["runs"]):
        shortest = min(run["result"]["seconds"] for run in record["runs"])
    for schedule in SCHEDULES:
        runs = [run for run in record["runs"] if run["schedule"] == schedule]
        if not runs:
            continue
        compared[schedule] = {
            "seeds": [run["seed"] for run in runs],
            "value": mean([run["value"] for run in runs]),
            "curve_mean": mean([run["curve_mean"] for run in runs]),
            "steps_per_second": mean([run["result"]["steps_per_second"] for run in runs]),
            "steps_to_reach": {
                level: mean([run["steps_to_reach"][level] for run in runs]) for level in runs[0]["steps_to_reach"]
            },
        }
        if shortest is not None:
            reached = mean([after(shortest, run, record["measure"]) for run in runs])
            compared[schedule]["after_equal_time"] = {"seconds": shortest, "curve": reached}
    return compared


def mean(values: list[float | None]) -> float | None:
    """The mean; None where one of ``values`` is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def summary(record: dict[str, Any]) -> str:
    """The task's runs as a table, and the schedules compared."""
    measure, levels, aim = record["measure"], [f"{level:g}" for level in record["milestones"]], record["threshold"]
    most = record.get("most")
    word = "at least" if most is None else "within"
    bound = "-" if aim is None else f"{aim:g}" if most is None else f"{aim:g} to {most:g}"
    head = ["run", "seed", measure, word, "", "curve mean", *(f"steps to {level}" for level in levels), "steps/s"]
    rows = [head]
    equal = [means["after_equal_time"] for means in record["comparison"].values() if "after_equal_time" in means]
    if equal:
        head.append(f"curve at {equal[0]['seconds']:,.0f} s")
    for run in record["runs"]:
        reached = [number(run["steps_to_reach"][level], 9) for level in levels]
        rows.append(
            [
                f"{record['task']} {name_of(run, record)}",
                str(run["seed"]),
                number(run["value"]),
                *((bound, "") if aim is None else (bound, "pass" if run["passed"] else "miss")),
                number(run["curve_mean"]),
                *(steps.partition(".")[0] for steps in reached),
                number(run["result"]["steps_per_second"]),
                *(number(after(each["seconds"], run, measure)) for each in equal[:1]),
            ]
        )
    for schedule, means in record["comparison"].items():
        reached = [number(means["steps_to_reach"][level], 9) for level in levels]
        rows.append(
            [
                f"mean of {schedule}",
                "",
                number(means["value"]),
                "",
                "",
                number(means["curve_mean"]),
                *(steps.partition(".")[0] for steps in reached),
                number(means["steps_per_second"]),
                *([number(means["after_equal_time"]["curve"])] if equal else []),
            ]
        )
    return table(rows)


def name_of(run: dict[str, Any], record: dict[str, Any]) -> str:
    """The run's schedule, and its algorithm where that isn't the task's."""
    algo = run.get("algo", record["algo"])
    return run["schedule"] if algo == record["algo"] else f"{run['schedule']} ({algo})"


def plot(record: dict[str, Any], path: Path) -> None:
    """Draw curves against steps, and against seconds where the machine did nothing else; needs matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter
    except ImportError:
        print("no plot: matplotlib is missing (`pip install 'htsrl[plot]'`)")
        return
    measure = record["measure"]
    value_column = CURVE_COLUMNS.index(measure)
    colours = dict(zip(SCHEDULES, ("tab:blue", "tab:orange", "tab:green")))
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    # Seconds compare nothing where other programs used the machine meanwhile
    units = ("steps",) if any(run["shared_machine"] for run in record["runs"]) else ("steps", "seconds")
    panels = figure.subplots(1, len(units), sharey=True, squeeze=False)[0]
    for panel, unit in zip(panels, units):
        column = CURVE_COLUMNS.index(unit)
        named = set()
        for run in record["runs"]:
            points = [row for row in run["curve"] if row[value_column] is not None]
            colour, label = colours[run["schedule"]], name_of(run, record)
            panel.plot(
                [row[column] for row in points],
                [row[value_column] for row in points],
                color=colour,
                linewidth=1.3,
                alpha=0.8,
                label=None if label in named else label,
            )
            named.add(label)
            panel.plot([run["result"][unit]], [run["value"]], "o", color=colour, markersize=5)
        for level in (record["threshold"], record.get("most")):
            if level is not None:
                panel.axhline(level, color="0.5", linewidth=0.8, linestyle="--")
        panel.set_xlabel(f"environment {unit}" if unit == "steps" else unit)
        panel.set_xlim(left=0)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].xaxis.set_major_formatter(EngFormatter(sep=""))
    panels[0].set_ylabel(f"{measure}, mean of the last {RECENT} episodes")
    panels[0].legend(frameon=False)
    count = record["evaluation"]["episodes"]
    pause = f", a learner that pauses {pause_ms:g} ms" if (pause_ms := record.get("pause_ms")) else ""
    title = f"{record['algo']} on {record['env']}{pause} (dots: {count} evaluation episodes at the end)"
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(run_main(main))
