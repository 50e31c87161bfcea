#!/usr/bin/env python3
"""Is it right and fast on this machine's GPU? One command, less than ten minutes.

    python benchmarks/device_check.py --json device.json
    python benchmarks/device_check.py --parts bits,speed --seconds 20
    python benchmarks/device_check.py --device cpu --parts probe      # a try of the check itself, without a GPU

Every check is a process of its own: what breaks one, an error of the GPU too, leaves the others alone. Exit status: 0
all well, 1 a check failed, 2 something was refused, like a GPU that is not there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from determinism import LAYOUTS
from facts import chosen, circumstances, number, run_main, save_json, table
from gpus import used_by_process, used_mib
from soak import name_of
from throughput import arriving, measured, ours, report
from tree import Tree, kib
from workloads import Workload, workload

from htsrl import determinism, envs
from htsrl.actors.inference import InferenceBatch, bucket_sizes, invariant_buckets, probe_rows, rows_at_once
from htsrl.envs.spec import ActionSpec, EnvSpec
from htsrl.errors import ConfigError, RunFailed
from htsrl.models import ActorCritic, FlatParameters, build_model
from htsrl.resolve import resolve_device
from htsrl.trials import plan
from htsrl.verify import head_line, row_lines, verdict, verify

CHECK_TIMEOUT_S = 150.0
"""For a check alone, beside the seconds of its measurements: one that hangs must not keep the others waiting."""
LAST_WORDS = 15
"""Lines of what a check that failed has said."""

# Of the probe: replicas, as many as a run on a GPU may have in one batch; seconds per timed batch size; and how far
# answers may be from the CPU's. Full float32 is within 1e-6, TF32 beyond 1e-4.
REPLICAS = 64
TIMED_S = 0.3
TOLERANCE = 3e-5
# Of the bits: short runs, but learned from often and strongly, so that it shows in the actions of the last intervals.
BITS: dict[str, Any] = {"num_envs": 16, "sync_interval": 16, "total_steps": 16 * 16 * 4, "epochs": 2, "minibatches": 4}
BITS |= {"learning_rate": 3e-3}
BITS_OF = {"football-synthetic": {"step_ms": 0.2}}
# Of the memory: PyTorch gives none back, so after a few updates a process holds the most that it ever will.
INTERVALS = 3

PONG = EnvSpec(
    env_id="atari:Pong",
    family="atari",
    observation_shape=(84, 84, 4),
    observation_dtype=np.dtype(np.uint8),
    observation_kind="image",
    action=ActionSpec("discrete", nvec=(6,)),
    stack=4,
)
"""For the probe, which needs the game's shapes and not the game."""


@dataclass(frozen=True)
class Check:
    """A part's question, asked of one workload."""

    part: str
    workload: Workload
    device: str
    seconds: float
    """Of a measurement of speed."""

    def __str__(self) -> str:
        return f"{self.part} {self.workload.name} on {self.device}"

    def command(self, path: Path) -> list[str]:
        """What asks it and writes the answer to ``path``."""
        own = ["--only", self.workload.name, "--parts", self.part, "--json", str(path)]
        return [sys.executable, __file__, *own, "--device", self.device, "--seconds", str(self.seconds)]


@dataclass(frozen=True)
class Part:
    """What is checked, and of which workloads."""

    body: Callable[[Check], dict[str, Any]]
    """Prints what it finds and returns it, with ``ok``, and ``error`` where that is false; or raises."""
    workloads: tuple[str, ...]
    plays: bool = True
    """Whether the environments must be installed."""
    beside_cpu: bool = False
    """Whether the CPU is asked, too, for comparison."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:NUMBER or cpu (default: cuda)")
    parser.add_argument("--parts", default=",".join(PARTS), metavar="P,P", help=f"default: {', '.join(PARTS)}")
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S", help="per measurement (default: 10)")
    parser.add_argument("--only", metavar="W", help="one workload of one part, in this process")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to keep all that was found")
    given = parser.parse_args()

    # All refusals before the first check
    parts = chosen(given.parts, tuple(PARTS), "part")
    if given.seconds <= 0:
        raise ConfigError("--seconds must be greater than 0")
    refuse_missing(given.device)
    if given.only is not None:
        return asked_here(Check(parts[0], workload(given.only), given.device, given.seconds), given.json)

    record: dict[str, Any] = {**circumstances(), "device": given.device, "seconds": given.seconds}
    record |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "checks": []}
    names = [gpu["name"] for gpu in record["machine"].get("gpus", [])]
    print(f"{', '.join(names) or 'no GPU'}; {record['machine']['cpu']}, {record['machine']['cores']} cores")
    for check in checks(parts, given.device, given.seconds):
        print(f"\n{check} ...", flush=True)
        started = time.perf_counter()
        outcome = asked(check)
        outcome = {"part": check.part, "workload": check.workload.name, "device": check.device} | outcome
        outcome["check_seconds"] = time.perf_counter() - started
        record["checks"].append(outcome)
        print(f"{check}: {word(outcome)}, {outcome['check_seconds']:.0f} s", flush=True)
        if given.json:
            save_json(given.json, record)
    print("\n" + "\n".join(summary(record["checks"])))
    return 0 if all(outcome["ok"] is not False for outcome in record["checks"]) else 1


def refuse_missing(device: str) -> None:
    """ConfigError where ``device`` isn't one, or isn't there; 'auto' would say nothing of what was checked."""
    if device == "auto":
        raise ConfigError("--device must be cuda, cuda:NUMBER or cpu, got auto")
    if device.startswith("cuda") and not torch.cuda.device_count():
        raise ConfigError("torch sees no GPU here; `--device cpu` tries the check itself without one")
    resolve_device(device)


def checks(parts: Sequence[str], device: str, seconds: float) -> Iterator[Check]:
    """All of ``parts``, in their order."""
    for part in parts:
        devices = dict.fromkeys((device, "cpu") if PARTS[part].beside_cpu else (device,))
        for name, each in itertools.product(PARTS[part].workloads, devices):
            yield Check(part, workload(name), each, seconds)


# ------------------------------------------------------------------------------------------------------ asking a check


def asked(check: Check) -> dict[str, Any]:
    """The outcome of ``check``: ``ok`` is None where it was left out, since its environment isn't installed."""
    config = check.workload.config()
    if PARTS[check.part].plays:
        try:
            envs.describe(config.env, config.environment)
        except ConfigError as error:
            return {"ok": None, "error": str(error)}
    return asked_elsewhere(check, CHECK_TIMEOUT_S + 4.0 * check.seconds)


def asked_elsewhere(check: Check, timeout_s: float) -> dict[str, Any]:
    """The outcome of ``check``, from a process of its own that is ended after ``timeout_s`` seconds."""
    with tempfile.TemporaryDirectory(prefix="device-check-") as folder:
        path = Path(folder) / "outcome.json"
        with (Path(folder) / "words").open("w+") as words:
            process = subprocess.Popen(check.command(path), stdin=subprocess.DEVNULL, stderr=words)
            tree = Tree(process.pid)
            try:
                process.wait(timeout_s)
                reason = f"it ended with status {process.returncode}"
                if process.returncode < 0:
                    reason = f"it was ended by {signal.Signals(-process.returncode).name}"
            except subprocess.TimeoutExpired:
                reason = f"it was not done after {timeout_s:.0f} s"
                tree.processes()  # which must end with it
            finally:
                tree.end(process)
            if path.exists():
                return json.loads(path.read_text(encoding="utf-8"))
            words.seek(0)
            said = words.read().splitlines()[-LAST_WORDS:]
    print("\n".join(f"  {line}" for line in said), flush=True)
    return {"ok": False, "error": f"{reason}: {said[-1]}" if said else reason, "last_words": said}


def asked_here(check: Check, path: Path | None) -> int:
    """Ask ``check`` in this process; the outcome goes to ``path``."""
    outcome = PARTS[check.part].body(check)
    if path is not None:
        save_json(path, outcome)
    return 0 if outcome["ok"] else 1


# ----------------------------------------------------------------------------------------------------------- the parts


def probe(check: Check) -> dict[str, Any]:
    """Which batch sizes give a row the same bits, how long they take, and whether the answers are the CPU's."""
    determinism.enable()
    device, config = torch.device(check.device), check.workload.config()
    spec = PONG if config.env == PONG.env_id else envs.describe(config.env, config.environment)
    model = build_model(spec, config.network, config.seed).to(device)
    rows = rows_at_once(spec, REPLICAS, device)
    sizes = bucket_sizes(rows)
    apart = batch_seconds(InferenceBatch(model, spec, sizes[-1:], device), sizes[-1])
    FlatParameters(model, gradients=False)  # as an actor has it

    started = time.perf_counter()
    invariant = invariant_buckets(model, spec, rows, device)
    probe_seconds = time.perf_counter() - started
    sizes = bucket_sizes(invariant[-1])
    batch = InferenceBatch(model, spec, sizes, device)
    found = [
        {"rows": size, "invariant": size in invariant, "milliseconds": 1000 * batch_seconds(batch, size)}
        for size in sizes
    ]
    cells = [[str(each["rows"]), "yes" if each["invariant"] else "no", number(each["milliseconds"])] for each in found]
    off = difference(model, build_model(spec, config.network, config.seed), spec, rows)
    print(table([["rows", "invariant", "ms"], *cells]))
    print(f"the probe took {probe_seconds:.1f} s; answers differ from the CPU's by {off:.1e} of their norm")
    print(f"{rows} rows with each parameter in memory of its own: {number(1000 * apart)} ms")
    wrong = f"answers differ from the CPU's by {off:.1e} of their norm: a kernel is wrong, or not float32"
    return {
        "ok": off <= TOLERANCE,
        **({"error": wrong} if off > TOLERANCE else {}),
        "network": config.network.network,
        "replicas": rows,
        "sizes": found,
        "milliseconds_with_parameters_apart": 1000 * apart,
        "probe_seconds": probe_seconds,
        "difference_from_cpu": off,
        "fingerprint": determinism.fingerprint(1, check.device),
        "most_allocated_mib": torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None,
    }


def batch_seconds(batch: InferenceBatch, rows: int) -> float:
    """The median time of a batch of ``rows``, by the clock: its way to the device and back is part of it."""
    times: list[float] = []
    for _ in range(3):
        batch.answer(rows)
    end = time.perf_counter() + TIMED_S
    while not times or time.perf_counter() < end:
        started = time.perf_counter()
        batch.answer(rows)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


@torch.inference_mode()
def difference(model: ActorCritic, reference: ActorCritic, spec: EnvSpec, rows: int) -> float:
    """How far the policy's parameters and values of ``model`` are from those of ``reference``, on the CPU.

    The norm of the difference over that of the reference's, the larger of both.
    """
    obs = torch.from_numpy(probe_rows(spec, reference.head, rows)[0])
    (device,) = {parameter.device for parameter in model.parameters()}
    pairs = zip(model.step(obs.to(device)), reference.step(obs), strict=True)
    norm = torch.linalg.vector_norm
    return max(float(norm(ours.cpu() - theirs) / norm(theirs)) for ours, theirs in pairs)


def bits(check: Check) -> dict[str, Any]:
    """Short runs in several layouts, which must give the same bits, and one with another seed, which must not."""
    own = BITS_OF.get(check.workload.name, {})
    config = check.workload.config(device=check.device, schedule="hts", **BITS, **own)
    rows = []
    print(head_line(), flush=True)
    for row in verify(plan(config, LAYOUTS["hts"], 0.0)):
        rows.append(row)
        print("\n".join(row_lines(row, rows[0])), flush=True)
    runs = [vars(row) | {"first_difference": row.first_difference and str(row.first_difference)} for row in rows]
    ok = all(row.ok for row in rows)
    return {"ok": ok, **({} if ok else {"error": verdict(rows)}), "settings": {**BITS, **own}, "runs": runs}


def speed(check: Check) -> dict[str, Any]:
    """Steps per second and the share of the limit, as throughput.py measures them."""
    each, extra = check.workload, {"device": check.device}
    result = measured(each, each.config(**extra), ours(each, ["hts"], extra), check.seconds, 1, extra)
    print("\n".join(report(result, ["hts"])))
    return {"ok": True, **result}


def memory(check: Check) -> dict[str, Any]:
    """The most that the processes of a run hold, on the host and on the GPU, after a few updates."""
    (contender,) = ours(check.workload, ["hts"], {"device": check.device})
    before = used_mib()
    with tempfile.TemporaryDirectory(prefix="device-check-") as temporary:
        folder = Path(temporary)
        with (folder / "log").open("w+") as log:
            process = subprocess.Popen(
                contender.command(folder), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
            tree = Tree(process.pid)
            try:
                lines = arriving(folder / contender.progress, process, time.perf_counter())
                for _ in itertools.islice(lines, INTERVALS):
                    pass
                roles, used = held(tree), used_mib()
            except RunFailed as failure:
                log.seek(0)
                raise RunFailed(f"{failure}: {' '.join(log.read().splitlines()[-1:])}") from None
            finally:
                tree.end(process)
    taken = None if used is None or before is None else used - before
    cells = [
        [role, f"{each['processes']:.0f}", number(each["peak_rss_mib"]), number(each["gpu_mib"])]
        for role, each in roles.items()
    ]
    print(table([["role", "processes", "peak RSS MiB", "GPU MiB"], *cells]))
    if taken is not None:
        print(f"more in use on all GPUs than before the run: {number(taken)} MiB")
    return {"ok": True, "roles": roles, "gpu_taken_mib": taken}


def held(tree: Tree) -> dict[str, dict[str, float | None]]:
    """By role, over all its processes: their number, peak RSS, and GPU memory where nvidia-smi tells whose it is."""
    by_process = used_by_process()
    roles: dict[str, dict[str, float | None]] = {}
    for each in tree.processes():
        role, _, index = name_of(Path(f"/proc/{each.pid}")).rpartition(" ")
        role = role if index.isdigit() else f"{role} {index}".strip()
        sums = roles.setdefault(role, {"processes": 0, "peak_rss_mib": 0.0, "gpu_mib": None})
        more = {"processes": 1, "peak_rss_mib": kib(each.pid, "status", "VmHWM:") / 1024}
        more |= {"gpu_mib": by_process[each.pid]} if each.pid in by_process else {}
        sums |= {name: (sums[name] or 0.0) + value for name, value in more.items()}
    return roles


PARTS = {
    "probe": Part(probe, ("pong", "football-synthetic", "cartpole"), plays=False),
    "bits": Part(bits, ("football-synthetic", "pong")),
    "speed": Part(speed, ("pong", "football-synthetic"), beside_cpu=True),
    "memory": Part(memory, ("football-synthetic", "pong")),
}


# ------------------------------------------------------------------------------------------------------------- reports


def word(outcome: dict[str, Any]) -> str:
    """What came of a check."""
    if outcome["ok"]:
        return "well"
    return f"{'left out' if outcome['ok'] is None else 'FAILED'}: {outcome['error']}"


def summary(outcomes: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The last table, and how the device's speed stands to the CPU's."""
    head = ["check", "seconds", "steps/s", "of limit", "outcome"]
    rows = []
    speeds: dict[tuple[str, str], float] = {}
    for each in outcomes:
        figures = each["medians"]["hts"] if each["ok"] and each["part"] == "speed" else {}
        if figures:
            speeds[each["workload"], each["device"]] = figures["steps_per_second"]
        cells = [number(figures.get(name)) for name in ("steps_per_second", "of_limit")]
        short = {True: "well", False: "FAILED", None: "left out"}[each["ok"]]
        check = f"{each['part']} {each['workload']} on {each['device']}"
        rows.append([check, f"{each['check_seconds']:.0f}", *cells, short])
    yield table([head, *rows])
    for (name, device), fast in speeds.items():
        if device != "cpu" and (name, "cpu") in speeds:
            yield f"{name}: {fast / speeds[name, 'cpu']:.2f} times as fast on {device} as on the CPU alone"
    yield f"{sum(each['check_seconds'] for each in outcomes):.0f} s in all"


if __name__ == "__main__":
    sys.exit(run_main(main))
