"""What a sandbox is, as a value: it can be printed, compared and asked, and nothing runs.

A plan says what must hold, in the order in which a view of the file system is put together. How it is
carried out (which program, which arguments and descriptors, in which environment) is the backend's
business, and a backend that cannot carry out all of it refuses. Paths are absolute bytes without links.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

__all__ = [
    "Access",
    "Bind",
    "Directory",
    "EmptyFile",
    "Identity",
    "Kind",
    "Link",
    "MountPoint",
    "Network",
    "Plan",
    "PlanError",
    "PrivateDevices",
    "ReadOnly",
    "Step",
    "Tmpfs",
    "covers",
    "depth",
]

Access: TypeAlias = Literal["none", "read", "write"]

Kind: TypeAlias = Literal["plain", "filter", "view"]
"""`plain`: nothing is enforced. `filter`: every file may be written, but system calls are filtered.
`view`: a file system of its own, put together by the steps."""

Network: TypeAlias = Literal["open", "closed", "proxy"]
"""`proxy`: closed but for the loopback ports of the proxies in the environment."""


class PlanError(Exception):
    """A profile that cannot be enforced as it is meant, in the words that peers know."""


class Bind(Struct, frozen=True, tag=True):
    """What is at `source` outside is at `target` inside."""

    source: bytes
    target: bytes
    writable: bool = False

    def __str__(self) -> str:
        way = "" if self.source == self.target else f" from {_text(self.source)}"
        return f"{'bind' if self.writable else 'bind read-only'} {_text(self.target)}{way}"


class PrivateDevices(Struct, frozen=True, tag=True):
    """A fresh directory with null, zero, full, random, urandom, tty, a private pts and shm."""

    target: bytes = b"/dev"

    def __str__(self) -> str:
        return f"private devices {_text(self.target)}"


class Tmpfs(Struct, frozen=True, tag=True):
    """An empty directory of its own. It becomes read-only by a later `ReadOnly` of the same path."""

    target: bytes
    mode: int = 0o755

    def __str__(self) -> str:
        return f"empty directory {_text(self.target)} mode {self.mode:03o}"


class Directory(Struct, frozen=True, tag=True):
    """A mount point inside a directory that an earlier step made."""

    target: bytes

    def __str__(self) -> str:
        return f"make {_text(self.target)}"


class EmptyFile(Struct, frozen=True, tag=True):
    """A read-only file without content covers whatever is there. `mode` None: as a bare mount has it."""

    target: bytes
    mode: int | None = None

    def __str__(self) -> str:
        return f"empty file {_text(self.target)}{'' if self.mode is None else f' mode {self.mode:03o}'}"


class Link(Struct, frozen=True, tag=True):
    """A symbolic link of the host, made again where its directory is not part of the view."""

    target: bytes
    leads_to: bytes

    def __str__(self) -> str:
        return f"link {_text(self.target)} to {_text(self.leads_to)}"


class ReadOnly(Struct, frozen=True, tag=True):
    """The mount at this path takes no changes from here on."""

    target: bytes

    def __str__(self) -> str:
        return f"seal {_text(self.target)}"


Step: TypeAlias = Bind | PrivateDevices | Tmpfs | Directory | EmptyFile | Link | ReadOnly


class MountPoint(Struct, frozen=True, order=True):
    """Something that is not there yet and comes to be on the host when the view is put together."""

    path: bytes
    directory: bool

    def __str__(self) -> str:
        return f"{_text(self.path)}{'/' if self.directory else ''}"


class Identity(Struct, frozen=True, order=True):
    """Which file of the host a path led to. A path may come to lead to another one, and a mount stays
    with the old one, or goes with it."""

    path: bytes
    device: int
    inode: int
    born: int
    """Nanoseconds; tells a new file from an old one whose number it got. 0 where nobody knows."""


class Plan(Struct, frozen=True, kw_only=True):
    """Everything a backend needs to know. Equal plans allow the same and are put together the same way.

    The four sets say the policy once more, by path. A path is in one of them at most, and what holds
    for a path is what its nearest ancestor (or itself) is in; in none of them, it cannot be seen.
    `read_only` is what must not change below a writable root, whether it exists or not.
    """

    kind: Kind
    network: Network
    steps: tuple[Step, ...] = ()
    created: tuple[MountPoint, ...] = ()
    """To be removed afterwards, if still empty and used by nobody else."""
    readable: tuple[bytes, ...] = ()
    writable: tuple[bytes, ...] = ()
    read_only: tuple[bytes, ...] = ()
    denied: tuple[bytes, ...] = ()
    seen: tuple[Identity, ...] = ()
    """What the steps bind and cover, as it was when the plan was made."""
    mounts: bytes = b""
    """Which mounts the host had: a view is made of them, and of no others later."""
    spread: bool = False
    """Whether what the host mounts later would appear in a view, unless that is prevented."""
    cwd: bytes = b"/"
    """Where a command starts: the real path, or `/` where that cannot be seen."""

    def access(self, path: bytes) -> Access:
        """What the sandbox allows with the file of the host at a path without links."""
        nearest: tuple[int, Access] = (-1, "none")
        for access, roots in (
            ("none", self.denied),
            ("read", self.read_only),
            ("write", self.writable),
            ("read", self.readable),
        ):
            for root in roots:
                if covers(root, path) and depth(root) > nearest[0]:
                    nearest = (depth(root), access)  # type: ignore[assignment]  # the literals above
        return nearest[1]

    def for_reading(self) -> Plan:
        """The plan for who only reads: nothing can be changed in it, so nothing has to stand where nothing
        may be made. What is denied stays covered, also where it is not there."""
        needless = {point.path for point in self.created}.difference(self.denied)
        if not needless:
            return self
        kept = [step for step in self.steps if step.target not in needless]
        steps = [replace(step, writable=False) if isinstance(step, Bind) else step for step in kept]
        allowed = {*self.readable, *self.writable, *self.read_only} - needless
        return replace(
            self,
            steps=tuple(
                [replace(step, writable=False) if isinstance(step, Bind) else step for step in steps]
            ),
            created=tuple([point for point in self.created if point.path not in needless]),
            readable=tuple(sorted(allowed)),
            writable=(),
            read_only=(),
        )

    def __str__(self) -> str:
        lines = [f"{self.kind}, network {self.network}, starts in {_text(self.cwd)}"]
        lines += [f"  {step}" for step in self.steps]
        lines += [f"  comes to be: {point}" for point in self.created]
        for name in ("readable", "writable", "read_only", "denied"):
            roots: tuple[bytes, ...] = getattr(self, name)
            if roots:
                lines.append(f"  {name.replace('_', '-')}: {', '.join(map(_text, roots))}")
        return "\n".join(lines)


def covers(root: bytes, path: bytes) -> bool:
    """Whether a path is a root or lies below it, by name."""
    return path == root or root == b"/" or path.startswith(root + b"/")


def depth(path: bytes) -> int:
    """How many names a path has."""
    return 0 if path == b"/" else path.count(b"/")


def _text(path: bytes) -> str:
    return path.decode("utf-8", "backslashreplace")
