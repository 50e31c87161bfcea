"""What PyTorch's optimizers need around them when they step one vector of all parameters."""

from __future__ import annotations

import torch


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Use ``learning_rate`` from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Copies of the vector's moments and of the step count, by name; empty before the first step."""
    states = list(optimizer.state.values())
    return {name: tensor.detach().clone() for name, tensor in states[0].items()} if states else {}


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, torch.Tensor]) -> None:
    """Go on from what ``optimizer_state`` returned, on whatever device the parameters are."""
    # PyTorch would keep tensors that are already in the right place: later steps must not change the caller's.
    moments = {name: tensor.clone() for name, tensor in state.items()}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: moments} if moments else {}})
