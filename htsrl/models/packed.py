"""The network for packed observations with images: each part by what suits it, and the features side by side.

Every image has a CNN of its own, all vectors together an MLP. Packed vectors alone are the MLP's, see
`htsrl.models.networks`. The mask is no part of what is seen: it acts on the policy's logits.
"""

from __future__ import annotations

import torch
from torch import nn

from htsrl.config import NetworkOptions
from htsrl.envs.spec import EnvSpec, Part
from htsrl.models.heads import Head
from htsrl.models.networks import (
    ActorCritic,
    Vectors,
    hidden_layers,
    impala_trunk,
    nature_trunk,
    on_trunk,
    part_of,
)


def packed_network(spec: EnvSpec, head: Head, options: NetworkOptions, rng: torch.Generator) -> ActorCritic:
    """A linear policy and value function on the features of all parts; ``options.network`` names the images' CNN."""
    images = [part for part in spec.parts if part.kind == "image"]
    trunks = []
    features = 0
    for part in images:
        if options.network == "impala":
            trunk, size = impala_trunk(part.shape, part.dtype, options, rng)
        else:
            trunk, size = nature_trunk(part.shape, part.dtype, spec.env_id, options, rng)
        trunks.append(trunk)
        features += size
    vectors = Vectors(spec.parts)
    if vectors.size:
        hidden, size = hidden_layers(vectors.size, options, rng)
        trunks.append(nn.Sequential(vectors, *hidden))
        features += size
    return on_trunk(SideBySide(images, trunks), features, head, options, rng)


class SideBySide(nn.Module):
    """The features [B, F] of packed observations [B, bytes]: each of ``images`` by its own trunk, then the vectors."""

    def __init__(self, images: list[Part], trunks: list[nn.Module]) -> None:
        super().__init__()
        self.images = images
        self.trunks = nn.ModuleList(trunks)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        seen = [part_of(rows, part) for part in self.images] + [rows] * (len(self.trunks) - len(self.images))
        return torch.cat([trunk(part) for trunk, part in zip(self.trunks, seen)], -1)


def unpack(spec: EnvSpec, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """The parts of packed observations [B, bytes] by name, [B, *shape] each, for a network of the user's own."""
    return {part.name: part_of(rows, part) for part in spec.parts}
