"""The one-step-delayed update (Liu, Yeh and Schwing 2020), in the form that takes any off-the-shelf algorithm.

And the other way to learn from data that is one update old: start at the newest parameters, as the code published with
the paper does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def delayed_update(
    newest: torch.Tensor, behaviour: torch.Tensor, vector: torch.Tensor, update: Callable[[], None]
) -> torch.Tensor:
    """Return θ_{j+1} = θ_j + [U(θ_{j-1}; D_{j-1}) - θ_{j-1}].

    With one gradient step as U this is the paper's θ_{j+1} = θ_j + η ∇J(θ_{j-1}, D_{j-1}); with all epochs of PPO, the
    probability ratio starts at exactly 1, because the update starts at the parameters that collected the data.

    Args:
        newest: [P] float32, θ_j.
        behaviour: [P] float32, θ_{j-1}: collected D_{j-1}.
        vector: [P] float32, the model's parameters, which ``update`` changes in place.
        update: U.
    """
    assert newest.shape == behaviour.shape == vector.shape
    vector.copy_(behaviour)
    update()
    return newest + (vector - behaviour)


def update_at_newest(newest: torch.Tensor, vector: torch.Tensor, update: Callable[[], None]) -> torch.Tensor:
    """Return θ_{j+1} = U(θ_j; D): the update starts at the newest parameters.

    Where these collected D, as under 'sync', that is all there is to say. With D_{j-1} the probability ratio starts at
    π_{θ_j} / π_{θ_{j-1}}, and makes up for the lag as far as U has such a ratio.

    Args:
        newest: [P] float32, θ_j.
        vector: [P] float32, the model's parameters, which ``update`` changes in place.
        update: U.
    """
    assert newest.shape == vector.shape
    vector.copy_(newest)
    update()
    return vector.clone()
