"""File calls under sandboxes, for tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from .profiles import managed, path, special
from .rpc import Peer, b64, unb64

__all__ = ["ABSENT", "DENIED", "READ_ONLY", "WALK", "Sandboxed", "root"]

WALK = {"maxDepth": 8, "maxDirectories": 100, "maxEntries": 1000, "followDirectorySymlinks": False}
ABSENT = (-32004, "No such file or directory (os error 2)")
DENIED = (-32600, "Permission denied (os error 13)")
READ_ONLY = (-32603, "Read-only file system (os error 30)")


class Sandboxed:
    """Calls about paths below a root, under one sandbox or another."""

    def __init__(self, peer: Peer, root: Path) -> None:
        self.peer = peer
        self.root = root

    def uri(self, name: str = "") -> str:
        return (self.root / name).as_uri()

    def params(self, name: str, profile: Any, **more: Any) -> dict[str, Any]:
        return {"path": self.uri(name), "sandbox": profile, **more}

    def call(self, method: str, name: str, profile: Any, **more: Any) -> Any:
        return self.peer.call(f"fs/{method}", self.params(name, profile, **more))

    def refused(self, method: str, name: str, profile: Any, **more: Any) -> tuple[int, str]:
        return self.peer.refused(f"fs/{method}", self.params(name, profile, **more))

    def get(self, name: str, profile: Any) -> bytes:
        return unb64(self.call("readFile", name, profile)["dataBase64"])

    def put(self, name: str, data: bytes, profile: Any) -> None:
        assert self.call("writeFile", name, profile, dataBase64=b64(data)) == {}

    def reading(self, *names: str) -> dict[str, Any]:
        """A profile that lets these be read, and nothing else."""
        return managed(*(path(self.root / name, "read") for name in names))

    def writing(self, *names: str, **more: Any) -> dict[str, Any]:
        """A profile that lets everything be read and these be written."""
        return managed(special("root", "read"), *(path(self.root / name, "write") for name in names), **more)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    real = Path(os.path.realpath(tmp_path))
    for name in ("w/sub", "o"):
        (real / name).mkdir(parents=True)
    (real / "w/a").write_bytes(b"inside")
    (real / "w/sub/b").write_bytes(b"deeper")
    (real / "o/s").write_bytes(b"outside")
    (real / "w/link").symlink_to("../o")
    return real
