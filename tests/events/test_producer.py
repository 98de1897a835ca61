"""Running a program that writes the stream: here real programs that play recordings."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from exec_server.events.model import ItemEvent, Record, ThreadStarted
from exec_server.events.producer import Producer, ProducerError, Verdict, codex_exec
from support.streams import EXPECTED, MANIFEST, stream
from support.wait import eventually_async

Played = tuple[list[Record], Verdict]


@pytest.fixture
def program(tmp_path: Path) -> Callable[..., list[str]]:
    """A program that shows its arguments and its input on stderr, plays a recording, and ends as told."""

    def make(name: str | None = None, then: str = "") -> list[str]:
        recording = tmp_path / "recording.jsonl"
        recording.write_bytes(stream(name) if name else b"")
        script = tmp_path / "program.py"
        script.write_text(
            "import sys, os, signal, time\n"
            "print('arguments', *sys.argv[1:], file=sys.stderr)\n"
            "print('input', sys.stdin.read(), file=sys.stderr)\n"
            f"sys.stdout.buffer.write(open({str(recording)!r}, 'rb').read())\n"
            "sys.stdout.flush()\n" + then
        )
        return [sys.executable, str(script)]

    return make


async def play(producer: Producer) -> Played:
    async with producer as run:
        records = [record async for record in run]
        return records, await run.verdict()


def test_a_run(program: Callable[..., list[str]]) -> None:
    producer = codex_exec("do it\n", program=program("command_huge_output"), options=["-x"])
    records, verdict = asyncio.run(play(producer))
    assert len(records) == 6
    assert verdict.success
    assert verdict.answer == EXPECTED["command_huge_output"]["answer"]
    assert (verdict.exit_code, verdict.reason) == (0, None)
    assert producer._stderr == b"arguments exec --json -x -\ninput do it\n\n", "input is given and ends"


@pytest.mark.parametrize("name", ["http_400", "reconnect_exhausted"])
def test_a_failed_run(name: str, program: Callable[..., list[str]]) -> None:
    code = MANIFEST[name]["exit_code"]
    _, verdict = asyncio.run(play(codex_exec("x", program=program(name, f"sys.exit({code})"))))
    assert not verdict.success
    assert (verdict.outcome, verdict.exit_code, verdict.reason) == ("failed", 1, EXPECTED[name]["error"])


def test_completed_is_no_success_without_a_good_exit_code(program: Callable[..., list[str]]) -> None:
    _, verdict = asyncio.run(play(codex_exec("x", program=program("plain_message", "sys.exit(1)"))))
    assert (verdict.outcome, verdict.success) == ("completed", False)


def test_nothing_but_an_error_on_stderr(program: Callable[..., list[str]]) -> None:
    then = (
        "print('Error: no such thread', file=sys.stderr)\n"
        "print('2026-01-01T00:00:00Z WARN codex: bye', file=sys.stderr)\nsys.exit(1)"
    )
    records, verdict = asyncio.run(play(codex_exec("x", program=program(None, then))))
    assert records == []
    assert (verdict.outcome, verdict.reason) == ("none", "Error: no such thread")


def test_a_run_cut_short(program: Callable[..., list[str]]) -> None:
    then = "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)"
    _, verdict = asyncio.run(play(codex_exec("x", program=program("terminated", then))))
    assert (verdict.outcome, verdict.exit_code) == ("incomplete", -15)
    assert verdict.reason == "stream ended before the turn finished"


def test_resuming(program: Callable[..., list[str]]) -> None:
    thread = EXPECTED["resume_2_by_id"]["thread_id"]
    producer = codex_exec("x", program=program("resume_2_by_id"), resume=thread)
    _, verdict = asyncio.run(play(producer))
    assert verdict.success
    assert f"resume {thread} -".encode() in producer._stderr
    with pytest.raises(ProducerError, match=f"asked for thread other, the producer started {thread}"):
        asyncio.run(play(codex_exec("x", program=program("resume_2_by_id"), resume="other")))


@pytest.mark.parametrize("stubborn", [False, True])
def test_stopping_takes_the_whole_group(
    stubborn: bool, program: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Also a program that does not listen, and the child that really works."""
    ignore = "[signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)]\n"
    write = f"open({str(tmp_path / 'child')!r}, 'w').write(str(os.getpid()))"
    fork = f"if os.fork() == 0:\n    {write}\n"
    then = (ignore if stubborn else "") + fork + "time.sleep(600)"

    async def main() -> None:
        async with codex_exec("x", program=program("interrupted", then)) as run:
            async for record in run:
                if isinstance(record, ItemEvent):
                    break
            file = tmp_path / "child"
            child = int(await eventually_async(lambda: file.exists() and file.read_text(), "the child"))
            await run.stop(0.2 if stubborn else 20.0)
            await eventually_async(lambda: not alive(child), "the end of the child")
            verdict = await run.verdict()
            assert verdict.exit_code == (-9 if stubborn else -2), "as the one that was started ended"
            assert not verdict.success

    asyncio.run(main())


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_flood_of_errors_stops_nobody(program: Callable[..., list[str]]) -> None:
    then = "sys.stderr.write('e' * 1_000_000 + '\\nlast words\\n'); sys.exit(3)"
    producer = codex_exec("x" * 1_000_000, program=program("fork_only", then))
    records, verdict = asyncio.run(play(producer))
    assert isinstance(records[0], ThreadStarted)
    assert verdict.reason == "last words"
    assert len(producer._stderr) <= 64 * 1024


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        asyncio.run(play(codex_exec("x", program=[os.path.join(tmp_path, "codex")])))


def test_it_is_a_context() -> None:
    with pytest.raises(ProducerError, match="async with"):
        asyncio.run(codex_exec("x").verdict())
