"""HTTP requests as they travel, and the grammar of the URLs in them."""

from __future__ import annotations

import re
from typing import Any, Final, Literal

from msgspec import Struct

from .checks import Decoder, boolean, one_of, optional, string, whole_number, wrong_type
from .errors import RpcError, invalid_params
from .files import BadBase64, decode_base64
from .uri import parse as parse_file_uri

__all__ = [
    "HttpBodyDelta",
    "HttpHeader",
    "HttpRequestHeader",
    "HttpRequestParams",
    "HttpRequestResult",
    "HttpUrl",
    "UnsupportedScheme",
    "UrlError",
    "decode_request",
    "parse_url",
]


class HttpRequestHeader(Struct, rename="camel", omit_defaults=True):
    """A header to send: `value`, followed by a variable of the executor's environment if one is named."""

    name: str
    value: str
    value_env_var: str | None = None


class HttpRequestParams(Struct, rename="camel", omit_defaults=True):
    """`http/request`."""

    method: str
    url: str
    request_id: str
    headers: list[HttpRequestHeader] = []
    body_base64: str | bytes | None = None
    """Base64, or the bytes themselves if the message was read that far."""
    timeout_ms: int | None = None
    """For the whole request, body included. None is no deadline, 0 has passed already."""
    redirect_policy: Literal["follow", "stop"] = "follow"
    stream_response: bool = False


_decode_header: Final = Decoder(
    HttpRequestHeader,
    "HttpHeader",
    ("name", "value"),
    name=string,
    value=string,
    value_env_var=optional(string),
)


def _headers(value: Any) -> list[HttpRequestHeader]:
    if type(value) is not list:
        raise wrong_type(value, "a sequence")
    return [_decode_header(item) for item in value]


def _base64(value: Any) -> bytes:
    try:
        return decode_base64(string(value))
    except BadBase64 as error:
        raise invalid_params(str(error)) from None


decode_request: Final = Decoder(
    HttpRequestParams,
    "HttpRequestParams",
    ("method", "url", "request_id"),
    method=string,
    url=string,
    headers=_headers,
    body_base64=optional(_base64),
    timeout_ms=optional(whole_number("u64")),
    request_id=string,
    redirect_policy=one_of("follow", "stop"),
    stream_response=boolean,
)


class HttpHeader(Struct, rename="camel"):
    """A header received, its name in lower case."""

    name: str
    value: str


class HttpRequestResult(Struct, rename="camel"):
    """The answer of the far server, whatever its status; the body is empty when it is streamed."""

    status: int
    headers: list[HttpHeader]
    body_base64: str


class HttpBodyDelta(Struct, rename="camel"):
    """`http/request/bodyDelta`: a piece of a streamed body, or its end."""

    request_id: str
    seq: int
    delta_base64: str
    done: bool
    error: str | None = None


# URLs: the WHATWG grammar, as far as http and https need it ----------------------------------------

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*):")
_AUTHORITY = re.compile(r"[^/\\?#]*")
_PORT = re.compile(r"[0-9]{1,5}")
_DOT: Final = frozenset((".", "%2e"))
_DOT_DOT: Final = frozenset(("..", ".%2e", "%2e.", "%2e%2e"))
_BLANKS: Final = "".join(map(chr, range(0x21)))

# What must be escaped. An escape that is already there stays as it is: it may be part of a signature.
_IN_PATH = re.compile('[\x00-\x20"<>`{}\x7f-\U0010ffff]')
_IN_QUERY = re.compile("[\x00-\x20\"'<>\x7f-\U0010ffff]")
_IN_FRAGMENT = re.compile('[\x00-\x20"<>`\x7f-\U0010ffff]')
_IN_USER = re.compile('[\x00-\x20"#/:;<=>?@\\[\\\\\\]^`{|}\x7f-\U0010ffff]')

_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


class UrlError(ValueError):
    """Not a URL. The text says why, in the words every server of this protocol uses."""


class UnsupportedScheme(UrlError):
    """A URL of something that is not http or https."""

    def __init__(self, scheme: str) -> None:
        super().__init__(scheme)
        self.scheme = scheme


class HttpUrl(Struct, frozen=True, kw_only=True):
    """An absolute http(s) URL, taken apart and in normal form. `str()` leaves the user out."""

    scheme: str
    host: str
    """Lower case, IDNA-encoded; an IPv6 address has its brackets."""
    port: int | None
    """None when it is the scheme's own."""
    path: str
    query: str | None = None
    fragment: str | None = None
    user: str = ""
    password: str = ""

    @property
    def authority(self) -> str:
        """What the Host header says."""
        return self.host if self.port is None else f"{self.host}:{self.port}"

    @property
    def origin(self) -> str:
        """Whom we are talking to: secrets for one origin are not for another."""
        return f"{self.scheme}://{self.authority}"

    def without_fragment(self) -> str:
        """The part that a server gets to see."""
        query = "" if self.query is None else f"?{self.query}"
        return f"{self.origin}{self.path}{query}"

    def __str__(self) -> str:
        return self.without_fragment() + ("" if self.fragment is None else f"#{self.fragment}")


def parse_url(text: str, base: HttpUrl | None = None) -> HttpUrl:
    """A URL, relative to `base` if there is one; UrlError says what is wrong with it."""
    text = text.strip(_BLANKS).translate({9: None, 10: None, 13: None})
    text, hash_mark, fragment_text = text.partition("#")
    fragment = _escape(_IN_FRAGMENT, fragment_text) if hash_mark else None
    scheme = base.scheme if base is not None else ""
    if match := _SCHEME.match(text):
        scheme = match[1].lower()
        if scheme not in _DEFAULT_PORTS:
            raise UnsupportedScheme(scheme)
        text = text[match.end() :]
    elif base is None:
        raise UrlError("relative URL without a base")

    if base is not None and scheme == base.scheme and text[:2].replace("\\", "/") != "//":
        return _parse_relative(text, base, fragment)
    text = text.lstrip("/\\")
    authority = _AUTHORITY.match(text)[0]  # type: ignore[index]  # it matches the empty string
    user, password, host, port = _parse_authority(authority, _DEFAULT_PORTS[scheme])
    path, query = _parse_path(text[len(authority) :], [])
    return HttpUrl(
        scheme=scheme,
        host=host,
        port=port,
        path=path,
        query=query,
        fragment=fragment,
        user=user,
        password=password,
    )


def _parse_relative(text: str, base: HttpUrl, fragment: str | None) -> HttpUrl:
    if not text:
        path, query = base.path, base.query
    elif text.startswith("?"):
        path, query = base.path, _escape(_IN_QUERY, text[1:])
    elif text[0] in "/\\":
        path, query = _parse_path(text, [])
    else:
        path, query = _parse_path(f"/{text}", base.path.split("/")[1:-1])
    return HttpUrl(
        scheme=base.scheme,
        host=base.host,
        port=base.port,
        path=path,
        query=query,
        fragment=fragment,
        user=base.user,
        password=base.password,
    )


def _parse_authority(text: str, default_port: int) -> tuple[str, str, str, int | None]:
    """User, password, host, port."""
    credentials, _, address = text.rpartition("@")
    user, _, password = credentials.partition(":")
    if address.startswith("["):
        host, colon, port_text = address.partition("]:")
        host += colon[:1]
    else:
        host, _, port_text = address.partition(":")
    if not host:
        raise UrlError("empty host")
    host = _parse_host(host)
    port = None
    if port_text:
        digits = port_text.lstrip("0") or "0"
        if _PORT.fullmatch(digits) is None or (port := int(digits)) > 65535:
            raise UrlError("invalid port number")
    return (
        _escape(_IN_USER, user),
        _escape(_IN_USER, password),
        host,
        None if port == default_port else port,
    )


def _parse_host(text: str) -> str:
    """Hosts obey the same rules in every URL with an authority, so the `file:` parser knows them."""
    if "|" in text:
        raise UrlError("invalid international domain name")  # there, `c|` would be a drive
    try:
        uri = parse_file_uri(f"file://{text}/")
    except RpcError as error:
        raise UrlError(error.message.removeprefix("invalid URI: ")) from None
    return uri[len("file://") : -1] or "localhost"


def _parse_path(text: str, segments: list[str]) -> tuple[str, str | None]:
    """Path and query of what follows the authority, the path appended to `segments`."""
    path, question_mark, query = text.partition("?")
    parts = path.replace("\\", "/").split("/")[1:] or [""]
    for index, part in enumerate(parts):
        dots = part.lower()
        if dots in _DOT_DOT and segments:
            segments.pop()
        if dots not in _DOT and dots not in _DOT_DOT:
            segments.append(_escape(_IN_PATH, part))
        elif index == len(parts) - 1:
            segments.append("")
    return "/" + "/".join(segments), _escape(_IN_QUERY, query) if question_mark else None


def _escape(forbidden: re.Pattern[str], text: str) -> str:
    return forbidden.sub(_percent, text)


def _percent(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match[0].encode("utf-8", "surrogatepass"))
