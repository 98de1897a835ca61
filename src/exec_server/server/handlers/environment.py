"""`environment/info`: what this machine is. That it is there (`environment/status`) needs no module."""

from __future__ import annotations

from typing import Any, Final

from msgspec import UNSET, Raw
from msgspec.json import decode, encode

from ...loop import Pending
from ...wire.environment import EnvironmentInfo, EnvironmentSandbox
from ...wire.params import NoParams
from ..connection import Connection
from ..dispatch import Method

__all__ = ["METHODS"]

PROBE_PATIENCE: Final = 0.05
"""Seconds the first answer waits for what is tried out; trying takes about 0.02."""


def info(connection: Connection, params: NoParams) -> Any:
    """The object `initialize` gives, and which sandbox there is, which is found out when first asked."""
    del params
    from ...local.sandbox import probe

    if probe.known() is not None:
        return _with_sandbox(connection)
    server = connection.server
    answer: Pending[Any] = Pending()
    found = server.machine.sandboxer.run(probe.backend)

    def finish(_: object = None) -> None:
        if not answered:
            answered.append(True)
            timer.cancel()
            answer.resolve(_with_sandbox(connection))

    answered: list[bool] = []
    timer = server.loop.call_later(PROBE_PATIENCE, finish)
    found.then(finish)
    return answer


def _with_sandbox(connection: Connection) -> Raw:
    from ...local.sandbox import probe

    backend = probe.known()
    facts = decode(connection.server.environment_info, type=EnvironmentInfo)
    if backend is None:
        facts.sandbox = EnvironmentSandbox("unknown")
    else:
        facts.sandbox = EnvironmentSandbox(
            backend.name,
            version=backend.version or UNSET,
            landlock_abi=backend.landlock_abi or UNSET,
            reasons=list(backend.reasons) or UNSET,
        )
    return Raw(encode(facts))


METHODS: Final = {
    "environment/info": Method(NoParams, info, "environment info", control=True),
}
