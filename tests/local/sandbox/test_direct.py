"""local/sandbox/direct.py: asked and answered on the loop, and what goes on in a thread."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from msgspec import Raw
from msgspec.json import decode, encode

from exec_server.local.files.lane import Lane, Turn, reads, writes
from exec_server.local.sandbox import direct
from exec_server.local.sandbox.direct import Answers, DirectCall
from exec_server.local.sandbox.helper_process import Key
from exec_server.local.sandbox.plan import Plan
from exec_server.loop import Pending
from exec_server.wire.errors import RpcError
from support.pool import Pool
from support.wait import eventually_async

KEY = Key(Plan(kind="view", network="closed"))


class Desk:
    """A lane, helpers without a sandbox, and a loop that asks them itself."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.loop: Any = loop
        self.lane = Lane(self.loop)
        self.answers = Answers(self.loop)
        self.pool = Pool()
        self.pid = self.pool.pid(KEY)
        self.repeated = 0

    def again(self, turn: Turn) -> Raw:
        self.repeated += 1
        return Raw(b'"again"')

    def read(self, path: Path) -> Pending[Raw] | None:
        helper = self.pool.helpers.take_idle(KEY)
        assert helper is not None
        call = DirectCall(self.pool.helpers, helper, self.loop, self.answers, self.lane, self.again)
        return call.begin(reads(os.fsencode(path)), "fs/readFile", encode({"path": path.as_uri()}))

    async def content(self, path: Path) -> bytes:
        pending = self.read(path)
        assert pending is not None
        assert not pending.settled
        return base64.b64decode(decode(await pending)["dataBase64"])


def run(test: Callable[[Desk], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        desk = Desk()
        try:
            await asyncio.wait_for(test(desk), 30)
            assert desk.answers._awaited == {}
            assert not desk.lane._aside
        finally:
            desk.answers.close()
            desk.pool.close()

    asyncio.run(main())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "f").write_bytes(b"content")
    return tmp_path / "f"


@pytest.mark.parametrize("size", [0, 4096, 20_000, 3_000_000])
def test_the_answer_comes(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "f").write_bytes(data)

    async def test(desk: Desk) -> None:
        for _ in range(3):
            assert await desk.content(tmp_path / "f") == data
        assert (desk.repeated, len(desk.pool.started), desk.pool.pid(KEY)) == (0, 1, desk.pid)

    run(test)


def test_errors_are_answers(file: Path, tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        with pytest.raises(RpcError, match="No such file"):
            await desk.content(tmp_path / "absent")
        assert await desk.content(file) == b"content"
        assert desk.pool.pid(KEY) == desk.pid

    run(test)


def test_a_dead_helper_is_no_answer(file: Path) -> None:
    async def test(desk: Desk) -> None:
        os.kill(desk.pid, signal.SIGKILL)
        pending = desk.read(file)
        assert pending is not None
        assert bytes(await pending) == b'"again"'
        assert desk.pool.helpers.count == 0

    run(test)


@pytest.mark.parametrize("patience", [0.0, 30.0])
def test_one_that_dies_meanwhile_is_none_either(
    file: Path, patience: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the loop still waits, or a thread already does."""
    monkeypatch.setattr(direct, "PATIENCE", patience)

    async def test(desk: Desk) -> None:
        os.kill(desk.pid, signal.SIGSTOP)
        pending = desk.read(file)
        await asyncio.sleep(0)
        os.kill(desk.pid, signal.SIGKILL)
        assert pending is not None
        assert bytes(await pending) == b'"again"'
        assert (desk.repeated, desk.pool.helpers.count) == (1, 0)

    run(test)


def test_a_slow_answer_is_waited_for_by_a_thread(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "PATIENCE", 0.0)

    async def test(desk: Desk) -> None:
        os.kill(desk.pid, signal.SIGSTOP)
        pending = desk.read(file)
        assert pending is not None
        await eventually_async(lambda: desk.answers._awaited == {}, "a thread waits")
        assert not pending.settled
        os.kill(desk.pid, signal.SIGCONT)
        assert base64.b64decode(decode(await pending)["dataBase64"]) == b"content"
        assert desk.pool.pid(KEY) == desk.pid

    run(test)


def test_what_nobody_waits_for_is_killed(file: Path) -> None:
    async def test(desk: Desk) -> None:
        os.kill(desk.pid, signal.SIGSTOP)
        pending = desk.read(file)
        assert pending is not None
        pending.cancel()
        await eventually_async(lambda: desk.pool.helpers.count == 0, "the helper was killed")
        await eventually_async(lambda: not desk.lane._aside, "the call is over")

    run(test)


@pytest.mark.parametrize("name", ["f", "link"])
def test_later_writes_of_the_same_file_wait(file: Path, name: str) -> None:
    file.with_name("link").symlink_to("f")

    async def test(desk: Desk) -> None:
        done: list[str] = []
        os.kill(desk.pid, signal.SIGSTOP)
        pending = desk.read(file.with_name(name))
        assert pending is not None
        pending.then(lambda _: done.append("read"))
        same = desk.lane.submit(writes(os.fsencode(file)), lambda turn: done.append("write"))
        other = desk.lane.submit(writes(b"/other"), lambda turn: done.append("other"))
        await other
        assert done == ["other"]
        os.kill(desk.pid, signal.SIGCONT)
        await same
        assert sorted(done) == ["other", "read", "write"]
        assert base64.b64decode(decode(pending.result())["dataBase64"]) == b"content"

    run(test)


def test_earlier_writes_come_first(file: Path) -> None:
    async def test(desk: Desk) -> None:
        gate = Event()
        earlier = desk.lane.submit(writes(os.fsencode(file)), lambda turn: gate.wait(20))
        assert desk.read(file) is None
        gate.set()
        await earlier
        await eventually_async(lambda: desk.lane.free_for_reading, "the lane is free")
        assert await desk.content(file) == b"content", "and the helper, too"

    run(test)
