"""local/worker.py: one thing after another, in a thread."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from exec_server.local.worker import Worker
from exec_server.loop import Pending, PollLoop


def test_jobs_run_in_order_in_one_thread_and_answers_come_back_on_the_loop() -> None:
    async def run() -> None:
        worker = Worker(asyncio.get_running_loop(), "test")
        seen: list[Any] = []
        ours = threading.get_ident()

        def job(number: int) -> int:
            seen.append((number, threading.get_ident()))
            time.sleep(0.001 * (5 - number))
            return number * 10

        pendings = [worker.run(job, number) for number in range(5)]
        for pending in pendings:
            pending.then(lambda done: seen.append((done.result(), threading.get_ident())))
        assert [await pending for pending in pendings] == [0, 10, 20, 30, 40]
        assert [number for number, thread in seen if thread != ours] == [0, 1, 2, 3, 4]
        assert [number for number, thread in seen if thread == ours] == [0, 10, 20, 30, 40]
        assert len({thread for _, thread in seen}) == 2
        worker.close()
        worker.close()

    asyncio.run(run())


def test_errors_come_back_too_and_the_thread_goes_on() -> None:
    async def run() -> None:
        worker = Worker(asyncio.get_running_loop(), "test")
        failing: Pending[Any] = worker.run(lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            await failing
        assert await worker.run(lambda: 1) == 1
        worker.close()

    asyncio.run(run())


def test_no_thread_without_a_job_and_none_after_the_end() -> None:
    loop = PollLoop()
    before = threading.active_count()
    worker = Worker(loop, "exec-server-test-thread")
    worker.close()
    assert threading.active_count() == before
    worker.run(lambda: None).then(lambda _: loop.stop())
    loop.run()
    thread = next(thread for thread in threading.enumerate() if thread.name == "exec-server-test-thread")
    assert thread.daemon
    worker.close()
    thread.join(10)
    assert not thread.is_alive()
    loop.close()


def test_stopping_forgets_what_has_not_begun_and_waits_for_what_has() -> None:
    loop = PollLoop()
    worker = Worker(loop, "exec-server-stopped-thread")
    began, release = threading.Event(), threading.Event()
    seen: list[str] = []
    worker.run(lambda: (began.set(), release.wait(10), seen.append("done")))
    for _ in range(100):
        worker.run(seen.append, "too late")
    assert began.wait(10)
    threading.Timer(0.05, release.set).start()
    worker.stop(10)
    assert seen == ["done"]
    worker.stop(10)
    loop.close()


def test_a_loop_that_is_gone_ends_the_thread() -> None:
    loop = asyncio.new_event_loop()
    worker = Worker(loop, "exec-server-orphan-thread")
    release = threading.Event()
    worker.run(release.wait)
    thread = next(thread for thread in threading.enumerate() if thread.name == "exec-server-orphan-thread")
    loop.close()
    release.set()
    thread.join(10)
    assert not thread.is_alive()
