"""Going on with a transport that was paused, also where TLS has kept something back."""

from __future__ import annotations

from typing import Any

from .. import log

__all__ = ["keeps_back", "read_on"]


def keeps_back(transport: Any) -> bool:
    """Whether `read_on` may deliver something at once, and so must not be called while something is."""
    return hasattr(transport, "_do_read")


def read_on(transport: Any) -> None:
    """Read again.

    A TLS transport of aiofastnet that is paused in the middle of what it has read keeps the rest. When it
    goes on it asks the socket first: it does not look at the rest if nothing comes, and gives up if there is
    no room for more. So the rest is taken out before that.
    """
    transport.resume_reading()
    if keeps_back(transport) and not transport.is_closing():
        try:
            transport._do_read()
        except Exception as error:  # what TLS makes of bad bytes, and whatever a protocol does
            log.info("a connection failed while it was read", reason=str(error))
            transport.abort()
