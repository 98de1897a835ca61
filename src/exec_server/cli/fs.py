"""`exec-server fs ls|cat|put|get|rm|watch`: files, here or far away."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NoReturn, TextIO, TypeVar

import click

from .options import environment_option, fail, server_options
from .starting import machine

if TYPE_CHECKING:
    from ..client.files import RemoteFiles
    from ..environments.environment import Environment
    from ..services import FileMetadata, Progress, Transferred

__all__ = ["fs"]

F = TypeVar("F", bound=Callable[..., Any])

BROKEN_PIPE_EXIT: Final = 128 + signal.SIGPIPE
LOOKS_AT_ONCE: Final = 64
"""Entries of a directory asked about at the same time."""


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
                click.echo(f"{_on_one_line(path)}:")
            await _list(files, path, as_json)

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
            place = f"{files.native(target).rstrip('/')}/{_name(source)}" if into else target
            return await files.upload(source, place, progress, verify=not no_verify)

        await _transfer("put", sources, target, into, check, bring)

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
            place = os.path.join(target, _name(source)) if into else target
            return await files.download(source, place, progress, verify=not no_verify)

        await _transfer("get", map(files.native, sources), target, into, check, fetch)

    _run(url, token_file, environment, work)


async def _transfer(
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
                        click.echo(_on_one_line(changed) + (" (overflow)" if change.overflowed else ""))
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
        fail(_shown(str(error), sys.stderr))


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
            click.echo(f"Error: {_shown(str(error), sys.stderr)}", err=True)
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


def _name(path: str) -> str:
    """The last part of a native path; `.` and `..` have one too."""
    return os.path.basename(os.path.abspath(path))


# ls ------------------------------------------------------------------------------------------------


async def _list(files: RemoteFiles, path: str, as_json: bool) -> None:
    entries: list[tuple[str, FileMetadata | None]] = []
    found = await files.metadata(path)
    if not found.is_directory:
        entries.append((path, found))
    else:
        directory = files.native(path).rstrip("/")
        names = [entry.name for entry in await files.list(path)]
        for start in range(0, len(names), LOOKS_AT_ONCE):
            some = names[start : start + LOOKS_AT_ONCE]
            looks = [files.metadata(f"{directory}/{name}") for name in some]
            for name, look in zip(some, await asyncio.gather(*looks, return_exceptions=True), strict=True):
                if isinstance(look, OSError):
                    entries.append((name, None))  # a link that leads nowhere or in circles, or gone meanwhile
                elif isinstance(look, BaseException):
                    raise look
                else:
                    entries.append((name, look))
    width = max([len(str(entry.size)) for _, entry in entries if entry is not None], default=1)
    for name, entry in entries:
        click.echo(_json_line(name, entry) if as_json else _line(name, entry, width))


def _json_line(name: str, entry: FileMetadata | None) -> bytes:
    import msgspec

    values: dict[str, Any] = {"name": _text(name), "kind": "nowhere"}
    if entry is not None:
        values |= {"kind": _kind(entry), "isSymlink": entry.is_symlink, "size": entry.size}
        values |= {"modifiedAtMs": entry.modified_at_ms, "createdAtMs": entry.created_at_ms}
    return msgspec.json.encode(values)


def _line(name: str, entry: FileMetadata | None, width: int) -> str:
    if entry is None:
        return f"?  {'-':>{width}} {'-':>19} {_on_one_line(name)} (leads nowhere, or cannot be looked at)"
    letter = {"directory": "d", "file": "-", "other": "?"}[_kind(entry)]
    link = "l" if entry.is_symlink else " "
    when = datetime.fromtimestamp(entry.modified_at_ms / 1000).astimezone()
    return f"{letter}{link} {entry.size:>{width}} {when:%Y-%m-%d %H:%M:%S} {_on_one_line(name)}"


def _kind(entry: FileMetadata) -> str:
    return "directory" if entry.is_directory else "file" if entry.is_file else "other"


def _text(path: str) -> str:
    """Names that are not UTF-8 can be written nowhere as they are."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


_CONTROLS: Final = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def _shown(text: str, stream: TextIO | None = None) -> str:
    """For people. A name is anybody's choice: on a terminal it must not move the cursor or set a title."""
    text = _text(text)
    if not (stream or sys.stdout).isatty():
        return text
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def _on_one_line(name: str) -> str:
    """A name in a list. Also in a pipe, one with a line break in it must not look like two."""
    return _shown(name).replace("\n", r"\n").replace("\r", r"\r")


# put and get ---------------------------------------------------------------------------------------


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

    return escape(f"{title} {_shown(_name(path), sys.stderr)}")


def _report(result: Transferred) -> bool:
    """Say how it went; whether all of it came over that should."""
    from ..client.transfers import LEFT_OUT

    for path, reason in result.skipped:
        click.echo(f"skipped {_shown(path, sys.stderr)}: {_shown(reason, sys.stderr)}", err=True)
    if sys.stderr.isatty():
        how = {"digest": ", SHA-256 compared", "reread": ", read back and compared", "no": ""}[
            result.verified
        ]
        resumed = f", {result.resumed_bytes} of them already there" if result.resumed_bytes else ""
        click.echo(f"{result.files} files, {result.bytes} bytes{resumed}{how}", err=True)
    return all(reason in LEFT_OUT for _, reason in result.skipped)
