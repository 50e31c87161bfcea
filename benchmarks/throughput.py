#!/usr/bin/env python3
"""Throughput side by side: schedules of this system and other systems, on fixed workloads, against the limit.

    python benchmarks/throughput.py --workload cartpole,pong --json throughput.json
    python benchmarks/throughput.py --workload sleep-10-1-16 --schedules hts,sync --seconds 20 --rounds 3
    python benchmarks/throughput.py --setup-peers sb3         # once; then --peers sb3

Every measurement is a run in processes of its own that is ended when its time is over. Contenders take turns, round by
round. See README.md beside this file for what the columns mean.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import peers
import psutil
from facts import chosen, circumstances, number, run_main, save_json, table
from limits import BarrierModel, Costs, barrier_model, steps_limit
from tree import Tree
from workloads import NAMES, Workload, flags, workload

from htsrl import envs
from htsrl.config import AnyConfig
from htsrl.errors import ConfigError, RunFailed
from htsrl.resolve import available_cores, resolve_device

SCHEDULES = ("hts", "sync", "async")
ROLLOUT = "rollout"
"""Beside the schedules: collecting alone, with a learner that learns nothing."""
WARM_UP_INTERVALS = 2
POLL_S = 0.02
FIRST_INTERVAL_TIMEOUT_S = 300.0
NOISY_CORES = 0.1
"""Other programs using more than this are worth a warning."""


@dataclass(frozen=True)
class Contender:
    """Something that runs a workload: a command that takes a folder and leaves lines of JSON in a file there."""

    name: str
    command: Callable[[Path], list[str]]
    progress: str
    """Name of the file: a line per interval with at least ``steps`` and ``seconds``."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="cartpole", metavar="W,W", help=", ".join(NAMES))
    parser.add_argument(
        "--schedules",
        default="hts,sync",
        metavar="S,S",
        help="of this system: hts, sync, async, rollout (no learning); or none",
    )
    parser.add_argument("--peers", default="", metavar="P,P", help=f"other systems: {', '.join(peers.PEERS)}")
    parser.add_argument("--peer-python", type=Path, metavar="DIR", help="the peer's virtual environment")
    parser.add_argument("--setup-peers", metavar="P,P", help="install other systems for --peers, and exit")
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="a measurement's window (default: 20)")
    parser.add_argument("--rounds", type=int, default=3, metavar="R", help="measurements of each (default: 3)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="another setting for this system"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to keep all figures")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="bars as a picture")
    given = parser.parse_args()

    if given.setup_peers is not None:
        for peer in chosen(given.setup_peers, tuple(peers.PEERS), "peer"):
            peers.set_up(peer)
        return 0
    if given.seconds <= 0 or given.rounds < 1:
        raise ConfigError("--seconds must be greater than 0 and --rounds at least 1")
    if given.plot and not installed("matplotlib"):
        raise ConfigError("--plot needs matplotlib: run `pip install 'htsrl[plot]'`")
    extra = dict(overrides(given.set))
    schedules = [] if given.schedules == "none" else chosen(given.schedules, (*SCHEDULES, ROLLOUT), "schedule")
    names = chosen(given.peers, tuple(peers.PEERS), "peer") if given.peers else []
    pythons = {name: peers.python_of(name, given.peer_python) for name in names}
    plan = []
    for name in given.workload.split(","):
        each = workload(name)
        for peer in names:
            peers.refuse_unfit(peer, name)
        configs = [each.config(**extra, schedule=s) for s in SCHEDULES if s in schedules] or [each.config(**extra)]
        config = configs[0]
        # Refused before anything is measured
        envs.describe(config.env, config.environment)
        resolve_device(config.runtime.device)
        plan.append((each, config, [*ours(each, schedules, extra), *others(each, pythons)]))
        if not plan[-1][2]:
            raise ConfigError("name a schedule or a peer to measure")

    record: dict[str, Any] = {**circumstances(), "seconds": given.seconds, "rounds": given.rounds, "set": extra}
    record["peers"] = {name: peers.version_of(name, python) for name, python in pythons.items()}
    record["workloads"] = {}
    print(f"{record['machine']['cpu']}, {record['machine']['cores']} cores, {record['machine']['memory_gib']} GiB")
    for each, config, contenders in plan:
        print(f"\n{each.name}: {described(each, config)}", flush=True)
        result = measured(each, config, contenders, given.seconds, given.rounds, extra)
        record["workloads"][each.name] = result
        print("\n".join(report(result, schedules)), flush=True)
        if given.json:
            save_json(given.json, record)
    if given.plot:
        plot(record, given.plot)
    return 0


def overrides(pairs: list[str]) -> Iterator[tuple[str, str]]:
    """``--set name=value`` pairs as settings.

    Raises:
        ConfigError: there is no '='.
    """
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set wants NAME=VALUE, got {pair}")
        yield name.replace("-", "_"), value


def installed(module: str) -> bool:
    """Whether ``module`` can be imported."""
    from importlib.util import find_spec

    return find_spec(module) is not None


def ours(each: Workload, schedules: list[str], extra: Mapping[str, Any]) -> list[Contender]:
    """This system under each schedule."""

    def command(schedule: str) -> Callable[[Path], list[str]]:
        settings = {**each.settings, **extra, "schedule": schedule}
        train = ["train", "--algo", each.algo, "--env", each.env, "--total-steps", str(10**12), *flags(settings)]
        quiet = ["--no-tensorboard", "--progress", "none"]
        if schedule == ROLLOUT:
            script, given = Path(__file__).with_name("rollout.py"), json.dumps(extra)
            return lambda folder: [sys.executable, str(script), each.name, str(folder / "run"), given]
        return lambda folder: [sys.executable, "-m", "htsrl", *train, *quiet, "--run-dir", str(folder / "run")]

    return [Contender(schedule, command(schedule), "run/metrics.jsonl") for schedule in schedules]


def others(each: Workload, pythons: Mapping[str, Path]) -> list[Contender]:
    """The peers; in one process, too, where the environment is light enough for that to be the better choice."""

    def command(peer: str, variant: str) -> Callable[[Path], list[str]]:
        return lambda folder: peers.command(peer, pythons[peer], variant, each.name, folder / "progress.jsonl")

    light = each.name in ("cartpole", "mujoco")
    return [
        Contender(f"{peer} ({variant})", command(peer, variant), "progress.jsonl")
        for peer in pythons
        for variant in (*peers.PEERS[peer].variants, *(peers.PEERS[peer].light_variants if light else ()))
    ]


# --------------------------------------------------------------------------------------------------------- measurement


def measured(
    each: Workload,
    config: AnyConfig,
    contenders: list[Contender],
    seconds: float,
    rounds: int,
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """All rounds of one workload: figures of every round, medians, the limit, and ratios to the first contender."""
    figures: dict[str, list[dict[str, float]]] = {contender.name: [] for contender in contenders}
    costs = []
    for turn in range(rounds):
        costs.append(costs_alone(each, min(seconds / 5, 3.0), extra))
        for contender in contenders:
            figure = measure(contender, seconds)
            figures[contender.name].append(figure)
            noise = "" if figure["other_cores"] < NOISY_CORES else f", others used {figure['other_cores']:.2f} cores"
            steps = number(figure["steps_per_second"])
            print(f"  round {turn + 1} {contender.name}: {steps} steps/s{noise}", flush=True)
    medians = {name: {key: median([each[key] for each in runs]) for key in runs[0]} for name, runs in figures.items()}
    limit = limit_of(each, config, costs)
    for name, each_median in medians.items():
        ceiling = limit["rollout_steps_per_second" if name == ROLLOUT else "steps_per_second"]
        each_median["of_limit"] = each_median["steps_per_second"] / ceiling
    first = next(iter(medians.values()))["steps_per_second"]
    return {
        "settings": {"env": each.env, "algo": each.algo, **each.settings},
        "limit": limit,
        "medians": medians,
        "ratios": {name: first / each["steps_per_second"] for name, each in medians.items()},
        "rounds": figures,
    }


def median(values: list[float]) -> float:
    """The median; None becomes None."""
    return statistics.median(values) if None not in values else None  # type: ignore[return-value]


def measure(contender: Contender, seconds: float) -> dict[str, Any]:
    """Run ``contender`` until its window is over, end it, and return its figures.

    The window begins at an interval's end, after two intervals and a fifth of ``seconds``, and ends at one at least
    ``seconds`` later.

    Raises:
        RunFailed: it ended by itself, or no interval was complete in time.
    """
    with tempfile.TemporaryDirectory(prefix="htsrl-throughput-") as temporary:
        folder = Path(temporary)
        with (folder / "log").open("w+") as log:
            started, started_at = time.perf_counter(), time.time()
            process = subprocess.Popen(
                contender.command(folder), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
            tree = Tree(process.pid)
            try:
                return _window(contender, folder, process, tree, seconds, started)
            except RunFailed as failure:
                log.seek(0)
                last = "\n".join(log.read().splitlines()[-15:])
                waited = time.time() - started_at
                raise RunFailed(f"{contender.name}: {failure} after {waited:.0f} s; its last words:\n{last}") from None
            finally:
                tree.end(process)


def _window(
    contender: Contender, folder: Path, process: subprocess.Popen, tree: Tree, seconds: float, started: float
) -> dict[str, Any]:
    """Watch the lines of progress arrive, and read CPU time at the two that bound the window."""
    lines = arriving(folder / contender.progress, process, started)
    first, first_arrival = next(lines)
    # A line of ours is written after the learner has used the interval, which is later than the interval's end
    start_up = first_arrival - started - (first.get("time/learn") or 0.0)
    begin: dict[str, Any] | None = None
    waited = 0.0
    for count, (line, arrival) in enumerate(lines, 2):
        if begin is None:
            if count > WARM_UP_INTERVALS and arrival - first_arrival >= seconds / 5:
                begin = {"line": line, "cpu": tree.cpu_seconds(), "machine": machine_cpu_seconds(), "arrival": arrival}
            continue
        waited += line.get("time/wait") or 0.0
        if line["seconds"] - begin["line"]["seconds"] >= seconds:
            break
    assert begin is not None
    cpu, machine_cpu = tree.cpu_seconds() - begin["cpu"], machine_cpu_seconds() - begin["machine"]
    wall = line["seconds"] - begin["line"]["seconds"]
    steps = line["steps"] - begin["line"]["steps"]
    between = arrival - begin["arrival"]
    memory = [tree.memory()]
    while len(memory) < 5:
        time.sleep(0.2)
        memory.append(tree.memory())
    ours = "time/wait" in line
    return {
        "steps_per_second": steps / wall,
        "cpu_seconds_per_1000_steps": 1000 * cpu / steps,
        "cores": cpu / between,
        "other_cores": max((machine_cpu - cpu) / between, 0.0),
        "pss_mib": max(each.pss for each in memory),
        "peak_rss_mib": max(each.peak_rss for each in memory),
        "processes": max(each.processes for each in memory),
        "start_up_seconds": start_up,
        "barrier_share": waited / wall if ours else None,
        "steps": steps,
        "seconds": wall,
    }


def arriving(path: Path, process: subprocess.Popen, started: float) -> Iterator[tuple[dict[str, Any], float]]:
    """Each record as it is written, with the time of its arrival.

    Raises:
        RunFailed: the process ended, or wrote nothing for too long.
    """
    seen, latest = 0, started
    position = 0
    rest = b""
    while True:
        if path.exists():
            with path.open("rb") as file:
                file.seek(position)
                block = file.read()
            position += len(block)
            *whole, rest = (rest + block).split(b"\n")
            now = time.perf_counter()
            for text in whole:
                seen, latest = seen + 1, now
                yield json.loads(text), now
        if process.poll() is not None:
            raise RunFailed(f"it ended with status {process.returncode}")
        if time.perf_counter() - latest > FIRST_INTERVAL_TIMEOUT_S:
            raise RunFailed(f"no interval was completed for {FIRST_INTERVAL_TIMEOUT_S:.0f} s")
        time.sleep(POLL_S)


def machine_cpu_seconds() -> float:
    """CPU time that all programs on this machine have used."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq


def costs_alone(each: Workload, seconds: float, extra: Mapping[str, Any]) -> Costs:
    """What each part costs per step, measured in a process of its own."""
    script = Path(__file__).with_name("limits.py")
    command = [sys.executable, str(script), each.name, str(seconds), json.dumps(extra)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RunFailed(f"measuring the parts of {each.name} alone failed:\n{done.stderr}")
    return Costs(**json.loads(done.stdout.splitlines()[-1]))


def limit_of(each: Workload, config: AnyConfig, costs: list[Costs]) -> dict[str, Any]:
    """The limit in steps per second, what it is made of, and which of the two kinds it is."""
    cores, device = available_cores(), costs[0].device
    names = ("environment", "inference", "learning")
    parts = {name: median([getattr(cost, name) for cost in costs]) for name in names}
    by_cores = steps_limit(Costs(**parts, device=device), cores)
    thousand = {name: 1000 * value for name, value in parts.items()}
    if device == "cpu":
        limit: dict[str, Any] = {"cpu_seconds_per_1000_steps": thousand}
    else:
        limit = {"cpu_seconds_per_1000_steps": {"environment": thousand.pop("environment")}}
        limit["gpu_seconds_per_1000_steps"] = thousand
    limit["rollout_steps_per_second"] = steps_limit(Costs(**parts | {"learning": 0.0}, device=device), cores)
    limit["cores"] = cores
    if each.sleep is None:
        kind = "cores" if device == "cpu" else "cores or GPU"
        return {"kind": kind, "steps_per_second": by_cores, **limit}
    model: BarrierModel = barrier_model(
        each.sleep.mean_s, each.sleep.shape, config.runtime.num_envs, config.runtime.sync_interval
    )
    limit["rollout_steps_per_second"] = model.barrier
    return {
        "kind": "barrier model",
        "steps_per_second": model.barrier,
        "model": asdict(model),
        "by_cores": by_cores,
        **limit,
    }


# ------------------------------------------------------------------------------------------------------------- reports


def described(each: Workload, config: AnyConfig) -> str:
    """The workload's fixed settings in one line."""
    return f"{config.algo} on {config.env}: {' '.join(flags(each.settings))}"


def report(result: dict[str, Any], schedules: list[str]) -> list[str]:
    """A workload's table and its limit."""
    medians, ratios = result["medians"], result["ratios"]
    first = next(iter(medians))
    head = ["", "steps/s", "min", "max", f"{first} is", "of limit", "CPU-s/1k", "cores", "PSS MiB", "peak RSS"]
    head += ["processes", "start-up s", "at barrier"]
    rows = [head]
    for name, each in medians.items():
        speeds = [run["steps_per_second"] for run in result["rounds"][name]]
        share = each["barrier_share"]
        rows.append(
            [
                name,
                *(number(value) for value in (each["steps_per_second"], min(speeds), max(speeds))),
                "" if name == first else f"{ratios[name]:.2f}x",
                f"{each['of_limit']:.2f}",
                number(each["cpu_seconds_per_1000_steps"]),
                f"{each['cores']:.2f}",
                f"{each['pss_mib']:,.0f}",
                f"{each['peak_rss_mib']:,.0f}",
                f"{each['processes']:.0f}",
                f"{each['start_up_seconds']:.1f}",
                "-" if share is None else f"{100 * share:.0f}%",
            ]
        )
    return [table(rows), *limit_lines(result["limit"])]


def limit_lines(limit: dict[str, Any]) -> list[str]:
    """What the limit is made of."""

    def costs(parts: dict[str, float]) -> str:
        return ", ".join(f"{name} {number(value)}" for name, value in parts.items())

    by_cores = limit.get("by_cores", limit["steps_per_second"])
    head = "by cores" if "model" in limit else "limit"
    by = f"{limit['cores']} cores / (CPU-s per 1000 steps alone: {costs(limit['cpu_seconds_per_1000_steps'])})"
    if "gpu_seconds_per_1000_steps" in limit:
        by = f"the lower of {by} and GPU / (s per 1000 steps alone: {costs(limit['gpu_seconds_per_1000_steps'])})"
    lines = [f"{head}: {number(by_cores)} steps/s = {by}"]
    if "model" in limit:
        model = limit["model"]
        lines.insert(
            0,
            f"limit: barrier model {number(model['barrier'])} steps/s "
            f"(lock-step {number(model['lockstep'])}, no waiting {number(model['no_waiting'])})",
        )
    return lines


def plot(record: dict[str, Any], path: Path) -> None:
    """A panel per workload: a bar of steps/s per contender, with the rounds as dots and the limit as a line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    workloads = record["workloads"]
    figure = Figure(figsize=(9, 0.6 + sum(0.9 + 0.35 * len(each["medians"]) for each in workloads.values())))
    FigureCanvasAgg(figure)
    heights = [1 + len(each["medians"]) for each in workloads.values()]
    panels = figure.subplots(len(workloads), 1, squeeze=False, height_ratios=heights)
    for panel, (name, each) in zip(panels[:, 0], workloads.items()):
        labels = list(each["medians"])[::-1]
        colours = [{"hts": "tab:blue", "sync": "#9ecae1", "async": "#9ecae1"}.get(label, "0.75") for label in labels]
        panel.barh(labels, [each["medians"][label]["steps_per_second"] for label in labels], color=colours)
        for label in labels:
            speeds = [run["steps_per_second"] for run in each["rounds"][label]]
            panel.plot(speeds, [label] * len(speeds), ".", color="0.2", markersize=4)
        panel.axvline(each["limit"]["steps_per_second"], color="tab:red", linestyle="--", linewidth=1)
        panel.set_title(f"{name}, steps/s (dashed: limit, {each['limit']['kind']})", fontsize=10, loc="left")
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
        panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(run_main(main))
