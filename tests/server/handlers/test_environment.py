"""server/handlers/environment.py: what the machine is, and that it is there."""

from __future__ import annotations

from support.rpc import Peer


def test_info_is_what_initialize_gave(peer: Peer) -> None:
    assert peer.call("environment/info") == peer.info
    assert peer.call("environment/info", {}) == peer.info
    assert peer.refused("environment/info", {"x": 1})[0] == -32602


def test_status(peer: Peer) -> None:
    assert peer.call("environment/status") == {"status": "ready"}
