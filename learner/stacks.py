"""Observations of a full rollout that are put together from their frames as minibatches ask for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from htsrl.storage.observations import frame_places, stack_of
from htsrl.storage.stacks import Frames


class Stacks:
    """[(T + 1) * N, *obs] uint8 on one device, row t * N + n: as much of a tensor as the algorithms ask for."""

    def __init__(self, storage: Any, device: torch.device) -> None:
        """The observations of a storage that holds frames, all of them written."""
        self.device = device
        self._frames = Frames(storage.frames, stack_of(storage), device)
        places = frame_places(storage.past, stack_of(storage), np.arange(storage.past.size))
        self._places = torch.from_numpy(places).to(device, non_blocking=True)

    def index_select(self, dim: int, index: torch.Tensor) -> torch.Tensor:
        """Copies [M, *obs] of the rows ``index`` [M] int64."""
        assert dim == 0
        return self._frames.at(self._places.index_select(0, index))
