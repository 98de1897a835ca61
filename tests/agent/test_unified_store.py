"""Numbers, and which process goes first."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from exec_server.agent.unified_store import FIRST_NUMBER, LAST_NUMBER, ProcessStore, victim


@dataclass
class Stored:
    number: int
    ended: bool = False
    busy: bool = False


def by_use(count: int, ended: tuple[int, ...] = (), busy: tuple[int, ...] = ()) -> list[Stored]:
    return [Stored(number, number in ended, number in busy) for number in range(1, count + 1)]


@pytest.mark.parametrize(
    ("count", "ended", "busy", "pruned"),
    [
        (10, (2,), (), 2),
        (10, (), (), 1),
        (10, (3, 10), (), 1),
        (10, (1, 2), (1,), 2),
        (10, (2,), (2,), None),
        (10, (), (1,), 2),
        (10, (), (1, 2), None),
        (8, (1,), (), None),
        (0, (), (), None),
    ],
)
def test_who_is_given_up(
    count: int, ended: tuple[int, ...], busy: tuple[int, ...], pruned: int | None
) -> None:
    found = victim(by_use(count, ended, busy))
    assert (None if found is None else found.number) == pruned


def test_numbers() -> None:
    store: ProcessStore[Stored] = ProcessStore()
    numbers = [store.reserve() for _ in range(5000)]
    assert len(set(numbers)) == 5000
    assert min(numbers) >= FIRST_NUMBER
    assert max(numbers) <= LAST_NUMBER
    ordered: ProcessStore[Stored] = ProcessStore(sequential=True)
    assert [ordered.reserve() for _ in range(3)] == [1000, 1001, 1002]


def test_a_full_store_makes_room() -> None:
    store: ProcessStore[Stored] = ProcessStore(10)
    stored = by_use(10)
    for process in stored:
        assert not store.is_full()
        store.store(process)
    assert store.is_full()
    store.touch(stored[0])
    assert store.make_room() is stored[1], "the first was used just now"
    assert store.get(2) is None
    assert not store.is_full()
    assert store.is_full(1), "one that is being started needs room, too"
    store.store(Stored(11))
    stored[2].ended = stored[2].busy = True
    assert store.make_room() is None
    assert [process.number for process in store.running()] == [1, 4, 5, 6, 7, 8, 9, 10, 11]
    assert len(store.clear()) == 10
    assert list(store) == []


def test_a_small_store_makes_room_too() -> None:
    store: ProcessStore[Stored] = ProcessStore(1)
    store.store(Stored(1))
    assert store.make_room() == Stored(1)
    assert store.make_room() is None
