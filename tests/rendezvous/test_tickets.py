"""URLs and authorizations: what they are bound to cannot be changed."""

from __future__ import annotations

from urllib.parse import parse_qsl, unquote, urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exec_server.rendezvous.tickets import (
    OVERLAP_SECONDS,
    BadTicket,
    EnvironmentTicket,
    HarnessTicket,
    Signer,
    key_digest,
)

SIGNER = Signer(b"secret")
OTHER = Signer(b"other")


def parts(path: str) -> tuple[str, dict[str, str]]:
    split = urlsplit(path)
    return unquote(split.path.rpartition("/")[2]), dict(parse_qsl(split.query))


@given(st.text(min_size=1, max_size=20), st.text(max_size=20), st.text(max_size=20))
@settings(max_examples=50)
def test_there_and_back(environment: str, registration: str, digest: str) -> None:
    read = SIGNER.read_path(*parts(SIGNER.environment_path(environment, registration or "r")), 0.0)
    assert read == EnvironmentTicket(registration or "r")
    harness = SIGNER.read_path(
        *parts(SIGNER.harness_path(environment, registration or "r", digest or "d", 0.0)), 60.0
    )
    assert isinstance(harness, HarnessTicket)
    assert (harness.registration_id, harness.key_digest) == (registration or "r", digest or "d")


def test_nothing_can_be_changed() -> None:
    for path in (SIGNER.environment_path("env", "reg"), SIGNER.harness_path("env", "reg", "key", 0.0)):
        environment, query = parts(path)
        SIGNER.read_path(environment, query, 0.0)
        with pytest.raises(BadTicket):
            OTHER.read_path(environment, query, 0.0)
        with pytest.raises(BadTicket):
            SIGNER.read_path("other", query, 0.0)
        for name in query:
            with pytest.raises(BadTicket):
                SIGNER.read_path(environment, query | {name: query[name] + "1"}, 0.0)
            with pytest.raises(BadTicket):
                SIGNER.read_path(environment, {k: v for k, v in query.items() if k != name}, 0.0)
    with pytest.raises(BadTicket):
        SIGNER.read_path("env", {}, 0.0)
    with pytest.raises(BadTicket):
        SIGNER.read_path("env", {"role": "harness", "sig": "\udcff"}, 0.0)


def test_parts_cannot_be_moved_between_fields() -> None:
    _, query = parts(SIGNER.environment_path("ab", "c"))
    with pytest.raises(BadTicket):
        SIGNER.read_path("a", query | {"reg": "bc"}, 0.0)


def test_a_harness_ticket_expires_and_an_environment_one_does_not() -> None:
    with pytest.raises(BadTicket, match="expired"):
        SIGNER.read_path(*parts(SIGNER.harness_path("env", "reg", "key", 0.0)), 66.0)
    SIGNER.read_path(*parts(SIGNER.environment_path("env", "reg")), 1e9)


def test_clocks_of_nodes_may_differ_a_little() -> None:
    """What is accepted is never good for longer than a used one is remembered, which is two minutes."""
    for made, read in ((100.0, 164.0), (100.0, 60.0)):
        ticket = SIGNER.read_path(*parts(SIGNER.harness_path("env", "reg", "key", made)), read)
        assert isinstance(ticket, HarnessTicket)
        assert ticket.expires - read < 120.0
    with pytest.raises(BadTicket, match="30 s ago by the clock of this node"):
        SIGNER.read_path(*parts(SIGNER.harness_path("env", "reg", "key", 100.0)), 190.0)
    with pytest.raises(BadTicket, match="clocks of the cluster's nodes differ"):
        SIGNER.read_path(*parts(SIGNER.harness_path("env", "reg", "key", 100.0)), 10.0)


def test_authorizations() -> None:
    text = SIGNER.authorization("tenant", "reg", "key", 100.0)
    assert len(text) <= 4096
    assert text != SIGNER.authorization("tenant", "reg", "key", 100.0)
    assert SIGNER.read_authorization(text, "tenant", "reg", "key", 160.0).expires == 165.0
    with pytest.raises(BadTicket, match="expired"):
        SIGNER.read_authorization(text, "tenant", "reg", "key", 165.5)
    for wrong in (("other", "reg", "key"), ("tenant", "other", "key"), ("tenant", "reg", "other")):
        with pytest.raises(BadTicket):
            SIGNER.read_authorization(text, *wrong, 100.0)


@given(st.text(max_size=200))
def test_no_text_is_an_authorization(text: str) -> None:
    with pytest.raises(BadTicket):
        SIGNER.read_authorization(text, "tenant", "reg", "key", 0.0)


def test_digests_tell_keys_apart() -> None:
    key = {"suite": "s", "x25519_public_key": "a", "mlkem768_public_key": "b"}
    assert key_digest(key) != key_digest(key | {"x25519_public_key": "c"})
    assert key_digest(key) != key_digest(key | {"mlkem768_public_key": "c"})


def test_another_secret_and_what_the_old_one_has_signed() -> None:
    now = 0.0
    signer = Signer(b"old", clock=lambda: now)
    old = [parts(signer.environment_path("env", "reg")), parts(signer.harness_path("env", "reg", "key", 0.0))]
    pass_ = signer.authorization("t", "reg", "key", 0.0)
    signer.take(b"new")
    signer.take(b"new")
    assert parts(signer.environment_path("env", "reg")) != old[0]
    for ticket in old:
        signer.read_path(*ticket, 0.0)
        with pytest.raises(BadTicket):
            Signer(b"new").read_path(*ticket, 0.0)
    signer.read_authorization(pass_, "t", "reg", "key", 0.0)
    now = OVERLAP_SECONDS
    for ticket in old:
        with pytest.raises(BadTicket, match="signature"):
            signer.read_path(*ticket, 0.0)
    with pytest.raises(BadTicket, match="signature"):
        signer.read_authorization(pass_, "t", "reg", "key", 0.0)
    signer.read_path(*parts(signer.environment_path("env", "reg")), 0.0)
