"""Requests that go through a proxy."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from exec_server.wire.errors import RpcError
from support.far import (
    DEAD,
    OK,
    always,
    machine,
    params,
    run,
)

# Proxies -----------------------------------------------------------------------------------------


def through_proxy(
    url: str, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, **fields: Any
) -> list[str]:
    """What a proxy sees; `P` in a variable is its address."""

    async def work() -> list[str]:
        async with machine() as http, always(OK) as proxy:
            for name, value in variables.items():
                monkeypatch.setenv(name, value.replace("P", f"127.0.0.1:{proxy.port}"))
            with suppress(RpcError):  # many of these go nowhere; what matters is who was asked
                await http.open(params(url, timeoutMs=5000, **fields))
            return proxy.requests

    requests: list[str] = run(work())
    return requests


@pytest.mark.parametrize(
    "variables",
    [
        {"HTTP_PROXY": "http://P"},
        {"http_proxy": "http://P"},
        {"ALL_PROXY": "http://P"},
        {"HTTP_PROXY": "P"},
        {"HTTP_PROXY": "http://P", "http_proxy": "http://127.0.0.1:1"},
        {"HTTP_PROXY": "http://P", "NO_PROXY": "other, 10.0.0.0/8"},
    ],
)
def test_a_proxy_is_asked(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    (request,) = through_proxy("http://host.invalid/x?y", variables, monkeypatch)
    assert request == "GET http://host.invalid/x?y HTTP/1.1\r\naccept: */*\r\nhost: host.invalid\r\n\r\n"


@pytest.mark.parametrize(
    ("url", "variables"),
    [
        (f"{DEAD}/", {"HTTP_PROXY": "http://P", "NO_PROXY": "*"}),
        (f"{DEAD}/", {"HTTP_PROXY": "http://P", "NO_PROXY": "a, 127.0.0.1"}),
        (f"{DEAD}/", {"HTTP_PROXY": "http://P", "no_proxy": "127.0.0.0/8"}),
        ("http://localhost:1/", {"HTTP_PROXY": "http://P", "NO_PROXY": ".LocalHost"}),
        ("http://[::1]:1/", {"HTTP_PROXY": "http://P", "NO_PROXY": "::1"}),
        (f"{DEAD}/", {"HTTPS_PROXY": "http://P"}),
        (f"{DEAD}/", {"HTTP_PROXY": "http://P", "REQUEST_METHOD": "GET"}),
        (f"{DEAD}/", {"HTTP_PROXY": ""}),
    ],
)
def test_a_proxy_is_not_asked(url: str, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert through_proxy(url, variables, monkeypatch) == []


def test_a_proxy_with_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    (request,) = through_proxy("http://host.invalid/", {"HTTP_PROXY": "http://us%40r:pw@P"}, monkeypatch)
    assert "proxy-authorization: basic dxnacjpwdw==" in request.lower()


def test_tls_goes_through_a_tunnel(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> str:
        refusal = b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n"
        async with machine() as http, always(refusal, close=True) as proxy:
            monkeypatch.setenv("HTTPS_PROXY", proxy.url)
            with pytest.raises(RpcError, match="error sending request"):
                await http.open(params("https://host.invalid/"))
            return proxy.requests[0]

    assert run(work()).startswith("CONNECT host.invalid:443 HTTP/1.1\r\n")


def test_a_proxy_we_cannot_speak_to_is_not_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> list[str]:
        async with machine() as http, always(OK) as far:
            monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1")
            with pytest.raises(RpcError, match="error sending request"):
                await http.open(params(far.url))
            return far.requests

    assert run(work()) == []
