"""Batched inference whose answers do not depend on the batch: padded buckets, probed for bitwise invariance.

A kernel may compute a row differently at another batch size, and at small sizes even in another place of the batch. So
the actor only ever runs a few padded sizes: a probe at start looks for one that holds all replicas and gives a row the
same bits wherever it stands and whoever is beside it, and keeps the smaller ones that agree with it bit for bit. Which
rows happen to wait together then changes nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from htsrl.envs.spec import EnvSpec
from htsrl.errors import RunFailed
from htsrl.models import ActorCritic, Head
from htsrl.models.sparse import few_marks
from htsrl.rng import Stream, generator, normal


@dataclass(frozen=True)
class Answer:
    """What the policy says to B rows, as numpy arrays."""

    action: np.ndarray
    """[B, *A]"""
    log_prob: np.ndarray
    """[B] float32"""
    value: np.ndarray
    """[B] float32"""
    state: np.ndarray | None = None
    """[B, S] float32 after the rows, of a recurrent policy."""


class InferenceBatch:
    """Preallocated, padded input of the policy: pinned on the host where the device is a GPU."""

    def __init__(self, model: ActorCritic, spec: EnvSpec, buckets: list[int], device: torch.device) -> None:
        self.model = model
        self.device = device
        self.buckets = buckets
        self._most_likely = Policy(model, sampled=False)
        sampled = Policy(model, sampled=True)
        self._sample: dict[int, Callable] = dict.fromkeys(buckets, sampled)
        largest = buckets[-1]
        pinned = device.type == "cuda"
        if pinned and device.index is not None:
            torch.cuda.set_device(device)  # pinning opens a context on the current one
        dtype = torch.from_numpy(np.empty(0, spec.observation_dtype)).dtype
        self._obs = torch.zeros((largest, *spec.observation_shape), dtype=dtype, pin_memory=pinned)
        self._noise = torch.zeros((largest, model.head.noise_size), pin_memory=pinned)
        self.recurrent = model.state_size > 0
        self._state = torch.zeros((largest, model.state_size), pin_memory=pinned and self.recurrent)
        self.obs = self._obs.numpy()
        """[largest bucket, *obs]: fill the first rows, then call :meth:`answer`."""
        self.noise = self._noise.numpy()
        """[largest bucket, K]"""
        self.state = self._state.numpy()
        """[largest bucket, S]: what the rows before left; zeros for the first row of an episode."""
        self._inputs = {bucket: self._rows(bucket) for bucket in buckets}
        if device.type == "cpu" and not model.custom:
            self.obs[:], self.noise[:], self.state[:] = probe_rows(spec, model.head, largest, model.state_size)
            self._sample = {bucket: self._traced(sampled, bucket) for bucket in buckets}
            for rows in (self.obs, self.noise, self.state):
                rows.fill(0)

    @property
    def largest(self) -> int:
        """The most rows that one call can answer."""
        return self.buckets[-1]

    @torch.inference_mode()
    def answer(self, rows: int, mode: bool = False) -> Answer:
        """Answer the first ``rows`` rows of ``obs``, ``noise`` and ``state``; ``mode`` takes the most likely actions.

        RunFailed where an action is NaN, which no environment takes: it would be blamed for what it makes of that.
        """
        bucket = next(size for size in self.buckets if size >= rows)
        inputs: Iterable[torch.Tensor] = self._inputs[bucket]
        if self.device.type != "cpu":
            inputs = (x.to(self.device, non_blocking=True) for x in inputs)
        outputs = self._most_likely(*inputs) if mode else self._sample[bucket](*inputs)
        if self.device.type != "cpu":
            outputs = [x.to("cpu", non_blocking=True) for x in outputs]
            torch.cuda.current_stream(self.device).synchronize()
        answer = Answer(*(x.numpy()[:rows] for x in outputs))
        if answer.action.dtype.kind == "f" and np.isnan(answer.action).any():
            raise RunFailed(
                "the policy's action is NaN: its network has overflowed, or can't take what the environment returned; "
                "try a lower learning rate"
            )
        return answer

    def _rows(self, bucket: int) -> tuple[torch.Tensor, ...]:
        """The first ``bucket`` rows of all that the policy is given."""
        rows = self._obs[:bucket], self._noise[:bucket]
        return (*rows, self._state[:bucket]) if self.recurrent else rows

    @torch.inference_mode()
    def _traced(self, policy: Policy, bucket: int) -> Callable:
        """``policy`` for one batch size, recorded once: half of a small network's time is Python's.

        The recording runs the same kernels on the same parameters, whatever they become. A network of the user's own is
        not recorded: what it does may depend on what it sees.
        """
        rows = self._rows(bucket)
        expected = policy(*rows)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            recorded = torch.jit.trace(policy, rows, check_trace=False)
        # The executor behind it settles on its plan within a few calls
        for outputs in [recorded(*rows) for _ in range(4)]:
            if not all(torch.equal(one, other) for one, other in zip(outputs, expected)):
                return policy
        return recorded


class Policy(nn.Module):
    """A model and its head: action [B, *A], log-probability [B] and value [B] for observations and noise.

    A recurrent one takes states [B, S], too, and gives those after the rows.
    """

    def __init__(self, model: ActorCritic, sampled: bool) -> None:
        super().__init__()
        self.model = model
        self.sampled = sampled

    def forward(self, obs: torch.Tensor, noise: torch.Tensor, *state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """A sampled action, or else the most likely one."""
        head = self.model.head
        parameters, value, *state_after = self.model.step(obs, *state)
        action = head.sample(parameters, noise) if self.sampled else head.mode(parameters)
        return action, head.log_prob(parameters, action), value, *state_after


def rows_at_once(spec: EnvSpec, num_envs: int, device: torch.device) -> int:
    """How many rows the largest batch should hold.

    On a CPU the cost of a convolution grows with its rows: batches of eight lose nothing, and few waiting rows are
    padded little. Small networks and GPUs pay for the call, and take all replicas at once.
    """
    return min(num_envs, 8) if spec.has_images and device.type == "cpu" else num_envs


def bucket_sizes(largest: int) -> list[int]:
    """Candidate batch sizes up to the first that is at least ``largest``: 4, 8, 12, 16, then half-octaves."""
    sizes = [4, 8, 12, 16, 24]
    while sizes[-1] < largest:
        sizes.append(sizes[-2] * 2)
    return [size for i, size in enumerate(sizes) if i == 0 or sizes[i - 1] < largest]


@torch.inference_mode()
def invariant_buckets(model: ActorCritic, spec: EnvSpec, rows: int, device: torch.device) -> list[int]:
    """Batch sizes among which a row's bits depend on nothing but the row; the last holds ``rows`` rows.

    The result depends on the network and the machine, not on who asks: every actor of a run uses the same sizes. Rows
    look like real ones: images of random bytes, vectors of several magnitudes. Costs a few dozen forward passes.

    Raises:
        RuntimeError: even batches several times larger than ``rows`` treat their rows differently.
    """
    candidates = bucket_sizes(max(8 * rows, 64))
    for largest in (size for size in candidates if size >= rows):
        rows_of = probe_rows(spec, model.head, 2 * largest, model.state_size)
        probe = Probe(*(torch.from_numpy(x).to(device) for x in rows_of))
        straight = torch.arange(2 * largest, device=device)
        reference = torch.cat([_outputs(model, probe, half) for half in straight.split(largest)])
        if _agrees(model, probe, reference, largest):
            # Smaller sizes show what they do within a few batches
            smaller = [size for size in candidates if size < largest]
            few = {size: max(64, 4 * size) for size in smaller}
            return [s for s in smaller if _agrees(model, probe, reference[: few[s]], s)] + [largest]
    raise RuntimeError(
        f"no batch of {rows} to {candidates[-1]} rows computes each row by itself on this device ({device}), so a run "
        "could not be reproduced; try another --network or --device"
    )


@dataclass(frozen=True)
class Probe:
    """Rows to try batch sizes with."""

    obs: torch.Tensor
    noise: torch.Tensor
    state: torch.Tensor
    """[rows, S]; S = 0 without a recurrent core."""


def _agrees(model: ActorCritic, probe: Probe, reference: torch.Tensor, size: int) -> bool:
    """True if the rows of ``reference``, taken ``size`` at a time in several orders, give the same bits again."""
    straight = torch.arange(len(reference), device=reference.device)
    orders = [straight, straight.flip(0), *(straight.roll(shift) for shift in (1, 2, 3, size // 2 + 1))]
    for order in orders:
        for chosen in order.split(size):
            if len(chosen) == size and not torch.equal(_bits(_outputs(model, probe, chosen)), _bits(reference[chosen])):
                return False
    return True


def _outputs(model: ActorCritic, probe: Probe, chosen: torch.Tensor) -> torch.Tensor:
    """[B, *] of the ``chosen`` rows: distribution parameters, value, a sampled action, its log-probability, states."""
    before = (probe.state[chosen],) if model.state_size else ()
    parameters, value, *after = model.step(probe.obs[chosen], *before)
    action = model.head.sample(parameters, probe.noise[chosen])
    log_prob = model.head.log_prob(parameters, action)
    action = action.float().reshape(len(chosen), -1)
    return torch.cat([parameters, value[:, None], action, log_prob[:, None], *after], dim=1)


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32)


def probe_rows(spec: EnvSpec, head: Head, count: int, state_size: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Observations [count, *obs] of the environment's shape and dtype, noise [count, K] and states [count, S].

    They are always the same.
    """
    rng = generator(0, Stream.PROBE)
    shape = (count, *spec.observation_shape)
    noise = normal(rng, (count, head.noise_size))
    if spec.parts:
        obs = random_rows(spec, rng, count)
    elif spec.sparse:
        obs = few_marks(rng, shape)
    elif spec.observation_dtype == np.uint8:
        obs = rng.integers(0, 256, shape, np.uint8)
    else:
        scale = 10.0 ** rng.integers(-2, 3, shape)
        obs = (rng.standard_normal(shape) * scale).astype(spec.observation_dtype)
    return obs, noise, normal(rng, (count, state_size))


def random_rows(spec: EnvSpec, rng: np.random.Generator, count: int) -> np.ndarray:
    """Packed observations [count, bytes]: images of random bytes, vectors of several magnitudes, masks of all kinds."""
    rows = np.zeros((count, *spec.observation_shape), np.uint8)
    for part in spec.parts:
        shape = (count, *part.shape)
        if part.kind == "image":
            values: np.ndarray = rng.integers(0, 256, shape, np.uint8)
        elif part.kind == "mask":
            values = rng.integers(0, 2, shape, np.uint8)
            values[:, np.cumsum(spec.action.nvec) - 1] = 1  # something of every component
        else:
            values = (rng.standard_normal(shape) * 10.0 ** rng.integers(-2, 3, shape)).astype(np.float32)
        rows[:, part.bytes] = values.reshape(count, -1).view(np.uint8)
    return rows
