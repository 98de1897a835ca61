"""server/background.py: asyncio for a server that may run without it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from exec_server.loop import Pending, PollLoop
from exec_server.server.background import Background


def on_both(work: Callable[[Background, Callable[[], None]], object]) -> None:
    """Do it on asyncio's loop and on the small one; `done` ends it."""

    async def run() -> None:
        ended = asyncio.Event()
        background = Background(asyncio.get_running_loop())
        work(background, ended.set)
        async with asyncio.timeout(20):
            await ended.wait()
        background.close()

    asyncio.run(run())
    loop = PollLoop()
    watchdog = loop.call_later(20, loop.stop)
    background = Background(loop)
    loop.call_soon(work, background, loop.stop)
    loop.run()
    watchdog.cancel()
    background.close()
    loop.close()


def test_answers_come_back_on_the_loop() -> None:
    seen: list[Any] = []

    async def job() -> str:
        await asyncio.sleep(0)
        return "answer"

    def work(background: Background, done: Callable[[], None]) -> None:
        def answered(pending: Pending[str]) -> None:
            seen.append((pending.result(), threading.current_thread() is threading.main_thread()))
            done()

        background.run(job()).then(answered)

    on_both(work)
    assert seen == [("answer", True)] * 2


def test_errors_come_back_too() -> None:
    seen: list[str] = []

    async def job() -> None:
        raise KeyError("x")

    def work(background: Background, done: Callable[[], None]) -> None:
        def answered(pending: Pending[None]) -> None:
            with pytest.raises(KeyError):
                pending.result()
            seen.append("raised")
            done()

        background.run(job()).then(answered)

    on_both(work)
    assert seen == ["raised"] * 2


def test_cancelling_reaches_the_work() -> None:
    seen: list[str] = []

    def work(background: Background, done: Callable[[], None]) -> None:
        async def job() -> None:
            started()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                seen.append("cancelled")
                await background.on_server_loop(done)
                raise

        def started() -> None:
            background._loop.call_soon_threadsafe(lambda: pending.cancel())

        pending = background.run(job())
        pending.then(lambda _: seen.append("answered"))

    on_both(work)
    assert seen == ["cancelled"] * 2


def test_the_work_can_do_things_on_the_servers_loop_and_wait_for_them() -> None:
    seen: list[Any] = []

    def work(background: Background, done: Callable[[], None]) -> None:
        room: Pending[None] = Pending()

        def ask() -> Pending[None]:
            seen.append(threading.current_thread() is threading.main_thread())
            background._loop.call_later(0.01, room.resolve, None)
            return room

        async def job() -> None:
            await background.on_server_loop(lambda: None)
            await background.on_server_loop(ask)
            seen.append(room.settled)

        background.run(job()).then(lambda _: done())

    on_both(work)
    assert seen == [True, True] * 2
