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
"""Offsets in `struct seccomp_data`. Of arguments the low half, little endian: those looked at are ints."""

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

_TO_THE_FIRST: Final = ("open_by_handle_at", "pidfd_getfd")
"""A descriptor of the first process can be had by its number in the kernel's own file system of processes,
and by that what it has open."""

_UNSEEN_BY_LANDLOCK: Final = (
    "chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat", "setxattr",
    "lsetxattr", "fsetxattr", "setxattrat", "removexattr", "lremovexattr", "fremovexattr", "removexattrat",
    "utime", "utimes", "futimesat", "utimensat", "file_setattr", "add_key", "request_key", "keyctl",
    "shmget", "shmat", "shmctl", "semget", "semop", "semtimedop", "semctl", "msgget", "msgsnd", "msgrcv",
    "msgctl", "mq_open", "mq_unlink",
)  # fmt: skip
"""What a view and namespaces of its own make harmless and Landlock does not look at: modes, owners, times and
attributes of any file, the keys of the account, and the memory and queues its processes share by number."""


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
            "shmget": 29, "shmat": 30, "shmctl": 31, "semget": 64, "semop": 65, "semtimedop": 220,
            "semctl": 66, "msgget": 68, "msgsnd": 69, "msgrcv": 70, "msgctl": 71, "mq_open": 240,
            "mq_unlink": 241, "prlimit64": 302, "setpriority": 141, "sched_setaffinity": 203,
            "sched_setscheduler": 144, "sched_setparam": 142, "sched_setattr": 314, "ioprio_set": 251,
            "ioctl": 16, "pidfd_open": 434, "pidfd_getfd": 438, "open_by_handle_at": 304,
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
            "shmget": 194, "shmat": 196, "shmctl": 195, "semget": 190, "semop": 193, "semtimedop": 192,
            "semctl": 191, "msgget": 186, "msgsnd": 189, "msgrcv": 188, "msgctl": 187, "mq_open": 180,
            "mq_unlink": 181, "prlimit64": 261, "setpriority": 140, "sched_setaffinity": 122,
            "sched_setscheduler": 119, "sched_setparam": 118, "sched_setattr": 274, "ioprio_set": 30,
            "ioctl": 29, "pidfd_open": 434, "pidfd_getfd": 438, "open_by_handle_at": 265,
        },
    ),
}  # fmt: skip


class Rule(Struct, frozen=True):
    """A call that is decided by an argument: only these values, or all but these; and among those that are
    allowed only these of the second argument, if any are named, as far as the mask goes."""

    call: str
    values: tuple[int, ...]
    allowed: bool = True
    types: tuple[int, ...] = ()
    mask: int = TYPE_MASK
    argument: int = _FIRST_ARGUMENT
    groups: tuple[int, ...] = ()
    """Also decided like `values`: by the second byte of the argument, where that is one of these."""
    exempt: tuple[int, ...] = ()
    """Of a group, what is not meant."""


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


_ON_THE_FIRST: Final = (
    Rule("ptrace", (1,), allowed=False, argument=_SECOND_ARGUMENT),
    *(Rule(call, (1,), allowed=False) for call in ("process_vm_readv", "process_vm_writev")),
    *(Rule(call, (1,), allowed=False) for call in ("pidfd_open", "prlimit64")),
)
"""In a process-id namespace: the first process there is not the command's, and has what marks all of them."""

_ALL: Final = 0xFFFFFFFF
_ON_ITSELF: Final = (
    "prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr",
)  # fmt: skip
_ON_OTHERS: Final = (
    *(Rule(call, (0,)) for call in _ON_ITSELF),
    Rule("setpriority", (0, 1), types=(0,), mask=_ALL),
    Rule("ioprio_set", (1, 2), types=(0,), mask=_ALL),
    Rule(
        "ioctl",
        (0x401C5820, 0x40087602, 0x40047602, 0x40047211),
        allowed=False,
        argument=_SECOND_ARGUMENT,
        groups=(0x66, 0x94, 0xF5),
        exempt=(0x80086601, 0x80046601, 0xC020660B, 0x40049409, 0x4020940D),
    ),
)
"""Without namespaces: the limits and priorities of this process and its group (number 0) can be changed, not
those of others, with which any process of the account could be ended. The flags of a file are changed by
ioctl: FSSETXATTR, SETVERSION, those of FAT, and whatever ext4 ('f'), btrfs and f2fs have, who look at who
owns a file or directory, not at what it was opened for; but GETFLAGS, FIEMAP, FICLONE and FICLONERANGE are
harmless."""


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
    `mounting`, nobody inside can mount anything, whatever namespaces he makes, or lay hands on the first
    process there.
    """
    name = machine or os.uname().machine
    architecture = ARCHITECTURES.get(name)
    if architecture is None:
        known = " and ".join(ARCHITECTURES)
        raise Unsupported(f"there is no system call filter for {name}: only for {known}")
    mode = MODES[network]
    denied = (
        mode.denied
        + (_UNSEEN_BY_LANDLOCK if landlock else ())
        + (() if mounting else _MOUNTING + _TO_THE_FIRST)
    )
    rules = mode.rules + (_ON_OTHERS if landlock else ()) + (() if mounting else _ON_THE_FIRST)
    # An architecture without a call has it under no other number either.
    numbers = [architecture.numbers[call] for call in denied if call in architecture.numbers]
    return _assemble(architecture, numbers, [rule for rule in rules if rule.call not in denied])


def _assemble(architecture: Architecture, denied: list[int], rules: list[Rule]) -> bytes:
    """Each piece falls through to the next when it does not match."""
    code = _step(_LOAD, _ARCHITECTURE)
    code += _step(_IF_EQUAL, architecture.audit, 1, 0) + _step(_RETURN, KILL)
    code += _step(_LOAD, _NUMBER)
    if architecture.x32:
        code += _step(_IF_AT_LEAST, X32_BIT, 0, 1) + _step(_RETURN, DENY)
    for number in denied:
        code += _step(_IF_EQUAL, number, 0, 1) + _step(_RETURN, DENY)
    for rule in rules:
        block = _decision(rule)
        code += _step(_IF_EQUAL, architecture.numbers[rule.call], 0, len(block) // 8) + block
    return code + _step(_RETURN, ALLOW)


def _decision(rule: Rule) -> bytes:
    """What becomes of a call. Ends in any case."""
    matched, otherwise = (ALLOW, DENY) if rule.allowed else (DENY, ALLOW)
    match = _step(_RETURN, matched)
    if rule.types:
        match = _step(_LOAD, _SECOND_ARGUMENT) + _step(_AND, rule.mask)
        for kind in rule.types:
            match += _step(_IF_EQUAL, kind, 0, 1) + _step(_RETURN, matched)
        match += _step(_RETURN, otherwise)
    block = _step(_LOAD, rule.argument)
    for value in rule.exempt:
        block += _step(_IF_EQUAL, value, 0, 1) + _step(_RETURN, otherwise)
    for value in rule.values:
        block += _step(_IF_EQUAL, value, 0, len(match) // 8) + match
    if rule.groups:
        block += _step(_AND, 0xFF00)
    for group in rule.groups:
        block += _step(_IF_EQUAL, group << 8, 0, len(match) // 8) + match
    return block + _step(_RETURN, otherwise)


def _step(operation: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", operation, if_true, if_false, operand)
