"""A run's folder: its name, the files in it, and how they are written."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from htsrl.config import AnyConfig
from htsrl.errors import ConfigError, RunFailed

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"
DIGESTS = "digests.jsonl"
RESULT = "result.json"
CHECKPOINTS = "checkpoints"
FAILURE = "failure"  # what there is to look at after a loss that was not finite
INITIAL = "initial.safetensors"  # the weights from which a forked run began


def create_run_dir(config: AnyConfig) -> Path:
    """Make the folder of a new run: ``output.run_dir``, or ``runs/ENV-ALGO-SEED-TIME``.

    Raises:
        ConfigError: the folder already holds a run, or can't be made.
    """
    if config.output.run_dir is not None:
        return _make(config.output.run_dir, exist_ok=True)
    env = re.sub(r"[^A-Za-z0-9_.]+", "-", config.env).strip("-")
    name = f"{env}-{config.algo}-{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    for suffix in ("", *(f"-{k}" for k in range(2, 100))):  # runs that start within the same second
        try:
            return _make(Path("runs") / (name + suffix), exist_ok=False)
        except FileExistsError:
            continue
    raise ConfigError(f"runs/{name} and 98 more like it exist; name a folder with --run-dir")


def refuse_used(run_dir: Path) -> None:
    """Refuse a folder that holds a run: nothing is ever overwritten.

    Raises:
        ConfigError: it does.
    """
    if any((run_dir / name).exists() for name in (CONFIG, METRICS, CHECKPOINTS, INITIAL)):
        raise ConfigError(f"{run_dir} already holds a run; choose another --run-dir, or delete that folder first")


def require_run(run_dir: Path) -> None:
    """Refuse what isn't a run's folder.

    Raises:
        ConfigError: no such folder, or one without a configuration.
    """
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir} is not a folder" if run_dir.exists() else f"{run_dir}: no such folder")
    if not (run_dir / CONFIG).is_file():
        raise ConfigError(f"{run_dir} is not the folder of a run: it has no {CONFIG}")


@contextmanager
def alone_in(run_dir: Path) -> Iterator[None]:
    """Hold a run's folder while training into it; the system lets go of it however this process ends.

    Raises:
        ConfigError: another process trains there.
    """
    folder = os.open(run_dir, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ConfigError(f"another process is training in {run_dir}; wait for it, or stop it first") from None
    finally:
        os.close(folder)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a reader, or a crash, sees the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # Not through a link that somebody has put there
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What is written to ``path`` within fails, if the system refuses, in one sentence.

    Raises:
        RunFailed: naming path and reason.
    """
    try:
        yield
    except OSError as error:
        raise RunFailed(f"{path} can't be written: {reason_of(error)}") from None


def reason_of(error: OSError) -> str:
    """Why the system refused, for the middle of a sentence."""
    return (error.strerror or str(error)).lower()


def update_result(run_dir: Path, values: dict[str, Any]) -> None:
    """Put ``values`` into ``result.json``, beside what is there."""
    result = result_of(run_dir) | plain(values)
    write_atomically(run_dir / RESULT, (json.dumps(result, indent=2, allow_nan=False) + "\n").encode())


def result_of(run_dir: Path) -> dict[str, Any]:
    """What ``result.json`` holds; nothing where there is none."""
    try:
        result = json.loads((run_dir / RESULT).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return result if isinstance(result, dict) else {}


def plain(value: Any) -> Any:
    """``value`` for JSON, which knows neither numpy's numbers nor NaN and infinity (these become null)."""
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _make(path: Path, exist_ok: bool) -> Path:
    if exist_ok:
        refuse_used(path)
    try:
        path.mkdir(parents=True, exist_ok=exist_ok)
    except FileExistsError:
        if not exist_ok:
            raise
        raise ConfigError(f"{path} exists and is not a folder") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be made: {reason_of(error)}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"{path} can't be written to")
    return path
