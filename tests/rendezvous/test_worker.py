"""The thread that waits so that others do not have to."""

from __future__ import annotations

import asyncio
import threading

import pytest

from exec_server.rendezvous import worker as module
from exec_server.rendezvous.worker import Overloaded, Worker


def test_in_order_with_results_and_errors() -> None:
    async def main() -> None:
        worker, done = Worker("test"), list[object]()

        def fail() -> None:
            raise KeyError("no")

        assert await asyncio.gather(*(worker.do(lambda n=n: done.append(n) or n, 20) for n in range(5))) == [
            0, 1, 2, 3, 4,
        ]  # fmt: skip
        with pytest.raises(KeyError):
            await worker.do(fail, 20)
        worker.close(lambda: done.append("closed"))
        assert done == [0, 1, 2, 3, 4, "closed"]
        with pytest.raises(Overloaded, match="closed"):
            await worker.do(lambda: None, 20)

    asyncio.run(main())


def test_what_waits_too_long_is_not_done_and_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 2)

    async def main() -> None:
        worker, stuck, begun, done = Worker("test"), threading.Event(), threading.Event(), list[str]()

        def hang() -> None:
            begun.set()
            stuck.wait(20)

        hanging = asyncio.ensure_future(worker.do(hang, 20))
        await asyncio.to_thread(begun.wait, 20)
        with pytest.raises(Overloaded, match="nothing came back"):
            await worker.do(lambda: done.append("late"), 0.01)
        patient = asyncio.ensure_future(worker.do(lambda: done.append("patient"), 20))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="2 others wait"):
            await worker.do(lambda: None, 20)
        stuck.set()
        await asyncio.gather(hanging, patient)
        assert done == ["patient"]
        worker.close(lambda: None)

    asyncio.run(main())
