"""The only module that makes random numbers.

Every generator is counter-based (Philox) and keyed by the run's seed, a stream and a position, never by who asks or
when: the noise of replica n in interval j is the same whichever process, machine or resumed run draws it. Nothing else
in the system creates a generator, and nothing draws from a global one.
"""

from __future__ import annotations

import os
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    import torch

_MASK = (1 << 64) - 1


class Stream(IntEnum):
    """What a generator is for. Numbers are part of the determinism contract: never renumber."""

    ACTION_NOISE = 1  # position: replica n, interval j
    EPISODE = 2  # position: replica n, episode k
    MINIBATCH = 3  # position: interval j
    INITIALISATION = 4
    EVALUATION = 5  # position: episode
    EVALUATION_NOISE = 6  # position: episode
    ENVIRONMENT = 7  # inside adapters; position: whatever the adapter counts
    PROBE = 8


def generator(seed: int, stream: Stream, *position: int) -> np.random.Generator:
    """A generator for ``stream`` at up to two non-negative integers of ``position``.

    Philox has a 256-bit counter: its two highest words hold the position, the key holds seed and stream, so that each
    position owns 2^128 draws that no other position can reach.
    """
    first, second = (*position, 0, 0)[:2]
    if len(position) > 2 or min(seed, first, second) < 0:
        raise ValueError(f"position takes at most two non-negative integers, got {position} for seed {seed}")
    # Seeds above 64 bits fold into the key's second word beside the stream.
    # As uint64: NumPy makes floats of a list in which one number needs the 64th bit, and neighbouring seeds the same.
    key = np.array([seed & _MASK, ((seed >> 64) << 8 | int(stream)) & _MASK], np.uint64)
    counter = np.array([0, 0, second, first], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def episode_seed(seed: int, replica: int, episode: int) -> int:
    """Seed of episode ``episode`` of replica ``replica``: 63 bits, unrelated between seeds, replicas and episodes."""
    return int(generator(seed, Stream.EPISODE, replica, episode).integers(1 << 63))


def evaluation_seed(seed: int, episode: int) -> int:
    """Seed of the ``episode``-th evaluation episode, from a stream that training never uses."""
    return int(generator(seed, Stream.EVALUATION, episode).integers(1 << 63))


def gumbel(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Standard Gumbel noise, float32: argmax(logits + noise) is a sample of the categorical distribution."""
    return rng.gumbel(size=shape).astype(np.float32)


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Standard normal noise, float32."""
    return rng.standard_normal(size=shape, dtype=np.float32)


def action_noise(kind: Literal["gumbel", "normal"], rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Noise of the ``kind`` that an action head samples with, float32."""
    return gumbel(rng, shape) if kind == "gumbel" else normal(rng, shape)


def saved_state(rng: np.random.Generator) -> dict[str, Any]:
    """Where a generator of :func:`generator` stands, as plain numbers for JSON."""
    state = dict(rng.bit_generator.state)
    return state | {
        "state": {name: words.tolist() for name, words in state["state"].items()},
        "buffer": state["buffer"].tolist(),
    }


def continue_from(rng: np.random.Generator, saved: dict[str, Any]) -> None:
    """Let ``rng`` go on where another stood when its :func:`saved_state` was taken."""
    words = {name: np.array(values, np.uint64) for name, values in saved["state"].items()}
    rng.bit_generator.state = saved | {"state": words, "buffer": np.array(saved["buffer"], np.uint64)}


def secret() -> bytes:
    """32 bytes that nobody can guess, for the key that seals this user's files. No result depends on them."""
    return os.urandom(32)


def unseeded() -> np.random.Generator:
    """A generator that differs each time, for injected delays alone: whatever it draws must not change a bit."""
    return np.random.default_rng()


def torch_generator(seed: int, stream: Stream) -> torch.Generator:
    """A torch generator on the CPU for ``stream``, for initialisers that want one."""
    import torch

    return torch.Generator().manual_seed(int(generator(seed, stream).integers(1 << 63)))
