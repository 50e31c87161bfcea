"""How long each part takes by itself: the real executor, actor and learner, with a stand-in for whom they talk to.

An executor's and an actor's turn are timed in their real process bodies: this process answers or asks in place of the
other side, one turn at a time, and reads the child's CPU clock. Meanwhile the other cores are busy with the same
workload, as in a run. Core time is hardly disturbed by other programs. What is not core time are the seconds of a
learner on several cores, measured with nothing beside it, and how long a message's reader takes to wake up.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import queue
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from company import company
from contract_cost import draw_noise
from workloads import Workload, workload

from htsrl import determinism, envs, processes
from htsrl.actors.actor import run_actor
from htsrl.actors.executor import run_executor
from htsrl.actors.mailbox import LOOK, Inbox, mailbox
from htsrl.actors.ports import ActorPorts, ExecutorPorts, Lines
from htsrl.actors.reports import Stack
from htsrl.config import AnyConfig
from htsrl.envs.spec import EnvSpec
from htsrl.errors import RunFailed
from htsrl.learner.learner import Learner
from htsrl.models import build_model
from htsrl.models.sparse import few_marks
from htsrl.resolve import layout_for, resolve
from htsrl.storage.digest import trajectory_digest
from htsrl.storage.episodes import EpisodeLog, EpisodeLogs
from htsrl.storage.fields import control_fields, rollout_fields
from htsrl.storage.layout import Layout
from htsrl.storage.memory import Arena
from htsrl.storage.observations import is_stacked, stack_of
from htsrl.storage.snapshots import SnapshotFile

SLICES = 200
"""A sample is kept as the means of this many slices of it."""
NAP_MS, REGULAR = 2.0, 1e9
"""Mean and shape of the sleeps that are timed."""
T = 32
"""Steps per interval of the executor alone."""
PATIENCE_S = 60.0
MARKS = 16
"""At most, in a frame of football: twice those of three against one, a keeper on each side, ball and active player."""
LENGTHS = (128, 32)
"""Intervals at which the learner is timed: one of the usual length, one to tell fixed costs from those per row."""


# ---------------------------------------------------------------------------------------------------- one child, alone


@contextmanager
def child(body: Callable[[Any], None], ports: Callable[[Lines], Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """A process that runs ``body``, from when it is ready; its id, and what it said then. Killed at the end.

    Raises:
        RunFailed: it did not get ready.
    """
    (reports, report), stack = multiprocessing.Pipe(duplex=False), Stack()
    process = processes.start(body, ports(Lines(report, stack)), "alone")
    report.close()
    try:
        message: dict[str, Any] = {"kind": "progress"}
        while message["kind"] == "progress":
            try:
                message = json.loads(reports.recv_bytes())
            except EOFError:
                raise RunFailed("a process to be measured ended at its start") from None
        if message["kind"] != "ready":
            raise RunFailed(f"a process to be measured failed at its start:\n{message.get('traceback', message)}")
        assert process.pid is not None
        yield process.pid, message
    finally:
        process.kill()
        process.join()
        for each in (reports, stack):
            each.close()


def cpu_clock(pid: int) -> Callable[[], float]:
    """Reads the CPU seconds that process ``pid`` has used; Linux numbers the clocks of processes like this."""
    number = (~pid << 3) | 2
    return lambda: time.clock_gettime(number)


@dataclass(frozen=True)
class Turns:
    """What an executor's turns took, one after the other, in the order of its groups."""

    cpu_s: np.ndarray
    """[intervals, T-1, G]"""
    idle_s: np.ndarray
    """[intervals, T-1, G] wall-clock time in which neither it nor its stand-in actor computed."""
    arrive_s: float
    """CPU time per replica at the barrier."""


def executor_alone(config: AnyConfig, replicas: int, group: int, seconds: float) -> Turns:
    """One executor with ``replicas`` replicas in groups of ``group``, whose groups are answered one at a time.

    Raises:
        RunFailed: it ended.
    """
    spec = envs.describe(config.env, config.environment)
    layout = Layout(replicas, 1, 1, group)
    G = len(layout.groups)
    fields = rollout_fields(spec, T, replicas, 1)
    with ExitStack() as opened:
        arena = Arena.create({"control": control_fields(G, 1, 1), "even": fields, "odd": fields})
        opened.callback(arena.close)
        control = arena.views("control")
        for name in ("even", "odd"):
            random_actions(arena.views(name).action, spec.action)
        to_executor, to_actor, barrier = ends = mailbox(), mailbox(), mailbox()
        for each in (end for pair in ends for end in pair):
            opened.callback(each.close)
        snapshots = SnapshotFile()
        opened.callback(snapshots.close)
        control.interval[0] = -1
        no_actions = np.empty((0, *spec.action.stored_shape), spec.action.stored_dtype)
        logs = [EpisodeLog(episode=0, pieces=(no_actions,)) for _ in range(replicas)]

        def ports(lines: Lines) -> ExecutorPorts:
            return ExecutorPorts(
                index=0,
                arena=arena,
                layout=layout,
                spec=spec,
                options=config.environment,
                squash_actions=config.network.squash_actions,
                seed=0,
                sync_interval=T,
                logs=logs,
                snapshots=snapshots,
                inbox=to_executor[0],
                actors=[to_actor[1]],
                barrier=barrier[1],
                lines=lines,
            )

        pid, _ = opened.enter_context(child(run_executor, ports))
        for _, end in (to_actor, barrier):
            end.close()  # the executor's is the only one left: if it ends, so do our reads
        cpu = cpu_clock(pid)
        turns: list[list[float]] = []
        idles: list[list[float]] = []
        arrivals = []
        until = time.perf_counter() + seconds
        while time.perf_counter() < until or len(turns) < 2:
            # An interval: every group is answered T times, the last time all together
            control.interval[0] += 1
            to_executor[1].post(LOOK)
            waiting = deque(expect(to_actor[0], G))
            spent, idle = [], []
            for _ in range((T - 1) * G):
                g = waiting.popleft()
                before, own, started = cpu(), time.process_time(), time.perf_counter()
                control.answered[g] += 1
                to_executor[1].post(g)
                waiting.extend(expect(to_actor[0], 1))
                wall, own, after = time.perf_counter() - started, time.process_time() - own, cpu()
                spent.append(after - before)
                idle.append(wall - own - spent[-1])
            before = cpu()
            control.answered[list(waiting)] += 1
            to_executor[1].post(*waiting)
            expect(barrier[0], 1)
            arrivals.append((cpu() - before - G * statistics.fmean(spent)) / replicas)
            turns.append(spent)
            idles.append(idle)
    shape = (len(turns), T - 1, G)
    return Turns(np.reshape(turns, shape), np.reshape(idles, shape), max(statistics.median(arrivals), 0.0))


def expect(inbox: Inbox, count: int) -> list[int]:
    """At least ``count`` numbers.

    Raises:
        RunFailed: there is nobody left to send them.
    """
    numbers: list[int] = []
    while len(numbers) < count:
        try:
            numbers += inbox.take()
        except EOFError:
            raise RunFailed("a process ended while it was measured") from None
    return numbers


def random_actions(action: np.ndarray, space: Any) -> None:
    """Fill ``action`` [T, N, *A] with random actions."""
    rng = np.random.default_rng(0)
    if space.kind == "box":
        action[:] = rng.standard_normal(action.shape)
    else:
        action[:] = rng.integers(0, space.nvec[0] if space.kind == "discrete" else space.nvec, action.shape)


def actor_alone(config: AnyConfig, executors: int, seconds: float) -> tuple[list[int], dict[int, float]]:
    """Its batch sizes, and the median CPU seconds of a turn for numbers of waiting rows, each its own group.

    Rows: every batch size of the actor, the last as far as there are replicas, and twice that if there are as many.
    Every executor is a thread that sleeps until it is told.

    Raises:
        RunFailed: it ended.
    """
    spec, N = envs.describe(config.env, config.environment), config.runtime.num_envs
    model = build_model(spec, config.network, 0)
    layout = Layout(N, executors, 1, 1)
    parameters = sum(each.numel() for each in model.parameters())
    fields = rollout_fields(spec, 1, N, model.head.noise_size, model.state_size)
    told: queue.SimpleQueue[int] = queue.SimpleQueue()
    with ExitStack() as opened:
        arena = Arena.create({"control": control_fields(N, executors, parameters), "even": fields, "odd": fields})
        opened.callback(arena.close)
        control, storage = arena.views("control"), arena.views("even")
        control.layout[:] = layout.numbers
        random_observations(storage, spec)
        to_actor, to_executors = mailbox(), [mailbox() for _ in range(executors)]

        def ports(lines: Lines) -> ActorPorts:
            return ActorPorts(
                index=0,
                arena=arena,
                num_envs=N,
                spec=spec,
                network=config.network,
                seed=0,
                sync_interval=1,
                lockstep=False,
                device="cpu",
                inbox=to_actor[0],
                executors=[post for _, post in to_executors],
                lines=lines,
            )

        threads = [threading.Thread(target=listen, args=(inbox, told), daemon=True) for inbox, _ in to_executors]
        for thread in threads:
            thread.start()
        with child(run_actor, ports) as (pid, facts):
            cpu, largest = cpu_clock(pid), facts["buckets"][-1]
            sizes = {min(size, N) for size in (*facts["buckets"], 2 * largest if 2 * largest <= N else largest)}
            spent: dict[int, list[float]] = {rows: [] for rows in sorted(sizes)}
            end = time.perf_counter() + seconds
            while time.perf_counter() < end or len(spent[min(sizes)]) < 6:
                for rows, times in spent.items():
                    control.answered[:] = 0
                    control.posted[:rows] = 1
                    before = cpu()
                    to_actor[1].post(*range(rows))
                    try:
                        for _ in range(rows):
                            told.get(timeout=PATIENCE_S)
                    except queue.Empty:
                        raise RunFailed("an actor did not answer while it was measured") from None
                    times.append(cpu() - before)
        for _, post in to_executors:
            post.close()
        for thread in threads:
            thread.join()
        for each in (*to_actor, *(inbox for inbox, _ in to_executors)):
            each.close()
    return facts["buckets"], {rows: statistics.median(times[2:]) for rows, times in spent.items()}


def listen(inbox: Inbox, told: queue.SimpleQueue[int]) -> None:
    """Pass on every number until there is nobody left to send one."""
    with suppress(EOFError):
        while True:
            for number in inbox.take():
                told.put(number)


def random_observations(storage: Any, spec: EnvSpec) -> None:
    """Fill ``storage`` with observations of random values; stacked ones are all within an episode."""
    rng = np.random.default_rng(0)
    stacked = is_stacked(storage)
    seen = storage.frames if stacked else storage.obs
    if spec.sparse:
        images = seen.reshape(-1, *seen.shape[2:])
        images[:] = few_marks(rng, images.shape, MARKS)
    elif seen.dtype == np.uint8:
        seen[:] = rng.integers(0, 256, seen.shape, np.uint8)
    else:
        seen[:] = rng.standard_normal(seen.shape, np.float32)
    if stacked:
        storage.past[:] = stack_of(storage) - 1


# ----------------------------------------------------------------------------------------------------------- the parts


def measured_messages(seconds: float) -> dict[str, float]:
    """What messages cost, in seconds; the same for every workload.

    ``turn_s``: an executor's loop and messages for one group; ``tell_s``: an actor's message to one executor;
    ``hop_s``: from a message's writing until a sleeping reader runs; ``oversleep_s``: by how much sleeps are too long.
    """
    wide = workload("sleep-1-1-16")
    awake = wide.config(step_ms=0.0)
    processes.launch(envs.module_of(awake.env))
    single, grouped = executor_alone(awake, 16, 1, seconds), executor_alone(awake, 16, 16, seconds)
    napping = executor_alone(wide.config(step_ms=NAP_MS, step_shape=REGULAR), 16, 1, seconds)
    # A turn is messages + replicas x step, with one replica and with sixteen
    one, sixteen = (float(np.median(each.cpu_s)) for each in (single, grouped))
    hop_s = max(float(np.median(single.idle_s)) / 2, 0.0)
    to_one, to_all = (actor_alone(awake, executors, seconds)[1][16] for executors in (1, 16))
    return {
        "turn_s": max((16 * one - sixteen) / 15, 0.0),
        "tell_s": max((to_all - to_one) / 15, 0.0),
        "hop_s": hop_s,
        "oversleep_s": max(float(np.median(napping.idle_s)) - NAP_MS / 1000 - 2 * hop_s, 0.0),
    }


def measured_workload(each: Workload, messages: dict[str, float], seconds: float) -> dict[str, Any]:
    """Steps, inference and learning of one workload, each for about ``seconds``."""
    # Sleeping costs no core: a short and regular sleep shows what surrounds it
    config = each.config(**({"step_ms": NAP_MS, "step_shape": REGULAR} if each.sleep else {}))
    spec = envs.describe(config.env, config.environment)
    processes.launch(envs.module_of(config.env))
    learner = LearnerAlone(config)
    _, alone_s = learner.update(LENGTHS[-1], 1, seconds / 4)
    together = {threads: learner.updates(threads, seconds / 4) for threads in learner.learners if threads > 1}
    with company(each.name):
        beside = learner.updates(1, seconds / 4)
        slower = beside[-1][1] / alone_s
        return {
            "settings": {"env": each.env, "algo": each.algo, **each.settings},
            "observation_bytes": math.prod(spec.observation_shape) * spec.observation_dtype.itemsize,
            "parameters": learner.parameters,
            "gradient_steps": getattr(config.algorithm, "epochs", 1) * getattr(config.algorithm, "minibatches", 1),
            "slower_in_company": slower,
            "learning": {
                "1": learner.line([cpu for _, cpu in beside]) | {"cores": 1.0},
                **{
                    str(threads): learner.line([slower * wall for wall, _ in pairs])
                    | {"cores": min(max(pairs[0][1] / pairs[0][0], 1.0), threads)}
                    for threads, pairs in together.items()
                },
            },
            **learner.others(seconds / 4),
            "inference": measured_inference(config, seconds),
            "steps": measured_steps(config, messages["turn_s"], seconds),
        }


def measured_steps(config: AnyConfig, turn_s: float, seconds: float) -> dict[str, Any]:
    """A step's core time without the messages around it, which take ``turn_s``.

    Its distribution from replicas stepped one by one; its mean from groups as large as in a run, in which the code is
    at hand from the second replica on.
    """
    layout = layout_for(config, envs.describe(config.env, config.environment))
    replicas, group = len(layout.executor_columns[0]), len(layout.groups[0])
    single = executor_alone(config, replicas, 1, seconds)
    grouped = single if group == 1 else executor_alone(config, replicas, group, seconds)
    mean = max(float(grouped.cpu_s.mean()) - turn_s, 0.0) / group
    steps = np.maximum(single.cpu_s - turn_s, 0.0)
    sums = steps.sum(axis=1)
    return {
        "slices_s": slices(steps.ravel(), mean),
        "mean_s": mean,
        "shape": float(steps.mean() ** 2 / steps.var()),
        "shape_in_sums": float(sums.mean() ** 2 / sums.var() / (T - 1)),
        "count": steps.size,
        "replicas": replicas,
        "group": group,
        "arrive_s": grouped.arrive_s,
    }


def slices(sample: np.ndarray, mean: float) -> list[float]:
    """The means of SLICES parts of the sorted ``sample``, or of as many as it has numbers, scaled to have ``mean``."""
    parts = np.array([part.mean() for part in np.array_split(np.sort(sample), min(SLICES, len(sample)))])
    return (parts * (mean / parts.mean())).tolist()


def measured_inference(config: AnyConfig, seconds: float) -> dict[str, Any]:
    """An actor's turn for every batch size, and for one batch more; the straight line is for reading alone."""
    buckets, costs = actor_alone(config, 1, seconds)
    N, largest = config.runtime.num_envs, buckets[-1]
    bucket_s = [costs[min(size, N)] for size in buckets]
    line = np.polyfit(buckets, bucket_s, 1) if len(buckets) > 1 else (0.0, bucket_s[0])
    return {
        "buckets": buckets,
        "bucket_s": bucket_s,
        "more_s": max(costs.get(2 * largest, 2 * bucket_s[-1]) - bucket_s[-1], 0.0),
        "call_s": float(line[1]),
        "row_s": float(line[0]),
    }


class LearnerAlone:
    """The learner, with one thread and with as many as in a run, and what else the run does with a full storage.

    The storages hold random data, one of each of LENGTHS.
    """

    def __init__(self, config: AnyConfig) -> None:
        spec = envs.describe(config.env, config.environment)
        self.N = config.runtime.num_envs
        determinism.enable()

        def learner(threads: int) -> Learner:
            # It asserts the lag between data and parameters; with data of our own, 'sync' has the simplest: none
            changes = {"schedule": "sync", "device": "cpu", "learner_threads": threads}
            runtime = config.runtime.model_copy(update=changes)
            resolved = resolve(config.model_copy(update={"runtime": runtime}), spec)
            return Learner(resolved, spec, torch.device("cpu"))

        own = int(resolve(config, spec).runtime.learner_threads)
        self.learners = {threads: learner(threads) for threads in sorted({1, own})}
        self.model, self.parameters = self.learners[1].model, len(self.learners[1].parameters)
        self.storages = {length: self._storage(spec, length) for length in LENGTHS}

    def _storage(self, spec: EnvSpec, length: int) -> SimpleNamespace:
        fields = rollout_fields(spec, length, self.N, self.model.head.noise_size, self.model.state_size)
        storage = SimpleNamespace(**{each.name: np.zeros(each.shape, each.dtype) for each in fields})
        random_observations(storage, spec)
        random_actions(storage.action, spec.action)
        storage.reward[:] = np.random.default_rng(0).standard_normal(storage.reward.shape)
        storage.valid[:] = True
        return storage

    def updates(self, threads: int, seconds: float) -> list[tuple[float, float]]:
        """Wall-clock and CPU seconds of an update at each of LENGTHS."""
        return [self.update(length, threads, seconds) for length in LENGTHS]

    def update(self, length: int, threads: int, seconds: float) -> tuple[float, float]:
        """Wall-clock and CPU seconds of an update on ``length`` steps."""
        storage, learner = self.storages[length], self.learners[threads]

        def learn() -> None:
            storage.behaviour_version[0] = learner.version
            learner.learn(storage, 0.0)

        return wall_and_cpu(learn, seconds)

    def line(self, seconds: list[float]) -> dict[str, float]:
        """``fixed_s + rows · row_s`` through the ``seconds`` at both LENGTHS."""
        long, short = LENGTHS
        row_s = max((seconds[0] - seconds[1]) / (long - short) / self.N, 0.0)
        return {"fixed_s": max(seconds[1] - short * self.N * row_s, 0.0), "row_s": row_s}

    def others(self, seconds: float) -> dict[str, dict[str, float]]:
        """CPU seconds per replica and per row of the run's other work: ``record``, ``noise`` and ``between``."""
        parts = {"record": self._record, "noise": self._noise, "between": self._between}
        return {name: self._per_replica(part, seconds) for name, part in parts.items()}

    def _per_replica(self, part: Callable[[Any], None], seconds: float) -> dict[str, float]:
        def core_s(storage: Any) -> float:
            return wall_and_cpu(lambda: part(storage), seconds)[1] / self.N

        long, short = map(core_s, self.storages.values())
        row_s = max((long - short) / (LENGTHS[0] - LENGTHS[1]), 0.0)
        return {"replica_s": max(short - LENGTHS[1] * row_s, 0.0), "row_s": row_s}

    def _record(self, storage: Any) -> None:
        trajectory_digest(bytes(32), storage)

    def _noise(self, storage: Any) -> None:
        draw_noise(SimpleNamespace(storage=storage, model=self.model), keyed=True)  # type: ignore[arg-type]

    def _between(self, storage: Any) -> None:
        no_actions = storage.action[:0, 0]
        EpisodeLogs([EpisodeLog(episode=0, pieces=(no_actions,)) for _ in range(self.N)], 0).advance(storage)
        storage.valid.sum()
        storage.episode_return.T[storage.episode_length.T > 0].tolist()
        # Parameters are published by the run, then taken by the actor
        for _ in range(2):
            self.learners[1].newest.clone()


def wall_and_cpu(part: Callable[[], Any], seconds: float) -> tuple[float, float]:
    """Median wall-clock and CPU seconds of a call: once to warm up, then for ``seconds``, at least twice."""
    part()
    walls: list[float] = []
    cpus: list[float] = []
    end = time.perf_counter() + seconds
    while len(walls) < 2 or time.perf_counter() < end:
        wall, cpu = time.perf_counter(), time.process_time()
        part()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return statistics.median(walls), statistics.median(cpus)
