"""Tool servers over HTTP: a request that fails gets an answer that says so, and nothing else is lost.

The vendor's transport ends as a whole when one request gets no answer, and keeps a status it got to itself.
"""

from __future__ import annotations

import http
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import httpx2

__all__ = ["http_client"]

CONNECT_SECONDS: Final = 30.0

GRACE_SECONDS: Final = 5.0
"""How much longer a request waits than its caller: who gives up first says why."""

MAX_ERROR_BYTES: Final = 4096
"""Most that is read of an answer that is none but a status."""

SESSION: Final = "mcp-session-id"

INTERNAL_ERROR: Final = -32603
METHOD_NOT_FOUND: Final = -32601


def http_client(
    headers: Mapping[str, str], tool_seconds: float, session_lost: Callable[[], None]
) -> httpx2.AsyncClient:
    """A client for the vendor's transport. `session_lost` is called when the server knows it no more."""
    import httpx2

    class Forgiving(httpx2.AsyncClient):
        async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
            if request.method != "POST":
                if request.method == "GET":
                    # What the server says of itself comes here, and it may have nothing to say for hours.
                    waits = request.extensions.get("timeout") or {}
                    request.extensions = {**request.extensions, "timeout": {**waits, "read": None}}
                return await super().send(request, **options)
            try:
                response = await super().send(request, **options)
                if response.status_code < http.HTTPStatus.BAD_REQUEST:
                    if response.headers.get("content-type", "").lower().startswith("application/json"):
                        await response.aread()
                    return response
                said = await _beginning(response)
            except httpx2.TransportError as error:
                return _failed(request, 502, f"HTTP request failed: {error or type(error).__name__}")
            status = response.status_code
            if status == http.HTTPStatus.NOT_FOUND and SESSION in request.headers:
                session_lost()
            if _is_error(said):
                return httpx2.Response(status, json=json.loads(said), request=request)
            text = f"unexpected server response: HTTP {status}: {said.decode('utf-8', 'replace').strip()}"
            return _failed(request, status, text.rstrip(": "))

    timeout = httpx2.Timeout(CONNECT_SECONDS, read=tool_seconds + GRACE_SECONDS)
    return Forgiving(headers=dict(headers), timeout=timeout)


async def _beginning(response: httpx2.Response) -> bytes:
    """The first of a body; it is closed then."""
    said = b""
    try:
        async for chunk in response.aiter_bytes():
            said += chunk
            if len(said) >= MAX_ERROR_BYTES:
                break
    finally:
        await response.aclose()
    return said[:MAX_ERROR_BYTES]


def _is_error(said: bytes) -> bool:
    """Whether the body says in the protocol's own words what is wrong."""
    try:
        value = json.loads(said)
    except (ValueError, RecursionError):
        return False
    error = value.get("error") if isinstance(value, dict) else None
    return (
        isinstance(error, dict) and type(error.get("code")) is int and isinstance(error.get("message"), str)
    )


def _failed(request: httpx2.Request, status: int, text: str) -> httpx2.Response:
    """The answer of the protocol to a request that got none. It has no id: that is the caller's own."""
    import httpx2

    code = METHOD_NOT_FOUND if status == http.HTTPStatus.NOT_FOUND else INTERNAL_ERROR
    body = {"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": text}}
    return httpx2.Response(status, json=body, request=request)
