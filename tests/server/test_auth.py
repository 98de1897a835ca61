"""server/auth.py: the tables of 1.5, in the small and through the server."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.server.auth import CapabilityToken, SignedBearer, bearer_token
from support.frames import UPGRADE, RawSocket
from support.rpc import WebSocketPeer
from support.server import RunningServer, fail_to_start

SECRET = b"0123456789abcdef0123456789abcdef"
NOW = 1_800_000_000


def part(value: Any) -> str:
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def jwt(claims: Any, secret: bytes = SECRET, header: Any = None, digest: Any = hashlib.sha256) -> str:
    """A signed token, by hand."""
    signed = f"{part({'alg': 'HS256'} if header is None else header)}.{part(claims)}"
    return f"{signed}.{part(hmac.new(secret, signed.encode(), digest).digest())}"


# The header --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "token"),
    [
        ("Bearer x", "x"),
        ("bearer x", "x"),
        ("BEARER   x  ", "x"),
        ("Bearer a b", "a b"),
        ("Bearer \tx\t", "x"),
    ],
)
def test_a_token_is_found(header: str, token: str) -> None:
    assert bearer_token(header) == (token, None)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer    ",
        "Basic x",
        "x",
        "Bearer\tx",
        " Bearer x",
        "Bearer ü",
        "Bearer \x7f",
    ],
)
def test_no_token_is_found(header: str) -> None:
    assert bearer_token(header) == ("", "invalid authorization header")


def test_no_header() -> None:
    assert bearer_token(None) == ("", "missing websocket bearer token")


# Tokens ------------------------------------------------------------------------------------------


@given(st.text(min_size=1), st.text(min_size=1))
def test_capability_tokens(secret: str, presented: str) -> None:
    check = CapabilityToken(hashlib.sha256(secret.encode()).digest())
    assert check.refuse(secret) is None
    expected = None if presented == secret else "invalid websocket bearer token"
    assert check.refuse(presented) == expected


INVALID = "invalid websocket jwt"
EXPIRED = "expired websocket jwt"
EARLY = "websocket jwt is not valid yet"
ISSUER = "websocket jwt issuer mismatch"
AUDIENCE = "websocket jwt audience mismatch"
GOOD: dict[str, Any] = {"exp": NOW, "iss": "me", "aud": "you"}


def verdict(
    token: str, *, issuer: str | None = "me", audience: str | None = "you", skew: int = 30
) -> str | None:
    return SignedBearer(SECRET, issuer, audience, skew, now=lambda: NOW + 0.9).refuse(token)


@pytest.mark.parametrize(
    ("claims", "expected"),
    [
        (GOOD, None),
        ({**GOOD, "exp": NOW - 30}, None),
        ({**GOOD, "exp": NOW - 31}, EXPIRED),
        ({**GOOD, "exp": 2**60}, None),
        ({**GOOD, "exp": -1}, EXPIRED),
        ({**GOOD, "nbf": NOW + 30}, None),
        ({**GOOD, "nbf": NOW + 31}, EARLY),
        ({**GOOD, "nbf": None}, None),
        ({**GOOD, "iss": "other"}, ISSUER),
        ({"exp": NOW, "aud": "you"}, ISSUER),
        ({**GOOD, "iss": None}, ISSUER),
        ({**GOOD, "aud": "other"}, AUDIENCE),
        ({"exp": NOW, "iss": "me"}, AUDIENCE),
        ({**GOOD, "aud": ["other", "you"]}, None),
        ({**GOOD, "aud": []}, AUDIENCE),
        # The order: exp, nbf, iss, aud.
        ({"exp": 0, "nbf": 2**40, "iss": "x", "aud": "x"}, EXPIRED),
        ({"exp": NOW, "nbf": 2**40, "iss": "x", "aud": "x"}, EARLY),
        ({"exp": NOW, "iss": "x", "aud": "x"}, ISSUER),
        # Ill-typed.
        ({"iss": "me", "aud": "you"}, INVALID),
        ({**GOOD, "exp": None}, INVALID),
        ({**GOOD, "exp": str(NOW)}, INVALID),
        ({**GOOD, "exp": NOW + 0.5}, INVALID),
        ({**GOOD, "exp": True}, INVALID),
        ({**GOOD, "exp": 2**63 - 1}, None),
        ({**GOOD, "exp": 2**63}, INVALID),
        ({**GOOD, "exp": 10**30}, INVALID),
        ({**GOOD, "nbf": -(2**63) - 1}, INVALID),
        (b'{"exp":1,"exp":%d,"iss":"me","aud":"you"}' % NOW, INVALID),
        ({**GOOD, "nbf": "0"}, INVALID),
        ({**GOOD, "nbf": 0.5}, INVALID),
        ({**GOOD, "iss": 5}, INVALID),
        ({**GOOD, "iss": ["me"]}, INVALID),
        ({**GOOD, "aud": 5}, INVALID),
        ({**GOOD, "aud": ["you", 5]}, INVALID),
        ([], INVALID),
        ("text", INVALID),
        (b"nonsense", INVALID),
        # Others are nobody's business.
        ({**GOOD, "iat": 2**40, "sub": 5, "jti": {}, "more": []}, None),
    ],
)
def test_claims(claims: Any, expected: str | None) -> None:
    assert verdict(jwt(claims)) == expected


def test_what_is_not_configured_is_not_checked() -> None:
    assert verdict(jwt({"exp": NOW}), issuer=None, audience=None) is None
    assert verdict(jwt({"exp": NOW, "iss": "x", "aud": "x"}), issuer=None, audience=None) is None
    assert verdict(jwt({"exp": NOW - 1}), issuer=None, audience=None, skew=0) == EXPIRED
    assert verdict(jwt({"exp": 0}), issuer=None, audience=None, skew=2**62) is None


def test_signatures() -> None:
    good = jwt(GOOD)
    head, claims, signature = good.split(".")
    for bad in (
        "",
        "x",
        "..",
        good + "x",
        good[:-2],
        f"{head}.{claims}",
        f"{head}.{claims}.",
        f"{head}.{part({**GOOD, 'more': 1})}.{signature}",
        jwt(GOOD, b"another secret of thirty-two byte"),
        jwt(GOOD, header={"alg": "HS512"}, digest=hashlib.sha512),
        jwt(GOOD, header={"alg": "hs256"}),
        jwt(GOOD, header={}),
        jwt(GOOD, header=b"nonsense"),
        f"{part({'alg': 'none'})}.{claims}.",
        jwt(GOOD, b"", header={"alg": "none"}),
        "ü.ü.ü",
        good + "=",
        f"{head}=.{claims}.{signature}",
        jwt(GOOD, header={"alg": "HS256", "typ": 5}),
        jwt(GOOD, header={"alg": "HS256", "cty": 5}),
        jwt(GOOD, header={"alg": "HS256", "cty": ["JWT"]}),
        jwt(GOOD, header=b'{"alg":"HS256","alg":"HS256"}'),
    ):
        assert verdict(bad) == INVALID, bad
    assert verdict(jwt(GOOD, header={"alg": "HS256", "typ": "JWT", "cty": "JWT"})) is None
    assert verdict(jwt(GOOD, header={"alg": "HS256", "typ": "other"})) is None
    assert verdict(jwt(GOOD, header={"alg": "HS256", "typ": None})) is None


@given(st.text() | st.binary().map(lambda raw: part(raw) + "." + part(raw) + "." + part(raw)))
def test_no_text_gets_in_or_breaks_it(token: str) -> None:
    assert verdict(token) == INVALID


# Through the server ------------------------------------------------------------------------------


def answer(server: RunningServer, authorization: str | None) -> tuple[int, str]:
    headers = UPGRADE if authorization is None else {**UPGRADE, "Authorization": authorization}
    with RawSocket(server.url) as raw:
        response = raw.ask(headers=headers)
    return response.status, response.body


def test_a_token_file(start_server: Callable[..., RunningServer], tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("  the token\n")
    server = start_server("--ws-auth", "capability-token", "--ws-token-file", str(file))
    assert answer(server, None) == (401, "missing websocket bearer token")
    assert answer(server, "Basic x") == (401, "invalid authorization header")
    assert answer(server, "Bearer wrong") == (401, "invalid websocket bearer token")
    assert answer(server, "bearer   the token ")[0] == 101
    file.unlink()  # read once, at the start
    with WebSocketPeer(server.url, additional_headers={"Authorization": "Bearer the token"}) as peer:
        peer.initialize()
        assert peer.run("echo", "x").stdout == b"x\n"


def test_a_token_digest(start_server: Callable[..., RunningServer]) -> None:
    digest = hashlib.sha256(b"the token").hexdigest()
    server = start_server("--ws-auth", "capability-token", "--ws-token-sha256", digest.upper())
    assert answer(server, f"Bearer {digest}") == (401, "invalid websocket bearer token")
    assert answer(server, "Bearer the token")[0] == 101


def test_signed_tokens(start_server: Callable[..., RunningServer], tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"\n" + SECRET + b" \n")
    server = start_server(
        "--ws-auth=signed-bearer-token",
        f"--ws-shared-secret-file={file}",
        "--ws-issuer= me ",
        "--ws-audience=you",
        "--ws-max-clock-skew-seconds=5",
    )
    now = int(time.time())
    claims = {"exp": now + 60, "iss": "me", "aud": ["you"]}
    assert answer(server, f"Bearer {jwt(claims)}")[0] == 101
    assert answer(server, f"Bearer {jwt({**claims, 'exp': now - 60})}") == (401, EXPIRED)
    assert answer(server, f"Bearer {jwt({**claims, 'nbf': now + 60})}") == (401, EARLY)
    assert answer(server, f"Bearer {jwt({**claims, 'iss': 'x'})}") == (401, ISSUER)
    assert answer(server, f"Bearer {jwt({**claims, 'aud': 'x'})}") == (401, AUDIENCE)
    assert answer(server, f"Bearer {jwt(claims, b'x' * 32)}") == (401, INVALID)


def test_blank_issuer_and_audience_are_not_checked(
    start_server: Callable[..., RunningServer], tmp_path: Path
) -> None:
    file = tmp_path / "secret"
    file.write_bytes(SECRET)
    server = start_server(
        "--ws-auth",
        "signed-bearer-token",
        "--ws-shared-secret-file",
        str(file),
        "--ws-issuer",
        " ",
        "--ws-audience=",
    )
    assert answer(server, f"Bearer {jwt({'exp': int(time.time())})}")[0] == 101


CAPABILITY = ("--ws-auth", "capability-token")
SIGNED = ("--ws-auth", "signed-bearer-token")
DIGEST = ("--ws-token-sha256", "a" * 64)
STARTS: list[tuple[tuple[str, ...], str]] = [
    *(
        (
            flag,
            "websocket auth flags require `--ws-auth capability-token` or `--ws-auth signed-bearer-token`",
        )
        for flag in (
            DIGEST,
            ("--ws-token-file", "x"),
            ("--ws-shared-secret-file", "x"),
            ("--ws-issuer", "x"),
            ("--ws-audience", "x"),
            ("--ws-max-clock-skew-seconds", "1"),
        )
    ),
    (
        CAPABILITY,
        "`--ws-token-file` or `--ws-token-sha256` is required when `--ws-auth capability-token` is set",
    ),
    (
        (*CAPABILITY, *DIGEST, "--ws-token-file", "x"),
        "`--ws-token-file` and `--ws-token-sha256` are mutually exclusive",
    ),
    (
        (*CAPABILITY, "--ws-token-sha256", "abc"),
        "--ws-token-sha256 must be a 64-character hex SHA-256 digest",
    ),
    (
        (*CAPABILITY, "--ws-token-sha256", "g" * 64),
        "--ws-token-sha256 must be a 64-character hex SHA-256 digest",
    ),
    (
        (*CAPABILITY, *DIGEST, "--ws-issuer", "x"),
        (
            "`--ws-shared-secret-file`, `--ws-issuer`, `--ws-audience`, and"
            " `--ws-max-clock-skew-seconds` require `--ws-auth signed-bearer-token`"
        ),
    ),
    (
        (*SIGNED, *DIGEST),
        (
            "`--ws-token-file` and `--ws-token-sha256` require `--ws-auth capability-token`,"
            " not `signed-bearer-token`"
        ),
    ),
    (SIGNED, "`--ws-shared-secret-file` is required when `--ws-auth signed-bearer-token` is set"),
    (
        (*SIGNED, "--ws-shared-secret-file", "{short}"),
        "signed websocket bearer secret {short} must be at least 32 bytes",
    ),
    (
        (*SIGNED, "--ws-shared-secret-file", "{blank}"),
        "websocket auth secret {blank} must not be empty",
    ),
    ((*CAPABILITY, "--ws-token-file", "{blank}"), "websocket auth secret {blank} must not be empty"),
    (
        (*CAPABILITY, "--ws-token-file", "{missing}"),
        "failed to read websocket auth secret {missing}: No such file or directory (os error 2)",
    ),
    (
        (*SIGNED, "--ws-shared-secret-file", "{long}", "--ws-max-clock-skew-seconds", str(2**63)),
        "websocket auth clock skew must fit in a signed 64-bit integer",
    ),
    (
        ("--listen", "stdio", *CAPABILITY, *DIGEST),
        "WebSocket auth requires a WebSocket listener, not stdio",
    ),
]


@pytest.mark.parametrize(("flags", "text"), STARTS)
def test_starts_that_are_refused(tmp_path: Path, flags: tuple[str, ...], text: str) -> None:
    files = {name: str(tmp_path / name) for name in ("short", "blank", "long", "missing")}
    (tmp_path / "short").write_bytes(b"x" * 31)
    (tmp_path / "blank").write_bytes(b" \n\t")
    (tmp_path / "long").write_bytes(SECRET)
    code, out, err = fail_to_start(*(flag.format(**files) for flag in flags))
    assert (code, out, err) == (1, "", f"Error: {text.format(**files)}\n")


def test_off_loopback_without_authentication_is_refused() -> None:
    for address in ("ws://0.0.0.0:0", "ws://[::]:0"):
        code, out, err = fail_to_start("--listen", address)
        assert (code, out) == (1, "")
        assert err.startswith("Error: refusing to start non-loopback websocket listener ")
        assert (
            "without auth; configure `--ws-auth capability-token` or `--ws-auth signed-bearer-token`" in err
        )


def test_off_loopback_with_authentication_or_at_ones_own_risk(
    start_server: Callable[..., RunningServer],
) -> None:
    guarded = start_server(*CAPABILITY, *DIGEST, listen="ws://0.0.0.0:0")
    local = guarded.url.replace("0.0.0.0", "127.0.0.1")
    with RawSocket(local) as raw:
        assert raw.ask(headers=UPGRADE).status == 401
    open_to_all = start_server("--insecure-no-auth", listen="ws://0.0.0.0:0")
    with RawSocket(open_to_all.url.replace("0.0.0.0", "127.0.0.1")) as raw:
        assert raw.ask(headers=UPGRADE).status == 101
