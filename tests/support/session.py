"""What tests of broken connections share."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from exec_server.environments.environment import Environment
from exec_server.testing.faults import Faults

__all__ = ["COUNT", "Drive", "Scenario", "mentions", "sent"]

Scenario = Callable[[Environment, Faults], Awaitable[None]]
Drive = Callable[..., None]

COUNT = "i=0; while [ $i -lt {} ]; do i=$((i+1)); echo $i; sleep 0.002; done; exit 7"


def sent(faults: Faults, method: str) -> list[dict[str, Any]]:
    """The params of every request of that method, on all connections."""
    messages = [json.loads(message) for message in faults.sent]
    return [message["params"] for message in messages if message["method"] == method]


def mentions(text: bytes) -> Callable[[bytes], bool]:
    return lambda message: text in message
