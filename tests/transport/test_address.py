"""transport/address.py: the `--listen` URL, literally."""

from __future__ import annotations

import pytest

from exec_server.transport.address import BadAddress, Listen, parse_listen, without_password


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("stdio", Listen("stdio")),
        ("stdio://", Listen("stdio")),
        ("off", Listen("off")),
        ("ws://127.0.0.1:0", Listen("ws", "127.0.0.1", 0)),
        ("ws://0.0.0.0:65535", Listen("ws", "0.0.0.0", 65535)),
        ("ws://[::1]:80", Listen("ws", "::1", 80)),
        ("wss://10.0.0.1:443", Listen("wss", "10.0.0.1", 443)),
        ("unix:///run/x.sock", Listen("unix", path="/run/x.sock")),
        ("unix://relative.sock", Listen("unix", path="relative.sock")),
    ],
)
def test_accepted(url: str, expected: Listen) -> None:
    assert parse_listen(url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "ws://localhost:0",
        "ws://127.0.0.1",
        "ws://127.0.0.1:0/",
        "ws://::1:0",
        "ws://127.0.0.1:65536",
        "ws://",
        "ws://127.0.0.1:",
        "ws://127.0.0.1:x",
        "ws://256.0.0.1:0",
        "ws://1.2.3:0",
        "ws://[::1]",
        "ws://[x]:1",
        "ws:// 127.0.0.1:0",
        "ws://127.0.0.1:0\n",
    ],
)
def test_bad_sockets(url: str) -> None:
    with pytest.raises(BadAddress) as refusal:
        parse_listen(url)
    assert str(refusal.value) == f"invalid websocket --listen URL `{url}`; expected `ws://IP:PORT`"


@pytest.mark.parametrize(
    "url", ["", "STDIO", "WS://127.0.0.1:0", "127.0.0.1:0", "http://127.0.0.1:0", " stdio", "unix://", "OFF"]
)
def test_other_urls(url: str) -> None:
    with pytest.raises(BadAddress) as refusal:
        parse_listen(url)
    expected = f"unsupported --listen URL `{url}`; expected `ws://IP:PORT` or `stdio`"
    assert str(refusal.value).startswith(expected)


def test_the_bound_address() -> None:
    assert parse_listen("ws://127.0.0.1:0").url(36041) == "ws://127.0.0.1:36041"
    assert parse_listen("ws://[::1]:0").url(43413) == "ws://[::1]:43413"
    assert parse_listen("wss://[::]:0").url(1) == "wss://[::]:1"


@pytest.mark.parametrize(
    ("url", "loopback"),
    [
        ("ws://127.0.0.1:0", True),
        ("ws://127.255.0.9:0", True),
        ("ws://[::1]:0", True),
        ("ws://[0:0:0:0:0:0:0:1]:0", True),
        ("ws://0.0.0.0:0", False),
        ("ws://[::]:0", False),
        ("ws://10.1.2.3:0", False),
        ("ws://[::ffff:10.0.0.1]:0", False),
        ("ws://128.0.0.1:0", False),
    ],
)
def test_what_is_loopback(url: str, loopback: bool) -> None:
    assert parse_listen(url).is_loopback is loopback


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("ws://me:pw@host:1/a:b@c", "ws://me:***@host:1/a:b@c"),
        ("ws://me:p@w:x@host", "ws://me:***@host"),
        ("wss://:pw@host?x=y:z@", "wss://:***@host?x=y:z@"),
        ("ws://me@host:1", "ws://me@host:1"),
        ("ws://[::1]:80/", "ws://[::1]:80/"),
        ("ws://host:1/path:x@y", "ws://host:1/path:x@y"),
        ("unix:///tmp/a:b@c", "unix:///tmp/a:b@c"),
        ("me:pw@host", "me:pw@host"),
    ],
)
def test_a_password_is_not_shown(url: str, shown: str) -> None:
    assert without_password(url) == shown
