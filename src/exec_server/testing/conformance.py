"""What every server of this protocol must do, as a table of checks.

Only what servers agree on is required. What a server announces by a capability flag is checked when it
announces it, and reported as skipped when it does not.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from msgspec import Struct

from ..wire import base64
from .peer import Peer, ServerUnderTest, start_params

__all__ = ["CHECKS", "Outcome", "Report", "check_server"]


class Outcome(Struct, frozen=True):
    """What became of one check: passed, failed, or skipped because the server does not have it."""

    name: str
    result: str
    detail: str = ""


class Report(Struct, frozen=True):
    """Every check and what became of it."""

    outcomes: list[Outcome]

    @property
    def failures(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.result == "failed"]

    def raise_for_failures(self) -> None:
        """AssertionError that names every failed check."""
        if self.failures:
            lines = [f"{outcome.name}: {outcome.detail}" for outcome in self.failures]
            raise AssertionError("the server does not conform:\n" + "\n".join(lines))

    def __str__(self) -> str:
        lines = [
            f"{outcome.result:8}{outcome.name}{'  ' + outcome.detail if outcome.detail else ''}"
            for outcome in self.outcomes
        ]
        counts = {
            result: sum(outcome.result == result for outcome in self.outcomes)
            for result in ("passed", "failed", "skipped")
        }
        lines.append(", ".join(f"{count} {result}" for result, count in counts.items()))
        return "\n".join(lines)


class Check(Struct, frozen=True):
    """One thing a server must do."""

    name: str
    run: Callable[[ServerUnderTest], Awaitable[None]]
    flag: str | None = None
    """Only for servers that announce this capability."""
    resumable: bool = False
    """Only where a second connection reaches the same server."""
    options: tuple[str, ...] = ()
    """Only where the server is started for the check, with these."""


CHECKS: list[Check] = []


def check(
    flag: str | None = None, *, resumable: bool = False, options: tuple[str, ...] = ()
) -> Callable[[Callable[[ServerUnderTest], Awaitable[None]]], Callable[[ServerUnderTest], Awaitable[None]]]:
    """Put a function into the table."""

    def register(
        run: Callable[[ServerUnderTest], Awaitable[None]],
    ) -> Callable[[ServerUnderTest], Awaitable[None]]:
        name = run.__name__.removeprefix("_").replace("_", " ")
        CHECKS.append(Check(name, run, flag, resumable, options))
        return run

    return register


async def check_server(
    target: str | Sequence[str], *, token: str | None = None, only: str | None = None
) -> Report:
    """Put a server through every check.

    `target` is the URL of a running server, or the words of a command that serves on stdio (it is started
    afresh for each connection). `only` limits the run to checks whose name contains it.
    """
    flags = await _capabilities(target, token)
    outcomes: list[Outcome] = []
    for entry in CHECKS:
        if only is not None and only not in entry.name:
            continue
        server = ServerUnderTest(target, token, entry.options)
        if entry.flag is not None and flags.get(entry.flag) is not True:
            outcomes.append(Outcome(entry.name, "skipped", f"no capability {entry.flag}"))
            continue
        if entry.resumable and not server.resumable:
            outcomes.append(Outcome(entry.name, "skipped", "one connection per server"))
            continue
        if entry.options and isinstance(target, str):
            outcomes.append(Outcome(entry.name, "skipped", "only for a server that is started here"))
            continue
        outcomes.append(await _outcome(entry, server))
    return Report(outcomes)


async def _outcome(entry: Check, server: ServerUnderTest) -> Outcome:
    try:
        await entry.run(server)
    except AssertionError as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return Outcome(entry.name, "failed", str(error) or f"line {place.lineno}: {place.line}")
    except Exception as error:
        return Outcome(entry.name, "failed", f"{type(error).__name__}: {error}")
    finally:
        await server.close()
    return Outcome(entry.name, "passed")


async def _capabilities(target: str | Sequence[str], token: str | None) -> dict[str, Any]:
    server = ServerUnderTest(target, token)
    try:
        peer = await server.connect()
        reply = await peer.initialize()
        info = reply.get("environmentInfo") or await peer.call("environment/info")
        capabilities = info.get("capabilities", {})
        return capabilities if isinstance(capabilities, dict) else {}
    finally:
        await server.close()


async def _ready(server: ServerUnderTest, **params: Any) -> Peer:
    peer = await server.connect()
    await peer.initialize(**params)
    return peer


# The handshake -----------------------------------------------------------------------------------


@check()
async def _handshake_gives_a_session(server: ServerUnderTest) -> None:
    peer = await server.connect()
    reply = await peer.initialize()
    assert isinstance(reply["sessionId"], str)
    assert reply["sessionId"]
    assert await peer.call("environment/status") == {"status": "ready"}


@check()
async def _methods_before_the_handshake_are_refused(server: ServerUnderTest) -> None:
    peer = await server.connect()
    error = await peer.error("environment/status", {})
    assert error["code"] == -32600, error
    await peer.call("initialize", {"clientName": "conformance"})
    error = await peer.error("process/terminate", {"processId": "x"})
    assert error["code"] == -32600, error


@check()
async def _params_are_judged_before_the_handshake(server: ServerUnderTest) -> None:
    peer = await server.connect()
    assert (await peer.error("process/start", {}))["code"] == -32602
    assert (await peer.error("no/such/method", {}))["code"] == -32601


@check()
async def _initialize_works_once(server: ServerUnderTest) -> None:
    peer = await _ready(server)
    assert (await peer.error("initialize", {"clientName": "again"}))["code"] == -32600


@check()
async def _malformed_messages_are_answered_with_id_minus_one(server: ServerUnderTest) -> None:
    peer = await _ready(server)
    for text in (
        "not-json",
        "[]",
        "{}",
        '{"id":1,"id":2,"method":"environment/status"}',
        '{"id":1.5,"method":"x"}',
    ):
        peer.send_text(text)
        answer = await peer.answer(-1)
        assert answer["error"]["code"] == -32600, f"{text}: {answer}"
    assert await peer.call("environment/status") == {"status": "ready"}


@check()
async def _ids_come_back_as_they_went(server: ServerUnderTest) -> None:
    peer = await _ready(server)
    for request_id in ("text", "", -7, 2**63 - 1):
        peer.send({"id": request_id, "method": "environment/status"})
        assert (await peer.answer(request_id))["result"] == {"status": "ready"}


# Processes ---------------------------------------------------------------------------------------


@check()
async def _output_and_exit_code(server: ServerUnderTest) -> None:
    peer = await _ready(server)
    reply = await peer.start("p", "/bin/sh", "-c", "printf out; printf err >&2; exit 7")
    assert reply["processId"] == "p"
    output, code = await peer.finish("p")
    assert output == {"stdout": b"out", "stderr": b"err"}
    assert code == 7


@check()
async def _environment_is_exactly_what_was_given(server: ServerUnderTest) -> None:
    peer = await _ready(server)
    await peer.start("p", "/usr/bin/env", env={"A": "1", "B": "zwei"})
    output, _ = await peer.finish("p")
    assert sorted(output["stdout"].split()) == [b"A=1", b"B=zwei"]


@check()
async def _bytes_survive(server: ServerUnderTest) -> None:
    peer = await _ready(server)
    await peer.start("p", "/bin/sh", "-c", "head -c 300000 /dev/zero; printf '\\377\\000\\n\\r'")
    output, _ = await peer.finish("p")
    assert output["stdout"] == bytes(300000) + b"\xff\x00\n\r"


@check()
async def _a_terminal_is_a_terminal(server: ServerUnderTest) -> None:
    peer = await _ready(server)
    script = "test -t 0 && test -t 1 && stty size"
    await peer.start("p", "/bin/sh", "-c", script, tty=True)
    output, code = await peer.finish("p")
    assert code == 0
    assert output == {"pty": b"24 80\r\n"}


@check()
async def _a_failed_start_frees_the_id(server: ServerUnderTest) -> None:
    peer = await _ready(server)
    error = await peer.error("process/start", start_params("p", "/no/such/program"))
    assert error["code"] == -32603, error
    assert (await peer.error("process/start", start_params("p")))["code"] == -32602
    await peer.start("p", "/bin/true")
    await peer.finish("p")


@check()
async def _an_id_is_used_once(server: ServerUnderTest) -> None:
    peer = await _ready(server)
    await peer.start("p", "/bin/true")
    error = await peer.error("process/start", start_params("p", "/bin/true"))
    assert error["code"] == -32600, error
    await peer.finish("p")
    error = await peer.error("process/start", start_params("p", "/bin/true"))
    assert error["code"] == -32600, error


@check()
async def _writes_arrive_in_order_and_once(server: ServerUnderTest) -> None:
    peer = await _ready(server)
    await peer.start("p", "/bin/cat", pipeStdin=True)
    for write_id, text in (("1", b"one\n"), ("2", b"two\n"), ("2", b"two again\n"), ("3", b"three\n")):
        params = {"processId": "p", "chunk": base64.encode(text), "writeId": write_id}
        assert await peer.call("process/write", params) == {"status": "accepted"}
    assert await peer.output_until("p", b"three\n") == b"one\ntwo\nthree\n"
    assert (await peer.call("process/terminate", {"processId": "p"}))["running"] is True
    assert (await peer.finish("p"))[1] == 137


@check()
async def _writes_that_cannot_be_say_so(server: ServerUnderTest) -> None:
    peer = await _ready(server)
    write = {"processId": "nobody", "chunk": "eA==", "writeId": "1"}
    assert await peer.call("process/write", write) == {"status": "unknownProcess"}
    assert (await peer.error("process/write", {**write, "chunk": "e A=="}))["code"] == -32602
    assert (await peer.error("process/write", {**write, "writeId": ""}))["code"] == -32602
    await peer.start("p", "/bin/sleep", "30")
    assert await peer.call("process/write", {**write, "processId": "p"}) == {"status": "stdinClosed"}


@check()
async def _read_gives_what_was_kept(server: ServerUnderTest) -> None:
    peer = await _ready(server)
    await peer.start("p", "/bin/sh", "-c", "echo one; echo two >&2")
    await peer.finish("p")
    result = await peer.call("process/read", {"processId": "p"})
    assert b"".join(base64.decode(chunk["chunk"]) for chunk in result["chunks"]).split() in (
        [b"one", b"two"],
        [b"two", b"one"],
    )
    assert result["exited"]
    assert result["closed"]
    assert result["exitCode"] == 0
    again = await peer.call(
        "process/read", {"processId": "p", "afterSeq": result["nextSeq"] - 1, "waitMs": 5000}
    )
    assert again["chunks"] == []
    assert (await peer.error("process/read", {"processId": "nobody"}))["code"] == -32600


@check()
async def _a_long_poll_ends_when_something_happens(server: ServerUnderTest) -> None:
    peer = await _ready(server)
    await peer.start("p", "/bin/sh", "-c", "read line; echo got $line", pipeStdin=True, tty=True)
    first = await peer.call("process/read", {"processId": "p", "waitMs": 0})
    poll = peer.ask("process/read", {"processId": "p", "afterSeq": first["nextSeq"] - 1, "waitMs": 8000})
    if await _steps_aside(peer):
        write = {"processId": "p", "chunk": base64.encode(b"x\n"), "writeId": "1"}
        await peer.call("process/write", write)
        assert (await peer.answer(poll))["result"]["chunks"]
    else:
        assert (await peer.answer(poll))["result"]["exited"] is False


async def _steps_aside(peer: Peer) -> bool:
    """Whether the server answers others while a poll waits; the reference's default does not."""
    status = peer.ask("environment/status")
    try:
        async with asyncio.timeout(1):
            await peer.answer(status)
    except TimeoutError:
        return False
    return True


def trapping(action: str, signal: str) -> str:
    """A script that says when it is ready, and does something when it gets a signal."""
    return f"trap '{action}' {signal}; echo ready; while :; do sleep 0.05; done"


@check()
async def _interrupt_reaches_the_group(server: ServerUnderTest) -> None:
    peer = await _ready(server)
    await peer.start("p", "/bin/sh", "-c", trapping("echo caught; exit 3", "INT"))
    await peer.output_until("p", b"ready")
    assert await peer.call("process/signal", {"processId": "p", "signal": "interrupt"}) == {}
    output, code = await peer.finish("p")
    assert output["stdout"] == b"ready\ncaught\n"
    assert code == 3
    assert await peer.call("process/signal", {"processId": "nobody", "signal": "interrupt"}) == {}


@check()
async def _terminate_kills_the_group(server: ServerUnderTest) -> None:
    peer = await _ready(server)
    await peer.start("p", "/bin/sh", "-c", "trap '' TERM INT; sleep 60 & echo ready; wait")
    await peer.output_until("p", b"ready")
    assert (await peer.call("process/terminate", {"processId": "p"}))["running"] is True
    assert (await peer.finish("p"))[1] == 137
    assert await peer.call("process/terminate", {"processId": "p"}) == {"running": False}
    assert await peer.call("process/terminate", {"processId": "nobody"}) == {"running": False}


@check()
async def _late_output_follows_the_exit(server: ServerUnderTest) -> None:
    peer = await _ready(server)
    await peer.start("p", "/bin/sh", "-c", "(sleep 0.3; echo late) & exit 0")
    events = await peer.events("p")
    methods = [event["method"] for event in events]
    assert methods == ["process/exited", "process/output", "process/closed"], methods


# Sessions ----------------------------------------------------------------------------------------


@check(resumable=True)
async def _sessions_do_not_see_each_other(server: ServerUnderTest) -> None:
    one, other = await _ready(server), await _ready(server)
    await one.start("p", "/bin/sleep", "30")
    assert await other.call("process/terminate", {"processId": "p"}) == {"running": False}
    await other.start("p", "/bin/true")
    await other.finish("p")


@check(resumable=True)
async def _a_session_survives_its_connection(server: ServerUnderTest) -> None:
    peer = await server.connect()
    session = (await peer.initialize())["sessionId"]
    await peer.start("p", "/bin/sh", "-c", "echo one; read x; echo two; sleep 30", pipeStdin=True)
    await peer.output_until("p", b"one")
    other = await server.connect()
    attached = await other.error("initialize", {"clientName": "c", "resumeSessionId": session})
    assert attached["code"] == -32010, attached
    peer.hang_up()
    back = await server.connect()
    async with asyncio.timeout(10):
        while True:
            answer = await back.answer(
                back.ask("initialize", {"clientName": "c", "resumeSessionId": session})
            )
            if "result" in answer:
                break
            assert answer["error"]["code"] == -32010, answer
    assert answer["result"]["sessionId"] == session
    back.send({"method": "initialized"})
    write = {"processId": "p", "chunk": base64.encode(b"\n"), "writeId": "1"}
    assert await back.call("process/write", write) == {"status": "accepted"}
    await back.output_until("p", b"two")
    result = await back.call("process/read", {"processId": "p"})
    chunks = [(chunk["seq"], base64.decode(chunk["chunk"])) for chunk in result["chunks"]]
    assert chunks == [(1, b"one\n"), (2, b"two\n")]
    await back.call("process/terminate", {"processId": "p"})


@check(resumable=True)
async def _unknown_sessions_are_refused(server: ServerUnderTest) -> None:
    peer = await server.connect()
    error = await peer.error("initialize", {"clientName": "c", "resumeSessionId": "no-such-session"})
    assert error["code"] == -32600, error
    await peer.initialize()


# What some servers have --------------------------------------------------------------------------


@check("processCloseStdin")
async def _stdin_can_be_closed(server: ServerUnderTest) -> None:
    peer = await _ready(server)
    await peer.start("p", "/bin/cat", pipeStdin=True)
    write = {"processId": "p", "chunk": base64.encode(b"all"), "writeId": "1"}
    await peer.call("process/write", write)
    assert await peer.call("process/closeStdin", {"processId": "p"}) == {"status": "accepted"}
    assert await peer.finish("p") == ({"stdout": b"all"}, 0)
    assert await peer.call("process/closeStdin", {"processId": "nobody"}) == {"status": "unknownProcess"}


async def _check_pipelined_order(server: ServerUnderTest) -> None:
    peer = await _ready(server)
    start = peer.ask("process/start", start_params("p", "/bin/cat", pipeStdin=True))
    writes = [
        peer.ask("process/write", {"processId": "p", "chunk": base64.encode(text), "writeId": str(number)})
        for number, text in enumerate((b"one ", b"two ", b"three"))
    ]
    close = peer.ask("process/closeStdin", {"processId": "p"})
    assert "result" in await peer.answer(start)
    for request in (*writes, close):
        assert (await peer.answer(request)).get("result") == {"status": "accepted"}
    assert await peer.finish("p") == ({"stdout": b"one two three"}, 0)
    failing = peer.ask("process/start", start_params("q", "/no/such/program"))
    reading = peer.ask("process/read", {"processId": "q"})
    again = peer.ask("process/start", start_params("q", "/bin/true"))
    assert "error" in await peer.answer(failing)
    assert "error" in await peer.answer(reading), "it was asked before the second start"
    assert "result" in await peer.answer(again)


@check("processCloseStdin")
async def _what_is_asked_at_once_happens_in_order(server: ServerUnderTest) -> None:
    await _check_pipelined_order(server)


@check("processCloseStdin", options=("--concurrent-requests", "2"))
async def _what_has_to_queue_happens_in_order(server: ServerUnderTest) -> None:
    await _check_pipelined_order(server)


@check("processWait")
async def _writes_without_room_fail_at_terminate(server: ServerUnderTest) -> None:
    peer = await _ready(server)
    await peer.start("p", "/bin/sleep", "60", pipeStdin=True)
    write = {"processId": "p", "chunk": base64.encode(bytes(100_000))}
    writes = [peer.ask("process/write", {**write, "writeId": str(number)}) for number in range(200)]
    assert (await peer.call("process/terminate", {"processId": "p"}))["running"] is True
    answers = [await peer.answer(request) for request in writes]
    codes = [answer["error"]["code"] if "error" in answer else 0 for answer in answers]
    assert codes == [0] * codes.count(0) + [-32603] * (200 - codes.count(0)), codes
    assert codes[0] == 0
    assert codes[-1] == -32603


@check("processResize")
async def _terminals_can_be_resized(server: ServerUnderTest) -> None:
    peer = await _ready(server)
    script = trapping("stty size; exit", "WINCH")
    await peer.start("p", "/bin/sh", "-c", script, tty=True, ptySize={"rows": 10, "cols": 20})
    await peer.output_until("p", b"ready")
    assert await peer.call("process/resize", {"processId": "p", "rows": 33, "cols": 101}) == {}
    output, _ = await peer.finish("p")
    assert output["pty"] == b"ready\r\n33 101\r\n"


@check("processWait")
async def _waiting_delays_nobody(server: ServerUnderTest) -> None:
    peer = await _ready(server)
    await peer.start("p", "/bin/sh", "-c", "read x; exit 5", pipeStdin=True)
    waiting = peer.ask("process/wait", {"processId": "p"})
    timed_out = await peer.call("process/wait", {"processId": "p", "waitMs": 10})
    assert timed_out["timedOut"]
    assert not timed_out["exited"]
    await peer.call("process/write", {"processId": "p", "chunk": "Cg==", "writeId": "1"})
    result = (await peer.answer(waiting))["result"]
    assert result["exitCode"] == 5
    assert result["closed"]
    assert not result["timedOut"]


@check("processSnapshot")
async def _a_snapshot_has_head_or_tail(server: ServerUnderTest) -> None:
    peer = await _ready(server)
    await peer.start("p", "/bin/sh", "-c", "head -c 3000000 /dev/zero; printf end; printf err >&2")
    await peer.finish("p")
    result = await peer.call("process/snapshot", {"processId": "p"})
    stdout = base64.decode(result["stdout"])
    assert stdout.endswith(b"end")
    assert base64.decode(result["stderr"]) == b"err"
    assert result["truncated"]
    assert result["droppedBytes"] + len(stdout) + 3 == 3000006


@check("processTerminateModes")
async def _graceful_terminate_asks_first(server: ServerUnderTest) -> None:
    peer = await _ready(server)
    await peer.start("p", "/bin/sh", "-c", trapping("echo bye; exit 0", "TERM"))
    await peer.output_until("p", b"ready")
    mode = {"type": "graceful", "timeoutMs": 8000}
    assert (await peer.call("process/terminate", {"processId": "p", "mode": mode}))["running"] is True
    output, code = await peer.finish("p")
    assert output["stdout"] == b"ready\nbye\n"  # the shell may have something to say on stderr
    assert code == 0
    await peer.start("q", "/bin/sh", "-c", trapping("", "TERM"))
    await peer.output_until("q", b"ready")
    await peer.call("process/terminate", {"processId": "q", "mode": {"type": "graceful", "timeoutMs": 100}})
    assert (await peer.finish("q"))[1] == 137
    error = await peer.error("process/terminate", {"processId": "q", "mode": {"type": "sudden"}})
    assert error["code"] == -32602, error


@check("processTerminateModes")
async def _the_whole_tree_goes(server: ServerUnderTest) -> None:
    peer = await _ready(server)
    await peer.start(
        "p",
        "/bin/sh",
        "-c",
        "setsid sleep 600 & (setsid sleep 600 &) ; sleep 600 & sleep 0.2; echo ready; wait",
    )
    await peer.output_until("p", b"ready")
    result = await peer.call("process/terminate", {"processId": "p", "mode": {"type": "force"}})
    assert result["running"] is True
    assert result.get("killed", 4) >= 4, result
    await peer.finish("p")


@check("processTerminateModes")
async def _a_large_tree_goes_as_a_whole(server: ServerUnderTest) -> None:
    peer = await _ready(server)
    script = "i=0; while [ $i -lt 100 ]; do setsid sleep 600 & i=$((i+1)); done; sleep 0.2; echo ready; wait"
    await peer.start("p", "/bin/sh", "-c", script)
    await peer.output_until("p", b"ready")
    result = await peer.call("process/terminate", {"processId": "p", "mode": {"type": "force"}})
    assert result.get("killed", 101) >= 101, result
    await peer.finish("p")


@check("processSignals")
async def _any_signal_can_be_sent(server: ServerUnderTest) -> None:
    peer = await _ready(server)
    await peer.start("p", "/bin/sh", "-c", trapping("echo usr1; exit", "USR1"))
    await peer.output_until("p", b"ready")
    assert await peer.call("process/signal", {"processId": "p", "signal": "SIGUSR1"}) == {}
    assert (await peer.finish("p"))[0]["stdout"] == b"ready\nusr1\n"


@check("processLifecycleEvents")
async def _starts_are_told_to_those_who_ask(server: ServerUnderTest) -> None:
    peer = await _ready(server, lifecycleEvents=True)
    await peer.start("p", "/bin/sh", "-c", "echo $$")
    output, _ = await peer.finish("p")
    started = [
        message["params"]["pid"]
        for message in peer.notifications("process/started")
        if "pid" in message["params"]
    ]
    assert started == [int(output["stdout"])]
