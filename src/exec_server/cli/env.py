"""`exec-server env list|check|shell`: the environments that are configured, and a shell in one of them."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Any

import click

from .options import authority_option, directory_there, fail
from .shown import printable
from .starting import load_configuration, only, started, unknown_environment, where

if TYPE_CHECKING:
    from ..environments.config import Configuration

__all__ = ["env"]


@click.group(short_help="The machines that are configured.")
def env() -> None:
    """Environments: the machines named in environments.toml, or the one in CODEX_EXEC_SERVER_URL."""


@env.command(name="list", short_help="List the environments.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per environment.")
def show(as_json: bool) -> None:
    """List the environments; `*` marks the default. Connects to nothing."""
    configuration = load_configuration()
    entries = [
        {"id": name, "default": name == configuration.default, "address": where(configuration, name)}
        for name in configuration.ids()
    ]
    if as_json:
        _print_json(entries)
        return
    if not entries:
        click.echo(f"no environment may be used ({printable(configuration.source)})")
        return
    width = max(len(name) for name in configuration.ids())
    for entry in entries:
        click.echo(f"{'*' if entry['default'] else ' '} {entry['id']:{width}}  {entry['address']}")
    click.echo(f"({printable(configuration.source)})", err=True)


@env.command(short_help="Say of each environment whether it works.")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per environment.")
@authority_option
def check(names: tuple[str, ...], as_json: bool) -> None:
    """Connect to environments (all, unless some are named) and say of each whether it works.

    All at once: one that does not answer delays no other. Exit status 1 if one does not work, or if there
    is none.
    """
    configuration = load_configuration()
    for name in names:
        if name not in configuration.ids():
            fail(unknown_environment(configuration, name))
    chosen = list(dict.fromkeys(names)) or configuration.ids()
    if not chosen:
        click.echo(f"no environment may be used ({printable(configuration.source)})", err=as_json)
        raise SystemExit(1)
    results = asyncio.run(_check_all(configuration, chosen, as_json))
    if not all(result["ok"] for result in results):
        raise SystemExit(1)


async def _check_all(configuration: Configuration, names: list[str], as_json: bool) -> list[dict[str, Any]]:
    checks = [asyncio.ensure_future(_check(configuration, name)) for name in names]
    results = []
    width = max((len(name) for name in names), default=0)
    for check in asyncio.as_completed(checks):
        result = await check
        results.append(result)
        if as_json:
            _print_json([result])
        elif result["ok"]:
            said = f"{result['milliseconds']} ms, {result['shell']}, {result['version']}"
            click.echo(f"ok    {result['id']:{width}}  {result['address']}  ({said})")
        else:
            click.echo(f"FAIL  {result['id']:{width}}  {result['address']}: {result['error']}")
    return results


async def _check(configuration: Configuration, name: str) -> dict[str, Any]:
    from ..environments.manager import EnvironmentManager

    result: dict[str, Any] = {"id": name, "address": where(configuration, name), "ok": False}
    begun = time.monotonic()
    try:
        async with EnvironmentManager(only(configuration, name)) as manager:
            environment = await manager.handles[name].environment()
            await environment.check()
            milliseconds = round((time.monotonic() - begun) * 1000)
            info = environment.info
            shell = "shell unknown" if info.shell is None else info.shell.path
            result |= {
                "ok": True,
                "milliseconds": milliseconds,
                "shell": printable(shell),
                "cwd": info.cwd,
                "version": printable(info.executor_version or "version unknown"),
            }
    except Exception as error:  # whatever is wrong with one must not hide what is wrong with another
        result["error"] = printable(str(error) or type(error).__name__)
    return result


@env.command(short_help="Open a shell in an environment.")
@click.argument("name")
@click.option("--cwd", metavar="DIR", help="Directory to begin in (default: the server's own).")
@authority_option
def shell(name: str, cwd: str | None) -> None:
    """Open a shell in the environment NAME, on this terminal."""
    from ..client.errors import ExecServerError
    from ..local.process import descriptors
    from .run import run_on

    descriptors.hide_inherited()  # so that 0, 1 and 2 are what they should be
    try:
        code = asyncio.run(run_on(started(name), os.isatty(0), directory_there(cwd), {}, None, ()))
    except (ExecServerError, OSError) as error:
        fail(str(error))
    # A thread that waits for input which never comes must not keep this process.
    os._exit(code)


def _print_json(entries: list[dict[str, Any]]) -> None:
    import msgspec

    for entry in entries:
        click.echo(msgspec.json.encode(entry))
