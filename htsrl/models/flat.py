"""All parameters of a model as one vector: publishing, the delayed update and the optimizer are one operation each."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import nn


class Shard:
    """A gradient vector beside a model's own, and views of it in the shapes of the model's ``tensors``."""

    def __init__(self, tensors: list[nn.Parameter], vector: torch.Tensor) -> None:
        self.grad = torch.zeros_like(vector)
        sizes = [tensor.numel() for tensor in tensors]
        self.views = [_as_shape(piece, t.shape) for piece, t in zip(self.grad.split(sizes), tensors, strict=True)]


class FlatParameters:
    """Binds a model's parameters, in name order, to views of one float32 vector, and their gradients to another.

    ``vector`` [P] and its ``.grad`` [P] are what an optimizer steps. Convolution weights are views in channels_last
    memory order, so that the vector is what the kernels read and nothing is reordered in the hot path.

    ``shards`` is how many parts a minibatch's gradient is computed in, each in a thread of its own; with more than one,
    every part has a gradient of its own until they are added up, in order.

    Without gradients, the trunk of a model of ours that computes in bfloat16 has copies of that type, made once per
    :meth:`assign` instead of in every forward pass.

    ``state`` [P + S] is ``vector`` and behind it the S numbers of the model's normalisation of observations, in name
    order, 0 without one: what is published, saved and digested as the parameters, though no optimizer steps it.
    """

    def __init__(self, model: nn.Module, *, gradients: bool = True, shards: int = 1) -> None:
        parameters = sorted(model.named_parameters())
        total = sum(p.numel() for _, p in parameters)
        normalize = getattr(model, "normalize", None)
        constants = sorted(normalize.named_buffers(prefix="normalize")) if normalize is not None else []
        size = total + sum(buffer.numel() for _, buffer in constants)
        self.state = torch.empty(size, dtype=torch.float32, device=parameters[0][1].device)
        self.vector = self.state[:total]
        grad = torch.zeros_like(self.vector) if gradients else None
        rounded = not gradients and getattr(model, "bf16", False) and not model.custom
        self._views: dict[str, torch.Tensor] = {}
        self._rounded: list[tuple[nn.Parameter, torch.Tensor]] = []
        start = 0
        for name, parameter in parameters:
            piece = slice(start, start + parameter.numel())
            view = _as_shape(self.vector[piece], parameter.shape)
            view.copy_(parameter.detach())
            self._views[name] = parameter.data = view
            if rounded and name.startswith("trunk."):
                parameter.data = view.to(torch.bfloat16)
                self._rounded.append((parameter, view))
            parameter.grad = _as_shape(grad[piece], parameter.shape) if grad is not None else None
            parameter.requires_grad_(gradients)
            start += parameter.numel()
        self.vector.grad = grad
        every = dict(self._views)
        for name, buffer in constants:
            view = self.state[start : start + buffer.numel()].view(buffer.shape)
            view.copy_(buffer)
            every[name] = buffer.data = view
            start += buffer.numel()
        self._every = dict(sorted(every.items()))
        self.tensors = [parameter for _, parameter in parameters]
        """Every parameter, in name order."""
        self.shards = [Shard(self.tensors, self.vector) for _ in range(shards)] if gradients and shards > 1 else []
        self.parts = len(self.shards) or 1
        """How many parts a minibatch's gradient is computed in."""

    def __len__(self) -> int:
        """P + S."""
        return self.state.numel()

    def assign(self, state: torch.Tensor) -> None:
        """Set all parameters, from [P + S] float32 on any device."""
        self.state.copy_(state)
        self._round()

    def items(self) -> Iterator[tuple[str, np.ndarray]]:
        """Name and C-contiguous copy of each parameter, in name order."""
        for name, view in self._every.items():
            yield name, view.cpu().contiguous().numpy().copy()

    def gradients(self) -> Iterator[tuple[str, np.ndarray]]:
        """Name and C-contiguous copy of each parameter's gradient, in name order."""
        assert self.vector.grad is not None, "made without gradients"
        start = 0
        for name, view in self._views.items():
            piece = self.vector.grad[start : start + view.numel()]
            yield name, _as_shape(piece, view.shape).cpu().contiguous().numpy().copy()
            start += view.numel()

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        """Set every parameter by name; ValueError where names, shapes or dtypes aren't exactly the model's."""
        expected = {name: ("float32", *view.shape) for name, view in self._every.items()}
        got = {name: (str(a.dtype), *a.shape) for name, a in arrays.items()}
        if expected != got:
            wrong = sorted(set(expected.items()) ^ set(got.items()))
            raise ValueError(f"parameters don't fit the network: {wrong[:4]}")
        for name, view in self._every.items():
            view.copy_(torch.from_numpy(arrays[name]))
        self._round()

    def _round(self) -> None:
        for parameter, view in self._rounded:
            parameter.data.copy_(view)


def _as_shape(piece: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """View ``piece`` [numel] as ``shape``; 4-D weights as O, H, W, I in memory (channels_last)."""
    if len(shape) != 4:
        return piece.view(shape)
    out_channels, in_channels, height, width = shape
    return piece.view(out_channels, height, width, in_channels).permute(0, 3, 1, 2)
