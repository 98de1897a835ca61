"""The recorded handshakes: two with the reference, and one whose every secret is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from exec_server.relay.keys import Identity, PublicKey
from exec_server.relay.noise import Encapsulate

__all__ = ["FRAMES", "VECTORS", "encapsulating", "identity", "public", "vector"]

_FILE = json.loads((Path(__file__).parent / "vectors.json").read_text())

VECTORS: list[dict[str, Any]] = _FILE["vectors"]
FRAMES: list[dict[str, Any]] = _FILE["frame_vectors"]


def vector(name: str) -> dict[str, Any]:
    """One of the recordings."""
    return next(vector for vector in VECTORS if vector["name"] == name)


def identity(keys: dict[str, str]) -> Identity:
    """From the secrets in a recording."""
    return Identity.from_secrets(
        bytes.fromhex(keys["x25519_private"]), bytes.fromhex(keys["mlkem768_seed_d_z"])
    )


def public(keys: dict[str, str]) -> PublicKey:
    """From the public values in a recording."""
    return PublicKey(bytes.fromhex(keys["x25519_public"]), bytes.fromhex(keys["mlkem768_public"]))


def encapsulating(*known: tuple[bytes, bytes]) -> Encapsulate:
    """What was encapsulated when the recording was made, in that order."""
    rest = iter(known)
    return lambda _key: next(rest)
