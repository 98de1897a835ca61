"""One bucket of JetStream's key-value store, and what goes wrong with it in words that every store uses.

Listing and counting ask the stream for its subjects, which costs one answer; the client's own way reads every
entry. What is removed is purged up to the revision that was seen, which leaves nothing that would be counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

import msgspec
from nats.aio.client import Client as Nats
from nats.errors import Error as NatsError
from nats.errors import TimeoutError as NatsTimeout
from nats.js.api import KeyValueConfig
from nats.js.errors import APIError, KeyNotFoundError, KeyWrongLastSequenceError, NotFoundError
from nats.js.kv import KeyValue

from .. import log
from .store import StoreUnavailable

__all__ = ["Bucket", "unavailable"]

T = TypeVar("T")

WORK_SECONDS: Final = 5.0
"""For one thing that NATS is asked."""

MOST_REPLICAS: Final = 3
"""Copies that are kept where nobody says how many: enough to lose one server. More would only cost."""

AT_ONCE: Final = 64
"""Entries that are asked for together."""

NAME_IN_USE: Final = 10058
NOT_CLUSTERED: Final = 10074
BEYOND_ALL: Final = 1 << 40
"""JetStream's codes; and more subjects than there are, behind which there is nothing but their number."""


class Bucket:
    """Names and values, with a revision that tells whether a value is still the one that was seen."""

    def __init__(self, connection: Nats, name: str, ttl: float | None = None) -> None:
        self._connection = connection
        self._name = f"exec_server_{name}"
        self._stream = f"KV_{self._name}"
        self._prefix = f"$KV.{self._name}."
        self._ttl = ttl
        self._jetstream = connection.jetstream()
        # Read from the leader only: another copy may be behind, and say that nothing is there.
        self._bucket = KeyValue(self._name, self._stream, self._prefix, self._jetstream, direct=False)

    async def make(self, replicas: int | None) -> None:
        """Unless it is there already. Errors are NATS's own."""
        if await self._config() is not None:
            return
        numbers = range(MOST_REPLICAS, 0, -1) if replicas is None else (replicas,)
        for number in numbers:
            config = KeyValueConfig(bucket=self._name, ttl=self._ttl, history=1, replicas=number)
            try:
                await self._jetstream.create_key_value(config)
            except APIError as error:
                if error.err_code == NAME_IN_USE:
                    return  # another node was first, with another number of replicas
                if number == numbers[-1]:
                    raise
            else:
                return

    async def set_replicas(self, replicas: int | None) -> None:
        """So many copies; None is as many as there are servers for, and never fewer than there are."""
        config = await self._config()
        if config is None:
            return
        now = int(config["num_replicas"])
        numbers = range(MOST_REPLICAS, now, -1) if replicas is None else (replicas,)
        for number in numbers:
            if number == now:
                return
            try:
                await self._ask("UPDATE", config | {"num_replicas": number})
            except (APIError, NatsTimeout) as error:
                if replicas is not None:
                    raise
                if not isinstance(error, APIError) or error.err_code == NOT_CLUSTERED:
                    return  # there is one server, or we may not ask for this
            else:
                log.info("NATS keeps another number of copies", bucket=self._name, before=now, now=number)
                return

    async def _config(self) -> dict[str, Any] | None:
        try:
            config: dict[str, Any] = (await self._ask("INFO", {}))["config"]
        except NotFoundError:
            return None
        return config

    async def _ask(self, what: str, body: dict[str, Any]) -> dict[str, Any]:
        message = await self._connection.request(
            f"$JS.API.STREAM.{what}.{self._stream}", msgspec.json.encode(body), timeout=WORK_SECONDS
        )
        answer: dict[str, Any] = msgspec.json.decode(message.data)
        if "error" in answer:
            raise APIError.from_error(answer["error"])
        return answer

    async def _do(self, work: Callable[[], Awaitable[T]]) -> T:
        if not self._connection.is_connected:
            # It would be tried for seconds, with somebody waiting.
            raise StoreUnavailable("there is no connection to NATS")
        try:
            async with asyncio.timeout(WORK_SECONDS):
                return await work()
        except (KeyNotFoundError, KeyWrongLastSequenceError):
            raise
        except (NatsError, OSError, TimeoutError) as error:
            raise unavailable(error) from None

    async def get(self, name: str) -> KeyValue.Entry | None:
        try:
            return await self._do(lambda: self._bucket.get(name))
        except KeyNotFoundError as error:
            if error.entry is not None:  # earlier versions left a mark in its place, which would be counted
                await self.remove(name, error.entry.revision)
            return None

    async def value(self, name: str) -> bytes | None:
        entry = await self.get(name)
        return None if entry is None else entry.value

    async def values(self, names: Sequence[str]) -> list[bytes | None]:
        """Some at a time; what is no longer there is None."""
        found: list[bytes | None] = []
        for start in range(0, len(names), AT_ONCE):
            found += await asyncio.gather(*(self.value(name) for name in names[start : start + AT_ONCE]))
        return found

    async def names(self, pattern: str) -> list[str]:
        """In order. The pattern is one of NATS's."""
        names: list[str] = []
        while True:
            answer = await self._subjects(pattern, len(names))
            found = answer["state"].get("subjects") or {}
            names += (subject.removeprefix(self._prefix) for subject in found)
            if not found or len(names) >= answer.get("total", 0):
                return sorted(names)

    async def count(self, pattern: str) -> int:
        return int((await self._subjects(pattern, BEYOND_ALL)).get("total", 0))

    async def _subjects(self, pattern: str, offset: int) -> dict[str, Any]:
        body = {"subjects_filter": self._prefix + pattern, "offset": offset}
        return await self._do(lambda: self._ask("INFO", body))

    async def put(self, name: str, value: bytes) -> None:
        await self._do(lambda: self._bucket.put(name, value))

    async def create(self, name: str, value: bytes) -> None:
        await self._do(lambda: self._bucket.create(name, value))

    async def update(self, name: str, value: bytes, revision: int | None) -> None:
        await self._do(lambda: self._bucket.update(name, value, last=revision))

    async def remove(self, name: str, revision: int | None = None) -> bool:
        """Whatever it is; or what it was at that revision, and False if it is not that any more."""
        body: dict[str, Any] = {"filter": self._prefix + name}
        if revision is not None:
            body["seq"] = revision + 1
        answer = await self._do(lambda: self._ask("PURGE", body))
        return bool(answer.get("purged"))


def unavailable(error: Exception) -> StoreUnavailable:
    """A refusal or a silence of NATS."""
    return StoreUnavailable(f"NATS does not do what it is asked: {str(error) or type(error).__name__}")
