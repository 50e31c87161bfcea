"""Seals: proof that a run of this user wrote a file.

An engine takes a snapshot for granted: it copies the bytes into its own memory, indices and all, so that bytes made up
by a stranger could make it do anything. So a checkpoint with snapshots bears a seal (HMAC-SHA256) made with a key that
stays in this user's home, and without a good one its snapshots are not used. Resuming then replays the episodes.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from contextlib import suppress
from pathlib import Path

from htsrl.rng import secret

_SIZE = 32


def seal(checksum: str) -> str:
    """The seal of a file with this checksum; empty where no key can be kept."""
    key = _key() or _new_key()
    return _seal(key, checksum) if key else ""


def is_sealed(checksum: str, claimed: str) -> bool:
    """Whether ``claimed`` is this user's seal of ``checksum``."""
    key = _key()
    return key is not None and hmac.compare_digest(_seal(key, checksum).encode(), claimed.encode())


def _seal(key: bytes, checksum: str) -> str:
    return hmac.new(key, checksum.encode(), hashlib.sha256).hexdigest()


def _path() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "htsrl" / "seal.key"


def _key() -> bytes | None:
    try:
        key = _path().read_bytes()
    except (OSError, RuntimeError):  # no file, or no home
        return None
    return key if len(key) == _SIZE else None


def _new_key() -> bytes | None:
    """Make the key, unless another run has just done so."""
    with suppress(OSError, RuntimeError):
        path = _path()
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.touch(mode=0o600)
        draft.write_bytes(secret())
        with suppress(FileExistsError):
            os.link(draft, path)
        draft.unlink()
    return _key()
