"""The server itself: what its connections share, and how it ends. Knows nothing of sockets."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Final

from msgspec import Raw
from msgspec.json import encode

from ..limits import Limits
from ..local.process.machine import ProcessMachine
from ..local.worker import Worker
from ..loop import Loop
from ..transport.channel import Channel
from ..version import __version__
from .connection import Connection
from .linger import Linger
from .metrics import Metrics
from .session import SessionRegistry

if TYPE_CHECKING:
    from ..local.http import LocalHttp
    from ..local.sandbox.files import SandboxedFiles
    from .background import Background

__all__ = ["CAPABILITIES", "Server"]

CAPABILITIES: Final = {
    # The reference's flags. A client uses what is announced, so what is not done is false.
    "networkProxyLaunch": False,
    "networkProxyReviewDomains": False,
    "credentialMasking": False,
    "credentialMaskingCustomProviders": False,
    "capabilityDiscoverySandbox": True,
    "fsWatchMissing": True,
    "capabilityDiscoveryV2": True,
    "environmentConfigRead": True,
    "httpHeaderEnvVars": True,
    "sandboxedFileStreaming": True,
    "fileWriteStreaming": True,
    "shellSnapshotV2": False,
    "windowsMxc": False,
    "linuxRootWritePreservesDevices": False,
    "linuxApprovedRootWritePreservesRestrictions": False,
    # Ours.
    "processCloseStdin": True,
    "processResize": True,
    "processPtySize": True,
    "processWait": True,
    "processSnapshot": True,
    "processTerminateModes": True,
    "processSpawnModes": True,
    "processLifecycleEvents": True,
    "processSignals": True,
    "processList": True,
    "processTerminateAll": True,
    "processFlowControl": True,
    "processOutputAcks": True,
    "binaryOutput": True,
    "binaryFiles": True,
    "fsWatch": True,
    "fsMove": True,
    "fsGlob": True,
    "fsSearch": True,
    "fsReadRange": True,
    "fsAtomicStreams": True,
    "fsParts": True,
    "fsListPages": True,
}
"""What `environment/info` announces."""


class Server:
    """Serves this machine to any number of connections."""

    def __init__(self, loop: Loop, limits: Limits | None = None, *, tag_trees: bool = True) -> None:
        self.loop = loop
        self.limits = limits or Limits()
        self.metrics = Metrics()
        self.linger = Linger(loop, self.limits.linger)
        self.machine = ProcessMachine(loop, self.limits, tag_trees=tag_trees)
        self.sessions = SessionRegistry(self.machine, self.metrics)
        self._connections: set[Connection] = set()

    @cached_property
    def environment_info(self) -> Raw:
        """The facts about this machine, encoded once."""
        from ..local.info import environment_info

        return Raw(encode(environment_info(self.limits, CAPABILITIES, __version__)))

    @cached_property
    def background(self) -> Background:
        """Where work that needs asyncio is done."""
        from .background import Background

        return Background(self.loop)

    @cached_property
    def http(self) -> LocalHttp:
        """HTTP requests from this machine, one pool of connections for all."""
        from ..local.http import LocalHttp

        return LocalHttp()

    @cached_property
    def sandboxed_files(self) -> SandboxedFiles:
        """File calls that are done with fewer rights."""
        from ..local.sandbox import first, mountpoints
        from ..local.sandbox.files import SandboxedFiles

        # Names that are covered for a call must not stay when the server ends in the middle of it, or is
        # killed: then its guardian takes them away.
        self.machine.guard.start()
        self.machine.last_thing(first.end_all)
        self.machine.last_thing(mountpoints.release_all)
        return SandboxedFiles(self.machine, self.limits)

    @cached_property
    def files_worker(self) -> Worker:
        """A thread for reading files that may be slow."""
        return Worker(self.loop, "exec-server-files")

    def accept(self, channel: Channel) -> Connection:
        """Serve one more channel; the caller attaches the connection to it as its receiver."""
        connection = Connection(self, channel)
        self._connections.add(connection)
        return connection

    def connection_ended(self, connection: Connection) -> None:
        self._connections.discard(connection)

    def close(self) -> None:
        """End everything: connections are dropped, every process ever started here is killed."""
        for connection in list(self._connections):
            connection.channel.abort()
        made = self.__dict__
        if "sandboxed_files" in made:
            self.sandboxed_files.close()
        self.machine.close()
        if "http" in made:
            self.background.run(self.http.close())
        if "background" in made:
            self.background.close()
        if "files_worker" in made:
            self.files_worker.close()
