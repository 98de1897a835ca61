"""local/process/killer.py: a tree that could not be looked at as a whole is not given up."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable

import pytest

from exec_server.local.process import tree
from exec_server.local.process.killer import Killer


def test_it_is_tried_again_until_it_works(
    monkeypatch: pytest.MonkeyPatch, fresh_log: None, capfd: pytest.CaptureFixture[str]
) -> None:
    # Real shortages are in test_tree.py; here it is only about who comes back, and when.
    tries: list[int] = []

    def kill(matches: Callable[[int], bool]) -> int:
        tries.append(1)
        if len(tries) < 3:
            raise OSError(errno.EMFILE, "not every process could be looked at")
        return 7

    monkeypatch.setattr(tree, "kill_tagged", kill)
    monkeypatch.setattr("exec_server.local.process.killer.RETRY_SECONDS", 0.01)

    async def run() -> None:
        killer = Killer(asyncio.get_running_loop())
        with pytest.raises(OSError, match="not every process"):
            await killer.kill(lambda tag: False)
        async with asyncio.timeout(20):
            while len(tries) < 3:
                await asyncio.sleep(0.005)
        assert await killer.kill(lambda tag: False) == 7
        killer.close()

    asyncio.run(run())
    assert len(tries) == 4, "what worked is not done again"
    assert capfd.readouterr().err.count("a tree of processes may not be dead yet; trying again") == 2
