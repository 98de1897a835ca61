"""One connection: the handshake, the order of requests, and the answers.

Requests take effect in the order in which they arrive. What can be answered now is answered now; what
has to wait (a long poll, a spawn, an HTTP request) becomes a Pending, steps aside, and never delays
what comes behind it. At most `waiting_requests` may wait; when that many do, ordinary requests queue
in order, and only the few of the control lane (status, signal, terminate) still pass. Who only waits for
a process (`process/wait`, and where nobody else may wait, `process/read`) is not one of them: of those,
there may be `long_polls`, and more are refused, for the control lane must go on being read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from errno import EMFILE
from typing import TYPE_CHECKING, Any, Final

from msgspec import Raw
from msgspec.json import encode

from .. import log
from ..local.process.descriptors import EXHAUSTED
from ..loop import Pending
from ..transport.channel import Channel
from ..wire import binary
from ..wire.envelope import (
    MALFORMED_ID,
    Encoded,
    Failure,
    Malformed,
    Notification,
    Request,
    RequestId,
    Success,
    encode_error,
    encode_result,
    malformed_error,
    parse,
)
from ..wire.errors import METHOD_NOT_FOUND, RpcError, internal_error, invalid_request
from ..wire.handshake import InitializeParams, InitializeResult
from ..wire.params import decode_params
from . import dispatch
from .session import Session

if TYPE_CHECKING:
    from .server import Server

__all__ = ["Connection"]


LARGE_RESULT_BYTES: Final = 64 * 1024
"""A result that is already encoded and larger than this is sent as it is, without another copy."""


class Connection:
    """A peer, from its first byte to its last."""

    def __init__(self, server: Server, channel: Channel) -> None:
        self.server = server
        self.channel = channel
        self.session: Session | None = None
        self.heard = server.loop.time()
        """When the last request was begun."""
        self.initialized = False
        self.lifecycle_events = False
        self.binary_output = False
        self.binary_files = False
        self.extensions = False
        """The client has shown that it knows what this server adds to the reference's protocol."""
        self._legacy = False
        self._waiting: dict[Pending[Any], int] = {}
        self._polls: dict[Pending[Any], int] = {}
        self._polls_bytes = 0
        self._queue: deque[tuple[Request, dispatch.Method, int]] = deque()
        self._queued_bytes = 0
        self._queue_planned = False
        self._reading = True
        self._paused = False
        self._ended = False
        self.on_end: list[Callable[[], object]] = []
        """Called when the connection is gone: what belongs to the connection and not to its session."""
        self.http_streams: dict[str, Pending[None] | None] = {}
        """HTTP bodies on their way to this connection, by request id."""
        self.legacy_tags: set[int] = set()
        """Tags of processes of the first dialect, which end with the connection."""
        self._room: Pending[None] | None = None
        server.metrics.connections += 1
        server.metrics.connections_total += 1

    # From the channel ----------------------------------------------------------------------------

    def message_received(self, message: bytes) -> None:
        try:
            parsed = parse(message)
        except Malformed as error:
            failure = malformed_error(self.channel.parse_failure, error)
            self.channel.send(encode_error(MALFORMED_ID, failure))
            self._check_unsent()
            return
        if isinstance(parsed, Request):
            self._take_request(parsed, len(message))
        elif isinstance(parsed, Notification):
            self._notification(parsed)
        else:
            self._stray_answer(parsed)

    def binary_received(self, message: bytes) -> None:
        self.view_received(message)

    def view_received(self, message: bytes | memoryview) -> None:
        if not self.binary_files or not message or message[0] != binary.WRITE_BLOCK:
            self.message_received(bytes(message))
            return
        try:
            block = binary.decode_write_block(message)
        except ValueError as error:
            failure = malformed_error(self.channel.parse_failure, Malformed(str(error)))
            self.channel.send(encode_error(MALFORMED_ID, failure))
            self._check_unsent()
            return
        # The message may be gone when this call returns.
        params = {"handleId": block.handle_id, "offset": block.offset, "chunk": bytes(block.data)}
        self._take_request(Request(block.request_id, "fs/writeBlock", params), len(message))

    def _take_request(self, request: Request, size: int) -> None:
        try:
            self._request(request, size)
        except Exception as error:
            self._answer_error(request.id, error, self.server.loop.time())
        self._check_unsent()
        self._stay_awake()

    def writing_paused(self) -> None:
        self._paused = True
        if self.session is not None:
            self.session.processes.hold_output()

    def writing_resumed(self) -> None:
        self._paused = False
        if self.session is not None:
            self.session.processes.release_output()
        self._run_queue()
        self._make_room()

    def probe(self) -> None:
        """Find out whether the connection is broken, where the channel can."""
        probe = getattr(self.channel, "probe", None)
        if probe is not None:
            probe()

    def room(self) -> Pending[None] | None:
        """None while there is room for more messages, else what settles when there is."""
        if self._paused and self._room is None:
            self._room = Pending()
        return self._room

    def _make_room(self) -> None:
        room, self._room = self._room, None
        if room is not None:
            room.resolve(None)

    def channel_closed(self, reason: str) -> None:
        if self._ended:
            return
        self._ended = True
        log.info("connection closed", peer=self.channel.peer, reason=reason)
        self.server.metrics.connections -= 1
        for pending in (*self._waiting, *self._polls):
            pending.cancel()
        self._waiting.clear()
        self._polls.clear()
        self._queue.clear()
        for body in list(self.http_streams.values()):
            if body is not None:
                body.cancel()
        self._make_room()
        if self.legacy_tags:
            self.server.machine.killer.kill(self.legacy_tags.__contains__)
        for call in list(self.on_end):
            call()
        session, self.session = self.session, None
        if session is not None:
            self.server.sessions.leave(session, resumable=self.channel.resumable)
        self.server.connection_ended(self)

    # Requests ------------------------------------------------------------------------------------

    def _request(self, request: Request, size: int) -> None:
        method = dispatch.find(request.method)
        if method is None or (method.extension and not self.extensions):
            self._unknown_method(request)
            return
        if request.method != "initialize":
            self._legacy = method.legacy
        if method.control or (not self._queue and self._has_room()):
            self._run(request, method, size)
            return
        if method.long_poll and len(self._queue) >= self.server.limits.queued_requests // 2:
            raise _too_many(len(self._waiting) + len(self._polls))
        self._queue.append((request, method, size))
        self._queued_bytes += size
        self._watch_intake()

    def _unknown_method(self, request: Request) -> None:
        if self._legacy:
            error = invalid_request(f"unknown method: {request.method}")
        else:
            text = f"exec-server stub does not implement `{request.method}` yet"
            error = RpcError(METHOD_NOT_FOUND, text)
        self.channel.send(encode_error(request.id, error))

    def _run(self, request: Request, method: dispatch.Method, size: int) -> None:
        self.heard = started = self.server.loop.time()
        try:
            given = {} if request.params is None and method.without_params else request.params
            kind = method.params
            params: Any = decode_params(given, kind) if isinstance(kind, type) else kind(given)
            if method.family is not None:
                self._check_handshake(method.family)
            result = method.run(self, params)
        except Exception as error:
            self._answer_error(request.id, error, started)
            return
        if isinstance(result, Pending):
            if result.settled:
                self._answer_settled(request.id, result, started)
                return
            if method.long_poll and not (method.takes_turn and self.server.limits.waiting_requests > 1):
                self._poll(request.id, result, size, started)
                return
            self._waiting[result] = size
            self._queued_bytes += size
            self._watch_intake()
            result.then(lambda done: self._waited(request.id, done, started))
        else:
            self._answer(request.id, result, started)

    def _poll(self, request_id: RequestId, pending: Pending[Any], size: int, started: float) -> None:
        limits = self.server.limits
        if len(self._polls) >= limits.long_polls or self._polls_bytes + size > limits.waiting_bytes:
            pending.cancel()
            self._answer_error(request_id, _too_many(len(self._polls)), started)
            return
        self._polls[pending] = size
        self._polls_bytes += size
        pending.then(lambda done: self._polled(request_id, done, started))

    def _polled(self, request_id: RequestId, pending: Pending[Any], started: float) -> None:
        self._polls_bytes -= self._polls.pop(pending, 0)
        if not self._ended:
            self._answer_settled(request_id, pending, started)
            self._check_unsent()
            self._stay_awake()

    def _waited(self, request_id: RequestId, pending: Pending[Any], started: float) -> None:
        self._queued_bytes -= self._waiting.pop(pending, 0)
        if self._ended:
            return
        self._answer_settled(request_id, pending, started)
        if not self._queue:
            self._watch_intake()
        elif not self._queue_planned:
            # Others may wait for the very same thing (a process to start) and are told after this one.
            # They came before everything in the queue.
            self._queue_planned = True
            self.server.loop.call_soon(self._run_queue)
        self._check_unsent()
        self._stay_awake()

    def _stay_awake(self) -> None:
        """For the next request, if this one is answered; who still works on it needs the interpreter."""
        if self._waiting:
            self.server.linger.end()
        else:
            self.server.linger.touch()

    def _run_queue(self) -> None:
        """Go on with what had to queue, as far as there is room."""
        self._queue_planned = False
        while self._queue and self._has_room():
            request, method, size = self._queue.popleft()
            self._queued_bytes -= size
            self._run(request, method, size)
        self._watch_intake()

    def _has_room(self) -> bool:
        """Whether another ordinary request may be begun."""
        limits = self.server.limits
        return len(self._waiting) < limits.waiting_requests and not self._is_deaf()

    def _is_deaf(self) -> bool:
        """Whether the client leaves so much unread that it should get no more to read."""
        return self._paused and self.channel.unsent() > self.server.limits.outgoing_limit

    def _answer_settled(self, request_id: RequestId, pending: Pending[Any], started: float) -> None:
        try:
            result = pending.result()
        except Exception as error:
            self._answer_error(request_id, error, started)
        else:
            self._answer(request_id, result, started)

    def _answer(self, request_id: RequestId, result: Any, started: float) -> None:
        if type(result) is Encoded:
            head = b'{"id":%b,"result":%b' % (encode(request_id), result.head)
            self.channel.send_parts(head, result.body, result.tail + b"}", binary=False)
        elif type(result) is Raw and len(bytes_of := memoryview(result)) > LARGE_RESULT_BYTES:
            head = b'{"id":%b,"result":' % encode(request_id)
            self.channel.send_parts(head, bytes_of, b"}", binary=False)
        elif type(result) is binary.FilePart:
            head = binary.file_part_header(encode(request_id), result.eof, result.size)
            self.channel.send_parts(head, result.data, b"", binary=True)
        else:
            self.channel.send(encode_result(request_id, result))
        self.server.metrics.request_done(self.server.loop.time() - started, failed=False)

    def _answer_error(self, request_id: RequestId, error: Exception, started: float) -> None:
        if isinstance(error, OSError) and error.errno in EXHAUSTED:
            log.error("a request failed for want of descriptors (ulimit -n)", reason=error.strerror)
            text = "No file descriptors available" if error.errno == EMFILE else error.strerror
            error = internal_error(f"{text} (os error {error.errno})")
        elif not isinstance(error, RpcError):
            log.error("a request failed in an unforeseen way", exc_info=error)
            # The names of files on this machine are for the log, not for the peer.
            text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            error = internal_error(f"internal error: {type(error).__name__}: {text}")
        self.channel.send(encode_error(request_id, error))
        self.server.metrics.request_done(self.server.loop.time() - started, failed=True)

    def _check_handshake(self, family: str) -> None:
        if self.session is None:
            raise invalid_request(f"client must call initialize before using {family} methods")
        if not self.initialized:
            raise invalid_request(f"client must send initialized before using {family} methods")

    # Bounds --------------------------------------------------------------------------------------

    def _watch_intake(self) -> None:
        """Stop reading while too much waits, so that a client cannot fill our memory with questions."""
        limits = self.server.limits
        full = (
            len(self._queue) >= limits.queued_requests
            or self._queued_bytes > limits.waiting_bytes
            or self._is_deaf()
        )
        if full and self._reading:
            self._reading = False
            self.channel.pause_reading()
        elif not full and not self._reading:
            self._reading = True
            self.channel.resume_reading()

    def _check_unsent(self) -> None:
        """A client that does not read its answers is asked no more, and in the end cut off."""
        if self._paused:
            self._watch_intake()
            if self.channel.unsent() > self.server.limits.outgoing_cutoff:
                log.warning("client reads no answers, disconnecting it", peer=self.channel.peer)
                self.channel.abort()

    # The rest ------------------------------------------------------------------------------------

    def initialize(self, params: InitializeParams) -> InitializeResult:
        """The handshake's first half."""
        if self.session is not None:
            raise invalid_request("initialize may only be sent once per connection")
        if params.resume_session_id is None:
            session = self.server.sessions.create(self)
        else:
            session = self.server.sessions.resume(params.resume_session_id, self)
        self.session = session
        if self._paused:
            session.processes.hold_output()
        acknowledges = params.acknowledges_output is True and self.channel.resumable
        session.processes.expect_acknowledgements(acknowledges)
        self.lifecycle_events = params.lifecycle_events is True
        self.extensions = params.extensions is True
        self.binary_output = params.binary_output is True and self.channel.carries_binary
        self.binary_files = params.binary_files is True and self.channel.carries_binary
        result = InitializeResult(session.id, self.server.environment_info)
        if self.binary_output:
            result.binary_output = True
        if self.binary_files:
            result.binary_files = True
        return result

    def _notification(self, notification: Notification) -> None:
        if notification.method != "initialized":
            error = invalid_request(f"unexpected notification method: {notification.method}")
            self.channel.send(encode_error(MALFORMED_ID, error))
            self._check_unsent()
        elif self.session is None:
            log.warning("`initialized` before `initialize`, disconnecting", peer=self.channel.peer)
            self.channel.abort()
        else:
            self.initialized = True

    def _stray_answer(self, answer: Success | Failure) -> None:
        """We ask nothing yet, so nobody can answer."""
        log.warning(
            "an answer to a question never asked, disconnecting", peer=self.channel.peer, id=answer.id
        )
        self.channel.abort()


def _too_many(count: int) -> RpcError:
    return invalid_request(f"too many requests wait for processes ({count})")
