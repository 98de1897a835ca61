"""What one step of a model works with: each selected environment, and the exact handle that was ready.

A turn fixes which environments it uses when it begins. A step captures which of them are ready, together
with the very handles it saw ready, and never looks again: whatever is registered meanwhile, "it was ready"
and "this is what to use" speak of one object. A later step of the turn may have more, never another handle.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from .. import log
from ..client.errors import ExecServerError
from ..services import Shell
from .handle import Handle
from .readiness import ATTEMPTING, Readiness
from .roots import ResolvedRoot, SelectedRoot, combine

if TYPE_CHECKING:
    from .manager import EnvironmentManager

__all__ = [
    "ReadyEnvironment",
    "Selection",
    "StartingEnvironment",
    "Step",
    "ThreadEnvironments",
    "Turn",
    "capture",
]


class Selection(Struct, frozen=True):
    """An environment that a turn uses, and where in it."""

    environment_id: str
    cwd: str | None = None
    workspace_roots: tuple[str, ...] = ()
    configured_by_thread: bool = False
    """The thread itself set the environment up, so what that reports about the thread's roots is right."""


class ReadyEnvironment(Struct, frozen=True):
    """An environment that was ready in a step, through this very handle."""

    selection: Selection
    handle: Handle
    shell: Shell | None
    """None where the machine did not say."""


class StartingEnvironment(Struct, frozen=True):
    """An environment that was still starting; in this step it stays that way."""

    selection: Selection


class Step:
    """One step's view. Never changes."""

    def __init__(self, environments: Iterable[ReadyEnvironment | StartingEnvironment]) -> None:
        self.environments = tuple(environments)
        self.captured: Mapping[str, Handle | None] = MappingProxyType(
            {
                entry.selection.environment_id: entry.handle if isinstance(entry, ReadyEnvironment) else None
                for entry in self.environments
            }
        )
        """By id the handle that was ready, or None for what was still starting."""

    @property
    def ready(self) -> list[ReadyEnvironment]:
        """What can be used, in the order of selection."""
        return [entry for entry in self.environments if isinstance(entry, ReadyEnvironment)]

    @property
    def primary(self) -> ReadyEnvironment | None:
        """What is used when a call names no environment."""
        return next(iter(self.ready), None)

    async def resolve_roots(
        self, manager: EnvironmentManager, own: Sequence[SelectedRoot]
    ) -> list[ResolvedRoot[Handle]]:
        """What this step can have of the thread's roots and of those its environments report."""
        reported = [
            (entry.handle.selected_capability_roots(), entry.selection.configured_by_thread)
            for entry in self.ready
        ]
        return await manager.resolve_selected_capability_roots(combine(own, reported), self.captured)


class _Verdict(enum.Enum):
    PENDING = "pending"
    READY = "ready"
    FAILED = "failed"


_VERDICTS: Final[dict[Readiness, _Verdict]] = {
    Readiness.NOT_STARTED: _Verdict.PENDING,
    **dict.fromkeys(ATTEMPTING, _Verdict.PENDING),
    Readiness.READY: _Verdict.READY,
    Readiness.UNREACHABLE: _Verdict.FAILED,
    Readiness.FAILED: _Verdict.FAILED,
    Readiness.CLOSED: _Verdict.FAILED,
}
"""What a handle's state means to a selection that waits for it. READY and FAILED are final for the turn."""


class _Resolution:
    """One selection on its way to a verdict, through the one handle it was given."""

    def __init__(self, selection: Selection, handle: Handle) -> None:
        self.selection = selection
        self.handle = handle
        self.verdict = _Verdict.PENDING
        self.shell: Shell | None = None
        if not handle.is_local:
            handle.start()

    def look(self) -> _Verdict:
        if self.verdict is _Verdict.PENDING:
            self._decide(_Verdict.READY if self.handle.is_local else _VERDICTS[self.handle.state])
        return self.verdict

    async def wait(self) -> None:
        if self.look() is _Verdict.PENDING:
            try:
                await self.handle.wait_until_ready()
            except (ExecServerError, OSError) as error:
                log.debug("environment left out", environment=self.selection.environment_id, error=str(error))
                self._decide(_Verdict.FAILED)
            else:
                self._decide(_Verdict.READY)

    def _decide(self, verdict: _Verdict) -> None:
        self.verdict = verdict
        if verdict is _Verdict.READY:
            self.shell = self._ask_shell()

    def _ask_shell(self) -> Shell | None:
        environment = self.handle.environment_now()
        if environment is not None:
            return environment.info.shell
        if self.handle.is_local:
            from ..local.info import login_shell

            shell = login_shell()
            return Shell(shell.name, shell.path)
        return None


class Turn:
    """The environments of one turn, in their order. Made by `ThreadEnvironments.begin_turn`."""

    def __init__(self, resolutions: Sequence[_Resolution]) -> None:
        self._resolutions = resolutions

    async def capture(self, *, wait: bool = True) -> Step:
        """What a step that begins now works with.

        With `wait`, every selected environment has had its say. Without, those that are still starting are
        captured as such. What failed is left out, now and for the rest of the turn.
        """
        entries: list[ReadyEnvironment | StartingEnvironment] = []
        if wait:
            for resolution in self._resolutions:
                await resolution.wait()
        for resolution in self._resolutions:
            verdict = resolution.look()
            if verdict is _Verdict.READY:
                entries.append(ReadyEnvironment(resolution.selection, resolution.handle, resolution.shell))
            elif verdict is _Verdict.PENDING:
                entries.append(StartingEnvironment(resolution.selection))
        return Step(entries)


class ThreadEnvironments:
    """The environments of a thread from turn to turn.

    `on_connection` is told the id and whether there is a connection, at every change from the selection of
    an environment on, for as long as it is selected.
    """

    def __init__(
        self, manager: EnvironmentManager, on_connection: Callable[[str, bool], None] | None = None
    ) -> None:
        self._manager = manager
        self._on_connection = on_connection
        self._kept: dict[Selection, _Resolution] = {}
        self._subscriptions: dict[_Resolution, Callable[[], None]] = {}

    def begin_turn(self, selections: Iterable[Selection]) -> Turn:
        """Fix the environments of a turn.

        A selection that is the same as in the last turn keeps its handle unless that failed; any other gets
        the one that is registered now. Of an id that comes twice the first counts; one that nobody knows is
        skipped.
        """
        resolutions: dict[str, _Resolution] = {}
        for selection in selections:
            name = selection.environment_id
            if name in resolutions:
                continue
            kept = self._kept.get(selection)
            if kept is None or kept.look() is _Verdict.FAILED:
                handle = self._manager.get_environment(name)
                if handle is None:
                    log.warning("unknown environment is skipped", environment=name)
                    continue
                kept = _Resolution(selection, handle)
            resolutions[name] = kept
        self._keep(resolutions.values())
        return Turn(list(resolutions.values()))

    def close(self) -> None:
        """Let go of every handle. Turns and steps that are under way keep theirs."""
        self._keep(())

    def _keep(self, resolutions: Collection[_Resolution]) -> None:
        self._kept = {resolution.selection: resolution for resolution in resolutions}
        for dropped in self._subscriptions.keys() - set(resolutions):
            self._subscriptions.pop(dropped)()
        if self._on_connection is not None:
            for resolution in resolutions:
                if resolution not in self._subscriptions:
                    tell = partial(self._on_connection, resolution.selection.environment_id)
                    self._subscriptions[resolution] = resolution.handle.on_connection(tell)


async def capture(manager: EnvironmentManager, environment_ids: Iterable[str], *, wait: bool = False) -> Step:
    """A step without a thread: what the registry has now."""
    thread = ThreadEnvironments(manager)
    return await thread.begin_turn(Selection(name) for name in environment_ids).capture(wait=wait)
