"""A thread that gives up rights for good, starts one child, and ends.

no_new_privs, system call filters, Landlock rules, capabilities and the session keyring belong to a
thread, not to a process, and a child inherits them from the thread that starts it. So nothing has to be
executed between this server and the command: no launcher that costs 20 ms and no code between fork and
exec. The other threads of this process keep what they have.
"""

from __future__ import annotations

import ctypes
import os
import struct
from _thread import allocate_lock, start_new_thread
from collections.abc import Callable
from typing import Any, Final, TypeVar

from . import landlock
from .landlock import Grant

__all__ = ["Confinement", "can_filter", "new_session_keyring"]

T = TypeVar("T")

_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_CAPBSET_DROP: Final = 24
_PR_CAP_AMBIENT: Final = 47
_PR_CAP_AMBIENT_CLEAR_ALL: Final = 4
_PR_SET_SECUREBITS: Final = 28
_NO_ROOT_LOCKED: Final = 0b11
"""Programs that root executes get no capabilities by that, and this cannot be undone."""
_CAPABILITY_V3: Final = 0x20080522
_SECCOMP_SET_MODE_FILTER: Final = 1
_JOIN_SESSION_KEYRING: Final = 1

_NUMBERS: Final = {
    "x86_64": {"seccomp": 317, "capset": 126, "keyctl": 250},
    "aarch64": {"seccomp": 277, "capset": 91, "keyctl": 219},
}

_libc = ctypes.CDLL(None, use_errno=True)


class Confinement:
    """What a thread gives up before it starts a child."""

    def __init__(self, program: bytes | None, rules: list[Grant] | None, *, network: bool) -> None:
        """`rules` None leaves the file system, and with it capabilities, as they are."""
        self._program = program
        self._rules = rules
        self._network = network
        self._abi = landlock.abi() if rules is not None else 0

    def run(self, job: Callable[[], T]) -> T:
        """Do it in a thread that has given up everything; what it raises is raised here."""
        done = allocate_lock()
        done.acquire()
        outcome: list[Any] = []

        def work() -> None:
            try:
                self._give_up()
                outcome.append(job())
            except BaseException as error:
                outcome.append(None)
                outcome.append(error)
            finally:
                done.release()

        start_new_thread(work, ())
        with done:
            pass
        if len(outcome) == 2:
            raise outcome[1]
        result: T = outcome[0]
        return result

    def _give_up(self) -> None:
        """The filter last: it may forbid what comes before."""
        if self._rules is not None:
            new_session_keyring()
            _drop_capabilities()
        if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
            raise _failure("no_new_privs")
        if self._rules is not None:
            landlock.restrict(self._rules, self._abi, network=self._network)
        if self._program is not None:
            _install(self._program)


def can_filter(program: bytes) -> str | None:
    """Why a filter cannot be installed here; None if it can."""
    try:
        Confinement(program, None, network=True).run(lambda: None)
    except OSError as error:
        return str(error)
    return None


def new_session_keyring() -> None:
    """Leave the keys of this session behind: what this thread starts cannot read or use them."""
    number = _NUMBERS.get(os.uname().machine, {}).get("keyctl")
    if number is not None:
        _libc.syscall(number, _JOIN_SESSION_KEYRING, None)  # fails where there are no keys to protect


def _drop_capabilities() -> None:
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    privileged = _libc.prctl(_PR_SET_SECUREBITS, _NO_ROOT_LOCKED, 0, 0, 0) == 0
    if privileged:
        capability = 0
        while _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
            capability += 1
    number = _NUMBERS[os.uname().machine]["capset"]
    header = struct.pack("=Ii", _CAPABILITY_V3, 0)
    if _libc.syscall(number, header, bytes(24)):
        raise _failure("capset")
    if not privileged and os.geteuid() == 0:
        raise OSError("root without the right to give up capabilities for good: CAP_SETPCAP is missing")


def _install(program: bytes) -> None:
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    number = _NUMBERS[os.uname().machine]["seccomp"]
    if _libc.syscall(number, _SECCOMP_SET_MODE_FILTER, 0, header):
        raise _failure("seccomp")


def _failure(what: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{what}: {os.strerror(code)}")
