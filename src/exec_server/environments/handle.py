"""A handle: one way to one machine, started once for everybody who waits for it.

Nothing is connected until somebody asks. Then there is one attempt, shared by all who ask meanwhile, and one
result. Whoever holds a handle keeps it working, also after the registry has put another in its place; when
nobody does any more, an attempt that is still under way is given up and a connection that was made is closed.
The machine that a handle gives out holds it, and so does a process started there until it has ended; what
hangs on a machine (`machine.files`) does not.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

from msgspec import Struct

from .. import log
from ..client.errors import ExecServerError
from ..client.recovery import State, is_worth_another_try
from .readiness import ATTEMPTING, FINISHED, Happening, Readiness, step

if TYPE_CHECKING:
    from .environment import Environment, HeldEnvironment
    from .provisioning import Provision
    from .roots import SelectedRoot

__all__ = ["RECOVERING_TEXT", "Handle", "HandleClosed", "ObservedStatus", "Opener"]

RECOVERING_TEXT: Final = "exec-server environment is recovering"

ABANDONED_TEXT: Final = "closed: replaced by environment/add, or dropped, and nobody held it any more"

STATUS_SECONDS: Final = 10.0
"""How long a machine may take to say that it is there; the reference's value."""

Opener = Callable[[], Awaitable["Environment"]]
"""Connects and shakes hands; raises what went wrong."""


class HandleClosed(ExecServerError):
    """The environment was closed by its owner; a new one must be asked for."""


class ObservedStatus(Struct, frozen=True):
    """What is known of an environment, found out without starting or repairing anything."""

    status: Literal["pending", "ready", "disconnected", "unknown"]
    error: str | None = None


class Handle:
    """A way to a machine. Make it inside a running event loop; its owner closes it.

    `lazy`: being registered does not start it, only being used does. `reconnects`: after a failure that may
    pass, the next caller tries again; a program that was started cannot be had a second time. `local` is
    this machine, which is there before anything was started for it.
    """

    def __init__(
        self,
        environment_id: str,
        opener: Opener,
        *,
        lazy: bool = False,
        reconnects: bool = True,
        local: bool = False,
        provision: Provision | None = None,
    ) -> None:
        self.id = environment_id
        self.lazy = lazy or local or provision is not None
        self.is_local = local
        self.provision = provision
        """What the owner of an announced environment has said of it; None for an ordinary one."""
        self._start = _Start(opener, reconnects, provision)
        self._given_out: weakref.ref[HeldEnvironment] | None = None
        # The attempt must not keep the handle: that nobody holds it is how we know that nobody wants it.
        weakref.finalize(self, _Start.abandon, self._start, asyncio.get_running_loop()).atexit = False

    def __repr__(self) -> str:
        return f"<Handle {self.id} {self.state.value}>"

    @property
    def state(self) -> Readiness:
        """How far it is."""
        return self._start.look()

    @property
    def error(self) -> BaseException | None:
        """Why the last attempt failed, in a state that says so."""
        return self._start.error

    def start(self) -> None:
        """Begin, unless it is under way or done. Returns at once; asking again changes nothing."""
        self._start.begin()

    def startup_finished(self) -> bool:
        """Whether the first attempt has had its result, good or bad."""
        return self.is_local or self.state in FINISHED

    def readiness(self) -> Literal["ready"] | BaseException | None:
        """Whether there is a live connection, what went wrong, or None: not yet, or being repaired."""
        state = self.state
        if state is Readiness.READY:
            return "ready" if self._start.is_live() else None
        if state in (Readiness.UNREACHABLE, Readiness.FAILED, Readiness.CLOSED):
            return self._start.why()
        return "ready" if self.is_local else None

    async def wait_until_ready(self) -> None:
        """Start if need be, and wait with everybody else; raises why it failed."""
        if not self.is_local:
            await self.environment()

    async def environment(self) -> Environment:
        """The machine, attached to: the same one for everybody."""
        return self._held(await self._start.attached())

    def _held(self, environment: Environment) -> Environment:
        """The machine for somebody who may drop this handle and keep that."""
        from .environment import HeldEnvironment

        given_out = None if self._given_out is None else self._given_out()
        if given_out is None or given_out.stands_for is not environment:
            given_out = HeldEnvironment(environment, self)
            self._given_out = weakref.ref(given_out)
        return given_out

    async def wait_until_connected(self) -> None:
        """Like `wait_until_ready`, and past a repair of the connection that is under way."""
        while not self.is_local:
            environment = await self.environment()
            if environment.state is State.CONNECTED:
                return
            changed = asyncio.Event()
            stop = environment.on_state(partial(_set, changed))
            try:
                await changed.wait()
            finally:
                stop()

    def environment_now(self) -> Environment | None:
        """The machine if it is attached to; never starts or waits."""
        environment = self._start.environment if self.state is Readiness.READY else None
        return None if environment is None else self._held(environment)

    async def status(self, timeout: float = STATUS_SECONDS) -> ObservedStatus:
        """What is known now. Never starts, waits for or repairs anything; asks a live connection once."""
        state = self.state
        environment = self._start.environment
        if state is Readiness.READY and environment is not None:
            if not self._start.is_live():
                return ObservedStatus("disconnected", RECOVERING_TEXT)
            try:
                await environment.check(timeout)
            except (ExecServerError, OSError) as error:
                return ObservedStatus("disconnected", str(error))
            return ObservedStatus("ready")
        if self._start.error is not None:
            return ObservedStatus("disconnected", str(self._start.error))
        if state is Readiness.CLOSED:
            return ObservedStatus("disconnected", str(self._start.why()))
        return ObservedStatus("ready" if self.is_local else "pending")

    def selected_capability_roots(self) -> Sequence[SelectedRoot]:
        """The roots that the environment's owner has reported."""
        return () if self.provision is None else self.provision.roots

    @property
    def connected(self) -> bool:
        """Whether there is a live connection."""
        return self._start.connected

    def on_connection(self, call: Callable[[bool], None]) -> Callable[[], None]:
        """Call this with every change of `connected` from now on; what it answers ends that."""
        listeners = self._start.listeners
        listeners.append(call)
        return lambda: listeners.remove(call) if call in listeners else None

    def fail(self, error: BaseException) -> None:
        """Its owner says that it will never be there. Only before it was started."""
        self._start.fail(error)

    async def close(self) -> None:
        """End the connection and every process of it. May be called more than once."""
        await self._start.close()


class _Start:
    """What a handle does, apart from it, so that an attempt does not keep the handle itself."""

    def __init__(self, opener: Opener, reconnects: bool, provision: Provision | None) -> None:
        self._opener = opener
        self._reconnects = reconnects
        self._provision = provision
        self._state = Readiness.NOT_STARTED
        self._attempt: asyncio.Task[Environment] | None = None
        self.environment: Environment | None = None
        self.error: BaseException | None = None
        self.connected = False
        self.listeners: list[Callable[[bool], None]] = []

    def look(self) -> Readiness:
        """The state, after noticing what the client has given up meanwhile."""
        environment = self.environment
        if environment is not None and environment.state in (State.FAILED, State.CLOSED):
            self.error = environment.failure or HandleClosed("the environment was closed")
            self.environment = None
            self._change(Happening.LOSE if self._reconnects else Happening.FAIL_FOR_GOOD)
        return self._state

    def is_live(self) -> bool:
        """Whether the connection works at this moment."""
        return self.environment is not None and self.environment.state is State.CONNECTED

    def begin(self) -> asyncio.Task[Environment] | None:
        """The attempt under way, a new one if there may be one, or None."""
        state = self.look()
        if state in (Readiness.NOT_STARTED, Readiness.UNREACHABLE):
            self._change(Happening.START)
            self._attempt = asyncio.ensure_future(self._try())
            self._attempt.add_done_callback(_look_at)
        return self._attempt if self._state in ATTEMPTING else None

    async def attached(self) -> Environment:
        attempt = self.begin()
        if attempt is not None:
            # Not awaited itself: one who stops waiting must not stop it for the others.
            await asyncio.wait([attempt])
            if attempt.cancelled():
                raise self.why()
            return attempt.result()
        if self.environment is not None:
            return self.environment
        raise self.why().with_traceback(None)

    async def _try(self) -> Environment:
        try:
            if self._provision is not None:
                await self._provision.reported()
            environment = await self._opener()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            if self._state in ATTEMPTING:
                self.error = error
                again = self._reconnects and is_worth_another_try(error)
                self._change(Happening.FAIL_FOR_NOW if again else Happening.FAIL_FOR_GOOD)
            raise
        if self._state not in ATTEMPTING:  # closed meanwhile, by somebody whom the opener did not hear
            await environment.close()
            raise self.why()
        self.environment = environment
        self.error = None
        self._change(Happening.SUCCEED)
        environment.on_state(partial(self._connection_changed, environment))
        return environment

    def _connection_changed(self, environment: Environment, state: State) -> None:
        self.look()
        self._publish()
        if state is State.FAILED:
            _in_background(environment.close())

    def why(self) -> BaseException:
        """The error of a handle that is not good for anything now."""
        if self._state is Readiness.CLOSED or self.error is None:
            return HandleClosed("the environment was closed")
        return self.error

    def fail(self, error: BaseException) -> None:
        if self._state is Readiness.NOT_STARTED:
            self.error = error
            self._change(Happening.FAIL_FOR_GOOD)

    async def close(self, reason: str = "closed") -> None:
        if self._state is Readiness.CLOSED:
            return
        self._change(Happening.CLOSE)
        attempt, environment = self._attempt, self.environment
        self._attempt = self.environment = None
        if attempt is not None and not attempt.done():
            attempt.cancel()
            await asyncio.wait([attempt])
        if environment is not None:
            await environment.close(reason)

    def abandon(self, loop: asyncio.AbstractEventLoop) -> None:
        """Nobody holds the handle any more. May be called from any thread, by the garbage collector."""
        if self._state is not Readiness.CLOSED and not loop.is_closed():
            loop.call_soon_threadsafe(self._abandon)

    def _abandon(self) -> None:
        _in_background(self.close(ABANDONED_TEXT))

    def _change(self, happening: Happening) -> None:
        self._state = step(self._state, happening)
        self._publish()

    def _publish(self) -> None:
        connected = self._state is Readiness.READY and self.is_live()
        if connected is not self.connected:
            self.connected = connected
            for call in list(self.listeners):
                try:
                    call(connected)
                except Exception as error:
                    # Whoever listens badly must not make a machine that is there look as if it failed.
                    log.error("a listener of an environment failed", error=repr(error))


_closing: Final[set[asyncio.Task[None]]] = set()
"""Connections that are being closed because nobody wants them; a task nobody holds may vanish."""


def _in_background(work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.ensure_future(work)
    _closing.add(task)
    task.add_done_callback(_closing.discard)


def _look_at(attempt: asyncio.Task[Environment]) -> None:
    """An attempt that nobody waits for may fail without a word: whoever asks next is told."""
    if not attempt.cancelled() and (error := attempt.exception()) is not None:
        log.debug("environment not reached", error=str(error))


def _set(event: asyncio.Event, _: State) -> None:
    event.set()
