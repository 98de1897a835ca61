"""The Noise handshake of the relay and the records after it. Sans-I/O: bytes in, bytes out.

The pattern is a hybrid of IK: every X25519 exchange is joined by an encapsulation to an ML-KEM-768 key, so
that whoever records the traffic needs to break both.

    <- s
    ...
    -> skem, e, es, s, ss        3568 bytes and the payload
    <- ekem, skem, e, ee, se     3424 bytes, no payload

`e` and `s` are two keys each, X25519 first. The rules of each token are in `_State`.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from hashlib import sha256
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from .keys import MLKEM_CIPHERTEXT_BYTES, MLKEM_PUBLIC_BYTES, X25519_BYTES, Identity, PublicKey

__all__ = [
    "BadRecord",
    "Encapsulate",
    "HandshakeFailed",
    "Initiator",
    "Opener",
    "Responder",
    "Sealer",
    "prologue",
]

PROTOCOL_NAME: Final = b"Noise_hybridIK_25519+MLKEM768_AESGCM_SHA256"
"""What is hashed: `25519`, where the JSON of the registry says `X25519`."""

PROLOGUE_LABEL: Final = b"codex-exec-server-relay-noise/v1"

TAG_BYTES: Final = 16
MESSAGE_1_BYTES: Final = 3568
"""Of message 1 with an empty payload."""

MESSAGE_2_BYTES: Final = 3424
MAX_MESSAGE_BYTES: Final = 65535
"""Of any Noise message."""

MAX_RECORD_BYTES: Final = 61440
"""Plaintext of one record."""

MAX_COUNTER: Final = 0xFFFF_FFFE
"""The relay numbers records with 32 bits and never wraps."""

Encapsulate = Callable[[PublicKey], tuple[bytes, bytes]]
"""A shared secret, and the ciphertext that carries it to the owner of the key. Tests give known ones."""


class HandshakeFailed(Exception):
    """The peer is not who it should be, or does not speak this handshake. Nothing more is told."""


class BadRecord(Exception):
    """A record that the owner of the key did not seal, or not at this place."""


def prologue(environment_id: str, registration_id: str, stream_id: str) -> bytes:
    """What both ends must agree on before they begin: where this stream goes."""
    parts = (PROLOGUE_LABEL, environment_id.encode(), registration_id.encode(), stream_id.encode())
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def encapsulate(key: PublicKey) -> tuple[bytes, bytes]:
    """To the ML-KEM half of a key, with the system's randomness."""
    try:
        return key.kem.encapsulate()
    except ValueError as error:
        raise HandshakeFailed("a key of the peer is no ML-KEM-768 key") from error


class _State:
    """Noise's SymmetricState: the hash of all that was said, the chaining key, and the current cipher."""

    def __init__(self, prologue: bytes, responder: PublicKey) -> None:
        self.h = self.ck = sha256(PROTOCOL_NAME).digest()
        self._cipher: AESGCM | None = None
        self._counter = 0
        self.mix_hash(prologue)
        self.mix_hash(responder.x25519)
        self.mix_hash(responder.mlkem768)

    def mix_hash(self, data: bytes) -> None:
        self.h = sha256(self.h + data).digest()

    def mix_key(self, secret: bytes) -> None:
        self.ck, key = _hkdf(self.ck, secret, 2)
        self._cipher, self._counter = AESGCM(key), 0

    def mix_key_and_hash(self, secret: bytes) -> None:
        self.ck, mixed, key = _hkdf(self.ck, secret, 3)
        self.mix_hash(mixed)
        self._cipher, self._counter = AESGCM(key), 0

    def mix_dh(self, private: X25519PrivateKey, public: bytes) -> None:
        try:
            self.mix_key(private.exchange(X25519PublicKey.from_public_bytes(public)))
        except ValueError as error:
            raise HandshakeFailed("a key of the peer is not fit for an exchange") from error

    def seal(self, plaintext: bytes) -> bytes:
        if self._cipher is None:
            self.mix_hash(plaintext)
            return plaintext
        ciphertext = self._cipher.encrypt(_nonce(self._counter), plaintext, self.h)
        self._counter += 1
        self.mix_hash(ciphertext)
        return ciphertext

    def open(self, ciphertext: bytes) -> bytes:
        if self._cipher is None:
            self.mix_hash(ciphertext)
            return ciphertext
        try:
            plaintext = self._cipher.decrypt(_nonce(self._counter), ciphertext, self.h)
        except InvalidTag:
            raise HandshakeFailed("a part of the handshake does not decrypt") from None
        self._counter += 1
        self.mix_hash(ciphertext)
        return plaintext

    def mix_ephemeral(self, key: PublicKey) -> bytes:
        self.mix_hash(key.x25519)
        self.mix_hash(key.mlkem768)
        return key.x25519 + key.mlkem768

    def decapsulate(self, own: Identity, ciphertext: bytes) -> bytes:
        try:
            return own.kem.decapsulate(ciphertext)
        except ValueError as error:
            raise HandshakeFailed("an encapsulated secret is malformed") from error

    def split(self) -> tuple[bytes, bytes]:
        """The keys of the records: initiator to responder, responder to initiator."""
        to_responder, to_initiator = _hkdf(self.ck, b"", 2)
        return to_responder, to_initiator


class Sealer:
    """Seals the records of one direction, each exactly once and in order."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self.counter = 0

    def seal(self, plaintext: bytes | memoryview) -> bytes:
        """The next record."""
        if len(plaintext) > MAX_RECORD_BYTES or self.counter > MAX_COUNTER:
            raise ValueError("a record is too long, or one too many")
        ciphertext = self._cipher.encrypt(_nonce(self.counter), plaintext, None)
        self.counter += 1
        return ciphertext


class Opener:
    """Opens the records of one direction, in order."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self.counter = 0

    def open(self, ciphertext: bytes | memoryview) -> bytes:
        """The plaintext of the next record; BadRecord when it is not it."""
        if not TAG_BYTES <= len(ciphertext) <= MAX_RECORD_BYTES + TAG_BYTES:
            raise BadRecord(f"a record of {len(ciphertext)} bytes")
        try:
            plaintext = self._cipher.decrypt(_nonce(self.counter), ciphertext, None)
        except InvalidTag:
            raise BadRecord("a record does not decrypt") from None
        self.counter += 1
        return plaintext


class Initiator:
    """The harness's half: message 1 out, message 2 in."""

    def __init__(
        self,
        identity: Identity,
        responder: PublicKey,
        prologue: bytes,
        *,
        ephemeral: Identity | None = None,
        encapsulate: Encapsulate = encapsulate,
    ) -> None:
        self._identity = identity
        self._responder = responder
        self._ephemeral = ephemeral or Identity.generate()
        self._encapsulate = encapsulate
        self._state = _State(prologue, responder)

    def write(self, payload: bytes) -> bytes:
        """Message 1, carrying the authorization."""
        if len(payload) > MAX_MESSAGE_BYTES - MESSAGE_1_BYTES:
            raise ValueError("the payload does not fit into a Noise message")
        state, ephemeral = self._state, self._ephemeral
        secret, ciphertext = self._encapsulate(self._responder)
        parts = [state.seal(ciphertext)]
        state.mix_key_and_hash(secret)
        parts.append(state.mix_ephemeral(ephemeral.public))
        state.mix_dh(ephemeral.dh, self._responder.x25519)
        parts.append(state.seal(self._identity.public.x25519))
        parts.append(state.seal(self._identity.public.mlkem768))
        state.mix_dh(self._identity.dh, self._responder.x25519)
        parts.append(state.seal(payload))
        return b"".join(parts)

    def read(self, message: bytes) -> tuple[Sealer, Opener]:
        """Message 2: the responder is who it should be, and these are the keys."""
        if len(message) != MESSAGE_2_BYTES:
            raise HandshakeFailed(f"message 2 has {MESSAGE_2_BYTES} bytes, not {len(message)}")
        state, cut = self._state, _Cut(message)
        ciphertext = cut.take(MLKEM_CIPHERTEXT_BYTES)
        state.mix_hash(ciphertext)
        state.mix_key(state.decapsulate(self._ephemeral, ciphertext))
        static_ciphertext = state.open(cut.take(MLKEM_CIPHERTEXT_BYTES + TAG_BYTES))
        state.mix_key_and_hash(state.decapsulate(self._identity, static_ciphertext))
        ephemeral = PublicKey(cut.take(X25519_BYTES), cut.take(MLKEM_PUBLIC_BYTES))
        state.mix_ephemeral(ephemeral)
        state.mix_dh(self._ephemeral.dh, ephemeral.x25519)
        state.mix_dh(self._identity.dh, ephemeral.x25519)
        state.open(cut.rest())
        to_responder, to_initiator = state.split()
        return Sealer(to_responder), Opener(to_initiator)

    @property
    def hash(self) -> bytes:
        """Of all that was said so far."""
        return self._state.h


class Responder:
    """The environment's half: message 1 in, message 2 out. In between, ask whether the peer is welcome."""

    def __init__(
        self,
        identity: Identity,
        prologue: bytes,
        *,
        ephemeral: Identity | None = None,
        encapsulate: Encapsulate = encapsulate,
    ) -> None:
        self._identity = identity
        self._ephemeral = ephemeral
        self._encapsulate = encapsulate
        self._state = _State(prologue, identity.public)
        self._peer: PublicKey | None = None
        self._peer_ephemeral: PublicKey | None = None

    def read(self, message: bytes) -> tuple[PublicKey, bytes]:
        """Message 1: who the peer is, and the authorization it brought."""
        if not MESSAGE_1_BYTES <= len(message) <= MAX_MESSAGE_BYTES:
            raise HandshakeFailed(f"message 1 has at least {MESSAGE_1_BYTES} bytes, not {len(message)}")
        state, cut = self._state, _Cut(message)
        ciphertext = state.open(cut.take(MLKEM_CIPHERTEXT_BYTES))
        state.mix_key_and_hash(state.decapsulate(self._identity, ciphertext))
        ephemeral = PublicKey(cut.take(X25519_BYTES), cut.take(MLKEM_PUBLIC_BYTES))
        state.mix_ephemeral(ephemeral)
        state.mix_dh(self._identity.dh, ephemeral.x25519)
        peer = PublicKey(
            state.open(cut.take(X25519_BYTES + TAG_BYTES)),
            state.open(cut.take(MLKEM_PUBLIC_BYTES + TAG_BYTES)),
        )
        state.mix_dh(self._identity.dh, peer.x25519)
        payload = state.open(cut.rest())
        self._peer, self._peer_ephemeral = peer, ephemeral
        return peer, payload

    def write(self) -> tuple[bytes, Sealer, Opener]:
        """Message 2 and the keys; only for peers that are welcome."""
        if self._peer is None or self._peer_ephemeral is None:
            raise RuntimeError("message 2 comes after message 1")
        state = self._state
        ephemeral = self._ephemeral or Identity.generate()
        secret, ciphertext = self._encapsulate(self._peer_ephemeral)
        state.mix_hash(ciphertext)
        state.mix_key(secret)
        parts = [ciphertext]
        secret, ciphertext = self._encapsulate(self._peer)
        parts.append(state.seal(ciphertext))
        state.mix_key_and_hash(secret)
        parts.append(state.mix_ephemeral(ephemeral.public))
        state.mix_dh(ephemeral.dh, self._peer_ephemeral.x25519)
        state.mix_dh(ephemeral.dh, self._peer.x25519)
        parts.append(state.seal(b""))
        to_responder, to_initiator = state.split()
        return b"".join(parts), Sealer(to_initiator), Opener(to_responder)

    @property
    def hash(self) -> bytes:
        """Of all that was said so far."""
        return self._state.h


class _Cut:
    """A message taken apart from the front. Its whole length was checked before."""

    def __init__(self, message: bytes) -> None:
        self._message = message
        self._at = 0

    def take(self, length: int) -> bytes:
        part = self._message[self._at : self._at + length]
        self._at += length
        return part

    def rest(self) -> bytes:
        return self._message[self._at :]


def _nonce(counter: int) -> bytes:
    return counter.to_bytes(12, "big")


def _hkdf(chaining_key: bytes, material: bytes, outputs: int) -> list[bytes]:
    """HKDF as the Noise specification has it."""
    secret = hmac.digest(chaining_key, material, "sha256")
    results: list[bytes] = []
    last = b""
    for number in range(1, outputs + 1):
        last = hmac.digest(secret, last + bytes((number,)), "sha256")
        results.append(last)
    return results
