"""Where this server is installed. It imports late and starts programs of its own, outside of every sandbox: a
command that could change one of these files would have something of its own run there."""

from __future__ import annotations

import os
import sys
from functools import cache

__all__ = ["server_roots"]


@cache
def server_roots() -> tuple[bytes, ...]:
    """The package, the environment it is installed in, and what else modules are imported from. Not the
    system's own directories: whoever may write to those needs none of this."""
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    roots = {package, *filter(_is_of_packages, sys.path)}
    if sys.prefix != sys.base_prefix:
        roots.add(sys.prefix)
    return tuple(sorted({os.fsencode(os.path.realpath(root)) for root in roots}))


def _is_of_packages(place: str) -> bool:
    return os.path.isabs(place) and place.rstrip("/").endswith(("/site-packages", "/dist-packages"))
