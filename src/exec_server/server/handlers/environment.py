"""`environment/*`: what this machine is, and that it is there."""

from __future__ import annotations

from typing import Any, Final

from ...wire.params import NoParams
from ..connection import Connection
from ..dispatch import Method

__all__ = ["METHODS"]


def info(connection: Connection, params: NoParams) -> Any:
    """The same object `initialize` gives."""
    del params
    return connection.server.environment_info


def status(connection: Connection, params: NoParams) -> Any:
    """An answer at all is the answer."""
    del connection, params
    return {"status": "ready"}


METHODS: Final = {
    "environment/info": Method(NoParams, info, "environment info", control=True),
    "environment/status": Method(NoParams, status, "environment status", control=True),
}
