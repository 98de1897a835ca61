"""Clocks that are set, and clocks that disagree."""

from __future__ import annotations

from exec_server.rendezvous.clock import PeerClocks, SteadyClock


def test_a_steady_clock_goes_on_where_the_other_goes_back() -> None:
    wall, passed = 1000.0, 0.0
    clock = SteadyClock(wall=lambda: wall, monotonic=lambda: passed)
    assert clock() == 1000.0
    wall, passed = 1001.0, 1.0
    assert clock() == 1001.0
    wall, passed = 1201.0, 1.0  # set forward
    assert clock() == 1201.0
    wall, passed = 1002.0, 2.0  # and back
    assert clock() == 1202.0
    wall, passed = 1500.0, 3.0
    assert clock() == 1500.0
    assert SteadyClock(9000.0, wall=lambda: wall, monotonic=lambda: passed)() == 9000.0


def test_a_late_stamp_says_nothing_about_a_clock() -> None:
    clocks = PeerClocks()
    clocks.heard(b"late", 1000.0, 1020.0)
    assert clocks.off() == {b"late": -20.0}
    clocks.heard(b"late", 1021.0, 1021.5)
    clocks.heard(b"ahead", 1112.0, 1022.0)
    clocks.heard(b"behind", 932.0, 1022.0)
    assert clocks.off() == {b"ahead": 90.0, b"behind": -90.0}
    clocks.forget(b"ahead")
    assert clocks.off() == {b"behind": -90.0}
