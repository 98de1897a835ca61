"""Who an end of the relay is: a pair of static keys, what others see of it, and the file it is kept in.

There are no key identifiers in the protocol. A key is its whole public value, so losing the file means being
somebody else, and everybody who can read it can be us.
"""

from __future__ import annotations

import binascii
import fcntl
import hashlib
import hmac
import os
import secrets
from base64 import b64decode, b64encode
from functools import cached_property
from typing import Any, Final

import msgspec
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from .secret_file import SecretFileError, SecretFileMissing, read_secret_file

__all__ = [
    "BadKey",
    "Identity",
    "KeyFileError",
    "KeyFileMissing",
    "PublicKey",
    "load",
    "load_or_create",
    "lock",
    "rotate",
]

SUITE: Final = "Noise_hybridIK_X25519+MLKEM768_AESGCM_SHA256"
"""The name of the suite in JSON. The name that is hashed differs from it by one letter, see noise.py."""

X25519_BYTES: Final = 32
MLKEM_PUBLIC_BYTES: Final = 1184
MLKEM_CIPHERTEXT_BYTES: Final = 1088
MLKEM_SEED_BYTES: Final = 64

KEY_FILE_VERSION: Final = 1
MAX_KEY_FILE_BYTES: Final = 4096
"""A key file has some 300 bytes; what is larger is something else."""


class BadKey(ValueError):
    """Bytes that are no key of this suite."""


class KeyFileError(Exception):
    """The key file cannot be used; the text says what to do."""


class KeyFileMissing(KeyFileError):
    """There is no such file."""


class PublicKey(msgspec.Struct, frozen=True, eq=False):
    """What others see of an identity: 32 bytes of X25519 and 1184 of ML-KEM-768."""

    x25519: bytes
    mlkem768: bytes

    def __post_init__(self) -> None:
        for name, value, length in (
            ("X25519", self.x25519, X25519_BYTES),
            ("ML-KEM-768", self.mlkem768, MLKEM_PUBLIC_BYTES),
        ):
            if len(value) != length:
                raise BadKey(f"the {name} public key has {len(value)} bytes instead of {length}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PublicKey):
            return NotImplemented
        # Both parts are always looked at: the time says nothing about where they differ.
        same = hmac.compare_digest(self.x25519, other.x25519)
        return hmac.compare_digest(self.mlkem768, other.mlkem768) and same

    def __hash__(self) -> int:
        return hash((self.x25519, self.mlkem768))

    @property
    def fingerprint(self) -> str:
        """The key in 64 hexadecimal digits, for people to compare and files to list."""
        return hashlib.sha256(self.x25519 + self.mlkem768).hexdigest()

    def to_object(self) -> dict[str, str]:
        """The public-key object of the registry."""
        return {
            "suite": SUITE,
            "x25519_public_key": b64encode(self.x25519).decode(),
            "mlkem768_public_key": b64encode(self.mlkem768).decode(),
        }

    @classmethod
    def from_object(cls, value: Any) -> PublicKey:
        """Read a public-key object: three members, exactly these; the ML-KEM key must be one."""
        if not isinstance(value, dict) or set(value) != {
            "suite",
            "x25519_public_key",
            "mlkem768_public_key",
        }:
            raise BadKey("a public key has the members suite, x25519_public_key and mlkem768_public_key")
        if value["suite"] != SUITE:
            raise BadKey(f"the suite must be {SUITE}")
        key = cls(
            _decode(value["x25519_public_key"], "x25519_public_key", X25519_BYTES),
            _decode(value["mlkem768_public_key"], "mlkem768_public_key", MLKEM_PUBLIC_BYTES),
        )
        key.kem  # noqa: B018  # it is the looking that finds a bad one
        return key

    @property
    def kem(self) -> MLKEM768PublicKey:
        try:
            return MLKEM768PublicKey.from_public_bytes(self.mlkem768)
        except ValueError as error:
            # The library says something about lengths, which are right: it is a number that is out of range.
            raise BadKey("mlkem768_public_key is not an ML-KEM-768 encapsulation key") from error


class Identity:
    """A pair of private keys. Ephemeral ones are the same thing, used once."""

    def __init__(self, dh: X25519PrivateKey, kem: MLKEM768PrivateKey) -> None:
        self.dh = dh
        self.kem = kem

    @classmethod
    def generate(cls) -> Identity:
        """New keys from the system's randomness."""
        try:
            return cls(X25519PrivateKey.generate(), MLKEM768PrivateKey.generate())
        except UnsupportedAlgorithm as error:
            raise KeyFileError(
                "this build of `cryptography` has no ML-KEM-768; the relay needs version 48 or later"
            ) from error

    @classmethod
    def from_secrets(cls, x25519: bytes, mlkem_seed: bytes) -> Identity:
        """Keys from their secret bytes."""
        if len(x25519) != X25519_BYTES or len(mlkem_seed) != MLKEM_SEED_BYTES:
            raise BadKey(
                f"an identity is made of {X25519_BYTES} and {MLKEM_SEED_BYTES} secret bytes,"
                f" not {len(x25519)} and {len(mlkem_seed)}"
            )
        return cls(
            X25519PrivateKey.from_private_bytes(x25519), MLKEM768PrivateKey.from_seed_bytes(mlkem_seed)
        )

    @cached_property
    def public(self) -> PublicKey:
        """What others may know."""
        return PublicKey(self.dh.public_key().public_bytes_raw(), self.kem.public_key().public_bytes_raw())


class _KeyFile(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    x25519_private: bytes
    mlkem768_seed: bytes


def load_or_create(path: str) -> Identity:
    """The identity in a file that only we can read; made on first use."""
    try:
        return load(path)
    except KeyFileMissing:
        _write(path, Identity.generate(), replace=False)
        return load(path)  # whoever came first made the one that counts


def load(path: str) -> Identity:
    """The identity in a file that only we can read. Where the path is a link, what it leads to counts."""
    advice = ", or make a new key with `exec-server relay key rotate`"
    try:
        content = read_secret_file(path, "key file", advice, MAX_KEY_FILE_BYTES)
    except SecretFileMissing as error:
        raise KeyFileMissing(str(error)) from None
    except SecretFileError as error:
        raise KeyFileError(str(error)) from None
    return _parse(path, content)


def rotate(path: str) -> Identity:
    """A new identity in place of the one in the file, whole or not at all.

    A running environment goes on with the old one until it registers again.
    """
    load(path)  # what is not there, or not a key, is not replaced
    identity = Identity.generate()
    _write(path, identity, replace=True)
    return identity


def lock(path: str) -> int:
    """Be the only one who serves with the key in a file, until the descriptor this gives is closed.

    Two who do throw each other out of the rendezvous, again and again.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise KeyFileError(f"cannot open the key file {path}: {error.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _holder(os.fstat(fd).st_ino)
        os.close(fd)
        raise KeyFileError(
            f"another environment serves with the key file {path}{holder}; each needs a key of its own"
            " (--environment-id, --key-file)"
        ) from None
    except OSError:
        pass  # a file system without locks; the rendezvous notices, only later
    return fd


def _holder(inode: int) -> str:
    """Who has the lock, as far as the system tells."""
    try:
        with open("/proc/locks", encoding="ascii") as file:
            for line in file:
                words = line.split()
                if len(words) > 5 and words[1] == "FLOCK" and words[5].endswith(f":{inode}"):
                    return f" (process {words[4]})" if words[4] != "0" else ""
    except (OSError, ValueError):
        pass
    return ""


def _parse(path: str, content: bytes) -> Identity:
    try:
        if len(content) > MAX_KEY_FILE_BYTES:
            raise BadKey(f"more than {MAX_KEY_FILE_BYTES} bytes")
        found = msgspec.json.decode(content, type=_KeyFile)
        if found.version != KEY_FILE_VERSION:
            raise BadKey(f"version {found.version}, which this program does not know")
        return Identity.from_secrets(found.x25519_private, found.mlkem768_seed)
    except (msgspec.MsgspecError, ValueError) as error:
        raise KeyFileError(f"{path} is not a key file of the relay: {error}") from None


def _write(path: str, identity: Identity, *, replace: bool) -> None:
    """A file is there whole, or not at all; another's file is only overwritten when asked."""
    content = msgspec.json.encode(
        _KeyFile(KEY_FILE_VERSION, identity.dh.private_bytes_raw(), identity.kem.private_bytes_raw())
    )
    path = os.path.realpath(path)  # a link stays one
    directory = os.path.dirname(path)
    beside = os.path.join(directory, f".{os.path.basename(path)}.{secrets.token_hex(8)}")
    try:
        os.makedirs(directory, 0o700, exist_ok=True)
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if replace:
                os.rename(beside, path)
            else:
                try:
                    os.link(beside, path)
                except FileExistsError:
                    pass  # somebody was faster, and theirs is as good
        finally:
            try:
                os.unlink(beside)
            except FileNotFoundError:
                pass  # it has become the file itself
    except OSError as error:
        raise KeyFileError(f"cannot write the key file {path}: {error.strerror}") from None


def _decode(text: Any, name: str, length: int) -> bytes:
    """Standard base64 with padding, and of the right length before it is decoded."""
    expected = (length + 2) // 3 * 4
    if not isinstance(text, str) or len(text) != expected or not text.isascii():
        raise BadKey(f"{name} must be {expected} characters of base64, for {length} bytes")
    try:
        return b64decode(text, validate=True)
    except binascii.Error as error:
        raise BadKey(f"{name} is not base64: {error}") from None
