#!/usr/bin/env python3
"""Write the recorded results into the tables of the project's README, so that no figure there is typed.

python benchmarks/readme.py             # between the marks <!-- results --> and <!-- speed -->
python benchmarks/readme.py --check     # exit status 1 if a table is not what the records say
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from typing import Any

from facts import ROOT, run_main

RESULTS = ROOT / "benchmarks" / "results"
ALGORITHMS = {"ppo": "PPO", "a2c": "A2C", "acktr": "ACKTR", "batchppo": "BatchPPO", "impala": "IMPALA"}
TASKS = {
    "cartpole-ppo": "",
    "cartpole-a2c": "",
    "football-empty-goal": "",
    "pendulum-ppo": "",
    "cartpole-ppo-importance": ", `--delay importance`",
    "football-empty-goal-importance": ", `--delay importance`",
    "football-empty-goal-bf16": ", `--precision bf16`",
    "cartpole-acktr": "",
    "cartpole-impala": "",
    "cartpole-batchppo": "",
    "halfcheetah-batchppo": "",
    "hopper-batchppo": "",
    "memory-ppo-lstm": ", LSTM",
    "memory-ppo-gru": ", GRU",
    "memory-ppo": ", feed-forward (chance: 0.5)",
    "pong-ppo": ", `--precision bf16`",
}
"""Tasks of learning.py in the order of the table, and what is said of each beside environment and algorithm."""
WORKLOADS = {
    "cartpole": "CartPole-v1 (MLP, 4 x 4)",
    "pong": "atari:Pong (Nature CNN, 4 x 4)",
    "football": "gfootball 3 vs 1 (CNN, 2 x 8)",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing")
    given = parser.parse_args()
    path = ROOT / "README.md"
    text = before = path.read_text()
    for name, lines in (("results", learning_table()), ("speed", speed_table())):
        text = filled(text, name, lines)
    if given.check:
        return int(text != before)
    path.write_text(text)
    return 0


def filled(text: str, name: str, lines: list[str]) -> str:
    """``text`` with ``lines`` as the table between the marks of ``name``; what else stands there stays."""
    pattern = rf"(<!-- {name} -->\n(?:[^|\n].*\n|\n)*)(?:\|.*\n)*(?=<!-- end of {name} -->)"
    changed, count = re.subn(pattern, lambda match: match[1] + "\n".join([*lines, ""]), text)
    assert count == 1, f"README.md has no place for the table of {name}"
    return changed


def learning_table() -> list[str]:
    """The final evaluations of all tasks that are recorded."""
    lines = [
        "| task | steps | schedule | mean return or score of 100 evaluation episodes, by seed | aim |",
        "| --- | --- | --- | --- | --- |",
    ]
    for task, remark in TASKS.items():
        if not (RESULTS / f"learning-{task}.json").exists():
            continue
        record = recorded(f"learning-{task}")
        for schedule in ("hts", "sync", "async"):
            runs = sorted((run for run in record["runs"] if run["schedule"] == schedule), key=lambda run: run["seed"])
            if runs:
                cells = (
                    f"{record['env']}, {ALGORITHMS[record['algo']]}{remark}",
                    f"{record['steps']:,}",
                    f"`{schedule}`",
                    ", ".join(f"{run['value']:.4g}" for run in runs),
                    aim(record),
                )
                lines.append(f"| {' | '.join(cells)} |")
    return lines


def aim(record: dict[str, Any]) -> str:
    """What the task's evaluation should come to."""
    return f"{record['threshold']:g}" + (f" to {most:g}" if (most := record.get("most")) else "")


def speed_table() -> list[str]:
    """Steps per second beside other systems, each in the better of its recorded ways to run."""
    workloads, in_bf16 = recorded("throughput")["workloads"], recorded("throughput-bf16")["workloads"]
    columns = ["`hts`", "`sync`", "Stable-Baselines3", "Sample Factory", "limit", "`hts` in bfloat16"]
    lines = [
        f"| PPO, 16 replicas x 128 steps (epochs x minibatches) | {' | '.join(columns)} |",
        "| --- " * (len(columns) + 1) + "|",
    ]
    for workload, label in WORKLOADS.items():
        record = workloads[workload]
        figures = [best(record, contender) for contender in ("hts", "sync", "sb3", "sample-factory")]
        figures.append(record["limit"]["steps_per_second"])
        cells = [f"{figure:,.0f}" for figure in figures]
        cells.append(f"{best(in_bf16[workload], 'hts'):,.0f}" if workload in in_bf16 else "-")
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


def best(record: dict[str, Any], contender: str) -> float:
    """Steps per second of ``contender``, run in whichever of its ways is fastest."""
    return max(each["steps_per_second"] for name, each in record["medians"].items() if name.split()[0] == contender)


def recorded(name: str) -> dict[str, Any]:
    """A record in the results."""
    record: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return record


if __name__ == "__main__":
    sys.exit(run_main(main))
