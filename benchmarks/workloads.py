"""What the servers are asked to do. Each takes a connection and returns one number.

Every workload is the same code for both servers and both transports, and raises `WrongAnswer`
rather than return the time of something that went wrong.
"""

import base64
import itertools
import json
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .client import Client, WrongAnswer, result_of
from .output import ProcessCount

__all__ = [
    "IN_FLIGHT",
    "Effort",
    "calls_in_batches",
    "calls_in_stream",
    "check_content",
    "echo",
    "output_of_many",
    "output_of_pipe",
    "output_of_terminal",
    "round_trip",
    "spawn",
    "spawns_at_once",
    "zeros",
]

STATUS_READY = b'"status":"ready"'
IN_FLIGHT = 256
"""Pipelined calls. The reference's two queues hold 128 messages each; sent much more than both at
once over WebSocket (seen with 540, and with 400 kept in flight) it stops answering for good."""
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Effort:
    """How much is done in one round."""

    seconds: float = 0.3
    """A latency is sampled for this long."""
    samples: int = 6
    """And at least this often."""
    calls: int = 10_000
    """When they are pipelined in a stream."""
    spawns: int = 192
    """Processes started when many run at once."""
    pipe_bytes: int = 256 << 20
    terminal_bytes: int = 128 << 20
    bytes_of_each: int = 32 << 20
    """When several processes write at once."""
    file_bytes: int = 64 << 20
    """Of a large file."""
    download_bytes: int = 1 << 30
    """Of a file that no memory should hold."""


def program(name: str) -> str:
    """The absolute path, so that a search in PATH is not part of what is timed."""
    path = shutil.which(name, path="/usr/bin:/bin")
    if path is None:
        raise WrongAnswer(f"{name} is not installed here")
    return path


def zeros(size: int) -> list[str]:
    """A program that writes so many bytes as fast as it can."""
    return [program("head"), "-c", str(size), "/dev/zero"]


def _start_params(argv: Sequence[str], *, tty: bool = False, stdin: bool = False) -> dict[str, object]:
    """Params of `process/start` with a name nobody has used yet."""
    return {
        "processId": f"p{next(_numbers)}",
        "argv": list(argv),
        "cwd": "file:///tmp",
        "env": ENVIRONMENT,
        "tty": tty,
        "pipeStdin": stdin,
    }


def _sampled(action: Callable[[], float], effort: Effort) -> float:
    """The median of what `action` returns, called for as long as `effort` says."""
    samples: list[float] = []
    end = time.perf_counter() + effort.seconds
    while len(samples) < effort.samples or time.perf_counter() < end:
        samples.append(action())
    return statistics.median(samples)


def round_trip(client: Client, effort: Effort) -> float:
    """Seconds for one small call, one after the other."""

    def once() -> float:
        id_, data = client.request("environment/status")
        started = time.perf_counter()
        client.send_raw(data)
        answer = client.receive()
        took = time.perf_counter() - started
        message = json.loads(answer)
        if message["id"] != id_ or result_of(message)["status"] != "ready":
            raise WrongAnswer(f"environment/status answered {answer!r}")
        return took

    for _ in range(100):
        once()
    return _sampled(once, effort)


def calls_in_batches(client: Client, effort: Effort) -> float:
    """Calls per second when a batch is sent at once, and the next one when all of it is answered."""

    def once() -> float:
        requests = [client.request("environment/status") for _ in range(IN_FLIGHT)]
        data = b"".join(frame for _, frame in requests)
        started = time.perf_counter()
        client.send_raw(data)
        client.fill_until(STATUS_READY, IN_FLIGHT)
        took = time.perf_counter() - started
        unanswered = {id_ for id_, _ in requests}
        while unanswered:
            unanswered.remove(json.loads(client.receive())["id"])
        return took

    once()
    return IN_FLIGHT / _sampled(once, effort)


def calls_in_stream(client: Client, effort: Effort) -> float:
    """Calls per second when each answer is followed by another request: the pipeline never drains."""
    requests = [client.request("environment/status")[1] for _ in range(effort.calls)]
    waiting = iter(requests)
    answered = 0
    started = time.perf_counter()
    client.send_raw(b"".join(itertools.islice(waiting, IN_FLIGHT)))
    while answered < effort.calls:
        arrived = client.spans()
        if not all(client.buffer.find(STATUS_READY, start, end) > 0 for start, end in arrived):
            raise WrongAnswer("environment/status answered something else than ready")
        answered += len(arrived)
        client.send_raw(b"".join(itertools.islice(waiting, len(arrived))))
    return effort.calls / (time.perf_counter() - started)


def _run(
    client: Client, argv: Sequence[str], *, tty: bool = False, size: int, processes: int = 1, at_once: int = 0
) -> tuple[float, ProcessCount]:
    """Run a program so many times; seconds from the first `process/start` to the last `closed`."""
    started_with = [_start_params(argv, tty=tty) for _ in range(processes)]
    requests = [client.request("process/start", params) for params in started_with]
    count = ProcessCount((str(params["processId"]) for params in started_with), (id_ for id_, _ in requests))
    waiting = [data for _, data in requests]
    at_once = at_once or processes
    started = time.perf_counter()
    while count.open:
        free = at_once - (len(count.open) - len(waiting))
        if free and waiting:
            client.send_raw(b"".join(waiting[:free]))
            del waiting[:free]
        count.take(client)
    took = time.perf_counter() - started
    while count.unanswered:
        count.take(client)
    count.check(size)
    return took, count


def spawn(client: Client, effort: Effort, *, tty: bool) -> float:
    """Seconds from `process/start` to `process/closed` of a program that does nothing."""
    argv = [program("true")]

    def once() -> float:
        return _run(client, argv, tty=tty, size=0)[0]

    for _ in range(3):
        once()
    return _sampled(once, effort)


def spawns_at_once(client: Client, effort: Effort, at_once: int = 32) -> float:
    """Processes per second, from start to closed, with so many of them under way all the time."""
    took, _ = _run(client, [program("true")], size=0, processes=effort.spawns, at_once=at_once)
    return effort.spawns / took


def echo(client: Client, effort: Effort, *, tty: bool) -> float:
    """Seconds from a two-byte `process/write` to the first output of `cat` (or of its terminal)."""
    params = _start_params([program("cat")], tty=tty, stdin=True)
    name = params["processId"]
    client.call("process/start", params)
    # A terminal echoes the line, and then cat writes it once more.
    expected = b"x\r\nx\r\n" if tty else b"x\n"
    line = base64.b64encode(b"x\n").decode()

    def once() -> float:
        write_id = f"w{next(_numbers)}"
        id_, data = client.request("process/write", {"processId": name, "chunk": line, "writeId": write_id})
        echoed, accepted, took = b"", False, 0.0
        started = time.perf_counter()
        client.send_raw(data)
        while len(echoed) < len(expected) or not accepted:
            raw = client.receive()
            now = time.perf_counter()
            message = json.loads(raw)
            if message.get("id") == id_:
                accepted = result_of(message)["status"] == "accepted"
                continue
            took = took or now - started
            echoed += base64.b64decode(message["params"]["chunk"])
        if echoed != expected:
            raise WrongAnswer(f"the echo of a line is {echoed!r}")
        return took

    for _ in range(3):
        once()
    median = _sampled(once, effort)
    client.call("process/terminate", {"processId": name})
    return median


def output_of_pipe(client: Client, effort: Effort, *, binary: bool = False) -> float:
    """Bytes per second of output through a pipe."""
    size = effort.pipe_bytes
    took, count = _run(client, zeros(size), size=size)
    if binary != (count.binary_chunks > 0):
        raise WrongAnswer(f"{count.binary_chunks} chunks came as binary frames")
    return size / took


def output_of_terminal(client: Client, effort: Effort) -> float:
    """Bytes per second of output through a terminal that leaves the bytes alone."""
    size = effort.terminal_bytes
    argv = [program("sh"), "-c", f"stty raw -echo && exec head -c {size} /dev/zero"]
    return size / _run(client, argv, tty=True, size=size)[0]


def output_of_many(client: Client, effort: Effort, processes: int = 8) -> float:
    """Bytes per second of output, all processes together."""
    size = effort.bytes_of_each
    return size * processes / _run(client, zeros(size), size=size, processes=processes)[0]


def check_content(client: Client) -> None:
    """Not timed: some megabytes that are not all alike arrive byte for byte, in order."""
    lines = 400_000
    params = _start_params([program("seq"), "1", str(lines)])
    client.send_raw(client.request("process/start", params)[1])
    chunks: dict[int, bytes] = {}
    while True:
        message = json.loads(client.receive())
        if "id" in message:
            result_of(message)
        elif message["method"] == "process/output":
            chunks[message["params"]["seq"]] = base64.b64decode(message["params"]["chunk"], validate=True)
        elif message["method"] == "process/closed":
            break
    output = b"".join(chunk for _, chunk in sorted(chunks.items()))
    if output != "".join(f"{number}\n" for number in range(1, lines + 1)).encode():
        raise WrongAnswer(f"the output of `seq 1 {lines}` is not right; {len(output)} bytes")
