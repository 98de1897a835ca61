"""The relay: the same work through a rendezvous of ours and over a plain WebSocket.

The rendezvous is always ours, as there is no other to be had; the environment behind it is ours or the
reference's. The harness is our own relay and WebSocket client up to the Channel, and from there on the
cheapest receiver there is, the same for both servers: it looks for the few bytes that it counts and decodes
nothing. With our server it agrees on binary output and, through the relay, on acknowledgements, as our client
does; with the reference it takes what that sends.
"""

import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from exec_server.limits import Limits
from exec_server.relay.harness import dialer
from exec_server.transport.channel import Channel, Receiver
from exec_server.transport.websocket import connect

from .client import WrongAnswer, result_of
from .deadline import SECONDS_PER_ROUND
from .server import Command, WebSocketServer, stop_process
from .workloads import ENVIRONMENT, Effort, zeros

__all__ = ["Rendezvous", "Session", "open_stage", "run"]

OURS = str(Path(sys.executable).parent / "exec-server")
ENVIRONMENT_ID = "bench"
AT_ONCE = 8
"""Handshakes under way at the same time."""
HANDSHAKES = 64
CALLS_PER_SECOND = "100000"
"""What the registry allows; its usual limit would be what is measured."""
READY_SECONDS = 20
IS_OUTPUT = b'"method":"process/output"'
CHUNK = b'"chunk":"'
BINARY_HEAD = 12
"""Bytes of a binary output frame before the process id."""

Dial = Callable[[Receiver], Awaitable[Channel]]
T = TypeVar("T")


# The programs --------------------------------------------------------------------------------------


class Rendezvous:
    """A rendezvous of ours with a key that may do everything; stopped at the end of the `with` block."""

    def __init__(self, folder: Path, log: Any, *more: str) -> None:
        data = str(folder / "rendezvous")
        key = [OURS, "rendezvous", "key", "add", "bench", "--data", data]
        self.key = subprocess.run(key, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
        self.process = subprocess.Popen(
            [OURS, "rendezvous", "--data", data, "--calls-per-second", CALLS_PER_SECOND, *more],
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        try:
            self.url = self.process.stdout.readline().decode().strip()
        except BaseException:
            self.stop()
            raise
        if not self.url.startswith("http://"):
            self.stop()
            raise WrongAnswer(f"the rendezvous printed {self.url!r} instead of its URL")

    def __enter__(self) -> "Rendezvous":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        stop_process(self.process)


@contextlib.contextmanager
def environment(command: Command, rendezvous: Rendezvous) -> Iterator[None]:
    """The server as an environment behind a rendezvous, once it can be reached."""
    # `--key-file` is not the reference's, so ours is told by HOME where its key goes.
    home = command.environment["CODEX_HOME"]
    process = subprocess.Popen(
        [*command.argv, "--remote", rendezvous.url, "--environment-id", ENVIRONMENT_ID],
        stdin=subprocess.DEVNULL,
        stdout=command.log,
        stderr=command.log,
        env={**command.environment, "HOME": home, "CODEX_API_KEY": rendezvous.key},
        start_new_session=True,
    )
    try:
        dial = dialer(f"relay+{rendezvous.url}/{ENVIRONMENT_ID}", token=rendezvous.key)
        run(_reachable(dial), SECONDS_PER_ROUND)
        yield
    finally:
        stop_process(process)


async def _reachable(dial: Dial) -> None:
    end = time.monotonic() + READY_SECONDS
    while True:
        try:
            (await dial(Counting())).abort()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise WrongAnswer(f"the environment cannot be reached: {error}") from None
            await asyncio.sleep(0.05)


# The harness ---------------------------------------------------------------------------------------


class Counting:
    """Answers and the output of one process, counted as it arrives."""

    def __init__(self) -> None:
        self.output = 0
        self.answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.closed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._exit_code: int | None = None
        self._last_seq: int | None = None
        self._events = 0

    def message_received(self, message: bytes) -> None:
        if IS_OUTPUT in message[:40] or message.find(IS_OUTPUT) >= 0:
            self._events += 1
            start = message.index(CHUNK) + len(CHUNK)
            end = message.index(b'"', start)
            self.output += (end - start) // 4 * 3 - message.count(b"=", end - 2, end)
            self._look()
            return
        said = json.loads(message)
        if "id" in said:
            self.answers.pop(said["id"]).set_result(said)
            return
        self._events += 1
        if said["method"] == "process/exited":
            self._exit_code = said["params"]["exitCode"]
        elif said["method"] == "process/closed":
            self._last_seq = said["params"]["seq"]
        self._look()

    def binary_received(self, message: bytes) -> None:
        self.view_received(memoryview(message))

    def view_received(self, message: memoryview) -> None:
        self._events += 1
        self.output += len(message) - BINARY_HEAD - (message[2] << 8 | message[3])
        self._look()

    def _look(self) -> None:
        """Events may overtake each other: it is over when all of them are here."""
        code, last = self._exit_code, self._last_seq
        if code is not None and last is not None and self._events >= last and not self.closed.done():
            self.closed.set_result(code)

    def writing_paused(self) -> None:
        """Little is sent."""

    def writing_resumed(self) -> None:
        """Likewise."""

    def channel_closed(self, reason: str) -> None:
        waiting: list[asyncio.Future[Any]] = [*self.answers.values(), self.closed]
        for answer in waiting:
            if not answer.done():
                answer.set_exception(WrongAnswer(f"the channel was closed: {reason}"))
                answer.exception()  # nobody may be waiting for it


class Session:
    """A channel on which `initialize` was answered."""

    def __init__(self, channel: Channel, receiver: Counting) -> None:
        self.channel = channel
        self.receiver = receiver
        self._last_id = 0

    @classmethod
    async def open(cls, dial: Dial) -> "Session":
        receiver = Counting()
        session = cls(await dial(receiver), receiver)
        await session.call("initialize", {"clientName": "benchmarks", "binaryOutput": True})
        session.channel.send(b'{"method":"initialized"}')
        return session

    async def call(self, method: str, params: object) -> dict[str, Any]:
        self._last_id += 1
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.receiver.answers[self._last_id] = answer
        self.channel.send(json.dumps({"id": self._last_id, "method": method, "params": params}).encode())
        return result_of(await answer)


async def handshakes_per_second(dial: Dial) -> float:
    """Streams (or connections) opened in a second, AT_ONCE under way; `initialize` is not part of it."""

    async def one_after_another() -> None:
        for _ in range(HANDSHAKES // AT_ONCE):
            (await dial(Counting())).abort()

    started = time.perf_counter()
    await asyncio.gather(*(one_after_another() for _ in range(AT_ONCE)))
    return HANDSHAKES / (time.perf_counter() - started)


async def call_and_output(dial: Dial, effort: Effort) -> tuple[float, float]:
    """Seconds of a call that does nothing, and bytes per second of the output of one process."""
    session = await Session.open(dial)
    try:
        samples: list[float] = []
        end = time.perf_counter() + effort.seconds
        while time.perf_counter() < end or len(samples) < effort.samples:
            started = time.perf_counter()
            await session.call("environment/status", None)
            samples.append(time.perf_counter() - started)
        params = {
            "processId": "p",
            "argv": zeros(effort.pipe_bytes),
            "cwd": "file:///",
            "env": ENVIRONMENT,
            "tty": False,
            "arg0": None,
        }
        started = time.perf_counter()
        await session.call("process/start", params)
        code = await session.receiver.closed
        took = time.perf_counter() - started
        if code != 0 or session.receiver.output != effort.pipe_bytes:
            raise WrongAnswer(f"{session.receiver.output} bytes of {effort.pipe_bytes}, exit code {code}")
        return statistics.median(samples), effort.pipe_bytes / took
    finally:
        session.channel.abort()


async def _measure(relay: Dial, plain: Dial, effort: Effort) -> tuple[float, ...]:
    numbers: list[float] = []
    for dial in (relay, plain):
        numbers.append(await handshakes_per_second(dial))
        numbers += await call_and_output(dial, effort)
    return tuple(numbers)


@contextlib.contextmanager
def open_stage(command: Command) -> Iterator[Callable[[Effort], tuple[float, ...]]]:
    """Handshakes, call and output through the relay, and then the same three without it."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=command.environment["CODEX_HOME"])))
        rendezvous = stack.enter_context(Rendezvous(folder, command.log))
        stack.enter_context(environment(command, rendezvous))
        server = stack.enter_context(WebSocketServer(command))
        relay = dialer(f"relay+{rendezvous.url}/{ENVIRONMENT_ID}", token=rendezvous.key)

        def plain(receiver: Receiver) -> Coroutine[Any, Any, Channel]:
            return connect(server.url, receiver, Limits(), headers={}, timeout=10.0)

        yield lambda effort: run(_measure(relay, plain, effort), SECONDS_PER_ROUND)


def run(work: Coroutine[Any, Any, T], seconds: float) -> T:
    """On uvloop, which does not let `deadline` through: so the time is kept here."""
    import uvloop

    async def in_time() -> T:
        try:
            async with asyncio.timeout(seconds):
                return await work
        except TimeoutError:
            raise WrongAnswer(f"not done after {seconds} s") from None

    return uvloop.run(in_time())
