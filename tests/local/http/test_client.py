"""Redirects."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from exec_server.local.http import Exchange
from exec_server.wire.base64 import encode
from exec_server.wire.errors import INTERNAL_ERROR, RpcError
from exec_server.wire.http import HttpBodyDelta
from support.far import (
    OK,
    Far,
    header,
    joined,
    machine,
    params,
    run,
)

# Redirects ---------------------------------------------------------------------------------------


def redirected(
    status: int, location: str, method: str = "GET", *, redirecting_path: str = "/from", **fields: Any
) -> tuple[Exchange, list[str]]:
    """Ask for a path that redirects once; the answer, and what arrived with ports left out."""

    async def work() -> tuple[Exchange, list[str]]:
        async def answer(path: str, writer: asyncio.StreamWriter) -> bool:
            if path.partition("?")[0] == redirecting_path:
                place = location.replace("{port}", str(far.port))
                writer.write(f"HTTP/1.1 {status} X\r\nlocation: {place}\r\n".encode())
                writer.write(b"content-length: 0\r\n\r\n")
            else:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            return False

        async with machine() as http, Far(answer) as far:
            exchange = await http.open(params(f"{far.url}{redirecting_path}?q=1#f", method, **fields))
            return exchange, [request.replace(str(far.port), "PORT") for request in far.requests]

    result: tuple[Exchange, list[str]] = run(work())
    return result


@pytest.mark.parametrize(
    ("status", "method", "then"),
    [
        (301, "POST", "GET"),
        (302, "POST", "GET"),
        (303, "POST", "GET"),
        (303, "PUT", "GET"),
        (301, "PUT", "PUT"),
        (302, "DELETE", "DELETE"),
        (302, "post", "post"),
        (307, "POST", "POST"),
        (308, "PUT", "PUT"),
        (307, "GET", "GET"),
    ],
)
def test_what_becomes_of_a_body(status: int, method: str, then: str) -> None:
    headers = [header("Content-Type", "a/b"), header("X-A", "1")]
    _, requests = redirected(status, "/to", method, bodyBase64=encode(b"hello"), headers=headers)
    assert requests[1].startswith(f"{then} /to HTTP/1.1\r\n")
    assert "x-a: 1\r\n" in requests[1]
    kept = then == method
    assert requests[1].endswith("hello") is kept
    assert ("content-type" in requests[1]) is kept
    assert ("content-length" in requests[1]) is kept


def test_head_stays_head() -> None:
    _, requests = redirected(303, "/to", "HEAD")
    assert requests[1].startswith("HEAD /to ")


def test_the_referer_says_where_we_came_from() -> None:
    _, requests = redirected(302, "/to", headers=[header("Referer", "http://mine/")])
    assert "referer: http://127.0.0.1:PORT/from?q=1\r\n" in requests[1]
    assert "mine" not in requests[1]


def test_secrets_stay_with_their_origin() -> None:
    names = ["Authorization", "Cookie", "Proxy-Authorization", "WWW-Authenticate", "X-Other"]
    headers = [header(name, "secret") for name in names]
    _, same = redirected(302, "/to", headers=headers)
    assert same[1].count("secret") == 5
    _, other = redirected(302, "http://localhost:{port}/to", headers=headers)
    assert other[1].count("secret") == 1
    assert "x-other: secret\r\n" in other[1]
    assert "referer: http://127.0.0.1:PORT/\r\n" in other[1]
    assert "host: localhost:PORT\r\n" in other[1]


def test_a_user_in_a_location_is_not_used() -> None:
    _, requests = redirected(302, "http://u:p@127.0.0.1:{port}/to")
    assert "authorization" not in requests[1]


@pytest.mark.parametrize(
    ("location", "path"),
    [
        ("//127.0.0.1:{port}/to", "/to"),
        ("to", "/to"),
        ("../x/./to?a b", "/x/to?a%20b"),
        ("http:/to", "/to"),
        ("\\to", "/to"),
        ("  /to  ", "/to"),
    ],
)
def test_relative_locations(location: str, path: str) -> None:
    _, requests = redirected(302, location)
    assert requests[1].startswith(f"GET {path} ")


@pytest.mark.parametrize("location", ["http://", "http://[bad/", "/é"])
def test_a_location_that_is_none_is_handed_over(location: str) -> None:
    exchange, requests = redirected(302, location)
    assert exchange.result.status == 302
    assert len(requests) == 1


@pytest.mark.parametrize("status", [300, 304, 305, 399])
def test_not_every_3xx_redirects(status: int) -> None:
    exchange, _ = redirected(status, "/to")
    assert exchange.result.status == status


def test_stop_returns_the_redirect() -> None:
    exchange, requests = redirected(302, "/to", redirectPolicy="stop")
    assert exchange.result.status == 302
    assert exchange.result.headers[0].value == "/to"
    assert len(requests) == 1


@pytest.mark.parametrize("location", ["ftp://x/", "file:///etc/passwd", "mailto:x"])
def test_redirects_leave_http_never(location: str) -> None:
    with pytest.raises(RpcError) as caught:
        redirected(302, location)
    scheme = location.partition(":")[0]
    assert caught.value.message == (
        f"http/request failed: redirect target uses unsupported URL scheme: {scheme}"
    )


@pytest.mark.parametrize(("count", "ok"), [(10, True), (11, False)])
def test_ten_redirects_are_enough(count: int, ok: bool) -> None:
    async def work() -> int:
        async def answer(path: str, writer: asyncio.StreamWriter) -> bool:
            left = int(path[1:])
            status = f"302 X\r\nlocation: /{left - 1}" if left else "200 OK"
            writer.write(f"HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n".encode())
            return False

        async with machine() as http, Far(answer) as far:
            return (await http.open(params(f"{far.url}/{count}"))).result.status

    if ok:
        assert run(work()) == 200
    else:
        with pytest.raises(RpcError) as caught:
            run(work())
        assert (caught.value.code, caught.value.message) == (
            INTERNAL_ERROR,
            "http/request failed: too many redirects",
        )


def test_a_failure_after_a_redirect_names_the_target() -> None:
    with pytest.raises(RpcError) as caught:
        redirected(302, "http://127.0.0.1:1/x")
    assert caught.value.message == (
        "http/request failed: error sending request for url (http://127.0.0.1:1/x)"
    )


def test_a_redirect_can_be_streamed() -> None:
    async def work() -> list[HttpBodyDelta]:
        async def answer(path: str, writer: asyncio.StreamWriter) -> bool:
            redirect = b"HTTP/1.1 302 X\r\nlocation: /to\r\ncontent-length: 3\r\n\r\nnot"
            writer.write(OK if path == "/to" else redirect)
            return False

        async with machine() as http, Far(answer) as far:
            exchange = await http.open(params(far.url, streamResponse=True))
            return [delta async for delta in exchange.deltas()]

    assert joined(run(work())) == b"ok"
