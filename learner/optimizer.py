"""What PyTorch's optimizers need around them when they step one vector of all parameters."""

from __future__ import annotations

import torch

from htsrl.config import A2COptions, IMPALAOptions

# Below this many parameters the threads of the CPU's fused kernel cost more than the kernel saves.
_FUSED_FROM = 1 << 16


def adam(vector: torch.Tensor, learning_rate: float, eps: float) -> torch.optim.Adam:
    """Adam on ``vector`` [P], in the form that is fastest for its size and device."""
    fused = vector.is_cuda or vector.numel() >= _FUSED_FROM
    return torch.optim.Adam([vector], lr=learning_rate, eps=eps, fused=fused, foreach=False)


def rmsprop_or_adam(vector: torch.Tensor, options: A2COptions | IMPALAOptions) -> torch.optim.Optimizer:
    """RMSprop or Adam on ``vector`` [P], as ``options`` say."""
    rate, eps = options.learning_rate, options.optimizer_eps
    if options.optimizer == "adam":
        return adam(vector, rate, eps)
    return torch.optim.RMSprop([vector], lr=rate, alpha=options.rmsprop_decay, eps=eps, foreach=False)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Use ``learning_rate`` from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Copies of the vector's moments and of the step count, by name; empty before the first step."""
    states = list(optimizer.state.values())
    return {name: tensor.detach().clone() for name, tensor in states[0].items()} if states else {}


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, torch.Tensor]) -> None:
    """Go on from what ``optimizer_state`` returned, on whatever device the parameters are.

    Raises:
        ValueError: that is not the state of such an optimizer and vector.
    """
    (vector,) = optimizer.param_groups[0]["params"]
    expected = {
        name: (torch.float32, vector.shape if moment.dim() else ()) for name, moment in _made(optimizer).items()
    }
    got = {name: (tensor.dtype, tensor.shape) for name, tensor in state.items()}
    if state and got != expected:
        raise ValueError(f"this is no state of {type(optimizer).__name__}: {got}")
    # PyTorch would keep tensors that are already in the right place: later steps must not change the caller's.
    moments = {name: tensor.clone() for name, tensor in state.items()}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: moments} if moments else {}})


def _made(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The state that an optimizer like this makes for a vector of one number."""
    number = torch.zeros(1, requires_grad=True)
    number.grad = torch.zeros(1)
    twin = type(optimizer)([number], **optimizer.defaults)
    twin.step()
    return twin.state[number]
