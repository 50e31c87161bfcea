"""Normalisation of observations: the policy's first layer, whose numbers are counted instead of trained."""

from __future__ import annotations

import torch
from torch import nn

LIMIT = 5.0
"""Normalised observations are clipped to ± this (Hafner et al. 2017, in their code)."""


class Normalize(nn.Module):
    """(obs - mean) · scale, clipped to ± LIMIT; the identity within LIMIT until statistics are there.

    ``mean`` and ``scale`` belong to the parameters: :class:`FlatParameters` publishes, saves and loads them with the
    rest, so that whoever has a version of the policy has its normalisation. The learner makes them from
    :class:`htsrl.learner.moments.Moments`, and they are constants of every gradient.
    """

    mean: torch.Tensor
    """[*obs] float32"""
    scale: torch.Tensor
    """[*obs] float32"""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("scale", torch.ones(shape))

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """[B, *obs] float32, element by element: a row's bits depend on nothing but the row."""
        return ((obs - self.mean) * self.scale).clamp(-LIMIT, LIMIT)
