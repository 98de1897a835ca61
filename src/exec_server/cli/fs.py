"""`exec-server fs ls|cat|put|get|rm|watch`: files, here or far away."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import click

from .fs_listing import print_listing
from .fs_transfer import name_of, transfer
from .options import environment_option, fail, server_options
from .shown import on_one_line, printable, shown
from .starting import machine

if TYPE_CHECKING:
    from ..client.files import RemoteFiles
    from ..environments.environment import Environment
    from ..services import Progress, Transferred

__all__ = ["fs"]

F = TypeVar("F", bound=Callable[..., Any])

BROKEN_PIPE_EXIT: Final = 128 + signal.SIGPIPE


@click.group()
def fs() -> None:
    """Touch files on a machine: list, print, bring there, fetch, remove, watch.

    A PATH is on the server that --url names, or on the machine of the environment that --env names, relative
    to the server's own directory; with neither it is on this machine.
    """


@fs.command()
@server_options(required=False)
@environment_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object per entry.")
@click.argument("paths", nargs=-1, metavar="[PATH]...")
def ls(
    url: str | None, token_file: str | None, environment: str | None, as_json: bool, paths: tuple[str, ...]
) -> None:
    """List files and the entries of directories: kind, size, time, name."""

    async def work(files: RemoteFiles) -> None:
        async def one(path: str) -> None:
            if len(paths) > 1 and not as_json:
                click.echo(f"{on_one_line(path)}:")
            await print_listing(files, path, as_json)

        await _each(paths or (".",), one)

    _run(url, token_file, environment, work)


@fs.command()
@server_options(required=False)
@environment_option
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
def cat(url: str | None, token_file: str | None, environment: str | None, paths: tuple[str, ...]) -> None:
    """Print files, of any size."""

    async def work(files: RemoteFiles) -> None:
        await _each(paths, lambda path: _print(files, path))

    _run(url, token_file, environment, work)


def _transfer_options(verb: str, source: str, target: str) -> Callable[[F], F]:
    """What `put` and `get` are given."""

    def decorate(command: F) -> F:
        for option in (
            click.argument("target", metavar=target),
            click.argument("sources", nargs=-1, required=True, metavar=f"{source}..."),
            click.option("--no-verify", is_flag=True, help="Do not compare what arrived."),
            click.option("-r", "--recursive", is_flag=True, help=f"{verb.capitalize()} whole directories."),
            environment_option,
            server_options(required=False),
        ):
            command = option(command)
        return command

    return decorate


@fs.command()
@_transfer_options("bring", "LOCAL", "REMOTE")
def put(
    url: str | None,
    token_file: str | None,
    environment: str | None,
    recursive: bool,
    no_verify: bool,
    sources: tuple[str, ...],
    target: str,
) -> None:
    """Bring LOCAL files to the server as REMOTE, or into REMOTE if that is a directory.

    A LOCAL of "-" is standard input. A transfer that broke leaves a part beside REMOTE, called
    .NAME.(hash).exec-server-part; the same command takes it up again. What arrived is compared with what was
    sent.
    """

    async def work(files: RemoteFiles) -> None:
        if sources == ("-",):
            await files.write_stream(target, _standard_input())
            return
        into = await _is_directory(files, target)

        async def check(source: str) -> None:
            if os.path.isdir(source) and not recursive:
                fail(f"{source} is a directory; use -r to bring it with all that is in it")

        async def bring(source: str, progress: Progress | None) -> Transferred:
            place = f"{files.native(target).rstrip('/')}/{name_of(source)}" if into else target
            return await files.upload(source, place, progress, verify=not no_verify)

        await transfer("put", sources, target, into, check, bring)

    _run(url, token_file, environment, work)


@fs.command()
@_transfer_options("fetch", "REMOTE", "LOCAL")
def get(
    url: str | None,
    token_file: str | None,
    environment: str | None,
    recursive: bool,
    no_verify: bool,
    sources: tuple[str, ...],
    target: str,
) -> None:
    """Fetch REMOTE files as LOCAL, or into LOCAL if that is a directory.

    A LOCAL of "-" is standard output. A transfer that broke leaves a part beside LOCAL, called
    .NAME.(hash).exec-server-part; the same command takes it up again. What arrived is compared with what is
    there.
    """

    async def work(files: RemoteFiles) -> None:
        if target == "-":
            await _each(sources, lambda path: _print(files, path))
            return
        into = os.path.isdir(target)

        async def check(source: str) -> None:
            if not recursive and await _is_directory(files, source):
                fail(f"{source} is a directory; use -r to fetch it with all that is in it")

        async def fetch(source: str, progress: Progress | None) -> Transferred:
            place = os.path.join(target, name_of(source)) if into else target
            return await files.download(source, place, progress, verify=not no_verify)

        await transfer("get", map(files.native, sources), target, into, check, fetch)

    _run(url, token_file, environment, work)


@fs.command()
@server_options(required=False)
@environment_option
@click.option("-r", "--recursive", is_flag=True, help="Remove whole directories.")
@click.option("-f", "--force", is_flag=True, help="Do not mind what is not there.")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
def rm(
    url: str | None,
    token_file: str | None,
    environment: str | None,
    recursive: bool,
    force: bool,
    paths: tuple[str, ...],
) -> None:
    """Remove files, links and empty directories; with -r whole trees.

    As elsewhere, "/", "." and ".." are never removed.
    """

    async def work(files: RemoteFiles) -> None:
        async def one(path: str) -> None:
            last = path.rstrip("/").rpartition("/")[2]
            if last in ("", ".", "..") or files.native(path).rstrip("/") == "":
                raise ValueError(f"{path}: refusing to remove the root, '.' or '..'")
            await files.remove(path, recursive=recursive, force=force)

        await _each(paths, one)

    _run(url, token_file, environment, work)


@fs.command()
@server_options(required=False)
@environment_option
@click.option("-r", "--recursive", is_flag=True, help="Watch all that is below a directory.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per change.")
@click.argument("path", metavar="PATH")
def watch(
    url: str | None,
    token_file: str | None,
    environment: str | None,
    recursive: bool,
    as_json: bool,
    path: str,
) -> None:
    """Print a path whenever it changes, until interrupted.

    A line that says "(overflow)" means that more happened than could be told: look at everything again.
    """

    async def work(files: RemoteFiles) -> None:
        import msgspec

        async with files.watch(path, recursive) as changes:
            # Whoever reads this knows from it that what happens from now on is seen.
            click.echo(f"watching {files.native(path)}", err=True)
            async for change in changes:
                if as_json:
                    click.echo(msgspec.json.encode(change))
                else:
                    for changed in change.paths:
                        click.echo(on_one_line(changed) + (" (overflow)" if change.overflowed else ""))
                sys.stdout.flush()

    _run(url, token_file, environment, work)


# Around every command ------------------------------------------------------------------------------


def _run(
    url: str | None,
    token_file: str | None,
    environment: str | None,
    work: Callable[[RemoteFiles], Awaitable[None]],
) -> None:
    from ..client.errors import ExecServerError

    async def main(there: AbstractAsyncContextManager[Environment]) -> None:
        async with there as client:
            await work(client.files)

    try:
        asyncio.run(main(machine(url, token_file, environment, "exec-server-fs")))
        sys.stdout.flush()
    except BrokenPipeError:
        _leave_quietly()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except (ExecServerError, OSError, TimeoutError, ValueError) as error:
        fail(shown(str(error), sys.stderr))


async def _each(paths: Iterable[str], work: Callable[[str], Awaitable[None]]) -> None:
    """For every path, also after one that fails; the command fails then."""
    from ..client.errors import ConnectionLost, ExecServerError

    failed = False
    for path in paths:
        try:
            await work(path)
        except (BrokenPipeError, ConnectionLost):
            raise
        except (ExecServerError, OSError, ValueError) as error:
            failed = True
            click.echo(f"Error: {printable(shown(str(error), sys.stderr))}", err=True)
    if failed:
        sys.exit(1)


async def _print(files: RemoteFiles, path: str) -> None:
    async for block in files.stream(path):
        await asyncio.to_thread(_write_all, 1, block)


async def _standard_input() -> AsyncIterator[bytes]:
    while block := await asyncio.to_thread(os.read, 0, 1 << 20):
        yield block


def _leave_quietly() -> NoReturn:
    """Whoever read our output has gone. Python would try to flush it once more, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(BROKEN_PIPE_EXIT)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


async def _is_directory(files: RemoteFiles, path: str) -> bool:
    try:
        return (await files.metadata(path)).is_directory
    except FileNotFoundError:
        return False
