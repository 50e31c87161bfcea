"""Networks of a user's own that do what networks shouldn't: ``--network faulty_nets:raises_in_child``."""

from __future__ import annotations

import multiprocessing
import os
import time
from typing import Any

import torch
from faulty_envs import claim
from torch import nn

IN_CHILD = multiprocessing.parent_process() is not None


class Linear(nn.Module):
    """Four numbers in, eight features out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 8)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.layer(obs).tanh()


def linear(spec: Any) -> nn.Module:
    return Linear()


def raises_in_child(spec: Any) -> nn.Module:
    if IN_CHILD:
        raise RuntimeError("the network is elsewhere")
    return Linear()


def hangs_in_child(spec: Any) -> nn.Module:
    while IN_CHILD:
        time.sleep(1e6)
    return Linear()


def hangs_in_evaluator(spec: Any) -> nn.Module:
    while multiprocessing.current_process().name == "evaluator":
        time.sleep(1e6)
    return Linear()


def hangs_while_answering(spec: Any) -> nn.Module:
    """In an actor, once it has seen an episode's thirtieth step."""
    return HangsWhileAnswering()


class HangsWhileAnswering(Linear):
    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        if IN_CHILD and self.real(obs) and (obs[:, 3] == 30.0).any() and claim():
            time.sleep(1e6)
        return super().forward(obs)

    @staticmethod
    def real(obs: torch.Tensor) -> bool:
        """Whether these are observations of `faulty_envs.Steady`, and not those of the probe."""
        return bool((obs == obs.round()).all())


def slow_to_learn(spec: Any) -> nn.Module:
    """Every backward pass takes BACKWARD_SECONDS; the first leaves a file BACKWARD_BEGUN."""
    return nn.Sequential(Linear(), SlowBackward())


class SlowBackward(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Slow.apply(x)


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if "BACKWARD_BEGUN" in os.environ:
            open(os.environ["BACKWARD_BEGUN"], "w").close()
        time.sleep(float(os.environ.get("BACKWARD_SECONDS", "0")))
        return grad
