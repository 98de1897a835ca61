"""What opens doors for the server itself is taken out of its environment before anything is started.

Commands run as the same account. What they inherit is one way to a secret, and the server's own environment,
which /proc shows to that account, is another: there the values are overwritten.
"""

from __future__ import annotations

import os

from .environ import is_own_credential

__all__ = ["take_credentials"]


def take_credentials() -> dict[str, str]:
    """The server's credentials, which from now on are in nobody's environment. Call it before there are
    threads and children."""
    taken = {name: value for name, value in os.environ.items() if is_own_credential(name)}
    for name in taken:
        _overwrite(os.fsencode(name))
        del os.environ[name]
    return taken


def _overwrite(name: bytes) -> None:
    """The kernel shows the memory that the process began with, whatever has been unset since."""
    import ctypes

    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    place = getenv(name)
    if place:
        ctypes.memset(place, 0, len(ctypes.string_at(place)))
