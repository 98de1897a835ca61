"""local/sandbox/proxies.py: which variables name proxies, and what becomes of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.local.sandbox.proxies import NAMES, NoProxies, Route, reroute

# The variables -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "changed", "endpoint"),
    [
        ("http://127.0.0.1:8080", "http://127.0.0.1:3128", ("127.0.0.1", 8080)),
        ("http://localhost:8080/x?y#z", "http://127.0.0.1:3128/x?y#z", ("127.0.0.1", 8080)),
        ("socks5h://user:word@LOCALHOST:1080", "socks5h://user:word@127.0.0.1:3128", ("127.0.0.1", 1080)),
        ("127.0.0.1:8080", "127.0.0.1:3128", ("127.0.0.1", 8080)),
        ("http://127.0.0.1", "http://127.0.0.1:3128", ("127.0.0.1", 80)),
        ("https://localhost/", "https://127.0.0.1:3128/", ("127.0.0.1", 443)),
        ("http://[::1]:8080", "http://127.0.0.1:3128", ("::1", 8080)),
    ],
)
def test_rewritten(value: str, changed: str, endpoint: tuple[str, int]) -> None:
    assert reroute({"HTTP_PROXY": value, "OTHER": value}) == (
        {"HTTP_PROXY": changed, "OTHER": value},
        [Route(3128, *endpoint)],
    )


@pytest.mark.parametrize(
    "value",
    [
        "http://example.com:80",
        "http://127.0.0.1:0",
        "http://127.0.0.1:99999",
        "socks5://localhost",
        "::",
        "http://",
    ],
)
def test_left_alone(value: str) -> None:
    good = "http://127.0.0.1:1"
    changed, routes = reroute({"HTTP_PROXY": good, "https_proxy": value})
    assert changed["https_proxy"] == value
    assert len(routes) == 1
    with pytest.raises(NoProxies, match="parseable loopback proxy endpoints"):
        reroute({"https_proxy": value})


def test_none() -> None:
    for env in (
        {},
        {"HTTP_PROXY": ""},
        {"NO_PROXY": "http://127.0.0.1:1", "CARGO_HTTP_PROXY": "127.0.0.1:1"},
    ):
        with pytest.raises(NoProxies, match="requires proxy environment variables"):
            reroute(env)


@given(
    st.dictionaries(
        st.sampled_from(sorted(NAMES | {name.lower() for name in NAMES})),
        st.tuples(st.sampled_from(["localhost", "127.0.0.1", "[::1]", "10.0.0.1"]), st.integers(1, 65535)),
        min_size=1,
    )
)
def test_one_port_for_each_endpoint(wanted: dict[str, tuple[str, int]]) -> None:
    env = {name: f"http://{host}:{port}" for name, (host, port) in wanted.items()}
    try:
        changed, routes = reroute(env)
    except NoProxies:
        assert {host for host, _ in wanted.values()} == {"10.0.0.1"}
        return
    assert len({route.port for route in routes}) == len({route[1:] for route in routes}) == len(routes)
    by_port = {route.port: (route.host, route.host_port) for route in routes}
    for name, (host, port) in wanted.items():
        if host == "10.0.0.1":
            assert changed[name] == env[name]
        else:
            real = "::1" if host == "[::1]" else "127.0.0.1"
            assert by_port[int(changed[name].rpartition(":")[2])] == (real, port)
