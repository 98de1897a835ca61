"""The registry over HTTP: the reference's three calls, and a few for whoever runs the service."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from aiohttp import web

from .. import log
from .service import Refused, Rendezvous
from .store import ALL_TENANTS, ApiKey, Role, StoreUnavailable

__all__ = ["make_app"]

MAX_BODY_BYTES: Final = 64 * 1024
BODY_SECONDS: Final = 10.0

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
            request.headers.get("Authorization"), *roles, address=request.remote or ""
        )

    async def call(request: web.Request) -> web.Response:
        environment, operation = request.match_info["environment"], request.match_info["operation"]
        if operation not in _ROLES:
            raise Refused(404, "not_found", "there is no such call")
        key = await authenticate(request, *_ROLES[operation])
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = msgspec.json.decode(await request.read())
        except TimeoutError:
            raise Refused(408, "too_slow", f"a body has {BODY_SECONDS:g} s to arrive") from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise Refused(400, "invalid_request", "the body is not JSON") from None
        except (ConnectionError, web.RequestPayloadError):
            raise Refused(400, "invalid_request", "the body did not arrive whole") from None
        if operation == "register":
            answer = await service.register(key, environment, body, base_of(request))
        elif operation == "connect":
            answer = await service.connect(key, environment, body, base_of(request))
        else:
            answer = await service.validate(key, environment, body)
        return _json(200, answer)

    async def listing(request: web.Request) -> web.Response:
        key = await authenticate(request, "admin")
        return _json(200, {"environments": await service.listing(key)})

    async def remove(request: web.Request) -> web.Response:
        key = await authenticate(request, "admin")
        found = request.match_info
        return _json(200, await service.remove(key, found["tenant"], found["environment"]))

    async def metrics(request: web.Request) -> web.Response:
        key = await authenticate(request, "admin")
        if key.tenant != ALL_TENANTS:
            raise Refused(
                403, "forbidden", f"the key {key.name!r} is for one tenant, and this is about all of them"
            )
        return web.Response(text=_metrics(service), content_type="text/plain")

    async def health(_: web.Request) -> web.Response:
        wrong = await service.health()
        return web.Response(status=200 if wrong is None else 503, text=wrong or "ok")

    def route(method: str, path: str, handler: Callable[[web.Request], Awaitable[web.Response]]) -> None:
        app.router.add_route(method, path, _answering(service, handler))

    route("POST", "/cloud/environment/{environment}/{operation}", call)
    route("GET", "/admin/environments", listing)
    route("DELETE", "/admin/environments/{tenant}/{environment}", remove)
    route("GET", "/metrics", metrics)
    route("GET", "/healthz", health)
    route("*", "/{rest:.*}", _nothing)
    return app


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
    return _json(refused.status, {"error": {"code": refused.code, "message": str(refused)}})


def _json(status: int, value: Any) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")


def _metrics(service: Rendezvous) -> str:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    class Collector:
        def collect(self) -> Any:
            router = service.router
            for name, text, value in (
                ("environments_online", "Environments connected to this node", router.online),
                ("streams", "Streams of environments on this node", router.stream_count),
            ):
                yield GaugeMetricFamily(f"exec_server_rendezvous_{name}", text, value=value)
            for name, text, value in (
                ("frames", "Frames forwarded", router.frames),
                ("bytes", "Bytes forwarded", router.bytes),
                ("dropped_frames", "Frames dropped", router.dropped),
                ("resets", "Streams told that they are over", router.resets),
            ):
                yield CounterMetricFamily(f"exec_server_rendezvous_{name}", text, value=value)
            calls = CounterMetricFamily(
                "exec_server_rendezvous_calls", "Calls answered", labels=("call", "status")
            )
            for (call, status), count in service.calls.items():
                calls.add_metric((call, str(status)), count)
            yield calls

    registry = CollectorRegistry()
    registry.register(Collector())
    return generate_latest(registry).decode()
