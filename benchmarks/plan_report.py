"""One question to the planner, and its answer as a record, a line of a table and a picture."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import planner
from discrete_events import Times
from facts import number, table
from planner import Candidate, Choice, Site
from recorded_times import Exchange, family, times

BUSY = 0.9
"""Cores that work for more than this share of the time bind."""
SHARES = {"stepping": "tab:blue", "inference": "tab:orange", "barrier": "tab:red", "learning": "0.6"}
"""Where executors' time goes, and its colour."""


class TimesOf:
    """How long everything takes with a candidate's ranks and threads."""

    def __init__(self, record: dict[str, Any], name: str, network: Exchange, quicker: dict[str, float]) -> None:
        """Raises ConfigError where ``name`` was not measured."""
        self.kept = record["workloads"].get(family(name), {})
        self.network = network
        self.by_threads: dict[int, Times] = {}
        for threads in map(int, self.kept.get("learning", {"1": None})):
            every = times(record, name, threads)
            for part, factor in quicker.items():
                every = planner.faster(every, part, factor)
            self.by_threads[threads] = every

    def __call__(self, candidate: Candidate) -> Times:
        seconds = self.network.seconds(candidate.setup.ranks, self.kept["parameters"], self.kept["gradient_steps"])
        return dataclasses.replace(self.by_threads[candidate.threads], exchange_s=seconds)


@dataclass(frozen=True)
class Case:
    """A workload with a number of replicas on a site."""

    workload: str
    replicas: int
    site: Site
    times_of: TimesOf


def planned(case: Case, alphas: list[int], within: float, turns: int) -> dict[str, Any]:
    """The recommended layout, the best for each alpha, and what binds."""
    threads = list(case.times_of.by_threads)
    sleeping = case.times_of.by_threads[1].asleep.mean_s > 0
    found = planner.plan(case.replicas, alphas, case.site, threads, case.times_of, turns, sleeping)
    best = planner.recommended(found, within)
    every = case.times_of(best.candidate)
    gains = planner.gains(best, every, turns)
    limit = planner.limit(case.replicas, case.site, every)
    setup = best.candidate.setup
    busy = best.outcome.cores_busy / setup.cores
    return {
        "workload": case.workload,
        "replicas": case.replicas,
        "cores": None if math.isinf(case.site.cores) else case.site.cores,
        "hosts": case.site.hosts,
        "limit": limit,
        "at_edge": {
            "alpha": setup.alpha == max(alphas),
            "ranks": 2 * setup.ranks > min(case.site.most_ranks, case.replicas),
        },
        "best": described(best, case.times_of.kept["observation_bytes"]),
        "gains_if_twice_as_fast": gains,
        "binds": "cores" if busy > BUSY else max(gains, key=lambda part: gains[part]),
        "by_alpha": [
            described(max(choices, key=lambda each: each.steps_per_second), case.times_of.kept["observation_bytes"])
            for choices in found.values()
        ],
    }


def described(choice: Choice, observation_bytes: int) -> dict[str, Any]:
    """A choice as plain values."""
    setup, outcome = choice.candidate.setup, choice.outcome
    return {
        "alpha": setup.alpha,
        "ranks": setup.ranks,
        "executors": setup.executors,
        "actors": setup.actors,
        "group": setup.group,
        "learner_threads": choice.candidate.threads,
        "steps_per_second": choice.steps_per_second,
        "rows_per_update": setup.ranks * setup.rows,
        "storage_gib_per_rank": 2 * (setup.alpha + 1) * setup.replicas * observation_bytes / 2**30,
        "cores_busy_share": outcome.cores_busy / setup.cores if math.isfinite(setup.cores) else None,
        "cores_busy": setup.ranks * outcome.cores_busy,
        **{name: getattr(outcome, name) for name in ("interval_s", *SHARES, "learner_busy", "batch_rows")},
    }


# ------------------------------------------------------------------------------------------------------------- reports


def name_of(found: dict[str, Any]) -> str:
    """The case in words."""
    cores = "unlimited cores" if found["cores"] is None else f"{found['cores']:,} cores"
    return f"{found['workload']}, {found['replicas']:,} replicas, {cores}"


def plan_table(plans: list[dict[str, Any]]) -> str:
    """A line for each case."""
    rows = [
        ["", "alpha", "ranks", "executors", "actors", "threads", "steps/s", "of limit", "at barrier", "for learner"]
    ]
    rows[0] += ["cores busy", "GiB", "rows/update", "binds", "twice as fast"]
    for found in plans:
        best, binds = found["best"], found["binds"]
        gain = found["gains_if_twice_as_fast"].get(binds)
        rows.append(
            [
                name_of(found),
                *(f"{best[key]:,}{'+' * edge}" for key, edge in found["at_edge"].items()),
                *(f"{best[key]:,}" for key in ("executors", "actors", "learner_threads")),
                number(best["steps_per_second"]),
                f"{100 * best['steps_per_second'] / found['limit']:.0f}%",
                f"{100 * best['barrier']:.0f}%",
                f"{100 * best['learning']:.0f}%",
                number(best["cores_busy"]),
                number(best["storage_gib_per_rank"], 2),
                f"{best['rows_per_update']:,}",
                binds,
                "-" if gain is None else f"{gain:.2f}x",
            ]
        )
    return (
        f"{table(rows)}\nexecutors, actors, threads, GiB of storage: of each rank; +: the largest tried; twice as "
        "fast: what the whole would gain, were the part that binds twice as fast"
    )


def plot(plans: list[dict[str, Any]], path: Path) -> None:
    """Above: speed against alpha, as a share of the limit. Below: where executors' time goes as recommended."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    workloads = list(dict.fromkeys(each["workload"] for each in plans))
    figure = Figure(figsize=(1 + 5 * len(workloads), 8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, len(workloads), squeeze=False, height_ratios=(3, 2), sharey="row")
    sizes = sorted({each["replicas"] for each in plans})
    for (above, below), name in zip(panels.T, workloads):
        own = [each for each in plans if each["workload"] == name]
        labels = [name_of(found).partition(", ")[2] for found in own]
        for found, label in zip(own, labels):
            best, by_alpha = found["best"], found["by_alpha"]
            style = {"color": f"C{sizes.index(found['replicas'])}", "label": label}
            speeds = [each["steps_per_second"] / found["limit"] for each in by_alpha]
            above.plot([each["alpha"] for each in by_alpha], speeds, "-" if found["cores"] else "--", **style)
            above.plot(best["alpha"], best["steps_per_second"] / found["limit"], "o", color=style["color"])
        above.set_xscale("log", base=2)
        above.set(ylim=(0, 1.05), xlabel="alpha (dot: recommended)", title=name)
        left = [0.0] * len(own)
        for share, colour in SHARES.items():
            widths = [max(found["best"][share], 0.0) for found in own]
            below.barh(labels, widths, left=left, color=colour, label=share)
            left = [start + width for start, width in zip(left, widths)]
        for row, found in enumerate(own):
            below.text(1.01, row, found["binds"], va="center", fontsize=8)
        below.set(xlim=(0, 1), xlabel="executors' time as recommended (right: what binds)")
    panels[0, 0].set_ylabel("steps/s, share of the limit")
    panels[1, 0].invert_yaxis()
    for row, place in zip(panels, ("outside upper center", "outside lower center")):
        handles, labels = row[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc=place, ncols=4, fontsize=8)  # type: ignore[call-overload]
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
