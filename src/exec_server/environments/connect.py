"""From an address to an environment: a URL, a command to start, or this very process."""

from __future__ import annotations

import math
import os
import shlex
import string
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from ..client.client import ConnectOptions, Dialer
from ..client.errors import ConnectionLost, ExecServerError, ProtocolError, ServerEnded
from ..client.launch import ExecServerLaunchCommand, Launched, launch
from ..client.recovery import RENDEZVOUS
from ..limits import Limits
from ..transport.address import without_password
from ..transport.channel import Channel, Receiver
from .environment import Environment

__all__ = ["IN_PROCESS", "Connecting", "Target", "connect"]

Target = str | Sequence[str] | ExecServerLaunchCommand | None
"""`ws://`, `wss://`, `unix://`, `relay+https://`, `stdio:COMMAND`, the words of a command, IN_PROCESS, or
None: a server on this machine for this client alone."""

IN_PROCESS = "in-process:"
"""Serve from inside this very process. Nothing is started for it, but of a process that is terminated only
the process group goes: marking whole trees would mark whatever else this process starts meanwhile."""

WrapDialer = Callable[[Dialer], Dialer]
"""Puts something between us and the server, e.g. the faults of `exec_server.testing`."""

HEADER_NAME = frozenset(string.ascii_letters + string.digits + "!#$%&'*+-.^_`|~")
"""What the name of a header may be made of (RFC 9110)."""

CONNECT_TIMEOUT = 10.0
"""Seconds for the connection and the upgrade."""


CA_VARIABLE = "EXEC_SERVER_CA_FILE"
"""Names a file of certificate authorities that are trusted instead of those the system knows."""

SECURE = ("wss://", "relay+https://")


def trusted() -> Any:
    """An SSLContext as the variable wants it; None where it says nothing."""
    path = os.environ.get(CA_VARIABLE)
    if not path:
        return None
    import ssl

    try:
        return ssl.create_default_context(cafile=path)
    except OSError as error:  # that there is no certificate in it is one of these, too
        raise ExecServerError(f"{CA_VARIABLE}: {path} is not a file of certificates: {error}") from None


class Connecting:
    """Use it as `async with connect(...) as machine`, or await it and close the environment yourself."""

    def __init__(self, target: Target, token: str | None, settings: dict[str, Any]) -> None:
        self._target = target
        self._token = token
        self._settings = settings
        self._environment: Environment | None = None

    def __await__(self) -> Generator[Any, None, Environment]:
        return self._open().__await__()

    async def __aenter__(self) -> Environment:
        self._environment = await self._open()
        return self._environment

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._environment is not None:
            await self._environment.close()

    async def _open(self) -> Environment:
        settings = dict(self._settings)
        _check_recovery_timeout(settings["recovery_timeout"])
        timeout = settings.pop("connect_timeout")
        headers = _checked_headers(settings.pop("headers") or {})
        ssl = settings.pop("ssl")
        if ssl is None and isinstance(self._target, str) and self._target.startswith(SECURE):
            ssl = trusted()
        dedicated = settings.pop("dedicated_process")
        wrap = settings.pop("wrap_dialer") or (lambda dial: dial)
        if self._token is not None:
            headers |= _checked_headers({"Authorization": f"Bearer {self._token}"}, "token")
        target = self._target
        if isinstance(target, str) and target.startswith("relay+"):
            settings["backoff"] = RENDEZVOUS
        options = ConnectOptions(**settings)
        if target == IN_PROCESS:
            return await _in_process(Environment(options, IN_PROCESS, remote=False), wrap, dedicated)
        if isinstance(target, str) and not target.startswith("stdio:"):
            environment = Environment(options, without_password(target), remote=True)
            await environment.open(wrap(_dialer(target, headers, timeout, ssl)))
            return environment
        command = _command(target)
        address = "this machine" if target is None else shlex.join([command.program, *command.args])
        environment = Environment(options, address, remote=target is not None)
        return await _launched(environment, wrap, launch(command))


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
    recovery_timeout: float | None = None,
    wrap_dialer: WrapDialer | None = None,
) -> Connecting:
    """Connect to a server, or (without a target) to one of our own on this machine.

    `token` is sent as a bearer token; `ssl` is an ssl.SSLContext for `wss://` and `relay+https://` (else the
    file in EXEC_SERVER_CA_FILE is trusted, or what the system trusts). Leaving the context ends
    every process that was started through it. A connection that is lost is made again for up to
    `recovery_timeout` seconds, and processes go on where they were (docs/environments.md). By default that
    is 25 s, or 5 s less than the server says that it keeps a session if that is more; 0 is not at all.
    `dedicated_process` is for programs that start nothing else: then in-process serving takes whole trees
    along, too.
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
            "recovery_timeout": recovery_timeout,
            "wrap_dialer": wrap_dialer,
        },
    )


def _check_recovery_timeout(seconds: float | None) -> None:
    if seconds is not None and not 0 <= seconds < math.inf:
        raise ValueError(f"recovery_timeout is a number of seconds, 0 for not at all, not {seconds!r}")


def _checked_headers(headers: Mapping[str, str], what: str = "") -> dict[str, str]:
    """Headers as they are given, if they can be sent as they are. Values are not shown: some are secret."""
    for name, value in headers.items():
        shown = what or f"header {name!r}"
        if not isinstance(name, str) or not isinstance(value, str):
            raise ValueError(f"the {shown} cannot be sent: names and values of headers are strings")
        if not name or not name.isascii() or not set(name) <= HEADER_NAME:
            raise ValueError(f"the {shown} cannot be sent: that is no name for a header")
        if any(character in "\r\n\0" for character in value):
            raise ValueError(f"the {shown} cannot be sent: its value has a line break or a NUL in it")
        try:
            value.encode("latin-1")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the {shown} cannot be sent: character {error.start + 1} of its value is not Latin-1"
            ) from None
    return dict(headers)


def _dialer(url: str, headers: dict[str, str], timeout: float, ssl: Any) -> Dialer:
    scheme, separator, rest = url.partition("://")
    if separator and scheme in ("ws", "wss") and rest:
        try:
            urlsplit(url).port  # noqa: B018  # it is the looking that finds a bad one
        except ValueError as error:
            raise ExecServerError(f"cannot connect to `{without_password(url)}`: {error}") from None

        async def dial_websocket(receiver: Receiver) -> Channel:
            from ..transport import websocket

            return await websocket.connect(url, receiver, Limits(), headers=headers, timeout=timeout, ssl=ssl)

        return dial_websocket
    if separator and scheme == "unix" and rest:

        async def dial_unix(receiver: Receiver) -> Channel:
            from ..transport import unix

            return await unix.connect(rest, receiver, Limits(), headers=headers, timeout=timeout)

        return dial_unix
    if separator and scheme in ("relay+https", "relay+http"):
        return _relay_dialer(url, headers, ssl)
    raise ExecServerError(
        f"cannot connect to `{without_password(url)}`; expected ws://HOST:PORT, wss://HOST:PORT, unix://PATH,"
        " relay+https://REGISTRY/ENVIRONMENT or stdio:COMMAND"
    )


def _relay_dialer(url: str, headers: dict[str, str], ssl: Any) -> Dialer:
    try:
        from ..relay.harness import dialer
        from ..transport.websocket import ConnectFailed
    except ImportError as error:
        raise ExecServerError(
            f'a relay needs more packages ({error}); install "exec-server[relay]"'
        ) from error
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    try:
        return dialer(url, token=token if scheme == "Bearer" else None, ssl=ssl)
    except ConnectFailed as error:
        raise ExecServerError(str(error)) from None


def _command(target: Sequence[str] | ExecServerLaunchCommand | None) -> ExecServerLaunchCommand:
    if isinstance(target, ExecServerLaunchCommand):
        return target
    if target is None:
        # -P: the current directory is somebody's project, and no place to import from.
        target = [sys.executable, "-P", "-m", "exec_server", "--listen", "stdio"]
    elif isinstance(target, str):
        target = _words(target)
    if not isinstance(target, Sequence) or not target:
        raise ExecServerError(f"cannot connect to {target!r}: neither an address nor a command")
    program, *args = target
    return ExecServerLaunchCommand(program=program, args=args)


async def _launched(environment: Environment, wrap: WrapDialer, server: Launched) -> Environment:
    try:
        await environment.open(wrap(server.dial))
    except (ConnectionLost, ProtocolError, TimeoutError) as error:
        # Whoever waits is told first; the server may take its time to end.
        server.stop_behind()
        if isinstance(error, ConnectionLost) and not environment.hung_up:
            status = await server.status()
            if status is not None:
                raise ServerEnded(server.blamed(error, status)) from error
        raise type(error)(server.blamed(error)) from error
    except BaseException:
        await server.stop()
        raise
    environment.on_close(server.stop)
    return environment


def _words(target: str) -> list[str]:
    try:
        words = shlex.split(target.removeprefix("stdio:").removeprefix("//"))
    except ValueError as error:
        raise ExecServerError(f"cannot connect to `{target}`: {error}") from None
    if not words:
        raise ExecServerError(f"cannot connect to `{target}`: no command is named after `stdio:`")
    return words


async def _in_process(environment: Environment, wrap: WrapDialer, dedicated: bool) -> Environment:
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
        await environment.open(wrap(dial))
    except BaseException:
        server.close()
        raise
    environment.on_close(stop)
    return environment
