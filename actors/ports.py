"""What a child process is given: its place in the layout, the shared memory, and the ends of the pipes it uses."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from pydantic import BaseModel

from htsrl.actors.mailbox import Inbox, Outbox
from htsrl.config import NetworkOptions
from htsrl.envs.spec import EnvSpec
from htsrl.storage.episodes import EpisodeLog
from htsrl.storage.layout import Layout
from htsrl.storage.memory import Arena
from htsrl.storage.snapshots import SnapshotFile

if TYPE_CHECKING:
    from htsrl.actors.reports import Stack


@dataclass(frozen=True)
class Lines:
    """How the run hears of a child's troubles."""

    reports: Connection
    """'ready' once, or a fault with its traceback (see htsrl.actors.reports)."""
    stack: Stack
    """Where the child writes its stack when it is asked, because it hangs."""


@dataclass(frozen=True)
class ExecutorPorts:
    """Everything one executor knows."""

    index: int
    arena: Arena
    layout: Layout
    spec: EnvSpec
    options: BaseModel
    squash_actions: bool
    """As of the network's options."""
    seed: int
    sync_interval: int
    logs: list[EpisodeLog]
    """Where each of its replicas stands; replayed before it steps any."""
    snapshots: SnapshotFile
    """Where snapshots of its environments go."""
    inbox: Inbox
    actors: list[Outbox]
    barrier: Outbox
    lines: Lines
    delay_ms: float = 0.0
    """Longest injected pause before a group is stepped."""


@dataclass(frozen=True)
class ActorPorts:
    """Everything one actor knows."""

    index: int
    arena: Arena
    num_envs: int
    """N; all else about the layout, which may change, is in the control block."""
    spec: EnvSpec
    network: NetworkOptions
    seed: int
    sync_interval: int
    lockstep: bool
    """Schedule 'sync': wait for all replicas at every step."""
    device: str
    inbox: Inbox
    executors: list[Outbox]
    lines: Lines
    delay_ms: float = 0.0
    """Longest injected pause before a batch is answered."""
