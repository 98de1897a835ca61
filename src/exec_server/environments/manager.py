"""The registry of environments: an id, and the handle that is current for it.

One id always names the same machine with the same contents; its handle may be replaced at any time. Whoever
captured the old handle goes on with it, and what is known by id (roots, metadata) stays valid.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Final, Self
from weakref import WeakSet

from .. import log
from ..client.errors import ExecServerError
from ..services import EnvironmentFacts
from .config import LOCAL_ID, Configuration
from .entries import (
    DEFAULT_TIMEOUT_SECONDS,
    CommandTransport,
    ConfigurationError,
    NamedEnvironment,
    WebsocketTransport,
    is_disabled,
)
from .handle import Handle, ObservedStatus, Opener
from .opening import local_opener, opener_for
from .provisioning import Provision, check_roots
from .roots import Outcome, ResolvedRoot, SelectedRoot, candidates

__all__ = ["DISABLED_TEXT", "EnvironmentManager"]

DISABLED_TEXT: Final = (
    "No usable execution environment is available. Wait for an environment to become available before using"
    " this tool."
)
"""What tools answer when there is no environment to use."""


class EnvironmentManager:
    """Every environment there is. Make it inside a running event loop, from what `config.load` returned.

    Whatever connects on its own account begins at once, if nothing is wrong with the whole configuration.
    """

    def __init__(
        self,
        configuration: Configuration | None = None,
        *,
        local: Callable[[], Opener | None] = local_opener,
    ) -> None:
        configuration = configuration or Configuration()
        self._handles: dict[str, Handle] = {}
        self._made: WeakSet[Handle] = WeakSet()
        self._default = configuration.default
        self._closed = False
        _check_ids(configuration)
        if configuration.include_local:
            opener = local()
            if opener is None:
                raise ConfigurationError("local environment requires configured runtime paths")
            self._register(Handle(LOCAL_ID, opener, local=True))
        for entry in configuration.environments:
            self._register(_handle(entry))
        for handle in self._handles.values():
            if not handle.lazy:
                handle.start()

    # Looking -------------------------------------------------------------------------------------

    @property
    def handles(self) -> Mapping[str, Handle]:
        """The current handles by id, in the order in which the ids were registered. Changes as they do."""
        return MappingProxyType(self._handles)

    def default_environment_id(self) -> str | None:
        """The id to use when none is named; None when that is disabled."""
        return self._default

    def default_environment(self) -> Handle | None:
        """The handle to use when none is named."""
        return None if self._default is None else self._handles[self._default]

    def default_environment_ids(self) -> list[str]:
        """The default first, then every other; nothing when there is no default."""
        if self._default is None:
            return []
        return [self._default, *(name for name in self._handles if name != self._default)]

    def get_environment(self, environment_id: str) -> Handle | None:
        """The current handle."""
        return self._handles.get(environment_id)

    def try_local_environment(self) -> Handle | None:
        """This machine, if it is one of the environments."""
        return self._handles.get(LOCAL_ID)

    async def get_environment_status(self, environment_id: str) -> ObservedStatus:
        """What is known of it. Never starts, waits for or repairs anything."""
        handle = self._handles.get(environment_id)
        if handle is None:
            return ObservedStatus("unknown", f"unknown environment id `{environment_id}`")
        return await handle.status()

    async def get_environment_info(self, environment_id: str) -> EnvironmentFacts:
        """What the machine says of itself; starts it if need be."""
        handle = self._handles.get(environment_id)
        if handle is None:
            raise ConfigurationError(f"unknown environment id `{environment_id}`")
        try:
            return (await handle.environment()).info
        except (ExecServerError, OSError) as error:
            raise ExecServerError(
                f"failed to get info for environment `{environment_id}`: {error}"
            ) from error

    # Changing ------------------------------------------------------------------------------------

    def upsert_environment(
        self, environment_id: str, url: str, connect_timeout: float | None = None
    ) -> Handle:
        """Add an environment, or replace the handle of one; the default stays what it is.

        The new handle connects at once. The old one goes on for whoever holds it.
        """
        self._check_open()
        _check_id(environment_id)
        if is_disabled(url):
            raise ConfigurationError("remote environment cannot use disabled exec-server url")
        if not url.strip():
            raise ConfigurationError("remote environment requires an exec-server url")
        timeout = DEFAULT_TIMEOUT_SECONDS if connect_timeout is None else connect_timeout
        if isinstance(timeout, bool) or not isinstance(timeout, int | float):
            raise TypeError(f"connect_timeout is a number of seconds, not {timeout!r}")
        if not 0 <= timeout < math.inf:
            raise ValueError(f"connect_timeout is a number of seconds, 0 or more, not {timeout!r}")
        transport = WebsocketTransport(url=url.strip(), connect_timeout=timeout)
        handle = self._register(Handle(environment_id, opener_for(transport)))
        handle.start()
        return handle

    def replace(self, handle: Handle) -> None:
        """Register a handle of the caller's own making, e.g. for a socket that somebody handed over."""
        self._check_open()
        _check_id(handle.id)
        self._register(handle)
        if not handle.lazy:
            handle.start()

    def materialize_pending(self, environment_id: str, opener: Opener) -> Handle:
        """Announce an environment; it is connected to when it is used and its owner has reported."""
        self._check_open()
        known = self._handles.get(environment_id)
        if known is None:
            _check_id(environment_id)
            provision = Provision(environment_id)
            return self._register(Handle(environment_id, opener, provision=provision))
        if known.provision is None:
            raise ConfigurationError(
                f"environment `{environment_id}` is already registered with a different provisioning mode"
            )
        return known

    def report_ready(
        self, environment_id: str, roots: Sequence[SelectedRoot], opener: Opener
    ) -> Handle | None:
        """Its owner says that it can be reached. None, and nothing done, for an ordinary environment."""
        known = self._handles.get(environment_id)
        if known is None:
            check_roots(environment_id, roots)
            known = self.materialize_pending(environment_id, opener)
        if known.provision is None:
            return None
        try:
            known.provision.report_ready(roots)
        finally:
            if known.provision.error is not None:
                known.fail(known.provision.error)
        return known

    def report_failed(self, environment_id: str, reason: str, opener: Opener) -> Handle | None:
        """Its owner says that it will not come. None, and nothing done, for an ordinary environment."""
        known = self._handles.get(environment_id)
        if known is None:
            known = self.materialize_pending(environment_id, opener)
        if known.provision is None:
            return None
        known.provision.report_failed(reason)
        if known.provision.error is not None:
            known.fail(known.provision.error)
        return known

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigurationError("the registry of environments is closed")

    def _register(self, handle: Handle) -> Handle:
        self._handles[handle.id] = handle
        self._made.add(handle)
        return handle

    # Capability roots ----------------------------------------------------------------------------

    async def resolve_selected_capability_roots(
        self, roots: Iterable[SelectedRoot], captured: Mapping[str, Handle | None]
    ) -> list[ResolvedRoot[Handle]]:
        """What a step that captured these handles can have of the roots, in their order.

        Reads no file. An environment that the step did not capture is asked to start if it has not, for the
        sake of a later step; one whose start has failed but may be tried again is tried, once.
        """
        found = candidates(roots, captured, self._handles, Handle.startup_finished)
        asked: dict[str, Handle] = {}
        for candidate in found:
            if candidate.outcome is Outcome.ASK_TO_START:
                candidate.handle.start()
            elif candidate.outcome is Outcome.USE_IF_READY:
                asked[candidate.root.environment_id] = candidate.handle
        verdicts = await asyncio.gather(*(_is_ready(handle) for handle in asked.values()))
        good = {name for name, verdict in zip(asked, verdicts, strict=True) if verdict}
        return [
            ResolvedRoot(candidate.root, candidate.handle)
            for candidate in found
            if candidate.outcome is Outcome.USE or candidate.root.environment_id in good
        ]

    def inspect_selected_capability_roots(
        self, roots: Sequence[SelectedRoot]
    ) -> tuple[list[ResolvedRoot[Handle]], list[str]]:
        """The roots that are ready at this moment, and what is wrong. Starts and waits for nothing."""
        warnings = [
            f"selected capability root `{root.id}` references unavailable environment `{root.environment_id}`"
            for root in roots
            if root.environment_id not in self._handles
        ]
        ready: list[ResolvedRoot[Handle]] = []
        told: set[str] = set()
        for root in roots:
            name = root.environment_id
            handle = self._handles.get(name)
            verdict = None if handle is None else handle.readiness()
            if handle is not None and verdict == "ready":
                ready.append(ResolvedRoot(root, handle))
            elif isinstance(verdict, BaseException) and name not in told:
                told.add(name)
                warnings.append(f"selected capability environment `{name}` is unavailable: {verdict}")
        return ready, warnings

    # The end -------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Close every handle that was ever registered and still exists, and end what runs there."""
        self._closed = True
        handles = list(self._made)
        self._handles.clear()
        self._default = None
        for outcome in await asyncio.gather(*(handle.close() for handle in handles), return_exceptions=True):
            if isinstance(outcome, BaseException):
                log.warning("an environment did not close well", error=str(outcome))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


def _handle(entry: NamedEnvironment) -> Handle:
    if isinstance(entry.transport, CommandTransport):
        # A program is started when it is needed, and cannot be resumed when it has died.
        return Handle(entry.id, opener_for(entry.transport), lazy=True, reconnects=False)
    return Handle(entry.id, opener_for(entry.transport))


def _check_ids(configuration: Configuration) -> None:
    taken = {LOCAL_ID} if configuration.include_local else set()
    for entry in configuration.environments:
        _check_id(entry.id)
        if entry.id in taken:
            raise ConfigurationError(f"environment id `{entry.id}` is duplicated")
        taken.add(entry.id)
    if configuration.default is not None and configuration.default not in taken:
        raise ConfigurationError(f"default environment `{configuration.default}` is not configured")


def _check_id(environment_id: str) -> None:
    if not environment_id:
        raise ConfigurationError("environment id cannot be empty")
    if environment_id == LOCAL_ID:
        raise ConfigurationError(f"environment id `{LOCAL_ID}` is reserved for EnvironmentManager")


async def _is_ready(handle: Handle) -> bool:
    try:
        await handle.wait_until_ready()
    except (ExecServerError, OSError):
        return False
    return True
