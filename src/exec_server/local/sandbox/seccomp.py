"""System call filters, put together by hand: classic BPF over the number and first arguments of a call.

The default is to allow; what a filter names answers EPERM. A foreign architecture (32-bit calls on a
64-bit kernel) kills the process, because its numbers mean other calls. Everything that needs a capability
(mount, bpf, keyctl of others, ...) is left to namespaces and to capabilities that are gone.
"""

from __future__ import annotations

import os
import struct
from functools import cache
from typing import Final

from msgspec import Struct

from .plan import Network, Plan

__all__ = ["Unsupported", "filter_for", "program"]

ALLOW: Final = 0x7FFF0000
DENY: Final = 0x00050000 | 1
"""SECCOMP_RET_ERRNO with EPERM."""
KILL: Final = 0x80000000
"""SECCOMP_RET_KILL_PROCESS."""

_LOAD: Final = 0x20
_IF_EQUAL: Final = 0x15
_IF_AT_LEAST: Final = 0x35
_RETURN: Final = 0x06
_AND: Final = 0x54

_NUMBER: Final = 0
_ARCHITECTURE: Final = 4
_FIRST_ARGUMENT: Final = 16
_SECOND_ARGUMENT: Final = 24
"""Offsets in `struct seccomp_data`. Of arguments the low half, little endian: family and type are ints."""

AF_UNIX: Final = 1
AF_INET: Final = 2
AF_INET6: Final = 10
AF_VSOCK: Final = 40

SOCK_STREAM: Final = 1
SOCK_SEQPACKET: Final = 5
TYPE_MASK: Final = 0xF
"""The rest of a type are flags."""

CONNECTED: Final = (SOCK_STREAM, SOCK_SEQPACKET)
"""Sockets that reach only whoever they are connected to. A datagram goes where its address says, also from
one of a pair: without a network, to the system's log or the service manager, by sendmsg, of which a filter
cannot see the address."""

X32_BIT: Final = 0x40000000
"""On x86-64, numbers from here on are the same calls by another door."""

_TAMPERING: Final = ("ptrace", "process_vm_readv", "process_vm_writev")
_IO_URING: Final = ("io_uring_setup", "io_uring_enter", "io_uring_register")
_SOCKET_CALLS: Final = (
    "connect", "accept", "accept4", "bind", "listen", "getpeername", "getsockname", "shutdown", "sendto",
    "sendmmsg", "recvmmsg", "getsockopt", "setsockopt",
)  # fmt: skip
"""Denied when the network is closed. recvfrom, sendmsg, recvmsg, read and write are not: a pair of
sockets between a command's own processes goes on working, unless it is for datagrams."""


_MOUNTING: Final = (
    "mount", "umount2", "pivot_root", "open_tree", "open_tree_attr", "move_mount", "fsopen", "fsconfig",
    "fsmount", "fspick", "mount_setattr",
)  # fmt: skip
"""In a user namespace of its own a command could mount what belongs to nobody's view, such as the control
groups that the server itself is in, and change their limits."""

_UNSEEN_BY_LANDLOCK: Final = (
    "chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat", "setxattr",
    "lsetxattr", "fsetxattr", "setxattrat", "removexattr", "lremovexattr", "fremovexattr", "removexattrat",
    "utime", "utimes", "futimesat", "utimensat", "file_setattr", "add_key", "request_key", "keyctl",
)  # fmt: skip
"""What a view of its own makes harmless and Landlock does not look at: modes, owners, times and attributes
of any file, and the keys of the account."""


class Architecture(Struct, frozen=True):
    """What a kernel calls itself in a filter, and its numbers of the calls that are named here."""

    audit: int
    numbers: dict[str, int]
    x32: bool = False


ARCHITECTURES: Final = {
    "x86_64": Architecture(
        0xC000003E,
        {
            "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "io_uring_setup": 425,
            "io_uring_enter": 426, "io_uring_register": 427, "connect": 42, "accept": 43, "accept4": 288,
            "bind": 49, "listen": 50, "getsockname": 51, "getpeername": 52, "shutdown": 48, "sendto": 44,
            "sendmmsg": 307, "recvmmsg": 299, "setsockopt": 54, "getsockopt": 55, "socket": 41,
            "socketpair": 53, "mount": 165, "umount2": 166, "pivot_root": 155, "open_tree": 428,
            "open_tree_attr": 467, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432,
            "fspick": 433, "mount_setattr": 442, "chmod": 90, "fchmod": 91, "fchmodat": 268,
            "fchmodat2": 452, "chown": 92, "fchown": 93, "lchown": 94, "fchownat": 260, "setxattr": 188,
            "lsetxattr": 189, "fsetxattr": 190, "setxattrat": 463, "removexattr": 197, "lremovexattr": 198,
            "fremovexattr": 199, "removexattrat": 466, "utime": 132, "utimes": 235, "futimesat": 261,
            "utimensat": 280, "file_setattr": 469, "add_key": 248, "request_key": 249, "keyctl": 250,
        },
        x32=True,
    ),
    "aarch64": Architecture(
        0xC00000B7,
        {
            "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "io_uring_setup": 425,
            "io_uring_enter": 426, "io_uring_register": 427, "connect": 203, "accept": 202, "accept4": 242,
            "bind": 200, "listen": 201, "getsockname": 204, "getpeername": 205, "shutdown": 210,
            "sendto": 206, "sendmmsg": 269, "recvmmsg": 243, "setsockopt": 208, "getsockopt": 209,
            "socket": 198, "socketpair": 199, "mount": 40, "umount2": 39, "pivot_root": 41, "open_tree": 428,
            "open_tree_attr": 467, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432,
            "fspick": 433, "mount_setattr": 442, "fchmod": 52, "fchmodat": 53, "fchmodat2": 452, "fchown": 55,
            "fchownat": 54, "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "setxattrat": 463,
            "removexattr": 14, "lremovexattr": 15, "fremovexattr": 16, "removexattrat": 466,
            "utimensat": 88, "file_setattr": 469, "add_key": 217, "request_key": 218, "keyctl": 219,
        },
    ),
}  # fmt: skip


class Rule(Struct, frozen=True):
    """A call that is decided by its first argument: only these families, or all but these; and among
    those that are allowed only these types, if any are named."""

    call: str
    families: tuple[int, ...]
    allowed: bool = True
    types: tuple[int, ...] = ()


class Mode(Struct, frozen=True):
    denied: tuple[str, ...]
    rules: tuple[Rule, ...]


MODES: Final[dict[Network, Mode]] = {
    "closed": Mode(
        (*_TAMPERING, *_IO_URING, *_SOCKET_CALLS),
        (Rule("socket", (AF_UNIX,), types=CONNECTED), Rule("socketpair", (AF_UNIX,), types=CONNECTED)),
    ),
    "proxy": Mode(
        (*_TAMPERING, *_IO_URING),
        (Rule("socket", (AF_INET, AF_INET6)), Rule("socketpair", (AF_UNIX,), types=CONNECTED)),
    ),
    "open": Mode(_IO_URING, (Rule("socket", (AF_VSOCK,), allowed=False),)),
}
"""`open` is for a restricted file system: with io_uring or a virtual machine's socket a command could have
somebody outside of the view open files for it."""


class Unsupported(Exception):
    """This machine's system calls have other numbers than the ones known here."""


def filter_for(plan: Plan) -> bytes | None:
    """The program a plan needs; None where nothing is filtered."""
    return None if plan.kind == "plain" else program(plan.network)


@cache
def program(
    network: Network, *, landlock: bool = False, mounting: bool = True, machine: str | None = None
) -> bytes:
    """The filter for a network mode as an array of `struct sock_filter`, for this machine or another.

    `landlock` adds what has to be denied where the file system is restricted by Landlock alone. Without
    `mounting`, nobody inside can mount anything, whatever namespaces he makes.
    """
    name = machine or os.uname().machine
    architecture = ARCHITECTURES.get(name)
    if architecture is None:
        known = " and ".join(ARCHITECTURES)
        raise Unsupported(f"there is no system call filter for {name}: only for {known}")
    mode = MODES[network]
    denied = mode.denied + (_UNSEEN_BY_LANDLOCK if landlock else ()) + (() if mounting else _MOUNTING)
    # An architecture without a call has it under no other number either.
    numbers = [architecture.numbers[call] for call in denied if call in architecture.numbers]
    return _assemble(architecture, numbers, mode.rules)


def _assemble(architecture: Architecture, denied: list[int], rules: tuple[Rule, ...]) -> bytes:
    """Each piece falls through to the next when it does not match."""
    code = _step(_LOAD, _ARCHITECTURE)
    code += _step(_IF_EQUAL, architecture.audit, 1, 0) + _step(_RETURN, KILL)
    code += _step(_LOAD, _NUMBER)
    if architecture.x32:
        code += _step(_IF_AT_LEAST, X32_BIT, 0, 1) + _step(_RETURN, DENY)
    for number in denied:
        code += _step(_IF_EQUAL, number, 0, 1) + _step(_RETURN, DENY)
    for rule in rules:
        matched, otherwise = (ALLOW, DENY) if rule.allowed else (DENY, ALLOW)
        match = _step(_RETURN, matched)
        if rule.types:
            match = _step(_LOAD, _SECOND_ARGUMENT) + _step(_AND, TYPE_MASK)
            for kind in rule.types:
                match += _step(_IF_EQUAL, kind, 0, 1) + _step(_RETURN, matched)
            match += _step(_RETURN, otherwise)
        block = _step(_LOAD, _FIRST_ARGUMENT)
        for family in rule.families:
            block += _step(_IF_EQUAL, family, 0, len(match) // 8) + match
        block += _step(_RETURN, otherwise)
        code += _step(_IF_EQUAL, architecture.numbers[rule.call], 0, len(block) // 8) + block
    return code + _step(_RETURN, ALLOW)


def _step(operation: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", operation, if_true, if_false, operand)
