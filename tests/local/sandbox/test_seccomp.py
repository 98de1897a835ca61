"""local/sandbox/seccomp.py: the programs say what the table says, for every call and every family."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tempfile

import pytest

from exec_server.local.sandbox import seccomp
from exec_server.local.sandbox.plan import Network, Plan

ALLOW, EPERM, KILL = 0x7FFF0000, 0x00050001, 0x80000000

X86 = {
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "io_uring_setup": 425,
    "io_uring_enter": 426, "io_uring_register": 427, "connect": 42, "accept": 43, "accept4": 288,
    "bind": 49, "listen": 50, "getsockname": 51, "getpeername": 52, "shutdown": 48, "sendto": 44,
    "sendmmsg": 307, "recvmmsg": 299, "setsockopt": 54, "getsockopt": 55,
}  # fmt: skip
ARM = {
    "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "io_uring_setup": 425,
    "io_uring_enter": 426, "io_uring_register": 427, "connect": 203, "accept": 202, "accept4": 242,
    "bind": 200, "listen": 201, "getsockname": 204, "getpeername": 205, "shutdown": 210, "sendto": 206,
    "sendmmsg": 269, "recvmmsg": 243, "setsockopt": 208, "getsockopt": 209,
}  # fmt: skip
MACHINES = {
    "x86_64": (0xC000003E, X86, 41, 53),
    "aarch64": (0xC00000B7, ARM, 198, 199),
}
"""Architecture constant, denied calls, socket, socketpair: typed in again from the specification."""

PROXY = {"ptrace", "process_vm_readv", "process_vm_writev", "io_uring_setup", "io_uring_enter"}
DENIED: dict[Network, set[str]] = {
    "closed": set(X86),
    "proxy": PROXY | {"io_uring_register"},
    "open": {"io_uring_setup", "io_uring_enter", "io_uring_register"},
}


STREAM, DGRAM, RAW, SEQPACKET = 1, 2, 3, 5
FLAGS = 0o2004000
"""SOCK_CLOEXEC and SOCK_NONBLOCK."""


def interpret(program: bytes, number: int, architecture: int, argument: int = 0, second: int = STREAM) -> int:
    """Run a filter as the kernel would, and as strictly: no jump beyond the end, no unknown operation."""
    arguments = [value & (1 << 64) - 1 for value in (argument, second)]
    data = struct.pack("=IIQ6Q", number, architecture, 0, *arguments, *[0] * 4)
    steps = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
    at = accumulator = 0
    while True:
        operation, if_true, if_false, operand = steps[at]
        at += 1
        if operation == 0x20:
            assert operand % 4 == 0
            (accumulator,) = struct.unpack_from("=I", data, operand)
        elif operation == 0x15:
            at += if_true if accumulator == operand else if_false
        elif operation == 0x35:
            at += if_true if accumulator >= operand else if_false
        elif operation == 0x54:
            accumulator &= operand
        else:
            assert operation == 0x06, operation
            return int(operand)


def wanted(network: Network, machine: str, number: int, family: int) -> int:
    _, calls, socket, pair = MACHINES[machine]
    if machine == "x86_64" and number >= 0x40000000:
        return EPERM
    if number in (calls[name] for name in DENIED[network]):
        return EPERM
    if number == socket:
        allowed = {"closed": family == 1, "proxy": family in (2, 10), "open": family != 40}[network]
        return ALLOW if allowed else EPERM
    if number == pair and network != "open":
        return ALLOW if family == 1 else EPERM
    return ALLOW


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("network", DENIED)
def test_every_call_and_every_family(machine: str, network: Network) -> None:
    program = seccomp.program(network, machine=machine)
    architecture, _, socket, pair = MACHINES[machine]
    odd = [0x3FFFFFFF, 0x40000000, 0x40000000 + socket, 0x40000000 + 101, 0xFFFFFFFF]
    for number in [*range(600), *odd]:
        for family in range(64) if number in (socket, pair) else (0, 1):
            found = interpret(program, number, architecture, family)
            assert found == wanted(network, machine, number, family), (number, family)


@pytest.mark.parametrize("machine", MACHINES)
def test_nothing_sends_datagrams_without_a_network(machine: str) -> None:
    """One of a pair sends them to any address, too."""
    architecture, _, socket, pair = MACHINES[machine]
    for number, network in ((socket, "closed"), (pair, "closed"), (pair, "proxy")):
        program = seccomp.program(network, machine=machine)
        for kind in range(16):
            for flags in (0, FLAGS, 1 << 32):
                answer = ALLOW if kind in (STREAM, SEQPACKET) else EPERM
                assert interpret(program, number, architecture, 1, kind | flags) == answer, (number, kind)
    for number, network, family in ((socket, "proxy", 2), (socket, "open", 1), (pair, "open", 1)):
        program = seccomp.program(network, machine=machine)
        for kind in (STREAM, DGRAM, RAW, SEQPACKET):
            assert interpret(program, number, architecture, family, kind) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_a_family_is_an_int(machine: str) -> None:
    """The kernel looks at the low half of the argument only, so the filter must, too."""
    architecture, _, socket, _ = MACHINES[machine]
    program = seccomp.program("closed", machine=machine)
    assert interpret(program, socket, architecture, 1 << 32 | 2) == EPERM
    assert interpret(program, socket, architecture, 1 << 32 | 1) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("network", DENIED)
def test_another_architecture_kills(machine: str, network: Network) -> None:
    program = seccomp.program(network, machine=machine)
    theirs = [architecture for name, (architecture, *_) in MACHINES.items() if name != machine]
    for other in (0x40000003, 0x40000028, 0xC00000F3, 0, *theirs):
        for number in (0, 20, 41, 101, 198):
            assert interpret(program, number, other) == KILL


def test_unknown_machines_are_refused() -> None:
    with pytest.raises(seccomp.Unsupported, match="riscv64"):
        seccomp.program("closed", machine="riscv64")


def test_which_plans_are_filtered() -> None:
    assert seccomp.filter_for(Plan(kind="plain", network="open")) is None
    for kind in ("filter", "view"):
        assert seccomp.filter_for(Plan(kind=kind, network="closed")) == seccomp.program("closed")


UNSEEN_BY_LANDLOCK = {
    "x86_64": [
        *(90, 91, 268, 452, 92, 93, 94, 260, 188, 189, 190, 463, 197, 198, 199, 466, 132, 235, 261, 280, 469),
        *(248, 249, 250, 29, 30, 31, 64, 65, 66, 220, 68, 69, 70, 71, 240, 241),
    ],
    "aarch64": [
        *(52, 53, 452, 55, 54, 5, 6, 7, 463, 14, 15, 16, 466, 88, 469, 217, 218, 219),
        *(194, 196, 195, 190, 193, 191, 192, 186, 189, 188, 187, 180, 181),
    ],
}
"""chmod, chown, xattr, utime and key calls, and shared memory, semaphores and queues, by number."""

ON_ITSELF = {"x86_64": (302, 203, 144, 142, 314), "aarch64": (261, 122, 119, 118, 274)}
"""prlimit64, sched_setaffinity, sched_setscheduler, sched_setparam, sched_setattr."""
PRIORITIES = {"x86_64": (141, 251), "aarch64": (140, 30)}
"""setpriority, ioprio_set."""
IOCTL = {"x86_64": 16, "aarch64": 29}
PIDFD_OPEN = 434


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("network", DENIED)
def test_next_to_landlock_more_is_denied(machine: str, network: Network) -> None:
    plain = seccomp.program(network, machine=machine)
    more = seccomp.program(network, machine=machine, landlock=True)
    architecture = MACHINES[machine][0]
    for number in range(600):
        expected = interpret(plain, number, architecture, 1)
        if number in (*UNSEEN_BY_LANDLOCK[machine], *ON_ITSELF[machine], *PRIORITIES[machine]):
            expected = EPERM
        assert interpret(more, number, architecture, 1) == expected, number


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("network", DENIED)
def test_next_to_landlock_others_are_left_alone(machine: str, network: Network) -> None:
    """Number 0 is the process itself, or its group. Users (2 and 3 of the two) are never meant."""
    program = seccomp.program(network, machine=machine, landlock=True)
    architecture = MACHINES[machine][0]
    for number in ON_ITSELF[machine]:
        for pid in (0, 1 << 32, 1, 1234, -1):
            answer = EPERM if pid & 0xFFFFFFFF else ALLOW
            assert interpret(program, number, architecture, pid) == answer, (number, pid)
    for number, allowed in zip(PRIORITIES[machine], ((0, 1), (1, 2)), strict=True):
        for which in range(5):
            for who in (0, 1, 16, 1234):
                answer = ALLOW if which in allowed and not who else EPERM
                assert interpret(program, number, architecture, which, who) == answer, (number, which, who)


@pytest.mark.parametrize("machine", MACHINES)
def test_next_to_landlock_flags_of_files_cannot_be_changed(machine: str) -> None:
    program = seccomp.program("closed", machine=machine, landlock=True)
    architecture = MACHINES[machine][0]
    denied = (0x40086602, 0x40046602, 0x401C5820, 0x40087602, 0x40806685, 0x5000940E, 0x4008941A, 0xF501)
    allowed = (0x5401, 0x5413, 0x541B, 0x5421, 0x80086601, 0xC020660B, 0x801C581F, 0x40049409, 0x4020940D)
    for request in (*denied, *allowed):
        answer = ALLOW if request in allowed else EPERM
        assert interpret(program, IOCTL[machine], architecture, 3, request) == answer, hex(request)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("network", DENIED)
def test_nobody_lays_hands_on_the_first_process(machine: str, network: Network) -> None:
    plain = seccomp.program(network, machine=machine)
    program = seccomp.program(network, machine=machine, mounting=False)
    architecture, calls, *_ = MACHINES[machine]
    by_first = (PIDFD_OPEN, ON_ITSELF[machine][0], calls["process_vm_readv"], calls["process_vm_writev"])
    for pid in (0, 1, 2, 1 << 32 | 1):
        for number in by_first:
            answer = EPERM if pid & 0xFFFFFFFF == 1 else interpret(plain, number, architecture, pid)
            assert interpret(program, number, architecture, pid) == answer, (number, pid)
        answer = EPERM if pid & 0xFFFFFFFF == 1 or network != "open" else ALLOW
        assert interpret(program, calls["ptrace"], architecture, 0x4206, pid) == answer


_KERNEL = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
program = sys.stdin.buffer.read()
code = ctypes.create_string_buffer(program, len(program))
class Fprog(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
fprog = Fprog(len(program) // 8, ctypes.cast(code, ctypes.c_void_p).value)
assert libc.prctl(38, 1, 0, 0, 0) == 0
number = 317 if os.uname().machine == "x86_64" else 277
assert libc.syscall(number, 1, 0, ctypes.byref(fprog)) == 0, ctypes.get_errno()
for call in map(int, sys.argv[1:]):
    ctypes.set_errno(0)
    # Arguments that no call can do anything with; a call that is let through fails in another way.
    libc.syscall(call, -1, -1, -1, -1, -1, -1)
    print(call, ctypes.get_errno())
"""


@pytest.mark.skipif(os.uname().machine not in MACHINES, reason="no filter for this machine")
def test_the_kernel_takes_it() -> None:
    """The program loads, denies what it should with EPERM, and lets through what it should."""
    machine = os.uname().machine
    _, calls, socket, pair = MACHINES[machine]
    getppid = {"x86_64": 110, "aarch64": 173}[machine]
    asked = [*calls.values(), socket, pair, getppid]
    done = subprocess.run(
        [sys.executable, "-I", "-c", _KERNEL, *map(str, asked)],
        input=seccomp.program("closed"),
        capture_output=True,
        timeout=30,
        check=True,
    )
    lines = [line.split() for line in done.stdout.decode().splitlines()]
    answers = {int(call): int(code) for call, code in lines}
    assert answers == {**dict.fromkeys(asked, 1), getppid: 0}


def test_libseccomp_agrees() -> None:
    """The same table built by libseccomp decides every call the same way."""
    pyseccomp = pytest.importorskip("pyseccomp", reason="cross-check needs pyseccomp and libseccomp2")
    machine = os.uname().machine
    if machine not in MACHINES:
        pytest.skip(f"no filter for {machine}")
    architecture, _, socket, pair = MACHINES[machine]
    families: dict[Network, list[tuple[str, int, list[int]]]] = {
        "closed": [("socket", pyseccomp.NE, [1]), ("socketpair", pyseccomp.NE, [1])],
        "proxy": [("socket", pyseccomp.NE, [2, 10]), ("socketpair", pyseccomp.NE, [1])],
        "open": [("socket", pyseccomp.EQ, [40])],
    }
    mask = 0xFFFFFFFF
    for network, denied in DENIED.items():
        theirs = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
        for name in denied:
            theirs.add_rule(pyseccomp.ERRNO(1), name)
        for name, how, values in families[network]:
            if how == pyseccomp.EQ:
                arguments = [[pyseccomp.Arg(0, pyseccomp.MASKED_EQ, mask, value)] for value in values]
            elif len(values) == 1:
                arguments = [[pyseccomp.Arg(0, how, values[0])] for how in (pyseccomp.LT, pyseccomp.GT)]
            else:  # libseccomp has no "one of": name the gaps
                low, high = values
                arguments = [
                    [pyseccomp.Arg(0, pyseccomp.LT, low)],
                    *([pyseccomp.Arg(0, pyseccomp.EQ, value)] for value in range(low + 1, high)),
                    [pyseccomp.Arg(0, pyseccomp.GT, high)],
                ]
            for conditions in arguments:
                theirs.add_rule(pyseccomp.ERRNO(1), name, *conditions)
        with tempfile.TemporaryFile() as file:
            theirs.export_bpf(file)
            file.seek(0)
            exported = file.read()
        ours = seccomp.program(network)
        for number in range(600):
            for family in range(64) if number in (socket, pair) else (0,):
                answer = interpret_libseccomp(exported, number, architecture, family)
                assert interpret(ours, number, architecture, family) == answer, (network, number, family)


def interpret_libseccomp(program: bytes, number: int, architecture: int, argument: int) -> int:
    """libseccomp's programs use a few operations more than ours."""
    data = struct.pack("=IIQ6Q", number, architecture, 0, argument, STREAM, *[0] * 4)
    steps = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
    at = accumulator = 0
    while True:
        operation, if_true, if_false, operand = steps[at]
        at += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, operand)
        elif operation == 0x15:
            at += if_true if accumulator == operand else if_false
        elif operation == 0x25:
            at += if_true if accumulator > operand else if_false
        elif operation == 0x35:
            at += if_true if accumulator >= operand else if_false
        elif operation == 0x05:
            at += operand
        elif operation == 0x54:
            accumulator &= operand
        else:
            assert operation == 0x06, hex(operation)
            return int(operand)
