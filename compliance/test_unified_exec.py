"""What a model is told by our unified exec is what the reference tells it, word for word.

The same calls are made twice: by `codex exec` with a scripted model, and by `agent.unified` on this machine.
Only what differs from run to run (the id of a chunk, how long it took, the number of a session) is left out.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
from pathlib import Path

import pytest

import exec_server
from compliance.harness import Codex
from compliance.model import Call, Model, Turn, exec_command, write_stdin
from exec_server.agent.exec import ExecCommand, ToolError, WriteStdin
from exec_server.agent.unified import UnifiedExec


@pytest.fixture(autouse=True)
def _empty_home(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Both start login shells, and neither is to wait for somebody's profile."""
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


LINES = "awk 'BEGIN { for (i = 0; i < %d; i++) printf \"%%07d\\n\", i }'"

CALLS: dict[str, Call] = {
    "a word": exec_command("echo hi"),
    "no output": exec_command("true"),
    "both streams and a code": exec_command("echo out; sleep 0.2; echo err >&2; exit 3"),
    "killed by a signal": exec_command("kill -9 $$"),
    "not found by the shell": exec_command("definitely-not-there-xyz 2>/dev/null"),
    "not text": exec_command("printf 'a\\377\\000b'"),
    "a terminal": exec_command("echo hi; tty >/dev/null && echo tty", tty=True),
    "exactly the budget": exec_command("head -c 10000 /dev/zero | tr '\\0' x"),
    "one byte more": exec_command("head -c 10001 /dev/zero | tr '\\0' x"),
    "lines that are too many": exec_command(LINES % 5000),
    "no end of line": exec_command("head -c 30000 /dev/zero | tr '\\0' '\\n'; printf end"),
    "characters at the cut": exec_command("for i in $(seq 3000); do printf 'é€🎉'; done"),
    "few tokens": exec_command("head -c 80000 /dev/zero | tr '\\0' x", max_output_tokens=100),
    "no tokens": exec_command("echo hi there", max_output_tokens=0),
    "more tokens than the model takes": exec_command(LINES % 5000, max_output_tokens=100_000),
    "a flood": exec_command(LINES % 400_000),
    "a flood for few tokens": exec_command(LINES % 400_000, max_output_tokens=50),
    "a directory that is not there": exec_command("true", workdir="/no/such/directory"),
    "a directory from here": exec_command("pwd; mkdir -p sub", workdir="."),
    "nobody of that number": write_stdin(12345, "x"),
}


def normal(text: str) -> str:
    """Without what differs from run to run."""
    text = KNOWN.sub(r"\1", text)
    text = re.sub(r"^Chunk ID: [0-9a-f]{6}\n", "Chunk ID: -\n", text)
    text = re.sub(r"^Wall time: [0-9]+\.[0-9]{4} seconds$", "Wall time: -", text, flags=re.MULTILINE)
    text = re.sub(r"session ID [0-9]+$", "session ID -", text, flags=re.MULTILINE)
    return re.sub(r"process id [0-9]+$", "process id -", text)


KNOWN = re.compile(r'CreateProcess \{ message: "Rejected\(\\"(.*)\\"\)" \}')
"""How the reference prints an error of its own; we leave the wrapping out, here and in comparisons."""

LOOP = "while read x; do echo got:$x; done; echo bye"

TERMINAL: list[tuple[str, int]] = [("one\n", 1500), ("two\n", 1500), ("\x04", 10_000), ("late", 250)]
"""What is typed into the loop on a terminal, and how long is waited. The last one comes too late."""

PLAIN: list[tuple[str, int]] = [("x", 250), ("\x03", 10_000)]
"""The same for a command without a terminal."""


def own_server(workspace: Path) -> list[str]:
    """Our server, in the folder the reference works in."""
    server = shlex.join([sys.executable, "-m", "exec_server", "--listen", "stdio"])
    return ["sh", "-c", f"cd {workspace} && exec {server}"]


async def by_us(target: str | list[str], calls: list[Call]) -> list[str]:
    """What our own tools say to the same calls. A session of 0 is that of the command before."""
    told = []
    async with exec_server.connect(target) as machine:
        unified = UnifiedExec({"here": machine}, "here")
        session = 0
        for number, call in enumerate(calls):
            try:
                if call.name == "exec_command":
                    output = await unified.exec_command(ExecCommand(**call.arguments), f"call_{number}")
                    session = output.session_id or 0
                else:
                    arguments = call.arguments | {"session_id": call.arguments["session_id"] or session}
                    output = await unified.write_stdin(WriteStdin(**arguments))
                told.append(output.text())
            except ToolError as error:
                told.append(str(error))
        await unified.close()
    return told


def by_the_reference(codex: Codex, calls: list[Call]) -> list[str]:
    """What the reference says to them."""

    def turn(call: Call) -> Turn:
        if call.arguments.get("session_id") != 0:
            return call
        return lambda model: Call(call.name, call.arguments | {"session_id": session_of(model)})

    return [result.text for result in codex.run([*map(turn, calls), "done"]).results]


def session_of(model: Model) -> int:
    return next(result.session_id for result in reversed(model.results) if result.session_id is not None)


def compare(codex: Codex, workspace: Path, calls: dict[str, Call]) -> None:
    theirs = by_the_reference(codex, list(calls.values()))
    ours = asyncio.run(by_us(own_server(workspace), list(calls.values())))
    same(calls, theirs, ours)


def same(calls: dict[str, Call], theirs: list[str], ours: list[str]) -> None:
    report = [
        f"{name}:\n theirs {a[:600]!r}\n   ours {b[:600]!r}"
        for name, a, b in zip(calls, map(normal, theirs), map(normal, ours), strict=True)
        if a != b
    ]
    assert not report, "\n\n".join(report)


def test_commands_that_end(codex: Codex, workspace: Path) -> None:
    compare(codex, workspace, CALLS)


@pytest.mark.parametrize("tty", [True, False])
def test_a_conversation(codex: Codex, workspace: Path, tty: bool) -> None:
    start = exec_command(LOOP if tty else "sleep 60", tty=tty, yield_time_ms=250)
    typed = {
        f"typing {chars!r}": write_stdin(0, chars, yield_time_ms=wait)
        for chars, wait in (TERMINAL if tty else PLAIN)
    }
    compare(codex, workspace, {"start": start, **typed})


def test_our_tools_on_the_server_of_the_reference(reference_server: str | list[str], workspace: Path) -> None:
    chosen = ("a word", "both streams and a code", "killed by a signal", "not text", "a terminal", "a flood")
    calls = {name: CALLS[name] for name in chosen}
    calls["a terminal that is talked to"] = exec_command(LOOP, tty=True, yield_time_ms=250)
    calls |= {f"typing {chars!r}": write_stdin(0, chars, yield_time_ms=wait) for chars, wait in TERMINAL}
    theirs = asyncio.run(by_us(reference_server, list(calls.values())))
    same(calls, theirs, asyncio.run(by_us(own_server(workspace), list(calls.values()))))
