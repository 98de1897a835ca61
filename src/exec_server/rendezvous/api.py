"""The registry over HTTP: the reference's three calls, and a few for whoever runs the service."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import msgspec
from aiohttp import web

from .. import log
from ..relay.registry import CONTINUES
from .metrics import metrics_text
from .service import Refused, Rendezvous
from .store import ALL_TENANTS, ApiKey, Role, StoreUnavailable

__all__ = ["make_app"]

MAX_BODY_BYTES: Final = 64 * 1024
BODY_SECONDS: Final = 10.0

MAX_PAGE: Final = 1000
PAGE: Final = 200
"""Environments in one answer, and those that are read together where all of them are wanted."""

_ROLES: Final[dict[str, tuple[Role, ...]]] = {
    "register": ("any", "environment"),
    "validate": ("any", "environment"),
    "connect": ("any", "harness"),
}


def make_app(service: Rendezvous, public_url: str | None) -> web.Application:
    """The routes. `public_url` is how clients reach us, where that is not how they say they did."""
    app = web.Application(client_max_size=MAX_BODY_BYTES)

    def base_of(request: web.Request) -> str:
        url = public_url or f"{request.scheme}://{request.host}"
        return "ws" + url.removeprefix("http")

    async def authenticate(request: web.Request, *roles: Role) -> ApiKey:
        return await service.authenticate(
            request.headers.get("Authorization"),
            *roles,
            address=request.remote or "",
            environment=request.match_info.get("environment"),
        )

    async def call(request: web.Request) -> web.Response:
        environment, operation = request.match_info["environment"], request.match_info["operation"]
        if operation not in _ROLES:
            raise Refused(404, "not_found", "there is no such call")
        began = time.perf_counter()
        key = await authenticate(request, *_ROLES[operation])
        spent = time.perf_counter() - began
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = msgspec.json.decode(await request.read())
        except TimeoutError:
            raise Refused(408, "too_slow", f"a body has {BODY_SECONDS:g} s to arrive") from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise Refused(400, "invalid_request", "the body is not JSON") from None
        except (ConnectionError, web.RequestPayloadError):
            raise Refused(400, "invalid_request", "the body did not arrive whole") from None
        began = time.perf_counter() - spent  # a body takes as long as its sender likes
        if operation == "register":
            continues = request.headers.get(CONTINUES, "")
            answer = await service.register(key, environment, body, base_of(request), continues)
            service.journal.registered(
                environment, key.tenant, key.name, request.remote or "", answer["executor_registration_id"]
            )
        elif operation == "connect":
            answer = await service.connect(key, environment, body, base_of(request))
        else:
            answer = await service.validate(key, environment, body)
            if not answer["valid"]:
                service.journal.refused(
                    "authorization", "invalid", "not of a bundle that is good now", request.remote or ""
                )
        service.journal.authorised(time.perf_counter() - began)
        return _json(200, answer)

    whole = asyncio.Lock()
    """Who asks for everything at once waits for others who do."""

    async def listing(request: web.Request) -> web.Response:
        key = await authenticate(request, "admin")
        after, limit = _page(request.query)
        if limit is not None:
            page, more = await service.listing(key, after, limit)
            return _json(
                200, {"environments": page} | ({} if more is None else {"next": f"{more[0]}/{more[1]}"})
            )
        pieces: list[bytes] = []
        async with whole:
            while True:
                page, after = await service.listing(key, after, PAGE)
                pieces += (msgspec.json.encode(found) for found in page)
                if after is None:
                    body = b'{"environments":[' + b",".join(pieces) + b"]}"
                    return web.Response(body=body, content_type="application/json")

    async def remove(request: web.Request) -> web.Response:
        key = await authenticate(request, "admin")
        found = request.match_info
        removed = await service.remove(key, found["tenant"], found["environment"])
        log.info(
            "an environment was removed",
            environment=found["environment"],
            tenant=found["tenant"],
            key=key.name,
            address=request.remote,
        )
        return _json(200, removed)

    async def metrics(request: web.Request) -> web.Response:
        key = await authenticate(request, "admin")
        if key.tenant != ALL_TENANTS:
            raise Refused(
                403, "forbidden", f"the key {key.name!r} is for one tenant, and this is about all of them"
            )
        return web.Response(text=metrics_text(service), content_type="text/plain")

    async def health(_: web.Request) -> web.Response:
        wrong = await service.health()
        if wrong is not None:
            return web.Response(status=503, text=wrong)
        trouble = service.trouble()
        return web.Response(text="ok" if trouble is None else f"ok, but {trouble}")

    def add(method: str, path: str, handler: Callable[[web.Request], Awaitable[web.Response]]) -> None:
        app.router.add_route(method, path, _answering(service, handler))

    def route(method: str, path: str, handler: Callable[[web.Request], Awaitable[web.Response]]) -> None:
        async def other(request: web.Request) -> web.Response:
            if request.match_info.get("operation", "connect") not in _ROLES:
                return await _nothing(request)
            response = error_response(Refused(405, "method_not_allowed", f"this is asked with {method}"))
            response.headers["Allow"] = method
            return response

        add(method, path, handler)
        add("*", path, other)

    route("POST", "/cloud/environment/{environment}/{operation}", call)
    route("GET", "/admin/environments", listing)
    route("DELETE", "/admin/environments/{tenant}/{environment}", remove)
    route("GET", "/metrics", metrics)
    route("GET", "/healthz", health)
    add("*", "/{rest:.*}", _nothing)
    return app


def _page(query: Mapping[str, str]) -> tuple[tuple[str, str] | None, int | None]:
    """Behind what, and how many, as a request for a listing says it; by itself it is about everything."""
    limit = query.get("limit")
    if limit is not None and not (limit.isascii() and limit.isdigit() and 0 < int(limit) <= MAX_PAGE):
        raise Refused(400, "invalid_request", f"`limit` is a number from 1 to {MAX_PAGE}")
    after = query.get("after")
    tenant, slash, environment = (after or "").rpartition("/")
    if after is not None and not slash:
        raise Refused(400, "invalid_request", "`after` is what came as `next` with the page before")
    return (tenant, environment) if after is not None else None, None if limit is None else int(limit)


async def _nothing(_: web.Request) -> web.Response:
    raise Refused(404, "not_found", "there is nothing here")


def _answering(
    service: Rendezvous, handler: Callable[[web.Request], Awaitable[web.Response]]
) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Errors as JSON, always; what was unforeseen is logged and not told."""

    async def answer(request: web.Request) -> web.Response:
        try:
            response = await handler(request)
        except Refused as refused:
            response = error_response(refused)
            if refused.code != "not_found":
                service.journal.refused("call", refused.code, str(refused), request.remote or "")
        except StoreUnavailable as error:
            response = error_response(service.unavailable(error, request.match_info.get("operation")))
        except web.HTTPRequestEntityTooLarge:
            response = error_response(Refused(413, "too_large", f"a body has at most {MAX_BODY_BYTES} bytes"))
        except web.HTTPException:
            raise
        except Exception as error:
            log.error("a call to the registry failed in an unforeseen way", exc_info=error)
            response = error_response(Refused(500, "internal_error", "something went wrong here"))
        name = request.match_info.get("operation", request.path if response.status == 200 else "other")
        counted = (name if name in _ROLES else "other", response.status)
        service.calls[counted] = service.calls.get(counted, 0) + 1
        # A connection that is kept might be used for an upgrade, which has to come in by the front door; and
        # the reference's harness gives up for good when it asks again on one that was cut meanwhile.
        response.force_close()
        response.headers["Server"] = "exec-server"  # which version of what it is made of is nobody's business
        return response

    return answer


def error_response(refused: Refused) -> web.Response:
    """The shape of error that all clients understand."""
    response = _json(refused.status, {"error": {"code": refused.code, "message": str(refused)}})
    if refused.retry_after is not None:
        response.headers["Retry-After"] = str(refused.retry_after)
    return response


def _json(status: int, value: Any) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")
