"""A session on a server, which outlives its connections. Knows nothing of processes.

A connection that breaks is made again and the session goes on: recovery.py says when, docs/environments.md
says what callers notice. What rides on a session (client.py) is told here what happens to it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
from msgspec import Raw

from .. import log
from ..services import EnvironmentFacts
from ..transport.channel import Channel, Receiver
from ..wire import binary
from .errors import (
    ConnectionLost,
    ExecServerError,
    ProtocolError,
    Recovering,
    SessionLost,
    TooManyCalls,
)
from .handshake import ConnectOptions, InitializeReply, shake_hands
from .recovery import (
    SILENCE_SECONDS,
    Attempts,
    Happening,
    State,
    budget,
    disconnect_text,
    failure_text,
    noticed_sleep,
    step,
)
from .repeats import Repeats
from .rpc import CLEANUP_METHODS, Rpc, Take, decoded

__all__ = ["Dialer", "Session", "asleep"]

T = TypeVar("T")

Dialer = Callable[[Receiver], Awaitable[Channel]]
"""Opens a channel that delivers to the given receiver."""

_in_a_hurry: ContextVar[frozenset[int]] = ContextVar("exec_server_in_a_hurry", default=frozenset())
"""The sessions whose calls must not wait for a recovery, by their number."""

_numbers = count(1)


class _Listener(msgspec.Struct):
    """Who takes the notifications of a method, and wants to know what becomes of the connection."""

    receive: Callable[[Raw], None]
    lost: Callable[[str], None]
    resumed: Callable[[], None] | None


class Session:
    """One session and the connection it has at the moment, if any."""

    def __init__(self, options: ConnectOptions) -> None:
        self._options = options
        self._number = next(_numbers)
        self._loop = asyncio.get_running_loop()
        self._rpc = self._new_link()
        self._dial: Dialer | None = None
        self._resumable = False
        self._state = State.CONNECTING
        self._failure: ConnectionLost | None = None
        self._closed_because = "closed"
        self._recovery: asyncio.Task[None] | None = None
        self._state_listeners: list[Callable[[State], None]] = []
        self._waiters: list[asyncio.Future[None]] = []
        self._repeats = Repeats()
        self._background: set[asyncio.Future[Any]] = set()
        self._listeners: dict[str, _Listener] = {}
        self._after_close: list[Callable[[], Awaitable[None]]] = []
        self._asleep = asleep()
        self._capabilities: dict[str, Any] = {}
        self._resumed_at: float | None = None
        self._silence: asyncio.Timeout | None = None
        self._progressed = False
        self.losses = 0
        """Connections lost so far. What belonged to one of them, such as an open file, is gone with it."""
        self.session_id = ""
        self.info = EnvironmentFacts()
        """`environment/info` of the server."""

    # What rides on the session -------------------------------------------------------------------

    def _notification(self, method: str, params: Raw) -> None:
        """A notification that may be for a rider."""

    def _binary(self, message: bytes | memoryview) -> None:
        """A binary message."""

    def _before_attempt(self) -> None:
        """A connection is lost, and another will be tried."""

    async def _catch_up(self, link: Rpc) -> None:
        """Make good, over a new connection, what was missed. Only losing that one is an error."""

    def _session_ended(self, text: str) -> None:
        """Nothing will come any more."""

    async def _say_goodbye(self) -> None:
        """Before the connection is closed."""

    # The connection ------------------------------------------------------------------------------

    async def open(self, dial: Dialer) -> None:
        """Connect and shake hands."""
        self._dial = dial
        try:
            reply = await self._shake_hands(self._rpc, self._options.resume_session_id)
            self.session_id = reply.session_id
            self.info = reply.facts()
            self._capabilities = self.info.capabilities
        except BaseException:
            self._rpc.close()
            self._become(Happening.GAVE_UP)
            raise
        if self._rpc.closed:
            self._become(Happening.GAVE_UP)
            raise ConnectionLost(disconnect_text("right after the handshake"))
        self._asleep = asleep()
        self._become(Happening.OPENED)

    async def _shake_hands(self, link: Rpc, resume_session_id: str | None) -> InitializeReply:
        """Connect, introduce ourselves, and have the session that was asked for."""
        assert self._dial is not None  # noqa: S101  # set before anything is tried
        channel = await self._dial(link)
        link.use(channel)
        self._resumable = channel.resumable
        return await shake_hands(link, self._options, resume_session_id, ask_info=not self.session_id)

    def has(self, capability: str) -> bool:
        """Whether the server announces a capability."""
        return self._capabilities.get(capability) is True

    @property
    def state(self) -> State:
        """Connected, recovering, or at an end."""
        return self._state

    @property
    def connected(self) -> bool:
        return self._state is State.CONNECTED

    @property
    def hung_up(self) -> bool:
        """Whether the last connection was ended from this side, because of what the server said."""
        return self._rpc.hung_up

    @property
    def failure(self) -> ConnectionLost | None:
        """Why the session is gone for good, if it is."""
        return self._failure

    def on_state(self, call: Callable[[State], None]) -> Callable[[], None]:
        """Call this at every change of state, until what is returned is called."""
        self._state_listeners.append(call)

        def stop() -> None:
            if call in self._state_listeners:
                self._state_listeners.remove(call)

        return stop

    @contextmanager
    def fail_fast(self) -> Iterator[None]:
        """Inside, calls do not wait for a connection that is being made again: they raise Recovering."""
        token = _in_a_hurry.set(_in_a_hurry.get() | {self._number})
        try:
            yield
        finally:
            _in_a_hurry.reset(token)

    # Calls ---------------------------------------------------------------------------------------

    async def call(self, method: str, params: Any, kind: type[T], timeout: float | None = None) -> T:
        """Any method of the protocol, its result decoded as `kind`.

        It is sent once. If the connection breaks before the answer, ConnectionLost says that nobody knows
        whether it took effect; if the connection is already being made again, the call waits for it.
        """
        if self._state is not State.CONNECTED:
            await self._until_connected()
        raw = await self._rpc.call(method, params, timeout)
        self._asleep = asleep()  # up to here the connection has outlived whatever sleep there was
        return decoded(method, raw, kind)

    async def call_for_part(
        self, method: str, params: Any, take: Take | None = None
    ) -> Raw | binary.FilePart:
        """A method that reads a part of a file, sent once: JSON, or what `take` makes of a binary message."""
        if self._state is not State.CONNECTED:
            await self._until_connected()
        answer = await self._rpc.send_reading(method, params, take)
        self._asleep = asleep()
        return answer

    @property
    def binary_files(self) -> bool:
        """Whether file contents travel as they are on this connection (wire/binary.py)."""
        return self._rpc.binary_files

    async def put_block(self, handle_id: str, offset: int, data: bytes | memoryview) -> None:
        """`fs/writeBlock` as a binary message, where `binary_files` says that it may be one. Sent once."""
        await self._rpc.send_block(handle_id, offset, data)
        self._asleep = asleep()

    async def call_until_answered(self, method: str, params: Any, kind: type[T]) -> T:
        """The same for calls that may be sent again: the answer, however often the connection breaks.

        Such calls are repeated in the order in which they were made first.
        """
        number = self._repeats.number()
        sent = False
        if self._state is State.CONNECTED and not self._repeats.must_wait(params):
            try:
                return decoded(method, await self._rpc.call(method, params), kind)
            except ConnectionLost:
                sent = True
                if self._number in _in_a_hurry.get():
                    raise
        if self._state is State.RECOVERING and self._number in _in_a_hurry.get():
            raise Recovering("exec-server environment is recovering")
        waits = self._state is State.CONNECTED and self._repeats.must_wait(params)
        if self._state is not State.RECOVERING and not waits:
            raise self._gone()
        return decoded(method, await self._repeats.answer(number, method, params, sent=sent), kind)

    def tell(self, method: str, params: Any) -> None:
        """A call whose answer nobody waits for; dropped while there is no connection."""
        if self._state is not State.CONNECTED:
            return
        try:
            self._in_background(self._rpc.send(method, params))
        except TooManyCalls:
            if method in CLEANUP_METHODS:
                self._rpc.hang_up(f"too many calls are pending to clean up with `{method}`")
        except ExecServerError:
            return

    def _in_background(self, future: asyncio.Future[Any]) -> None:
        self._background.add(future)
        future.add_done_callback(self._told)

    def _told(self, future: asyncio.Future[Any]) -> None:
        self._background.discard(future)
        if not future.cancelled():
            future.exception()

    async def _until_connected(self) -> None:
        while self._state is State.RECOVERING:
            if self._number in _in_a_hurry.get():
                raise Recovering("exec-server environment is recovering")
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            await waiter
        if self._state is not State.CONNECTED:
            raise self._gone()

    def _gone(self) -> ConnectionLost:
        if self._failure is not None:
            # A new object each time: one that is raised twice collects the tracebacks of strangers.
            slept = getattr(self._failure, "slept", 0.0)
            return SessionLost(str(self._failure), slept)
        reason = self._closed_because if self._state is State.CLOSED else "not open"
        return ConnectionLost(disconnect_text(reason))

    def on_close(self, call: Callable[[], Awaitable[None]]) -> None:
        """Do this after the connection is closed, e.g. stop a server started for it."""
        self._after_close.append(call)

    def listen(
        self,
        method: str,
        receive: Callable[[Raw], None],
        lost: Callable[[str], None],
        resumed: Callable[[], None] | None = None,
    ) -> None:
        """Give the params of every notification of a method to `receive`.

        Who can take up again after a broken connection gives `resumed`, and is told with `lost` only that
        there is no way back; everybody else is told with `lost` that the connection is gone.
        """
        self._listeners[method] = _Listener(receive, lost, resumed)

    # From the connection -------------------------------------------------------------------------

    def _new_link(self) -> Rpc:
        link = Rpc(self._notified, self._binary, lambda reason: self._lost(link, reason))
        return link

    def _notified(self, method: str, params: Raw) -> None:
        if self._silence is not None:
            self._progress()
        try:
            listener = self._listeners.get(method)
            if listener is not None:
                listener.receive(params)
            self._notification(method, params)
        except (msgspec.MsgspecError, ValueError) as error:
            raise ProtocolError(f"bad `{method}` notification: {error}") from None

    def _lost(self, link: Rpc, reason: str) -> None:
        if link is not self._rpc or self._state is not State.CONNECTED:
            return  # whoever made that connection finds out by its calls
        self.losses += 1
        if not self._resumable or not self.session_id or self._budget() <= 0:
            self._give_up(ConnectionLost(disconnect_text(reason)))
            return
        log.info("connection lost, making it again", session=self.session_id, reason=reason)
        self._repeats.pause()
        self._become(Happening.LOST)
        for listener in list(self._listeners.values()):
            if listener.resumed is None:
                listener.lost(disconnect_text(reason))
        self._recovery = asyncio.ensure_future(self._recover(reason, link.heard_at))

    # Recovery ------------------------------------------------------------------------------------

    async def _recover(self, reason: str, heard_at: float) -> None:
        options = self._options
        slept_before = self._asleep
        lost_at = self._loop.time()
        attempts = Attempts(lost_at, asleep(), self._budget(), options.backoff, self.session_id)
        if self._resumed_at is not None:
            await asyncio.sleep(attempts.first_delay(self._loop.time(), self._resumed_at))
        while True:
            link = self._new_link()
            self._before_attempt()
            self._progressed = False
            try:
                async with asyncio.timeout(attempts.left(self._loop.time())):
                    await self._shake_hands(link, self.session_id)
                # The session is ours again. A slow line may take its time, as long as something comes.
                await self._catch_up_while_alive(link)
                if link.closed:
                    raise ConnectionLost(disconnect_text("while recovering"))
            except asyncio.CancelledError:
                link.close()
                raise
            except Exception as error:
                link.close()
                if self._progressed:
                    lost_at = heard_at = self._loop.time()
                    attempts.renew(lost_at)
                verdict = attempts.failed(self._loop.time(), asleep(), error)
                if isinstance(verdict, str):
                    slept = noticed_sleep(asleep() - slept_before)
                    now = self._loop.time()
                    keeps = self._detach_seconds()
                    text = failure_text(reason, verdict, slept, keeps, now - lost_at, now - heard_at)
                    self._give_up(SessionLost(text, slept))
                    return
                await asyncio.sleep(verdict)
            else:
                self._resumed(link)
                return

    async def _catch_up_while_alive(self, link: Rpc) -> None:
        try:
            async with asyncio.timeout(SILENCE_SECONDS) as self._silence:
                await self._catch_up(link)
        except TimeoutError:
            raise TimeoutError(
                f"the connection has the session again, and brought nothing for {SILENCE_SECONDS:g}s"
            ) from None
        finally:
            self._silence = None

    def _progress(self) -> None:
        """The connection that has the session again has brought something."""
        self._progressed = True
        if self._silence is not None and not self._silence.expired():
            self._silence.reschedule(self._loop.time() + SILENCE_SECONDS)

    def _budget(self) -> float:
        return budget(self._options.recovery_timeout, self._detach_seconds())

    def _resumed(self, link: Rpc) -> None:
        self._rpc = link
        self._asleep = asleep()
        self._resumed_at = self._loop.time()
        self._recovery = None
        log.info("connection made again", session=self.session_id)
        self._become(Happening.RESUMED)
        self._repeats.resume(link)
        self._wake()
        for listener in list(self._listeners.values()):
            if listener.resumed is not None:
                listener.resumed()

    def _give_up(self, failure: ConnectionLost) -> None:
        """There is no way back: everybody hears of it."""
        log.info("session lost", session=self.session_id, error=str(failure))
        self._failure = failure
        self._recovery = None
        self._become(Happening.GAVE_UP)
        self._end(str(failure), self._gone)

    def _end(self, text: str, error: Callable[[], ConnectionLost]) -> None:
        self._session_ended(text)
        self._repeats.fail(error)
        for listener in list(self._listeners.values()):
            listener.lost(text)
        self._wake()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _become(self, happening: Happening) -> None:
        self._state = step(self._state, happening)
        for listener in list(self._state_listeners):
            try:
                listener(self._state)
            except Exception as error:
                # Somebody else's mistake must not keep the session from being recovered.
                log.error("a listener of a session's state failed", exc_info=error)

    def _detach_seconds(self) -> float | None:
        """How long the server keeps a session without a connection, if it says so."""
        told = self.info.limits.get("detachTtlMs")
        return told / 1000 if isinstance(told, int) else None

    # The end -------------------------------------------------------------------------------------

    async def close(self, reason: str = "closed") -> None:
        """End every process started here, then the connection. May be called more than once.

        The reason is for whoever still asks for something.
        """
        if self._state in (State.CONNECTED, State.RECOVERING):
            await self._say_goodbye()
        if self._state is not State.CLOSED:
            self._become(Happening.CLOSED)
            if self._recovery is not None:
                self._recovery.cancel()
            self._closed_because = reason
            text = disconnect_text(reason)
            self._end(text, lambda: ConnectionLost(text))
        self._rpc.close()
        calls, self._after_close = self._after_close, []
        for call in calls:
            await call()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


def asleep() -> float:
    """For how many seconds this machine has slept since it was started, as far as it knows."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return 0.0 if clock is None else time.clock_gettime(clock) - time.monotonic()
