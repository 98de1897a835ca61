"""Which method is done by whom. Families are imported when the first of their methods is called."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from ..local.process import descriptors
from ..wire.handshake import InitializeParams
from ..wire.params import NoParams

if TYPE_CHECKING:
    from .connection import Connection

__all__ = ["Method", "find", "load_next"]


class Method(Struct, frozen=True):
    """How a request is decoded, checked and done."""

    params: type | Callable[[Any], Any]
    """The type msgspec makes of them, or a table (wire/checks.py) where the words of complaints matter."""
    run: Callable[[Connection, Any], Any]
    """Gives the result, or a Pending of it."""
    family: str | None
    """The word of the handshake errors; None for what comes before the handshake."""
    control: bool = False
    """Passes even when everything else has to queue."""
    long_poll: bool = False
    """Waits for a process, for as long as it takes: it must never delay anybody, not even where requests are
    done one at a time."""
    takes_turn: bool = False
    """A long poll that is one of those that may wait at once, where that is more than one."""
    legacy: bool = False
    """Belongs to the first dialect."""
    extension: bool = False
    """A name the reference answers with "not implemented", for clients that have said they know it."""
    without_params: bool = False
    """May be asked without params, which means the same as empty ones."""


_FAMILIES: Final = {
    "process": "processes",
    "environment": "environment",
    "environmentConfig": "config",
    "http": "http",
    "fs": "files",
    "capabilityRoots": "capabilities",
    "capabilities": "capabilities",
    "command": "legacy",
}
"""The part of a method's name before the slash, and the module that does it."""

_INITIALIZE: Final = Method(
    InitializeParams, lambda connection, params: connection.initialize(params), family=None
)
_STATUS: Final = Method(
    NoParams, lambda _connection, _params: {"status": "ready"}, "environment status", control=True
)
"""An answer at all is the answer, so it must need nothing: nothing is imported for it."""

_methods: dict[str, Method] = {"initialize": _INITIALIZE, "environment/status": _STATUS}
_loaded: set[str] = set()


def find(name: str) -> Method | None:
    """The method of that name, if there is one."""
    method = _methods.get(name)
    if method is None:
        module = _FAMILIES.get(name.partition("/")[0])
        if module is not None and module not in _loaded:
            _load(module)
            method = _methods.get(name)
    return method


def load_next() -> bool:
    """Import one family ahead of its first call; whether there was one left.

    A call that comes when no more files can be opened finds its family there.
    """
    for module in _FAMILIES.values():
        if module not in _loaded:
            _load(module)
            return True
    return False


def _load(module: str) -> None:
    name = f".handlers.{module}"
    try:
        family = import_module(name, __package__)
    except OSError as error:
        if error.errno not in descriptors.EXHAUSTED:
            raise
        # With those put by for hard times: a call that opens nothing itself works even then.
        try:
            family = descriptors.afford(import_module, name, __package__)
        finally:
            descriptors.keep_spare()
    _methods.update(family.METHODS)
    _loaded.add(module)
