"""Time that moves when told to."""

from __future__ import annotations

from exec_server.testing import ManualLoop


def test_timers_fire_in_order_at_their_time() -> None:
    loop = ManualLoop()
    seen: list[tuple[str, float]] = []
    loop.call_later(30, lambda: seen.append(("late", loop.time())))
    loop.call_later(1, lambda: seen.append(("early", loop.time())))
    cancelled = loop.call_later(2, lambda: seen.append(("never", loop.time())))
    cancelled.cancel()
    loop.advance(0.5)
    assert seen == []
    loop.advance(60)
    assert seen == [("early", 1), ("late", 30)]
    assert loop.time() == 60.5


def test_what_a_callback_plans_is_done_too() -> None:
    loop = ManualLoop()
    seen: list[int] = []
    loop.call_soon(lambda: loop.call_soon(seen.append, 1))
    loop.settle()
    assert seen == [1]
