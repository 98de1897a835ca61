"""A model at a Responses-API endpoint: one request, and what it answers as it comes.

The vendor's package speaks to it. Here is what it leaves to callers: which failures are worth another try,
in the reference's words, and bounds for an endpoint that talks without end or not at all.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from .. import log
from ..events.model import Usage
from .exec import without_surrogates
from .items import understood
from .model_failure import CUT_OFF, ModelFailed, failed, refused

if TYPE_CHECKING:
    from openai import AsyncOpenAI, AsyncStream
    from openai._streaming import ServerSentEvent

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

MAX_TOKENS: Final = 2**40
"""Most tokens of one answer that are believed: what an endpoint counts is added up, and written as JSON."""

STREAM_RETRIES: Final = 5
"""The reference's default."""


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

        options: openai.RequestOptions = {"security": {"bearer_auth": True}}
        if not self._has_key:
            # That there is none has to be said with every request, or the package refuses to make it.
            options["headers"] = {"Authorization": openai.Omit()}
        try:
            # Events are taken as the JSON they are. `responses.create` would make objects of them, and the
            # classes for that take a second of processor time to build, before the first word is heard.
            stream = await self._client.post(
                "/responses",
                body={"model": self.settings.model, "stream": True, **request},
                options=options,
                cast_to=object,
                stream=True,
                stream_cls=_readable(openai.AsyncStream[object]),
            )
        except openai.APIStatusError as error:
            raise refused(error) from None
        except openai.APIConnectionError as error:
            raise ModelFailed(f"Connection failed: {_cause(error)}", network=True) from None
        except (openai.OpenAIError, ValueError, TypeError) as error:
            raise ModelFailed(f"the request could not be made: {error}", fatal=True) from None
        said = 0
        try:
            while True:
                try:
                    async with asyncio.timeout(self.settings.idle_seconds):
                        event = await anext(stream)
                except StopAsyncIteration:
                    break
                except TimeoutError:
                    raise ModelFailed(f"{CUT_OFF}idle timeout waiting for SSE") from None
                value = event if isinstance(event, dict) else {}
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
            raise failed(error.body if isinstance(error.body, dict) else {"message": error.message}) from None
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ModelFailed(f"{CUT_OFF}the endpoint sent what is no event: {error}") from None
        except Exception as error:
            if type(error).__module__.partition(".")[0] not in ("httpx", "httpx2", "httpcore", "httpcore2"):
                raise
            raise ModelFailed(f"{CUT_OFF}{error or type(error).__name__}") from None
        finally:
            await _leave(stream)
        raise ModelFailed(f"{CUT_OFF}stream closed before response.completed")


async def _leave(stream: AsyncStream[object]) -> None:
    """Nobody wants the rest of an answer. Take what has come of it, and stop waiting for more.

    Closing the answer alone would leave the package's generators, a dozen of them in a circle, where they
    are: for the garbage collector, at whatever time and in whatever thread it comes. There they are closed
    while the loop closes them, too, and Python complains of an exception that nobody can catch.
    """
    task = asyncio.current_task()
    interrupted = task is not None and task.cancelling() > 0
    with suppress(Exception):  # whatever it would have been, the answer is over
        async with asyncio.timeout(0):
            while True:
                await anext(stream)
    await stream.close()
    if interrupted:  # the timeout takes a cancellation for its own that was asked for before it began
        raise asyncio.CancelledError


@cache
def _readable(kind: type[AsyncStream[object]]) -> type[AsyncStream[object]]:
    """The package's stream without the events that are no JSON: it ends at the first of them."""

    class Readable(kind):  # type: ignore[valid-type,misc]  # the package is imported late
        async def _iter_events(self) -> AsyncIterator[ServerSentEvent]:
            async for event in super()._iter_events():
                if event.data.startswith("[DONE]") or _is_json(event.data):
                    yield event
                else:
                    log.warning("the endpoint sent what is no event", data=event.data[:200])

    return Readable


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


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


def _size(value: Mapping[str, Any]) -> int:
    """About how much an event carries: what repeats nothing that was counted before."""
    delta = value.get("delta")
    item = value.get("item") if value.get("type") == "response.output_item.done" else None
    return 64 + (len(delta) if isinstance(delta, str) else 0) + (len(json.dumps(item)) if item else 0)


def _understood(value: dict[str, Any]) -> ItemAdded | ItemDone | Completed | None:
    kind = value.get("type")
    item = value.get("item")
    response = value.get("response")
    if kind == "response.output_item.done":
        whole = understood(without_surrogates(item))
        if whole is None:
            log.debug("the model said what is no item", item=str(item)[:200])
        return None if whole is None else ItemDone(whole)
    if kind == "response.output_item.added" and isinstance(item, dict):
        return ItemAdded(item)
    if kind == "response.completed":
        return _completed(response if isinstance(response, dict) else {})
    if kind == "response.failed":
        error = response.get("error") if isinstance(response, dict) else None
        raise failed(error if isinstance(error, dict) else {})
    if kind == "response.incomplete":
        details = response.get("incomplete_details") if isinstance(response, dict) else None
        reason = details.get("reason") if isinstance(details, dict) else None
        raise ModelFailed(f"{CUT_OFF}Incomplete response returned, reason: {reason or 'unknown'}")
    if kind == "error":
        nested = value.get("error")
        raise failed(nested if isinstance(nested, dict) else value)
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
    return min(value, MAX_TOKENS) if type(value) is int and value > 0 else 0


def _cause(error: BaseException) -> str:
    cause = error.__cause__
    return (str(cause) or type(cause).__name__) if cause is not None else str(error)
