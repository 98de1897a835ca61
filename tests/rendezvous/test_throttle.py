"""Token buckets."""

from __future__ import annotations

from exec_server.rendezvous import throttle as module
from exec_server.rendezvous.throttle import Throttle


def test_a_burst_and_then_the_rate() -> None:
    throttle = Throttle(2.0, 5.0)
    assert [throttle.allow("a", 0.0) for _ in range(7)] == [True] * 5 + [False] * 2
    assert throttle.empty("a", 0.0)
    assert throttle.allow("b", 0.0)
    assert [throttle.allow("a", 1.0) for _ in range(3)] == [True, True, False]
    assert [throttle.allow("a", 100.0) for _ in range(6)] == [True] * 5 + [False]


def test_the_slowest_rate_is_a_rate() -> None:
    throttle = Throttle(0.2, 0.8)
    assert throttle.allow("a", 0.0)
    assert not throttle.allow("a", 1.0)

    assert throttle.allow("a", 5.1)


def test_the_number_of_names_is_bounded(monkeypatch: object) -> None:
    throttle = Throttle(1.0, 2.0)
    for number in range(module.MAX_BUCKETS + 10):
        throttle.allow(str(number), 0.0)
    assert len(throttle) <= module.MAX_BUCKETS
    throttle.allow("late", 1000.0)
    assert len(throttle) <= module.MAX_BUCKETS
