"""A request before it is sent: checked, completed, and what a redirect makes of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from ...wire.base64 import encode
from ...wire.errors import invalid_params
from ...wire.files import BadBase64, decode_base64
from ...wire.http import HttpRequestHeader, HttpRequestParams, HttpUrl, UnsupportedScheme, UrlError, parse_url

__all__ = ["DENIED_VARIABLES", "Headers", "Request", "lines", "prepare", "redirected"]

DENIED_VARIABLES: Final = frozenset(
    (
        "CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN",
        "OPENAI_FEDERATION_RULE_ID",
        "OPENAI_IDENTITY_TOKEN_FILE",
        "OPENAI_WORKLOAD_IDENTITY_CONTEXT",
        "OPENAI_API_KEY",
        "CODEX_API_KEY",
        "CODEX_ACCESS_TOKEN",
        "CODEX_CONNECTORS_TOKEN",
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AZURE_CLIENT_SECRET",
        "AZURE_FEDERATED_TOKEN_FILE",
        "GOOGLE_APPLICATION_CREDENTIALS",
    )
)
"""Variables that never leave in a header: they open more than the request they would be put in."""

_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_DIGITS = re.compile("[0-9]+")
_HEADER_VALUE = re.compile("[^\x00-\x08\x0a-\x1f\x7f]*")

_ABOUT_THE_BODY: Final = ("content-type", "content-length", "content-encoding", "transfer-encoding")
_FOR_ONE_ORIGIN: Final = ("authorization", "cookie", "cookie2", "proxy-authorization", "www-authenticate")

Headers = dict[str, list[str]]
"""Names in lower case, in order of first appearance, each with its values in order."""


class Request(Struct):
    """What is sent next; a redirect makes another one of it."""

    method: str
    url: HttpUrl
    headers: Headers
    body: bytes


def prepare(params: HttpRequestParams, environ: Mapping[str, str]) -> Request:
    """Check everything that can be checked without sending it, in the order peers are used to."""
    body = params.body_base64 or b""
    if isinstance(body, str):
        try:
            body = decode_base64(body)
        except BadBase64 as error:
            raise invalid_params(str(error)) from None
    if not _TOKEN.fullmatch(params.method):
        raise invalid_params("http/request method is invalid: invalid HTTP method")
    try:
        url = parse_url(params.url)
    except UnsupportedScheme as error:
        raise invalid_params(f"http/request only supports http and https URLs, got {error.scheme}") from None
    except UrlError as error:
        raise invalid_params(f"http/request url is invalid: {error}") from None
    headers: Headers = {}
    for header in params.headers:
        if not _TOKEN.fullmatch(header.name):
            raise invalid_params("http/request header name is invalid: invalid HTTP header name")
        headers.setdefault(header.name.lower(), []).append(_header_value(header, environ))
    if (url.user or url.password) and "authorization" not in headers:
        headers |= _basic_authorization(url)
    if body and "transfer-encoding" not in headers:
        _check_length(headers, body)
    return Request(params.method, url, headers, body)


def _check_length(headers: Headers, body: bytes) -> None:
    """One that is not the body's would cut it, or have the far server wait for the rest."""
    said = headers.get("content-length", [""])[0]
    if _DIGITS.fullmatch(said) and said.lstrip("0") != str(len(body)):
        raise invalid_params(
            f"http/request header content-length is {said}, but the body has {len(body)} bytes"
        )


def _header_value(header: HttpRequestHeader, environ: Mapping[str, str]) -> str:
    value = header.value
    if (name := header.value_env_var) is not None:
        if name.upper() in DENIED_VARIABLES:
            raise invalid_params(
                f"http/request header {header.name} cannot use executor environment variable {name}"
            )
        secret = environ.get(name)
        if secret is None or not _is_text(secret):
            raise invalid_params(
                f"http/request header {header.name} requires executor environment variable {name}"
            )
        if not secret:
            raise invalid_params(
                f"http/request header {header.name} requires a non-empty executor environment variable {name}"
            )
        value += secret
    if not _HEADER_VALUE.fullmatch(value):
        raise invalid_params(
            f"http/request header value is invalid for {header.name}: failed to parse header value"
        )
    return value


def _is_text(value: str) -> bool:
    """Whether a variable is UTF-8, which is all that a header can carry."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _basic_authorization(url: HttpUrl) -> Headers:
    """The user in the URL as a header; one that is not UTF-8 is ignored."""
    from urllib.parse import unquote_to_bytes

    user, password = unquote_to_bytes(url.user), unquote_to_bytes(url.password)
    try:
        pair = f"{user.decode()}:{password.decode()}"
    except UnicodeDecodeError:
        return {}
    return {"authorization": [f"Basic {encode(pair.encode())}"]}


def lines(request: Request) -> list[tuple[str, str]]:
    """The header lines to send. The length of the body is ours to say."""
    headers = dict(request.headers)
    headers.setdefault("accept", ["*/*"])
    headers.setdefault("host", [request.url.authority])
    if request.body and (codings := ", ".join(headers.get("transfer-encoding", ()))):
        chunked = codings.lower().endswith("chunked")
        headers["transfer-encoding"] = [codings if chunked else f"{codings}, chunked"]
        headers.pop("content-length", None)
    else:
        headers.pop("transfer-encoding", None)
        if request.body or "content-length" in headers:
            headers["content-length"] = [str(len(request.body))]
    return [(name, value) for name, values in headers.items() for value in values]


def redirected(request: Request, status: int, target: HttpUrl) -> Request:
    """The next request. Secrets stay with their origin; browsers' rules for what becomes of a POST."""
    headers = dict(request.headers)
    method, body = request.method, request.body
    if (status == 303 and method not in ("GET", "HEAD")) or (status in (301, 302) and method == "POST"):
        method, body = "GET", b""
        for name in _ABOUT_THE_BODY:
            headers.pop(name, None)
    same_origin = target.origin == request.url.origin
    if not same_origin:
        for name in _FOR_ONE_ORIGIN:
            headers.pop(name, None)
    if request.url.scheme == "https" and target.scheme == "http":
        headers.pop("referer", None)
    else:
        came_from = request.url.without_fragment() if same_origin else f"{request.url.origin}/"
        headers["referer"] = [came_from]
    return Request(method, target, headers, body)
