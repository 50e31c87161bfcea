"""What the runtime knows of an environment: a plain description, made once, sent to every process."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np


@dataclass(frozen=True)
class ActionSpec:
    """An action space. Shapes in the storage: ``[]`` (discrete), ``[A]`` (all others)."""

    kind: Literal["discrete", "multi_discrete", "multi_binary", "box"]
    nvec: tuple[int, ...] = ()
    """Number of choices per component; one entry for 'discrete', twos for 'multi_binary'."""
    start: int = 0
    """First value of a 'discrete' space: the environment receives action + start."""
    low: tuple[float, ...] = ()
    """Lower bounds of 'box', flattened; -inf where there is none."""
    high: tuple[float, ...] = ()
    """Upper bounds of 'box', flattened."""
    shape: tuple[int, ...] = ()
    """Shape in which the environment wants an action that is not 'discrete'."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of one action in the storage."""
        return () if self.kind == "discrete" else (len(self.nvec) + len(self.low),)

    @property
    def stored_dtype(self) -> np.dtype:
        """Dtype of one action in the storage."""
        return np.dtype(np.float32 if self.kind == "box" else np.int64)


@dataclass(frozen=True)
class Part:
    """One part of observations that are packed into a row of bytes."""

    name: str
    """Keys of the observation space on the way to it, with dots between them."""
    kind: Literal["vector", "image", "mask"]
    """'mask' says which actions are allowed, [A] or all components' choices side by side; the others are seen."""
    shape: tuple[int, ...]
    """Images are H, W, C."""
    dtype: np.dtype
    """uint8 for images and masks, float32 for vectors."""
    start: int
    """Its first byte, a multiple of PART_ALIGNMENT."""

    @property
    def bytes(self) -> slice:
        """Its place in the row."""
        return slice(self.start, self.start + math.prod(self.shape) * self.dtype.itemsize)


PART_ALIGNMENT = 4
"""Parts begin, and rows end, at multiples of this many bytes: a row's float32 may be looked at where they are."""


@dataclass(frozen=True)
class EnvSpec:
    """One environment family member, as the storage, the models and the executors need to know it."""

    env_id: str
    """The name that the user gave, normalised: 'gfootball:academy_empty_goal_close', 'atari:Pong', 'CartPole-v1'."""
    family: Literal["gymnasium", "atari", "football", "synthetic"]
    observation_shape: tuple[int, ...]
    """Shape of one observation as the environment (adapter) returns it; images are H, W, C."""
    observation_dtype: np.dtype
    """Dtype in the storage: uint8 for images and packed observations, float32 for everything else."""
    observation_kind: Literal["vector", "image", "packed"]
    """'packed' rows of bytes [bytes] hold all ``parts`` of an observation, one behind the other."""
    action: ActionSpec
    frame_skip: int = 1
    """Frames per agent step, for reports."""
    max_episode_steps: int | None = None
    """The executor truncates an episode after this many steps."""
    has_raw_reward: bool = False
    """True where ``info['raw_reward']`` accompanies every step; elsewhere the reward itself is what reports add up."""
    has_life_loss: bool = False
    """True where ``info['life_lost']`` marks steps that the learner sees as terminations while the game goes on."""
    has_score: bool = False
    """True where ``info['score']`` accompanies every step: the episode's so far (football: goals for minus against)."""
    stack: int = 1
    """Frames that an observation [H, W, S * C] uint8 holds side by side in every pixel, oldest first.

    Where there are several, the first observation of an episode holds the same one S times, and every other one all but
    the oldest of the one before: so each is stored once (`htsrl.storage.observations`). Of 1, 2, 4 or 8 bytes C.
    """
    sparse: bool = False
    """True where nearly all bytes of an observation, one image of uint8, are 0 (see `htsrl.models.sparse`)."""
    sleeps: bool = False
    """True where a step waits instead of computing, so that many executors fit on one core."""
    versions: dict[str, str] = field(default_factory=dict, hash=False)
    """Versions of the packages that decide what the environment does."""
    parts: tuple[Part, ...] = ()
    """Of packed observations."""
    mask_in_info: bool = False
    """True where the mask among ``parts`` comes from ``info['action_mask']``, not from the observation."""

    @property
    def frame_shape(self) -> tuple[int, ...]:
        """Shape of each of the frames that make an observation."""
        *image, channels = self.observation_shape
        return (*image, channels // self.stack)

    @property
    def has_images(self) -> bool:
        """True where observations are images, or some part of them is."""
        return self.observation_kind == "image" or any(part.kind == "image" for part in self.parts)

    @property
    def mask(self) -> Part | None:
        """The part that says which actions are allowed; None where all are, always."""
        return next((part for part in self.parts if part.kind == "mask"), None)


class Environment(Protocol):
    """What an executor steps: Gymnasium's API without the parts that nobody calls.

    ``reset`` always gets a seed of at most 63 bits, and seed plus actions decide everything that follows, whatever was
    played before. Time limits are the executor's. An adapter may return the same array and the same info each time: the
    executor copies at once. ``row[...] = observation`` fills a row of the spec's shape and dtype.

    ``step`` gets an ``int`` (discrete, start added), an int64 array or a float32 array within the bounds, in the
    action's ``shape``. What ``info`` means is declared by the spec (``has_raw_reward``, ``has_life_loss``,
    ``has_score``); anything else in it is the environment's own.
    """

    def reset(self, seed: int) -> np.ndarray: ...

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]: ...

    def render(self) -> np.ndarray | None:
        """A picture [height, width, 3] uint8 for videos; None where the environment can't draw."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Restorable(Environment, Protocol):
    """An environment that can also say where it is, so that a resumed run need not replay a long episode.

    Optional: without it a run resumes all the same, by playing the episode again from its seed. A Gymnasium environment
    offers it by having both methods itself (the outermost one, where its registration adds wrappers: what a wrapper
    remembers belongs into the snapshot, too).

    ``snapshot`` may be called between any two steps of an episode and must change nothing. It holds everything that
    seed and later actions don't decide: counters, the state of generators, what earlier observations left behind. The
    same state must give the same bytes, and nobody may need pickle to read them. 16 MiB at most.

    ``restore`` is called right after ``reset`` with the seed of the same episode, usually in another process; the next
    step must then be as if all the steps before had been made. It may raise anything: the episode is replayed then.
    So it is when steps after ``restore`` lead to another snapshot or observation than before.
    """

    def snapshot(self) -> bytes: ...

    def restore(self, snapshot: bytes) -> None: ...


def seed31(seed: int) -> int:
    """``seed`` folded to 31 bits, for environments whose seeds are C integers; smaller ones stay as they are."""
    return (seed ^ seed >> 31 ^ seed >> 62) & 0x7FFFFFFF
