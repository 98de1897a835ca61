"""local/sandbox/places.py: who gets which helper, and who has to end for whom. No process, and no time."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.local.process.spawn import Spawned
from exec_server.local.sandbox.helper_process import HelperProcess, Key, socket_pair
from exec_server.local.sandbox.places import (
    BUSY_SECONDS,
    GRACE_SECONDS,
    OWN_SECONDS,
    STALE_SECONDS,
    Places,
    Waiter,
)
from exec_server.local.sandbox.plan import MountPoint, Plan

A, B, C = (Key(Plan(kind="view", network="closed", readable=(name,))) for name in (b"/a", b"/b", b"/c"))
ONCE = Key(Plan(kind="view", network="closed", created=(MountPoint(b"/w/x", False),)))


class Office:
    """Places, a clock, and helpers that are no processes."""

    def __init__(self, most: int) -> None:
        self.now = 1000.0
        self.places = Places(most, lambda: self.now)
        self.started = 0

    def ask(self, key: Key) -> Waiter:
        return self.places.ask(key, reusing=not key.plan.created)

    def serve(self, waiter: Waiter) -> HelperProcess:
        """What a caller does with what it was granted."""
        assert waiter.granted.is_set()
        assert not waiter.refused
        if waiter.fits:
            assert waiter.helper is not None
            return waiter.helper
        self.started += 1
        ours, theirs = socket_pair()
        ours.close()
        os.close(theirs)
        return HelperProcess(waiter.key, ours, Spawned(0, None, None, []), guarded=False)

    def back(self, helper: HelperProcess) -> None:
        if not self.places.give_back(helper):
            self.places.free(helper.key, reusable=helper.reusable)

    def once(self, key: Key) -> HelperProcess:
        """A whole call."""
        helper = self.serve(self.ask(key))
        self.back(helper)
        return helper

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.places.look_again()


@pytest.fixture
def office() -> Office:
    return Office(2)


def test_a_free_helper_serves_its_plan_again(office: Office) -> None:
    assert office.once(A) is office.once(A)
    assert (office.started, office.places.count) == (1, 1)


def test_a_helper_goes_to_who_has_waited_longest_of_its_plan(office: Office) -> None:
    one, two = office.serve(office.ask(A)), office.serve(office.ask(B))
    first, second, other = office.ask(A), office.ask(A), office.ask(B)
    office.back(two)
    assert [waiter.granted.is_set() for waiter in (first, second, other)] == [False, False, True]
    office.back(one)
    assert [waiter.granted.is_set() for waiter in (first, second)] == [True, False]
    assert first.helper is one


def test_a_free_place_goes_to_who_has_waited_longest(office: Office) -> None:
    one = office.serve(office.ask(A))
    office.serve(office.ask(B))
    waiters = [office.ask(key) for key in (C, B, A)]
    office.places.free(one.key, reusable=True)
    assert [waiter.granted.is_set() for waiter in waiters] == [True, False, False]
    assert waiters[0].helper is None


def test_what_was_not_used_for_a_while_ends_at_once(office: Office) -> None:
    old, young = office.once(A), office.once(B)
    office.later(STALE_SECONDS)
    office.back(office.serve(office.ask(B)))
    waiter = office.ask(C)
    assert waiter.granted.is_set()
    assert (waiter.helper, waiter.fits) == (old, False)
    assert office.places.idle() == [young]


def test_what_was_just_used_stays_for_a_moment(office: Office) -> None:
    one = office.once(A)
    office.later(GRACE_SECONDS)
    office.once(A)
    office.once(B)
    waiter = office.ask(C)
    assert not waiter.granted.is_set()
    office.later(GRACE_SECONDS)
    assert waiter.helper is one


def test_a_busy_helper_of_ones_own_is_worth_waiting_for(office: Office) -> None:
    office.once(A)
    busy = office.serve(office.ask(B))
    office.later(STALE_SECONDS)
    waiter = office.ask(B)
    assert not waiter.granted.is_set()
    office.back(busy)
    assert waiter.helper is busy


def test_and_so_is_it_where_another_could_be_started(office: Office) -> None:
    busy = office.serve(office.ask(A))
    soon, late = office.ask(A), office.ask(A)
    assert not soon.granted.is_set()
    office.back(busy)
    assert soon.helper is busy
    office.later(2 * OWN_SECONDS)
    assert late.granted.is_set()
    assert late.helper is None, "it may start its own"


def test_who_has_none_comes_before_who_came_later(office: Office) -> None:
    """But after those who waited when the helper came."""
    one, two = office.serve(office.ask(A)), office.serve(office.ask(B))
    before = office.ask(A)
    without = office.ask(C)
    office.back(one)
    assert before.helper is one
    after = office.ask(A)
    office.later(GRACE_SECONDS)
    office.back(one)
    assert not after.granted.is_set()
    assert (without.helper, without.fits) == (one, False)
    office.back(two)
    office.later(BUSY_SECONDS)
    assert after.helper is two


def test_helpers_for_one_call_do_not_stay(office: Office) -> None:
    office.once(ONCE)
    assert office.places.count == 0
    one, two = office.serve(office.ask(ONCE)), office.serve(office.ask(ONCE))
    waiter = office.ask(ONCE)
    office.back(one)
    assert waiter.granted.is_set()
    assert waiter.helper is None
    office.back(two)


def test_who_leaves_the_line_is_granted_nothing(office: Office) -> None:
    one = office.serve(office.ask(A))
    office.serve(office.ask(B))
    leaves, stays = office.ask(A), office.ask(A)
    assert office.places.leave(leaves)
    office.back(one)
    assert stays.helper is one
    assert not office.places.leave(stays), "it has something to give back"


def test_at_the_end_everybody_is_refused(office: Office) -> None:
    office.serve(office.ask(A))
    office.once(B)
    waiter = office.ask(C)
    assert [helper.key for helper in office.places.close()] == [B]
    assert waiter.refused
    assert waiter.granted.is_set()
    assert office.ask(A).refused


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from((A, B, C, ONCE))), max_size=60))
def test_there_are_never_too_many_and_nobody_waits_for_ever(steps: list[tuple[int, Key]]) -> None:
    office = Office(2)
    at_work: list[HelperProcess] = []
    line: list[Waiter] = []
    for kind, key in steps:
        if kind == 0:
            line.append(office.ask(key))
        elif kind == 1 and at_work:
            office.back(at_work.pop(0))
        elif kind == 2:
            office.later(GRACE_SECONDS / 3)
        elif kind == 3:
            office.later(BUSY_SECONDS)
        at_work += [office.serve(waiter) for waiter in line if waiter.granted.is_set()]
        line = [waiter for waiter in line if not waiter.granted.is_set()]
        assert office.places.count == len(at_work) + len(office.places.idle()) <= 2
    for _ in range(2 * len(line)):
        if at_work:
            office.back(at_work.pop(0))
        office.later(BUSY_SECONDS)
        at_work += [office.serve(waiter) for waiter in line if waiter.granted.is_set()]
        line = [waiter for waiter in line if not waiter.granted.is_set()]
    assert line == []
