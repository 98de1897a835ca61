"""What a sandbox costs: starting a command in one, and touching a file through one.

    python -m benchmarks.sandbox

The workloads fit into the table of `measurements`; run by itself this module also puts the bare spawn and
each of our backends next to each other, which one server cannot.
"""

import itertools
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .client import Client, WrongAnswer, result_of
from .deadline import SECONDS_PER_ROUND, deadline
from .reference import find_reference
from .server import Command, WebSocketServer
from .workloads import Effort

__all__ = ["READ_ONLY", "small_read", "small_write", "spawn_read_only", "spawn_workspace"]

HOMES = Path("~/.cache/exec-server/benchmark-homes").expanduser()
"""Not below /tmp: there the reference makes no alias of itself, and cannot start anything in a sandbox."""

PLACE = Path("/var/tmp/exec-server-benchmark-sandbox")
"""Where files are. Not below /tmp either, which policies treat specially."""

FORBIDDING = Path(__file__).parent.parent / "tests" / "support" / "forbidding.py"
"""Starts a server that can make no user namespaces, and so has Landlock only."""

ROUNDS = 7
_numbers = itertools.count(1)


def _profile(*entries: dict[str, Any], **more: Any) -> dict[str, Any]:
    files = {"type": "restricted", "entries": list(entries)}
    permissions = {"type": "managed", "file_system": files, "network": "restricted"}
    return {"windowsSandboxLevel": "disabled", "permissions": permissions, **more}


def _special(kind: str, access: str) -> dict[str, Any]:
    return {"path": {"type": "special", "value": {"kind": kind}}, "access": access}


READ_ONLY = _profile(_special("root", "read"))
WORKSPACE = _profile(
    _special("root", "read"),
    _special("project_roots", "write"),
    cwd=f"file://{PLACE}",
    workspaceRoots=[f"file://{PLACE}"],
)
SCOPED = _profile(
    _special("minimal", "read"),
    {"path": {"type": "path", "path": f"file://{PLACE}"}, "access": "read"},
)
"""What cannot be read without a helper: all but one directory is hidden."""
FILTER = {
    "windowsSandboxLevel": "disabled",
    "permissions": {"type": "managed", "file_system": {"type": "unrestricted"}, "network": "restricted"},
}


# One number for one connection -------------------------------------------------------------------


def spawn_read_only(client: Client, effort: Effort) -> float:
    """Seconds from `process/start` to `process/closed` of a program that does nothing, read-only."""
    return _spawn(client, effort, READ_ONLY)


def spawn_workspace(client: Client, effort: Effort) -> float:
    """The same with a workspace that can be written and has names in it to protect."""
    return _spawn(client, effort, WORKSPACE)


def small_read(client: Client, effort: Effort) -> float:
    """Seconds of `fs/readFile` of 4 KiB that only a sandboxed helper may read."""
    PLACE.mkdir(exist_ok=True)
    (PLACE / "small").write_bytes(b"x" * 4096)
    return _sampled(lambda: _file_call(client, "fs/readFile", {}, SCOPED), effort)


def small_write(client: Client, effort: Effort) -> float:
    """Seconds of `fs/writeFile` of a few bytes into a workspace."""
    PLACE.mkdir(exist_ok=True)
    return _sampled(lambda: _file_call(client, "fs/writeFile", {"dataBase64": "eA=="}, WORKSPACE), effort)


def plain_read(client: Client, effort: Effort) -> float:
    """Seconds of `fs/readFile` of 4 KiB without a sandbox."""
    PLACE.mkdir(exist_ok=True)
    (PLACE / "small").write_bytes(b"x" * 4096)
    return _sampled(lambda: _file_call(client, "fs/readFile", {}, None), effort)


def _file_call(client: Client, method: str, params: dict[str, Any], sandbox: dict[str, Any] | None) -> float:
    asked = {"path": f"file://{PLACE}/small", **params, **({"sandbox": sandbox} if sandbox else {})}
    started = time.perf_counter()
    client.call(method, asked)
    return time.perf_counter() - started


def _spawn(client: Client, effort: Effort, sandbox: dict[str, Any] | None) -> float:
    PLACE.mkdir(exist_ok=True)
    program = shutil.which("true") or "/bin/true"
    return _sampled(lambda: _spawn_once(client, program, sandbox), effort)


def _spawn_once(client: Client, program: str, sandbox: dict[str, Any] | None) -> float:
    import json

    params = {
        "processId": f"sandboxed-{next(_numbers)}",
        "argv": [program],
        "cwd": f"file://{PLACE}",
        "env": {"PATH": "/usr/bin:/bin"},
        "tty": False,
        "arg0": None,
        **({"sandbox": sandbox} if sandbox else {}),
    }
    id_, request = client.request("process/start", params)
    exit_code = None
    started = time.perf_counter()
    client.send_raw(request)
    while True:
        message = json.loads(client.receive())
        if message.get("id") == id_:
            result_of(message)
        elif message.get("method") == "process/exited":
            exit_code = message["params"]["exitCode"]
        elif message.get("method") == "process/closed":
            took = time.perf_counter() - started
            if exit_code != 0:
                raise WrongAnswer(f"a program that does nothing ended with {exit_code}")
            return took


def _sampled(once: Callable[[], float], effort: Effort) -> float:
    for _ in range(3):
        once()
    samples: list[float] = []
    end = time.perf_counter() + effort.seconds
    while len(samples) < effort.samples or time.perf_counter() < end:
        samples.append(once())
    return statistics.median(samples)


# Everything next to each other -------------------------------------------------------------------


def bare_spawn(effort: Effort) -> float:
    """Seconds of `posix_spawn` and `waitpid`, without any server: the floor."""
    program = shutil.which("true") or "/bin/true"

    def once() -> float:
        started = time.perf_counter()
        os.waitpid(os.posix_spawn(program, ["true"], {}), 0)
        return time.perf_counter() - started

    return _sampled(once, effort)


def main() -> int:
    """Measure in turns, print the medians."""
    effort = Effort(seconds=0.3)
    HOMES.mkdir(parents=True, exist_ok=True)
    server = str(Path(sys.executable).parent / "exec-server")
    with tempfile.TemporaryDirectory(dir=HOMES) as home:
        ours = Command("ours", [server], home)
        landlock = Command("ours, Landlock", [sys.executable, "-I", str(FORBIDDING), server], home)
        reference = Command("reference", [find_reference(), "exec-server"], home)
        with WebSocketServer(ours) as a, WebSocketServer(landlock) as b, WebSocketServer(reference) as c:
            rows: list[tuple[str, Callable[[], float]]] = [
                ("bare spawn", lambda: bare_spawn(effort)),
                ("ours, no sandbox", lambda: _on(a, _spawn, effort, None)),
                ("ours, filter alone", lambda: _on(a, _spawn, effort, FILTER)),
                ("ours, Landlock, read-only", lambda: _on(b, _spawn, effort, READ_ONLY)),
                ("ours, bubblewrap, read-only", lambda: _on(a, _spawn, effort, READ_ONLY)),
                ("ours, bubblewrap, workspace", lambda: _on(a, _spawn, effort, WORKSPACE)),
                ("reference, no sandbox", lambda: _on(c, _spawn, effort, None)),
                ("reference, read-only", lambda: _on(c, _spawn, effort, READ_ONLY)),
                ("reference, workspace", lambda: _on(c, _spawn, effort, WORKSPACE)),
                ("ours, 4 KiB read, no sandbox", lambda: _on(a, plain_read, effort)),
                ("ours, 4 KiB read, scoped", lambda: _on(a, small_read, effort)),
                ("reference, 4 KiB read, no sandbox", lambda: _on(c, plain_read, effort)),
                ("reference, 4 KiB read, scoped", lambda: _on(c, small_read, effort)),
                ("ours, small write, workspace", lambda: _on(a, small_write, effort)),
                ("reference, small write, workspace", lambda: _on(c, small_write, effort)),
            ]
            found = _in_turns(rows)
    shutil.rmtree(PLACE, ignore_errors=True)
    width = max(map(len, found))
    for name, seconds in found.items():
        print(f"{name.ljust(width)}  {seconds * 1000:8.3f} ms")
    print()
    for what in ("read-only", "workspace"):
        ratio = found[f"reference, {what}"] / found[f"ours, bubblewrap, {what}"]
        print(f"spawn, {what}: {ratio:.1f} times faster than the reference")
    ratio = found["reference, 4 KiB read, scoped"] / found["ours, 4 KiB read, scoped"]
    plain = found["ours, 4 KiB read, scoped"] / found["ours, 4 KiB read, no sandbox"]
    print(f"read: {ratio:.1f} times faster than the reference, {plain:.1f} times as long as without one")
    return 0


def _on(server: WebSocketServer, workload: Callable[..., float], effort: Effort, *more: Any) -> float:
    with deadline(SECONDS_PER_ROUND), server.connect() as client:
        return workload(client, effort, *more)


def _in_turns(rows: Sequence[tuple[str, Callable[[], float]]]) -> dict[str, float]:
    """All of them in every round, so that what the machine does meanwhile hits all."""
    numbers: dict[str, list[float]] = {name: [] for name, _ in rows}
    for _ in range(ROUNDS):
        for name, measure in rows:
            try:
                numbers[name].append(measure())
            except WrongAnswer as error:
                raise WrongAnswer(f"{name}: {error}") from error
    return {name: statistics.median(found) for name, found in numbers.items()}


if __name__ == "__main__":
    sys.exit(main())
