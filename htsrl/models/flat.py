"""All parameters of a model as one vector: publishing, the delayed update and the optimizer are one operation each."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import nn


class FlatParameters:
    """Binds a model's parameters, in name order, to views of one float32 vector, and their gradients to another.

    ``vector`` [P] and its ``.grad`` [P] are what an optimizer steps. Convolution weights are views in channels_last
    memory order, so that the vector is what the kernels read and nothing is reordered in the hot path.
    """

    def __init__(self, model: nn.Module, *, gradients: bool = True) -> None:
        self._parameters = sorted(model.named_parameters())
        first = self._parameters[0][1]
        total = sum(p.numel() for _, p in self._parameters)
        self.vector = torch.empty(total, dtype=torch.float32, device=first.device)
        grad = torch.zeros_like(self.vector) if gradients else None
        start = 0
        for _, parameter in self._parameters:
            piece = slice(start, start + parameter.numel())
            view = _as_shape(self.vector[piece], parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
            parameter.grad = _as_shape(grad[piece], parameter.shape) if grad is not None else None
            parameter.requires_grad_(gradients)
            start += parameter.numel()
        self.vector.grad = grad

    def __len__(self) -> int:
        return self.vector.numel()

    def items(self) -> Iterator[tuple[str, np.ndarray]]:
        """Name and C-contiguous copy of each parameter, in name order."""
        for name, parameter in self._parameters:
            yield name, parameter.detach().cpu().contiguous().numpy().copy()

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        """Set every parameter by name; names and shapes must be exactly the model's."""
        expected = {name: tuple(p.shape) for name, p in self._parameters}
        got = {name: tuple(a.shape) for name, a in arrays.items()}
        if expected != got:
            wrong = sorted(set(expected.items()) ^ set(got.items()))
            raise ValueError(f"parameters don't fit the network: {wrong[:4]}")
        for name, parameter in self._parameters:
            parameter.data.copy_(torch.from_numpy(arrays[name]))


def _as_shape(piece: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """View ``piece`` [numel] as ``shape``; 4-D weights as O, H, W, I in memory (channels_last)."""
    if len(shape) != 4:
        return piece.view(shape)
    out_channels, in_channels, height, width = shape
    return piece.view(out_channels, height, width, in_channels).permute(0, 3, 1, 2)
