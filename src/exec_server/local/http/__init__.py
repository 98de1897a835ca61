"""HTTP requests made from this machine for somebody who is not on it.

The caller's request goes out as it was written: no header is added except `accept`, `host` and the
length of the body, nothing is decompressed, no cookie is kept. aiohttp carries it; what it would do on
its own account (upper-case methods, wait for `100-continue`, read `~/.netrc`, re-quote URLs) is turned
off here. It is imported with the first request, because that takes longer than starting the server.
"""

from __future__ import annotations

from .body import MAX_BUFFERED_BODY_BYTES, MAX_DELTA_BYTES, Exchange
from .client import MAX_REDIRECTS, LocalHttp
from .request import DENIED_VARIABLES

__all__ = [
    "DENIED_VARIABLES",
    "MAX_BUFFERED_BODY_BYTES",
    "MAX_DELTA_BYTES",
    "MAX_REDIRECTS",
    "Exchange",
    "LocalHttp",
]
