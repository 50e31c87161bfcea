"""How our adapters write snapshots: a line of JSON, then the engine's bytes. Reading one executes nothing."""

from __future__ import annotations

import json
from typing import Any


def pack(facts: dict[str, Any], engine: bytes) -> bytes:
    """One byte string from JSON-able ``facts`` and the engine's own state."""
    return json.dumps(facts).encode() + b"\n" + engine


def unpack(snapshot: bytes) -> tuple[dict[str, Any], bytes]:
    """The reverse of :func:`pack`; raises ValueError where the line is not JSON."""
    facts, _, engine = snapshot.partition(b"\n")
    return json.loads(facts), engine
