"""`exec-server ps --url URL` or `--env NAME`: what a server is running."""

from __future__ import annotations

import asyncio
import shlex
import time
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

import click

from .options import environment_option, fail, server_options
from .shown import printable
from .starting import machine

if TYPE_CHECKING:
    from ..environments.environment import Environment
    from ..wire.process import ListedProcess

__all__ = ["ps"]


@click.command()
@server_options(required=False)
@environment_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object per process.")
def ps(url: str | None, token_file: str | None, environment: str | None, as_json: bool) -> None:
    """List the processes of every session of a server, the ended ones it still remembers too."""
    from ..client.errors import ExecServerError

    if url is None and environment is None:
        raise click.UsageError("whose processes? Name a server with --url, or an environment with --env")
    try:
        processes = asyncio.run(_list(machine(url, token_file, environment, "exec-server-ps")))
    except (ExecServerError, OSError, TimeoutError) as error:
        fail(str(error))
    if as_json:
        import msgspec

        for process in processes:
            click.echo(msgspec.json.encode(process))
        return
    rows: list[tuple[str, ...]] = [("SESSION", "ID", "STATE", "PID", "EXIT", "AGE", "OUTPUT", "COMMAND")]
    rows.extend(_row(process) for process in sorted(processes, key=lambda entry: entry.started_at_ms))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        click.echo("  ".join([*cells, row[-1]]).rstrip())


async def _list(there: AbstractAsyncContextManager[Environment]) -> list[ListedProcess]:
    async with there as client:
        return await client.list(everybody=True)


def _row(process: ListedProcess) -> tuple[str, ...]:
    return (
        process.session,
        printable(process.process_id),
        process.state,
        "-" if process.pid is None else str(process.pid),
        "-" if process.exit_code is None else str(process.exit_code),
        _age(time.time() - process.started_at_ms / 1000),
        _size(process.output_bytes),
        printable(shlex.join(process.argv)),
    )


def _age(seconds: float) -> str:
    whole = max(int(seconds), 0)
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if whole >= size:
            return f"{whole // size}{unit}"
    return f"{whole}s"


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "K", "M", "G"):
        if value < 1024:
            return f"{value:.0f}{unit}"
        value /= 1024
    return f"{value:.0f}T"
