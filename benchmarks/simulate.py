#!/usr/bin/env python3
"""A model of the system, to ask about machines that you don't have: how fast, with which layout, and what binds?

    python benchmarks/simulate.py measure      # time each part alone on this machine: a few minutes
    python benchmarks/simulate.py validate     # predict short real runs, make them, print the error: a few minutes
    python benchmarks/simulate.py plan         # layouts for 1,000 and 10,000 replicas, from the measured times
    python benchmarks/simulate.py model        # the barrier alone, in closed form: no measurement needed

`plan --help` and so on say what each takes. README.md beside this file says what the model knows and what it doesn't.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import math
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from barrier import bounds, exact_interval, expected_interval
from discrete_events import Gamma, Setup, Times, simulate
from facts import chosen, circumstances, number, run_main, save_json, table
from plan_report import Case, TimesOf, name_of, plan_table, planned, plot
from planner import PARTS, Site
from recorded_times import RECORD, Exchange, load, times
from workloads import FIXED, NAMES, workload

from htsrl import envs
from htsrl.config import AnyConfig
from htsrl.errors import ConfigError
from htsrl.resolve import available_cores, layout_for, resolve

RESULTS = Path(__file__).with_name("results")
SCHEDULES = ("hts", "sync")
SLEEPING = "sleep-2-1-64"
"""Measured for all workloads that sleep: what surrounds the sleep."""
CASES = (
    ("sleep-10-1-16", "hts", 8),
    ("sleep-10-1-16", "hts", 128),
    ("sleep-10-1-16", "sync", 16),
    ("sleep-10-16-64", "hts", 64),
    ("sleep-2-16-16", "hts", 128),
    ("sleep-2-16-16", "sync", 128),
    ("sleep-2-1-64", "hts", 8),
    ("sleep-2-1-64", "hts", 128),
    ("sleep-2-1-64", "sync", 128),
    ("cartpole", "hts", 128),
    ("cartpole", "sync", 128),
    ("pong", "hts", 64),
    ("pong", "sync", 64),
    ("football", "hts", 32),
    ("football", "sync", 32),
)
"""Runs that validate the model: workload, schedule, alpha."""
MODEL_TURNS = 100_000
"""Simulated for each line of the model's table: a second or so."""
SWEPT = "1,2,4,8,16,32,64,128,256"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{model,measure,validate,plan}")
    for add in (add_model, add_measure, add_validate, add_plan):
        add(commands)
    given = parser.parse_args()
    return given.body(given)


def command(commands: Any, name: str, body: Any, summary: str) -> argparse.ArgumentParser:
    """A subcommand; its help begins with the docstring of ``body``."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=inspect.cleandoc(body.__doc__),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(body=body)
    return parser


# ------------------------------------------------------------------------------------------------------------ the model


def add_model(commands: Any) -> None:
    parser = command(commands, "model", model, "the barrier in closed form")
    parser.add_argument("--replicas", default="16,64,1000", metavar="N,N", help="replicas (default: 16,64,1000)")
    parser.add_argument("--alpha", default="1,4,16,64,128", metavar="T,T", help="steps between two barriers")
    parser.add_argument("--mean-ms", type=float, default=1.0, metavar="MS", help="mean of a step (default: 1)")
    parser.add_argument(
        "--shape", type=float, default=1.0, metavar="K", help="its Gamma shape (default: 1, exponential)"
    )
    parser.add_argument(
        "--inference-ms", type=float, default=0.0, metavar="MS", help="waiting for each answer (default: 0)"
    )


def model(given: argparse.Namespace) -> int:
    """What one barrier costs: n replicas make alpha steps each, and the slowest is waited for.

    Every replica has an executor and every process a core of its own; the learner is free. Columns: the mean interval
    by the closed form, exactly (by integration) and simulated; the closed form's error; steps per second; and the share
    of the time in which a replica steps.
    """
    if not min(given.mean_ms, given.shape) > 0 or not given.inference_ms >= 0:
        raise ConfigError("--mean-ms and --shape must be greater than 0, --inference-ms at least 0")
    mean_s, wait_s = given.mean_ms / 1000, given.inference_ms / 1000
    rows = [["replicas, alpha", "closed form ms", "exact ms", "error", "simulated ms", "steps/s", "not waiting"]]
    for n in whole_numbers(given.replicas, "--replicas"):
        for alpha in whole_numbers(given.alpha, "--alpha"):
            closed = expected_interval(n, alpha, 1 / mean_s, given.shape)
            exact = exact_interval(n, alpha, 1 / mean_s, given.shape)
            events = Times(Gamma(mean_s, given.shape), turn_s=wait_s)
            played = simulate(
                Setup(n, alpha, n), events, turns=MODEL_TURNS, intervals=max(MODEL_TURNS // (n * alpha), 2)
            )
            whole = closed + alpha * wait_s
            rows.append(
                [
                    f"{n:,} x {alpha}",
                    *(number(1000 * value, 4) for value in (whole, exact + alpha * wait_s)),
                    percent(closed / exact - 1),
                    number(1000 * played.interval_s, 4),
                    number(n * alpha / whole, 4),
                    f"{100 * alpha * mean_s / whole:.0f}%",
                ]
            )
    print(table(rows))
    return 0


# ------------------------------------------------------------------------------------------------------------- measure


def add_measure(commands: Any) -> None:
    parser = command(commands, "measure", measure, "time each part alone on this machine")
    known = ", ".join((*FIXED, "sleep"))
    parser.add_argument("--workload", default="cartpole,pong,football,sleep", metavar="W,W", help=f"{known}")
    parser.add_argument("--seconds", type=float, default=3.0, metavar="S", help="for each figure, about (default: 3)")
    parser.add_argument("--json", type=Path, default=RECORD, metavar="FILE", help="where to keep the times")


def measure(given: argparse.Namespace) -> int:
    """Time steps, inference and learning, each by itself, and keep their distributions.

    The real executor and actor are timed in processes of their own, turn by turn, by their CPU clock, while the other
    cores do the same workload's work: neighbours cost time. `sleep` stands for every workload that sleeps.
    """
    from service_times import measured_messages, measured_workload

    if not given.seconds > 0:
        raise ConfigError("--seconds must be greater than 0")
    names = chosen(given.workload, (*FIXED, "sleep"), "workload to measure")
    workloads = {name: workload(SLEEPING if name == "sleep" else name) for name in names}
    for each in workloads.values():
        config = each.config()
        envs.describe(config.env, config.environment)  # refused before anything is measured
    started = time.perf_counter()
    messages = measured_messages(given.seconds)
    print(
        "messages, µs: " + ", ".join(f"{name[:-2]} {number(1e6 * value)}" for name, value in messages.items()),
        flush=True,
    )
    record: dict[str, Any] = {**circumstances(), "seconds": given.seconds, "messages": messages, "workloads": {}}
    for name, each in workloads.items():
        record["workloads"][name] = found = measured_workload(each, messages, given.seconds)
        print(f"{name}: {measured_line(found)}", flush=True)
        save_json(given.json, record)
    print(f"{time.perf_counter() - started:.0f} s; kept in {given.json}")
    return 0


def measured_line(found: dict[str, Any]) -> str:
    """The main figures of one workload in one line."""
    steps, inference = found["steps"], found["inference"]
    learning = ", ".join(
        f"{number(1e6 * each['row_s'])} with {threads} thread{'s' * (threads != '1')}"
        for threads, each in found["learning"].items()
    )
    return (
        f"step {number(1e6 * steps['mean_s'])} µs (Gamma shape {number(steps['shape'])}; "
        f"{number(steps['shape_in_sums'])} in sums of an interval), batch {number(1e6 * inference['call_s'])} + "
        f"{number(1e6 * inference['row_s'])} µs a row, update {learning} µs a row, "
        f"company {percent(found['slower_in_company'] - 1)}"
    )


# ------------------------------------------------------------------------------------------------------------ validate


def add_validate(commands: Any) -> None:
    parser = command(commands, "validate", validate, "predict short real runs, and make them")
    parser.add_argument("--workload", metavar="W,W", help=f"instead of the built-in list of runs: {', '.join(NAMES)}")
    parser.add_argument("--schedules", default="hts,sync", metavar="S,S", help="with --workload: hts, sync")
    parser.add_argument("--alpha", default="128", metavar="T,T", help="with --workload: steps between two barriers")
    parser.add_argument("--seconds", type=float, default=4.0, metavar="S", help="a run's window (default: 4)")
    parser.add_argument("--times", type=Path, default=RECORD, metavar="FILE", help="what `measure` kept")
    parser.add_argument(
        "--json", type=Path, default=RESULTS / "simulate.json", metavar="FILE", help="where to keep the figures"
    )


def validate(given: argparse.Namespace) -> int:
    """Predict the speed of short real runs on this machine, by the simulation and by the closed form; then make them.

    The error is (predicted - measured) / measured. Measure the times on the same machine first.
    """
    from throughput import measure as measured
    from throughput import ours

    if not given.seconds > 0:
        raise ConfigError("--seconds must be greater than 0")
    cases = list(CASES)
    if given.workload is not None:
        schedules = chosen(given.schedules, SCHEDULES, "schedule")
        alphas = whole_numbers(given.alpha, "--alpha")
        names = [name for name in given.workload.split(",") if name]
        cases = [(name, schedule, alpha) for name in names for alpha in alphas for schedule in schedules]
    record = load(given.times)
    predictions = [predicted(record, *case) for case in cases]
    kept: dict[str, Any] = {**circumstances(), "seconds": given.seconds, "times": provenance(record), "runs": []}
    head = [
        "workload, schedule, alpha",
        "measured",
        "simulated",
        "error",
        "closed form",
        "error",
        "at barrier",
        "simulated",
    ]
    lines = [head]
    for (name, schedule, alpha), guess in zip(cases, predictions):
        (contender,) = ours(workload(name), [schedule], {"sync_interval": alpha})
        figure = measured(contender, given.seconds)
        speed = figure["steps_per_second"]
        errors = {key: guess[key]["steps_per_second"] / speed - 1 for key in ("simulated", "closed_form")}
        kept["runs"].append(
            {"workload": name, "schedule": schedule, "alpha": alpha, "measured": figure, **guess, "errors": errors}
        )
        lines.append(
            [
                f"{name}, {schedule}, {alpha}",
                number(speed, 4),
                number(guess["simulated"]["steps_per_second"], 4),
                percent(errors["simulated"]),
                number(guess["closed_form"]["steps_per_second"], 4),
                percent(errors["closed_form"]),
                f"{100 * figure['barrier_share']:.0f}%",
                f"{100 * (1 - guess['simulated']['learner_busy']):.0f}%",
            ]
        )
        noise = f", others used {figure['other_cores']:.2f} cores" if figure["other_cores"] > 0.1 else ""
        print(f"  {lines[-1][0]}: {lines[-1][1]} steps/s, simulated {percent(errors['simulated'])}{noise}", flush=True)
        kept["mean_error"] = {key: float(np.mean([abs(run["errors"][key]) for run in kept["runs"]])) for key in errors}
        save_json(given.json, kept)
    print(table(lines))
    mean = kept["mean_error"]
    print(f"mean error: simulated {100 * mean['simulated']:.0f}%, closed form {100 * mean['closed_form']:.0f}%")
    return 0


def predicted(record: dict[str, Any], name: str, schedule: str, alpha: int) -> dict[str, Any]:
    """What simulation and closed form expect of a run of this system on this machine.

    Raises:
        ConfigError: there is no such workload, or its times were not measured.
    """
    setup, threads = setup_of(workload(name).config(schedule=schedule, sync_interval=alpha))
    every = times(record, name, threads)
    outcome, closed = simulate(setup, every), bounds(setup, every)
    return {
        "setup": dataclasses.asdict(setup) | {"learner_threads": threads},
        "simulated": dataclasses.asdict(outcome),
        "closed_form": {"steps_per_second": setup.rows / closed.interval_s, **dataclasses.asdict(closed)},
    }


def setup_of(config: AnyConfig) -> tuple[Setup, int]:
    """The layout that a run of ``config`` takes on this machine, and its learner's threads."""
    spec = envs.describe(config.env, config.environment)
    runtime = resolve(config, spec).runtime
    layout = layout_for(config, spec)
    assert runtime.schedule != "async"
    return Setup(
        replicas=layout.num_envs,
        alpha=runtime.sync_interval,
        executors=layout.num_executors,
        actors=layout.num_actors,
        group=layout.envs_per_group,
        cores=available_cores(),
        schedule=runtime.schedule,
    ), int(runtime.learner_threads)


# ---------------------------------------------------------------------------------------------------------------- plan


def add_plan(commands: Any) -> None:
    parser = command(commands, "plan", plan, "layouts for many replicas")
    parser.add_argument(
        "--workload", default="football,pong", metavar="W,W", help="what they play (default: football,pong)"
    )
    parser.add_argument("--replicas", default="1000,10000", metavar="N,N", help="replicas in all (default: 1000,10000)")
    parser.add_argument("--alpha", default=SWEPT, metavar="T,T", help=f"steps between two barriers (default: {SWEPT})")
    parser.add_argument("--hosts", type=int, default=16, metavar="H", help="machines (default: 16)")
    parser.add_argument("--cores-per-host", type=int, default=64, metavar="C", help="cores of each (default: 64)")
    parser.add_argument(
        "--sites",
        default="hosts,unlimited",
        metavar="S,S",
        help="hosts: those of --hosts; unlimited: as many cores as processes (default: both)",
    )
    parser.add_argument(
        "--max-ranks", type=int, default=1024, metavar="R", help="learner ranks at most (default: 1024)"
    )
    parser.add_argument("--network-gbit", type=float, default=25.0, metavar="G", help="between ranks (default: 25)")
    parser.add_argument(
        "--network-us", type=float, default=50.0, metavar="US", help="latency of a message (default: 50)"
    )
    parser.add_argument(
        "--faster",
        default="",
        metavar="P=X,P=X",
        help=f"suppose parts X times as fast, say learning=30: {', '.join(PARTS)}",
    )
    parser.add_argument(
        "--within", type=float, default=0.05, metavar="F", help="share of the best speed given up (default: 0.05)"
    )
    parser.add_argument(
        "--turns", type=int, default=20_000, metavar="N", help="simulated turns of each layout (default: 20,000)"
    )
    parser.add_argument("--times", type=Path, default=RECORD, metavar="FILE", help="what `measure` kept")
    parser.add_argument(
        "--json", type=Path, default=RESULTS / "plan.json", metavar="FILE", help="where to keep the figures"
    )
    parser.add_argument("--plot", type=Path, default=RESULTS / "plan.png", metavar="FILE", help="the picture")


def plan(given: argparse.Namespace) -> int:
    """Which alpha, and how many executors, actors and learner ranks, for a number of replicas?

    Layouts are simulated from the times that `measure` kept. Recommended is the smallest (alpha first, then ranks, then
    processes) whose speed is within --within of the best of all. What binds is the part that would gain most if it were
    twice as fast; `cores` where they are busy for more than 90% of the time.
    """
    if not min(given.hosts, given.cores_per_host, given.max_ranks, given.turns) >= 1:
        raise ConfigError("--hosts, --cores-per-host, --max-ranks and --turns must be at least 1")
    if not given.network_gbit > 0 or not given.network_us >= 0 or not 0 <= given.within < 1:
        raise ConfigError(
            "--network-gbit must be greater than 0, --network-us at least 0 and --within from 0 to below 1"
        )
    if given.max_ranks < given.hosts:
        raise ConfigError(f"--max-ranks must be at least --hosts ({given.hosts}): every host has a rank")
    if find_spec("matplotlib") is None:
        raise ConfigError("plan draws a picture with matplotlib: run `pip install 'htsrl[plot]'`")
    replicas, alphas = whole_numbers(given.replicas, "--replicas"), whole_numbers(given.alpha, "--alpha")
    if given.hosts > min(replicas):
        raise ConfigError(f"--hosts must be at most --replicas, which is {min(replicas)}: no host is without a replica")
    sites = {
        "hosts": Site(given.hosts, given.cores_per_host, given.max_ranks),
        "unlimited": Site(1, math.inf, given.max_ranks),
    }
    record, quicker = load(given.times), factors(given.faster)
    network = Exchange(given.network_us / 1e6, given.network_gbit * 1e9 / 8)
    cases = [
        Case(name, n, sites[site], TimesOf(record, name, network, quicker))
        for name in given.workload.split(",")
        for site in chosen(given.sites, tuple(sites), "site")
        for n in replicas
    ]
    kept: dict[str, Any] = {
        **circumstances(),
        "times": provenance(record),
        "faster": quicker,
        "within": given.within,
        "network": dataclasses.asdict(network),
        "plans": [],
    }
    for case in cases:
        kept["plans"].append(found := planned(case, alphas, given.within, given.turns))
        print(f"  {name_of(found)}: {number(found['best']['steps_per_second'])} steps/s", flush=True)
        save_json(given.json, kept)
    print(plan_table(kept["plans"]))
    plot(kept["plans"], given.plot)
    return 0


def factors(text: str) -> dict[str, float]:
    """``learning=30,inference=10`` as a mapping.

    Raises:
        ConfigError: no such part, or no number greater than 0.
    """
    found = {}
    for pair in (each for each in text.split(",") if each):
        part, _, factor = pair.partition("=")
        try:
            found[part] = float(factor)
        except ValueError:
            found[part] = 0.0
        if part not in PARTS or not 0 < found[part] < math.inf:
            raise ConfigError(f"--faster wants PART=FACTOR with a part of {', '.join(PARTS)}, got {pair}")
    return found


# -------------------------------------------------------------------------------------------------------------- common


def whole_numbers(text: str, flag: str) -> list[int]:
    """The numbers in ``text``, in order.

    Raises:
        ConfigError: not whole numbers from 1 on.
    """
    words = text.split(",")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"{flag} must be whole numbers greater than 0 with commas between them, got {text!r}")
    return sorted({int(word) for word in words})


def percent(share: float) -> str:
    """A signed share."""
    return f"{100 * share:+.1f}%"


def provenance(record: dict[str, Any]) -> dict[str, Any]:
    """Where measured times come from."""
    return {name: record.get(name) for name in ("command", "date", "commit", "machine", "versions")}


if __name__ == "__main__":
    sys.exit(run_main(main))
