"""One answer of a model: asked for until it is whole, and every call in it answered.

An answer that breaks off is asked for again, with what was heard of it in the history: a call that was made
is never made twice.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from .. import log
from ..events.notice import Notice
from .conversation import ABORTED, answer_type
from .model import Completed, ItemAdded, ItemDone, ModelClient, ModelFailed

if TYPE_CHECKING:
    from ..events.model import Usage
    from .tools import ToolOutput

__all__ = ["Answer", "Hearer"]

NETWORK_WAIT_MOST: Final = 60.0
"""Longest pause while nobody can be reached, in seconds."""


class Hearer(Protocol):
    """Whoever asks, and does something with what is answered."""

    @property
    def client(self) -> ModelClient: ...

    def request(self) -> dict[str, Any]:
        """What is asked of the model: everything it has to know, every time."""

    def notice(self, notice: Notice) -> None:
        """Something is tried again."""

    def began(self, item: dict[str, Any]) -> None:
        """The model has begun to say something."""

    def said(self, item: dict[str, Any]) -> None:
        """The model has said something whole; for a call this is where it gets its id."""

    async def called(self, item: dict[str, Any]) -> ToolOutput:
        """Do what a call asks for."""

    def answered(self, item: dict[str, Any], output: ToolOutput) -> None:
        """A call has been answered."""

    def counted(self, usage: Usage) -> None:
        """What the answer has cost."""


class Answer:
    """One answer. `hear` it once."""

    def __init__(self, hearer: Hearer) -> None:
        self._hearer = hearer
        self._calls: list[tuple[dict[str, Any], asyncio.Task[ToolOutput]]] = []
        self._alone: asyncio.Task[ToolOutput] | None = None

    async def hear(self) -> bool:
        """Whether there were calls, so that the model wants to be asked again."""
        settings = self._hearer.client.settings
        attempt = 0
        wait = settings.network_wait_seconds
        waited = 0.0
        try:
            while True:
                try:
                    await self._hear_once()
                except ModelFailed as failure:
                    # What it called for before it broke off has been done or is being done: once.
                    await self._answer_calls()
                    if failure.fatal:
                        raise
                    if failure.network:
                        limit = settings.network_give_up_seconds
                        if limit is not None and waited >= limit:
                            raise
                        self._hearer.notice(Notice(None, None, str(failure)))
                        await asyncio.sleep(wait)
                        waited += wait
                        wait = min(wait * 2, NETWORK_WAIT_MOST)
                        continue
                    attempt += 1
                    if attempt > settings.max_retries:
                        raise
                    self._hearer.notice(Notice(attempt, settings.max_retries, str(failure)))
                    pause = settings.retry_seconds * 2 ** (attempt - 1)
                    pause *= random.uniform(0.9, 1.1)  # noqa: S311  # no secret
                    await asyncio.sleep(pause if failure.retry_after is None else failure.retry_after)
                else:
                    return await self._answer_calls()
        except asyncio.CancelledError:
            await self._abort_calls()
            raise

    async def _hear_once(self) -> None:
        hearer = self._hearer
        async for happened in hearer.client.ask(hearer.request()):
            if isinstance(happened, ItemAdded):
                hearer.began(happened.item)
            elif isinstance(happened, ItemDone):
                self._take(dict(happened.item))
            elif isinstance(happened, Completed):
                hearer.counted(happened.usage)

    def _take(self, item: dict[str, Any]) -> None:
        self._hearer.said(item)
        if answer_type(item) is None:
            return
        before = [task for _, task in self._calls]
        if not _is_edit(item):
            # Commands run side by side; what edits files waits for those before it, and they for it.
            before = [self._alone] if self._alone is not None else []
        task = asyncio.create_task(self._do(item, before))
        if _is_edit(item):
            self._alone = task
        self._calls.append((item, task))

    async def _do(self, item: dict[str, Any], before: Sequence[asyncio.Task[ToolOutput]]) -> ToolOutput:
        if before:
            await asyncio.wait(before)
        try:
            return await self._hearer.called(item)
        except Exception as error:
            log.error("a tool failed for no reason of its own", tool=item.get("name"), error=repr(error))
            return f"internal error: {error!r}"

    async def _answer_calls(self) -> bool:
        """Wait for every call and keep the answers, in the order of the calls."""
        calls = self._calls
        if not calls:
            return False
        await asyncio.wait([task for _, task in calls])
        for item, task in calls:
            self._hearer.answered(item, task.result())
        self._calls = []
        self._alone = None
        return True

    async def _abort_calls(self) -> None:
        """Stop what is being done, and wait until it has stopped: a patch goes on to its end."""
        for _, task in self._calls:
            task.cancel()
        if self._calls:
            await asyncio.wait([task for _, task in self._calls])
        for item, task in self._calls:
            self._hearer.answered(item, ABORTED if task.cancelled() else task.result())
        self._calls = []


def _is_edit(item: dict[str, Any]) -> bool:
    if item.get("name") == "apply_patch":
        return True
    arguments = item.get("arguments")
    return item.get("name") == "exec_command" and isinstance(arguments, str) and "apply_patch" in arguments
