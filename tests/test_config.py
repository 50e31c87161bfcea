"""The configuration: its rules, its messages, TOML, presets and the public names."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import htsrl
from htsrl.config import (
    ALGORITHMS,
    FAMILIES,
    A2COptions,
    AtariOptions,
    Config,
    FootballOptions,
    NetworkOptions,
    OutputOptions,
    PPOOptions,
    RuntimeOptions,
    Section,
)
from htsrl.errors import ConfigError
from htsrl.presets import ENVIRONMENT_PRESETS, PRESETS
from htsrl.rundir import create_run_dir, refuse_used
from htsrl.settings import configure, every_setting
from htsrl.tomlfile import load_config, save_config, to_toml

ENVS = {"gymnasium": "CartPole-v1", "atari": "atari:Pong", "football": "gfootball", "synthetic": "synthetic:counting"}


# ------------------------------------------------------------------------------------------------------------- rules


def test_settings_have_one_home_each() -> None:
    """Flags have no prefixes, so a name may stand in one section only."""
    homes: dict[str, set[str]] = {}
    sections: dict[str, list[type[Section]]] = {
        "algorithm": list(ALGORITHMS.values()),
        "environment": list(FAMILIES.values()),
        "network": [NetworkOptions],
        "runtime": [RuntimeOptions],
        "output": [OutputOptions],
    }
    for section, classes in sections.items():
        for options in classes:
            for name in options.model_fields:
                homes.setdefault(name, set()).add(section)
    assert all(len(each) == 1 for each in homes.values())
    assert not {"algo", "env", "total_steps", "seed", "config", "help"} & homes.keys()
    assert {"algo", "env", "total_steps", "seed"} | homes.keys() == every_setting().keys()


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"num_envs": 0}, "num_envs must be at least 1, got 0"),
        ({"num_envs": "many"}, "num_envs must be a whole number of at least 1, got many"),
        ({"num_envs": 2.5}, "num_envs must be a whole number of at least 1, got 2.5"),
        ({"num_envs": True}, "num_envs must be a whole number of at least 1, got true"),
        ({"num_executors": 0}, "num_executors must be at least 1 or auto, got 0"),
        ({"num_executors": "some"}, "num_executors must be a whole number of at least 1 or auto, got some"),
        ({"discount": 1.5}, "discount must be between 0 and 1, got 1.5"),
        ({"discount": "high"}, "discount must be a number between 0 and 1, got high"),
        ({"learning_rate": 0}, "learning_rate must be greater than 0, got 0"),
        ({"learning_rate": float("inf")}, "learning_rate must be a number greater than 0, got inf"),
        ({"clip_value": -1}, "clip_value must be greater than 0 or none, got -1"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"total_steps": 0}, "total_steps must be at least 1, got 0"),
        ({"hidden_sizes": [64, 0]}, "hidden_sizes must be a list, each a whole number of at least 1, got 0"),
        ({"tensorboard": "perhaps"}, "tensorboard must be true or false, got perhaps"),
        ({"activation": "gelu"}, "activation must be one of tanh, relu, got gelu"),
        ({"schedule": "fast"}, "schedule must be one of hts, sync, async, got fast"),
        ({"async_slots": 3}, "async_slots is for schedule async, and this run's is hts"),
        ({"schedule": "sync", "delay": "importance"}, "delay is for schedule hts: with sync there is one start"),
        ({"schedule": "async", "delay": "importance"}, "delay is for schedule hts: with async there is one start"),
        ({"delay": "none"}, "delay must be one of gradient, importance, got none"),
        (
            {"state_dependent_std": True, "initial_log_std": -6},
            "initial_log_std must be between -5 and 2 with state_dependent_std, got -6",
        ),
        ({"schedule": "async", "async_slots": 0}, "async_slots must be at least 1, got 0"),
        (
            {"schedule": "async", "record_digests": True},
            "record_digests is for schedule hts and sync: an async run never repeats itself",
        ),
        ({"device": "tpu"}, "device must be auto, cpu, cuda or cuda:N, got tpu"),
        ({"run_dir": 3}, "run_dir must be a path or none, got 3"),
        ({"schedule": "sync", "num_actors": 2}, "schedule sync needs num_actors 1, got 2"),
        ({"num_executors": 17}, "num_executors must be at most num_envs (16), got 17"),
        ({"num_actors": 17}, "num_actors must be at most num_envs (16), got 17"),
        ({"num_executors": 3, "envs_per_group": 7}, "envs_per_group must be at most 6, the replicas of one executor"),
        (
            {"minibatches": 7},
            "minibatches must divide num_envs x sync_interval = 16 x 128 = 2048, got 7; nearest that fit: 4 and 8",
        ),
        (
            {"num_envs": 3, "sync_interval": 1, "minibatches": 50},
            "minibatches must divide num_envs x sync_interval = 3 x 1 = 3, got 50; nearest that fit: 3",
        ),
        ({"algo": "dqn"}, "algo must be one of ppo, batchppo, a2c, impala, acktr, got dqn"),
        (
            {"algo": "impala", "minibatches": 3},
            "minibatches must divide num_envs = 16, the sequences of an interval, got 3; nearest that fit: 2 and 4",
        ),
        ({"algo": "acktr", "schedule": "async"}, "algo acktr is for schedule hts and sync: its trust region starts at"),
        ({"algo": "acktr", "delay": "importance"}, "algo acktr needs delay gradient: its trust region starts at"),
        (
            {"algo": "acktr", "precision": "bf16"},
            "algo acktr needs precision float32: the Fisher matrix's small eigenvalues would be lost, got bf16",
        ),
        ({"algo": "impala", "rho_clip": 0}, "rho_clip must be greater than 0, got 0"),
        ({"algo": "a2c", "clip_range": 0.1}, "clip_range is a setting of ppo and batchppo, and this run uses a2c"),
        ({"kl_cutoff": 3.0}, "kl_cutoff needs kl_penalty, the initial weight of the penalty that it shapes"),
        ({"kl_penalty": 0}, "kl_penalty must be greater than 0 or none, got 0"),
        ({"clip_range": None}, "clip_range none needs kl_penalty or target_kl: nothing else would hold the policy"),
        ({"algo": "batchppo", "kl_penalty": None}, "clip_range none needs kl_penalty or target_kl"),
        ({"batched_by": "weeks"}, "batched_by must be one of steps, episodes, got weeks"),
        ({"sticky_actions": 0.1}, "sticky_actions is a setting of Atari environments, and CartPole-v1 is a Gymnasium"),
        ({"num_env": 3}, "num_env is not known; did you mean num_envs?"),
        ({"zzz": 3}, "zzz is not known; `htsrl train --help` lists all settings"),
    ],
)
def test_refusals(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        configure("CartPole-v1", **wrong)
    assert str(refusal.value).startswith(sentence)
    assert "\n" not in str(refusal.value)


def test_every_fault_is_told() -> None:
    with pytest.raises(ConfigError) as refusal:
        configure("CartPole-v1", num_envs=0, epochs="x")
    assert sorted(str(refusal.value).split("\n")) == [
        "epochs must be a whole number of at least 1, got x",
        "num_envs must be at least 1, got 0",
    ]


def test_algorithm_and_options_must_agree() -> None:
    with pytest.raises(ValidationError, match="takes PPOOptions, got A2COptions"):
        Config[AtariOptions, A2COptions](algo="ppo", algorithm=A2COptions(), environment=AtariOptions())


def test_text_from_a_command_line_is_read() -> None:
    config = configure("gfootball", clip_value="none", total_steps="1e6", hidden_sizes=["32", "16"])
    assert config.algorithm.clip_value is None  # type: ignore[attr-defined]
    assert config.total_steps == 1_000_000
    assert config.network.hidden_sizes == (32, 16)


def test_configurations_reach_other_processes() -> None:
    """Executors get them pickled, whichever function parametrised the class."""
    kind = Config[FootballOptions, PPOOptions]
    config = kind(algorithm=PPOOptions(epochs=3), environment=FootballOptions(), seed=2**70)
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).algorithm.epochs, 'torch' in sys.modules)"
    data = pickle.dumps(config)
    answer = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, check=True).stdout
    assert answer.split() == [b"3", b"False"]
    assert pickle.loads(data) == config


# ----------------------------------------------------------------------------------------------------------- presets


@pytest.mark.parametrize("algo", ALGORITHMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_and_algorithm_has_a_valid_preset(family: str, algo: str) -> None:
    config = configure(ENVS[family], algo)
    assert type(config.environment) is FAMILIES[family]
    assert type(config.algorithm) is ALGORITHMS[algo]
    for name, value in PRESETS[family, algo].items():
        if (ENVS[family], algo) not in ENVIRONMENT_PRESETS:
            sections = (config, config.algorithm, config.runtime, config.network)
            assert value in [getattr(section, name, None) for section in sections]


@pytest.mark.parametrize(("env", "algo"), ENVIRONMENT_PRESETS)
def test_presets_of_environments_are_valid(env: str, algo: str) -> None:
    assert configure(env, algo).env == env


def test_football_has_the_papers_hyperparameters() -> None:
    options = configure("gfootball").algorithm
    assert isinstance(options, PPOOptions)
    assert (options.learning_rate, options.discount, options.gae_lambda) == (3.43e-4, 0.993, 0.95)
    assert (options.clip_range, options.clip_value, options.value_coef) == (0.08, 0.08, 0.5)
    assert (options.epochs, options.minibatches, options.entropy_coef, options.max_grad_norm) == (2, 8, 0.003, 0.64)


# -------------------------------------------------------------------------------------------------------------- TOML


positive = st.floats(min_value=1e-12, max_value=1e12)
letters = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
paths = st.text(letters, min_size=1).filter(lambda text: text.lower() != "none").map(Path)
settings_of_any_run = st.fixed_dictionaries(
    {},
    optional={
        "total_steps": st.integers(1, 2**80),
        "seed": st.integers(0, 2**80),
        "learning_rate": positive,
        "discount": st.floats(0, 1),
        "max_grad_norm": positive,
        "hidden_sizes": st.lists(st.integers(1, 4096), max_size=4).map(tuple),
        "initial_log_std": st.floats(-20, 20),
        "max_episode_steps": st.none() | st.integers(1, 10**6),
        "num_executors": st.just("auto") | st.integers(1, 16),
        "run_dir": st.none() | paths,
        "eval_every": st.none() | st.integers(1, 10**9),
        "tensorboard": st.booleans(),
        "progress": st.sampled_from(["auto", "live", "plain", "none"]),
    },
)


@given(st.sampled_from(sorted(ENVS.values())), st.sampled_from(sorted(ALGORITHMS)), settings_of_any_run)
@settings(max_examples=60, deadline=None)
def test_toml_round_trip(tmp_path_factory: pytest.TempPathFactory, env: str, algo: str, chosen: dict[str, Any]) -> None:
    config = configure(env, algo, **chosen)
    path = tmp_path_factory.getbasetemp() / "round_trip.toml"
    save_config(config, path)
    assert load_config(path) == config
    assert to_toml(load_config(path)) == to_toml(config)


def test_toml_layout() -> None:
    lines = to_toml(configure("atari:Pong", seed=3)).splitlines()
    assert lines[:4] == ['algo = "ppo"', 'env = "atari:Pong"', "total_steps = 10000000", "seed = 3"]
    tables = [line for line in lines if line.startswith("[")]
    assert tables == ["[algorithm]", "[environment]", "[network]", "[runtime]", "[output]"]


def test_what_a_preset_sets_can_be_off_in_a_file(tmp_path: Path) -> None:
    """Leaving an absent value out of the file would bring the preset's back."""
    save_config(configure("gfootball", clip_value=None), tmp_path / "a.toml")
    assert load_config(tmp_path / "a.toml").algorithm.clip_value is None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[runtime]\nnum_envs = 0", "runtime.num_envs in {} must be at least 1, got 0"),
        ("[runtime]\nnum_envz = 4", "runtime.num_envz in {} is not known; did you mean runtime.num_envs?"),
        ("num_envs = 4", "num_envs in {} belongs in [runtime]"),
        ("[algorithm]\nseed = 4", "seed in {} belongs above all tables"),
        ("[runtimes]\nnum_envs = 4", "[runtimes] in {} is not known; did you mean [runtime]?"),
        ("[zzz]\nnum_envs = 4", "[zzz] in {} is not known; the tables are [algorithm], [environment], [network],"),
        ("runtime = 4", "runtime in {} must be a table, [runtime], got 4"),
        ('algo = "a2c"\n[algorithm]\nepochs = 4', "algorithm.epochs in {} is a setting of ppo and batchppo, and"),
        ('algo = "dqn"', "algo in {} must be one of ppo, batchppo, a2c, impala, acktr, got dqn"),
        (
            "[environment]\nsticky_actions = 0.1",
            "environment.sticky_actions in {} is a setting of Atari environments, and gfootball is a football one",
        ),
        (
            "[algorithm]\nminibatches = 7",
            "algorithm.minibatches in {} must divide runtime.num_envs in {} x runtime.sync_interval in {} = 16 x 128",
        ),
        ("seed = ", "{} is not valid TOML: Invalid value (at end of document)"),
    ],
)
def test_refused_files(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        load_config(path)
    assert str(refusal.value).startswith(sentence.replace("{}", str(path)))


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't be read: no such file"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"can't be read: is a directory"):
        load_config(tmp_path)
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(tmp_path / "bytes.toml")


# ----------------------------------------------------------------------------------------------------------- folders


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    config = configure("CartPole-v1", run_dir=tmp_path / "deep" / "run")
    run_dir = create_run_dir(config)
    refuse_used(run_dir)
    create_run_dir(config)  # nothing was written into it
    save_config(config, run_dir / "config.toml")
    with pytest.raises(ConfigError, match="already holds a run; choose another --run-dir"):
        create_run_dir(config)


def test_folders_that_cant_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="exists and is not a folder"):
        create_run_dir(configure("CartPole-v1", run_dir=tmp_path / "file"))
    with pytest.raises(ConfigError, match="can't be made: not a directory"):
        create_run_dir(configure("CartPole-v1", run_dir=tmp_path / "file" / "run"))


def test_runs_that_start_together_get_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = configure("ALE/Pong-v5", seed=7)
    folders = {create_run_dir(config) for _ in range(3)}
    assert len(folders) == 3
    assert all(folder.name.startswith("ALE-Pong-v5-ppo-7-") and folder.parent.name == "runs" for folder in folders)


# ------------------------------------------------------------------------------------------------------ public names


def test_public_names_exist() -> None:
    for name in set(htsrl.__all__) - {"train", "evaluate_run"}:  # these two import torch
        assert getattr(htsrl, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = htsrl.nothing


def test_importing_htsrl_imports_nothing_heavy() -> None:
    code = "import sys, htsrl; print([m for m in ('torch', 'numpy', 'pydantic', 'gymnasium') if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert answer.strip() == "[]"
