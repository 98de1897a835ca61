"""From an entry of the configuration to an attached environment."""

from __future__ import annotations

import os
import shlex
import sys
from typing import TYPE_CHECKING, Final

from ..client.errors import ConnectionLost, ExecServerError, ServerEnded
from ..transport.address import without_password
from .entries import CommandTransport, RelayTransport, Transport, WebsocketTransport

if TYPE_CHECKING:
    from .environment import Environment
    from .handle import Opener

__all__ = ["CLIENT_NAME", "address", "local_opener", "opener_for"]

CLIENT_NAME: Final = "exec-server-environment"
"""How environments introduce themselves to servers."""

ADDRESSES: Final = ("ws://", "wss://", "unix://", "relay+https://", "relay+http://")
"""What may be dialled. Addresses come from files, variables and other programs: one that starts a program
here would be a way in."""


def address(transport: Transport | None) -> str:
    """Where it is, for people, without secrets; None is this machine."""
    if transport is None:
        return "this machine"
    if isinstance(transport, WebsocketTransport):
        return without_password(transport.url)
    if isinstance(transport, RelayTransport):
        return f"{transport.environment_id} at {without_password(transport.registry_url)}"
    return shlex.join([transport.program, *transport.args])


def opener_for(transport: Transport) -> Opener:
    """What connects to it, once per call."""
    if isinstance(transport, CommandTransport):
        return lambda: _launch(transport)
    if isinstance(transport, WebsocketTransport):
        return lambda: _dial(transport)
    return lambda: _through_relay(transport)


def local_opener() -> Opener | None:
    """What starts a private server on this machine; None where there is no program to start."""
    return _local if sys.executable else None


async def _local() -> Environment:
    from .connect import connect

    return await connect(client_name=CLIENT_NAME)


async def _dial(transport: WebsocketTransport) -> Environment:
    from .connect import connect

    if not transport.url.startswith(ADDRESSES):
        raise ExecServerError(
            f"cannot connect to `{address(transport)}`; expected ws://HOST:PORT, wss://HOST:PORT, unix://PATH"
            " or relay+https://REGISTRY/ENVIRONMENT"
        )
    return await connect(
        transport.url,
        token=transport.bearer_token,
        client_name=CLIENT_NAME,
        connect_timeout=transport.connect_timeout,
        initialize_timeout=transport.initialize_timeout,
    )


async def _launch(transport: CommandTransport) -> Environment:
    from ..client.launch import ExecServerLaunchCommand
    from ..local.process.environ import RESERVED_NAMES
    from .connect import connect

    inherited = {name: value for name, value in os.environ.items() if name.upper() not in RESERVED_NAMES}
    command = ExecServerLaunchCommand(
        program=transport.program,
        args=list(transport.args),
        env={**inherited, **transport.env},
        cwd=transport.cwd,
    )
    try:
        return await connect(
            command, client_name=CLIENT_NAME, initialize_timeout=transport.initialize_timeout
        )
    except ConnectionLost as error:
        what = "ended before it answered" if isinstance(error, ServerEnded) else "does not speak the protocol"
        raise type(error)(f"`{address(transport)}` {what}; is it a server on stdio? ({error})") from error


async def _through_relay(transport: RelayTransport) -> Environment:
    from ..client.client import ConnectOptions
    from ..client.recovery import RENDEZVOUS
    from .connect import trusted
    from .environment import dialed

    try:
        from ..relay.credentials import Bearer, CredentialError
        from ..relay.harness import Harness, process_identity
        from ..relay.registry import BadRegistryUrl, Registry
    except ImportError as error:
        raise ExecServerError(
            f"cannot reach {address(transport)}: a relay needs more packages ({error});"
            ' install "exec-server[relay]"'
        ) from error
    try:
        credentials = Bearer(transport.auth_token, transport.account_id)
        ssl = trusted() if transport.registry_url.strip().startswith("https:") else None
        registry = Registry(transport.registry_url, transport.environment_id, credentials, ssl=ssl)
    except (BadRegistryUrl, CredentialError) as error:
        raise ExecServerError(f"cannot reach {address(transport)}: {error}") from error
    options = ConnectOptions(client_name=CLIENT_NAME, backoff=RENDEZVOUS)
    return await dialed(Harness(registry, process_identity(), ssl=ssl).connect, address(transport), options)
