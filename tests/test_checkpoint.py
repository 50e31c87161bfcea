"""Checkpoint files: they come back as they were, are whole or absent, and damage is noticed and named."""

import json
import os
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from htsrl.checkpoint import (
    Checkpoint,
    list_checkpoints,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
    write_checkpoint,
)
from htsrl.errors import ConfigError


def checkpoint(steps=7, seed=0):
    values = np.arange(12, dtype=np.float32).reshape(3, 4) + seed
    tensors = {
        "parameters/a": values.T,  # not contiguous
        "algorithm/step": np.float32(3.0) * np.ones(()),  # no dimensions
        "episodes/0": np.empty((0, 2), np.int64),  # nothing in it
        "last_obs": np.arange(5, dtype=np.uint8),
    }
    return Checkpoint(tensors, {"steps": steps, "nested": {"list": [1, 2.5, None, "θ"]}})


def test_a_checkpoint_comes_back_as_it_was(tmp_path):
    path = save_checkpoint(tmp_path, checkpoint(), keep=3)
    loaded = load_checkpoint(path)
    assert loaded.state == checkpoint().state
    assert loaded.tensors.keys() == checkpoint().tensors.keys()
    for name, array in checkpoint().tensors.items():
        assert loaded.tensors[name].dtype == array.dtype
        assert loaded.tensors[name].shape == array.shape
        np.testing.assert_array_equal(loaded.tensors[name], array)
    assert loaded.group("parameters").keys() == {"a"}


def test_the_newest_are_kept(tmp_path):
    for steps in (5, 10, 100, 20):
        save_checkpoint(tmp_path / "checkpoints", checkpoint(steps), keep=2)
    kept = [load_checkpoint(path).state["steps"] for path in list_checkpoints(tmp_path / "checkpoints")]
    assert kept == [20, 100] or kept == [10, 100]
    assert load_checkpoint(newest_checkpoint(tmp_path)).state["steps"] == 100


@given(st.data())
def test_any_flipped_byte_is_noticed(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("flip") / "c.safetensors"
    write_checkpoint(path, checkpoint())
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"c\.safetensors"):
        load_checkpoint(path)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_file_is_noticed(tmp_path, share):
    path = tmp_path / "c.safetensors"
    write_checkpoint(path, checkpoint())
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ConfigError, match=r"c\.safetensors"):
        load_checkpoint(path)


def test_a_pickle_is_refused_and_never_run(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)

    path = tmp_path / "c.safetensors"
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ConfigError, match="damaged"):
        load_checkpoint(path)
    assert not (tmp_path / "exploded").exists()


def test_a_full_disk_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "c.safetensors"
    write_checkpoint(path, checkpoint(seed=1))
    before = path.read_bytes()

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_checkpoint(path, checkpoint(seed=2))
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["c.safetensors"]


def test_another_format_is_named(tmp_path):
    from safetensors.numpy import save_file

    save_file({"x": np.zeros(1)}, tmp_path / "c.safetensors", {"format": "99", "state": json.dumps({})})
    with pytest.raises(ConfigError, match="format 1"):
        load_checkpoint(tmp_path / "c.safetensors")


def test_missing_checkpoints_are_named(tmp_path):
    with pytest.raises(ConfigError, match="there is no checkpoint"):
        load_checkpoint(tmp_path / "nothing.safetensors")
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        newest_checkpoint(tmp_path)
