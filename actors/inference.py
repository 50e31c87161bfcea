"""Batched inference whose answers do not depend on the batch: padded buckets, probed for bitwise invariance.

A kernel may compute a row differently at another batch size. So the actor only ever runs a few padded sizes, and a
probe at start keeps those whose rows agree bit for bit with the largest, wherever the row stands and whoever is beside
it. Which rows happen to wait together then changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from htsrl.envs.spec import EnvSpec
from htsrl.models import ActorCritic
from htsrl.rng import Stream, generator

# Below four rows, matrix kernels take other paths on most CPUs; the probe would only throw those sizes away.
_SMALLEST = 4


@dataclass(frozen=True)
class Answer:
    """What the policy says to B rows, as numpy arrays."""

    action: np.ndarray
    """[B, *A]"""
    log_prob: np.ndarray
    """[B] float32"""
    value: np.ndarray
    """[B] float32"""


class InferenceBatch:
    """Preallocated, padded input of the policy: pinned on the host where the device is a GPU."""

    def __init__(self, model: ActorCritic, spec: EnvSpec, rows: int, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.buckets = bucket_sizes(rows)
        largest = self.buckets[-1]
        pinned = device.type == "cuda"
        dtype = torch.from_numpy(np.empty(0, spec.observation_dtype)).dtype
        self._obs = torch.zeros((largest, *spec.observation_shape), dtype=dtype, pin_memory=pinned)
        self._noise = torch.zeros((largest, model.head.noise_size), pin_memory=pinned)
        self.obs = self._obs.numpy()
        """[largest bucket, *obs]: fill the first rows, then call :meth:`answer`."""
        self.noise = self._noise.numpy()
        """[largest bucket, K]"""

    @property
    def largest(self) -> int:
        """The most rows that one call can answer."""
        return self.buckets[-1]

    def keep(self, buckets: list[int]) -> None:
        """Use these bucket sizes only."""
        self.buckets = buckets

    @torch.inference_mode()
    def answer(self, rows: int, mode: bool = False) -> Answer:
        """Answer the first ``rows`` rows of ``obs`` and ``noise``; ``mode`` takes the most likely actions instead."""
        bucket = next(size for size in self.buckets if size >= rows)
        obs = self._obs[:bucket].to(self.device, non_blocking=True)
        noise = self._noise[:bucket].to(self.device, non_blocking=True)
        parameters, value = self.model(obs)
        head = self.model.head
        action = head.mode(parameters) if mode else head.sample(parameters, noise)
        log_prob = head.log_prob(parameters, action)
        return Answer(*(x[:rows].cpu().numpy() for x in (action, log_prob, value)))


def bucket_sizes(rows: int) -> list[int]:
    """Candidate batch sizes up to the first that holds ``rows``: multiples of 4 to 16, then half-octaves."""
    sizes = [4, 8, 12, 16]
    while sizes[-1] < rows:
        sizes.append(sizes[-2] * 2 if len(sizes) > 4 else 24)
    return [size for i, size in enumerate(sizes) if i == 0 or sizes[i - 1] < rows]


@torch.inference_mode()
def invariant_buckets(model: ActorCritic, spec: EnvSpec, buckets: list[int], device: torch.device) -> list[int]:
    """The buckets whose rows agree bit for bit with the largest, in every place and company that is tried.

    The rows look like real ones: images of random bytes, vectors of a few scales. Costs a few forward passes.
    """
    largest = buckets[-1]
    rows = torch.from_numpy(probe_rows(spec, largest)).to(device)
    reference = _outputs(model, rows)
    kept = [size for size in buckets[:-1] if _agrees(model, rows, reference, size)]
    return [*kept, largest]


def _agrees(model: ActorCritic, rows: torch.Tensor, reference: torch.Tensor, size: int) -> bool:
    """True if all rows, taken ``size`` at a time in three orders, give ``reference``'s bits."""
    count = len(rows)
    orders = [torch.arange(count), torch.arange(count).flip(0), torch.arange(count).roll(size // 2 + 1)]
    for order in orders:
        for start in range(0, count - size + 1, size):
            chosen = order[start : start + size].to(rows.device)
            if not torch.equal(_bits(_outputs(model, rows[chosen])), _bits(reference[chosen])):
                return False
    return True


def _outputs(model: ActorCritic, rows: torch.Tensor) -> torch.Tensor:
    """[B, P + 1]: distribution parameters and value."""
    parameters, value = model(rows)
    return torch.cat([parameters, value[:, None]], dim=1)


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32)


def probe_rows(spec: EnvSpec, count: int) -> np.ndarray:
    """[count, *obs]: rows of the environment's shape and dtype, always the same."""
    rng = generator(0, Stream.PROBE)
    shape = (count, *spec.observation_shape)
    if spec.observation_dtype == np.uint8:
        return rng.integers(0, 256, shape, np.uint8)
    scale = 10.0 ** rng.integers(-2, 3, shape)
    return (rng.standard_normal(shape) * scale).astype(spec.observation_dtype)
