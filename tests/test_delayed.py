"""The delayed update on a quadratic, where the recursion has a closed form."""

import numpy as np
import torch

from htsrl.learner.delayed import delayed_update


def simulate(update, start, intervals):
    """θ_0, θ_1 = θ_0, then θ_{j+1} = θ_j + U(θ_{j-1}) - θ_{j-1}."""
    vector = start.clone()
    thetas = [start, start.clone()]
    for _ in range(intervals):
        thetas.append(delayed_update(thetas[-1], thetas[-2], vector, lambda: update(vector)))
    return torch.stack(thetas)


def test_one_gradient_step_on_a_quadratic_follows_the_papers_recursion():
    # J(θ) = -θ²/2 per coordinate: θ_{j+1} = θ_j - η θ_{j-1}; closed form by the roots of z² - z + η.
    eta = 0.2
    start = torch.tensor([1.0, -3.0])
    thetas = simulate(lambda vector: vector.sub_(eta * vector), start, 30).double().numpy()
    roots = np.roots([1, -1, eta])
    coefficients = np.linalg.solve(np.array([roots**0, roots**1]), np.array([1.0, 1.0]))
    closed = np.array([(coefficients * roots**j).sum().real for j in range(32)])
    np.testing.assert_allclose(thetas, closed[:, None] * start.numpy(), atol=1e-5)
    # Without the delay the first step would already have moved.
    assert (thetas[1] == thetas[0]).all()
    assert not np.allclose(thetas[2], thetas[1])


def test_several_inner_steps_start_at_the_behaviour_parameters():
    seen = []

    def update(vector):
        seen.append(vector.clone())
        for _ in range(3):
            vector.mul_(0.9)

    thetas = simulate(update, torch.ones(4), 5)
    for j, started_at in enumerate(seen):
        assert torch.equal(started_at, thetas[j])
        expected = thetas[j + 1] + (thetas[j] * 0.9 * 0.9 * 0.9 - thetas[j])
        torch.testing.assert_close(thetas[j + 2], expected)


def test_the_newest_parameters_are_not_changed_in_place():
    newest, behaviour, vector = torch.ones(3), torch.zeros(3), torch.full((3,), 9.0)
    after = delayed_update(newest, behaviour, vector, lambda: vector.add_(1.0))
    assert torch.equal(newest, torch.ones(3))
    assert torch.equal(behaviour, torch.zeros(3))
    assert torch.equal(after, torch.full((3,), 2.0))
