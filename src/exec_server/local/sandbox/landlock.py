"""Landlock: rules that only ever add, for machines where no view of the file system can be put together.

A grant on a directory covers everything below it, so a plan that takes something away again below a
grant cannot be expressed and is refused. Landlock does not look at modes, owners, times and attributes
of files either; whoever is under it may not change those at all (see seccomp.py), because "here but not
there" cannot be said.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from typing import Final

from msgspec import Struct

from .plan import Access, Plan, covers

__all__ = ["Grant", "Inexpressible", "abi", "grants", "restrict"]

MINIMUM_ABI: Final = 3
"""Before, a file outside of the writable roots could still be truncated."""

_CREATE_RULESET: Final = 444
_ADD_RULE: Final = 445
_RESTRICT_SELF: Final = 446
"""System call numbers, the same on every architecture."""
_VERSION_FLAG: Final = 1
_PATH_BENEATH: Final = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = (1 << bit for bit in range(4))
_TRUNCATE: Final = 1 << 14
_IOCTL_DEV: Final = 1 << 15
_RIGHTS_BY_ABI: Final = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""How many of the rights, counted from bit 0, a version of the interface knows."""

READ: Final = _EXECUTE | _READ_FILE | _READ_DIR
ON_FILES: Final = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
"""What may be granted on something that is not a directory."""
USE_DEVICE: Final = _READ_FILE | _WRITE_FILE | _TRUNCATE | _IOCTL_DEV

DEVICES: Final = tuple(b"/dev/" + name for name in (b"null", b"zero", b"full", b"random", b"urandom", b"tty"))
"""What every view has in its private /dev as well."""

_TCP: Final = 0b11
"""Bind and connect (ABI 4); handled and not granted to anybody."""
_SCOPES: Final = 0b11
"""Abstract unix sockets and signals to processes outside (ABI 6)."""

_libc = ctypes.CDLL(None, use_errno=True)
_STRENGTH: Final[dict[Access, int]] = {"none": 0, "read": 1, "write": 2}


class Inexpressible(Exception):
    """A plan that rules which only add cannot carry out."""


class Grant(Struct, frozen=True):
    """Rights on a path and on everything below it."""

    path: bytes
    rights: int
    device: int | None = None
    inode: int | None = None
    """Which file it is about, where that matters: by now the path may lead to another."""


def abi() -> int:
    """The version of the kernel's Landlock; 0 where there is none."""
    version: int = _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION_FLAG))
    return max(version, 0)


def grants(plan: Plan, terminal: bytes | None = None) -> list[Grant]:
    """The rules that carry out a plan, whatever the version; Inexpressible if there are none.

    `terminal` is the command's own, which it has in its hands anyway.
    """
    if plan.network == "proxy":
        raise Inexpressible("Landlock has no network of its own in which only the proxies could be reached")
    for path in (*plan.denied, *plan.read_only, *plan.readable):
        granted = max(
            (strength for strength, roots in ((1, plan.readable), (2, plan.writable)) for root in roots
             if covers(root, path)),
            default=0,
        )  # fmt: skip
        wanted = plan.access(path)
        if granted > _STRENGTH[wanted]:
            raise Inexpressible(
                f"Landlock cannot take away rights below a directory that has them: {os.fsdecode(path)} must "
                f"be {'unreadable' if wanted == 'none' else 'read-only'}; this needs bubblewrap, and "
                "`exec-server doctor` says what keeps it from working"
            )
    known = {seen.path: (seen.device, seen.inode) for seen in plan.seen}
    rules = [Grant(path, READ, *known.get(path, ())) for path in plan.readable]
    rules += [Grant(path, -1, *known.get(path, ())) for path in plan.writable]
    rules += [Grant(path, USE_DEVICE) for path in DEVICES]
    if terminal is not None:
        rules.append(Grant(terminal, USE_DEVICE))
    return rules


def restrict(rules: list[Grant], version: int, *, network: bool) -> None:
    """Take everything from the calling thread, and whatever it starts, that the rules do not give it.

    Needs no_new_privs. `network` is whether TCP stays as it is.
    """
    handled = (1 << _RIGHTS_BY_ABI.get(version, 16)) - 1
    attributes = struct.pack("=QQQ", handled, 0 if network else _TCP, _SCOPES)
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = _call(_CREATE_RULESET, attributes[:size], ctypes.c_size_t(size), ctypes.c_uint32(0))
    try:
        for rule in rules:
            _add(ruleset, rule, handled)
        _call(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    finally:
        os.close(ruleset)


def _add(ruleset: int, rule: Grant, handled: int) -> None:
    try:
        fd = os.open(rule.path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # nothing there, nothing to grant
    try:
        found = os.fstat(fd)
        if rule.inode is not None and (found.st_dev, found.st_ino) != (rule.device, rule.inode):
            raise OSError(f"{os.fsdecode(rule.path)} is not what it was when the sandbox was planned")
        rights = rule.rights & handled
        if not stat.S_ISDIR(found.st_mode):
            rights &= ON_FILES
        _call(
            _ADD_RULE,
            ctypes.c_int(ruleset),
            ctypes.c_int(_PATH_BENEATH),
            struct.pack("=Qi", rights, fd),
            ctypes.c_uint32(0),
        )
    finally:
        os.close(fd)


def _call(number: int, *arguments: object) -> int:
    result: int = _libc.syscall(number, *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"Landlock: {os.strerror(code)}")
    return result
