"""Who has to go when too many strangers are there."""

from __future__ import annotations

from exec_server.transport.lobby import Guest, Lobby


class Hall(Lobby):
    """Remembers who was cut off."""

    def __init__(self, most: int, most_of_one: int) -> None:
        super().__init__(most, most_of_one)
        self.cut: list[str] = []

    def come(self, name: str, address: str = "a") -> Guest:
        return self.enter(address, lambda: self.cut.append(name))


def test_the_oldest_that_says_nothing_goes_first() -> None:
    hall = Hall(3, 3)
    hall.come("first").speak()
    for name in ("second", "third", "fourth", "fifth"):
        hall.come(name)
    assert hall.cut == ["second", "third"]
    assert (len(hall), hall.turned_out) == (3, 2)


def test_the_oldest_goes_when_all_have_spoken() -> None:
    hall = Hall(2, 2)
    for name in ("first", "second", "third"):
        hall.come(name).speak()
    assert hall.cut == ["first"]


def test_an_address_with_its_share_makes_room_for_itself() -> None:
    hall = Hall(10, 2)
    hall.come("other", "b")
    for name in ("first", "second", "third"):
        hall.come(name)
    assert hall.cut == ["first"]
    assert len(hall) == 3


def test_many_addresses_share_what_there_is() -> None:
    hall = Hall(3, 2)
    for number in range(5):
        hall.come(str(number), str(number))
    assert hall.cut == ["0", "1"]


def test_who_leaves_is_not_there_any_more() -> None:
    hall = Hall(2, 2)
    guests = [hall.come("first"), hall.come("second")]
    guests[1].speak()
    for guest in guests:
        guest.leave()
        guest.leave()
        guest.speak()
    assert len(hall) == 0
    hall.come("third")
    hall.come("fourth")
    assert hall.cut == []


def test_one_guest_of_one() -> None:
    """Also when the last of an address is the one who goes."""
    hall = Hall(1, 1)
    for name in ("first", "second", "third"):
        hall.come(name)
    assert hall.cut == ["first", "second"]
    assert len(hall) == 1
