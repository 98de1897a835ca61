"""server/voice.py: which words go to which connection, in which dialect."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from exec_server.loop import PollLoop
from exec_server.server.metrics import Metrics
from exec_server.server.voice import CurrentVoice, LegacyVoice


class Channel:
    """Remembers what is sent."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, message: bytes) -> None:
        self.sent.append(message)

    def send_parts(self, head: bytes, body: bytes, tail: bytes, *, binary: bool) -> None:
        self.sent.append((b"binary:" if binary else b"") + head + body + tail)


def session(**connection: Any) -> Any:
    plain = {"lifecycle_events": False, "binary_output": False, "extensions": False}
    settings = {"channel": Channel(), **plain, **connection}
    forgotten: list[Any] = []
    table = SimpleNamespace(forget_later=forgotten.append, forget=forgotten.append, forgotten=forgotten)
    return SimpleNamespace(connection=SimpleNamespace(**settings), processes=table)


def process(code: int | None = 3, failure: str | None = None) -> Any:
    log = SimpleNamespace(exit_code=code, dropped_bytes=5)
    return SimpleNamespace(id="ü", pid=7, log=log, denied=lambda surely: surely, failure=failure)


def tell_all(voice: Any, child: Any) -> None:
    voice.process_started(child)
    voice.process_output(child, 1, "pty", b"x")
    voice.process_exited(child, 2)
    voice.process_closed(child, 3)


def test_the_current_dialect() -> None:
    owner, metrics = session(), Metrics()
    tell_all(CurrentVoice(owner, metrics, "ü"), process())
    assert [message.decode() for message in owner.connection.channel.sent] == [
        '{"method":"process/output","params":{"processId":"ü","seq":1,"stream":"pty","chunk":"eA=="}}',
        '{"method":"process/exited","params":{"processId":"ü","seq":2,"exitCode":3,"sandboxDenied":false}}',
        '{"method":"process/closed","params":{"processId":"ü","seq":3}}',
    ]
    assert len(owner.processes.forgotten) == 1
    assert (metrics.processes_started_total, metrics.processes_running) == (1, 0)
    assert (metrics.output_bytes_total, metrics.dropped_bytes_total) == (1, 5)


def test_those_who_get_the_better_answer() -> None:
    owner = session(extensions=True)
    tell_all(CurrentVoice(owner, Metrics(), "x"), process())
    assert b'"sandboxDenied":true' in owner.connection.channel.sent[1]


def test_those_who_want_to_know_more() -> None:
    owner = session(lifecycle_events=True)
    tell_all(CurrentVoice(owner, Metrics(), "ü"), process(None, "it was lost"))
    sent = owner.connection.channel.sent
    assert sent[0].decode() == '{"method":"process/started","params":{"processId":"ü","pid":7}}'
    assert b'"exitCode":-1' in sent[2]
    assert (
        sent[3].decode() == '{"method":"process/failed","params":{"processId":"ü","message":"it was lost"}}'
    )


def test_binary_output() -> None:
    owner = session(binary_output=True)
    CurrentVoice(owner, Metrics(), "ü").process_output(process(), 1, "stderr", b"data")
    [frame] = owner.connection.channel.sent
    assert frame == b"binary:" + bytes([1, 2, 0, 2, 0, 0, 0, 0, 0, 0, 0, 1]) + "ü".encode() + b"data"


@pytest.mark.parametrize("kind", ["current", "legacy"])
def test_nobody_listens(kind: str) -> None:
    owner, metrics, loop = session(), Metrics(), PollLoop()
    owner.connection = None
    voice = CurrentVoice(owner, metrics, "ü") if kind == "current" else LegacyVoice(owner, metrics, "ü", loop)
    tell_all(voice, process())
    assert (metrics.processes_started_total, metrics.processes_running) == (1, 0)
    assert len(owner.processes.forgotten) == 1
    loop.close()


def test_the_first_dialect() -> None:
    owner, loop = session(), PollLoop()
    tell_all(LegacyVoice(owner, Metrics(), "ü", loop), process())
    assert [message.decode() for message in owner.connection.channel.sent] == [
        '{"method":"command/exec/outputDelta","params":{"processId":"ü","stream":"stdout","chunk":"eA=="}}',
        '{"method":"command/exec/exited","params":{"processId":"ü","exitCode":3}}',
    ]
    assert len(owner.processes.forgotten) == 1
    loop.close()
