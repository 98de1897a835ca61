"""HTTP messages, and the URLs in them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.wire.errors import INVALID_PARAMS, RpcError
from exec_server.wire.http import (
    HttpBodyDelta,
    HttpHeader,
    HttpRequestParams,
    HttpRequestResult,
    UnsupportedScheme,
    UrlError,
    decode_request,
    parse_url,
)

LEAST = {"method": "GET", "url": "http://x/", "requestId": "r"}


def convert(**fields: Any) -> HttpRequestParams:
    return decode_request({**LEAST, **fields})


def test_defaults() -> None:
    params = convert()
    assert (params.headers, params.body_base64, params.timeout_ms) == ([], None, None)
    assert (params.redirect_policy, params.stream_response) == ("follow", False)


def test_nullable_members_may_be_null() -> None:
    params = convert(
        bodyBase64=None, timeoutMs=None, headers=[{"name": "a", "value": "b", "valueEnvVar": None}]
    )
    assert params.headers[0].value_env_var is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": None}, "invalid type: null, expected a string"),
        ({"url": 3}, "invalid type: number, expected a string"),
        ({"requestId": ["r"]}, "invalid type: sequence, expected a string"),
        ({"headers": None}, "invalid type: null, expected a sequence"),
        ({"headers": {}}, "invalid type: map, expected a sequence"),
        ({"headers": [None]}, "invalid type: null, expected struct HttpHeader"),
        ({"headers": [{"name": "a"}]}, "missing field `value`"),
        ({"headers": [{"value": "a"}]}, "missing field `name`"),
        ({"headers": [{"name": "a", "value": True}]}, "invalid type: boolean `true`, expected a string"),
        (
            {"headers": [{"name": "a", "value": "b", "valueEnvVar": 3}]},
            "invalid type: number, expected a string",
        ),
        ({"bodyBase64": 5}, "invalid type: number, expected a string"),
        ({"bodyBase64": "!"}, "Invalid symbol 33, offset 0."),
        ({"bodyBase64": "QUJ DRA="}, "Invalid symbol 32, offset 3."),
        ({"bodyBase64": "QQ"}, "Invalid padding"),
        ({"bodyBase64": "Q"}, "Invalid input length: 1"),
        ({"bodyBase64": "QR=="}, "Invalid last symbol 82, offset 1."),
        ({"timeoutMs": -1}, "invalid number"),
        ({"timeoutMs": 1.5}, "invalid number"),
        ({"timeoutMs": 2**64}, "invalid number"),
        ({"timeoutMs": "5"}, 'invalid type: string "5", expected u64'),
        ({"redirectPolicy": None}, "invalid type: null, expected string or map"),
        ({"redirectPolicy": "x"}, "unknown variant `x`, expected `follow` or `stop`"),
        ({"streamResponse": None}, "invalid type: null, expected a boolean"),
        ({"streamResponse": 1}, "invalid type: number, expected a boolean"),
    ],
)
def test_ill_typed_members(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RpcError) as caught:
        convert(**fields)
    assert (caught.value.code, caught.value.message) == (INVALID_PARAMS, message)


@pytest.mark.parametrize("missing", sorted(LEAST))
def test_required_members(missing: str) -> None:
    with pytest.raises(RpcError, match=f"^missing field `{missing}`"):
        decode_request({name: value for name, value in LEAST.items() if name != missing})


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (None, "invalid type: null, expected struct HttpRequestParams"),
        ("x", 'invalid type: string "x", expected struct HttpRequestParams'),
        ({"bodyBase64": "!", "method": 1}, "Invalid symbol 33, offset 0."),
        ({"method": 1, "bodyBase64": "!"}, "invalid type: number, expected a string"),
        ({"bodyBase64": "!"}, "Invalid symbol 33, offset 0."),
    ],
)
def test_which_mistake_is_reported(params: Any, message: str) -> None:
    with pytest.raises(RpcError) as caught:
        decode_request(params)
    assert caught.value.message == message


def test_a_body_is_decoded_once() -> None:
    assert convert(bodyBase64="b2s=").body_base64 == b"ok"
    assert convert(timeoutMs=2**64 - 1, unknown=1).timeout_ms == 2**64 - 1


def test_results_write_every_member() -> None:
    result = HttpRequestResult(200, [HttpHeader("a", "b")], "")
    assert (
        msgspec.json.encode(result) == b'{"status":200,"headers":[{"name":"a","value":"b"}],"bodyBase64":""}'
    )
    delta = HttpBodyDelta("r", 1, "", True)
    assert msgspec.json.encode(delta) == (
        b'{"requestId":"r","seq":1,"deltaBase64":"","done":true,"error":null}'
    )


# URLs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("http://h", "http://h/"),
        ("HTTP://H.Example:80/X", "http://h.example/X"),
        ("https://h:443", "https://h/"),
        ("http://h:443/", "http://h:443/"),
        ("http://h:/x", "http://h/x"),
        ("http://h:0080/", "http://h/"),
        ("http://h?q", "http://h/?q"),
        ("http://h/?", "http://h/?"),
        (" http://h/x ", "http://h/x"),
        ("ht\ntp://h/x\ty", "http://h/xy"),
        ("http:/h/x", "http://h/x"),
        ("http:h/x", "http://h/x"),
        ("http:\\\\h\\x\\y?a\\b", "http://h/x/y?a\\b"),
        ("http://h/a b?c d#e f", "http://h/a%20b?c%20d#e%20f"),
        ("http://h/a/../b/./c", "http://h/b/c"),
        ("http://h/%2E%2e/x/%2e", "http://h/x/"),
        ("http://h/../..", "http://h/"),
        ("http://h/a//b/..", "http://h/a//"),
        ("http://h/%7e~%zz%", "http://h/%7e~%zz%"),
        ("http://h/é?é", "http://h/%C3%A9?%C3%A9"),
        ("http://h/x'\"<>`{}|^[]", "http://h/x'%22%3C%3E%60%7B%7D|^[]"),
        ("http://h/x?'\"<>`{}|^[]\\", "http://h/x?%27%22%3C%3E`{}|^[]\\"),
        ("http://127.1/", "http://127.0.0.1/"),
        ("http://0x7f.0.0.1/", "http://127.0.0.1/"),
        ("http://2130706433/", "http://127.0.0.1/"),
        ("http://%31%32%37.0.0.1/", "http://127.0.0.1/"),
        ("http://LOCALHOST:1/", "http://localhost:1/"),
        ("http://[0:0::1]:1/", "http://[::1]:1/"),
        ("http://é.invalid/", "http://xn--9ca.invalid/"),
        ("http://user:pw@h/x#f", "http://h/x#f"),
        ("http://a@b@c/", "http://c/"),
    ],
)
def test_the_normal_form(text: str, normal: str) -> None:
    assert str(parse_url(text)) == normal


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "relative URL without a base"),
        ("/x", "relative URL without a base"),
        ("1:", "relative URL without a base"),
        ("://x", "relative URL without a base"),
        ("http://", "empty host"),
        ("http:///", "empty host"),
        ("https:", "empty host"),
        ("http://:80/", "empty host"),
        ("http://u@/", "empty host"),
        ("http://a:b/", "invalid port number"),
        ("http://a:99999/", "invalid port number"),
        ("http://a:-1/", "invalid port number"),
        ("http://a:" + "9" * 5000, "invalid port number"),
        ("http://a:٣/", "invalid port number"),
        ("http://[::1", "invalid IPv6 address"),
        ("http://[::1]x/", "invalid IPv6 address"),
        ("http://[::g]/", "invalid IPv6 address"),
        ("http://a b/", "invalid international domain name"),
        ("http://a<b/", "invalid international domain name"),
        ("http://c|/", "invalid international domain name"),
        ("http://%00/", "invalid international domain name"),
        ("http://256.0.0.1/", "invalid IPv4 address"),
        ("http://1.2.3.4.5/", "invalid IPv4 address"),
    ],
)
def test_what_is_no_url(text: str, reason: str) -> None:
    with pytest.raises(UrlError) as caught:
        parse_url(text)
    assert str(caught.value) == reason


@pytest.mark.parametrize(
    ("text", "scheme"), [("ftp://x/", "ftp"), ("MAILTO:x", "mailto"), ("blob:http://x/", "blob"), ("x:", "x")]
)
def test_other_schemes(text: str, scheme: str) -> None:
    with pytest.raises(UnsupportedScheme) as caught:
        parse_url(text)
    assert caught.value.scheme == scheme


@pytest.mark.parametrize(
    ("text", "absolute"),
    [
        ("", "http://h:1/a/b?q"),
        ("#f", "http://h:1/a/b?q#f"),
        ("?r", "http://h:1/a/b?r"),
        ("c", "http://h:1/a/c"),
        ("../../c", "http://h:1/c"),
        (".", "http://h:1/a/"),
        ("..", "http://h:1/"),
        ("/c", "http://h:1/c"),
        ("\\c", "http://h:1/c"),
        ("//other/c", "http://other/c"),
        ("/\\other/c", "http://other/c"),
        ("http:c", "http://h:1/a/c"),
        ("http:/c", "http://h:1/c"),
        ("https:c", "https://c/"),
        ("https://other", "https://other/"),
    ],
)
def test_relative_references(text: str, absolute: str) -> None:
    assert str(parse_url(text, parse_url("http://h:1/a/b?q#old"))) == absolute


def test_the_user_is_apart() -> None:
    url = parse_url("http://us%65r:p@ss:w@h:1/x")
    assert (url.user, url.password, url.authority, url.origin) == (
        "us%65r",
        "p%40ss:w".replace(":", "%3A"),
        "h:1",
        "http://h:1",
    )


@given(st.text(max_size=40), st.text(alphabet="/\\?#:@[].%2eEé hx1", max_size=20))
def test_the_normal_form_is_its_own(anything: str, tricky: str) -> None:
    for text in (anything, f"http://{tricky}", f"http://h/{tricky}{anything}", f"http://h?{anything}"):
        try:
            url = parse_url(text)
        except UrlError:
            continue
        assert str(url).isascii()
        assert str(parse_url(str(url))) == str(url)
