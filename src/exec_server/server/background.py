"""Work that needs asyncio, for a server that may run without it.

Where the server's loop is asyncio's, the work is a task on it. On the small loop of stdio it runs on an
asyncio loop in a thread, started by the first piece of work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from threading import Thread
from typing import Any, Final, TypeVar

from ..loop import Loop, Pending

__all__ = ["Background"]

T = TypeVar("T")

STOP_TIMEOUT: Final = 2.0
"""Seconds that work may take to give up."""


class Background:
    """Runs coroutines; answers come back on the server's loop."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._own: asyncio.AbstractEventLoop | None = None
        self._thread: Thread | None = None
        if not isinstance(loop, asyncio.AbstractEventLoop):
            self._own = asyncio.new_event_loop()
            self._thread = Thread(target=self._own.run_forever, name="exec-server-async", daemon=True)
            self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> Pending[T]:
        """Start it; cancelling the answer cancels the work."""
        pending: Pending[T] = Pending()
        if self._own is None:
            task = asyncio.ensure_future(work)
            task.add_done_callback(lambda done: _settle(pending, done))
            pending.on_cancel = task.cancel
        else:
            future = asyncio.run_coroutine_threadsafe(work, self._own)
            future.add_done_callback(lambda done: self._loop.call_soon_threadsafe(_settle, pending, done))
            pending.on_cancel = future.cancel
        return pending

    async def on_server_loop(self, call: Callable[[], Pending[None] | None]) -> None:
        """From inside the work: do something on the server's loop, and wait for what it answers."""
        if self._own is None:
            answer = call()
            if answer is not None:
                await answer
            return
        done = asyncio.get_running_loop().create_future()

        def settle(_: Any = None) -> None:
            self._own_call(lambda: None if done.done() else done.set_result(None))

        def run() -> None:
            answer = call()
            if answer is None:
                settle()
            else:
                answer.then(settle)

        self._loop.call_soon_threadsafe(run)
        await done

    def close(self) -> None:
        """Give up what is being done, and stop the thread, if there is one."""
        own, thread = self._own, self._thread
        if own is not None and thread is not None and thread.is_alive():
            asyncio.run_coroutine_threadsafe(_give_up(), own).add_done_callback(
                lambda _: own.call_soon_threadsafe(own.stop)
            )
            thread.join(timeout=STOP_TIMEOUT)
            if not thread.is_alive():
                own.close()

    def _own_call(self, call: Callable[[], object]) -> None:
        if self._own is not None and not self._own.is_closed():
            self._own.call_soon_threadsafe(call)


async def _give_up() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _settle(pending: Pending[T], done: Any) -> None:
    if done.cancelled():
        return
    error = done.exception()
    if error is None:
        pending.resolve(done.result())
    else:
        pending.fail(error)
