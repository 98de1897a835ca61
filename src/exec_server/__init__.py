"""Run commands and touch files on a machine, this one or another, through one interface.

    async with exec_server.connect("ws://127.0.0.1:36041") as machine:
        done = await machine.run(["uname", "-a"])
        print(done.stdout.decode())

Names are imported when they are first used: a server must start fast, and most programs use few of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .client.client import Client
    from .client.errors import (
        CommunicateTimeout,
        ConnectionLost,
        ExecServerError,
        OutputLost,
        ProcessFailed,
        ProtocolError,
        ServerRejected,
        StdinClosed,
        StdinCloseUnsupported,
        TooManyCalls,
        Unsupported,
    )
    from .client.launch import ExecServerLaunchCommand
    from .client.process import RemoteProcess
    from .environments.connect import connect
    from .services import Closed, Completed, Exited, ExitStatus, Failed, Output, Snapshot

__all__ = [
    "Client",
    "Closed",
    "CommunicateTimeout",
    "Completed",
    "ConnectionLost",
    "ExecServerError",
    "ExecServerLaunchCommand",
    "ExitStatus",
    "Exited",
    "Failed",
    "Output",
    "OutputLost",
    "ProcessFailed",
    "ProtocolError",
    "RemoteProcess",
    "ServerRejected",
    "Snapshot",
    "StdinCloseUnsupported",
    "StdinClosed",
    "TooManyCalls",
    "Unsupported",
    "__version__",
    "connect",
]

_HOMES = {
    "Client": "client.client",
    "ExecServerLaunchCommand": "client.launch",
    "RemoteProcess": "client.process",
    "connect": "environments.connect",
    **dict.fromkeys(
        ("Closed", "Completed", "ExitStatus", "Exited", "Failed", "Output", "Snapshot"), "services"
    ),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{_HOMES.get(name, 'client.errors')}", __name__), name)
    globals()[name] = value
    return value
