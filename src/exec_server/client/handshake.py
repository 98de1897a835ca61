"""The first words on a connection: who we are, what the server is, and which session it is about."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from ..services import EnvironmentFacts
from ..wire.handshake import InitializeParams
from .errors import ProtocolError, ServerRejected
from .recovery import WEBSOCKET, Backoff
from .rpc import Rpc, decoded

__all__ = ["ConnectOptions", "InitializeReply", "shake_hands"]


class ConnectOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to introduce ourselves. Times are seconds."""

    client_name: str = "exec-server-python"
    initialize_timeout: float = 10.0
    resume_session_id: str | None = None
    binary_output: bool = True
    """Take output and file contents as binary frames where the server offers them."""
    recovery_timeout: float | None = None
    """How long to try to get a lost connection back, sleep of this machine not counted; 0 is not at all.
    None: 25 s, or 5 s less than the server says that it keeps a session, if that is more."""
    backoff: Backoff = WEBSOCKET


class InitializeReply(msgspec.Struct, rename="camel"):
    """What a server says of itself. Only the session id is certain."""

    session_id: str
    environment_info: dict[str, Any] | None = None
    binary_output: bool = False
    binary_files: bool = False

    def facts(self) -> EnvironmentFacts:
        try:
            return msgspec.convert(self.environment_info or {}, EnvironmentFacts)
        except msgspec.ValidationError as error:
            raise ProtocolError(f"the server's facts are not what they should be: {error}") from None


async def shake_hands(
    link: Rpc, options: ConnectOptions, resume_session_id: str | None, *, ask_info: bool
) -> InitializeReply:
    """Introduce ourselves, and have the session that was asked for.

    With `ask_info`, the server is asked what it is if it does not say so by itself.
    """
    params = InitializeParams(
        options.client_name,
        resume_session_id,
        lifecycle_events=None,
        extensions=True,
        acknowledges_output=True,
        binary_output=options.binary_output or None,
        binary_files=options.binary_output or None,
    )
    try:
        async with asyncio.timeout(options.initialize_timeout):
            reply = decoded("initialize", await link.call("initialize", params), InitializeReply)
            link.notify("initialized", {})
            if reply.environment_info is None and ask_info:
                reply.environment_info = await _ask_info(link)
    except TimeoutError:
        raise TimeoutError(
            f"timed out waiting for exec-server initialize handshake after {options.initialize_timeout:g}s"
        ) from None
    if resume_session_id not in (None, reply.session_id):
        raise ProtocolError(f"exec-server initialized an unexpected session {reply.session_id}")
    link.binary_files = reply.binary_files
    return reply


async def _ask_info(link: Rpc) -> dict[str, Any]:
    """Older servers do not send it along, and the oldest do not have it."""
    try:
        return decoded("environment/info", await link.call("environment/info", None), dict[str, Any])
    except ServerRejected:
        return {}
