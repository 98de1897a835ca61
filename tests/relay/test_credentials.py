"""How an end shows who it is: keys, tokens that change, an agent's signatures."""

from __future__ import annotations

import base64
import json

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from exec_server.relay.credentials import (
    AgentIdentity,
    Bearer,
    CredentialError,
    Expired,
    RotatingCredential,
)


def line(**changes: object) -> bytes:
    found = {"version": 1, "environment_id": "env-1", "token": "one", "expires_at": 2000}
    return json.dumps({**found, **changes}).encode() + b"\n"


def test_a_key() -> None:
    assert Bearer(" key\n").headers() == {"Authorization": "Bearer key"}
    assert Bearer("key", "account").headers()["chatgpt-account-id"] == "account"
    for wrong in ("", "  ", "a\nb", "schlüssel"):
        with pytest.raises(CredentialError):
            Bearer(wrong)


def test_tokens_replace_each_other_and_expire() -> None:
    now = 1000.0
    rotating = RotatingCredential("env-1", clock=lambda: now)
    assert not rotating.present
    with pytest.raises(Expired):
        rotating.headers()
    rotating.feed(line()[:10])
    assert not rotating.present
    rotating.feed(line()[10:])
    assert rotating.headers() == {"Authorization": "Bearer one"}
    rotating.feed(line(token="two") + line(token="three", expires_at=3000))
    assert rotating.headers() == {"Authorization": "Bearer three"}
    now = 3000.0
    assert rotating.expired
    with pytest.raises(Expired):
        rotating.headers()
    rotating.feed(line(token="four", expires_at=4000))
    assert rotating.headers() == {"Authorization": "Bearer four"}


@pytest.mark.parametrize(
    "bad",
    [
        b"\n",
        b"not json\n",
        b"{}\n",
        line(version=2),
        line(token=""),
        line(token="a b\x00"),
        line(environment_id="env-2"),
        line(expires_at=1000),
        line(expires_at=1999.5),
        line(expires_at="2000"),
        line(more=1),
        b" " * 16384,
        line(token="x" * 16384),
    ],
)
def test_lines_that_end_the_program(bad: bytes) -> None:
    rotating = RotatingCredential("env-1", clock=lambda: 1000.0)
    rotating.feed(line())
    with pytest.raises(CredentialError):
        rotating.feed(bad)


def test_the_longest_line() -> None:
    room = 16384 - len(line(token=""))
    RotatingCredential("env-1", clock=lambda: 0.0).feed(line(token="x" * room))
    with pytest.raises(CredentialError):
        RotatingCredential("env-1", clock=lambda: 0.0).feed(line(token="x" * (room + 1)))


@given(st.lists(st.integers(1, 40), max_size=20))
def test_lines_arrive_in_pieces(cuts: list[int]) -> None:
    rotating = RotatingCredential("env-1", clock=lambda: 1000.0)
    text = line(token="a") + line(token="b")
    at = 0
    for cut in cuts:
        rotating.feed(text[at : at + cut])
        at += cut
    rotating.feed(text[at:])
    assert rotating.headers() == {"Authorization": "Bearer b"}


def access_token(key: Ed25519PrivateKey, **changes: object) -> str:
    private = key.private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    claims = {
        "agent_runtime_id": "agent-1",
        "agent_private_key": base64.b64encode(private).decode(),
        "account_id": "account-1",
        "chatgpt_account_is_fedramp": True,
        **changes,
    }
    return jwt.encode(claims, "a secret of the issuer that is long enough", algorithm="HS256")


def test_an_agent_signs_every_call() -> None:
    key = Ed25519PrivateKey.generate()
    agent = AgentIdentity(access_token(key), "task-1", clock=lambda: 1_700_000_000.0)
    headers = agent.headers()
    scheme, _, encoded = headers["Authorization"].partition(" ")
    assert scheme == "AgentAssertion"
    assert "=" not in encoded
    text = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
    assertion = json.loads(text)
    assert list(assertion) == ["agent_runtime_id", "signature", "task_id", "timestamp"]
    assert assertion["timestamp"] == "2023-11-14T22:13:20Z"
    key.public_key().verify(base64.b64decode(assertion["signature"]), b"agent-1:task-1:2023-11-14T22:13:20Z")
    assert (headers["ChatGPT-Account-ID"], headers["X-OpenAI-Fedramp"]) == ("account-1", "true")
    registration = agent.registration()
    key.public_key().verify(
        base64.b64decode(registration["signature"]), f"agent-1:{registration['timestamp']}".encode()
    )


@pytest.mark.parametrize(
    "changes", [{"agent_private_key": "x"}, {"agent_private_key": 7}, {"account_id": None}]
)
def test_access_tokens_that_are_none(changes: dict[str, object]) -> None:
    with pytest.raises(CredentialError):
        AgentIdentity(access_token(Ed25519PrivateKey.generate(), **changes), "task")
    with pytest.raises(CredentialError):
        AgentIdentity("not a token", "task")
