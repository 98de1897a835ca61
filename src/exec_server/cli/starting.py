"""An environment by its name, with a line on the terminal for as long as it takes to start."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Final

import click
import msgspec

from .options import fail, read_token, refuse_two_places
from .shown import printable

if TYPE_CHECKING:
    from ..environments.config import Configuration
    from ..environments.environment import Environment
    from ..environments.handle import Handle

__all__ = [
    "QUIET_SECONDS",
    "load_configuration",
    "machine",
    "only",
    "started",
    "unknown_environment",
    "where",
]

QUIET_SECONDS: Final = 0.3
"""What starts faster is not worth a line that flickers."""

PATIENT_SECONDS: Final = 2.0
"""When to write a line where it cannot be taken back: into a log."""

REDRAW_SECONDS: Final = 0.2


def load_configuration() -> Configuration:
    """What is configured; ends the program with the reason if that cannot be read."""
    from ..client.errors import ExecServerError
    from ..environments.config import load

    try:
        return load()
    except (ExecServerError, OSError) as error:
        fail(str(error))


def unknown_environment(configuration: Configuration, name: str) -> str:
    """What to say to somebody who named one that is not there."""
    known = ", ".join(configuration.ids()) or "none"
    source = printable(configuration.source)
    return f"unknown environment id `{printable(name)}`; there are: {known} ({source})"


def only(configuration: Configuration, name: str) -> Configuration:
    """The part of a configuration that is about one environment: the others are not to be connected to."""
    entry = configuration.find(name)
    return msgspec.structs.replace(
        configuration,
        environments=() if entry is None else (entry,),
        include_local=entry is None,
        default=None,
    )


def where(configuration: Configuration, name: str) -> str:
    """The address of an environment, for people."""
    from ..environments.opening import address

    entry = configuration.find(name)
    return printable(address(None if entry is None else entry.transport))


def machine(
    url: str | None, token_file: str | None, environment: str | None, client_name: str
) -> AbstractAsyncContextManager[Environment]:
    """What the options of a command name: an environment, a server, or (with neither) this machine."""
    if environment is not None:
        refuse_two_places()
        return started(environment)
    from ..environments.connect import connect

    return connect(url, token=read_token(token_file), client_name=client_name)


@asynccontextmanager
async def started(name: str) -> AsyncIterator[Environment]:
    """The environment of that name, attached to. Everything that was started in it ends with the context."""
    from ..environments.manager import EnvironmentManager

    if not name.strip():
        fail("environment id cannot be empty")
    configuration = load_configuration()
    if name not in configuration.ids():
        fail(unknown_environment(configuration, name))
    async with EnvironmentManager(only(configuration, name)) as manager:
        handle = manager.handles[name]
        yield await _watched(handle, where(configuration, name))


async def _watched(handle: Handle, address: str) -> Environment:
    waiting = asyncio.ensure_future(handle.environment())
    loop = asyncio.get_running_loop()
    begun = loop.time()
    on_terminal = sys.stderr.isatty()
    shown = False
    try:
        await asyncio.wait([waiting], timeout=QUIET_SECONDS if on_terminal else PATIENT_SECONDS)
        while not waiting.done():
            seconds = int(loop.time() - begun)
            if on_terminal:
                line = f"exec-server: starting environment `{handle.id}` … {seconds}s ({address})"
                click.echo(f"\r{line[: _columns() - 1]}\x1b[K", nl=False, err=True)
            elif not shown:
                click.echo(f"exec-server: waiting for environment `{handle.id}` ({address})", err=True)
            shown = True
            await asyncio.wait([waiting], timeout=REDRAW_SECONDS)
    finally:
        if shown and on_terminal:
            click.echo("\r\x1b[K", nl=False, err=True)
        if not waiting.done():
            waiting.cancel()
    return waiting.result()


def _columns() -> int:
    try:
        return os.get_terminal_size(2).columns or 80
    except OSError:
        return 80
