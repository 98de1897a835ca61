"""The machines of a step: which there are, where a path of a call is, and what may be touched there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..environments.manager import DISABLED_TEXT
from .confinement import Confinement, Mode
from .exec import ToolError, directory

if TYPE_CHECKING:
    from ..environments.environment import Environment

__all__ = ["Machines"]


class Machines:
    """`ready` and `cwds` are looked up with every call: a step changes them."""

    def __init__(
        self,
        ready: Mapping[str, Environment],
        cwds: Mapping[str, str],
        *,
        mode: Mode = "read-only",
        writable: Sequence[str] = (),
        network: bool = False,
    ) -> None:
        self.ready = ready
        self.mode: Mode = mode
        self._cwds = cwds
        self._writable = writable
        self._network = network

    @property
    def primary(self) -> str:
        """The one that is meant where a call names none."""
        return next(iter(self.ready), "")

    def find(self, name: str) -> Environment:
        """A machine by its name; ToolError if it is not there in this step."""
        machine = self.ready.get(name)
        if machine is not None:
            return machine
        if not self.ready:
            raise ToolError(DISABLED_TEXT)
        raise ToolError(f"unknown turn environment id `{name}`")

    def cwd(self, name: str) -> str:
        """The directory of the thread there, as a URI."""
        return self._cwds.get(name) or self.find(name).info.cwd or "file:///"

    def place(self, path: str | None, name: str, base: str | None = None) -> str:
        """A path of a call as a URI: relative to the directory of the thread, or to `base`."""
        cwd = base or self.cwd(name)
        if not path:
            return cwd
        try:
            self.find(name)
            return directory(path, cwd)
        except Exception as error:
            raise ToolError(f"exec_command failed: workdir {path!r}: {error}") from None

    def confinement(self, name: str) -> Confinement:
        """What may be touched on a machine."""
        return Confinement(self.mode, self.cwd(name), writable=self._writable, network=self._network)
