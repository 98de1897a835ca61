"""How an environment is shown to people."""

from __future__ import annotations

import sys

import pytest

from exec_server.environments.entries import CommandTransport, RelayTransport, Transport, WebsocketTransport
from exec_server.environments.opening import address, local_opener


@pytest.mark.parametrize(
    ("transport", "shown"),
    [
        (None, "this machine"),
        (WebsocketTransport(url="ws://h:1", bearer_token="secret"), "ws://h:1"),
        (CommandTransport(program="ssh", args=("dev box", "x")), "ssh 'dev box' x"),
        (RelayTransport(registry_url="https://r", environment_id="e", auth_token="secret"), "e at https://r"),
    ],
)
def test_an_address_without_secrets(transport: Transport | None, shown: str) -> None:
    assert address(transport) == shown
    assert "secret" not in repr(transport)


def test_this_machine_needs_an_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_opener() is not None
    monkeypatch.setattr(sys, "executable", "")
    assert local_opener() is None
