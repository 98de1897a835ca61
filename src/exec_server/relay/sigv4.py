"""AWS Signature Version 4, as far as a request without surprises needs it. Pure."""

from __future__ import annotations

import configparser
import hashlib
import hmac
import os
import time
from collections.abc import Mapping
from urllib.parse import parse_qsl, quote, urlsplit

from msgspec import Struct

__all__ = ["AwsCredentials", "NoAwsCredentials", "find_credentials", "find_region", "sign"]


class NoAwsCredentials(Exception):
    """There is nothing to sign with; the text says where it was looked for."""


class AwsCredentials(Struct, frozen=True):
    """What signs."""

    access_key: str
    secret_key: str
    session_token: str | None = None


def find_credentials(profile: str | None, environ: Mapping[str, str]) -> AwsCredentials:
    """From the variables, unless a profile is named; then from the shared credentials file."""
    access, secret = environ.get("AWS_ACCESS_KEY_ID"), environ.get("AWS_SECRET_ACCESS_KEY")
    if profile is None and access and secret:
        return AwsCredentials(access, secret, environ.get("AWS_SESSION_TOKEN"))
    name = profile or environ.get("AWS_PROFILE") or "default"
    path = environ.get("AWS_SHARED_CREDENTIALS_FILE") or os.path.expanduser("~/.aws/credentials")
    found = _section(path, name)
    if "aws_access_key_id" not in found or "aws_secret_access_key" not in found:
        raise NoAwsCredentials(
            f"no AWS credentials: neither AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are set,"
            f" nor has {path} a profile {name!r}"
        )
    return AwsCredentials(
        found["aws_access_key_id"], found["aws_secret_access_key"], found.get("aws_session_token")
    )


def find_region(region: str | None, profile: str | None, environ: Mapping[str, str]) -> str:
    """As given, or from the variables, or from the shared configuration file."""
    chosen = region or environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
    if chosen:
        return chosen
    name = profile or environ.get("AWS_PROFILE") or "default"
    path = environ.get("AWS_CONFIG_FILE") or os.path.expanduser("~/.aws/config")
    found = _section(path, name if name == "default" else f"profile {name}").get("region")
    if not found:
        raise NoAwsCredentials("no AWS region: use --aws-region or set AWS_REGION")
    return found


def _section(path: str, name: str) -> Mapping[str, str]:
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(path, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError) as error:
        raise NoAwsCredentials(f"{path} cannot be read: {error}") from None
    return parser[name] if parser.has_section(name) else {}


def sign(
    credentials: AwsCredentials,
    region: str,
    service: str,
    method: str,
    url: str,
    headers: Mapping[str, str],
    body: bytes,
    now: float,
) -> dict[str, str]:
    """The given headers and those that prove who sends them."""
    parts = urlsplit(url)
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    signed = {name.lower(): " ".join(value.split()) for name, value in headers.items()}
    signed |= {"host": parts.netloc.rpartition("@")[2], "x-amz-date": stamp}
    if credentials.session_token:
        signed["x-amz-security-token"] = credentials.session_token
    names = ";".join(sorted(signed))
    request = "\n".join(
        (
            method,
            quote(parts.path or "/", safe="/-_.~"),  # escaped once more, as every service but S3 has it
            _query(parts.query),
            *(f"{name}:{signed[name]}" for name in sorted(signed)),
            "",
            names,
            hashlib.sha256(body).hexdigest(),
        )
    )
    scope = f"{stamp[:8]}/{region}/{service}/aws4_request"
    text = "\n".join(("AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(request.encode()).hexdigest()))
    key = f"AWS4{credentials.secret_key}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.new(key, text.encode(), "sha256").hexdigest()
    added = {name: signed[name] for name in signed if name.startswith("x-amz-")}
    return {
        **headers,
        **added,
        "authorization": f"AWS4-HMAC-SHA256 Credential={credentials.access_key}/{scope},"
        f" SignedHeaders={names}, Signature={signature}",
    }


def _query(query: str) -> str:
    pairs = parse_qsl(query, keep_blank_values=True)
    return "&".join(
        sorted(f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}" for name, value in pairs)
    )
