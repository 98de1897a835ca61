"""What came out: a table for people, JSON for machines."""

import os
import platform
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .files import READS_IN_FLIGHT, WRITES_IN_FLIGHT
from .measurements import Row, Unit
from .rounds import Result
from .workloads import IN_FLIGHT, Effort
from .yardsticks import BINARY_TARGET, Yardsticks

__all__ = ["as_json", "format_ratio", "format_value", "notes", "table", "yardstick_lines"]


def format_value(value: float, unit: Unit) -> str:
    """With a unit that makes it readable."""
    match unit:
        case "seconds" if value < 1e-3:
            return f"{value * 1e6:.0f} µs"
        case "seconds":
            return f"{value * 1e3:.{2 if value < 0.01 else 1}f} ms"
        case "per second":
            return f"{value:,.0f}/s"
        case "bytes per second":
            return f"{value / 1e6:,.0f} MB/s"
        case "bytes":
            return f"{value / 1e6:.1f} MB"


def format_ratio(ratio: float) -> str:
    """`38x`, `1.24x`, `0.17x`."""
    return f"{ratio:.0f}x" if ratio >= 20 else f"{ratio:.1f}x" if ratio >= 3 else f"{ratio:.2f}x"


def format_target(row: Row) -> str:
    """What is asked, empty if nothing."""
    return "" if row.target is None else f">= {row.target:g}x" if row.target >= 1 else f">= {row.target:.2f}x"


def table(results: Sequence[Result]) -> str:
    """One line for each row, medians."""
    lines = [("", "over", "ours", "reference", "ratio", "target", "")]
    for result in results:
        row = result.row
        lines.append(
            (
                row.title,
                row.transport,
                format_value(statistics.median(result.ours), row.unit),
                format_value(statistics.median(result.reference), row.unit),
                format_ratio(result.ratio),
                format_target(row),
                {None: "", True: "met", False: "MISSED"}[result.met],
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index in (0, 1, 6) else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def yardstick_lines(yardsticks: Yardsticks) -> list[str]:
    """The yardsticks in sentences."""
    bare = format_value(statistics.median(yardsticks.bare_read), "bytes per second")
    terminal = format_value(statistics.median(yardsticks.bare_terminal), "bytes per second")
    client = format_value(statistics.median(yardsticks.client), "bytes per second")
    lines = [
        f"A bare os.read loop on the same pipe: {bare}; on a PTY in raw mode: {terminal}.",
        f"The load client alone, fed ready-made frames of 8 KiB chunks over loopback: {client}.",
    ]
    fraction = yardsticks.binary_fraction
    if yardsticks.binary is None or fraction is None:
        return [*lines, f"Our binary output frames: skipped, {yardsticks.skipped}."]
    rate = format_value(statistics.median(yardsticks.binary), "bytes per second")
    verdict = "met" if fraction >= BINARY_TARGET else "MISSED"
    verdict = f"target {BINARY_TARGET}, {verdict}"
    return [*lines, f"Our binary output frames: {rate}, {fraction:.2f} of the bare loop ({verdict})."]


def notes(effort: Effort) -> list[str]:
    """What a reader has to know to read the numbers right, one paragraph each."""
    sizes = [f"{size >> 20} MiB" for size in (effort.pipe_bytes, effort.terminal_bytes, effort.bytes_of_each)]
    text = f"""
        Client, server and the commands it runs share {os.cpu_count()} cores. The servers take turns; each
        number is a median over the rounds, each ratio one of medians; above 1 ours is better.

        The client sets TCP_NODELAY on its end. The reference does not on its own, so that over WebSocket
        its second small message waits for a delayed acknowledgement, about 40 ms: that, and not work, is
        most of its spawn, echo and batch times. The rows over stdio compare without it.

        Pipelined calls are limited to {IN_FLIGHT} in flight: with more (seen with 540 in a batch, with 400
        in a stream) the reference stops answering over WebSocket for good. A batch waits for its last
        answer, a stream never drains and so does not suffer from the delayed acknowledgement.

        Output is {sizes[0]} through a pipe, {sizes[1]} through a terminal in raw mode, {sizes[2]} from each
        of 8 processes; rates count decoded bytes, MB is 10^6. The client checks byte counts, exit codes and
        sequence numbers of every process, and once per server and transport the content.

        Memory is VmHWM of the server process after all that output over one connection; with helpers, the
        PSS of its helper processes at that moment is added.

        Small reads and writes, single messages, lists and walks are the same messages to both, sent by the
        load client; the whole walk does not fit an answer, so both return the same first part of it. Large
        transfers compare the fastest ways there are: our own client, which agrees with our server on binary
        blocks, and on the reference the load client with {READS_IN_FLIGHT} reads or {WRITES_IN_FLIGHT} writes
        of 1 MiB in flight and the fastest base64 for Python. Both end with all of it in one bytes object, or
        begin with one and end with a new file. What is read is in the page cache.

        The download goes to a file, by our client in a process of its own on both servers; its rows are
        the peak memory of the server and of the client, and the rate. Ours are checked not to grow with
        the size of the file.

        The rows over the relay go through a rendezvous of ours, to an environment of either server; the
        harness is ours up to the channel, and from there on a receiver that looks only for the bytes it
        counts, the same for both. "Same client" is that receiver over a plain WebSocket. A stream is opened
        by asking the registry, a WebSocket and a handshake that the environment has the registry confirm.
        "Agents at both ends" are whole programs, `exec-server exec` or `codex exec`, with a scripted model:
        from its asking for a command that prints to its being told the end.

        Both servers run with their defaults; stdio pipes are enlarged to 1 MiB for both.
    """
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]


def as_json(
    results: Sequence[Result], yardsticks: Yardsticks | None, servers: dict[str, str], effort: Effort
) -> dict[str, Any]:
    """Everything, every round included."""
    report: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cores": os.cpu_count(),
            "processor": _processor(),
            "system": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(),
            "loadAverage": os.getloadavg()[0],
        },
        "servers": servers,
        "notes": notes(effort),
        "results": [
            {
                "name": result.row.name,
                "title": result.row.title,
                "transport": result.row.transport,
                "unit": result.row.unit,
                "ours": _numbers(result.ours),
                "reference": _numbers(result.reference),
                "ratio": result.ratio,
                "target": result.row.target,
                "met": result.met,
                "noisy": result.noisy,
            }
            for result in results
        ],
    }
    if yardsticks is not None:
        report["yardsticks"] = {
            "unit": "bytes per second",
            "bareRead": _numbers(yardsticks.bare_read),
            "bareTerminal": _numbers(yardsticks.bare_terminal),
            "client": _numbers(yardsticks.client),
            "binary": yardsticks.binary and _numbers(yardsticks.binary),
            "binaryFraction": yardsticks.binary_fraction,
            "binaryTarget": BINARY_TARGET,
            "skipped": yardsticks.skipped,
        }
    return report


def _numbers(rounds: Sequence[float]) -> dict[str, Any]:
    return {"median": statistics.median(rounds), "rounds": rounds}


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
