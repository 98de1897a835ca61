"""Why a stream was reset, where whoever did it says so: words between ends of ours, and what they mean.

The reference gives one reason for everything. These come without proof, so nothing that matters is decided by
them: a harness tries again or not, and tells its user what was said.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "HANDSHAKES_PAUSED",
    "KEY_REVOKED",
    "NOT_TRUSTED",
    "REGISTRY_SILENT",
    "TOO_MANY_STREAMS",
    "explain",
    "is_known",
    "is_passing",
]

TOO_MANY_STREAMS: Final = "too_many_streams"
HANDSHAKES_PAUSED: Final = "handshakes_paused"
KEY_REVOKED: Final = "key_revoked"
NOT_TRUSTED: Final = "not_trusted"
REGISTRY_SILENT: Final = "registry_unavailable"

_MEANINGS: Final = {
    TOO_MANY_STREAMS: "it has as many streams as it may have (128, of which one API key gets 96)",
    HANDSHAKES_PAUSED: "too many handshakes with it have failed, and none is taken for a while",
    KEY_REVOKED: "the API key behind it was revoked",
    NOT_TRUSTED: "this harness's key is not among its --trusted-harnesses",
    REGISTRY_SILENT: "it could not ask the registry about us",
    "environment_disconnected": "it has lost its connection to the rendezvous",
    "superseded": "another machine has taken its place",
}

_UNEXPLAINED: Final = (
    "no reason was given, but its log has one (`--log-level info`): perhaps its key is another one by now, or"
    " the registry did not vouch for us"
)


def explain(reason: str) -> str:
    """Why, in a sentence of our own: what a stranger sends is not shown."""
    return f"the environment refused the stream: {_MEANINGS.get(reason, _UNEXPLAINED)}"


def is_known(reason: str) -> bool:
    """Whether it is one of ours, and no text that somebody made up."""
    return reason in _MEANINGS


def is_passing(reason: str) -> bool:
    """Whether it may be better in a few seconds."""
    return reason in (TOO_MANY_STREAMS, HANDSHAKES_PAUSED, REGISTRY_SILENT, "environment_disconnected")
