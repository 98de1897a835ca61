"""server/gate.py: plain HTTP on the port of a server, table 1.3 of the specification."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

from support.frames import UPGRADE, RawSocket
from support.server import RunningServer


@pytest.fixture
def raw(server: RunningServer) -> Iterator[RawSocket]:
    with RawSocket(server.url) as made:
        yield made


def without(*names: str) -> dict[str, str]:
    return {name: value for name, value in UPGRADE.items() if name not in names}


TEXT = "text/plain; charset=utf-8"
GET = "Request method must be `GET`"
TABLE = [
    # method, path, headers, status, body
    ("GET", "/readyz", {}, 200, ""),
    ("HEAD", "/readyz", {}, 200, ""),
    ("GET", "/readyz?query", {}, 200, ""),
    ("GET", "/healthz", {}, 200, ""),
    ("HEAD", "/healthz", {}, 200, ""),
    ("POST", "/readyz", {}, 405, ""),
    ("DELETE", "/healthz", {}, 405, ""),
    ("GET", "/readyz/", {}, 404, ""),
    ("GET", "/nothing", {}, 404, ""),
    ("GET", "//", UPGRADE, 404, ""),
    ("POST", "/nothing", {}, 404, ""),
    ("POST", "/", UPGRADE, 405, GET),
    ("PUT", "/", {}, 405, GET),
    ("GET", "/", {}, 400, "Connection header did not include 'upgrade'"),
    ("GET", "/", without("Connection"), 400, "Connection header did not include 'upgrade'"),
    ("GET", "/", {**UPGRADE, "Connection": "keep-alive"}, 400, "Connection header did not include 'upgrade'"),
    ("GET", "/", without("Upgrade"), 400, "`Upgrade` header did not include 'websocket'"),
    ("GET", "/", {**UPGRADE, "Upgrade": "h2c"}, 400, "`Upgrade` header did not include 'websocket'"),
    (
        "GET",
        "/",
        without("Sec-WebSocket-Version"),
        400,
        "`Sec-WebSocket-Version` header did not include '13'",
    ),
    (
        "GET",
        "/",
        {**UPGRADE, "Sec-WebSocket-Version": "8"},
        400,
        "`Sec-WebSocket-Version` header did not include '13'",
    ),
    ("GET", "/", without("Sec-WebSocket-Key"), 400, "`Sec-WebSocket-Key` header missing"),
    # Origin comes before everything.
    ("GET", "/", {**UPGRADE, "Origin": "http://localhost"}, 403, ""),
    ("GET", "/", {**UPGRADE, "Origin": ""}, 403, ""),
    ("GET", "/", {**UPGRADE, "origin": "null"}, 403, ""),
    ("GET", "/readyz", {"Origin": "http://x"}, 403, ""),
    ("POST", "/readyz", {"Origin": "http://x"}, 403, ""),
    ("GET", "/nothing", {"Origin": "http://x"}, 403, ""),
    ("GET", "/metrics", {"Origin": "http://x"}, 403, ""),
]


@pytest.mark.parametrize(("method", "path", "headers", "status", "body"), TABLE)
def test_table(
    raw: RawSocket, method: str, path: str, headers: dict[str, str], status: int, body: str
) -> None:
    answer = raw.ask(method, path, headers)
    assert (answer.status, answer.body) == (status, body)
    if body:
        assert answer.headers["content-type"] == TEXT
    if status == 405 and path != "/":
        assert answer.headers["allow"] == "GET,HEAD"
    # The connection is still good for another request.
    assert raw.ask(path="/readyz").status == 200


@pytest.mark.parametrize(
    "headers",
    [
        UPGRADE,
        {**UPGRADE, "Connection": "keep-alive, Upgrade", "Upgrade": "WebSocket"},
        {name.lower(): value for name, value in UPGRADE.items()},
        {**UPGRADE, "Cookie": "a=b", "User-Agent": "x" * 4000},
    ],
)
def test_upgrades(raw: RawSocket, headers: dict[str, str]) -> None:
    assert raw.ask(headers=headers).status == 101


@pytest.mark.parametrize("arguments", [(), ("--ws-auth", "capability-token", "--ws-token-sha256", "0" * 64)])
def test_the_first_http_knows_no_upgrades(
    start_server: Callable[..., RunningServer], arguments: tuple[str, ...]
) -> None:
    with RawSocket(start_server(*arguments).url) as raw:
        lines = ["GET / HTTP/1.0", *(f"{name}: {value}" for name, value in UPGRADE.items())]
        raw.send("\r\n".join([*lines, "", ""]).encode())
        answer = raw.response()
        assert answer.status == 426
        assert answer.body == "WebSocket request couldn't be upgraded since no upgrade state was present"


def test_origins_can_be_allowed(start_server: Callable[..., RunningServer]) -> None:
    server = start_server("--allow-origin", "https://app.example", "--allow-origin", "http://localhost:3000")
    for origin, status in (
        ("https://app.example", 101),
        ("http://localhost:3000", 101),
        ("https://app.example:443", 403),
        ("http://app.example", 403),
        ("", 403),
        ("null", 403),
    ):
        with RawSocket(server.url) as raw:
            assert raw.ask(headers={**UPGRADE, "Origin": origin}).status == status


def test_probes_need_no_authentication_but_metrics_do(
    start_server: Callable[..., RunningServer], tmp_path: object
) -> None:
    digest = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"  # of "test"
    server = start_server("--ws-auth", "capability-token", "--ws-token-sha256", digest)
    with RawSocket(server.url) as raw:
        assert raw.ask(path="/readyz").status == 200
        assert raw.ask(path="/healthz").status == 200
        assert raw.ask(path="/metrics").status == 401
        assert raw.ask(path="/metrics", headers={"Authorization": "Bearer test"}).status == 200
        # What is wrong with the upgrade itself is said first.
        assert raw.ask(headers=without("Sec-WebSocket-Key")).status == 400
        refused = raw.ask(headers=UPGRADE)
        assert (refused.status, refused.body) == (401, "missing websocket bearer token")
        body = raw.ask(path="/metrics", headers={"Authorization": "Bearer test"}).body
    [refusals] = re.findall(r"^exec_server_refused_upgrades_total (.*)$", body, re.MULTILINE)
    assert float(refusals) == 2
