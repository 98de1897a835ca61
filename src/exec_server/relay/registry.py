"""The registry as its clients see it: three calls over HTTP, and what their failures mean."""

from __future__ import annotations

import asyncio
import random
import re
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlsplit
from uuid import UUID

import msgspec

from .. import log
from .credentials import Credentials
from .keys import BadKey, PublicKey

if TYPE_CHECKING:
    import aiohttp

__all__ = ["BadRegistryUrl", "Bundle", "Registration", "Registry", "RegistryError", "retry_delay"]

SECURITY_PROFILE: Final = "noise_hybrid_ik_v1"
CONTINUES: Final = "x-exec-server-continues"
"""A header with the query of the URL that an environment was given before."""

TIMEOUT: Final = 10.0
"""Seconds for one call."""

MAX_ANSWER_BYTES: Final = 64 * 1024
MAX_RETRY_AFTER: Final = 300.0
"""Seconds that a registry can make us wait."""

MAX_CODE: Final = 128
MAX_QUOTED: Final = 4096
"""Characters of the code of a refusal and of its words, or of whatever else is answered, that are shown."""

_QUOTABLE_CODES: Final = frozenset(("registration_conflict", "authentication_service_unavailable"))
"""What is shown of a refusal even where its words are not."""

_PLAIN_ID: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class BadRegistryUrl(ValueError):
    """The base URL cannot be one, or would send the credential in the clear."""


class RegistryError(Exception):
    """The registry said no, or nothing. `status` is None when nothing was said."""

    def __init__(
        self,
        message: str,
        status: int | None = None,
        code: str | None = None,
        *,
        hopeless: bool = False,
        retry_after: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds that the registry asks us to wait."""
        self.status = status
        self.code = code
        self._hopeless = hopeless

    @property
    def transient(self) -> bool:
        """Whether the same call may work later."""
        if self._hopeless:
            return False
        if self.status is None or self.status in (408, 429) or self.status >= 500:
            return True
        return self.status == 409 and self.code == "environment_offline"


class Registration(msgspec.Struct, frozen=True):
    """What an environment gets: where to connect, and the name of this registration."""

    url: str
    id: str


class Bundle(msgspec.Struct, frozen=True):
    """What a harness gets for one connection attempt. The parts belong together and are used once."""

    url: str
    registration_id: str
    executor_key: PublicKey
    authorization: str


class Registry:
    """Calls for one environment."""

    def __init__(
        self,
        base_url: str,
        environment_id: str,
        credentials: Credentials,
        *,
        ssl: Any = None,
        quote_errors: bool = True,
    ) -> None:
        """`quote_errors` off keeps what the registry says about a failure out of our error texts."""
        self.environment_id = environment_id.strip()
        if not self.environment_id:
            raise BadRegistryUrl("the environment id is empty")
        self._bases = [checked_base(base) for base in base_url.split(",")]
        """Nodes of one service. The first is asked until it cannot be reached, then the next."""
        self._credentials = credentials
        self._ssl = ssl
        self._quote_errors = quote_errors
        self._session: aiohttp.ClientSession | None = None
        self._in_flight = 0

    async def register(self, key: PublicKey, continues: Registration | None = None) -> Registration:
        """Offer this environment under a key. `continues` is what it was offered under so far: a rendezvous
        of ours, which knows by its URL that we are the same, leaves the streams of that alone."""
        answer = await self._call(
            "register",
            {"security_profile": SECURITY_PROFILE, "executor_public_key": key.to_object()},
            headers=None if continues is None else {CONTINUES: urlsplit(continues.url).query},
        )
        self._check_common(answer)
        return Registration(
            _text(answer, "url", "register"), _text(answer, "executor_registration_id", "register")
        )

    async def connect(self, key: PublicKey, timeout: float = TIMEOUT) -> Bundle:
        """Ask for a way to the environment, for one attempt."""
        answer = await self._call("connect", {"harness_public_key": key.to_object()}, timeout)
        self._check_common(answer)
        try:
            executor_key = PublicKey.from_object(answer.get("executor_public_key"))
        except BadKey as error:
            raise _malformed("connect", str(error)) from None
        return Bundle(
            _text(answer, "url", "connect"),
            _text(answer, "executor_registration_id", "connect"),
            executor_key,
            _text(answer, "harness_key_authorization", "connect"),
        )

    async def validate(
        self, registration_id: str, stream_id: str, key: PublicKey, authorization: str
    ) -> bool:
        """Whether the peer with this key may use the registration."""
        headers = {"x-codex-noise-stream-id": stream_id} if _is_uuid(stream_id) else {}
        answer = await self._call(
            "validate",
            {
                "executor_registration_id": registration_id,
                "harness_public_key": key.to_object(),
                "harness_key_authorization": authorization,
            },
            headers=headers,
        )
        return answer.get("valid") is True

    @property
    def nodes(self) -> int:
        """How many addresses there are to try."""
        return len(self._bases)

    def _try_next(self) -> None:
        self._bases.append(self._bases.pop(0))

    async def close(self) -> None:
        """Let go of idle connections; the next call makes new ones."""
        if self._in_flight:
            return  # whoever is still asking closes after that
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _check_common(self, answer: dict[str, Any]) -> None:
        if answer.get("environment_id") != self.environment_id:
            raise _malformed("", "it speaks of another environment")
        if answer.get("security_profile") != SECURITY_PROFILE:
            raise _malformed("", f"the security profile is not {SECURITY_PROFILE}")

    async def _call(
        self,
        operation: str,
        body: dict[str, Any],
        timeout: float = TIMEOUT,
        headers: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        import ssl as ssl_module

        import aiohttp
        from yarl import URL

        if self._session is None:
            self._session = aiohttp.ClientSession(
                skip_auto_headers=("User-Agent",), cookie_jar=aiohttp.DummyCookieJar()
            )
        name = self.environment_id
        segment = name if _PLAIN_ID.fullmatch(name) else quote(name, safe="")
        self._in_flight += 1
        url = URL(f"{self._bases[0]}/cloud/environment/{segment}/{operation}", encoded=True)
        try:
            async with (
                asyncio.timeout(timeout),
                self._session.post(
                    url,
                    data=msgspec.json.encode(body),
                    headers={
                        "Content-Type": "application/json",
                        "Accept": "*/*",
                        **(headers or {}),
                        **self._credentials.headers(),
                    },
                    allow_redirects=False,
                    ssl=True if self._ssl is None else self._ssl,
                ) as response,
            ):
                content = await response.content.read(MAX_ANSWER_BYTES + 1)
                while len(content) <= MAX_ANSWER_BYTES and not response.content.at_eof():
                    content += await response.content.read(MAX_ANSWER_BYTES + 1)
                status = response.status
                wait = _seconds(response.headers.get("Retry-After", ""))
        except TimeoutError:
            self._try_next()
            raise RegistryError(f"the registry did not answer `{operation}` within {timeout:.3g} s") from None
        except (aiohttp.ClientSSLError, ssl_module.SSLError) as error:
            raise RegistryError(
                f"the registry's certificate is not trusted, or it speaks no TLS: {error}", hopeless=True
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            self._try_next()
            text = str(error) or type(error).__name__
            raise RegistryError(f"the registry cannot be reached for `{operation}`: {text}") from None
        finally:
            self._in_flight -= 1
        return read_answer(operation, status, content, self._quote_errors, wait)


def checked_base(url: str) -> str:
    """A base URL without what does not count; the credential never travels in the clear."""
    base = url.strip().rstrip("/")
    parts = urlsplit(base)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadRegistryUrl(f"`{url}` is not the URL of a registry; expected http:// or https://")
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise BadRegistryUrl(
            f"`{url}` would send the credential in the clear; use https:// for other machines"
        )
    return base


def retry_delay(attempt: int) -> float:
    """Seconds before retry number `attempt`, counted from 0: doubling from 0.5 to 5, and up to half more."""
    return min(0.5 * 2.0**attempt, 5.0) * random.uniform(1.0, 1.5)  # noqa: S311  # spreads load, hides nothing


def read_answer(
    operation: str, status: int, content: bytes, quote: bool, retry_after: float = 0.0
) -> dict[str, Any]:
    """The object in an answer; RegistryError when it is a refusal, or no object."""
    try:
        if len(content) > MAX_ANSWER_BYTES:
            raise ValueError("too long")
        answer = msgspec.json.decode(content)
    except (ValueError, RecursionError):
        answer = None
    if not 200 <= status < 300:
        code, message = _error(answer)
        quoted = message or content[:MAX_QUOTED].decode("utf-8", "replace") or "no explanation"
        quoted, code = (
            log.escaped(quoted[:MAX_QUOTED]),
            None if code is None else log.escaped(code[:MAX_CODE]),
        )
        if not quote:
            code, quoted = code if code in _QUOTABLE_CODES else None, "its words are not shown"
        raise RegistryError(
            f"the registry refused `{operation}`: HTTP {status}{f' {code}' if code else ''}: {quoted}",
            status,
            code,
            retry_after=retry_after,
        )
    if not isinstance(answer, dict):
        raise _malformed(operation, "it is not a JSON object")
    return answer


def _error(answer: Any) -> tuple[str | None, str | None]:
    """Code and message out of either shape of error."""
    for name in ("error", "detail"):
        found = answer.get(name) if isinstance(answer, dict) else None
        if isinstance(found, dict):
            code, message = found.get("code"), found.get("message")
            return (code if isinstance(code, str) else None), (message if isinstance(message, str) else None)
    return None, None


def _seconds(text: str) -> float:
    """Of a Retry-After; dates are for browsers, and more patience than MAX_RETRY_AFTER nobody can ask for."""
    return min(float(text), MAX_RETRY_AFTER) if text.isascii() and text.isdigit() else 0.0


def _malformed(operation: str, what: str) -> RegistryError:
    named = f" to `{operation}`" if operation else ""
    return RegistryError(f"the registry's answer{named} is not what it should be: {what}", 200)


def _text(answer: dict[str, Any], name: str, operation: str) -> str:
    value = answer.get(name)
    if not isinstance(value, str) or not value.strip():
        raise _malformed(operation, f"no {name}")
    return value


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, by its name alone."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _is_uuid(text: str) -> bool:
    try:
        return str(UUID(text)) == text.lower()
    except ValueError:
        return False
