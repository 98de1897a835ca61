"""Paths on the wire: `file:` URIs, their one normal form, and the native paths they stand for.

Parsing follows the WHATWG URL rules for `file:`, because that is what peers use; what comes out is a
string in normal form. Native paths are bytes in all but type: `str` with surrogate escapes, so that
names which are not UTF-8 survive the round trip.
"""

from __future__ import annotations

import re
import sys
from typing import Final

import pybase64

from .errors import RpcError, invalid_params, invalid_request

__all__ = ["ForeignPath", "is_opaque", "native_path", "parse", "path_to_uri", "uri_to_path"]

PLATFORM: Final = "macos" if sys.platform == "darwin" else "windows" if sys.platform == "win32" else "linux"
"""The word error texts use for this operating system."""

_OPAQUE_PREFIX: Final = "file:///%00/bad/path/"
"""Starts the URI of a native path that has no spelling of its own."""

_OPAQUE_TAIL = re.compile(r"[A-Za-z0-9_\-]+")

_PLAIN_NAME = r"(?!\.\.?(?:/|\Z))[A-Za-z0-9_\-+@=,;~!$&'()*^\[\].]+"
_PLAIN = re.compile(f"file:///(?:{_PLAIN_NAME}(?:/{_PLAIN_NAME})*/?)?")
"""Already in normal form, no drive, no escapes, no dot segments: nearly every path there is."""

_DOTS = re.compile(r"/\.\.?(?:/|\Z)")
_ESCAPED = re.compile(rb"%([0-9A-Fa-f]{2})")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*):")
_DRIVE = re.compile(r"[A-Za-z][:|]")
_NORMAL_DRIVE = re.compile(r"/*[A-Za-z](?::|%3[Aa])(?=/|\Z)")
"""A whole first segment that is a drive: `/c:/x` is one of Windows, `/c:x` is a path like any other."""
_ESCAPE_IN_PATH = re.compile('[\x00-\x20"#<>?`{}\x7f-\U0010ffff]')
_KEEP_FROM_NATIVE: Final = frozenset(
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789!$&'()*+,-./:;=@[]^_|~"
)
_NATIVE_TABLE: Final = [chr(byte) if byte in _KEEP_FROM_NATIVE else f"%{byte:02X}" for byte in range(256)]
_SPECIAL_SCHEMES: Final = frozenset(("http", "https", "ws", "wss", "ftp"))
_FORBIDDEN_IN_HOST = re.compile("[\x00-\x20#%/:<>?@\\[\\\\\\]^|\x7f]")


class ForeignPath(Exception):
    """A well-formed URI that names nothing on this kind of machine."""

    def __init__(self, uri: str) -> None:
        super().__init__(f"'{uri}' is invalid on '{PLATFORM}'")
        self.uri = uri


def parse(text: str) -> str:
    """The normal form of a path URI; RpcError -32602 says why it is not one."""
    return text if _PLAIN.fullmatch(text) else _parse_any(text)


def native_path(uri: str) -> str:
    """The path on this machine that a URI in normal form names."""
    if "%" not in uri and uri.startswith("file:///") and not _NORMAL_DRIVE.match(uri, 7):
        return _normalise(uri[7:])
    if uri.startswith(_OPAQUE_PREFIX):
        return _opaque_path(uri)
    if not uri.startswith("file:///") or _NORMAL_DRIVE.match(uri, 7):
        raise ForeignPath(uri)
    raw = _unquote(uri[7:])
    return _normalise(raw.decode("utf-8", "surrogateescape"))


def uri_to_path(text: str) -> str:
    """Parse and resolve in one step; both kinds of failure are RpcErrors."""
    try:
        return native_path(parse(text))
    except ForeignPath as error:
        raise invalid_params(str(error)) from None


def path_to_uri(path: str | bytes) -> str:
    """The URI of an absolute native path."""
    raw = path if isinstance(path, bytes) else path.encode("utf-8", "surrogateescape")
    if _NORMAL_DRIVE.match(raw.lstrip(b"/")[:3].decode("latin-1")):
        return _OPAQUE_PREFIX + pybase64.urlsafe_b64encode(raw).decode().rstrip("=")
    return "file://" + "".join([_NATIVE_TABLE[byte] for byte in raw])


def is_opaque(uri: str) -> bool:
    """Whether the URI is the escape form of a path that has no spelling of its own."""
    return uri.startswith(_OPAQUE_PREFIX)


def _normalise(path: str) -> str:
    """Lexically: no empty and no `.` parts, `..` removes its predecessor and never leaves the root."""
    if "//" not in path and ("/." not in path or not _DOTS.search(path)):
        return path.rstrip("/") or "/"
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            if parts:
                parts.pop()
        elif part and part != ".":
            parts.append(part)
    return "/" + "/".join(parts)


def _opaque_path(uri: str) -> str:
    tail = uri[len(_OPAQUE_PREFIX) :]
    if not _OPAQUE_TAIL.fullmatch(tail):
        raise invalid_params(f"'{uri}' is invalid on '{PLATFORM}'")
    try:
        raw = pybase64.b64decode(tail + "=" * (-len(tail) % 4), altchars=b"-_", validate=True)
    except ValueError:
        raise invalid_params(f"'{uri}' is invalid on '{PLATFORM}'") from None
    if pybase64.urlsafe_b64encode(raw).decode().rstrip("=") != tail:
        raise invalid_params(f"'{uri}' is invalid on '{PLATFORM}'")
    path = raw.decode("utf-8", "surrogateescape")
    # A NUL right after the first slash: a path of Windows, whose opaque form is UTF-16.
    if not path.startswith("/") or path.startswith("/\0") or _normalise(path) != path:
        raise ForeignPath(uri)
    if "\0" in path:
        raise invalid_request("file name contained an unexpected NUL byte")
    if not is_opaque(path_to_uri(raw)):
        raise ForeignPath(uri)
    return path


def _unquote(text: str) -> bytes:
    """Percent-decode; an escape that is not two hex digits is literal text."""
    raw = text.encode("utf-8", "surrogatepass")
    return _ESCAPED.sub(lambda match: bytes.fromhex(match[1].decode()), raw) if b"%" in raw else raw


# The whole grammar -------------------------------------------------------------------------------


def _parse_any(text: str) -> str:
    text = text.strip("".join(map(chr, range(0x21)))).translate({9: None, 10: None, 13: None})
    scheme = _SCHEME.match(text)
    if scheme is None:
        raise invalid_params("invalid URI: relative URL without a base")
    name = scheme[1].lower()
    rest = text[scheme.end() :]
    if name != "file":
        if name in _SPECIAL_SCHEMES:
            _check_special_authority(rest)
        raise invalid_params(f"unsupported path URI scheme `{name}`")

    rest, hash_mark, _ = rest.partition("#")
    rest, question_mark, _ = rest.partition("?")
    rest = rest.replace("\\", "/")
    host, path, authority = _split_authority(rest)
    segments = _resolve_segments(path)
    if segments and _DRIVE.fullmatch(segments[0]):
        if host or not authority:
            segments[0] = segments[0][0] + ":"
        if segments[0].endswith(":"):
            host = ""
    joined = "/" + "/".join(segments).lstrip("/")
    if question_mark:
        raise invalid_params("query parameters are not allowed in path URIs")
    if hash_mark:
        raise invalid_params("fragments are not allowed in path URIs")
    if not host and _NORMAL_DRIVE.match(joined):
        joined = "/" + joined[1].upper() + joined[2:]
    uri = f"file://{host}{joined}"
    if is_opaque(uri):
        return uri
    if b"\0" in _unquote(joined):
        raise invalid_params(f"'{uri}' is invalid on '{PLATFORM}'")
    return uri


def _split_authority(rest: str) -> tuple[str, str, bool]:
    """Host, path text, and whether an authority was written."""
    if not rest.startswith("//"):
        return "", rest[1:] if rest.startswith("/") else rest, False
    host, _, path = rest[2:].partition("/")
    if _DRIVE.fullmatch(host):
        return "", rest[2:], False
    return _parse_host(host), path, True


def _resolve_segments(path: str) -> list[str]:
    segments: list[str] = []
    parts = path.split("/")
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        dots = re.sub("%2e", ".", part, flags=re.IGNORECASE)
        if dots == "..":
            if segments and not (len(segments) == 1 and _DRIVE.fullmatch(segments[0])):
                segments.pop()
            if last:
                segments.append("")
        elif dots == ".":
            if last:
                segments.append("")
        else:
            segments.append(_ESCAPE_IN_PATH.sub(_percent, part))
    return segments


def _percent(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match[0].encode("utf-8", "surrogatepass"))


def _parse_host(text: str) -> str:
    if not text:
        return ""
    if text.startswith("["):
        return _parse_ipv6(text)
    try:
        host = _unquote(text).decode("utf-8")
    except UnicodeDecodeError:
        raise _bad_host() from None
    host = host.lower() if host.isascii() and "xn--" not in host.lower() else _international(host)
    if not host:
        raise invalid_params("invalid URI: empty host")
    if _FORBIDDEN_IN_HOST.search(host):
        raise _bad_host()
    if _ends_in_number(host):
        host = _parse_ipv4(host)
    return "" if host == "localhost" else host


def _international(host: str) -> str:
    """In ASCII, label by label: an empty one is as good here as in a host that was ASCII from the start."""
    import idna

    try:
        labels = idna.uts46_remap(host, std3_rules=False, transitional=False).split(".")
        return ".".join(
            label if label.isascii() and not label.startswith("xn--") else idna.alabel(label).decode()
            for label in labels
        )
    except (idna.IDNAError, UnicodeError):
        raise _bad_host() from None


def _bad_host() -> RpcError:
    return invalid_params("invalid URI: invalid international domain name")


def _ends_in_number(host: str) -> bool:
    parts = host.split(".")
    if parts[-1] == "" and len(parts) > 1:
        parts.pop()
    last = parts[-1]
    return last.isdigit() or re.fullmatch(r"0[xX][0-9A-Fa-f]*", last) is not None


def _parse_ipv4(host: str) -> str:
    parts = host.split(".")
    if parts[-1] == "" and len(parts) > 1:
        parts.pop()
    bad = invalid_params("invalid URI: invalid IPv4 address")
    if len(parts) > 4:
        raise bad
    numbers: list[int] = []
    for part in parts:
        try:
            if part[:2].lower() == "0x":
                numbers.append(int(part[2:] or "0", 16))
            elif len(part) > 1 and part.startswith("0"):
                numbers.append(int(part, 8))
            else:
                numbers.append(int(part))
        except ValueError:
            raise bad from None
    *firsts, last = numbers
    if any(number > 255 for number in firsts) or last >= 256 ** (5 - len(numbers)):
        raise bad
    value = last + sum(number << (8 * (3 - index)) for index, number in enumerate(firsts))
    return ".".join(str(value >> shift & 255) for shift in (24, 16, 8, 0))


def _parse_ipv6(text: str) -> str:
    import ipaddress

    if not text.endswith("]") or "%" in text:
        raise invalid_params("invalid URI: invalid IPv6 address")
    try:
        return f"[{ipaddress.IPv6Address(text[1:-1]).compressed}]"
    except ValueError:
        raise invalid_params("invalid URI: invalid IPv6 address") from None


def _check_special_authority(rest: str) -> None:
    """Peers report a broken authority before the scheme that may not have one."""
    authority = re.split(r"[/\\?#]", rest.lstrip("/\\"), maxsplit=1)[0].rpartition("@")[2]
    host, colon, port = authority.rpartition(":") if not authority.endswith("]") else (authority, "", "")
    if colon and port and (not port.isdigit() or int(port) > 65535):
        raise invalid_params("invalid URI: invalid port number")
    if not (host if colon else authority):
        raise invalid_params("invalid URI: empty host")
