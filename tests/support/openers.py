"""Ways to a machine that end as a test says, when it says so."""

from __future__ import annotations

import asyncio

from exec_server.environments.connect import IN_PROCESS, connect
from exec_server.environments.environment import Environment

__all__ = ["Gate", "settle"]


class Gate:
    """An opener: every attempt waits until the test lets it through, to a server inside this process."""

    def __init__(self) -> None:
        self.attempts = 0
        self.cancelled = 0
        self.opened: list[Environment] = []
        self._waiting: list[asyncio.Future[None]] = []

    async def __call__(self) -> Environment:
        self.attempts += 1
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        environment = await connect(IN_PROCESS)
        self.opened.append(environment)
        return environment

    @property
    def waiting(self) -> bool:
        """Whether an attempt is at the gate."""
        return any(not turn.done() for turn in self._waiting)

    async def open(self) -> None:
        """Let the attempt through."""
        await settle()
        for turn in self._waiting:
            if not turn.done():
                turn.set_result(None)
        await settle()

    async def fail(self, error: BaseException) -> None:
        """Let the attempt fail."""
        await settle()
        for turn in self._waiting:
            if not turn.done():
                turn.set_exception(error)
        await settle()


async def settle() -> None:
    """Let everything happen that is due. In this process nothing takes more than a few turns of the loop."""
    for _ in range(20):
        await asyncio.sleep(0)
