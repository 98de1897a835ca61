"""`exec-server run -- CMD…`: one command, here or far away, as if it ran in this terminal."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

import click

from ..local.process import descriptors
from .options import fail, read_token, server_options

if TYPE_CHECKING:
    from ..client.client import Client
    from ..client.process import RemoteProcess

__all__ = ["run"]

READ_BYTES: Final = 64 * 1024
BROKEN_PIPE_EXIT: Final = 128 + signal.SIGPIPE
NOT_ALLOWED_EXIT: Final = 126
NOT_FOUND_EXIT: Final = 127
"""What shells answer for commands that may not be run, and that are not there."""


Soon = Callable[[Coroutine[Any, Any, Any]], None]
"""Starts something that is not waited for."""


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@server_options(required=False)
@click.option("-t", "--tty", is_flag=True, help="Run on a terminal, connected to this one.")
@click.option("--cwd", metavar="DIR", help="Directory to run in (default: here, or the server's own).")
@click.option("--setenv", "variables", multiple=True, metavar="K=V", help="Set a variable (repeatable).")
@click.option("--timeout", type=float, metavar="SECONDS", help="Kill the command after this time.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(
    url: str | None,
    token_file: str | None,
    tty: bool,
    cwd: str | None,
    variables: tuple[str, ...],
    timeout: float | None,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND, pass on its input, output, signals and terminal size, and exit with its code.

    A command that dies of signal N gives 128 + N; one that is not found gives 127, one that may not be
    run 126; --timeout gives 124.
    """
    from ..client.errors import ExecServerError

    env: dict[str, str] = {}
    for variable in variables:
        name, equals, value = variable.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{variable!r} is not NAME=VALUE", param_hint="--setenv")
        env[name] = value
    descriptors.hide_inherited()  # so that 0, 1 and 2 are what they should be
    try:
        if url is None:
            cwd = os.path.abspath(cwd or ".")
            if not os.path.isdir(cwd):
                fail(f"{cwd}: no such directory")
        for text in (*command, *env, *env.values()):
            if not _is_text(text):
                fail(f"{text!r}: not UTF-8, which is all that the protocol carries")
        code = asyncio.run(_run(url, read_token(token_file), tty, cwd, env, timeout, command))
    except (ExecServerError, OSError, TimeoutError) as error:
        fail(str(error))
    # Threads that wait for input which never comes must not keep this process.
    os._exit(code)


async def _run(
    url: str | None,
    token: str | None,
    tty: bool,
    cwd: str | None,
    env: dict[str, str],
    timeout: float | None,
    command: tuple[str, ...],
) -> int:
    from ..client.client import INHERIT_ALL
    from ..client.errors import ServerRejected
    from ..environments.connect import IN_PROCESS, connect

    target = IN_PROCESS if url is None else url
    async with connect(target, token=token, client_name="exec-server-run", dedicated_process=True) as client:
        rows, cols = _terminal_size() if tty else (None, None)
        if not client.has("processPtySize"):
            rows = cols = None
        forward = tty or client.has("processCloseStdin")
        if not forward and not sys.stdin.isatty():
            click.echo("exec-server: this server cannot pass on the end of input; running without", err=True)
        if tty and "TERM" in os.environ:
            env.setdefault("TERM", os.environ["TERM"])
        try:
            process = await client.start(
                command,
                cwd=cwd,
                env=env,
                env_policy=INHERIT_ALL,
                tty=tty,
                stdin=forward,
                rows=rows,
                cols=cols,
            )
        except ServerRejected as error:
            where = f" in {cwd}" if cwd else ""
            click.echo(f"exec-server: cannot run {command[0]}{where}: {error.message}", err=True)
            return NOT_ALLOWED_EXIT if "Permission denied" in error.message else NOT_FOUND_EXIT
        async with process:
            with _Terminal(tty):
                return await _attend(client, process, tty, forward, timeout)


async def _attend(
    client: Client, process: RemoteProcess, tty: bool, forward: bool, timeout: float | None
) -> int:
    tasks: set[asyncio.Task[Any]] = set()

    def done(task: asyncio.Task[Any]) -> None:
        tasks.discard(task)
        if not task.cancelled():
            task.exception()  # a signal that could not be passed on is not worth a traceback

    def soon(work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(work)
        tasks.add(task)
        task.add_done_callback(done)

    _forward_signals(client, process, tty, soon)
    if forward:
        soon(_forward_input(process))
    try:
        async with asyncio.timeout(timeout):
            async for output in process.output():
                fd = 2 if output.stream == "stderr" else 1
                await asyncio.to_thread(_write_all, fd, output.data)
            return (await process.wait()).exit_code
    except TimeoutError:
        click.echo(f"exec-server: killed after {timeout:g}s", err=True)
        return 124
    except BrokenPipeError:
        return BROKEN_PIPE_EXIT
    finally:
        for task in tasks:
            task.cancel()


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # whoever shares this descriptor has made it so
            select.select([], [fd], [])


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


async def _forward_input(process: RemoteProcess) -> None:
    """Read in a thread of its own: stdin may be a file, which no loop can watch."""
    from threading import Semaphore, Thread

    from ..client.errors import ExecServerError

    loop = asyncio.get_running_loop()
    room = Semaphore(4)
    chunks: asyncio.Queue[bytes] = asyncio.Queue()

    def pump() -> None:
        data = b"."
        while data:
            room.acquire()
            try:
                data = os.read(0, READ_BYTES)
            except BlockingIOError:
                select.select([0], [], [])
                room.release()
                continue
            except OSError:
                data = b""
            try:
                loop.call_soon_threadsafe(chunks.put_nowait, data)
            except RuntimeError:
                return  # the command has ended, and with it the loop

    Thread(target=pump, daemon=True).start()
    try:
        while data := await chunks.get():
            await process.write(data)
            room.release()
        await process.close_stdin()
    except ExecServerError:
        pass  # it does not want any, or is gone


def _forward_signals(client: Client, process: RemoteProcess, tty: bool, soon: Soon) -> None:
    loop = asyncio.get_running_loop()

    def forward(name: str) -> None:
        if name == "SIGINT" or client.has("processSignals"):
            soon(process.signal(name))
        else:
            soon(process.terminate())

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        loop.add_signal_handler(number, forward, number.name)
    if tty and client.has("processResize"):

        def resized() -> None:
            rows, cols = _terminal_size()
            if rows and cols:
                soon(process.resize(rows, cols))

        loop.add_signal_handler(signal.SIGWINCH, resized)


def _terminal_size() -> tuple[int | None, int | None]:
    for fd in (1, 0, 2):
        try:
            size = os.get_terminal_size(fd)
        except OSError:
            continue
        if size.lines and size.columns:
            return size.lines, size.columns
    return None, None


class _Terminal:
    """Our own terminal in raw mode, so that keys reach the one over there."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted and os.isatty(0)
        self._saved: list[object] | None = None

    def __enter__(self) -> None:
        if self._wanted:
            import termios
            import tty

            self._saved = termios.tcgetattr(0)
            tty.setraw(0)

    def __exit__(self, *_: object) -> None:
        if self._saved is not None:
            import termios

            termios.tcsetattr(0, termios.TCSADRAIN, self._saved)  # type: ignore[arg-type]
