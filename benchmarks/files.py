"""Files: what the servers are asked to read, write and list.

Small calls, listings and single messages are the same bytes for both servers, sent by the load client.
For large transfers each side goes the fastest way there is to it over a WebSocket: ours is the project's
own client (`client.files`, which speaks binary blocks with our server), on the reference it is the load
client with pipelined blocks of the largest size the protocol allows and the fastest base64 there is. Both
begin with a path and end with `bytes` in memory, or the other way round.
"""

import asyncio
import contextlib
import io
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pybase64

from .client import Client, WrongAnswer, result_of
from .client_websocket import WebSocketClient
from .server import Command, WebSocketServer
from .workloads import Effort

__all__ = [
    "ENTRIES",
    "READS_IN_FLIGHT",
    "WRITES_IN_FLIGHT",
    "block_read",
    "block_write",
    "client_read",
    "client_write",
    "download",
    "large_read",
    "large_write",
    "list_directory",
    "message_read",
    "message_write",
    "small_read",
    "small_write",
    "walk_tree",
]

SMALL_BYTES = 4096
ENTRIES = 50_000
"""Of the directory that is listed and of the tree that is walked: the most the protocol answers."""
FILES_PER_DIRECTORY = 1000
BLOCK_BYTES = 1 << 20
"""The most the protocol allows."""
READS_IN_FLIGHT, WRITES_IN_FLIGHT = 16, 8
"""Where the reference is fastest; more gives nothing, and much more stops it for good."""
MESSAGE_BYTES = 11 << 20
"""Of the content of one `fs/writeFile`: in base64 it fits the largest frame."""
SETTLED_BYTES = 64 << 20
"""A download of this size shows what a transfer of any size needs."""
GROWTH_BYTES = 32 << 20
"""What a client or server of ours may need more for the whole download than for one of SETTLED_BYTES."""
DOWNLOAD_SECONDS = 55
_handles = itertools.count(1)


# What is read and listed ---------------------------------------------------------------------------


@cache
def _scratch() -> "tempfile.TemporaryDirectory[str]":
    """On a disk like anybody's, removed when the benchmark ends."""
    return tempfile.TemporaryDirectory(dir=Path("~/.cache/exec-server").expanduser(), prefix="files-")


def _at(name: str) -> str:
    return f"{_scratch().name}/{name}"


@cache
def _content(size: int) -> bytes:
    return os.urandom(size)


@cache
def _file(size: int) -> str:
    """The path of a file of random content, in the page cache."""
    path = _at(f"{size}")
    Path(path).write_bytes(_content(size))
    return path


@cache
def _directory() -> str:
    """With ENTRIES empty files."""
    path = _at("flat")
    os.mkdir(path)
    for number in range(ENTRIES):
        os.close(os.open(f"{path}/{number}", os.O_CREAT | os.O_WRONLY))
    return path


@cache
def _tree() -> str:
    """ENTRIES files and directories, FILES_PER_DIRECTORY to each."""
    path = _at("tree")
    for directory in range(ENTRIES // FILES_PER_DIRECTORY):
        os.makedirs(f"{path}/{directory}")
        for number in range(FILES_PER_DIRECTORY - 1):
            os.close(os.open(f"{path}/{directory}/{number}", os.O_CREAT | os.O_WRONLY))
    return path


# The same message to both --------------------------------------------------------------------------


def _timed_call(client: Client, method: str, params: object) -> tuple[float, bytes]:
    """Seconds from the first byte sent to the last byte received, and the answer."""
    _, data = client.request(method, params)
    started = time.perf_counter()
    client.send_raw(data)
    answer = client.receive()
    return time.perf_counter() - started, answer


def _sampled(client: Client, method: str, params: object, effort: Effort, proof: bytes) -> float:
    """Median seconds of a call whose answer has to contain `proof`."""
    samples: list[float] = []
    end: float | None = None
    while len(samples) < effort.samples or end is None or time.perf_counter() < end:
        took, answer = _timed_call(client, method, params)
        if proof not in answer:
            raise WrongAnswer(f"{method} answered {answer[:200]!r}")
        if end is None:  # the first one finds everything cold
            end = time.perf_counter() + effort.seconds
            continue
        samples.append(took)
    return statistics.median(samples)


def small_read(client: Client, effort: Effort) -> float:
    """Seconds of `fs/readFile` of a small file, one after the other."""
    proof = pybase64.b64encode(_content(SMALL_BYTES))
    return _sampled(client, "fs/readFile", {"path": f"file://{_file(SMALL_BYTES)}"}, effort, proof)


def small_write(client: Client, effort: Effort) -> float:
    """Seconds of `fs/writeFile` of a small file that exists, one after the other."""
    content = _content(SMALL_BYTES)
    params = {"path": f"file://{_at('small-written')}", "dataBase64": pybase64.b64encode_as_string(content)}
    median = _sampled(client, "fs/writeFile", params, effort, b'"result":{}')
    _check_written("small-written", content)
    return median


def message_read(client: Client, effort: Effort) -> float:
    """Bytes per second of one `fs/readFile` of a large file, all of it in one message."""
    size = effort.file_bytes
    assert isinstance(client, WebSocketClient)
    _, request = client.request("fs/readFile", {"path": f"file://{_file(size)}"})
    started = time.perf_counter()
    client.send_raw(request)
    message = client.receive_large(size // 3 * 4 + 4096)
    data = _base64_member(message, b'"dataBase64":"')
    took = time.perf_counter() - started
    if data != _content(size):
        raise WrongAnswer(f"fs/readFile answered {len(data)} bytes that are not the file's")
    return size / took


def message_write(client: Client, effort: Effort) -> float:
    """Bytes per second of `fs/writeFile` as large as fits a frame."""
    content = _content(min(MESSAGE_BYTES, effort.file_bytes))
    params = {"path": f"file://{_at('message')}", "dataBase64": pybase64.b64encode_as_string(content)}
    took, answer = _timed_call(client, "fs/writeFile", params)
    result_of(json.loads(answer))
    _check_written("message", content)
    return len(content) / took


def list_directory(client: Client, effort: Effort) -> float:
    """Seconds of `fs/readDirectory` with ENTRIES entries."""
    params = {"path": f"file://{_directory()}"}
    answer = _timed_call(client, "fs/readDirectory", params)[1]
    if (count := len(result_of(json.loads(answer))["entries"])) != ENTRIES:
        raise WrongAnswer(f"fs/readDirectory answered {count} entries")
    return _sampled(client, "fs/readDirectory", params, effort, b'"49999"')


def walk_tree(client: Client, effort: Effort) -> float:
    """Seconds of `fs/walk` over ENTRIES entries, as many of them as the answer's budget lets through."""
    path = _tree()
    options = {
        "maxDepth": 64,
        "maxDirectories": 10_000,
        "maxEntries": ENTRIES,
        "followDirectorySymlinks": False,
    }
    params = {"path": f"file://{path}", "options": options}
    entries = result_of(json.loads(_timed_call(client, "fs/walk", params)[1]))["entries"]
    # Each entry costs its URI and 64 bytes of 4 MiB.
    budget = 4 << 20
    longest = len(f"file://{path}/49/998")
    if len(entries) < min(ENTRIES, budget // (longest + 64)):
        raise WrongAnswer(f"fs/walk answered only {len(entries)} entries")
    return _sampled(client, "fs/walk", params, effort, b'"truncated":')


def _base64_member(message: bytes | bytearray | memoryview, key: bytes) -> bytes:
    """The decoded value of a member near the start of a message."""
    at = bytes(message[:4096]).index(key) + len(key)
    view = memoryview(message)
    # Nothing that follows the value is longer than this.
    end = len(view) - 4096 + bytes(view[-4096:]).index(b'"', max(0, at - len(view) + 4096))
    return pybase64.b64decode(view[at:end], validate=True)


def _fresh(name: str) -> str:
    """The path of a file that is not there, so that nobody has to wait for old content to reach the disk."""
    path = _at(name)
    Path(path).unlink(missing_ok=True)
    return path


def _check_written(name: str, content: bytes) -> None:
    if Path(_at(name)).read_bytes() != content:
        raise WrongAnswer(f"{name} does not have the content that was written")


# Each side its fastest way -------------------------------------------------------------------------


def block_read(client: Client, effort: Effort) -> float:
    """Bytes per second of a large file in pipelined blocks, decoded and in one piece."""
    size = effort.file_bytes
    path, handle = _file(size), f"h{next(_handles)}"
    started = time.perf_counter()
    client.call("fs/open", {"handleId": handle, "path": f"file://{path}"})
    offsets: dict[int, int] = {}
    waiting: list[bytes] = []
    for offset in range(0, size, BLOCK_BYTES):
        params = {"handleId": handle, "offset": offset, "len": BLOCK_BYTES}
        id_, request = client.request("fs/readBlock", params)
        offsets[id_] = offset
        waiting.append(request)
    waiting.reverse()
    gathered = io.BytesIO()
    client.send_raw(b"".join(waiting.pop() for _ in range(min(READS_IN_FLIGHT, len(waiting)))))
    while offsets:
        for first, last in client.spans():
            message = memoryview(client.buffer)[first:last]
            gathered.seek(offsets.pop(_id_of(bytes(message[:64]), bytes(message[-64:]))))
            gathered.write(_base64_member(message, b'"chunk":"'))
            message.release()
            if waiting:
                client.send_raw(waiting.pop())
    data = gathered.getvalue()
    client.call("fs/close", {"handleId": handle})
    took = time.perf_counter() - started
    if data != _content(size):
        raise WrongAnswer(f"{len(data)} bytes were read that are not the file's")
    return size / took


def _id_of(start: bytes, end: bytes) -> int:
    """The id of an answer, which servers write first or last."""
    key = b'"id":'
    at = start.find(key)
    text = start[at + len(key) :] if at >= 0 else end[end.rindex(key) + len(key) :]
    return int(text.partition(b",")[0].partition(b"}")[0])


def block_write(client: Client, effort: Effort) -> float:
    """Bytes per second of a large file written in pipelined blocks."""
    size = effort.file_bytes
    content, handle = _content(size), f"h{next(_handles)}"
    view = memoryview(content)
    path = f"file://{_fresh('written')}"
    started = time.perf_counter()
    client.call("fs/open", {"handleId": handle, "path": path, "mode": "replace"})
    unanswered = 0
    head = b'{"id":%d,"method":"fs/writeBlock","params":{"handleId":"%b","offset":%d,"chunk":"'
    for number, offset in enumerate(range(0, size, BLOCK_BYTES)):
        chunk = pybase64.b64encode(view[offset : offset + BLOCK_BYTES])
        client.send_raw(client.frame(b"".join((head % (number, handle.encode(), offset), chunk, b'"}}'))))
        unanswered += 1
        while unanswered >= WRITES_IN_FLIGHT or (unanswered and offset + BLOCK_BYTES >= size):
            result_of(json.loads(client.receive()))
            unanswered -= 1
    client.call("fs/close", {"handleId": handle})
    took = time.perf_counter() - started
    _check_written("written", content)
    return size / took


async def client_read(client: Any, effort: Effort) -> float:
    """The same by our own client."""
    size = effort.file_bytes
    path = _file(size)
    started = time.perf_counter()
    data = await client.files.read(path)
    took = time.perf_counter() - started
    if data != _content(size):
        raise WrongAnswer(f"{len(data)} bytes were read that are not the file's")
    return size / took


async def client_write(client: Any, effort: Effort) -> float:
    """The same by our own client."""
    content = _content(effort.file_bytes)
    path = _fresh("written")
    started = time.perf_counter()
    await client.files.write(path, content)
    took = time.perf_counter() - started
    _check_written("written", content)
    return len(content) / took


@contextlib.contextmanager
def _large(command: Command, ours: Any, theirs: Any) -> Iterator[Any]:
    with WebSocketServer(command) as server:
        if command.name != "ours":

            def raw_round(effort: Effort) -> tuple[float, ...]:
                with server.connect() as client:
                    return (theirs(client, effort),)

            yield raw_round
            return
        from exec_server import connect

        def own_round(effort: Effort) -> tuple[float, ...]:
            async def connected() -> float:
                async with connect(server.url) as client:
                    return float(await ours(client, effort))

            return (asyncio.run(connected()),)

        yield own_round


@contextlib.contextmanager
def large_read(command: Command) -> Iterator[Any]:
    """Rounds of reading a large file."""
    with _large(command, client_read, block_read) as one_round:
        yield one_round


@contextlib.contextmanager
def large_write(command: Command) -> Iterator[Any]:
    """Rounds of writing a large file."""
    with _large(command, client_write, block_write) as one_round:
        yield one_round


# A download of any size ----------------------------------------------------------------------------


@contextlib.contextmanager
def download(command: Command) -> Iterator[Any]:
    """A fresh server, and our client in a process of its own: the peak memory of each, and the rate.

    The client is ours on both sides: the reference has none that downloads.
    """

    def one_round(effort: Effort) -> tuple[float, ...]:
        source, target = _sparse(effort.download_bytes), _at("downloaded")
        settled = _sparse(min(SETTLED_BYTES, effort.download_bytes))
        with WebSocketServer(command) as server:
            small = _download(server, settled, target)
            server_small = server.peak_memory()
            large = _download(server, source, target)
            server_large = server.peak_memory()
        if command.name == "ours":
            for who, before, after in (
                ("client", small["peak"], large["peak"]),
                ("server", server_small, server_large),
            ):
                if after > before + GROWTH_BYTES:
                    raise WrongAnswer(
                        f"the {who} needs {before} bytes for a small download, {after} for a large"
                    )
        return server_large, large["peak"], effort.download_bytes / large["seconds"]

    yield one_round


@cache
def _sparse(size: int) -> str:
    """A file of zeros that needs no disk."""
    path = _at(f"sparse-{size}")
    with Path(path).open("wb") as file:
        file.truncate(size)
    return path


def _download(server: WebSocketServer, source: str, target: str) -> dict[str, Any]:
    argv = [sys.executable, "-m", "benchmarks.download", server.url, source, target]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=DOWNLOAD_SECONDS)
    if done.returncode:
        raise WrongAnswer(f"the download failed: {done.stderr[-500:]}")
    if os.path.getsize(target) != os.path.getsize(source):
        raise WrongAnswer("the downloaded file has another size")
    os.unlink(target)
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer
