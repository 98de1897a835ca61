"""Where this server is installed. It imports late and starts programs of its own, outside of every sandbox: a
command that could change one of these files would have something of its own run there."""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import Final

__all__ = ["server_roots"]

_OF_THE_SYSTEM: Final = frozenset({"/", "/bin", "/usr", "/usr/bin", "/usr/local", "/usr/local/bin"})


@cache
def server_roots() -> tuple[bytes, ...]:
    """The package, the interpreter, the environment they are in, and what else modules are imported from. Not
    the system's own directories: whoever may write to those needs none of this."""
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    roots = {package, sys.prefix, sys.base_prefix, os.path.dirname(sys.executable)}
    roots.update(place for place in sys.path if os.path.isabs(place))
    real = {os.path.realpath(root) for root in roots}
    return tuple(sorted(os.fsencode(root) for root in real if root not in _OF_THE_SYSTEM))
