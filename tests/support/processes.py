"""What tests of processes over the wire share."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from .machine import running
from .rpc import Peer, unb64
from .wait import eventually

__all__ = ["MIB", "NewPeer", "kill_sleeper", "process", "read_to_end"]

NewPeer = Callable[..., Peer]
MIB = 1024 * 1024


def process(process_id: str, **more: Any) -> dict[str, Any]:
    return {"processId": process_id, **more}


def read_to_end(peer: Peer, process_id: str, **more: Any) -> tuple[bytes, dict[str, Any]]:
    """As a client without notifications does: poll until it has closed."""
    output, after = b"", 0
    while True:
        answer = peer.read(process_id, afterSeq=after, waitMs=10_000, **more)
        output += b"".join(unb64(chunk["chunk"]) for chunk in answer["chunks"])
        after = answer["nextSeq"] - 1
        if answer["closed"] and not answer["chunks"]:
            return output, answer


def kill_sleeper(marker: str) -> None:
    """The one that holds the output of its parent."""
    [pid] = eventually(lambda: running(f"sleep\0{marker}"), "the sleeper to be there")
    os.kill(pid, 9)
