"""`exec-server token …`: secrets for `--ws-auth`, made the right way."""

from __future__ import annotations

import hashlib
import os
import secrets
import time

import click

from .options import fail

__all__ = ["token"]

TOKEN_BYTES = 32


@click.group()
def token() -> None:
    """Make tokens for servers that ask for them (--ws-auth)."""


@token.command()
@click.option("--file", "path", metavar="PATH", help="Write the token to a new file only you can read.")
def capability(path: str | None) -> None:
    """Make a capability token: one secret that opens the server.

    Prints the token and its SHA-256, or writes it to a file for --ws-token-file.
    """
    secret = secrets.token_urlsafe(TOKEN_BYTES)
    digest = hashlib.sha256(secret.encode()).hexdigest()
    if path is None:
        click.echo(secret)
        click.echo(f"serve with: --ws-auth capability-token --ws-token-sha256 {digest}", err=True)
    else:
        _write_secret(path, secret)
        click.echo(f"serve with: --ws-auth capability-token --ws-token-file {path}", err=True)
        click.echo(f"connect with: exec-server run --url URL --token-file {path} -- CMD", err=True)


@token.command()
@click.option("--file", "path", metavar="PATH", required=True, help="New file for the secret.")
def secret(path: str) -> None:
    """Make the shared secret that signs bearer tokens (--ws-shared-secret-file)."""
    _write_secret(path, secrets.token_urlsafe(48))
    click.echo(f"serve with: --ws-auth signed-bearer-token --ws-shared-secret-file {path}", err=True)
    click.echo(f"make a token with: exec-server token jwt --secret-file {path}", err=True)


@token.command()
@click.option("--secret-file", required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--ttl", type=click.IntRange(min=1), default=3600, show_default=True, metavar="SECONDS")
@click.option("--issuer", help="Value of the iss claim.")
@click.option("--audience", help="Value of the aud claim.")
def jwt(secret_file: str, ttl: int, issuer: str | None, audience: str | None) -> None:
    """Make a signed bearer token that expires, and print it."""
    import jwt as pyjwt

    with open(secret_file, "rb") as file:
        key = file.read().strip()
    if len(key) < 32:
        fail(
            f"the secret in {secret_file} is shorter than 32 bytes; make one with `exec-server token secret`"
        )
    now = int(time.time())
    claims: dict[str, object] = {"iat": now, "exp": now + ttl}
    if issuer:
        claims["iss"] = issuer
    if audience:
        claims["aud"] = audience
    click.echo(pyjwt.encode(claims, key, algorithm="HS256"))


def _write_secret(path: str, text: str) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        fail(f"{path}: {error.strerror}")
    with os.fdopen(fd, "w") as file:
        file.write(text + "\n")
