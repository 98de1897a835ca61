"""What is measured, over what, and what is asked of it. The table at the end is the benchmark."""

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Literal

from . import agents, files, relay, sandbox, workloads
from .client import Client
from .client_stdio import StdioClient
from .server import Command, WebSocketServer
from .workloads import Effort

__all__ = ["MEASUREMENTS", "Measurement", "Row", "Unit"]

Unit = Literal["seconds", "per second", "bytes per second", "bytes"]
Round = Callable[[Effort], tuple[float, ...]]
"""One round of a measurement on one server: a number for each of its rows."""
Workload = Callable[[Client, Effort], float]


@dataclass(frozen=True)
class Row:
    """One line of the report."""

    name: str
    title: str
    transport: Literal["WebSocket", "stdio", "relay"]
    unit: Unit
    target: float | None = None
    """The ratio, ours being better above 1, that ours is asked to reach."""

    @property
    def more_is_better(self) -> bool:
        """A rate, as opposed to a time or a size."""
        return self.unit in ("per second", "bytes per second")

    def ratio(self, ours: float, reference: float) -> float:
        """How many times better ours is."""
        return ours / reference if self.more_is_better else reference / ours


@dataclass(frozen=True)
class Measurement:
    """Rows that are measured together, and how to open a server for a series of rounds."""

    rows: tuple[Row, ...]
    open: Callable[[Command], AbstractContextManager[Round]]
    rounds: int | None = None
    """When not the usual number."""


@contextlib.contextmanager
def _websocket(workload: Workload, command: Command) -> Iterator[Round]:
    """One server for all rounds, one connection for each."""
    with WebSocketServer(command) as server:

        def one_round(effort: Effort) -> tuple[float, ...]:
            with server.connect() as client:
                return (workload(client, effort),)

        yield one_round


@contextlib.contextmanager
def _stdio(workload: Workload, command: Command) -> Iterator[Round]:
    """A server for each round: over stdio that is what a connection is."""

    def one_round(effort: Effort) -> tuple[float, ...]:
        with command.over_stdio() as client:
            return (workload(client, effort),)

    yield one_round


@contextlib.contextmanager
def _memory(command: Command) -> Iterator[Round]:
    """A fresh server that does all the output once: its peak, and its peak with its helpers."""

    def one_round(effort: Effort) -> tuple[float, ...]:
        with WebSocketServer(command) as server, server.connect() as client:
            workloads.output_of_pipe(client, effort)
            workloads.output_of_terminal(client, effort)
            workloads.output_of_many(client, effort)
            peak = server.peak_memory()
            return peak, peak + server.helpers_memory()

    yield one_round


@contextlib.contextmanager
def _start_stdio(command: Command) -> Iterator[Round]:
    """From the start of the command to the answer of `initialize`."""

    def one_round(_: Effort) -> tuple[float, ...]:
        started = time.perf_counter()
        with StdioClient(command.argv, command.log, command.environment) as client:
            client.call("initialize", {"clientName": "benchmarks"})
            return (time.perf_counter() - started,)

    yield one_round


@contextlib.contextmanager
def _start_websocket(command: Command) -> Iterator[Round]:
    """From the start of the command to the line with its URL."""

    def one_round(_: Effort) -> tuple[float, ...]:
        started = time.perf_counter()
        with WebSocketServer(command):
            return (time.perf_counter() - started,)

    yield one_round


def _both(
    name: str,
    title: str,
    unit: Unit,
    workload: Workload,
    target: float | None,
    stdio_target: float | None = None,
    rounds: int | None = None,
) -> tuple[Measurement, Measurement]:
    stdio = Row(f"{name}-stdio", title, "stdio", unit, stdio_target)
    return (
        _only_websocket(name, title, unit, workload, target, rounds),
        Measurement((stdio,), partial(_stdio, workload), rounds),
    )


def _only_websocket(
    name: str, title: str, unit: Unit, workload: Workload, target: float | None, rounds: int | None = None
) -> Measurement:
    return Measurement((Row(name, title, "WebSocket", unit, target),), partial(_websocket, workload), rounds)


_spawn_pipe = partial(workloads.spawn, tty=False)
_spawn_pty = partial(workloads.spawn, tty=True)
_echo_pipe = partial(workloads.echo, tty=False)
_echo_pty = partial(workloads.echo, tty=True)

MEASUREMENTS: tuple[Measurement, ...] = (
    *_both("round-trip", "call round trip", "seconds", workloads.round_trip, 1.2, rounds=25),
    *_both("pipelined", "calls in batches of 256", "per second", workloads.calls_in_batches, 15),
    *_both("stream", "calls, 256 always in flight", "per second", workloads.calls_in_stream, None),
    *_both("spawn", "spawn to closed, pipe", "seconds", _spawn_pipe, 25, 5),
    *_both("spawn-pty", "spawn to closed, PTY", "seconds", _spawn_pty, 25, 5),
    _only_websocket("spawns", "spawns with 32 at once", "per second", workloads.spawns_at_once, 8),
    *_both("echo", "write to echo, pipe", "seconds", _echo_pipe, 100, 1.2),
    *_both("echo-pty", "write to echo, PTY", "seconds", _echo_pty, 100, 1.2),
    *_both("output", "output, pipe", "bytes per second", workloads.output_of_pipe, 3, rounds=7),
    _only_websocket(
        "output-pty", "output, PTY", "bytes per second", workloads.output_of_terminal, 5, rounds=7
    ),
    _only_websocket(
        "output-8", "output, 8 processes", "bytes per second", workloads.output_of_many, 3, rounds=7
    ),
    Measurement(
        (
            Row("memory", "peak memory over all output", "WebSocket", "bytes", 2),
            Row("memory-helpers", "peak memory with helpers", "WebSocket", "bytes", 2),
        ),
        _memory,
        rounds=3,
    ),
    _only_websocket("file-read", "read of 4 KiB", "seconds", files.small_read, 1.5),
    _only_websocket("file-write", "write of 4 KiB", "seconds", files.small_write, None),
    Measurement((Row("file-read-64", "64 MiB read", "WebSocket", "bytes per second", 4),), files.large_read),
    Measurement(
        (Row("file-write-64", "64 MiB write", "WebSocket", "bytes per second", 3),), files.large_write
    ),
    _only_websocket("file-read-json", "64 MiB, one message", "bytes per second", files.message_read, None, 5),
    _only_websocket(
        "file-write-json", "11 MiB, one message", "bytes per second", files.message_write, None, 5
    ),
    _only_websocket("file-list", "list 50,000 entries", "seconds", files.list_directory, 2, 5),
    _only_websocket("file-walk", "walk 50,000 entries", "seconds", files.walk_tree, 2, 5),
    Measurement(
        (
            Row("download-server", "1 GiB download, server", "WebSocket", "bytes"),
            Row("download-client", "1 GiB download, client", "WebSocket", "bytes"),
            Row("download-rate", "1 GiB download", "WebSocket", "bytes per second"),
        ),
        files.download,
        rounds=1,
    ),
    _only_websocket("sandbox-spawn", "spawn, read-only sandbox", "seconds", sandbox.spawn_read_only, 2, 7),
    _only_websocket("sandbox-write", "spawn, workspace sandbox", "seconds", sandbox.spawn_workspace, 2, 7),
    _only_websocket("sandbox-read", "4 KiB, scoped sandbox", "seconds", sandbox.small_read, 20, 7),
    Measurement(
        (
            Row("relay-handshakes", "streams opened", "relay", "per second"),
            Row("relay-call", "call round trip", "relay", "seconds"),
            Row("relay-output", "output, pipe", "relay", "bytes per second", 3),
            Row("relay-none-handshakes", "connections, same client", "WebSocket", "per second"),
            Row("relay-none-call", "call, same client", "WebSocket", "seconds"),
            Row("relay-none-output", "output, same client", "WebSocket", "bytes per second"),
        ),
        relay.open_stage,
        rounds=5,
    ),
    Measurement(
        (Row("relay-agents", "output, agents at both ends", "relay", "bytes per second", 3),),
        agents.open_stage,
        rounds=5,
    ),
    Measurement(
        (Row("start-stdio", "start to initialize answered", "stdio", "seconds", 1 / 6),),
        _start_stdio,
        rounds=21,
    ),
    Measurement(
        (Row("start", "start to URL printed", "WebSocket", "seconds"),),
        _start_websocket,
        rounds=21,
    ),
)
