"""server/handlers/environment.py: what the machine is, and that it is there."""

from __future__ import annotations

import shutil

from support.rpc import Peer


def test_info_is_what_initialize_gave_and_the_sandbox(peer: Peer) -> None:
    assert "sandbox" not in peer.info
    for answer in (peer.call("environment/info"), peer.call("environment/info", {})):
        sandbox = answer.pop("sandbox")
        assert answer == peer.info
        assert sandbox["backend"] in ("bubblewrap", "landlock", "filter", "none", "unknown")
    assert peer.refused("environment/info", {"x": 1})[0] == -32602


def test_what_makes_sandboxes_is_found_out_once(peer: Peer) -> None:
    if shutil.which("bwrap"):
        # A start waits for however long it takes to find out.
        peer.call("process/start", {**_TRUE, "processId": "found-out", "sandbox": _NOTHING_TO_WRITE})
        sandbox = peer.call("environment/info")["sandbox"]
        assert sandbox["backend"] in ("bubblewrap", "landlock")
        assert sandbox["landlockAbi"] >= 1
        if sandbox["backend"] == "bubblewrap":
            assert sandbox["version"].startswith("bubblewrap ")
        else:
            assert sandbox["reasons"]


def test_status(peer: Peer) -> None:
    assert peer.call("environment/status") == {"status": "ready"}


_TRUE = {"argv": ["/bin/true"], "cwd": "file:///", "env": {}, "tty": False}
_NOTHING_TO_WRITE = {
    "windowsSandboxLevel": "disabled",
    "permissions": {
        "type": "managed",
        "network": "restricted",
        "file_system": {
            "type": "restricted",
            "entries": [{"path": {"type": "special", "value": {"kind": "root"}}, "access": "read"}],
        },
    },
}
