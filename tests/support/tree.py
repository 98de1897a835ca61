"""A file system in a dict, for what only asks (exec_server.local.sandbox.look.Machine)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from exec_server.local.sandbox.links import Look, Real, resolve
from exec_server.local.sandbox.look import Maker
from exec_server.local.sandbox.mounts import Mounts
from exec_server.local.sandbox.plan import Identity

__all__ = ["Tree"]


class Tree:
    """Paths and what is there: None is a directory, bytes a file's content, a str where a link leads.

    Directories above what is named exist, too.
    """

    def __init__(self, nodes: Mapping[str, Any]) -> None:
        self.nodes: dict[bytes, Any] = {b"/": None}
        self.blank: set[bytes] = set()
        self.makers: dict[bytes, Maker] = {}
        """Who can make something in directories in which not anybody can."""
        self.mounted = Mounts(b"", False)
        self.own: list[bytes] = []
        """What belongs to the server."""
        for name, value in nodes.items():
            path = os.fsencode(name)
            self.nodes[path] = value
            while path != b"/":
                path = os.path.dirname(path)
                self.nodes.setdefault(path, None)

    def look(self, path: bytes) -> Look:
        if path not in self.nodes:
            return Look("missing")
        value = self.nodes[path]
        if value is None:
            return Look("directory")
        if isinstance(value, str):
            return Look("link", os.fsencode(value))
        return Look("file", blank=path in self.blank)

    def entries(self, directory: bytes) -> tuple[tuple[bytes, bool], ...]:
        below = [path for path in self.nodes if path != b"/" and os.path.dirname(path) == directory]
        return tuple((os.path.basename(path), self.nodes[path] is None) for path in below)

    def is_empty(self, directory: bytes) -> bool:
        return not self.entries(directory)

    def head(self, file: bytes) -> bytes:
        value = self.nodes.get(file)
        return value if isinstance(value, bytes) else b""

    def identity(self, path: bytes) -> Identity:
        return Identity(path, 1, list(self.nodes).index(path) + 1 if path in self.nodes else 0, 0)

    def settled(self, path: bytes) -> tuple[Real, Identity]:
        real = resolve(path, self.look)
        return real, self.identity(real.path)

    def maker(self, directory: bytes) -> Maker:
        return self.makers.get(directory, "anybody")

    def mounts(self) -> Mounts:
        return self.mounted

    def private(self) -> tuple[bytes, ...]:
        return tuple(self.own)
