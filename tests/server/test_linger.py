"""server/linger.py: staying awake, and when not to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from exec_server.server import linger
from exec_server.server.linger import GAP_SECONDS, IN_VAIN, ONE_IN, REST_SECONDS, Linger


class World:
    """A loop that turns when told to, a clock, and how often others were let run."""

    def __init__(self) -> None:
        self.now = 100.0
        self.interruptions = 7
        self.calls: deque[Callable[[], object]] = deque()

    def call_soon(self, call: Callable[..., object], *args: Any) -> None:
        self.calls.append(lambda: call(*args))

    def turn(self, seconds: float) -> None:
        self.now += seconds
        for _ in range(len(self.calls)):
            self.calls.popleft()()

    @property
    def awake(self) -> bool:
        return bool(self.calls)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(linger, "perf_counter", lambda: made.now)
    monkeypatch.setattr(linger, "_interruptions", lambda: made.interruptions)
    monkeypatch.setattr(linger, "_processors", lambda: 2)
    return made


def test_awake_for_a_moment_after_the_last_request(world: World) -> None:
    lingering = Linger(world, 50e-6)  # type: ignore[arg-type]  # as much of a loop as is used
    lingering.touch()
    world.turn(40e-6)
    assert world.awake
    lingering.touch()
    assert len(world.calls) == 1
    world.turn(40e-6)
    assert world.awake
    world.turn(40e-6)
    assert not world.awake


def test_a_busy_machine_is_left_alone_for_a_while(world: World) -> None:
    lingering = Linger(world, 50e-6)  # type: ignore[arg-type]
    lingering.touch()
    world.interruptions += 1
    world.turn(GAP_SECONDS * 2)
    assert not world.awake
    lingering.touch()
    assert not world.awake
    world.now += REST_SECONDS
    lingering.touch()
    assert world.awake


def test_whoever_asks_seldom_is_not_waited_for(world: World) -> None:
    lingering = Linger(world, 50e-6)  # type: ignore[arg-type]

    def asked() -> bool:
        """Ask, and let so much time pass that nobody looks any more; whether somebody did."""
        lingering.touch()
        looked = world.awake
        world.turn(1e-3)
        return looked

    assert all(asked() for _ in range(IN_VAIN))
    tried = [asked() for _ in range(ONE_IN * 3)]
    assert sum(tried) == 3
    while not asked():
        pass
    lingering.touch()
    while not world.awake:
        lingering.touch()
    lingering.touch()  # this time the next one comes at once
    world.turn(1e-3)
    assert all(asked() for _ in range(IN_VAIN - 1))


def test_work_in_hand_is_not_in_vain(world: World) -> None:
    lingering = Linger(world, 50e-6)  # type: ignore[arg-type]
    for _ in range(3 * IN_VAIN):
        lingering.touch()
        assert world.awake
        lingering.end()
        world.turn(10e-6)
        assert not world.awake


def test_own_work_is_no_interruption(world: World) -> None:
    lingering = Linger(world, 50e-6)  # type: ignore[arg-type]
    lingering.touch()
    world.turn(GAP_SECONDS * 2)  # a long turn of the loop, but nobody else ran
    assert not world.awake
    lingering.touch()
    assert world.awake
    world.interruptions += 1  # somebody else ran, but not for long
    world.turn(10e-6)
    assert world.awake


def test_never_without_time_or_with_one_processor(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    Linger(world, 0.0).touch()  # type: ignore[arg-type]
    monkeypatch.setattr(linger, "_processors", lambda: 1)
    Linger(world, 50e-6).touch()  # type: ignore[arg-type]
    assert not world.awake


def test_interruptions_are_counted() -> None:
    assert linger._interruptions() >= 0


def test_awake_for_whoever_is_about_to_answer(world: World) -> None:
    lingering = Linger(world, 50e-6)  # type: ignore[arg-type]
    lingering.end()
    lingering.expect(200e-6)
    world.turn(150e-6)
    assert world.awake
    world.turn(60e-6)
    assert not world.awake


def test_who_does_not_linger_does_not_for_anybody(world: World) -> None:
    lingering = Linger(world, 0.0)  # type: ignore[arg-type]
    lingering.expect(200e-6)
    assert not world.awake
