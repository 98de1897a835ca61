"""server/session.py: who owns which processes, and what becomes of them when the connection goes."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exec_server.limits import Limits
from exec_server.local.process import tree
from exec_server.local.process.machine import ProcessMachine
from exec_server.server.metrics import Metrics
from exec_server.server.session import TRANSITIONS, Session, SessionRegistry, SessionState
from exec_server.wire.errors import RpcError
from support.frames import CLOSE, TEXT, RawSocket, frame
from support.local import Ear, spec
from support.machine import gone, running, sleep_forever
from support.processes import kill_sleeper
from support.rpc import StdioPeer, WebSocketPeer, unb64
from support.server import RunningServer
from support.wait import eventually

Connect = Callable[..., WebSocketPeer]
StartServer = Callable[..., RunningServer]

LISTED = {
    ("attached", "detached"),
    ("attached", "expired"),
    ("detached", "attached"),
    ("detached", "expired"),
}


class Somebody:
    """A connection, as far as a registry minds."""

    heard = 0.0
    probed = 0

    def probe(self) -> None:
        self.probed += 1


# The table ---------------------------------------------------------------------------------------


def test_the_table_is_the_one_of_the_specification() -> None:
    assert {(a.value, b.value) for a, following in TRANSITIONS.items() for b in following} == LISTED


def in_a_loop(work: Callable[[ProcessMachine], Any], **limits: Any) -> None:
    async def run() -> None:
        machine = ProcessMachine(asyncio.get_running_loop(), Limits(**limits))
        try:
            result = work(machine)
            if result is not None:
                await result
        finally:
            machine.close()

    asyncio.run(run())


@settings(max_examples=50)
@given(st.lists(st.sampled_from(SessionState), max_size=12))
def test_only_what_is_listed_can_happen(walk: list[SessionState]) -> None:
    def work(machine: ProcessMachine) -> None:
        session = Session("s", machine)
        for state in walk:
            before = session.state
            if (before.value, state.value) in LISTED:
                session.become(state)
                assert session.state is state
            else:
                with pytest.raises(RuntimeError):
                    session.become(state)
                assert session.state is before

    in_a_loop(work)


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.sampled_from(["create", "resume", "leave", "end"]), st.integers(0, 5)), max_size=30)
)
def test_the_registry_does_what_a_dictionary_would(walk: list[tuple[str, int]]) -> None:
    def work(machine: ProcessMachine) -> None:
        metrics = Metrics()
        registry = SessionRegistry(machine, metrics)
        model: dict[str, str] = {}
        sessions: list[Session] = []
        connection: Any = Somebody()
        for step, number in walk:
            chosen = sessions[number % len(sessions)] if sessions else None
            if step == "create":
                sessions.append(registry.create(connection))
                model[sessions[-1].id] = "attached"
            elif chosen is None:
                continue
            elif step == "resume":
                state = model.get(chosen.id)
                if state == "detached":
                    assert registry.resume(chosen.id, connection) is chosen
                    model[chosen.id] = "attached"
                else:
                    with pytest.raises(RpcError) as refusal:
                        registry.resume(chosen.id, connection)
                    assert refusal.value.code == (-32010 if state == "attached" else -32600)
            elif model.get(chosen.id) == "attached":
                registry.leave(chosen, resumable=step == "leave")
                if step == "leave":
                    model[chosen.id] = "detached"
                else:
                    del model[chosen.id]
            assert {session.id: session.state.value for session in registry.all()} == model
            assert metrics.sessions == len(model)
            assert metrics.sessions_detached == list(model.values()).count("detached")

    in_a_loop(work)


def test_a_session_that_nobody_comes_back_to_expires() -> None:
    async def wait(registry: SessionRegistry, metrics: Metrics) -> None:
        for _ in range(1000):
            if not registry.all():
                break
            await asyncio.sleep(0.005)
        assert registry.all() == []
        assert (metrics.sessions, metrics.sessions_detached, metrics.sessions_expired_total) == (0, 0, 1)

    def work(machine: ProcessMachine) -> Any:
        metrics = Metrics()
        registry = SessionRegistry(machine, metrics)
        connection: Any = Somebody()
        session = registry.create(connection)
        registry.leave(session, resumable=True)
        return wait(registry, metrics)

    in_a_loop(work, detach_ttl=0.02)


def test_resuming_stops_the_clock() -> None:
    async def wait(registry: SessionRegistry) -> None:
        await asyncio.sleep(0.1)
        assert [session.state for session in registry.all()] == [SessionState.ATTACHED]

    def work(machine: ProcessMachine) -> Any:
        registry = SessionRegistry(machine, Metrics())
        connection: Any = Somebody()
        session = registry.create(connection)
        registry.leave(session, resumable=True)
        registry.resume(session.id, connection)
        return wait(registry)

    in_a_loop(work, detach_ttl=0.05)


def test_there_are_so_many_sessions_and_empty_ones_make_room() -> None:
    def work(machine: ProcessMachine) -> None:
        registry = SessionRegistry(machine, Metrics())
        connection: Any = Somebody()
        sessions = [registry.create(connection) for _ in range(3)]
        with pytest.raises(RpcError, match=r"session limit reached \(3\)"):
            registry.create(connection)
        sessions[0].processes.start("p", spec("true"), Ear())
        for session in sessions:
            registry.leave(session, resumable=True)
        fresh = registry.create(connection)
        assert registry.all() == [sessions[0], sessions[2], fresh], "the oldest that never started anything"
        assert registry.resume(sessions[2].id, connection) is sessions[2], "the others can be resumed"
        with pytest.raises(RpcError, match="session limit reached"):
            registry.create(connection)

    in_a_loop(work, max_sessions=3)


def test_a_connection_that_is_in_the_way_is_asked_whether_it_works() -> None:
    """A reset that went unnoticed shows as soon as something is sent; the next attempt succeeds then."""

    def work(machine: ProcessMachine) -> None:
        registry = SessionRegistry(machine, Metrics())
        first: Any = Somebody()
        session = registry.create(first)
        second: Any = Somebody()
        with pytest.raises(RpcError, match="already attached"):
            registry.resume(session.id, second)
        assert (first.probed, second.probed) == (1, 0)

    in_a_loop(work)


def test_sessions_that_start_nothing_take_no_tags_and_end_at_once() -> None:
    def work(machine: ProcessMachine) -> None:
        registry = SessionRegistry(machine, Metrics())
        connection: Any = Somebody()
        for _ in range(20_000):
            registry.create(connection)
        ended: list[bool] = []
        registry.end_all(lambda: ended.append(True))
        assert ended == [True]
        assert registry.all() == []

    in_a_loop(work, max_sessions=20_000)


def test_one_look_is_enough_for_the_processes_of_all_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    marker = sleep_forever()
    looks: list[int] = []
    kill_tagged = tree.kill_tagged
    monkeypatch.setattr(
        tree, "kill_tagged", lambda matches, *more: (looks.append(1), kill_tagged(matches, *more))[1]
    )

    async def end(registry: SessionRegistry) -> None:
        await asyncio.gather(*(wait_for(session) for session in registry.all()))
        ended = asyncio.Event()
        registry.end_all(ended.set)
        await asyncio.wait_for(ended.wait(), 20)
        gone(marker)
        assert len(looks) == 1

    async def wait_for(session: Session) -> None:
        for process in session.processes:
            await process.started

    def work(machine: ProcessMachine) -> Any:
        registry = SessionRegistry(machine, Metrics())
        connection: Any = Somebody()
        for _ in range(5):
            registry.create(connection).processes.start("p", spec("sleep", marker), Ear())
        return end(registry)

    in_a_loop(work)


# Through the server ------------------------------------------------------------------------------


def resume(connect: Connect, session_id: str, server: RunningServer, **more: Any) -> WebSocketPeer:
    """Come back, as soon as the server has noticed that the old connection is gone."""
    peer = connect(server)

    def attempt() -> bool:
        answer = peer.answer(
            peer.request("initialize", {"clientName": "again", "resumeSessionId": session_id, **more})
        )
        if "error" in answer:
            assert answer["error"]["code"] == -32010
            return False
        assert answer["result"]["sessionId"] == session_id
        return True

    eventually(attempt, "the session being free")
    peer.session_id = session_id
    peer.notify("initialized")
    return peer


@pytest.mark.parametrize("how", ["drop", "close"])
def test_processes_and_output_outlive_a_connection(connect: Connect, server: RunningServer, how: str) -> None:
    first = connect(server)
    first.initialize()
    process_id = first.start("/bin/bash", "-c", "while read line; do echo got $line; done", pipeStdin=True)
    first.write(process_id, b"one\n", writeId="w1")
    seen = first.saw(process_id, b"got one\n")
    getattr(first, how)()
    second = resume(connect, first.session_id, server)
    assert second.write(process_id, b"one\n", writeId="w1") == "accepted"  # was applied before
    assert second.write(process_id, b"two\n", writeId="w2") == "accepted"
    second.saw(process_id, b"got two\n")
    answer = second.read(process_id, afterSeq=max(seen.chunks))
    assert b"".join(unb64(chunk["chunk"]) for chunk in answer["chunks"]) == b"got two\n"
    whole = b"".join(unb64(chunk["chunk"]) for chunk in second.read(process_id)["chunks"])
    assert whole == b"got one\ngot two\n"
    second.close_stdin(process_id)
    record = second.record(process_id)
    second.until(lambda: record.closed, "the close")
    # Nothing was told twice, and the numbers went on.
    assert min(record.seqs) == max(seen.seqs) + 1
    assert record.seqs == list(range(min(record.seqs), record.close_seq + 1))  # type: ignore[operator]


def test_what_ended_while_its_owner_was_away_is_there_when_it_is_back(
    connect: Connect, start_server: StartServer
) -> None:
    server = start_server("--retention", "0.2")
    first = connect(server)
    first.initialize()
    marker = sleep_forever()
    process_id = first.shell(f"exec 2>/dev/null; echo a; sleep {marker}; echo b; exit 3")
    first.saw(process_id, b"a\n")
    first.drop()
    other = connect(server)
    other.initialize(extensions=True)
    kill_sleeper(marker)
    gone(marker)
    # It closes before another that is closed now, and that one is forgotten in time.
    other.finished(other.start("sleep", "0.1", processId="later"))
    eventually(lambda: other.call("process/list", {}) == {"processes": []}, "the retention being over")
    second = resume(connect, first.session_id, server)
    read = second.read(process_id)
    assert b"".join(unb64(chunk["chunk"]) for chunk in read["chunks"]) == b"a\nb\n"
    assert (read["exitCode"], read["closed"]) == (3, True)


def test_output_that_nobody_hears_is_kept_and_blocks_nobody(connect: Connect, server: RunningServer) -> None:
    first = connect(server)
    first.initialize()
    process_id = first.shell("read line; seq 1 300000; exit 3", pipeStdin=True)
    first.write(process_id, b"go\n")
    first.drop()
    second = resume(connect, first.session_id, server)
    answer = second.call("process/wait", {"processId": process_id, "waitMs": 20_000})
    assert (answer["exitCode"], answer["closed"]) == (3, True)
    read = second.read(process_id)
    kept = b"".join(unb64(chunk["chunk"]) for chunk in read["chunks"])
    assert kept.endswith(b"299999\n300000\n")
    assert len(kept) <= 1024 * 1024
    # A recovering client accounts for every number: chunks, then exit, then close.
    last = max(chunk["seq"] for chunk in read["chunks"])
    assert read["nextSeq"] - 1 - last == 2


def test_a_deaf_client_leaving_lets_its_processes_go_on(connect: Connect, server: RunningServer) -> None:
    first = connect(server, max_queue=1)
    first.initialize()
    process_id = first.shell("head -c 50000000 /dev/zero; exit 9")
    first.drop()
    second = resume(connect, first.session_id, server)
    assert second.call("process/wait", {"processId": process_id, "waitMs": 20_000})["exitCode"] == 9


def test_an_attached_session_cannot_be_taken(connect: Connect, server: RunningServer) -> None:
    owner = connect(server)
    owner.initialize()
    thief = connect(server)
    for _ in range(2):
        assert thief.refused("initialize", {"clientName": "x", "resumeSessionId": owner.session_id}) == (
            -32010,
            f"session {owner.session_id} is already attached to another connection",
        )
    assert owner.run("echo", "x").stdout == b"x\n"
    # A failed attempt leaves the connection as it was.
    thief.initialize()
    assert thief.session_id != owner.session_id
    upper = connect(server)
    code, text = upper.refused("initialize", {"clientName": "x", "resumeSessionId": owner.session_id.upper()})
    assert (code, text) == (-32600, f"unknown session id {owner.session_id.upper()}")


def test_sessions_do_not_see_each_other(connect: Connect, server: RunningServer) -> None:
    one, other = connect(server), connect(server)
    one.initialize()
    other.initialize()
    one.start("cat", pipeStdin=True, processId="mine")
    assert other.refused("process/read", {"processId": "mine"}) == (-32600, "unknown process id mine")
    assert other.write("mine", b"x") == "unknownProcess"
    assert other.terminate("mine") == {"running": False}
    other.run("true", processId="mine")  # ids are independent
    one.terminate("mine")
    assert {message["params"]["processId"] for message in other.notifications} == {"mine"}


def test_a_connection_without_initialized_detaches_like_any_other(
    connect: Connect, server: RunningServer
) -> None:
    first = connect(server)
    session_id = first.call("initialize", {"clientName": "x"})["sessionId"]
    first.drop()
    second = resume(connect, session_id, server)
    assert second.run("echo", "x").stdout == b"x\n"


def test_requests_need_initialized_again(connect: Connect, server: RunningServer) -> None:
    first = connect(server)
    first.initialize()
    process_id = first.start("cat", pipeStdin=True)
    first.drop()
    second = connect(server)

    def attempt() -> bool:
        params = {"clientName": "x", "resumeSessionId": first.session_id}
        return "result" in second.answer(second.request("initialize", params))

    eventually(attempt, "the session being free")
    text = "client must send initialized before using exec methods"
    assert second.refused("process/read", {"processId": process_id}) == (-32600, text)
    second.notify("initialized")
    assert second.read(process_id)["exited"] is False


def test_an_expired_session_is_unknown_and_its_trees_are_gone(
    start_server: StartServer, connect: Connect
) -> None:
    server = start_server("--detach-ttl", "0.1")
    peer = connect(server)
    peer.initialize()
    marker = sleep_forever()
    peer.shell(f"trap '' TERM HUP; setsid sleep {marker} & (setsid sleep {marker} &); sleep {marker}")
    peer.start("sleep", marker, tty=True)
    eventually(lambda: len(running(f"sleep\0{marker}")) == 4, "everybody")
    peer.drop()
    gone(marker)
    late = connect(server)
    code, text = late.refused("initialize", {"clientName": "x", "resumeSessionId": peer.session_id})
    assert (code, text) == (-32600, f"unknown session id {peer.session_id}")


def test_a_resumed_session_does_not_expire(start_server: StartServer, connect: Connect) -> None:
    server = start_server("--detach-ttl", "0.4")
    peer = connect(server)
    peer.initialize()
    marker = sleep_forever()
    peer.start("sleep", marker)
    witness = connect(server)
    witness.initialize()
    witness.start("sleep", sleep_forever())
    peer.drop()
    again = resume(connect, peer.session_id, server)
    witness.drop()  # its session expires, later than the first would have
    eventually(lambda: _expired(server) == 1, "the other session expiring")
    assert len(running(marker)) == 1
    assert again.call("environment/status")["status"] == "ready"


def _expired(server: RunningServer) -> float:
    """How many sessions have expired."""
    with RawSocket(server.url) as raw:
        body = raw.ask(path="/metrics").body
    return float(body.split("\nexec_server_sessions_expired_total ")[1].split()[0])


def test_sessions_that_end_with_grace(start_server: StartServer, connect: Connect, tmp_path: Any) -> None:
    server = start_server("--detach-ttl", "0", "--shutdown-grace", "20")
    peer = connect(server)
    peer.initialize()
    assert peer.info["limits"]["shutdownGraceMs"] == 20_000
    note = tmp_path / "note"
    script = f"trap 'echo bye > {note}; exit' TERM; echo ready; while :; do sleep 0.01; done"
    peer.saw(peer.shell(script), b"ready")
    peer.drop()
    eventually(note.exists, "the farewell")


def test_a_start_that_is_under_way_when_the_connection_goes_is_completed(
    connect: Connect, server: RunningServer
) -> None:
    first = connect(server)
    first.initialize()
    for number in range(20):
        first.request("process/start", first.start_params(["cat"], pipeStdin=True, processId=str(number)))
    first.drop()
    second = resume(connect, first.session_id, server, extensions=True)
    listed = {entry["processId"]: entry["state"] for entry in second.call("process/list", {})["processes"]}
    assert set(listed) == {str(number) for number in range(len(listed))}
    for process_id in listed:
        assert second.read(process_id)["exited"] is False
        assert second.terminate(process_id)["running"] is True


def test_waiting_requests_of_a_lost_connection_are_not_answered_to_the_next(
    connect: Connect, server: RunningServer
) -> None:
    first = connect(server)
    first.initialize()
    process_id = first.start("cat", pipeStdin=True)
    first.request("process/wait", {"processId": process_id}, request_id="old")
    first.request("process/read", {"processId": process_id, "waitMs": 60_000}, request_id="older")
    first.alive()
    first.drop()
    second = resume(connect, first.session_id, server)
    second.close_stdin(process_id)
    second.until(lambda: second.record(process_id).closed, "the close")
    second.alive()
    assert not second.answers["old"]
    assert not second.answers["older"]


def test_stdio_ends_all(start_stdio: Callable[..., StdioPeer]) -> None:
    peer = start_stdio()
    peer.initialize()
    marker = sleep_forever()
    peer.shell(f"setsid sleep {marker} & sleep {marker}")
    eventually(lambda: len(running(f"sleep\0{marker}")) == 2, "both")
    peer.drop()
    assert peer.ended()
    assert peer.process.wait(20) == 0
    gone(marker)


def test_many_sessions_leave_nothing(start_server: StartServer) -> None:
    server = start_server("--detach-ttl", "0")
    before = len(os.listdir(f"/proc/{server.pid}/fd"))
    request = b'{"id":1,"method":"initialize","params":{"clientName":"x"}}'
    for _ in range(300):
        with RawSocket(server.url) as raw:
            raw.upgrade()
            raw.send(frame(TEXT, request))
            raw.message()
    eventually(lambda: len(os.listdir(f"/proc/{server.pid}/fd")) == before, "descriptors")
    with RawSocket(server.url) as raw:
        body = eventually(lambda: _quiet(raw), "every session ending")
    assert "exec_server_sessions_expired_total 300.0" in body


def _quiet(raw: RawSocket) -> str:
    body = raw.ask(path="/metrics").body
    return body if "exec_server_sessions 0.0" in body else ""


@pytest.mark.parametrize("how", ["half-closed", "a close frame"])
def test_a_client_that_is_gone_but_left_its_socket_open_is_gone(
    connect: Connect, server: RunningServer, how: str
) -> None:
    # It reads nothing any more, so what is unsent can never be sent; nobody waits for that.
    with RawSocket(server.url) as raw:
        raw.upgrade()
        raw.send(frame(TEXT, b'{"id":1,"method":"initialize","params":{"clientName":"x"}}'))
        session_id = raw.message()["result"]["sessionId"]
        params = {"processId": "p", "argv": ["/usr/bin/yes"], "cwd": "file:///", "env": {}, "tty": False}
        start = {"id": 2, "method": "process/start", "params": params}
        raw.send(frame(TEXT, b'{"method":"initialized"}') + frame(TEXT, json.dumps(start).encode()))
        witness = connect(server)
        witness.initialize(extensions=True)

        def held() -> bool:
            """As much is unsent as may be, so the process is not read any more."""

            def said() -> int:
                listed = witness.call("process/list", {"all": True})["processes"]
                found = [entry for entry in listed if session_id.startswith(entry["session"])]
                return found[0]["outputBytes"] if found else 0

            first = said()
            time.sleep(0.02)
            return 0 < first == said()

        eventually(held, "the process being held")
        if how == "half-closed":
            raw.socket.shutdown(socket.SHUT_WR)
        else:
            raw.send(frame(CLOSE, b"\x03\xe8"))
        again = resume(connect, session_id, server)
        assert again.terminate("p")["running"] is True


def test_what_was_not_acknowledged_is_kept(connect: Connect) -> None:
    """Only for clients that acknowledge: they find more than the newest MiB when they come back."""
    ours, theirs = connect(), connect()
    ours.initialize(acknowledgesOutput=True)
    theirs.initialize()
    size, retained = 5_000_000, 1 << 20

    def kept(peer: WebSocketPeer, process_id: str) -> bytes:
        chunks = peer.call("process/read", {"processId": process_id})["chunks"]
        return b"".join(unb64(chunk["chunk"]) for chunk in chunks)

    found = {}
    for peer in (ours, theirs):
        script = f"head -c {size} /dev/zero; echo end; read x"
        process_id = peer.start("/bin/sh", "-c", script, pipeStdin=True)
        eventually(lambda peer=peer, process_id=process_id: kept(peer, process_id).endswith(b"end\n"))
        found[peer] = (process_id, len(kept(peer, process_id)))
    assert found[ours][1] == size + 4
    assert retained - 70_000 < found[theirs][1] <= retained
    mine = found[ours][0]
    assert ours.call("process/acknowledgeOutput", {"processId": mine, "seq": 2**63}) == {}
    assert len(kept(ours, mine)) <= retained
    assert ours.call("process/acknowledgeOutput", {"processId": "nobody", "seq": 1}) == {}


def test_a_process_waits_for_a_client_that_acknowledges(connect: Connect, server: RunningServer) -> None:
    """Away or there: output that was not acknowledged is not thrown away, the process waits instead."""
    first = connect(server)
    first.initialize(acknowledgesOutput=True)
    size = 40_000_000
    process_id = first.start("/bin/sh", "-c", f"head -c {size} /dev/zero; echo end")
    first.drop()
    peer = resume(connect, first.session_id, server, acknowledgesOutput=True)
    received, after, state = 0, 0, {}
    while not state.get("closed") or state["chunks"]:
        state = peer.read(process_id, afterSeq=after, maxBytes=1 << 20)
        for chunk in state["chunks"]:
            if not (state["exited"] and chunk["seq"] == after + 2):  # the exit has a number, too
                assert chunk["seq"] == after + 1
            after = chunk["seq"]
            received += len(unb64(chunk["chunk"]))
        peer.call("process/acknowledgeOutput", {"processId": process_id, "seq": after})
    assert received == size + 4
