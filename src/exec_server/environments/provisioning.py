"""Environments that are announced before they can be reached. Their owner reports; nobody connects before.

    PENDING ──ready──→ READY ──ready (other roots)──→ READY
       └────failed───→ FAILED ──failed──→ FAILED (the first reason stays)

Everything else is an error of the owner, and said to it.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Sequence
from typing import Final

from ..client.errors import ExecServerError
from .entries import ConfigurationError
from .roots import SelectedRoot

__all__ = ["MAX_REPORTED_ROOTS", "TRANSITIONS", "EnvironmentUnavailable", "Provision", "Stage", "check_roots"]

MAX_REPORTED_ROOTS: Final = 256
"""Roots in one report; the reference's bound."""


class EnvironmentUnavailable(ExecServerError):
    """The owner of the environment has said that it will not come."""

    retryable = False


class Stage(enum.Enum):
    """What the owner has said so far; the values are the reports that lead there."""

    PENDING = "pending"
    READY = "ready"
    FAILED = "failed"


TRANSITIONS: Final[dict[Stage, dict[Stage, Stage]]] = {
    Stage.PENDING: {Stage.READY: Stage.READY, Stage.FAILED: Stage.FAILED},
    Stage.READY: {Stage.READY: Stage.READY},
    Stage.FAILED: {Stage.FAILED: Stage.FAILED},
}
"""By stage and report, the next stage. What is missing is refused with words of its own."""


class Provision:
    """What the owner of one environment has said of it."""

    def __init__(self, environment_id: str) -> None:
        self._id = environment_id
        self._waiting: set[asyncio.Future[None]] = set()
        self.stage = Stage.PENDING
        self.roots: tuple[SelectedRoot, ...] = ()
        """The roots of the newest report."""
        self.error: EnvironmentUnavailable | None = None
        """What everybody who waits is told, if it failed."""
        self._reason = ""

    def report_ready(self, roots: Sequence[SelectedRoot]) -> None:
        """It can be reached, and has these roots. Bad roots fail it if nothing was reported before."""
        if Stage.READY not in TRANSITIONS[self.stage]:
            raise ConfigurationError(f"environment `{self._id}` provisioning already failed: {self._reason}")
        try:
            check_roots(self._id, roots)
        except ConfigurationError as error:
            if self.stage is Stage.PENDING:
                self.report_failed(error.reason)
            raise
        self.roots = tuple(roots)
        self._arrive(Stage.READY)

    def report_failed(self, reason: str) -> None:
        """It will not come."""
        if Stage.FAILED not in TRANSITIONS[self.stage]:
            raise ConfigurationError(
                f"environment `{self._id}` is already ready, but a later provisioning report failed: {reason}"
            )
        if self.error is None:
            self._reason = reason
            self.error = EnvironmentUnavailable(f"environment unavailable: {reason}")
        self._arrive(Stage.FAILED)

    async def reported(self) -> None:
        """Wait for the first report; raises if it says that the environment will not come."""
        if self.stage is Stage.PENDING:
            waiting = asyncio.get_running_loop().create_future()
            self._waiting.add(waiting)
            try:
                await waiting
            finally:
                self._waiting.discard(waiting)
        if self.error is not None:
            raise self.error

    def _arrive(self, report: Stage) -> None:
        self.stage = TRANSITIONS[self.stage][report]
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)


def check_roots(environment_id: str, roots: Sequence[SelectedRoot]) -> None:
    """Refuse roots that no report may have."""
    if len(roots) > MAX_REPORTED_ROOTS:
        raise ConfigurationError(
            f"environment ready info contains more than {MAX_REPORTED_ROOTS} selected capability roots"
        )
    ids = {root.id for root in roots if root.id.strip() and root.environment_id == environment_id}
    if len(ids) != len(roots):
        raise ConfigurationError(
            "selected capability roots must have unique non-empty IDs and belong to environment"
            f" `{environment_id}`"
        )
