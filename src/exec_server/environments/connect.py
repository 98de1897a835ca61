"""From an address to a client: a URL, a command to start, or this very process."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Generator, Mapping, Sequence
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from ..client.client import Client, ConnectOptions, Dialer
from ..client.client import connect as open_client
from ..client.errors import ExecServerError
from ..client.launch import ExecServerLaunchCommand, Launched, launch
from ..limits import Limits
from ..transport.channel import Channel, Receiver

__all__ = ["IN_PROCESS", "Connecting", "Target", "connect"]

Target = str | Sequence[str] | ExecServerLaunchCommand | None
"""`ws://`, `wss://`, `unix://`, `stdio:COMMAND`, the words of a command, IN_PROCESS, or None: a server on
this machine for this client alone."""

IN_PROCESS = "in-process:"
"""Serve from inside this very process. Nothing is started for it, but of a process that is terminated only
the process group goes: marking whole trees would mark whatever else this process starts meanwhile."""

CONNECT_TIMEOUT = 10.0
"""Seconds for the connection and the upgrade."""


class Connecting:
    """Use it as `async with connect(...) as client`, or await it and close the client yourself."""

    def __init__(self, target: Target, token: str | None, settings: dict[str, Any]) -> None:
        self._target = target
        self._token = token
        self._settings = settings
        self._client: Client | None = None

    def __await__(self) -> Generator[Any, None, Client]:
        return self._open().__await__()

    async def __aenter__(self) -> Client:
        self._client = await self._open()
        return self._client

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._client is not None:
            await self._client.close()

    async def _open(self) -> Client:
        settings = dict(self._settings)
        timeout = settings.pop("connect_timeout")
        headers = dict(settings.pop("headers") or {})
        ssl = settings.pop("ssl")
        dedicated = settings.pop("dedicated_process")
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        options = ConnectOptions(**settings)
        target = self._target
        if target is None:
            target = [sys.executable, "-m", "exec_server", "--listen", "stdio"]
        if target == IN_PROCESS:
            return await _in_process(options, dedicated)
        if isinstance(target, str):
            if not target.startswith("stdio:"):
                return await open_client(_dialer(target, headers, timeout, ssl), options)
            target = _words(target)
        if not isinstance(target, ExecServerLaunchCommand):
            if not isinstance(target, Sequence) or not target:
                raise ExecServerError(f"cannot connect to {target!r}: neither an address nor a command")
            program, *args = target
            target = ExecServerLaunchCommand(program=program, args=args)
        return await _launched(launch(target), options)


def connect(
    target: Target = None,
    *,
    token: str | None = None,
    headers: Mapping[str, str] | None = None,
    ssl: Any = None,
    client_name: str = "exec-server-python",
    connect_timeout: float = CONNECT_TIMEOUT,
    initialize_timeout: float = 10.0,
    resume_session_id: str | None = None,
    binary_output: bool = True,
    dedicated_process: bool = False,
) -> Connecting:
    """Connect to a server, or (without a target) to one of our own on this machine.

    `token` is sent as a bearer token; `ssl` is an ssl.SSLContext for `wss://`. Leaving the context ends
    every process that was started through the client. `dedicated_process` is for programs that start
    nothing else: then in-process serving takes whole trees along, too.
    """
    return Connecting(
        target,
        token,
        {
            "headers": headers,
            "ssl": ssl,
            "client_name": client_name,
            "connect_timeout": connect_timeout,
            "initialize_timeout": initialize_timeout,
            "resume_session_id": resume_session_id,
            "binary_output": binary_output,
            "dedicated_process": dedicated_process,
        },
    )


def _dialer(url: str, headers: dict[str, str], timeout: float, ssl: Any) -> Dialer:
    scheme, separator, rest = url.partition("://")
    if separator and scheme in ("ws", "wss") and rest:
        try:
            urlsplit(url).port  # noqa: B018  # it is the looking that finds a bad one
        except ValueError as error:
            raise ExecServerError(f"cannot connect to `{url}`: {error}") from None

        async def dial_websocket(receiver: Receiver) -> Channel:
            from ..transport import websocket

            return await websocket.connect(url, receiver, Limits(), headers=headers, timeout=timeout, ssl=ssl)

        return dial_websocket
    if separator and scheme == "unix" and rest:

        async def dial_unix(receiver: Receiver) -> Channel:
            from ..transport import unix

            return await unix.connect(rest, receiver, Limits(), headers=headers, timeout=timeout)

        return dial_unix
    raise ExecServerError(
        f"cannot connect to `{url}`; expected ws://HOST:PORT, wss://HOST:PORT, unix://PATH or stdio:COMMAND"
    )


async def _launched(server: Launched, options: ConnectOptions) -> Client:
    try:
        client = await open_client(server.dial, options)
    except BaseException:
        await server.stop()
        raise
    client.on_close(server.stop)
    return client


def _words(target: str) -> list[str]:
    try:
        words = shlex.split(target.removeprefix("stdio:").removeprefix("//"))
    except ValueError as error:
        raise ExecServerError(f"cannot connect to `{target}`: {error}") from None
    if not words:
        raise ExecServerError(f"cannot connect to `{target}`: no command is named after `stdio:`")
    return words


async def _in_process(options: ConnectOptions, dedicated: bool) -> Client:
    import asyncio

    from ..server.server import Server
    from ..transport.memory import pair

    limits = Limits()
    server = Server(asyncio.get_running_loop(), limits, tag_trees=dedicated)

    async def dial(receiver: Receiver) -> Channel:
        ours, theirs = pair(limits.outgoing_high_water)
        theirs.attach(server.accept(theirs))
        ours.attach(receiver)
        return ours

    async def stop() -> None:
        server.close()

    try:
        client = await open_client(dial, options)
    except BaseException:
        server.close()
        raise
    client.on_close(stop)
    return client
