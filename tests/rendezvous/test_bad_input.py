"""Anything at all, as a request: an answer or a refusal, and never anything else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from exec_server.relay.keys import Identity
from exec_server.rendezvous.door import _read_upgrade
from exec_server.rendezvous.router import Router
from exec_server.rendezvous.service import Presence, Refused, Rendezvous, Settings
from exec_server.rendezvous.store import ApiKey, EmbeddedStore, digest_of
from exec_server.rendezvous.tickets import Signer
from exec_server.testing import ManualLoop

KEY = ApiKey("k", "t", "any", digest_of("secret"), 0.0)
GOOD = Identity.generate().public.to_object()

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)
members = st.sampled_from(
    ["security_profile", "executor_public_key", "harness_public_key", "executor_registration_id"]
) | st.just("harness_key_authorization")
bodies = values | st.dictionaries(
    members, values | st.just("noise_hybrid_ik_v1") | st.just(GOOD) | st.text(max_size=6000), max_size=5
)


def service() -> Rendezvous:
    loop = ManualLoop()
    router = Router(loop)
    return Rendezvous(
        loop, EmbeddedStore(None), Signer(b"s"), router, Presence(router), Settings(), clock=lambda: 0.0
    )


async def outcome(call: Awaitable[Any]) -> int:
    """The status it would have over HTTP."""
    try:
        await call
    except Refused as refused:
        return refused.status
    return 200


@given(bodies, st.text(max_size=140), st.text(max_size=60) | st.none())
@settings(max_examples=150)
def test_calls(body: Any, environment: str, authorization: str | None) -> None:
    async def main() -> None:
        made = service()
        for call in (
            made.register(KEY, environment, body, "ws://x"),
            made.connect(KEY, environment, body, "ws://x"),
            made.validate(KEY, environment, body),
            made.authenticate(authorization, "any"),
        ):
            assert await outcome(call) in (200, 400, 401, 403, 404)
        await made._store.close()

    asyncio.run(main())


@given(
    st.text(max_size=30),
    st.dictionaries(st.sampled_from(["role", "reg", "sig", "hk", "exp", "n"]), st.text()),
)
@settings(max_examples=100)
def test_upgrades(environment: str, query: dict[str, str]) -> None:
    async def main() -> None:
        made = service()
        assert await outcome(made.admit(environment, query | {"role": "harness"})) == 401
        await made._store.close()

    asyncio.run(main())


@given(
    st.binary(max_size=300)
    | st.lists(
        st.sampled_from(
            [
                b"GET /ws/environment/e?role=harness HTTP/1.1",
                b"upgrade: websocket",
                b"Connection: keep-alive, Upgrade",
                b"sec-websocket-version: 13",
                b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==",
                b"\xff\x00:",
                b"",
            ]
        )
        | st.binary(max_size=20),
        max_size=8,
    ).map(b"\r\n".join)
)
def test_heads(head: bytes) -> None:
    found = _read_upgrade(head)
    if found is not None:
        environment, query, key = found
        assert environment
        assert isinstance(query, dict)
        assert len(key) == 24
