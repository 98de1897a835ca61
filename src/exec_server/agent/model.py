"""A model at a Responses-API endpoint: one request, and what it answers as it comes.

The vendor's package speaks to it. Here is what it leaves to callers: which failures are worth another try,
in the reference's words, and bounds for an endpoint that talks without end or not at all.
"""

from __future__ import annotations

import asyncio
import http
import json
import os
import time
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from ..events.model import Usage

if TYPE_CHECKING:
    from openai import AsyncOpenAI

__all__ = ["Completed", "ItemAdded", "ItemDone", "ModelClient", "ModelFailed", "ModelSettings"]

IDLE_SECONDS: Final = 300.0
"""How long an endpoint may be silent within an answer; the reference's value."""

CONNECT_SECONDS: Final = 30.0

MAX_RESPONSE_BYTES: Final = 64 * 1024 * 1024
"""Most that one answer may have. No model says that much; an endpoint that does, does not stop."""

MAX_RAW_BYTES: Final = 256 * 1024 * 1024
"""Most bytes that one answer may come in: the same text is in deltas, in items and in the whole."""

MAX_LINE_BYTES: Final = 32 * 1024 * 1024
"""Longest line of an answer, twice the longest arguments that are looked at. The package collects a line
before anybody sees it, however long it gets, and ever more slowly."""

MAX_ERROR_BYTES: Final = 64 * 1024
"""Most that is read of an answer that is none but a status. What it has to say is in the first lines."""

MAX_RETRY_AFTER_SECONDS: Final = 300.0
"""Longest that an endpoint is waited for because it says so; who has to wait longer wants to know of it."""

STREAM_RETRIES: Final = 5
"""The reference's default."""

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


class ModelSettings(Struct, frozen=True, kw_only=True):
    """Which model, where, and how patiently."""

    model: str
    base_url: str | None = None
    """None is the vendor's own, or what OPENAI_BASE_URL says."""
    api_key: str | None = None
    """None is what CODEX_API_KEY or OPENAI_API_KEY says. An endpoint that wants none gets an empty word."""
    headers: Mapping[str, str] = {}
    max_retries: int = STREAM_RETRIES
    idle_seconds: float = IDLE_SECONDS
    network_wait_seconds: float = 5.0
    """First pause while the endpoint cannot be reached; doubled each time, up to a minute."""
    network_give_up_seconds: float | None = None
    """When to stop waiting for the network; None never does, like the reference."""
    retry_seconds: float = 0.2
    """First pause before another try; doubled each time."""


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


class _TooLong(Exception):
    """An answer that is too long to be one."""


class ItemAdded(Struct, frozen=True):
    """The model begins something."""

    item: dict[str, Any]


class ItemDone(Struct, frozen=True):
    """The model has said something whole: a message, a thought, a call."""

    item: dict[str, Any]


class Completed(Struct, frozen=True):
    """The answer is whole."""

    usage: Usage
    response_id: str | None


class ModelClient:
    """A way to the model. Close it when done."""

    def __init__(self, settings: ModelSettings) -> None:
        self.settings = settings
        self._has_key = bool(_key(settings)) or "Authorization" in settings.headers
        self._client = _connected(settings)

    async def close(self) -> None:
        await self._client.close()

    async def ask(self, request: Mapping[str, Any]) -> AsyncIterator[ItemAdded | ItemDone | Completed]:
        """One request. Ends after Completed; anything else is a ModelFailed."""
        import openai

        if not self._has_key:
            # That there is none has to be said with every request, or the package refuses to make it.
            request = {**request, "extra_headers": {"Authorization": openai.Omit()}}
        try:
            stream = await self._client.responses.create(model=self.settings.model, stream=True, **request)
        except openai.APIStatusError as error:
            refused = _refused(error)
            refused.retry_after = _retry_after(error.response.headers)
            raise refused from None
        except openai.APIConnectionError as error:
            raise ModelFailed(f"Connection failed: {_cause(error)}", network=True) from None
        except (openai.OpenAIError, ValueError, TypeError) as error:
            raise ModelFailed(f"the request could not be made: {error}", fatal=True) from None
        said = 0
        try:
            events = aiter(stream)
            while True:
                try:
                    async with asyncio.timeout(self.settings.idle_seconds):
                        event = await anext(events)
                except StopAsyncIteration:
                    break
                except TimeoutError:
                    raise ModelFailed(f"{CUT_OFF}idle timeout waiting for SSE") from None
                value = _plain(event)
                said += _size(value)
                if said > MAX_RESPONSE_BYTES:
                    raise ModelFailed(f"{CUT_OFF}the answer is longer than {MAX_RESPONSE_BYTES} bytes")
                happened = _understood(value)
                if happened is not None:
                    yield happened
                if isinstance(happened, Completed):
                    return
        except _TooLong as error:
            raise ModelFailed(f"{CUT_OFF}{error}") from None
        except openai.APIConnectionError as error:
            raise ModelFailed(f"{CUT_OFF}{_cause(error)}") from None
        except openai.APIError as error:
            raise _failed(
                error.body if isinstance(error.body, dict) else {"message": error.message}
            ) from None
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ModelFailed(f"{CUT_OFF}the endpoint sent what is no event: {error}") from None
        except Exception as error:
            if type(error).__module__.partition(".")[0] not in ("httpx", "httpx2", "httpcore", "httpcore2"):
                raise
            raise ModelFailed(f"{CUT_OFF}{error or type(error).__name__}") from None
        finally:
            await stream.close()
        raise ModelFailed(f"{CUT_OFF}stream closed before response.completed")


def _key(settings: ModelSettings) -> str:
    if settings.api_key is not None:
        return settings.api_key
    return os.environ.get("CODEX_API_KEY") or os.environ.get("OPENAI_API_KEY", "")


def _connected(settings: ModelSettings) -> AsyncOpenAI:
    import httpx2
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    class Bounded(httpx2.AsyncByteStream):
        """The body of an answer, as long as it may be."""

        def __init__(self, stream: httpx2.AsyncByteStream, is_error: bool) -> None:
            self._stream = stream
            self._is_error = is_error

        async def __aiter__(self) -> AsyncIterator[bytes]:
            total = line = 0
            async for chunk in self._stream:
                total += len(chunk)
                if self._is_error and total > MAX_ERROR_BYTES:
                    yield chunk[: len(chunk) - (total - MAX_ERROR_BYTES)]
                    return
                last = chunk.rfind(b"\n")
                line = line + len(chunk) if last < 0 else len(chunk) - last - 1
                if line > MAX_LINE_BYTES:
                    raise _TooLong(f"a line of the answer is longer than {MAX_LINE_BYTES} bytes")
                if total > MAX_RAW_BYTES:
                    raise _TooLong(f"the answer is longer than {MAX_RAW_BYTES} bytes")
                yield chunk

        async def aclose(self) -> None:
            await self._stream.aclose()

    async def bound(response: httpx2.Response) -> None:
        if isinstance(response.stream, httpx2.AsyncByteStream):
            response.stream = Bounded(response.stream, response.is_error)

    timeout = httpx2.Timeout(settings.idle_seconds, connect=CONNECT_SECONDS)
    return AsyncOpenAI(
        http_client=DefaultAsyncHttpxClient(event_hooks={"response": [bound]}, timeout=timeout),
        api_key=_key(settings),
        base_url=settings.base_url,
        max_retries=0,  # every other try is announced, so it is made by whoever announces it
        timeout=timeout,
        default_headers=dict(settings.headers),
        _enforce_credentials=False,
    )


def _plain(event: Any) -> dict[str, Any]:
    """An event as the JSON it was, whatever the package made of it."""
    if not hasattr(event, "model_dump"):
        return event if isinstance(event, dict) else {}
    value = event.model_dump(mode="json", by_alias=True, exclude_unset=True, warnings=False)
    return value if isinstance(value, dict) else {}


def _size(value: Mapping[str, Any]) -> int:
    """About how much an event carries: what repeats nothing that was counted before."""
    delta = value.get("delta")
    item = value.get("item") if value.get("type") == "response.output_item.done" else None
    return 64 + (len(delta) if isinstance(delta, str) else 0) + (len(json.dumps(item)) if item else 0)


def _understood(value: dict[str, Any]) -> ItemAdded | ItemDone | Completed | None:
    kind = value.get("type")
    item = value.get("item")
    response = value.get("response")
    if kind == "response.output_item.done" and isinstance(item, dict):
        return ItemDone(item)
    if kind == "response.output_item.added" and isinstance(item, dict):
        return ItemAdded(item)
    if kind == "response.completed":
        return _completed(response if isinstance(response, dict) else {})
    if kind == "response.failed":
        error = response.get("error") if isinstance(response, dict) else None
        raise _failed(error if isinstance(error, dict) else {})
    if kind == "response.incomplete":
        details = response.get("incomplete_details") if isinstance(response, dict) else None
        reason = details.get("reason") if isinstance(details, dict) else None
        raise ModelFailed(f"{CUT_OFF}Incomplete response returned, reason: {reason or 'unknown'}")
    if kind == "error":
        nested = value.get("error")
        raise _failed(nested if isinstance(nested, dict) else value)
    return None


def _completed(response: Mapping[str, Any]) -> Completed:
    usage = response.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    before, after = usage.get("input_tokens_details"), usage.get("output_tokens_details")
    response_id = response.get("id")
    return Completed(
        Usage(
            input_tokens=_count(usage, "input_tokens"),
            cached_input_tokens=_count(before, "cached_tokens"),
            cache_write_input_tokens=_count(before, "cache_write_tokens"),
            output_tokens=_count(usage, "output_tokens"),
            reasoning_output_tokens=_count(after, "reasoning_tokens"),
        ),
        response_id if isinstance(response_id, str) else None,
    )


def _count(table: Any, name: str) -> int:
    value = table.get(name) if isinstance(table, dict) else None
    return value if type(value) is int and value > 0 else 0


def _failed(error: Mapping[str, Any]) -> ModelFailed:
    """What an endpoint says of itself, in the middle of an answer."""
    code = error.get("code") or error.get("type")
    message = error.get("message")
    text = message if isinstance(message, str) and message else "the endpoint reported a failure"
    if code == "context_length_exceeded":
        return ModelFailed(CONTEXT_FULL, fatal=True, context_full=True)
    if code in _FATAL_CODES:
        return ModelFailed(text, fatal=True)
    return ModelFailed(f"{CUT_OFF}{text}")


def _refused(error: Any) -> ModelFailed:
    """An answer with a status that is none: what to say of it, and whether to ask again."""
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


def _cause(error: BaseException) -> str:
    cause = error.__cause__
    return (str(cause) or type(cause).__name__) if cause is not None else str(error)
