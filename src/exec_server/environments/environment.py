"""The one object: a machine's processes, files, HTTP and facts, wherever that machine is.

There is one implementation. A machine across a connection is spoken to; this machine is spoken to as well,
through a private server on stdio or one inside this process, so that nothing behaves differently at home.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from ..client.client import Client, ConnectOptions, Dialer
from ..client.errors import Unsupported
from ..wire.config import ConfigReadResult
from ..wire.environment import EnvironmentStatus

if TYPE_CHECKING:
    from .. import services
    from ..client.files import RemoteFiles
    from ..client.http import RemoteHttp
    from .connect import Connecting, Target

__all__ = ["Environment", "HeldEnvironment", "dialed"]


FOR_RIDERS: Final = frozenset(
    (
        "binary_files",
        "call_for_part",
        "call_until_answered",
        "forget",
        "hung_up",
        "listen",
        "losses",
        "on_close",
        "open",
        "put_block",
        "stands_for",
        "tell",
    )
)
"""What files, processes and HTTP need of a session, and nobody else."""


class Environment(Client):
    """A `services.Environment`, and the session behind it. Made by `Environment.connect`.

    What the protocol says in its own words (`call`, `has`, `session_id`, `state`) comes from the session.
    """

    def __init__(self, options: ConnectOptions, address: str, *, remote: bool) -> None:
        super().__init__(options)
        self.address = address
        """Where it is, for messages: a URL, or the words of a command."""
        self._remote = remote

    @staticmethod
    def connect(target: Target = None, **options: Any) -> Connecting:
        """The same as `exec_server.connect`, under the name of what it gives."""
        from .connect import connect

        return connect(target, **options)

    @property
    def is_remote(self) -> bool:
        return self._remote

    @property
    def processes(self) -> Environment:
        """Its processes: `start`, `run` and `list`, which are here under their own names as well."""
        return self

    async def check(self, timeout: float = 10.0) -> None:
        """Ask whether it is there; raises what is wrong, also while a lost connection is being repaired."""
        with self.fail_fast():
            await self.call("environment/status", None, EnvironmentStatus, timeout)

    async def read_config(
        self,
        cwd: str,
        config_paths: Sequence[Sequence[str]],
        requirements_paths: Sequence[Sequence[str]] = (),
    ) -> ConfigReadResult:
        """Parts of the configuration files that apply in a directory (a path or a `file:` URI)."""
        if not self.has("environmentConfigRead"):
            raise Unsupported("this server does not read its configuration files for others")
        params = {
            "cwd": self.files.uri(cwd),
            "configPaths": [list(path) for path in config_paths],
            "requirementsPaths": [list(path) for path in requirements_paths],
        }
        return await self.call("environmentConfig/read", params, ConfigReadResult)

    def __dir__(self) -> list[str]:
        """What is for callers. The rest is for the parts of this library that ride on a session."""
        return [name for name in super().__dir__() if name not in FOR_RIDERS]

    def __repr__(self) -> str:
        return f"<Environment {self.address} {self.state.value}>"


class HeldEnvironment(Environment):
    """An environment as its handle gives it out: the same one, and who holds it holds the handle.

    Its state is that of the environment it stands for, whose connection cannot know who else wants it. A
    process that was started here holds it as well, until it has ended.
    """

    __slots__ = ("_held_by", "stands_for")

    def __init__(self, environment: Environment, holder: object) -> None:  # its state is there already
        self.__dict__ = environment.__dict__
        self.stands_for = environment
        self._held_by = holder

    # These listen to the connection, which must not hold the handle.

    @property
    def files(self) -> RemoteFiles:
        """The files of the machine."""
        return self.stands_for.files

    @property
    def http(self) -> RemoteHttp:
        """HTTP requests made from the machine."""
        return self.stands_for.http


async def dialed(dial: Dialer, address: str, options: ConnectOptions | None = None) -> Environment:
    """An environment over whatever the dialer opens, e.g. a relay's stream, or a socket that was accepted.

    The dialer is called again when the connection is lost, if the channel says that it can be resumed.
    `address` is for messages. `options.backoff` says how long to wait between attempts.
    """
    environment = Environment(options or ConnectOptions(), address, remote=True)
    await environment.open(dial)
    return environment


if TYPE_CHECKING:
    _IS_COMPLETE: type[services.Environment] = Environment
