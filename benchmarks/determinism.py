#!/usr/bin/env python3
"""The regression check of the determinism contract: algorithms x environments x schedules, each under several layouts.

PPO and IMPALA, which read a recurrent policy's sequences each in a way of its own, with such cores, too.

    python benchmarks/determinism.py                                  # everything that is installed
    python benchmarks/determinism.py --envs CartPole-v1 --algorithms a2c --layouts 1x1,3x2x1
    python benchmarks/determinism.py --accept                         # after a change that is meant to change bits

Each cell is a small run that must give the same bits in every layout, undisturbed and with random delays, and other
bits with another seed. Its digests must also be those of golden-digests.json, which hold for one fingerprint: the
processor, torch, numpy, threads and the environment's packages. Where the fingerprint or a setting is new, the digests
are recorded; where they differ, the cell fails, and only --accept replaces them. Exit status: 0 all well, 1 not.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from facts import ROOT, chosen, circumstances, machine, number, run_main, save_json, table

from htsrl import determinism, envs
from htsrl.config import ALGORITHMS, AnyConfig
from htsrl.digests import DIGESTED
from htsrl.errors import ConfigError
from htsrl.resolve import resolve
from htsrl.settings import configure, flat
from htsrl.training import FREE_SETTINGS
from htsrl.trials import plan
from htsrl.verify import Row, verify

ENVS = ("CartPole-v1", "Pendulum-v1", "atari:Pong", "gfootball", "synthetic:sleep")
SCHEDULES = ("hts", "sync")
CORES = ("none", "lstm", "gru")
LAYOUTS = {"hts": "1x1,2x2x1,4x1", "sync": "1x1,3x1,4x1x1"}
GOLDEN = ROOT / "benchmarks" / "results" / "golden-digests.json"

# Small, but every replica of a light environment ends an episode, and parameters change the last intervals.
LIGHT: dict[str, Any] = {"num_envs": 8, "sync_interval": 32, "total_steps": 8 * 32 * 4}
HEAVY: dict[str, Any] = {"num_envs": 4, "sync_interval": 16, "total_steps": 4 * 16 * 4}
OF_ENV: dict[str, dict[str, Any]] = {
    "synthetic:sleep": {"step_ms": 1.0},
    "Pendulum-v1": {"max_episode_steps": 50},
    # So large that what was learned shows in the actions of the few intervals
    "gfootball": {"learning_rate": 3e-3},
}
OF_ALGORITHM: dict[str, dict[str, Any]] = {
    "ppo": {"epochs": 2, "minibatches": 4},
    "batchppo": {"epochs": 2, "minibatches": 4},
    "impala": {"minibatches": 2},
    # Natural steps, so large that they show in the actions, from one decomposition: of large layers it takes seconds
    "acktr": {"cold_updates": 1, "kfac_interval": 4, "learning_rate": 100.0, "kl_clip": 0.01},
}
CORES_OF_ALGORITHM: dict[str, tuple[str, ...]] = {"ppo": CORES, "impala": ("none", "lstm")}


@dataclass(frozen=True)
class Cell:
    """One configuration of the matrix."""

    env: str
    algo: str
    schedule: str
    recurrent: str

    def __str__(self) -> str:
        core = "" if self.recurrent == "none" else f" {self.recurrent}"
        return f"{self.env} {self.algo} {self.schedule}{core}"

    def config(self) -> AnyConfig:
        """The small run."""
        size = HEAVY if envs.family_of(self.env) in ("atari", "football") else LIGHT
        own = OF_ENV.get(self.env, {}) | OF_ALGORITHM.get(self.algo, {}) | {"recurrent": self.recurrent}
        return configure(self.env, self.algo, schedule=self.schedule, device="cpu", **size, **own)


@dataclass(frozen=True)
class Outcome:
    """What a cell came to."""

    rows: list[Row]
    golden: str
    """'same', 'new', 'accepted' or 'DIFFERENT'."""
    seconds: float

    @property
    def layouts(self) -> str:
        """'same', or where a layout first differs."""
        different = [row for row in self.rows[:-1] if not row.ok]
        return f"{different[0].layout} differs at {different[0].first_difference}" if different else "same"

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows) and self.golden != "DIFFERENT"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", default=",".join(ENVS), metavar="E,E", help=f"default: {', '.join(ENVS)}")
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS), metavar="A,A", help=", ".join(ALGORITHMS))
    parser.add_argument("--schedules", default=",".join(SCHEDULES), metavar="S,S", help=", ".join(SCHEDULES))
    parser.add_argument("--recurrent", default=",".join(CORES), metavar="C,C", help=", ".join(CORES))
    parser.add_argument("--layouts", metavar="L,L", help=f"executors x actors (default: {LAYOUTS})")
    parser.add_argument("--delays", type=float, default=2.0, metavar="MS", help="longest random pause (default: 2)")
    parser.add_argument("--golden", type=Path, default=GOLDEN, metavar="FILE", help="digests to compare with")
    parser.add_argument("--accept", action="store_true", help="replace golden digests that differ")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to keep all outcomes")
    given = parser.parse_args()

    algorithms = chosen(given.algorithms, tuple(ALGORITHMS), "algorithm")
    schedules = chosen(given.schedules, SCHEDULES, "schedule")
    cores = chosen(given.recurrent, CORES, "recurrent core")
    cells = matrix(given.envs.split(","), algorithms, schedules, cores)
    # All refusals before the first run; an environment that isn't installed is left out.
    runnable: list[Cell] = []
    for cell in cells:
        config = cell.config()
        plan(config, given.layouts or LAYOUTS[cell.schedule], given.delays)
        try:
            envs.describe(config.env, config.environment)
            runnable.append(cell)
        except ConfigError as error:
            print(f"left out: {cell}: {error}", flush=True)

    outcomes: dict[Cell, Outcome] = {}
    for cell in runnable:
        print(f"{cell} ...", flush=True)
        layouts = given.layouts or LAYOUTS[cell.schedule]
        outcomes[cell] = outcome = check(cell, layouts, given.delays, given.golden, given.accept)
        if not outcome.ok:
            print(f"  FAILED: layouts {outcome.layouts}, golden {outcome.golden}", flush=True)
        if given.json:
            save_json(given.json, circumstances() | {"cells": dict(as_records(outcomes))})
    print("\n" + table([HEAD, *(line(cell, outcome) for cell, outcome in outcomes.items())]))
    failed = [cell for cell, outcome in outcomes.items() if not outcome.ok]
    print(f"\n{len(outcomes) - len(failed)} of {len(outcomes)} cells are well, {len(cells) - len(runnable)} left out")
    return 1 if failed or not outcomes else 0


def matrix(
    env_ids: Sequence[str], algorithms: Sequence[str], schedules: Sequence[str], cores: Sequence[str]
) -> list[Cell]:
    """Every cell of these, each algorithm with those of ``cores`` that it is checked with."""
    return [
        Cell(env, algo, schedule, core)
        for env, algo, schedule in product(env_ids, algorithms, schedules)
        for core in CORES_OF_ALGORITHM.get(algo, ("none",))
        if core in cores
    ]


def check(cell: Cell, layouts: str, delay_ms: float, golden: Path, accept: bool) -> Outcome:
    """Verify one cell and compare its digests with the golden ones."""
    started = time.perf_counter()
    config = cell.config()
    rows = list(verify(plan(config, layouts, delay_ms)))
    digests = {name: getattr(rows[0], name) for name in DIGESTED}
    # Digests of runs that don't agree among themselves are nothing to keep.
    word = compare(golden, key_of(cell, config), digests, accept) if all(row.ok for row in rows) else "-"
    return Outcome(rows, word, time.perf_counter() - started)


def key_of(cell: Cell, config: AnyConfig) -> dict[str, Any]:
    """What the digests of a cell hold for."""
    spec = envs.describe(config.env, config.environment)
    config = resolve(config, spec)
    settings = {name: value for name, value in flat(config).items() if name not in FREE_SETTINGS | {"run_dir"}}
    fingerprint = determinism.fingerprint(int(config.runtime.learner_threads), config.runtime.device)
    return {
        "cell": str(cell),
        "settings": json.dumps(settings, sort_keys=True, default=str),
        "fingerprint": {"processor": machine()["cpu"], **fingerprint, **spec.versions},
    }


def holds_for(entry: dict[str, Any], key: dict[str, Any]) -> bool:
    """Whether a golden entry is for ``key``. Settings that did not exist then don't count: they left bits alone."""
    now, then = json.loads(key["settings"]), json.loads(entry["settings"])
    same_settings = all(name in now and now[name] == value for name, value in then.items())
    return same_settings and all(entry[name] == key[name] for name in ("cell", "fingerprint"))


def compare(path: Path, key: dict[str, Any], digests: dict[str, str], accept: bool) -> str:
    """How ``digests`` stand to the golden ones for ``key``; records them where there are none."""
    known = json.loads(path.read_text(encoding="utf-8"))["golden"] if path.exists() else []
    found = [entry for entry in known if holds_for(entry, key)]
    if found and all(found[0][name] == digest for name, digest in digests.items()):
        return "same"
    if found and not accept:
        return "DIFFERENT"
    others = [entry for entry in known if entry not in found]
    # In one order, so that the records of two machines merge
    entries = sorted([*others, key | digests], key=lambda entry: json.dumps(entry, sort_keys=True))
    save_json(path, {"golden": entries})
    return "accepted" if found else "new"


HEAD = ("cell", "trajectory", "parameters", "losses", "layouts", "other seed", "golden", "steps/s", "seconds")


def line(cell: Cell, outcome: Outcome) -> list[str]:
    """One row of the final table."""
    reference, other_seed = outcome.rows[0], outcome.rows[-1]
    return [
        str(cell), *(getattr(reference, name)[:8] for name in DIGESTED), outcome.layouts, other_seed.bits,
        outcome.golden, number(reference.steps_per_second), f"{outcome.seconds:.1f}",
    ]  # fmt: skip


def as_records(outcomes: dict[Cell, Outcome]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The outcomes for ``--json``."""
    for cell, outcome in outcomes.items():
        yield (
            str(cell),
            {
                "ok": outcome.ok,
                "golden": outcome.golden,
                "seconds": round(outcome.seconds, 1),
                "runs": [vars(row) | {"first_difference": str(row.first_difference)} for row in outcome.rows],
            },
        )


if __name__ == "__main__":
    raise SystemExit(run_main(main))
