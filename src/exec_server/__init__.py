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
    from .agent.thread import Threads
    from .client.client import Client
    from .client.errors import (
        CommunicateTimeout,
        ConnectionLost,
        ExecServerError,
        HttpFailed,
        OutputLost,
        ProcessFailed,
        ProtocolError,
        Recovering,
        RemoteFileError,
        RemoteFileExists,
        RemoteFileNotFound,
        RemoteIsADirectory,
        RemoteNotADirectory,
        RemotePermissionDenied,
        ServerRejected,
        SessionLost,
        StdinClosed,
        StdinCloseUnsupported,
        TooManyCalls,
        TransferFailed,
        Unsupported,
    )
    from .client.launch import ExecServerLaunchCommand
    from .client.process import RemoteProcess
    from .client.sandbox import Sandbox
    from .environments.connect import connect
    from .environments.environment import Environment
    from .environments.manager import EnvironmentManager
    from .environments.roots import SelectedRoot
    from .services import (
        Change,
        Closed,
        Completed,
        DirectoryEntry,
        Exited,
        ExitStatus,
        Failed,
        FileMetadata,
        FilePart,
        Files,
        GlobFound,
        Output,
        SearchFound,
        SearchLine,
        SearchMatch,
        Snapshot,
        Transferred,
        Walked,
        WalkEntry,
        WalkError,
    )

__all__ = [
    "Change",
    "Client",
    "Closed",
    "CommunicateTimeout",
    "Completed",
    "ConnectionLost",
    "DirectoryEntry",
    "Environment",
    "EnvironmentManager",
    "ExecServerError",
    "ExecServerLaunchCommand",
    "ExitStatus",
    "Exited",
    "Failed",
    "FileMetadata",
    "FilePart",
    "Files",
    "GlobFound",
    "HttpFailed",
    "Output",
    "OutputLost",
    "ProcessFailed",
    "ProtocolError",
    "Recovering",
    "RemoteFileError",
    "RemoteFileExists",
    "RemoteFileNotFound",
    "RemoteIsADirectory",
    "RemoteNotADirectory",
    "RemotePermissionDenied",
    "RemoteProcess",
    "Sandbox",
    "SearchFound",
    "SearchLine",
    "SearchMatch",
    "SelectedRoot",
    "ServerRejected",
    "SessionLost",
    "Snapshot",
    "StdinCloseUnsupported",
    "StdinClosed",
    "Threads",
    "TooManyCalls",
    "TransferFailed",
    "Transferred",
    "Unsupported",
    "WalkEntry",
    "WalkError",
    "Walked",
    "__version__",
    "connect",
]

_HOMES = {
    "Client": "client.client",
    "ExecServerLaunchCommand": "client.launch",
    "RemoteProcess": "client.process",
    "Sandbox": "client.sandbox",
    "connect": "environments.connect",
    "Environment": "environments.environment",
    "EnvironmentManager": "environments.manager",
    "SelectedRoot": "environments.roots",
    "Threads": "agent.thread",
    **dict.fromkeys(
        (
            "Change",
            "Closed",
            "Completed",
            "DirectoryEntry",
            "Exited",
            "ExitStatus",
            "Failed",
            "FileMetadata",
            "FilePart",
            "Files",
            "GlobFound",
            "Output",
            "SearchFound",
            "SearchLine",
            "SearchMatch",
            "Snapshot",
            "Transferred",
            "Walked",
            "WalkEntry",
            "WalkError",
        ),
        "services",
    ),
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{_HOMES.get(name, 'client.errors')}", __name__), name)
    globals()[name] = value
    return value
