"""Checkpoints: one safetensors file each, written atomically, checksummed, never pickle.

A checkpoint stands for the start of an interval, after the learner has consumed the storage before it: so it needs no
storage, and is written while the executors already work. Its tensors are the newest and the behaviour parameters by
name, the optimizer's state, the episode logs, snapshots of environments and what a recurrent policy remembers;
everything else is JSON in the file's header. One with snapshots is sealed, see `htsrl.seal`.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from safetensors.numpy import save

from htsrl.errors import ConfigError
from htsrl.rundir import CHECKPOINTS, write_atomically
from htsrl.seal import is_sealed, seal

FORMAT = 1
_SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint file holds."""

    tensors: dict[str, np.ndarray]
    """By name: ``parameters/*``, ``behaviour/*``, ``algorithm/*``, ``episodes/*``, ``snapshots/*``, and single ones."""
    state: dict[str, Any]
    """JSON: interval, version, steps, counters, digests, package versions."""
    sealed: bool = False
    """True where it was read from a file that a run of this user wrote."""

    def group(self, prefix: str) -> dict[str, np.ndarray]:
        """The tensors under ``prefix/``, without the prefix."""
        start = len(prefix) + 1
        return {name[start:]: array for name, array in self.tensors.items() if name.startswith(f"{prefix}/")}


def save_checkpoint(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write ``checkpoint`` into ``folder`` and delete all but the newest ``keep``.

    A temporary file is written, synced and renamed, so that a checkpoint is either whole or absent.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"steps-{checkpoint.state['steps']:012d}{_SUFFIX}"
    write_checkpoint(path, checkpoint)
    for old in list_checkpoints(folder)[:-keep]:
        if old != path:
            old.unlink()
    return path


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write one file, whole or not at all."""
    state = json.dumps(checkpoint.state, sort_keys=True)
    checksum = _checksum(checkpoint.tensors, state)
    metadata = {"format": str(FORMAT), "state": state, "sha256": checksum}
    if checkpoint.group("snapshots"):
        metadata["seal"] = seal(checksum)
    arrays = {name: np.require(array, requirements="C") for name, array in checkpoint.tensors.items()}
    write_atomically(path, save(arrays, metadata))


def load_checkpoint(path: Path) -> Checkpoint:
    """Read and verify one checkpoint.

    Raises:
        ConfigError: the file is missing, damaged or of another format; the message says which.
    """
    if not path.exists():
        raise ConfigError(f"there is no checkpoint {path}")
    if not path.is_file():  # opening a pipe would wait for its writer
        raise ConfigError(f"{path} is not a file")
    try:
        if path.stat().st_size > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            raise ValueError("larger than this machine's memory")
        with safetensors.safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except Exception as error:  # of many kinds: a shape that no array can have, a type that numpy doesn't know
        raise ConfigError(f"the checkpoint {path} is damaged ({error})") from None
    if metadata.get("format") != str(FORMAT):
        raise ConfigError(f"{path} is not a checkpoint of format {FORMAT}, the only one that this version reads")
    text = metadata.get("state", "")
    if metadata.get("sha256") != _checksum(tensors, text):
        raise ConfigError(f"the checkpoint {path} is damaged: its checksum doesn't match its content")
    try:
        state = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the checkpoint {path} is damaged ({error})") from None
    if not isinstance(state, dict):
        raise ConfigError(f"the checkpoint {path} is damaged: its state is not an object")
    return Checkpoint(tensors, state, is_sealed(metadata["sha256"], metadata.get("seal", "")))


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in ``folder``, oldest first."""
    return sorted(folder.glob(f"steps-*{_SUFFIX}"))


def newest_checkpoint(run_dir: Path) -> Path:
    """The newest checkpoint of a run.

    Raises:
        ConfigError: there is none.
    """
    found = list_checkpoints(run_dir / CHECKPOINTS)
    if not found:
        raise ConfigError(
            f"{run_dir} holds no checkpoint; a run writes one at its end and every --checkpoint-every steps"
        )
    return found[-1]


def _checksum(tensors: dict[str, np.ndarray], state: str) -> str:
    digest = hashlib.sha256(state.encode())
    for name in sorted(tensors):
        digest.update(f"{name}:{tensors[name].dtype}:{tensors[name].shape}".encode())
        digest.update(np.ascontiguousarray(tensors[name]).data)
    return digest.hexdigest()
