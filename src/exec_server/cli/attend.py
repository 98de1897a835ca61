"""Attending a command: its input, output and signals, and an end to it when nobody answers any more."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
from collections.abc import Coroutine
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:
    from ..client.client import Client
    from ..client.process import RemoteProcess

__all__ = ["attend", "terminal_size"]

READ_BYTES: Final = 64 * 1024
BROKEN_PIPE_EXIT: Final = 128 + signal.SIGPIPE
TIMEOUT_EXIT: Final = 124
WRITE_ERROR_EXIT: Final = 1

KILL_SECONDS: Final = 2.0
"""How long the server may take to say that a command which ran out of time is dead."""

STUCK_SECONDS: Final = 1.0
"""How long our own output may stand still after the command has died of a signal that came through us."""

CHUNKS_AHEAD: Final = 4
KEYS_AHEAD: Final = 1024
"""Input that is read before what came first is written. Of keys many, so that Ctrl-C is seen behind them."""

CTRL_C: Final = b"\x03"


async def attend(
    client: Client,
    process: RemoteProcess,
    tty: bool,
    forward: bool,
    timeout: float | None,
    deadline: float | None = None,
) -> int:
    """Pass everything on until the command has ended; its exit code. The `timeout` may have begun before, and
    is over at the `deadline`."""
    if timeout is not None and deadline is None:
        deadline = asyncio.get_running_loop().time() + timeout
    with _Terminal(tty) as terminal:
        return await _Attendance(client, process, tty, terminal).until_the_end(forward, timeout, deadline)


class _Attendance:
    """One command, and whoever sits before it."""

    def __init__(self, client: Client, process: RemoteProcess, tty: bool, terminal: _Terminal) -> None:
        self._client = client
        self._process = process
        self._tty = tty
        self._terminal = terminal
        self._writer = _Writer()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._undelivered = 0
        self._stuck = False

    async def until_the_end(self, forward: bool, timeout: float | None, deadline: float | None) -> int:
        """Its exit code, or what stands for it."""
        self._forward_signals()
        if forward:
            self._soon(self._forward_input())
        passing_on = asyncio.ensure_future(self._pass_on_output())
        try:
            async with asyncio.timeout_at(deadline) as limit:
                return await passing_on
        except TimeoutError:
            if timeout is None or not limit.expired():
                raise
            return await self._time_is_over(timeout)
        except BrokenPipeError:
            return BROKEN_PIPE_EXIT
        except _WriteError as error:
            self._terminal.restore()
            _tell(f"write error: {error}")
            return WRITE_ERROR_EXIT
        finally:
            for task in (passing_on, *self._tasks):
                task.cancel()

    def _soon(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # a signal that could not be passed on is not worth a traceback

    async def _pass_on_output(self) -> int:
        async for output in self._process.output():
            await self._writer.write(2 if output.stream == "stderr" else 1, output.data)
        return (await self._process.wait()).exit_code

    # Ends ----------------------------------------------------------------------------------------

    async def _time_is_over(self, timeout: float) -> int:
        try:
            with self._client.fail_fast():
                async with asyncio.timeout(KILL_SECONDS):
                    await self._process.end()
        except TimeoutError:
            pass
        if self._process.exit_code is None:
            self._leave(TIMEOUT_EXIT, f"{timeout:g}s are over")
        self._terminal.restore()
        _tell(f"killed after {timeout:g}s")
        return TIMEOUT_EXIT

    def _leave(self, code: int, why: str) -> NoReturn:
        """End now. Nobody can be asked any more; what we started on this machine goes with us."""
        self._terminal.restore()
        cause = "the server does not answer" if self._client.connected else "the connection is lost"
        _tell(f"{why}, and {cause}: whether the command still runs is not known")
        os._exit(code)

    # Signals -------------------------------------------------------------------------------------

    def _forward_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            loop.add_signal_handler(number, self._signalled, number)
        if self._tty and self._client.has("processResize"):

            def resized() -> None:
                rows, cols = terminal_size()
                if rows and cols:
                    self._soon(self._process.resize(rows, cols))

            loop.add_signal_handler(signal.SIGWINCH, resized)

    def _signalled(self, number: signal.Signals) -> None:
        """Pass it on; or, where it does not get through, it is meant for us."""
        if not self._client.connected or self._undelivered:
            self._leave(128 + number, f"stopped by {number.name}")
        self._soon(self._pass_on(number))
        if not self._stuck:
            self._stuck = True
            self._soon(self._end_if_stuck())

    async def _pass_on(self, number: signal.Signals) -> None:
        from ..client.errors import ConnectionLost

        self._undelivered += 1
        try:
            # The connection may have been lost since we looked: do not wait until it is made again.
            with self._client.fail_fast():
                if number is signal.SIGINT or self._client.has("processSignals"):
                    await self._process.signal(number.name)
                else:
                    await self._process.terminate()
        except ConnectionLost:
            if not self._process.ended:
                self._leave(128 + number, f"stopped by {number.name}")
        finally:
            self._undelivered -= 1

    async def _end_if_stuck(self) -> None:
        """Whoever does not read our output does not get the rest of it from a command that was to end."""
        code = (await self._process.wait_exit()).exit_code
        written = -1
        while written != self._writer.written or not self._writer.busy:
            written = self._writer.written
            await asyncio.sleep(STUCK_SECONDS)
        self._terminal.restore()
        _tell("the command has ended, and nobody reads the rest of its output")
        os._exit(code)

    # Input ---------------------------------------------------------------------------------------

    async def _forward_input(self) -> None:
        """Read in a thread of its own: stdin may be a file, which no loop can watch."""
        from ..client.errors import ExecServerError

        loop = asyncio.get_running_loop()
        room = Semaphore(KEYS_AHEAD if self._tty else CHUNKS_AHEAD)
        chunks: asyncio.Queue[bytes] = asyncio.Queue()

        def arrived(data: bytes) -> None:
            if self._tty and CTRL_C in data and not self._client.connected:
                self._leave(128 + signal.SIGINT, "stopped by Ctrl-C")
            chunks.put_nowait(data)

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
                    loop.call_soon_threadsafe(arrived, data)
                except RuntimeError:
                    return  # the command has ended, and with it the loop

        Thread(target=pump, daemon=True).start()
        try:
            while data := await chunks.get():
                await self._process.write(data)
                room.release()
            await self._process.close_stdin()
        except ExecServerError:
            pass  # it does not want any, or is gone


class _WriteError(Exception):
    """Our own output cannot be written."""


class _Writer:
    """Writes in a thread of its own, which may wait for a reader for ever without keeping this process."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[tuple[int, bytes, asyncio.Future[None]]] = SimpleQueue()
        self._closed = {fd for fd, stream in ((1, sys.__stdout__), (2, sys.__stderr__)) if stream is None}
        """What was not open when we were started: something else has got these numbers since."""
        self._started = False
        self.written = 0
        """Bytes that somebody took."""
        self.busy = False

    async def write(self, fd: int, data: bytes) -> None:
        """Until it is written. Raises BrokenPipeError, or _WriteError with the reason."""
        if fd in self._closed:
            raise _WriteError("Bad file descriptor")
        if not self._started:
            self._started = True
            Thread(target=self._work, daemon=True).start()
        done = self._loop.create_future()
        self.busy = True
        self._queue.put((fd, data, done))
        try:
            await done
        except BrokenPipeError:
            raise
        except OSError as error:
            raise _WriteError(error.strerror or str(error)) from None
        self.busy = False

    def _work(self) -> None:
        while True:
            fd, data, done = self._queue.get()
            problem = None
            try:
                self._write_all(fd, data)
            except OSError as error:
                problem = error
            try:
                self._loop.call_soon_threadsafe(_finish, done, problem)
            except RuntimeError:
                return  # nobody waits any more

    def _write_all(self, fd: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                written = os.write(fd, view)
            except BlockingIOError:  # whoever shares this descriptor has made it so
                select.select([], [fd], [])
                continue
            view = view[written:]
            self.written += written


def _finish(done: asyncio.Future[None], problem: OSError | None) -> None:
    if done.done():
        return
    if problem is None:
        done.set_result(None)
    else:
        done.set_exception(problem)


def _tell(text: str) -> None:
    """On stderr, unless that has nobody who reads it either."""
    if sys.__stderr__ is None:
        return
    try:
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"exec-server: {text}\n".encode())
    except OSError:
        pass


def terminal_size() -> tuple[int | None, int | None]:
    """Rows and columns of our own terminal, if there is one."""
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
        self._saved: list[Any] | None = None

    def __enter__(self) -> _Terminal:
        if self._wanted:
            import termios
            import tty

            self._saved = termios.tcgetattr(0)
            tty.setraw(0)
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """As it was. Not waiting until everything is shown: a terminal may have been stopped."""
        if self._saved is not None:
            import termios

            saved, self._saved = self._saved, None
            try:
                termios.tcsetattr(0, termios.TCSANOW, saved)
            except termios.error:
                pass  # it is gone
