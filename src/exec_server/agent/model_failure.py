"""A request that a model did not answer to its end: in the reference's words, and whether to ask again."""

from __future__ import annotations

import http
import re
import time
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["CUT_OFF", "ModelFailed", "failed", "refused"]

MAX_RETRY_AFTER_SECONDS: Final = 300.0
"""Longest that an endpoint is waited for because it says so; who has to wait longer wants to know of it."""

CUT_OFF: Final = "stream disconnected before completion: "

CONTEXT_FULL: Final = (
    "The conversation no longer fits into the model's context window."
    " Start a new thread or clear earlier history before retrying."
)

_FATAL_CODES: Final = frozenset(
    {
        "insufficient_quota",
        "usage_limit_reached",
        "usage_not_included",
        "invalid_prompt",
        "server_is_overloaded",
    }
)
"""What another try does not make better, whatever status it comes with."""


_TRY_AGAIN: Final = re.compile(r"try again in\s*(\d+(?:\.\d+)?)\s*(ms|s|seconds?)\b", re.IGNORECASE)


class ModelFailed(Exception):
    """A request that was not answered to its end. The text is for the event stream."""

    def __init__(
        self, message: str, *, fatal: bool = False, network: bool = False, context_full: bool = False
    ) -> None:
        super().__init__(message)
        self.context_full = context_full
        """There was no room for the request; a shorter one may have."""
        self.fatal = fatal
        """Another try would end the same way."""
        self.network = network
        """Nobody was reached at all."""
        self.retry_after: float | None = None
        """How many seconds to wait before another try, if the endpoint said so."""


def failed(error: Mapping[str, Any]) -> ModelFailed:
    """What an endpoint says of itself, in the middle of an answer."""
    code = error.get("code") or error.get("type")
    message = error.get("message")
    text = message if isinstance(message, str) and message else "the endpoint reported a failure"
    if code == "context_length_exceeded":
        return ModelFailed(CONTEXT_FULL, fatal=True, context_full=True)
    if code in _FATAL_CODES:
        return ModelFailed(text, fatal=True)
    if code == "rate_limit_exceeded":
        limited = ModelFailed(f"rate limit exceeded: {text}")
        limited.retry_after = _asked_for(text)
        return limited
    return ModelFailed(f"{CUT_OFF}{text}")


def _asked_for(text: str) -> float | None:
    """How many seconds a message asks to wait."""
    found = _TRY_AGAIN.search(text)
    if found is None:
        return None
    seconds = float(found[1]) / (1000.0 if found[2].lower() == "ms" else 1.0)
    return min(seconds, MAX_RETRY_AFTER_SECONDS)


def refused(error: Any) -> ModelFailed:
    """An answer with a status that is none: what to say of it, and whether and when to ask again."""
    failure = _of_status(error)
    failure.retry_after = _retry_after(error.response.headers)
    return failure


def _of_status(error: Any) -> ModelFailed:
    status = int(error.status_code)
    body = error.body if isinstance(error.body, dict) else {}
    inner = body.get("error") if isinstance(body.get("error"), dict) else body
    code = inner.get("code") or inner.get("type") if isinstance(inner, dict) else None
    message = inner.get("message") if isinstance(inner, dict) else None
    if code == "context_length_exceeded":
        return ModelFailed(CONTEXT_FULL, fatal=True, context_full=True)
    if code in _FATAL_CODES:
        return ModelFailed(message if isinstance(message, str) and message else str(code), fatal=True)
    if status in (400, 413, 422):
        return ModelFailed(error.response.text or f"unexpected status {status}", fatal=True)
    try:
        phrase = http.HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    if status == http.HTTPStatus.TOO_MANY_REQUESTS:
        return ModelFailed(f"exceeded retry limit, last status: {status} {phrase}")
    said = message if isinstance(message, str) and message else "Unknown error"
    url = error.request.url
    return ModelFailed(f"unexpected status {f'{status} {phrase}'.strip()}: {said}, url: {url}")


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """What the endpoint asks for, in seconds: a number of them, or a date."""
    from email.utils import parsedate_to_datetime

    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        value = headers.get(name, "").strip()
        if not value:
            continue
        try:
            seconds = float(value) / unit
        except ValueError:
            try:
                seconds = parsedate_to_datetime(value).timestamp() - time.time()
            except (ValueError, OverflowError):
                continue
        if seconds == seconds:  # not NaN
            return min(max(seconds, 0.0), MAX_RETRY_AFTER_SECONDS)
    return None
