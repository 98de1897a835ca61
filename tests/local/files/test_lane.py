"""The order of calls: what must come first does, and what need not wait does not."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from exec_server.local.files import lane as lanes
from exec_server.local.files.lane import Abandoned, Lane, Touch, Turn, reads, writes
from exec_server.wire.errors import RpcError
from support.wait import eventually_async


class Gate:
    """Jobs that wait until they are let go, and a record of who began and who ended."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.open: dict[str, Event] = {}

    def job(
        self, name: str, *, leave: tuple[bytes, ...] | None = None, waits: bool = True
    ) -> Callable[..., str]:
        event = self.open[name] = Event()

        def run(turn: Turn) -> str:
            self.log.append(f"{name} begins")
            if leave is not None:
                turn.leave(*leave)
            if waits:
                assert event.wait(20)
            self.log.append(f"{name} ends")
            return name

        return run

    def short(self, name: str) -> Callable[..., str]:
        return self.job(name, waits=False)


def run(test: Callable[[Lane, Gate], Any]) -> None:
    async def main() -> None:
        lane, gate = Lane(asyncio.get_running_loop()), Gate()
        try:
            await asyncio.wait_for(test(lane, gate), 30)
        finally:
            for event in gate.open.values():
                event.set()

    asyncio.run(main())


def test_calls_run_in_the_order_of_their_arrival() -> None:
    async def test(lane: Lane, gate: Gate) -> None:
        pending = [lane.submit(reads(b"/x"), gate.short(str(n))) for n in range(50)]
        assert [await one for one in pending] == [str(n) for n in range(50)]
        assert gate.log == [word for n in range(50) for word in (f"{n} begins", f"{n} ends")]

    run(test)


def test_what_leaves_the_lane_lets_others_pass() -> None:
    async def test(lane: Lane, gate: Gate) -> None:
        large = lane.submit(reads(b"/large"), gate.job("large", leave=()))
        assert await lane.submit(writes(b"/other"), gate.short("small")) == "small"
        assert not large.settled
        gate.open["large"].set()
        assert await large == "large"

    run(test)


@pytest.mark.parametrize(
    ("first", "second", "waits"),
    [
        (writes(b"/a/f"), reads(b"/a/f"), True),
        (writes(b"/a/f"), reads(b"/a"), True),
        (writes(b"/a"), reads(b"/a/f"), True),
        (reads(b"/a/f"), writes(b"/a/f"), True),
        (reads(b"/a/f"), reads(b"/a/f"), False),
        (writes(b"/a/f"), reads(b"/a/ff"), False),
        (writes(b"/a/f"), writes(b"/a/g"), False),
        ((Touch(b"/s", False), Touch(b"/t", True)), reads(b"/s/x"), False),
        ((Touch(b"/s", False), Touch(b"/t", True)), reads(b"/t/x"), True),
    ],
)
def test_who_waits_for_what_is_aside(
    first: tuple[Touch, ...], second: tuple[Touch, ...], waits: bool
) -> None:
    async def test(lane: Lane, gate: Gate) -> None:
        one = lane.submit(first, gate.job("one", leave=()))
        await eventually_async(lambda: "one begins" in gate.log)
        two = lane.submit(second, gate.short("two"))
        after = lane.submit(reads(b"/elsewhere"), gate.short("after"))
        assert await after == "after"
        assert two.settled is not waits
        gate.open["one"].set()
        assert (await one, await two) == ("one", "two")
        if waits:
            assert gate.log.index("one ends") < gate.log.index("two begins")

    run(test)


def test_everything_is_below_the_root() -> None:
    async def test(lane: Lane, gate: Gate) -> None:
        one = lane.submit(writes(b"/"), gate.job("one", leave=()))
        await eventually_async(lambda: "one begins" in gate.log)
        two = lane.submit(reads(b"/a/f"), gate.short("two"))
        await asyncio.sleep(lanes.PATIENCE * 2)
        assert gate.log == ["one begins"]
        gate.open["one"].set()
        assert (await one, await two) == ("one", "two")

    run(test)


def test_one_that_waits_is_waited_for() -> None:
    async def test(lane: Lane, gate: Gate) -> None:
        jobs = [lane.submit(writes(b"/f"), gate.job("0", leave=()))]
        jobs += [lane.submit(writes(b"/f"), gate.short(str(n))) for n in range(1, 1100)]
        assert await lane.submit(reads(b"/g"), gate.short("g")) == "g"
        gate.open["0"].set()
        assert [await job for job in jobs] == [str(n) for n in range(1100)]
        ends = [word for word in gate.log if word.endswith("ends") and word != "g ends"]
        assert ends == [f"{n} ends" for n in range(1100)]

    run(test)


def test_a_file_by_another_name_is_the_same_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "dir").mkdir()
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "up").symlink_to("dir/..")
    base = os.fsencode(tmp_path)

    async def test(lane: Lane, gate: Gate) -> None:
        real = os.path.realpath(base) + b"/file"
        one = lane.submit(writes(base + b"/link"), gate.job("one", leave=(real,)))
        await eventually_async(lambda: "one begins" in gate.log)
        two = lane.submit(reads(base + b"/up/file"), gate.short("two"))
        assert await lane.submit(reads(base + b"/dir"), gate.short("other")) == "other"
        assert not two.settled
        gate.open["one"].set()
        await one
        assert await two == "two"

    run(test)


def test_a_stuck_call_is_passed_after_a_while() -> None:
    async def test(lane: Lane, gate: Gate) -> None:
        stuck = lane.submit(reads(b"/dead/mount"), gate.job("stuck"))
        fine = lane.submit(reads(b"/home"), gate.short("fine"))
        needs_it = lane.submit(writes(b"/dead/mount"), gate.short("needs it"))
        assert await fine == "fine"
        assert not stuck.settled
        assert not needs_it.settled
        gate.open["stuck"].set()
        assert (await stuck, await needs_it) == ("stuck", "needs it")

    run(test)


def test_many_stuck_calls_use_a_bounded_number_of_threads() -> None:
    async def test(lane: Lane, gate: Gate) -> None:
        stuck = [lane.submit(reads(b"/%d" % n), gate.job(f"stuck {n}")) for n in range(lanes.MAX_ASIDE + 5)]
        await eventually_async(lambda: len(gate.log) == lanes.MAX_ASIDE + 1)
        await asyncio.sleep(lanes.PATIENCE * 5)
        assert len(gate.log) == lanes.MAX_ASIDE + 1
        for event in gate.open.values():
            event.set()
        for number, one in enumerate(stuck):
            assert await one == f"stuck {number}"

    run(test)


def test_errors_of_the_system_become_answers() -> None:
    def fail(turn: Turn) -> None:
        raise FileNotFoundError(2, "whatever")

    async def test(lane: Lane, gate: Gate) -> None:
        with pytest.raises(RpcError) as caught:
            await lane.submit(reads(b"/x"), fail)
        assert (caught.value.code, caught.value.message) == (-32004, "No such file or directory (os error 2)")
        assert await lane.submit(reads(b"/x"), gate.short("next")) == "next"

    run(test)


def test_other_errors_pass_as_they_are() -> None:
    def fail(turn: Turn) -> None:
        raise ZeroDivisionError

    async def test(lane: Lane, gate: Gate) -> None:
        with pytest.raises(ZeroDivisionError):
            await lane.submit(reads(b"/x"), fail)

    run(test)


def test_closing_forgets_what_has_not_begun_and_tells_what_has() -> None:
    async def test(lane: Lane, gate: Gate) -> None:
        told = Event()

        def watch(turn: Turn) -> None:
            gate.log.append("watching")
            while True:
                try:
                    turn.check()
                except Abandoned:
                    told.set()
                    raise

        lane.submit(reads(b"/x"), watch)
        lane.submit(reads(b"/y"), gate.short("never"))
        await eventually_async(lambda: gate.log == ["watching"])
        lane.close()
        assert await asyncio.to_thread(told.wait, 10)
        await asyncio.sleep(0.05)
        assert gate.log == ["watching"]

    run(test)


def test_a_cancelled_answer_abandons_its_call() -> None:
    async def test(lane: Lane, gate: Gate) -> None:
        one = lane.submit(reads(b"/x"), gate.job("one"))
        two = lane.submit(reads(b"/y"), gate.short("two"))
        two.cancel()
        gate.open["one"].set()
        assert await one == "one"
        assert await lane.submit(reads(b"/z"), gate.short("three")) == "three"
        assert "two begins" not in gate.log

    run(test)


def test_free_for_reading() -> None:
    async def test(lane: Lane, gate: Gate) -> None:
        assert lane.free_for_reading
        one = lane.submit(reads(b"/x"), gate.job("one", leave=()))
        await eventually_async(lambda: lane.free_for_reading)
        two = lane.submit(writes(b"/y"), gate.job("two", leave=()))
        await eventually_async(lambda: "two begins" in gate.log)
        assert not lane.free_for_reading
        gate.open["one"].set()
        gate.open["two"].set()
        await one
        await two
        assert lane.free_for_reading

    run(test)
