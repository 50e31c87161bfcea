"""`htsrl verify`: it agrees with equal runs, names the first row of a sabotaged one, and replays what was recorded."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from test_resume import interrupted, no_changes

from htsrl import trials, verify
from htsrl.cli import main
from htsrl.digests import DIGESTED, ROW_FIELDS, Place, Trail, first_difference, row_checksums
from htsrl.rundir import DIGESTS
from htsrl.settings import configure
from htsrl.storage.digest import losses_digest
from htsrl.training import resume, train

SMALL = {"num_envs": 4, "sync_interval": 8, "total_steps": 4 * 8 * 3, "minibatches": 2, "epochs": 1}
FLAGS = ["--env=CartPole-v1", *(f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items())]


def verified(capsys, *flags):
    """Exit status and report of ``htsrl verify --json``."""
    status = main(["verify", *FLAGS, "--json", *flags])
    return status, json.loads(capsys.readouterr().out)


# ------------------------------------------------------------------------------------------------------------- whole


def test_layouts_and_delays_agree_and_another_seed_does_not(capsys):
    assert main(["verify", *FLAGS, "--layouts", "1x1,3x2x1", "--delays", "1"]) == 0
    heading, _, head, *rows, _, verdict = capsys.readouterr().out.splitlines()
    assert heading == "CartPole-v1, ppo, hts, seed 0: 96 steps in 3 intervals of 4 replicas x 8 steps"
    assert head.split() == ["layout", "disturbed", "trajectory", "parameters", "losses", "bits", "steps/s"]
    assert [row.split()[0] for row in rows] == ["1x1", "1x1", "3x2x1", "1x1"]
    assert [next(word for word in ("reference", "same", "different") if word in row) for row in rows] == [
        "reference", "same", "same", "different"
    ]  # fmt: skip
    assert ["delays" in row for row in rows] == [False, True, True, False]
    assert verdict == "the same bits in every run; another seed gives others"


def test_killed_and_stopped_processes_change_no_bit(capsys, monkeypatch):
    monkeypatch.setattr(verify, "LONGEST_PEACE_S", 0.2)
    monkeypatch.setattr(verify, "STOPPED_TOO_LONG_S", 1.0)
    status, report = verified(capsys, "--layouts", "2x1", "--kills", "--total-steps", "4000")
    assert status == 0
    assert [row["disturbed"] for row in report["runs"]] == ["-", "kills", "-"]
    assert [row["bits"] for row in report["runs"]] == ["reference", "same", "different"]


def sabotage(monkeypatch, change):
    """Apply ``change(storage)`` in interval 1 of every run with two executors, before anything looks at it."""

    class Sabotaged(verify.WatchedRun):
        def consume(self, j, record):
            if j == 1 and self.layout.num_executors == 2:
                change(self.storages[j % 2])
            super().consume(j, record)

    monkeypatch.setattr(verify, "WatchedRun", Sabotaged)


def test_a_flipped_action_is_found_and_its_row_named(capsys, monkeypatch):
    def flip(storage):
        storage.action[5, 2] ^= 1

    sabotage(monkeypatch, flip)
    status, report = verified(capsys, "--layouts", "1x1,2x1")
    assert status == 1
    assert not report["ok"]
    reference, other, other_seed = report["runs"]
    assert (other["bits"], other["ok"]) == ("different", False)
    assert other["first_difference"] == {"interval": 1, "replica": 2, "step": 5, "field": "action"}
    assert all(other[name] != reference[name] for name in DIGESTED)
    assert other_seed["ok"]


def test_a_clock_in_the_observations_is_found(capsys):
    assert main(["verify", *FLAGS, "--env=faulty_envs:Clock-v0", "--layouts=1x1,1x1"]) == 1
    out = capsys.readouterr().out
    assert "first difference: interval 0, replica 0, step 0: obs" in out
    assert "1 of 1 runs differ from the first" in out


def test_seeds_that_cannot_be_told_apart_fail_the_check(capsys, monkeypatch):
    monkeypatch.setattr(verify, "watch", lambda trial, spec: (trail_of(storage_of(5, 3)), 1.0))
    assert main(["verify", *FLAGS]) == 1
    out = capsys.readouterr().out
    assert "same (seed 1)" in out
    assert "can't tell runs apart" in out.splitlines()[-1]


# ------------------------------------------------------------------------------------------------- the digest trail


def test_a_resumed_run_continues_its_digests_and_replays(tmp_path, capsys):
    settings = {"env": "CartPole-v1", "record_digests": True, "eval_every": None, **SMALL, "total_steps": 4 * 8 * 5}
    train(configure(run_dir=tmp_path / "whole", progress="none", tensorboard=False, **settings))
    interrupted(tmp_path / "run", 2, **settings)
    # As if it had been killed a little after the checkpoint
    with open(tmp_path / "run" / DIGESTS, "a") as file:
        file.write(json.dumps({"interval": 3, "trajectory": "0", "parameters": "0", "losses": "0"}) + '\n{"interv')
    resume(tmp_path / "run", no_changes(num_executors=2))
    trail = (tmp_path / "run" / DIGESTS).read_bytes()
    assert trail == (tmp_path / "whole" / DIGESTS).read_bytes()
    assert [json.loads(line)["interval"] for line in trail.splitlines()] == [0, 1, 2, 3, 4]

    # What was recorded can be replayed in any layout
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert main(["verify", "--against", str(tmp_path / "run"), "--layouts", "3x2"]) == 0
    assert capsys.readouterr().out.endswith("(layout: 3x2): the same bits in all 5 recorded intervals\n")
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}

    # A tampered line is found
    records = [json.loads(line) for line in trail.splitlines()]
    records[1]["parameters"] = records[2]["parameters"]
    records[3]["trajectory"] = records[2]["trajectory"]
    (tmp_path / "run" / DIGESTS).write_text("".join(json.dumps(record) + "\n" for record in records))
    assert main(["verify", "--against", str(tmp_path / "run"), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["first_difference"], report["different"]) == (False, 1, ["parameters"])
    assert report["intervals"] == 2


def test_what_may_explain_a_difference_is_said():
    state = {"reproducible": False, "versions": {"gymnasium": "0.1"}, "fingerprint": {"torch": "1.0"}}
    config = configure("CartPole-v1", device="cpu", learner_threads=1)
    spec = SimpleNamespace(versions={"gymnasium": "1.2"})
    notes = " ".join(verify.reservations(SimpleNamespace(state=state), config, spec))
    for words in ("not reproducible", "torch 1.0 then", "gymnasium 0.1 then, 1.2 now"):
        assert words in notes


# --------------------------------------------------------------------------------------------------------- the parts


def storage_of(T, N, seed=0):
    """A full storage of random rows."""
    rng = np.random.default_rng(seed)
    fields = {name: rng.standard_normal((T, N)).astype(np.float32) for name in ("log_prob", "value", "reward")}
    fields |= {name: rng.random((T, N)) < 0.5 for name in ("terminated", "truncated", "valid")}
    obs = rng.integers(0, 256, (T + 1, N, 3, 2), np.uint8)
    return SimpleNamespace(obs=obs, action=rng.integers(0, 4, (T, N)), **fields)


def trail_of(*storages):
    digests = [{"interval": j, **dict.fromkeys(DIGESTED, "0")} for j in range(len(storages))]
    return Trail(digests, [row_checksums(storage) for storage in storages])


@pytest.mark.parametrize("field", ROW_FIELDS)
@pytest.mark.parametrize(("t", "n"), [(0, 0), (3, 1), (4, 2)])
def test_any_changed_bit_of_a_row_is_found_there(field, t, n):
    changed = storage_of(5, 3, seed=1)
    row = getattr(changed, field)[t, n : n + 1].view(np.uint8)
    row.flat[-1] ^= 1
    same, other = trail_of(storage_of(5, 3), storage_of(5, 3, seed=1)), trail_of(storage_of(5, 3), changed)
    assert first_difference(same, same) is None
    assert first_difference(same, other) == Place(1, field, replica=n, step=t)


def test_the_first_difference_is_the_earliest():
    changed = storage_of(5, 3)
    changed.reward[2, 0] += 1  # later in the row than an action, earlier in time than the others
    changed.action[2, 0] += 1
    changed.obs[3, 0] += 1
    changed.action[4, 1] += 1
    place = first_difference(trail_of(storage_of(5, 3)), trail_of(changed))
    assert place == Place(0, "action", replica=0, step=2)
    assert str(place) == "interval 0, replica 0, step 2: action"
    # The observation after the last step
    changed = storage_of(5, 3)
    changed.obs[5, 2] += 1
    assert first_difference(trail_of(storage_of(5, 3)), trail_of(changed)) == Place(0, "obs", replica=2, step=5)


def test_parameters_losses_and_length_are_compared_after_the_rows():
    rows = storage_of(5, 3)
    one, other = trail_of(rows, rows), trail_of(rows, rows)
    other.digests[1] = {**other.digests[1], "losses": "1"}
    assert str(first_difference(one, other)) == "interval 1: losses"
    assert first_difference(trail_of(rows), one) == Place(1, "end")


def test_the_losses_digest_covers_names_and_bits():
    metrics = {"loss/policy": 0.1, "loss/value": float("nan"), "learning_rate": 1.0, "policy_lag": 1}
    digest = losses_digest(metrics)
    assert digest == losses_digest({"loss/value": float("nan"), "loss/policy": 0.1, "time/learn": 3.0})
    assert digest != losses_digest(metrics | {"loss/policy": float(np.nextafter(0.1, 1.0))})
    assert digest != losses_digest({"loss/policy": 0.1, "loss/values": float("nan")})
    assert losses_digest({"loss/a": 0.0}) != losses_digest({"loss/a": -0.0})


@pytest.mark.parametrize(
    ("settings", "layouts"),
    [
        ({}, ["1x1", "2x2", "4x1"]),
        ({"num_envs": 2}, ["1x1", "2x2", "2x1"]),
        ({"schedule": "sync"}, ["1x1", "2x1", "4x1"]),
    ],
)
def test_default_layouts_fit(settings, layouts):
    planned = trials.plan(configure("CartPole-v1", **settings), None, 0.0)
    assert [trial.layout for trial in planned] == layouts
    runtime = planned[1].config.runtime
    assert (runtime.num_executors, runtime.num_actors, runtime.envs_per_group) == (2, int(layouts[1][2]), "auto")


def test_the_budget_is_a_few_intervals_unless_it_is_given():
    config = configure("CartPole-v1", num_envs=8, sync_interval=32)
    layer = trials.Layer({"num_envs": 8}, str)
    assert trials.with_total_steps(config, [layer]).total_steps == 4 * 8 * 32
    assert trials.with_total_steps(config, [layer, trials.Layer({"total_steps": "1e6"}, str)]) == config


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--layouts 0x1,1x1", "--layouts must be executors x actors"),
        ("--layouts axb,1x1", "got axb"),
        ("--layouts 1x1,,2x1", "got nothing"),
        ("--layouts 1x1,5x1", "--layouts 5x1: --num-executors must be at most --num-envs (4), got 5"),
        ("--layouts 1x1,1x5", "--num-actors must be at most --num-envs (4), got 5"),
        ("--layouts 1x1,2x1x3", "--layouts 2x1x3: --envs-per-group must be at most 2"),
        ("--layouts 1x1,1x2 --schedule sync", "--layouts 1x2: --schedule sync needs --num-actors 1, got 2"),
        ("--schedule async", "htsrl verify is for --schedule hts and sync"),
        ("--layouts 1x1", "two layouts to compare"),
        ("--layouts", "--layouts needs a value"),
        ("--layout 1x1,2x1", "did you mean --layouts?"),
        ("--delays -1", "--delays must be a number of milliseconds"),
        ("--delays soon", "got soon"),
        ("--json yes", "--json takes no value"),
        ("--nonsense 1", "--nonsense is not known"),
        ("--against nowhere", "leave out --env"),
    ],
)
def test_refusals_are_one_sentence_before_anything_starts(capsys, monkeypatch, flags, words):
    monkeypatch.setattr(verify, "verify", lambda plan: pytest.fail("something was started"))
    assert main(["verify", *FLAGS, *flags.split()]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert words in output.err


def test_what_cannot_be_replayed_is_refused(tmp_path, capsys):
    def refusal(*flags):
        assert main(["verify", "--against", str(tmp_path / "run"), *flags]) == 2
        return capsys.readouterr().err

    assert "no such folder" in refusal()
    (tmp_path / "run").mkdir()
    assert "no config.toml" in refusal()
    (tmp_path / "run" / "config.toml").write_text('env = "CartPole-v1"\n')
    assert "train with --record-digests" in refusal()
    good = json.dumps({"interval": 0, "trajectory": "0", "parameters": "0", "losses": "0"})
    for bad in ("{}", "nonsense", "3", '{"interval": "x"}'):
        (tmp_path / "run" / DIGESTS).write_text(f"{good}\n{bad}\n")
        assert "line 2 of" in refusal()
    (tmp_path / "run" / DIGESTS).write_text(f"{good}\n")
    assert "got 1x1,2x2" in refusal("--layouts", "1x1,2x2")
    assert "at most num_envs (16)" in refusal("--layouts", "17x1").replace("--num-envs", "num_envs")
