"""Sessions: who owns which processes, and what becomes of them when the connection goes.

    ATTACHED <-> DETACHED -> EXPIRED

Only a detached session can be resumed; one that waits longer than `detach_ttl` expires, and everything
it ever started is killed. Until then it keeps what has ended, too: `retention` counts with a connection.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from .. import log
from ..local.process.machine import ProcessMachine
from ..local.process.table import ProcessTable
from ..loop import Pending, Timer
from ..wire.errors import ALREADY_ATTACHED, RpcError, invalid_request
from .metrics import Metrics

if TYPE_CHECKING:
    from .connection import Connection

__all__ = ["Session", "SessionRegistry", "SessionState"]


class SessionState(enum.Enum):
    ATTACHED = "attached"
    DETACHED = "detached"
    EXPIRED = "expired"


TRANSITIONS: Final = {
    SessionState.ATTACHED: frozenset({SessionState.DETACHED, SessionState.EXPIRED}),
    SessionState.DETACHED: frozenset({SessionState.ATTACHED, SessionState.EXPIRED}),
    SessionState.EXPIRED: frozenset[SessionState](),
}
"""Every change of state there is."""


class Session:
    """One client's processes, with or without a connection to tell about them."""

    def __init__(self, session_id: str, machine: ProcessMachine) -> None:
        self.id = session_id
        self.state = SessionState.ATTACHED
        self.connection: Connection | None = None
        self.processes = ProcessTable(machine, self._heard)
        self.expiry: Timer | None = None

    def become(self, state: SessionState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"session {self.id} cannot go from {self.state.value} to {state.value}")
        self.state = state

    def _heard(self) -> float:
        return float("-inf") if self.connection is None else self.connection.heard


class SessionRegistry:
    """All sessions of a server."""

    def __init__(self, machine: ProcessMachine, metrics: Metrics) -> None:
        self._machine = machine
        self._metrics = metrics
        self._sessions: dict[str, Session] = {}

    def all(self) -> list[Session]:
        """Every session, attached or not."""
        return list(self._sessions.values())

    def create(self, connection: Connection) -> Session:
        """A new session, attached."""
        limit = self._machine.limits.max_sessions
        if len(self._sessions) >= limit and not self._drop_an_empty_one():
            raise invalid_request(f"session limit reached ({limit})")
        session = Session(str(uuid4()), self._machine)
        session.connection = connection
        self._sessions[session.id] = session
        self._metrics.sessions += 1
        return session

    def resume(self, session_id: str, connection: Connection) -> Session:
        """Attach a detached session to a new connection."""
        session = self._sessions.get(session_id)
        if session is None:
            raise invalid_request(f"unknown session id {session_id}")
        if session.state is SessionState.ATTACHED:
            if session.connection is not None:
                # Its client is here, so that one may be broken without our having noticed.
                session.connection.probe()
            raise RpcError(
                ALREADY_ATTACHED, f"session {session_id} is already attached to another connection"
            )
        session.become(SessionState.ATTACHED)
        session.connection = connection
        session.processes.release_requested_output()
        session.processes.owner_is_back()
        self._metrics.sessions_detached -= 1
        if session.expiry is not None:
            session.expiry.cancel()
        return session

    def leave(self, session: Session, *, resumable: bool) -> None:
        """The connection is gone: keep the session for a while, or end it."""
        session.connection = None
        if session.state is SessionState.EXPIRED:
            return
        if not resumable:
            self._expire(session)
            return
        session.become(SessionState.DETACHED)
        self._metrics.sessions_detached += 1
        # Output goes to the log alone. What was asked to wait for its reader still does, or its output
        # would be gone when the reader is back; so does, when the log is full, the output for a client
        # that says what it has received.
        session.processes.guard_output()
        session.processes.release_output()
        session.processes.owner_left()
        delay = self._machine.limits.detach_ttl
        session.expiry = self._machine.loop.call_later(delay, self._expire, session)

    def end_all(self, then: Callable[[], object]) -> None:
        """The server is stopping: end every session, and go on when their processes are gone."""
        sessions = list(self._sessions.values())
        for session in sessions:
            self._remove(session)
        tables = [session.processes for session in sessions if session.processes.used]
        asked = [table.ask_to_end() for table in tables]
        if not tables:
            then()
            return
        left = len(asked)

        def killed(_: Pending[int]) -> None:
            # If that failed, whoever closes the machine tries again, and has a guardian.
            for table in tables:
                table.let_go()
            then()

        def one_ready(_: Pending[None]) -> None:
            nonlocal left
            left -= 1
            if not left:
                # One look at all processes is enough for any number of sessions.
                self._machine.killer.kill(self._machine.tags.contains).then(killed)

        for ready in asked:
            ready.then(one_ready)

    def _drop_an_empty_one(self) -> bool:
        """End the oldest session that waits for its client to come back and never started anything."""
        for session in self._sessions.values():
            if session.state is SessionState.DETACHED and not session.processes.used:
                self._expire(session)
                return True
        return False

    def _expire(self, session: Session) -> None:
        self._remove(session)
        session.processes.kill_all()

    def _remove(self, session: Session) -> None:
        if session.state is SessionState.DETACHED:
            self._metrics.sessions_detached -= 1
            self._metrics.sessions_expired_total += 1
            log.info("session expired", session=session.id)
        session.become(SessionState.EXPIRED)
        del self._sessions[session.id]
        self._metrics.sessions -= 1
        if session.expiry is not None:
            session.expiry.cancel()
