"""One helper process and the conversation with it, from the server's side. Used by one thread at a time."""

from __future__ import annotations

import os
import signal
import socket
import struct
from collections.abc import Callable
from time import monotonic
from typing import Any, Final, NamedTuple

from msgspec.json import decode, encode
from msgspec.structs import replace

from ...wire.errors import RpcError
from ..files.lane import Turn
from ..process.spawn import Spawned
from .helper import (
    CANNOT_NEST,
    DESCRIPTOR,
    ERROR,
    HEADER,
    HERE,
    LENGTH,
    OTHER_WAY,
    RECEIVE_BYTES,
    RESULT,
    Failed,
)
from .plan import Plan, Tmpfs

__all__ = [
    "LOOK_SECONDS",
    "Answer",
    "CannotGuard",
    "HelperDied",
    "HelperProcess",
    "Key",
    "socket_pair",
]

LOOK_SECONDS: Final = 0.2
"""How often somebody who waits for a helper looks whether anybody still waits for him."""

STDERR_BYTES: Final = 4096
"""Of what a helper says when it cannot start or ends badly."""

START_SECONDS: Final = 30.0
"""For a sandbox to be put together and the helper to be there; a hundred times what it takes."""

PATIENCE: Final = 2.0
"""Seconds for a helper that has lost its server to end by itself."""

DIRECT_BYTES: Final = 128 * 1024
"""Of an answer that is taken on the loop; the rest of a larger one is read by a thread."""

SIGNALLED: Final = 128
"""Exit statuses above it stand for signals."""

_LOOK_TIME: Final = struct.pack("@ll", 0, int(LOOK_SECONDS * 1_000_000))
"""LOOK_SECONDS for the kernel, which saves asking it twice per call."""

_RIGHTS_BYTES: Final = socket.CMSG_SPACE(4)


class Key:
    """A plan that is compared often."""

    __slots__ = ("_hash", "again", "guards", "plan", "unguarded")

    def __init__(self, plan: Plan, again: Callable[[], Plan] | None = None) -> None:
        """`again` makes the plan once more."""
        self.plan = plan
        self.again = again
        self._hash = hash(plan)
        points = {point.path for point in plan.created}
        covers = [step for step in plan.steps if isinstance(step, Tmpfs) and step.target in points]
        self.guards: list[tuple[bytes, int]] = []
        """What a call has to cover itself when its helper was started by the plan without that."""
        self.unguarded: Plan = plan
        if points and len(covers) == len(points):
            self.guards = [(step.target, step.mode) for step in covers]
            left = tuple(step for step in plan.steps if getattr(step, "target", None) not in points)
            self.unguarded = replace(plan, steps=left, created=())

    @property
    def guarded(self) -> str:
        """What its calls cover, in words."""
        return ", ".join(path.decode("utf-8", "backslashreplace") for path, _ in self.guards)

    @property
    def encoded_guards(self) -> bytes:
        """As they travel: bytes that may not be text, one character for each."""
        return encode([(path.decode("latin-1"), mode) for path, mode in self.guards])

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Key) and self.plan == other.plan)


class Answer(NamedTuple):
    """JSON, and for an opened file its descriptor."""

    result: bytes
    descriptor: int | None = None


class CannotGuard(Exception):
    """A call was not done, because nothing can be covered for it alone: this time, or on this machine."""

    def __init__(self, *, for_good: bool) -> None:
        super().__init__()
        self.for_good = for_good


class HelperDied(Exception):
    """It ended without an answer. The text says how, and what it said itself."""


def socket_pair() -> tuple[socket.socket, int]:
    """Our end, which never waits for longer than LOOK_SECONDS, and the descriptor of the other."""
    ours, theirs = socket.socketpair()
    for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        ours.setsockopt(socket.SOL_SOCKET, direction, _LOOK_TIME)
    return ours, theirs.detach()


class HelperProcess:
    """One process and the socket to it. Used by one thread at a time."""

    def __init__(self, key: Key, ours: socket.socket, spawned: Spawned, *, guarded: bool) -> None:
        self.key = key
        self.guarded = guarded
        """Whether calls have to cover something themselves."""
        self.reusable = guarded or not key.plan.created
        """Whether it may serve another call: nothing is to be seen on the host because of it."""
        self.answered = False
        self.idle_since = 0.0
        self.promised: int | None = None
        self.ready_since = 0.0
        """The last of those who waited when it had come, and when that was (places.py)."""
        self._socket = ours
        self._spawned = spawned
        self._left = bytearray()
        self._started = False
        self._deadline: float | None = None

    def is_alive(self) -> bool:
        """Whether it still holds its end; it says nothing unasked."""
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def call(self, method: str, params: bytes, turn: Turn) -> Answer:
        """What it answers; RpcError if that is an error, HelperDied if there is none."""
        guards = self.key.encoded_guards if self.guarded else b"[]"
        try:
            self._await_start(turn)
            self._send(_request(method, params, guards), turn)
        except (OSError, EOFError):
            raise HelperDied from None
        return self.wait_for_answer(turn)

    def wait_for_answer(self, turn: Turn) -> Answer:
        """To what it has been asked."""
        try:
            kind, result, descriptor = self._receive(turn)
            if self.guarded:
                self._receive(turn)  # that who did it is gone
        except (OSError, EOFError):
            raise HelperDied from None
        self.answered = True
        if kind in (CANNOT_NEST, OTHER_WAY):
            raise CannotGuard(for_good=kind == CANNOT_NEST)
        return _answer(kind, result, descriptor)

    # On the loop, where nobody may wait

    @property
    def descriptor(self) -> int:
        """Readable when it has something to say."""
        return self._socket.fileno()

    def ask(self, method: str, params: bytes) -> None:
        """Ask without waiting. OSError or EOFError if it is dead, or too much was asked."""
        request = _request(method, params, b"[]")
        if self._socket.send(request, socket.MSG_DONTWAIT) != len(request):
            raise EOFError

    def take_answer(self) -> Answer | None:
        """What has come, if it is all of an answer; else it is kept for `wait_for_answer`."""
        data = self._left
        try:
            data += self._receive_now(RECEIVE_BYTES)
            length, kind = HEADER.unpack_from(data)
            if len(data) < HEADER.size + length:
                data += self._receive_now(DIRECT_BYTES)
        except (BlockingIOError, struct.error):
            return None
        if len(data) < HEADER.size + length or kind not in (RESULT, ERROR):
            return None
        self._left = bytearray()
        return _answer(kind, memoryview(data)[HEADER.size : HEADER.size + length], None)

    def _receive_now(self, size: int) -> bytes:
        data = self._socket.recv(size, socket.MSG_DONTWAIT)
        if not data:
            raise EOFError
        return data

    def _await_start(self, turn: Turn) -> None:
        """EOFError if it does not come to be: who never starts must not be waited for."""
        if not self._started:
            self._deadline = monotonic() + START_SECONDS
            kind, _, _ = self._receive(turn)
            if kind != HERE:
                raise EOFError
            self._deadline = None
            self._started = True

    def _send(self, data: bytes, turn: Turn) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[self._socket.send(view) :]
            except BlockingIOError:
                turn.check()

    def _receive(self, turn: Turn) -> tuple[bytes, Any, int | None]:
        descriptors: list[int] = []
        data, self._left = self._left, bytearray()
        try:
            while len(data) < HEADER.size:
                data += self._receive_some(turn, descriptors)
            length, kind = HEADER.unpack_from(data)
            self._left = data[HEADER.size + length :]  # the next answer may have come along
            result = data[HEADER.size : HEADER.size + length]
            have = len(result)
            if have < length:
                result += bytes(length - have)
                view = memoryview(result)
                while have < length:
                    have += self._receive_into(view[have:], turn)
            if (kind == DESCRIPTOR) != bool(descriptors):
                raise EOFError
            return kind, result, descriptors.pop() if descriptors else None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _receive_some(self, turn: Turn, descriptors: list[int]) -> bytes:
        while True:
            try:
                data, rights, _, _ = self._socket.recvmsg(
                    RECEIVE_BYTES, _RIGHTS_BYTES, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                turn.check()
                if self._deadline is not None and monotonic() > self._deadline:
                    raise EOFError from None
                continue
            for level, kind, numbers in rights:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    descriptors += memoryview(numbers[: len(numbers) // 4 * 4]).cast("i")
            if not data:
                raise EOFError
            return data

    def _receive_into(self, view: memoryview, turn: Turn) -> int:
        while True:
            try:
                received = self._socket.recv_into(view)
            except BlockingIOError:
                turn.check()
                continue
            if not received:
                raise EOFError
            return received

    def end(self, *, kill: bool = False) -> str:
        """Let it go, wait for its end, and tell how it ended and what it said."""
        self._socket.close()  # which tells it to end
        pidfd = self._spawned.pidfd
        if pidfd is None:
            raise RuntimeError("a helper that cannot be watched")  # systems without pidfds have no sandbox
        if kill or not _readable(pidfd, PATIENCE):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
        if self._spawned.release is not None:
            self._spawned.release(pidfd)
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        os.close(pidfd)
        said = b""
        for name, descriptor in self._spawned.outputs:
            if name == "stderr":
                said = _read_some(descriptor)
            os.close(descriptor)
        return f"{_manner(ended)}: {said.decode('utf-8', 'replace').strip()}"


def _request(method: str, params: bytes, guards: bytes) -> bytes:
    request = b'["%b",%b,%b]' % (method.encode(), params, guards)
    return LENGTH.pack(len(request)) + request


def _answer(kind: bytes, result: Any, descriptor: int | None) -> Answer:
    if kind == ERROR:
        failed = decode(result, type=Failed)
        raise RpcError(failed.code, failed.message)
    return Answer(bytes(result), descriptor)


def _manner(ended: os.waitid_result | None) -> str:
    """How it ended. Who keeps a sandbox tells of a signal inside as a shell does, by a high status."""
    if ended is None or ended.si_code != os.CLD_EXITED:
        return f"signal: {0 if ended is None else ended.si_status}"
    if ended.si_status > SIGNALLED:
        return f"signal: {ended.si_status - SIGNALLED}"
    return f"exit status: {ended.si_status}"


def _readable(descriptor: int, seconds: float) -> bool:
    """Whether there is something to read within so many seconds."""
    from select import POLLIN, poll

    waiting = poll()
    waiting.register(descriptor, POLLIN)
    return bool(waiting.poll(seconds * 1000))


def _read_some(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, STDERR_BYTES)
    except OSError:
        return b""  # it said nothing
