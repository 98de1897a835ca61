"""What `exec-server fs put` and `get` show: each transfer in turn, and how it went."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from .options import fail
from .shown import shown

if TYPE_CHECKING:
    from ..services import Progress, Transferred

__all__ = ["name_of", "transfer"]


async def transfer(
    verb: str,
    sources: Iterable[str],
    target: str,
    into: bool,
    check: Callable[[str], Awaitable[None]],
    one: Callable[[str, Progress | None], Awaitable[Transferred]],
) -> None:
    """Each in turn; the exit code says whether all of it is there."""
    sources = list(sources)
    if len(sources) > 1 and not into:
        fail(f"{target} is not a directory, and there are several files to put into it")
    whole = True
    for source in sources:
        await check(source)
        with _progress(verb, source) as progress:
            whole &= _report(await one(source, progress))
    if not whole:
        sys.exit(1)


def name_of(path: str) -> str:
    """The last part of a native path; `.` and `..` have one too."""
    return os.path.basename(os.path.abspath(path))


@contextmanager
def _progress(title: str, path: str) -> Iterator[Progress | None]:
    """A bar on a terminal, nothing in a pipe."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(_title(title, path), total=None)

        def show(done: int, total: int, at: str) -> None:
            bar.update(task, completed=done, total=total, description=_title(title, at))

        yield show


def _title(title: str, path: str) -> str:
    from rich.markup import escape

    return escape(f"{title} {shown(name_of(path), sys.stderr)}")


def _report(result: Transferred) -> bool:
    """Say how it went; whether all of it came over that should."""
    from ..client.transfers import LEFT_OUT

    for path, reason in result.skipped:
        click.echo(f"skipped {shown(path, sys.stderr)}: {shown(reason, sys.stderr)}", err=True)
    if sys.stderr.isatty():
        how = {"digest": ", SHA-256 compared", "reread": ", read back and compared", "no": ""}[
            result.verified
        ]
        resumed = f", {result.resumed_bytes} of them already there" if result.resumed_bytes else ""
        click.echo(f"{result.files} files, {result.bytes} bytes{resumed}{how}", err=True)
    return all(reason in LEFT_OUT for _, reason in result.skipped)
