"""What a model's commands and edits may touch: a mode, as the sandbox that the machine enforces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal, get_args

from msgspec.structs import asdict

from ..wire.uri import ForeignPath, native_path, parse
from .exec import DirectExec, ExecCommand, ExecRequest, PreparedExec

if TYPE_CHECKING:
    from ..client.files import RemoteFiles
    from ..environments.environment import Environment
    from ..wire.sandbox import SandboxContext

__all__ = ["MODES", "Confinement", "Mode"]

Mode = Literal["read-only", "workspace-write", "danger-full-access"]

MODES: Final[tuple[Mode, ...]] = get_args(Mode)


class Confinement:
    """One mode for everything that is done on one machine, in one directory.

    With `danger-full-access` nothing is asked of the machine. Any other mode is enforced by it: a server that
    cannot, refuses to run anything.
    """

    def __init__(self, mode: Mode, cwd: str, *, writable: Sequence[str] = (), network: bool = False) -> None:
        """`cwd` is a `file:` URI; `writable` are paths of the machine that may be written besides."""
        from ..client.sandbox import Sandbox

        self.mode = mode
        self.sandbox: SandboxContext | None = None
        if mode == "read-only":
            self.sandbox = Sandbox.read_only(network=network)
        elif mode == "workspace-write":
            self.sandbox = Sandbox.workspace_write(cwd, writable=writable, network=network)

    def files(self, environment: Environment) -> RemoteFiles:
        """The machine's files as far as the mode goes."""
        files = environment.files
        return files if self.sandbox is None else files.under(self.sandbox)

    async def prepare(self, request: DirectExec, call: ExecCommand) -> ExecRequest:
        """A command as it is to be started; for UnifiedExec."""
        del call
        return self.confined(request)

    def confined(self, request: DirectExec) -> ExecRequest:
        """The same, without a call."""
        if self.sandbox is None:
            return request
        return PreparedExec(**asdict(request), sandbox=self.sandbox)


def shown(uri: str) -> str:
    """A directory for people and models: its path, or the URI where that is of another kind of machine."""
    try:
        return native_path(parse(uri))
    except ForeignPath:
        return uri
