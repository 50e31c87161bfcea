"""A loss or gradient that is not finite ends the run before the step, and leaves behind what there is to look at."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fault_points import fault_once
from recording import known_to
from rollouts import vector_spec
from safetensors.numpy import load_file

from htsrl.checkpoint import list_checkpoints
from htsrl.errors import NonFinite, RunFailed
from htsrl.learner.gradient import accumulate_gradient, clip_gradient
from htsrl.learner.learner import Learner
from htsrl.learner.minibatches import Rows
from htsrl.models import FlatParameters, build_model
from htsrl.settings import Layer, configure
from htsrl.training import resume, train

T, N = 16, 6
BAD = (0, 4)  # a first step: no advantage reaches further back


def storage(learner, bad_reward):
    """A full storage whose observations say where they stand, collected with the learner's parameters."""
    rng = np.random.default_rng(0)
    obs = rng.standard_normal((T + 1, N, 4)).astype(np.float32)
    obs[..., 0], obs[..., 1] = np.arange(T + 1)[:, None] / T, np.arange(N) / N
    with torch.inference_mode():
        params, value = learner.model(torch.from_numpy(obs[:-1].reshape(-1, 4)))
        noise = torch.from_numpy(rng.gumbel(size=(T * N, 3)).astype(np.float32))
        action = learner.model.head.sample(params, noise)
        log_prob = learner.model.head.log_prob(params, action)
    flags = np.zeros((T, N), bool)
    reward = rng.standard_normal((T, N)).astype(np.float32)
    reward[BAD] = bad_reward
    return SimpleNamespace(
        obs=obs,
        action=action.reshape(T, N).numpy(),
        log_prob=log_prob.reshape(T, N).numpy(),
        value=value.reshape(T, N).numpy(),
        reward=reward,
        terminated=flags,
        truncated=flags,
        valid=~flags,
        behaviour_version=np.array([learner.version - learner.lag]),
    )


def learner(algo="ppo", **settings):
    minibatches = {"ppo": {"minibatches": 8}, "impala": {"minibatches": 2}}.get(algo, {})
    config = configure("CartPole-v1", algo, num_envs=N, sync_interval=T, learner_threads=1, **minibatches | settings)
    made = Learner(config, vector_spec(), torch.device("cpu"))
    made.warm_up()
    return config, made


def failed_update(made, after=1):
    """What the update after ``after`` good ones carries."""
    for _ in range(after):
        made.learn(storage(made, 1.0), 0.0)
    with pytest.raises(NonFinite) as caught:
        made.learn(storage(made, 1e30), 0.25)
    return caught.value


@pytest.mark.parametrize("schedule", ["hts", "sync"])
@pytest.mark.parametrize("algo", ["ppo", "a2c"])
def test_the_step_can_be_made_again_from_what_was_left(algo, schedule):
    config, made = learner(algo, schedule=schedule)
    failure = failed_update(made)
    arrays, numbers = failure.tensors, failure.numbers
    assert numbers["stepped"] is False
    assert (numbers["interval"], numbers["progress"]) == (1, 0.25)
    # The rows, and where they stood
    t, n = arrays["minibatch/t"], arrays["minibatch/n"]
    np.testing.assert_array_equal(arrays["minibatch/obs"][:, 0], (t / T).astype(np.float32))
    np.testing.assert_array_equal(arrays["minibatch/obs"][:, 1], (n / N).astype(np.float32))
    bad = arrays["minibatch/value_target"] > 1e29
    assert BAD in {(int(each), int(other)) for each, other in zip(t[bad], n[bad])}
    # The gradient: the same bits from the parameters and rows alone, and not clipped
    model = build_model(vector_spec(), config.network, seed=99)
    parameters = FlatParameters(model)
    parameters.load(group(arrays, "parameters"))
    columns = {name: torch.from_numpy(array) for name, array in group(arrays, "minibatch").items()}
    obs = columns.pop("obs")
    del columns["t"], columns["n"]
    rows = Rows(**columns | {"index": torch.arange(len(obs))})
    batch = SimpleNamespace(obs=obs, length=1, sequences=lambda rows: None)
    terms = accumulate_gradient(model, parameters, batch, rows, made.algorithm._loss)
    np.testing.assert_array_equal(terms.numpy(), arrays["records"][-1][: len(terms)])
    assert not np.isfinite(arrays["records"][-1]).all()
    for name, parameter in model.named_parameters():
        np.testing.assert_array_equal(parameter.grad.numpy(), arrays[f"gradient/{name}"])
    # The state before this step: the first update's steps, and those of this one that were good
    good = len(arrays["records"]) - 1
    assert np.isfinite(arrays["records"][:-1]).all()
    assert good == numbers["epoch"] * 8 + numbers["minibatch"]
    assert arrays["algorithm/step"] == (config.algorithm.epochs * 8 if algo == "ppo" else 1) + good
    # Where the update began: after warming up under 'hts' the first two intervals run with the same parameters
    first = dict(FlatParameters(build_model(vector_spec(), config.network, config.seed)).items())
    same = [np.array_equal(first[name], array) for name, array in group(arrays, "behaviour").items()]
    assert all(same) if schedule == "hts" else not any(same)


def test_impala_leaves_the_columns_of_its_minibatch():
    _, made = learner("impala", schedule="sync")
    arrays = failed_update(made).tensors
    t, n = arrays["minibatch/t"], arrays["minibatch/n"]
    np.testing.assert_array_equal(arrays["minibatch/obs"][:, 0], (t / T).astype(np.float32))
    np.testing.assert_array_equal(arrays["minibatch/obs"][:, 1], (n / N).astype(np.float32))
    assert arrays["minibatch/reward"][(t == BAD[0]) & (n == BAD[1])] == np.float32(1e30)
    assert {"gradient", "parameters", "behaviour", "algorithm"} <= {name.partition("/")[0] for name in arrays}


def group(arrays, prefix):
    return {name[len(prefix) + 1 :]: array for name, array in arrays.items() if name.startswith(f"{prefix}/")}


def test_steps_that_were_made_before_anybody_looked_are_not_shown_as_the_state_before():
    """As on a GPU, where the check comes after the last step."""
    _, eager = learner()
    _, late = learner()
    late.algorithm.checks_every_step = False
    before, after = failed_update(eager), failed_update(late)
    assert after.numbers == before.numbers | {"stepped": True}
    assert {name.partition("/")[0] for name in after.tensors} == {"minibatch", "behaviour", "records"}
    for name, array in after.tensors.items():
        np.testing.assert_array_equal(array, before.tensors[name])


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_a_gradient_that_is_not_finite_is_not_scaled(bad):
    vector = torch.nn.Parameter(torch.zeros(3))
    vector.grad = torch.tensor([1.0, float(bad), 2.0])
    before, after = clip_gradient(SimpleNamespace(vector=vector), 0.5)
    assert not before.isfinite()
    assert not after.isfinite()
    np.testing.assert_array_equal(vector.grad.numpy(), np.array([1.0, bad, 2.0], np.float32))


# --------------------------------------------------------------------------------------------------------- whole runs

SMALL = {
    "num_envs": 4, "sync_interval": 16, "total_steps": 4 * 16 * 6, "minibatches": 4, "epochs": 2, "checkpoint_every": 1,
    "progress": "none", "tensorboard": False,
}  # fmt: skip


def bits(run_dir):
    result = json.loads((run_dir / "result.json").read_text())
    return [result[name] for name in ("steps", "episodes", "parameters_sha256", "trajectory_sha256")]


def test_a_run_stops_says_where_to_look_and_can_be_resumed(tmp_path):
    run_dir = tmp_path / "run"
    with fault_once(tmp_path / "struck"):
        with pytest.raises(RunFailed, match=r"not finite in epoch \d+, minibatch \d+ .* in interval \d+") as caught:
            train(configure("faulty_envs:HugeReward-v0", run_dir=run_dir, **SMALL))
        assert str(run_dir / "failure" / "update.safetensors") in str(caught.value)
        about = json.loads((run_dir / "failure" / "update.json").read_text())
        arrays = load_file(run_dir / "failure" / "update.safetensors")
        assert sorted(arrays) == about["arrays"]
        assert arrays["minibatch/value_target"].max() > 1e29
        assert not np.isfinite(arrays["records"][-1]).all()
        assert about["records"][0] == "total"
        # The checkpoint before it is whole, and nothing of the bad update is in it
        newest = list_checkpoints(run_dir / "checkpoints")[-1]
        assert all(np.isfinite(array).all() for array in load_file(newest).values())
        resume(run_dir, Layer({}, str))
    train(configure("faulty_envs:Steady-v0", run_dir=tmp_path / "steady", **SMALL))
    assert bits(run_dir) == bits(tmp_path / "steady")


def test_a_full_disk_does_not_hide_the_failure(tmp_path, monkeypatch):
    import htsrl.failure

    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(htsrl.failure, "write_atomically", full)
    with pytest.raises(RunFailed, match=r"not finite .* could not be written to .*failure: no space left on device"):
        train(configure("faulty_envs:HugeReward-v0", algo="a2c", run_dir=tmp_path / "run", **known_to("a2c", SMALL)))
    assert os.listdir(tmp_path / "run" / "failure") == []
