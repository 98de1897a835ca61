"""Plain HTTP on the listening socket: health, metrics, and who may become a WebSocket.

The checks run in a fixed order, and before anything of a request beyond its head is looked at.
"""

from __future__ import annotations

from ..transport.door import Answer, Head
from .auth import Authenticator, bearer_token
from .metrics import Metrics

__all__ = ["Gate"]


class Gate:
    """Answers a request, or lets it through to become a WebSocket."""

    def __init__(
        self, authenticator: Authenticator | None, allowed_origins: frozenset[str], metrics: Metrics
    ) -> None:
        self._authenticator = authenticator
        self._allowed_origins = allowed_origins
        self._metrics = metrics

    def route(self, head: Head) -> Answer | None:
        """The answer, or None to go on as a WebSocket."""
        answer = self._decide(head)
        if answer is not None and head.path == "/" and head.has_word("upgrade", "websocket"):
            self._metrics.refused_upgrades_total += 1
        return answer

    def _decide(self, head: Head) -> Answer | None:
        # A browser sends Origin with every request a page can make it send; no other client does.
        if any(name == "origin" and value not in self._allowed_origins for name, value in head.headers):
            return Answer(403)
        if head.path in ("/readyz", "/healthz", "/metrics"):
            return self._probe(head)
        if head.path != "/":
            return Answer(404)
        if head.method != "GET":
            return Answer(405, "Request method must be `GET`")
        if not head.has_word("connection", "upgrade"):
            return Answer(400, "Connection header did not include 'upgrade'")
        if not head.has_word("upgrade", "websocket"):
            return Answer(400, "`Upgrade` header did not include 'websocket'")
        if head.get("sec-websocket-version") != "13":
            return Answer(400, "`Sec-WebSocket-Version` header did not include '13'")
        if head.get("sec-websocket-key") is None:
            return Answer(400, "`Sec-WebSocket-Key` header missing")
        if head.old:
            return Answer(426, "WebSocket request couldn't be upgraded since no upgrade state was present")
        return self._refusal(head)

    def _probe(self, head: Head) -> Answer:
        if head.method not in ("GET", "HEAD"):
            return Answer(405, headers=(("allow", "GET,HEAD"),))
        if head.path != "/metrics":
            return Answer(200)
        refusal = self._refusal(head)
        if refusal is not None:
            return refusal
        return Answer(200, self._metrics.prometheus(), "text/plain; version=0.0.4; charset=utf-8")

    def _refusal(self, head: Head) -> Answer | None:
        if self._authenticator is None:
            return None
        token, problem = bearer_token(head.get("authorization"))
        if problem is None:
            problem = self._authenticator.refuse(token)
        return None if problem is None else Answer(401, problem)
