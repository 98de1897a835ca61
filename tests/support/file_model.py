"""A file system in memory, with directories, files and links, that answers as the specification says.

It knows nothing of how servers do it: paths are resolved the way path_resolution(7) describes, and each
operation is the few lines its section of the specification takes. What the specification leaves open (a
copy that fails half way, a link that leads out of the tree) raises Undefined, and is not asked of anybody.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Any

__all__ = ["Directory", "File", "Link", "Model", "Refused", "Undefined"]

MAX_LINKS = 40
"""Followed on the way to one file before it counts as a loop."""

NOT_FOUND, INVALID, INTERNAL = -32004, -32600, -32603

_CODES = {errno.ENOENT: NOT_FOUND, errno.EACCES: INVALID, errno.EINVAL: INVALID, errno.EPERM: INVALID}


class Refused(Exception):
    """An error answer: its code, and the errno if it is the operating system's."""

    def __init__(self, code: int, number: int | None = None) -> None:
        super().__init__(code, number and errno.errorcode[number])
        self.code = code
        self.number = number


class Undefined(Exception):
    """Servers may do as they like here."""


class File:
    def __init__(self, data: bytes) -> None:
        self.data = data


class Link:
    def __init__(self, target: str) -> None:
        self.target = target


class Directory:
    def __init__(self, parent: Directory | None, name: str) -> None:
        self.parent = parent
        self.name = name
        self.entries: dict[str, Node] = {}

    @property
    def path(self) -> str:
        """From the root of the model, which is empty."""
        if self.parent is None:
            return ""
        return f"{self.parent.path}/{self.name}".lstrip("/")

    def is_in(self, other: Directory) -> bool:
        """Whether this is the other, or below it."""
        here: Directory | None = self
        while here is not None and here is not other:
            here = here.parent
        return here is other


Node = File | Link | Directory


class Place:
    """Where a path leads: an entry of a directory, which may not exist yet. The root has no name."""

    def __init__(self, directory: Directory, name: str | None) -> None:
        self.directory = directory
        self.name = name

    @property
    def node(self) -> Node | None:
        return self.directory if self.name is None else self.directory.entries.get(self.name)

    @property
    def path(self) -> str:
        return f"{self.directory.path}/{self.name or ''}".strip("/")


def refuse(number: int) -> Refused:
    return Refused(_CODES.get(number, INTERNAL), number)


class Model:
    """Paths are relative to its root, a link's target may begin with `/`: the root."""

    def __init__(self) -> None:
        self.root = Directory(None, "")

    # Resolution ----------------------------------------------------------------------------------

    def find(self, path: str, follow: bool = True) -> Place:
        """Where a path leads; its last name need not exist, those before it must."""
        return self._walk_to(self.root, path, follow, [0])

    def _walk_to(self, start: Directory, path: str, follow: bool, links: list[int]) -> Place:
        here = Place(self.root if path.startswith("/") else start, None)
        parts = [part for part in path.split("/") if part]
        for index, part in enumerate(parts):
            directory = here.node
            if directory is None:
                raise refuse(errno.ENOENT)
            if not isinstance(directory, Directory):
                raise refuse(errno.ENOTDIR)
            if part == "..":
                if directory.parent is None:
                    raise Undefined("out of the tree")
                here = Place(directory.parent, None)
                continue
            here = Place(directory, part)
            if isinstance(link := here.node, Link) and (follow or index < len(parts) - 1):
                links[0] += 1
                if links[0] > MAX_LINKS:
                    raise refuse(errno.ELOOP)
                here = self._walk_to(directory, link.target, True, links)
        return here

    def existing(self, path: str, follow: bool = True) -> Node:
        node = self.find(path, follow).node
        if node is None:
            raise refuse(errno.ENOENT)
        return node

    def leads_to(self, path: str) -> Node | None:
        """What is at the end of all links; None if they lead nowhere."""
        try:
            return self.existing(path)
        except Refused:
            return None

    # Contents ------------------------------------------------------------------------------------

    def read(self, path: str) -> bytes:
        node = self.existing(path)
        if not isinstance(node, File):
            raise Refused(INVALID)
        return node.data

    def read_range(self, path: str, offset: int, length: int) -> tuple[bytes, bool]:
        data = self.read(path)
        return data[offset : offset + length], offset + length >= len(data)

    def write(self, path: str, data: bytes) -> None:
        place = self.find(path)
        if isinstance(place.node, Directory):
            raise refuse(errno.EISDIR)
        self._put(place, File(data))

    def write_stream(self, path: str, data: bytes) -> int:
        self.write(path, data)
        return len(data)

    def symlink(self, path: str, target: str) -> None:
        place = self.find(path, follow=False)
        if place.node is not None:
            raise refuse(errno.EEXIST)
        self._put(place, Link(target))

    @staticmethod
    def _put(place: Place, node: Node) -> None:
        assert place.name is not None
        place.directory.entries[place.name] = node

    # Looking -------------------------------------------------------------------------------------

    def metadata(self, path: str, follow: bool) -> tuple[str, bool, int | None]:
        """Kind, whether the path itself is a link, and the size of a file."""
        if not follow:
            self._refuse_links(path)
        is_link = isinstance(self.existing(path, follow=False), Link)
        node = self.existing(path)
        return (_kind(node), is_link, len(node.data) if isinstance(node, File) else None)

    def _refuse_links(self, path: str) -> None:
        """On the way they are no directories, and in the end they are links."""
        *above, last = path.split("/")
        here: Node | None = self.root
        for name in above:
            here = here.entries.get(name) if isinstance(here, Directory) else None
            if here is None:
                raise refuse(errno.ENOENT)
            if not isinstance(here, Directory):
                raise refuse(errno.ENOTDIR)
        if isinstance(here, Directory) and isinstance(here.entries.get(last), Link):
            raise Refused(INVALID)

    def list(self, path: str) -> list[tuple[str, str]]:
        """Names and kinds, sorted; links by what they lead to, those to nowhere left out."""
        directory = self.existing(path)
        if not isinstance(directory, Directory):
            raise refuse(errno.ENOTDIR)
        found = [(name, self.leads_to(f"{path}/{name}")) for name in directory.entries]
        return sorted((name, _kind(node)) for name, node in found if node is not None)

    def canonicalize(self, path: str) -> str:
        self.existing(path)
        return self.find(path).path

    def walk(
        self,
        path: str,
        max_depth: int,
        max_directories: int,
        max_entries: int,
        follow_directory_symlinks: bool,
        prune_hidden_directories: bool,
    ) -> tuple[list[tuple[str, str]], bool]:
        """Paths and kinds, and whether a limit was reached."""
        top = self.existing(path)
        if not isinstance(top, Directory):
            return [], False
        if isinstance(self.existing(path, follow=False), Link) and not follow_directory_symlinks:
            return [], False
        entries: list[tuple[str, str]] = []
        truncated, examined, directories = False, 0, 1
        entered = {top}
        queue = [(path, 0)]
        while queue:
            here, depth = queue.pop(0)
            directory = self.existing(here)
            assert isinstance(directory, Directory)
            for name in sorted(directory.entries, key=str.encode):
                below = f"{here}/{name}".lstrip("/")
                node = self.leads_to(below)
                if node is None:
                    continue
                if examined == max_entries:
                    return entries, True
                examined += 1
                is_link = isinstance(directory.entries[name], Link)
                if is_link and not (follow_directory_symlinks and isinstance(node, Directory)):
                    continue
                entries.append((below, _kind(node)))
                if not isinstance(node, Directory) or depth == max_depth:
                    continue
                if prune_hidden_directories and name.startswith("."):
                    continue
                if follow_directory_symlinks and node in entered:
                    continue
                entered.add(node)
                if directories == max_directories:
                    truncated = True
                    continue
                directories += 1
                queue.append((below, depth + 1))
        return entries, truncated

    # Changing ------------------------------------------------------------------------------------

    def make_directory(self, path: str, recursive: bool) -> None:
        try:
            self._mkdir(path)
        except Refused as refused:
            if not recursive:
                raise
            if refused.number == errno.ENOENT and "/" in path:
                self.make_directory(path.rpartition("/")[0], True)
                self._mkdir(path)
            elif not isinstance(self.leads_to(path), Directory):
                raise

    def _mkdir(self, path: str) -> None:
        place = self.find(path, follow=False)
        if place.node is not None:
            raise refuse(errno.EEXIST)
        assert place.name is not None
        self._put(place, Directory(place.directory, place.name))

    def remove(self, path: str, recursive: bool, force: bool) -> None:
        try:
            node = self.existing(path, follow=False)
        except Refused as refused:
            if force and refused.number == errno.ENOENT:
                return
            raise
        if isinstance(node, Directory) and node.entries and not recursive:
            raise refuse(errno.ENOTEMPTY)
        place = self.find(path, follow=False)
        assert place.name is not None
        del place.directory.entries[place.name]

    def move(self, source: str, target: str, overwrite: bool) -> None:
        """rename(2), or with RENAME_NOREPLACE."""
        old, new = self.find(source, follow=False), self.find(target, follow=False)
        node, there = old.node, new.node
        if node is None:
            raise refuse(errno.ENOENT)
        if there is not None and not overwrite:
            raise refuse(errno.EEXIST)
        if isinstance(node, Directory) and new.directory.is_in(node):
            raise refuse(errno.EINVAL)
        if isinstance(there, Directory) and old.directory.is_in(there):
            raise refuse(errno.ENOTEMPTY)
        if node is there:
            return
        if there is not None:
            if isinstance(node, Directory) and not isinstance(there, Directory):
                raise refuse(errno.ENOTDIR)
            if isinstance(there, Directory) and not isinstance(node, Directory):
                raise refuse(errno.EISDIR)
            if isinstance(there, Directory) and there.entries:
                raise refuse(errno.ENOTEMPTY)
        assert old.name is not None
        assert new.name is not None
        del old.directory.entries[old.name]
        if isinstance(node, Directory):
            node.parent, node.name = new.directory, new.name
        self._put(new, node)

    def is_same_file(self, source: str, target: str) -> bool:
        """Whether a copy would be of a file onto itself."""
        node = self.leads_to(target)
        return isinstance(node, File) and node is self.leads_to(source)

    def copy(self, source: str, target: str, recursive: bool) -> None:
        node = self.existing(source, follow=False)
        if isinstance(node, Link):
            self.symlink(target, node.target)
        elif isinstance(node, File):
            if not self.is_same_file(source, target):
                self.write(target, node.data)
        elif not recursive or self._existing_part(target).is_in(node):
            raise Refused(INVALID)
        else:
            self._copy_tree(node, target)

    def _existing_part(self, path: str) -> Directory:
        """The directory that is, or would be, nearest above a path."""
        while path:
            node = self.leads_to(path)
            if isinstance(node, Directory):
                return node
            if node is not None:
                return self.find(path).directory
            path = path.rpartition("/")[0]
        return self.root

    def _copy_tree(self, source: Directory, target: str) -> None:
        self.make_directory(target, True)
        # From here on an error is one half way, and which half depends on the order of the names.
        touched: set[tuple[Directory, str]] = set()
        try:
            for node, path in list(_below(source, target)):
                if isinstance(node, Directory):
                    self.make_directory(path, True)
                    directory = self.existing(path)
                    assert isinstance(directory, Directory)
                    self._touch(touched, source, directory, "")
                    continue
                place = self.find(path, follow=isinstance(node, File))
                assert place.name is not None
                self._touch(touched, source, place.directory, place.name)
                if isinstance(node, Link):
                    self.symlink(path, node.target)
                else:
                    self.write(path, node.data)
        except Refused as refused:
            raise Undefined("half way") from refused

    @staticmethod
    def _touch(
        touched: set[tuple[Directory, str]], source: Directory, directory: Directory, name: str
    ) -> None:
        """Links may lead two entries to one place, or back to where they come from: order would matter."""
        if (directory, name) in touched or directory.is_in(source):
            raise Undefined("depends on the order")
        touched.add((directory, name))

    # The whole of it -----------------------------------------------------------------------------

    def tree(self) -> dict[str, Any]:
        """Every path: bytes of a file, None of a directory, `-> target` of a link."""
        return {path.lstrip("/"): _content(node) for node, path in _below(self.root, "")}


def _below(directory: Directory, path: str) -> Iterator[tuple[Node, str]]:
    for name, node in directory.entries.items():
        yield node, f"{path}/{name}"
        if isinstance(node, Directory):
            yield from _below(node, f"{path}/{name}")


def _kind(node: Node) -> str:
    return "directory" if isinstance(node, Directory) else "file"


def _content(node: Node) -> bytes | str | None:
    if isinstance(node, File):
        return node.data
    return None if isinstance(node, Directory) else f"-> {node.target}"
