"""What each step of a turn works with: the machines that are ready, and what the model is told of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date
from typing import TYPE_CHECKING, Any

from .. import log
from ..client.errors import ExecServerError
from ..environments.metadata import MetadataCache
from ..environments.snapshot import Selection, Step, ThreadEnvironments, Turn
from ..wire.uri import path_to_uri
from .context import environment_context, instructions, message, project_instructions, skills_context
from .home import home_instructions, home_skills

if TYPE_CHECKING:
    from ..environments.environment import Environment
    from ..environments.manager import EnvironmentManager
    from ..environments.metadata import RootMetadata
    from .confinement import Mode
    from .thread import Thread

__all__ = ["Steps"]


class Steps:
    """The steps of a thread. `ready` and `cwds` are those of the present one."""

    def __init__(
        self,
        manager: EnvironmentManager,
        thread: Thread,
        names: tuple[str, ...],
        cwd: str | None,
        mode: Mode,
        *,
        connection_changed: Callable[[str, bool], None],
        home: str | None = None,
    ) -> None:
        """`home` is where the user's own instructions and skills are."""
        self._manager = manager
        self._thread = thread
        self._names = names
        self._cwd = cwd
        self._mode: Mode = mode
        self._own = home_instructions(home) if home is not None else None
        self._skills = home_skills(home) if home is not None else []
        self._environments = ThreadEnvironments(manager, connection_changed)
        self._metadata = MetadataCache()
        self._project: str | None = None
        self._project_read = False
        self._turn: Turn | None = None
        self.ready: dict[str, Environment] = {}
        self.cwds: dict[str, str] = {}

    def close(self) -> None:
        """Let go of the environments."""
        self._environments.close()

    async def begin_turn(self, warn: Callable[[str], None]) -> None:
        """The first environment gets the time it needs; the others come when they are ready."""
        self._turn = self._environments.begin_turn([Selection(name) for name in self._names])
        for name in self._names[:1]:
            handle = self._manager.get_environment(name)
            if handle is None:
                continue
            try:
                await handle.environment()
            except (ExecServerError, OSError) as error:
                log.info("environment cannot be used", environment=name, error=str(error))
                warn(f"environment `{name}` cannot be used: {error}")

    async def next(self) -> list[dict[str, Any]]:
        """Begin a step: what the model is told in it before the conversation.

        The tools find the same machines until the next.
        """
        if self._turn is None:
            raise RuntimeError("there is no turn: call begin_turn first")
        step = await self._turn.capture(wait=False)
        machines: dict[str, Environment] = {}
        for entry in step.ready:
            name = entry.selection.environment_id
            try:
                machines[name] = await entry.handle.environment()
            except (ExecServerError, OSError) as error:
                log.info("environment left out of a step", environment=name, error=str(error))
                continue
            self.cwds.setdefault(name, self._cwd_of(name, machines[name]))
        self.ready.clear()
        self.ready.update(machines)
        return await self._context(step)

    def _cwd_of(self, name: str, machine: Environment) -> str:
        chosen = self._cwd
        if chosen is not None and name == self._names[0]:
            return chosen if chosen.startswith("file:") else path_to_uri(chosen)
        return machine.info.cwd or "file:///"

    async def _context(self, step: Step) -> list[dict[str, Any]]:
        said: list[dict[str, Any]] = []
        primary = next(iter(self.ready), None)
        if primary is not None and not self._project_read:
            self._project_read = True
            self._project = await project_instructions(self.ready[primary].files, self.cwds[primary])
        if self._own is not None:
            said.append(message("user", instructions(self._own)))
        if self._project is not None:
            said.append(message("user", self._project))
        if self.ready:
            now = environment_context(step, self.cwds, self._mode, date.today())  # noqa: DTZ011  # the user's day
            said.append(message("user", now))
        resolved = await step.resolve_roots(self._manager, self._thread.roots)
        found: Sequence[RootMetadata] = ()
        if resolved:
            handles = {root.root.environment_id: root.handle for root in resolved}
            found = await self._metadata.get([root.root for root in resolved], handles.get)
        # The user's own are files of this machine; on another one nobody could read them.
        here = any(not machine.is_remote for machine in self.ready.values())
        skills = skills_context(found, self._skills if here else ())
        if skills is not None:
            said.append(message("developer", skills))
        return said
