"""A connection that is lost meanwhile: told on the terminal, and that it is back."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from ..client.recovery import State
from .starting import QUIET_SECONDS

if TYPE_CHECKING:
    from ..client.session import Session

__all__ = ["outages_told"]


@contextmanager
def outages_told(session: Session) -> Iterator[None]:
    """Tell whoever looks at a terminal why nothing moves. Nothing is told in a pipe, and nothing of what is
    over before anybody could have noticed: it would only disturb what the command paints."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    outage = _Outage()
    stop = session.on_state(outage.look)
    try:
        yield
    finally:
        stop()
        outage.forget()


class _Outage:
    """What was told, and what is about to be."""

    def __init__(self) -> None:
        self._soon: asyncio.TimerHandle | None = None
        self._told = False

    def look(self, state: State) -> None:
        """The connection is in another state."""
        self.forget()
        if state is State.RECOVERING:
            self._soon = asyncio.get_running_loop().call_later(QUIET_SECONDS, self._tell)
        elif state is State.CONNECTED and self._told:
            self._told = False
            _say("connected again")

    def forget(self) -> None:
        """What has not been told yet need not be."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None

    def _tell(self) -> None:
        self._told = True
        _say("connection lost; making it again …")


def _say(text: str) -> None:
    """On a line of its own, also on a terminal that is in raw mode."""
    click.echo(f"\r\nexec-server: {text}\r\n", nl=False, err=True)
