"""wire/uri.py: the tables of the specification, and what must hold for every path."""

from __future__ import annotations

import base64

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exec_server.wire.errors import RpcError
from exec_server.wire.uri import ForeignPath, is_opaque, native_path, parse, path_to_uri, uri_to_path

NORMAL_FORMS = {
    "file:///": ["file:", "file:/", "file://", "file:///", "file://localhost", "file://LOCALHOST/"],
    "file:///A/B": [
        "FILE:///A/B",
        "file:/A/B",
        "file:A/B",
        "file:\\\\\\A\\B",
        "file:////A/B",
        " \nfile:///A/B\0",
        "fi\tle:///A\r/B",
    ],
    "file:///a/b": ["file:///a/./b", "file:///a/%2E/b", "file:///a//../b"],
    "file:///b": ["file:///a/../b", "file:///a/%2e%2e/b", "file:///../b"],
    "file:///a/": ["file:///a/b/..", "file:///a/b/../", "file:///a/."],
    "file:///a//b": ["file:///a/.//b"],
    "file:///a%20b": ["file:///a b"],
    "file:///%C3%BC": ["file:///ü"],
    "file:///x%7By%7D": ["file:///x{y}"],
    "file:///C:/x": [
        "file:///c:/x",
        "file://c:/x",
        "file:c|/x",
        "file://localhost/c:/x",
        "file://host/C:/x",
    ],
    "file:///C:/": ["file:///c:/.."],
    "file:///C:/b": ["file:///c:/a/../../b"],
    "file:///C%3A/x": ["file:///c%3A/x"],
    "file://host/Share": ["file://HOST/Share"],
    "file://xn--bcher-kva/x": ["file://bücher/x"],
    "file://1.2.0.3/x": ["file://1.2.3/x"],
    "file://[::1]/x": ["file://[0:0::1]/x"],
}
UNCHANGED = [
    "file:///a%2Fb",
    "file:///%ff",
    "file:///%zz",
    "file:///a%",
    "file:///a;b=c,d@e&f+g$h!i*j'(k)[l]^m|n~o",
    "file:///C|/x",
    "file:///c:foo",
    "file:///a//b/",
    "file:///%41/%c3%bc/%7e",
]
RELATIVE = "invalid URI: relative URL without a base"
BAD_NAME = "invalid URI: invalid international domain name"
REFUSED = {
    "/abs": RELATIVE,
    "rel": RELATIVE,
    "./rel": RELATIVE,
    "": RELATIVE,
    "file": RELATIVE,
    "http://x/a": "unsupported path URI scheme `http`",
    "untitled:foo": "unsupported path URI scheme `untitled`",
    "http://": "invalid URI: empty host",
    "http://x:99999/": "invalid URI: invalid port number",
    "file:///a?": "query parameters are not allowed in path URIs",
    "file:///a?q#f": "query parameters are not allowed in path URIs",
    "file:///a#": "fragments are not allowed in path URIs",
    "file:///a%00b": "'file:///a%00b' is invalid on 'linux'",
    "file:///a\0b": "'file:///a%00b' is invalid on 'linux'",
    "file://a b/x": BAD_NAME,
    "file://u@h/x": BAD_NAME,
    "file://h:80/x": BAD_NAME,
    "file://xn--a/x": BAD_NAME,
    "file://xn--/x": BAD_NAME,
    "file://a.xn--..b/x": BAD_NAME,
    "file://\u00ad/x": "invalid URI: empty host",
    "file://%C2%AD": "invalid URI: empty host",
    "file://%ff/x": BAD_NAME,
    "file://256.1.1.1/x": "invalid URI: invalid IPv4 address",
    "file://1.2.3.4.5/x": "invalid URI: invalid IPv4 address",
    "file://[::1": "invalid URI: invalid IPv6 address",
}


@pytest.mark.parametrize(
    ("text", "normal"),
    [(text, normal) for normal, texts in NORMAL_FORMS.items() for text in texts]
    + [(text, text) for text in UNCHANGED],
)
def test_normal_form(text: str, normal: str) -> None:
    assert parse(text) == normal


@pytest.mark.parametrize(
    ("host", "normal"),
    [
        ("bxn--", "bxn--"),
        ("bXN--.", "bxn--."),
        ("\uff0e", "."),
        ("a..\u00df", "a..xn--zca"),
        ("a\u3002\u3002\u00df", "a..xn--zca"),
        (".\u00df", ".xn--zca"),
        ("\u00fc..", "xn--tda.."),
        ("\u00ad.a", ".a"),
        ("XN--zca", "xn--zca"),
    ],
)
def test_hosts_are_made_of_labels_that_may_be_empty(host: str, normal: str) -> None:
    assert parse(f"file://{host}/p") == f"file://{normal}/p"


@pytest.mark.parametrize(("text", "why"), REFUSED.items())
def test_refused(text: str, why: str) -> None:
    with pytest.raises(RpcError) as refusal:
        parse(text)
    assert (refusal.value.code, refusal.value.message) == (-32602, why)


def text_of_uris() -> st.SearchStrategy[str]:
    pieces = st.sampled_from(
        [
            "/",
            "\\",
            ".",
            "..",
            "%2e",
            "%2E%2e",
            "a",
            "ü",
            "c:",
            "C|",
            "%3A",
            "%00",
            "%41",
            "%",
            "?",
            "#",
            " ",
            "h",
        ]
    )
    beginnings = st.sampled_from(["file:", "file:/", "file://", "file:///", "FILE://localhost/", ""])
    return st.builds(
        lambda start, rest: start + "".join(rest), beginnings, st.lists(pieces | st.text(max_size=3))
    )


@given(text_of_uris())
@example("file:///%00/bad/path/L3o6L2Y")
@example("file:a/../c|/x")
def test_the_normal_form_is_its_own(text: str) -> None:
    try:
        normal = parse(text)
    except RpcError:
        return
    assert parse(normal) == normal


@given(text_of_uris())
def test_a_path_is_absolute_and_has_no_detours(text: str) -> None:
    try:
        path = uri_to_path(text)
    except RpcError:
        return
    assert path.startswith("/")
    assert "\0" not in path
    assert path == "/" or all(part not in ("", ".", "..") for part in path[1:].split("/"))


names = st.binary(min_size=1, max_size=8).map(lambda raw: raw.translate(None, b"\0/")) | st.sampled_from(
    [
        b"c:",
        b"C:",
        b"c:x",
        b"c%3A",
        b"c|",
        b"%",
        b"%41",
        b"%2F",
        b"\xff",
        "ü".encode(),
        b"a b",
        b"?",
        b"#",
        b"\\",
    ]
)
paths = st.lists(names.filter(lambda name: name not in (b"", b".", b".."))).map(
    lambda parts: b"/" + b"/".join(parts)
)


@given(paths)
@example(b"/c:/x")
@example(b"/c:")
@example(b"/c:x")
def test_every_path_comes_back(path: bytes) -> None:
    uri = path_to_uri(path)
    assert uri.isascii()
    assert parse(uri) == uri
    assert uri_to_path(uri).encode("utf-8", "surrogateescape") == path
    assert path_to_uri(path.decode("utf-8", "surrogateescape")) == uri


@pytest.mark.parametrize(
    ("path", "uri"),
    [
        ("/", "file:///"),
        ("/a dir", "file:///a%20dir"),
        ("/z:/f", "file:///%00/bad/path/L3o6L2Y"),
        ("/z:f", "file:///z:f"),
        ("/!$&'()*+,-./:;=@[]^_|~", "file:///!$&'()*+,-./:;=@[]^_|~"),
        ('/"#%<>?\\`{}', "file:///%22%23%25%3C%3E%3F%5C%60%7B%7D"),
        (b"/\xff\x7f", "file:///%FF%7F"),
    ],
)
def test_from_path_to_uri(path: str | bytes, uri: str) -> None:
    assert path_to_uri(path) == uri
    assert is_opaque(uri) == ("%00" in uri)


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("file:///100%", "/100%"),
        ("file:///d%2Ff1", "/d/f1"),
        ("file:///d%2F../a", "/a"),
        ("file:///d%2F..%2F..%2F../a", "/a"),
        ("file:///a/", "/a"),
        ("file:///a//b", "/a/b"),
        ("file:///%FF", "/\udcff"),
        ("file:///C|/x", "/C|/x"),
        ("file:///c:foo/bar", "/c:foo/bar"),
        ("file:///~/x", "/~/x"),
    ],
)
def test_from_uri_to_path(uri: str, path: str) -> None:
    assert uri_to_path(uri) == path


@pytest.mark.parametrize(
    "uri", ["file://server/share", "file:///C:/x", "file:///C%3A/x", "file:////C:/x", "file:///C:"]
)
def test_what_belongs_to_windows_is_foreign(uri: str) -> None:
    with pytest.raises(ForeignPath):
        native_path(parse(uri))
    with pytest.raises(RpcError, match="is invalid on 'linux'"):
        uri_to_path(uri)


def opaque(raw: bytes) -> str:
    return "file:///%00/bad/path/" + base64.urlsafe_b64encode(raw).decode().rstrip("=")


def test_an_opaque_uri_names_the_path_it_was_made_from() -> None:
    assert uri_to_path(opaque(b"/c:/x\xff")) == "/c:/x\udcff"


@pytest.mark.parametrize(
    "uri",
    [
        opaque(b"/plain"),  # has a spelling of its own
        opaque(b"/c:x"),
        opaque(b"c:/x"),  # not absolute
        opaque(b"/c:/../x"),  # not normal
        opaque(b"x\0"),  # a NUL makes it no better
        opaque(b"/c:/x/\0/"),
        opaque(b"/\0x"),  # what a path of Windows looks like, in UTF-16
    ],
)
def test_an_opaque_uri_of_a_path_that_needs_none_is_foreign(uri: str) -> None:
    with pytest.raises(ForeignPath):
        native_path(parse(uri))


@pytest.mark.parametrize("tail", ["", "L3o6L2Y=", "L3o6L2Z", "L3o6/L2Y", "!!!", "L"])
def test_an_opaque_uri_that_is_no_base64_is_refused(tail: str) -> None:
    with pytest.raises(RpcError) as refusal:
        native_path(parse("file:///%00/bad/path/" + tail))
    assert refusal.value.code == -32602


@pytest.mark.parametrize("raw", [b"/c:/\0", b"/plain\0", b"/a/\0/b"])
def test_an_opaque_uri_with_a_nul_is_refused(raw: bytes) -> None:
    with pytest.raises(RpcError) as refusal:
        native_path(opaque(raw))
    assert (refusal.value.code, refusal.value.message) == (
        -32600,
        "file name contained an unexpected NUL byte",
    )
