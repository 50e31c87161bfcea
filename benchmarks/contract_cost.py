#!/usr/bin/env python3
"""What the determinism contract costs: the actor's padded, probed batches and the rest of what makes bits the same.

    python benchmarks/contract_cost.py
    python benchmarks/contract_cost.py --workload cartpole --rows 16 --json contract.json

Per workload: CPU time of one inference batch for every number of waiting rows, under the contract (padded to a probed
size), without it (exactly as many rows as wait, torch free to choose its kernels), and one row at a time, which is how
bits can also be kept without probing; and what the contract adds to the CPU time of a whole environment step.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from facts import circumstances, number, run_main, save_json, table
from limits import Bench
from workloads import workload

from htsrl import envs, rng
from htsrl.actors.inference import InferenceBatch
from htsrl.errors import ConfigError
from htsrl.storage.digest import trajectory_digest
from htsrl.storage.observations import observations

SHORT_INTERVAL = 32


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="cartpole,pong,football", metavar="W,W")
    parser.add_argument("--rows", type=int, default=16, metavar="N", help="rows that wait at most (default: 16)")
    parser.add_argument("--spread", metavar="R,R", help="numbers of waiting rows, equally often (default: 1 to N)")
    parser.add_argument("--seconds", type=float, default=5.0, metavar="S", help="per figure, about (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to keep all figures")
    given = parser.parse_args()
    if given.rows < 1 or given.seconds <= 0:
        raise ConfigError("--rows must be at least 1 and --seconds greater than 0")
    spread = spread_of(given.spread, given.rows)
    chosen = [workload(name) for name in given.workload.split(",")]
    configs = [each.config(num_envs=given.rows) for each in chosen]
    for config in configs:
        envs.describe(config.env, config.environment)  # refused before anything is measured

    record: dict[str, Any] = {**circumstances(), "rows": given.rows, "seconds": given.seconds, "workloads": {}}
    for each, config in zip(chosen, configs):
        # Short updates in many pairs: a drifting machine would drown a difference between long ones
        epochs = {"epochs": 1} if each.algo == "ppo" else {}
        bench, short = Bench(config), Bench(each.config(num_envs=given.rows, sync_interval=SHORT_INTERVAL, **epochs))
        try:
            result = cost(bench, short, spread, given.seconds)
        finally:
            bench.close()
            short.close()
        record["workloads"][each.name] = result
        print(f"\n{each.name}\n{inference_table(result)}\n\n{contract_lines(result)}", flush=True)
        if given.json:
            save_json(given.json, record)
    return 0


def spread_of(text: str | None, most: int) -> list[int]:
    """The numbers of waiting rows in ``text``, by default all from 1 to ``most``.

    Raises:
        ConfigError: not whole numbers in that range.
    """
    if text is None:
        return list(range(1, most + 1))
    numbers = sorted({int(each) for each in text.split(",") if each.isdecimal()})
    if not numbers or not all(each.isdecimal() for each in text.split(",")) or numbers[0] < 1 or numbers[-1] > most:
        raise ConfigError(f"--spread must be whole numbers between 1 and {most} with commas between them, got {text}")
    return numbers


def cost(bench: Bench, short: Bench, spread: list[int], seconds: float) -> dict[str, Any]:
    """All figures of one workload, in CPU-seconds of one thread; ``short`` has quick updates of the same network."""
    step = {"environment": cpu_seconds([bench.fill], seconds)[0] / (bench.T * bench.N)}
    batches = inference(bench, spread, seconds)
    waiting = sum(batches["rows"])
    means = {variant: sum(batches[variant]) / waiting for variant in ("contract", "without", "one_row")}
    step["inference"] = means["contract"]
    (learning,) = cpu_seconds([bench.learn], seconds)
    short_learning, short_without = paired(short.learn, without_contract(short.learn), 4 * seconds)
    noise, noise_without = paired(lambda: draw_noise(bench, keyed=True), lambda: draw_noise(bench, keyed=False), 1.0)
    (digest,) = cpu_seconds([lambda: trajectory_digest(bytes(32), bench.storage)], 1.0)
    steps = bench.T * bench.N
    step |= {"learning": learning / steps, "noise": noise / steps, "digest": digest / steps}
    total = sum(step.values())
    added = {
        "padding": means["contract"] - means["without"],
        "learning": (1.0 - short_without / short_learning) * learning / steps,
        "noise": (noise - noise_without) / steps,
        "digest": digest / steps,
    }
    return {
        "buckets": bench.buckets,
        "batches": batches,
        "per_step": step,
        "added_per_step": added,
        "added_share": {name: value / total for name, value in added.items()},
        "added_share_in_all": sum(added.values()) / (total - sum(added.values())),
        "faster_than_one_row": means["one_row"] / means["contract"],
    }


def inference(bench: Bench, spread: list[int], seconds: float) -> dict[str, list[float]]:
    """CPU-seconds per batch for each number of waiting rows in ``spread``, three ways."""
    exact = InferenceBatch(bench.model, bench.spec, list(range(1, bench.N + 1)), bench.learner.device)
    for batch in (bench.batch, exact):
        batch.obs[:] = observations(bench.storage, np.arange(len(batch.obs)))
    (one_row,) = cpu_seconds([lambda: exact.answer(1)], seconds / 10)
    batches: dict[str, list[float]] = {"rows": [], "contract": [], "without": [], "one_row": []}
    for rows in spread:
        padded, unpadded = functools.partial(bench.answer, rows), functools.partial(exact.answer, rows)
        with_contract, without = paired(padded, without_contract(unpadded), 2 * seconds / len(spread))
        batches["rows"].append(rows)
        batches["contract"].append(with_contract)
        batches["without"].append(without)
        batches["one_row"].append(rows * one_row)
    return batches


def draw_noise(bench: Bench, keyed: bool) -> None:
    """An interval's action noise: each replica's from its own generator, or all from one."""
    draw = functools.partial(rng.action_noise, bench.model.head.noise_kind)
    noise = bench.storage.noise
    T, N, K = noise.shape
    if not keyed:
        noise[:] = draw(np.random.default_rng(0), (T, N, K))
        return
    for n in range(N):
        noise[:, n] = draw(rng.generator(0, rng.Stream.ACTION_NOISE, n, 0), (T, K))


def without_contract(part: Callable[[], Any]) -> Callable[[], None]:
    """``part`` with torch free to choose kernels that don't give the same bits each time."""

    def free() -> None:
        torch.use_deterministic_algorithms(False)
        try:
            part()
        finally:
            torch.use_deterministic_algorithms(True)

    return free


def paired(first: Callable[[], Any], second: Callable[[], Any], seconds: float) -> tuple[float, float]:
    """CPU-seconds of each, called in turn: the first's median, and that times the median of the pairs' ratios.

    A machine that drifts from second to second treats the two calls of a pair alike, but not the first and the last.
    """
    times = cpu_times([first, second], seconds)
    one = statistics.median(times[0])
    return one, one * statistics.median(other / each for each, other in zip(*times))


def cpu_seconds(parts: list[Callable[[], Any]], seconds: float) -> list[float]:
    """Median CPU-seconds of a call of each of ``parts``, called in turn for ``seconds``."""
    return [statistics.median(taken) for taken in cpu_times(parts, seconds)]


def cpu_times(parts: list[Callable[[], Any]], seconds: float) -> list[list[float]]:
    """CPU-seconds of every call of each of ``parts``, called in turn for ``seconds``, after one unmeasured call."""
    for part in parts:
        part()
    times: list[list[float]] = [[] for _ in parts]
    end = time.perf_counter() + seconds
    while len(times[0]) < 3 or time.perf_counter() < end:
        for part, taken in zip(parts, times):
            before = time.process_time()
            part()
            taken.append(time.process_time() - before)
    return times


# ------------------------------------------------------------------------------------------------------------- reports


def inference_table(result: dict[str, Any]) -> str:
    """Microseconds of CPU per batch."""
    batches, buckets = result["batches"], result["buckets"]
    rows = [["rows", "padded to", "contract, µs", "without, µs", "ratio", "one by one, µs", "batched is"]]
    for n, contract, without, one in zip(*(batches[key] for key in ("rows", "contract", "without", "one_row"))):
        full, rest = divmod(n, buckets[-1])
        padded = full * buckets[-1] + (next(size for size in buckets if size >= rest) if rest else 0)
        micro = [number(1e6 * value) for value in (contract, without, one)]
        rows.append([str(n), str(padded), *micro[:2], f"{contract / without:.2f}", micro[2], f"{one / contract:.1f}x"])
    return table(rows)


def contract_lines(result: dict[str, Any]) -> str:
    """What a step costs, and how much of it the contract adds."""
    step = {name: 1e6 * value for name, value in result["per_step"].items()}
    parts = ", ".join(f"{name} {number(value)}" for name, value in step.items())
    added = ", ".join(f"{name} {100 * share:+.2f}%" for name, share in result["added_share"].items())
    spread = result["batches"]["rows"]
    waiting = (
        f"{spread[0]} to {spread[-1]}" if spread == list(range(1, spread[-1] + 1)) else ", ".join(map(str, spread))
    )
    in_all = f"{100 * result['added_share_in_all']:+.2f}%"
    return (
        f"CPU per step, µs, where {waiting} rows wait equally often: {number(sum(step.values()))} = {parts}\n"
        f"of that added by the contract: {added}; in all {in_all} over doing without\n"
        f"batched inference is {result['faster_than_one_row']:.1f} times as fast as one row at a time"
    )


if __name__ == "__main__":
    sys.exit(run_main(main))
