"""What is sent: as it was written, and nothing that must stay here."""

from __future__ import annotations

import os
from typing import Any

import pytest
from aiohttp import web

from exec_server.wire.base64 import decode, encode
from exec_server.wire.errors import INTERNAL_ERROR, INVALID_PARAMS
from support.far import (
    DEAD,
    OK,
    always,
    failure,
    header,
    machine,
    params,
    run,
    sent,
    serve,
)

# What is sent ------------------------------------------------------------------------------------


def test_nothing_is_added_but_accept_and_host() -> None:
    assert sent() == "GET /x HTTP/1.1\r\naccept: */*\r\nhost: 127.0.0.1:PORT\r\n\r\n"


@pytest.mark.parametrize("method", ["get", "Post", "FOO-bar!", "HEADS"])
def test_the_case_of_the_method_is_kept(method: str) -> None:
    assert sent(method=method).startswith(f"{method} /x HTTP/1.1\r\n")


def test_a_body_brings_its_length() -> None:
    assert sent(method="POST", bodyBase64=encode(b"hello")).endswith("content-length: 5\r\n\r\nhello")


@pytest.mark.parametrize("body", [None, ""])
def test_no_body_has_no_length(body: str | None) -> None:
    assert "content-length" not in sent(method="POST", bodyBase64=body)


def test_headers_keep_order_and_repetition() -> None:
    headers = [header("X-B", "1"), header("a", "2"), header("x-b", "3"), header("X-U", "é"), header("e", "")]
    lines = sent(headers=headers).split("\r\n")
    assert lines[1:7] == ["x-b: 1", "x-b: 3", "a: 2", "x-u: é", "e: ", "accept: */*"]


def test_given_headers_win() -> None:
    headers = [header("Host", "h.example"), header("Accept", "a/b"), header("User-Agent", "me")]
    assert sent(headers=headers) == (
        "GET /x HTTP/1.1\r\nhost: h.example\r\naccept: a/b\r\nuser-agent: me\r\n\r\n"
    )


@pytest.mark.parametrize("length", ["3", "10", "0"])
def test_a_wrong_length_is_refused(length: str) -> None:
    error = failure(DEAD, "POST", bodyBase64=encode(b"hello"), headers=[header("Content-Length", length)])
    assert (error.code, error.message) == (
        INVALID_PARAMS,
        f"http/request header content-length is {length}, but the body has 5 bytes",
    )


@pytest.mark.parametrize("length", ["5", "five", ""])
def test_the_length_is_said_once(length: str) -> None:
    text = sent(method="POST", bodyBase64=encode(b"hello"), headers=[header("Content-Length", length)] * 2)
    assert text.count("content-length: 5\r\n") == text.count("content-length") == 1
    assert text.endswith("\r\n\r\nhello")


def test_a_length_without_a_body_is_none() -> None:
    assert "content-length: 0\r\n" in sent(headers=[header("Content-Length", "10")])


@pytest.mark.parametrize(
    ("url", "target"),
    [("/x?", "/x?"), ("/x?#f", "/x?"), ("?", "/?"), ("/x", "/x"), ("/a%2fb?c=%7e", "/a%2fb?c=%7e")],
)
def test_a_query_may_be_empty(url: str, target: str) -> None:
    assert sent("http://{host}" + url).startswith(f"GET {target} HTTP/1.1\r\n")


def test_chunked_is_possible() -> None:
    text = sent(method="POST", bodyBase64=encode(b"hello"), headers=[header("Transfer-Encoding", "chunked")])
    assert text.endswith("\r\n\r\n5\r\nhello\r\n0\r\n\r\n")
    assert "content-length" not in text


def test_expect_does_not_wait_for_an_answer() -> None:
    text = sent(method="POST", bodyBase64=encode(b"hello"), headers=[header("Expect", "100-continue")])
    assert "expect: 100-continue\r\n" in text
    assert text.endswith("hello")


def test_a_large_body_arrives_whole() -> None:
    body = os.urandom(3 << 20)

    async def work() -> bytes:
        async def echo(request: web.Request) -> web.Response:
            return web.Response(body=await request.read())

        async with machine() as http, serve(echo) as url:
            result = (await http.open(params(url, "POST", bodyBase64=encode(body)))).result
            return decode(result.body_base64)

    assert run(work()) == body


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ("user:pass", "dXNlcjpwYXNz"),
        ("user", "dXNlcjo="),
        (":pw", "OnB3"),
        ("us%65r:p%40s:s", "dXNlcjpwQHM6cw=="),
        ("ü:é", "w7w6w6k="),
    ],
)
def test_a_user_in_the_url_becomes_a_header(user: str, expected: str) -> None:
    assert f"authorization: Basic {expected}\r\n" in sent(f"http://{user}@{{host}}/x")


def test_a_user_that_is_not_text_is_left_out() -> None:
    assert "authorization" not in sent("http://a%ff:b@{host}/x")


def test_a_given_authorization_wins_over_the_url() -> None:
    text = sent("http://u:p@{host}/x", headers=[header("Authorization", "mine")])
    assert "authorization: mine\r\n" in text


def test_netrc_is_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login u password secret\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    assert "authorization" not in sent()


def test_the_url_is_sent_as_it_is_escaped() -> None:
    text = sent("http://{host}/%7e~%zz/a b'\"?q=%2B+'#frag")
    assert text.startswith("GET /%7e~%zz/a%20b'%22?q=%2B+%27 HTTP/1.1\r\n")


def test_connections_are_used_again() -> None:
    async def work() -> int:
        async with machine() as http, always(OK) as far:
            for _ in range(3):
                await http.open(params(far.url))
            return far.connections

    assert run(work()) == 1


# Variables of the executor -----------------------------------------------------------------------


def test_a_variable_is_appended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "s3cret")
    assert "x-auth: Bearer s3cret\r\n" in sent(headers=[header("X-Auth", "Bearer ", "MY_TOKEN")])


@pytest.mark.parametrize("name", ["openai_api_key", "OPENAI_API_KEY", "Aws_Secret_Access_Key"])
def test_denied_variables_stay_here(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "secret")
    error = failure(DEAD, headers=[header("X-A", "", name)])
    assert error.code == INVALID_PARAMS
    assert error.message == f"http/request header X-A cannot use executor environment variable {name}"


def test_an_unset_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_TOKEN", raising=False)
    error = failure(DEAD, headers=[header("X-A", "", "MY_TOKEN")])
    assert error.message == "http/request header X-A requires executor environment variable MY_TOKEN"


def test_a_variable_that_is_not_text_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", os.fsdecode(b"\xff"))
    error = failure(DEAD, headers=[header("X-A", "", "MY_TOKEN")])
    assert error.message == "http/request header X-A requires executor environment variable MY_TOKEN"


def test_an_empty_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "")
    error = failure(DEAD, headers=[header("X-A", "", "MY_TOKEN")])
    assert error.message == (
        "http/request header X-A requires a non-empty executor environment variable MY_TOKEN"
    )


def test_a_variable_cannot_smuggle_a_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "a\r\nx-evil: 1")
    error = failure(DEAD, headers=[header("X-A", "", "MY_TOKEN")])
    assert error.message == "http/request header value is invalid for X-A: failed to parse header value"


# What cannot be sent -----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["", "GE T", "GÉT", "G\nT", "(x)", "a:b"])
def test_bad_methods(method: str) -> None:
    error = failure(DEAD, method)
    assert (error.code, error.message) == (
        INVALID_PARAMS,
        "http/request method is invalid: invalid HTTP method",
    )


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("nope", "http/request url is invalid: relative URL without a base"),
        ("http://", "http/request url is invalid: empty host"),
        ("http://a:b/", "http/request url is invalid: invalid port number"),
        ("FTP://x", "http/request only supports http and https URLs, got ftp"),
    ],
)
def test_bad_urls(url: str, text: str) -> None:
    error = failure(url)
    assert (error.code, error.message) == (INVALID_PARAMS, text)


@pytest.mark.parametrize("name", ["", "bad name", "é", "a:b"])
def test_bad_header_names(name: str) -> None:
    error = failure(DEAD, headers=[header(name, "1")])
    assert (error.code, error.message) == (
        INVALID_PARAMS,
        "http/request header name is invalid: invalid HTTP header name",
    )


@pytest.mark.parametrize("value", ["a\nb", "a\x7fb", "a\0b", "\r"])
def test_bad_header_values(value: str) -> None:
    error = failure(DEAD, headers=[header("X-Ab", value)])
    assert error.message == "http/request header value is invalid for X-Ab: failed to parse header value"


def test_the_order_of_complaints() -> None:
    bad_header = [header("bad name", "1")]
    assert "Invalid symbol" in failure("nope", "G T", bodyBase64="!!", headers=bad_header).message
    assert "method" in failure("nope", "G T", headers=bad_header).message
    assert "url" in failure("nope", headers=bad_header).message
    assert "header" in failure(DEAD, headers=bad_header, timeoutMs=0).message


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"{DEAD}/a b#f", f"{DEAD}/a%20b#f"),
        ("http://u:p@127.0.0.1:1", f"{DEAD}/"),
        ("https://127.0.0.1:1/", "https://127.0.0.1:1/"),
    ],
)
def test_nobody_there(url: str, shown: str) -> None:
    error = failure(url)
    assert error.code == INTERNAL_ERROR
    assert error.message == f"http/request failed: error sending request for url ({shown})"
