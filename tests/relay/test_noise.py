"""The handshake against every recording, and against everything that is not it."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exec_server.relay import noise
from exec_server.relay.keys import Identity, PublicKey
from exec_server.relay.noise import BadRecord, HandshakeFailed, Initiator, Opener, Responder, Sealer

from .vectors import VECTORS, encapsulating, identity, public, vector

HARNESS = Identity.generate()
EXECUTOR = Identity.generate()
PROLOGUE = noise.prologue("env-1", "registration-1", "stream-1")


def shake_hands(
    *, authorization: bytes = b"let me in", prologues: tuple[bytes, bytes] = (PROLOGUE, PROLOGUE)
) -> tuple[tuple[Sealer, Opener], tuple[Sealer, Opener]]:
    """Both halves with new ephemeral keys: the harness's pair of ciphers and the executor's."""
    initiator = Initiator(HARNESS, EXECUTOR.public, prologues[0])
    responder = Responder(EXECUTOR, prologues[1])
    peer, payload = responder.read(initiator.write(authorization))
    assert peer == HARNESS.public
    assert payload == authorization
    message, sealer, opener = responder.write()
    ours = initiator.read(message)
    assert initiator.hash == responder.hash
    return ours, (sealer, opener)


def keys_of(recording: dict[str, Any], kind: str) -> dict[str, bytes]:
    merged: dict[str, str] = {}
    for entry in recording[kind]:
        merged |= entry
    return {name: bytes.fromhex(value) for name, value in merged.items()}


def deterministic_initiator() -> Initiator:
    known = vector("deterministic")
    first = keys_of(known, "msg1_kem")
    return Initiator(
        identity(known["initiator_static"]),
        public(known["responder_static"]),
        bytes.fromhex(known["prologue"]),
        ephemeral=identity(known["initiator_ephemeral"]),
        encapsulate=encapsulating((first["skem_ss"], first["skem_ct"])),
    )


def deterministic_responder() -> Responder:
    known = vector("deterministic")
    second = keys_of(known, "msg2_kem")
    return Responder(
        identity(known["responder_static"]),
        bytes.fromhex(known["prologue"]),
        ephemeral=identity(known["responder_ephemeral"]),
        encapsulate=encapsulating(
            (second["ekem_ss"], bytes.fromhex(known["msg2"])[:1088]),
            (second["skem_ss"], second["skem_ct"]),
        ),
    )


def test_names_and_prologue_of_the_recordings() -> None:
    known = vector("deterministic")
    assert hashlib.sha256(noise.PROTOCOL_NAME).hexdigest() == known["h_initial_sha256_of_protocol_name"]
    for recording in VECTORS:
        made = noise.prologue(
            recording["environment_id"], recording["executor_registration_id"], recording["stream_id"]
        )
        assert made.hex() == recording["prologue"]


def test_the_deterministic_handshake_byte_for_byte() -> None:
    known = vector("deterministic")
    initiator, responder = deterministic_initiator(), deterministic_responder()
    assert initiator.hash.hex() == responder.hash.hex() == known["h_after_premessage"]

    message_1 = initiator.write(known["authorization_utf8"].encode())
    assert message_1.hex() == known["msg1"]
    peer, payload = responder.read(message_1)
    assert (peer, payload.decode()) == (public(known["initiator_static"]), known["authorization_utf8"])
    assert initiator.hash.hex() == responder.hash.hex() == known["h_after_msg1"]

    message_2, to_harness, from_harness = responder.write()
    assert message_2.hex() == known["msg2"]
    to_executor, from_executor = initiator.read(message_2)
    assert initiator.hash.hex() == responder.hash.hex() == known["handshake_hash_final"]

    for record in known["records"]:
        seal, opener = (to_executor, from_harness) if record["dir"] == "i2r" else (to_harness, from_executor)
        assert seal.counter == record["seq"]
        ciphertext = seal.seal(bytes.fromhex(record["plaintext"]))
        assert ciphertext.hex() == record["ciphertext"]
        assert opener.open(ciphertext).hex() == record["plaintext"]


def test_the_keys_of_the_records() -> None:
    """The recording names them; a record sealed with the named key opens with the one we made."""
    known = vector("deterministic")
    initiator, responder = deterministic_initiator(), deterministic_responder()
    responder.read(initiator.write(known["authorization_utf8"].encode()))
    message_2, to_harness, from_harness = responder.write()
    to_executor, from_executor = initiator.read(message_2)
    assert from_harness.open(Sealer(bytes.fromhex(known["k_initiator_to_responder"])).seal(b"there"))
    assert from_executor.open(Sealer(bytes.fromhex(known["k_responder_to_initiator"])).seal(b"back"))
    assert Opener(bytes.fromhex(known["k_initiator_to_responder"])).open(to_executor.seal(b"x")) == b"x"
    assert Opener(bytes.fromhex(known["k_responder_to_initiator"])).open(to_harness.seal(b"y")) == b"y"


def test_the_reference_as_executor() -> None:
    """Message 1 as we once sent it, message 2 as the reference answered it, and a record each way."""
    known = vector("captured-reference-executor")
    message_1 = bytes.fromhex(known["msg1"])
    ciphertext = message_1[:1088]
    # The recording has our randomness; what it encapsulated is found by trying the rest of message 1.
    secret = _shared_secret(known)
    initiator = Initiator(
        identity(known["initiator_static"]),
        public(known["responder_static_public"]),
        bytes.fromhex(known["prologue"]),
        ephemeral=identity(known["initiator_ephemeral"]),
        encapsulate=encapsulating((secret, ciphertext)),
    )
    assert initiator.write(known["authorization_utf8"].encode()) == message_1
    sealer, opener = initiator.read(bytes.fromhex(known["msg2"]))
    assert initiator.hash.hex() == known["handshake_hash_final"]
    ours, theirs = known["records"]
    assert sealer.seal(bytes.fromhex(ours["plaintext"])).hex() == ours["ciphertext"]
    assert opener.open(bytes.fromhex(theirs["ciphertext"])).hex() == theirs["plaintext"]


def _shared_secret(known: dict[str, Any]) -> bytes:
    """FIPS 203: the shared secret is the first half of SHA3-512(m || SHA3-256(key))."""
    key = public(known["responder_static_public"]).mlkem768
    m = bytes.fromhex(known["kem_m"]["msg1_skem"])
    return hashlib.sha3_512(m + hashlib.sha3_256(key).digest()).digest()[:32]


def test_the_reference_as_harness() -> None:
    """The reference's message 1 opens, our recorded answer comes out again, its first record is read."""
    known = vector("captured-reference-harness")
    initiator_keys = public(known["initiator_static_public"])
    message_1, message_2 = bytes.fromhex(known["msg1"]), bytes.fromhex(known["msg2"])
    ephemeral_kem = message_1[1120:2304]
    static_secret = _encapsulated(known["kem_m"]["msg2_skem"], initiator_keys.mlkem768)
    responder = Responder(
        identity(known["responder_static"]),
        bytes.fromhex(known["prologue"]),
        ephemeral=identity(known["responder_ephemeral"]),
        encapsulate=encapsulating(
            (_encapsulated(known["kem_m"]["msg2_ekem"], ephemeral_kem), message_2[:1088]),
            (static_secret, _static_ciphertext(known, message_2, ephemeral_kem)),
        ),
    )
    peer, payload = responder.read(message_1)
    assert (peer, payload.decode()) == (initiator_keys, known["authorization_utf8"])
    written, _, opener = responder.write()
    assert written == message_2
    assert responder.hash.hex() == known["handshake_hash_final"]
    (record,) = known["records"]
    assert opener.open(bytes.fromhex(record["ciphertext"])).hex() == record["plaintext"]


def _encapsulated(m: str, key: bytes) -> bytes:
    return hashlib.sha3_512(bytes.fromhex(m) + hashlib.sha3_256(key).digest()).digest()[:32]


def _static_ciphertext(known: dict[str, Any], message_2: bytes, ephemeral_kem: bytes) -> bytes:
    """The ciphertext inside message 2, which is encrypted: opened with the state a responder has then."""
    probe = Responder(identity(known["responder_static"]), bytes.fromhex(known["prologue"]))
    probe.read(bytes.fromhex(known["msg1"]))
    state = probe._state
    state.mix_hash(message_2[:1088])
    state.mix_key(_encapsulated(known["kem_m"]["msg2_ekem"], ephemeral_kem))
    return state.open(message_2[1088:2192])


def test_a_large_message_of_the_recording() -> None:
    """A JSON string of 70,000 times the letter x, behind its length, in two records."""
    known = vector("deterministic")
    large = known["large_message"]
    text = (70_002).to_bytes(4, "big") + b'"' + b"x" * 70_000 + b'"'
    key = bytes.fromhex(known["k_initiator_to_responder"])
    sealer, opener = Sealer(key), Opener(key)
    sealer.counter = opener.counter = large["seqs"][0]
    for part, digest in zip((text[:61440], text[61440:]), large["sha256_of_each_ciphertext"], strict=True):
        ciphertext = sealer.seal(part)
        assert hashlib.sha256(ciphertext).hexdigest() == digest
        assert opener.open(ciphertext) == part


@given(st.binary(max_size=5000))
@settings(max_examples=15)
def test_any_payload_arrives(payload: bytes) -> None:
    ours, theirs = shake_hands(authorization=payload)
    for sealer, opener in ((ours[0], theirs[1]), (theirs[0], ours[1])):
        for text in (b"", b"one", payload):
            assert opener.open(sealer.seal(text)) == text


def test_another_name_or_prologue_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    for other in (("env-2", "r", "s"), ("env-1", "registration-2", "stream-1")):
        with pytest.raises(HandshakeFailed):
            shake_hands(prologues=(PROLOGUE, noise.prologue(*other)))
    responder = Responder(EXECUTOR, PROLOGUE)
    monkeypatch.setattr(noise, "PROTOCOL_NAME", noise.PROTOCOL_NAME.replace(b"25519", b"X25519"))
    with pytest.raises(HandshakeFailed):
        responder.read(Initiator(HARNESS, EXECUTOR.public, PROLOGUE).write(b""))


@given(st.data())
@settings(max_examples=40)
def test_one_wrong_bit_anywhere_fails(data: st.DataObject) -> None:
    initiator, responder = Initiator(HARNESS, EXECUTOR.public, PROLOGUE), Responder(EXECUTOR, PROLOGUE)
    message = initiator.write(b"authorization")

    def broken(good: bytes) -> bytes:
        bit = data.draw(st.integers(0, 8 * len(good) - 1))
        changed = bytearray(good)
        changed[bit // 8] ^= 1 << bit % 8
        return bytes(changed)

    with pytest.raises(HandshakeFailed):
        Responder(EXECUTOR, PROLOGUE).read(broken(message))
    responder.read(message)
    answer, *_ = responder.write()
    with pytest.raises(HandshakeFailed):
        initiator.read(broken(answer))


@given(st.binary(max_size=4000) | st.integers(3500, 3700).map(bytes) | st.integers(65530, 65540).map(bytes))
@settings(max_examples=60)
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(HandshakeFailed):
        Responder(EXECUTOR, PROLOGUE).read(garbage)
    initiator = Initiator(HARNESS, EXECUTOR.public, PROLOGUE)
    initiator.write(b"")
    with pytest.raises(HandshakeFailed):
        initiator.read(garbage)


def test_a_payload_in_message_2_is_refused() -> None:
    initiator, responder = Initiator(HARNESS, EXECUTOR.public, PROLOGUE), Responder(EXECUTOR, PROLOGUE)
    responder.read(initiator.write(b""))
    message, *_ = responder.write()
    with pytest.raises(HandshakeFailed):
        initiator.read(message + b"x")


def test_the_wrong_executor_cannot_answer() -> None:
    other = Identity.generate()
    with pytest.raises(HandshakeFailed):
        Responder(other, PROLOGUE).read(Initiator(HARNESS, EXECUTOR.public, PROLOGUE).write(b""))


def test_keys_that_lead_nowhere_are_refused() -> None:
    """A point of small order makes the shared secret known to everybody."""
    hollow = PublicKey(bytes(32), EXECUTOR.public.mlkem768)
    with pytest.raises(HandshakeFailed):
        Initiator(HARNESS, hollow, PROLOGUE).write(b"")
    no_kem = PublicKey(EXECUTOR.public.x25519, b"\xff" * 1184)
    with pytest.raises(HandshakeFailed):
        Initiator(HARNESS, no_kem, PROLOGUE).write(b"")


def test_records_have_an_order_and_a_length() -> None:
    (sealer, _), (_, opener) = shake_hands()
    first, second = sealer.seal(b"first"), sealer.seal(b"second")
    with pytest.raises(BadRecord):
        opener.open(second)
    assert opener.open(first) == b"first"
    with pytest.raises(BadRecord):
        opener.open(first)
    assert opener.open(memoryview(second)) == b"second"
    assert len(sealer.seal(bytes(61440))) == 61456
    for wrong in (b"", bytes(15), bytes(61457)):
        with pytest.raises(BadRecord):
            opener.open(wrong)
    with pytest.raises(ValueError):
        sealer.seal(bytes(61441))


def test_message_2_needs_message_1() -> None:
    with pytest.raises(RuntimeError):
        Responder(EXECUTOR, PROLOGUE).write()
