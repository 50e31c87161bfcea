"""What a run needs of the machine, beside what there is: refused before a file is written or a process started."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from htsrl.config import AnyConfig
from htsrl.envs.spec import EnvSpec
from htsrl.errors import ConfigError
from htsrl.models import make_head
from htsrl.storage.fields import rollout_fields
from htsrl.storage.layout import Layout
from htsrl.storage.memory import total_bytes

# A process can be handed 256 descriptors at its start; an actor gets one for each executor, and the other way round.
MOST_PROCESSES = 200
# In the run's process: for each child its mailbox, its reports, its stack, and what tells either of the other's end;
# and once the shared memory, the barrier, log files, and a checkpoint or a child while it is made.
FILES_PER_CHILD = 7
FILES_ONCE = 32
# Beside executors and actors: the run with its supervisor, view and torch's own threads, the fork server, and
# multiprocessing's resource tracker.
TASKS_ONCE = 8


@dataclass(frozen=True)
class Left:
    """How much of something is left, and where that is said."""

    amount: float
    where: str


def refuse_what_does_not_fit(config: AnyConfig, spec: EnvSpec, layout: Layout) -> None:
    """Refuse a run that needs more memory, file handles or processes than this process may use.

    Raises:
        ConfigError: naming needed and available, and what to lower.
    """
    refuse_memory(config, spec)
    if layout.num_executors > MOST_PROCESSES or layout.num_actors > MOST_PROCESSES:
        raise ConfigError(
            f"num_executors and num_actors must be at most {MOST_PROCESSES} each: one executor can own many replicas"
        )
    refuse_files(config, layout)
    refuse_processes(config, layout)


def refuse_memory(config: AnyConfig, spec: EnvSpec) -> None:
    """The storages, nearly all that a run shares. What each process needs for itself comes on top."""
    T, N = config.runtime.sync_interval, config.runtime.num_envs
    storages = config.runtime.async_slots + (config.runtime.schedule == "async")  # there, one more to learn from
    fields = rollout_fields(spec, T, N, make_head(spec.action).noise_size, config.network.state_size)
    needed, left = storages * total_bytes({"storage": fields}), memory_left()
    if needed > left.amount:
        raise ConfigError(
            f"the storages of {N:,} replicas x {T:,} steps need {gib(needed)} of memory, and {gib(left.amount)} are "
            f"{left.where}: lower --num-envs or --sync-interval"
        )


def refuse_files(config: AnyConfig, layout: Layout) -> None:
    """File handles of this process, which holds most of them."""
    children = layout.num_executors + layout.num_actors + bool(config.output.eval_every)
    needed = len(os.listdir("/proc/self/fd")) + FILES_PER_CHILD * children + FILES_ONCE
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != resource.RLIM_INFINITY and needed > allowed:
        can_raise = most == resource.RLIM_INFINITY or needed <= most
        advice = f"run `ulimit -n {needed}` first, or " if can_raise else ""
        raise ConfigError(
            f"{_crew(layout)} need {needed} file handles, and {allowed} are allowed here (ulimit -n): "
            f"{advice}lower --num-executors or --num-actors"
        )


def refuse_processes(config: AnyConfig, layout: Layout) -> None:
    """Processes and threads, which the system counts together."""
    children = layout.num_executors + layout.num_actors + bool(config.output.eval_every)
    needed, left = children + int(config.runtime.learner_threads) + TASKS_ONCE, tasks_left()
    if needed > left.amount:
        raise ConfigError(
            f"{_crew(layout)} need {needed} processes and threads, and {max(left.amount, 0):.0f} more are "
            f"{left.where}: lower --num-executors or --num-actors"
        )


def memory_left(cgroups: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> Left:
    """Bytes that this process can still allocate and share, by whatever allows least."""
    found = [Left(psutil.virtual_memory().available, "available on this machine")]
    for kind, taken, where in (
        (resource.RLIMIT_AS, psutil.Process().memory_info().vms, "left of the address space (ulimit -v)"),
        (resource.RLIMIT_FSIZE, 0, "allowed for one file, as which shared memory counts (ulimit -f)"),
    ):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            found.append(Left(limit - taken, where))
    for folder in cgroup_folders("memory", cgroups, mount):
        version2 = (folder / "memory.max").exists()
        names = ("max", "current") if version2 else ("limit_in_bytes", "usage_in_bytes")
        most, taken = (_number(folder / f"memory.{name}") for name in names)
        if most is not None and taken is not None:
            # Files that were read and are not in use count as used, but make room when it is needed
            cache = _entry(folder / "memory.stat", "inactive_file" if version2 else "total_inactive_file")
            found.append(Left(most - taken + cache, f"left of this container's {gib(most)} (its cgroup's limit)"))
    return min(found, key=lambda left: left.amount)


def tasks_left(cgroups: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> Left:
    """Processes and threads that may still be started, by whatever allows least."""
    found = [Left(float("inf"), "allowed")]
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if limit != resource.RLIM_INFINITY and os.getuid() != 0:  # the administrator's are not limited
        found.append(Left(limit - tasks_of_user(os.getuid()), "allowed for this user (ulimit -u)"))
    for folder in cgroup_folders("pids", cgroups, mount):
        most, taken = _number(folder / "pids.max"), _number(folder / "pids.current")
        if most is not None and taken is not None:
            found.append(Left(most - taken, f"left of this container's {most} (its cgroup's limit)"))
    return min(found, key=lambda left: left.amount)


def tasks_of_user(uid: int) -> int:
    """Threads, of all processes, that the system counts as this user's."""
    counted = 0
    for process in psutil.process_iter(["uids", "num_threads"]):
        if process.info["uids"] is not None and process.info["uids"].real == uid:
            counted += process.info["num_threads"] or 0
    return counted


def cgroup_folders(controller: str, cgroups: Path, mount: Path) -> Iterator[Path]:
    """The folders, of this process's cgroup and all around it, that say what ``controller`` limits.

    In a container the paths may be those of the machine outside: what is visible of them counts.
    """
    try:
        lines = cgroups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = mount / controller if controllers else mount
        place = Path(path.lstrip("/"))
        yield from (root / each for each in (place, *place.parents) if (root / each).is_dir())


def gib(size: float) -> str:
    """Bytes for a person."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{max(size, 0) / 2**20:,.0f} MiB"


def _crew(layout: Layout) -> str:
    def count(number: int, word: str) -> str:
        return f"{number} {word}{'s' if number > 1 else ''}"

    return f"{count(layout.num_executors, 'executor')} and {count(layout.num_actors, 'actor')}"


def _number(file: Path) -> int | None:
    """The whole number in ``file``; None where there is no such file, or it says 'max'."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _entry(file: Path, name: str) -> int:
    """The number behind ``name`` in a file of names and numbers; 0 where there is none."""
    try:
        entries = dict(line.split() for line in file.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(entries.get(name, 0))
