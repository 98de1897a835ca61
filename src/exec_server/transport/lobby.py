"""Connections that nobody has vouched for yet: only so many at once, and when one comes, another has to go.

Whoever comes is let in. Who goes is somebody who has said nothing for longest, and if there is no such, the
oldest. An address with more than its share makes room for itself; else anybody does.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Guest", "Lobby"]


class Guest:
    """One connection."""

    __slots__ = ("_lobby", "address", "cut", "spoke")

    def __init__(self, lobby: Lobby, address: str, cut: Callable[[], object]) -> None:
        self._lobby = lobby
        self.address = address
        self.cut = cut
        """Ends it."""
        self.spoke = False

    def speak(self) -> None:
        """Its request is here: it is worth more than those that are silent."""
        self._lobby.promote(self)

    def leave(self) -> None:
        """It has ended, or somebody has vouched for it."""
        self._lobby.remove(self)


class _Group:
    """Guests in the order in which they came: those who are silent, and those who are not."""

    __slots__ = ("silent", "talking")

    def __init__(self) -> None:
        self.silent: dict[Guest, None] = {}
        self.talking: dict[Guest, None] = {}

    def __len__(self) -> int:
        return len(self.silent) + len(self.talking)

    def of(self, guest: Guest) -> dict[Guest, None]:
        return self.talking if guest.spoke else self.silent

    def first_to_go(self) -> Guest:
        return next(iter(self.silent or self.talking))


class Lobby:
    """All guests of one listening socket."""

    def __init__(self, most: int, most_of_one: int) -> None:
        """How many at once, and how many from one address."""
        self._most = most
        self._most_of_one = most_of_one
        self._all = _Group()
        self._by_address: dict[str, _Group] = {}
        self.turned_out = 0
        """How many had to go."""

    def __len__(self) -> int:
        return len(self._all)

    def enter(self, address: str, cut: Callable[[], object]) -> Guest:
        """Somebody comes; somebody else is cut off where there are too many."""
        group = self._by_address.setdefault(address, _Group())
        if len(group) >= self._most_of_one:
            self._turn_out(group.first_to_go())
        elif len(self._all) >= self._most:
            self._turn_out(self._all.first_to_go())
        guest = Guest(self, address, cut)
        group = self._by_address.setdefault(address, group)
        group.silent[guest] = self._all.silent[guest] = None
        return guest

    def promote(self, guest: Guest) -> None:
        if not guest.spoke and guest in self._all.silent:
            self.remove(guest)
            guest.spoke = True
            group = self._by_address.setdefault(guest.address, _Group())
            group.talking[guest] = self._all.talking[guest] = None

    def remove(self, guest: Guest) -> None:
        if self._all.of(guest).pop(guest, guest) is None:
            group = self._by_address[guest.address]
            del group.of(guest)[guest]
            if not len(group):
                del self._by_address[guest.address]

    def _turn_out(self, guest: Guest) -> None:
        self.turned_out += 1
        self.remove(guest)
        guest.cut()
