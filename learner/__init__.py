"""The learner: what turns a full storage into new parameters."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from htsrl.config import A2COptions, ACKTROptions, AnyConfig, IMPALAOptions, PPOOptions
from htsrl.learner.a2c import A2C
from htsrl.learner.acktr import ACKTR
from htsrl.learner.impala import IMPALA
from htsrl.learner.ppo import PPO
from htsrl.learner.rollout import Rollout
from htsrl.models import ActorCritic, FlatParameters

__all__ = ["A2C", "ACKTR", "IMPALA", "PPO", "Algorithm", "Rollout", "make_algorithm"]


class Algorithm(Protocol):
    """An off-the-shelf update, which knows nothing of delays.

    It starts at the parameters that collected the rollout. Only under schedule 'async' and with delay 'importance' it
    starts elsewhere, and must know what to do with a probability ratio that isn't 1.
    """

    def update(self, rollout: Rollout, progress: float, rng: np.random.Generator) -> dict[str, float]:
        """Change the parameters' vector in place; returns metrics."""

    def state(self) -> dict[str, torch.Tensor]:
        """Everything that the next update needs beside the parameters, by name."""

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from a ``state``, bit for bit."""


def make_algorithm(config: AnyConfig, model: ActorCritic, parameters: FlatParameters) -> Algorithm:
    """The algorithm of ``config``, which will update ``parameters`` of ``model``, on whatever device they are.

    ConfigError where it can't train ``model``.
    """
    options = config.algorithm
    if isinstance(options, A2COptions):
        return A2C(options, model, parameters, importance=config.runtime.delay == "importance")
    if isinstance(options, IMPALAOptions):
        return IMPALA(options, model, parameters)
    if isinstance(options, ACKTROptions):
        return ACKTR(options, model, parameters)
    if isinstance(options, PPOOptions):
        return PPO(options, model, parameters)
    raise TypeError(f"no algorithm takes {type(options).__name__}")
