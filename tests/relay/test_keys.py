"""Keys: their form in JSON, and the file they are kept in."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from exec_server.relay.keys import (
    SUITE,
    BadKey,
    Identity,
    KeyFileError,
    PublicKey,
    load,
    load_or_create,
    lock,
    rotate,
)


def test_an_identity_is_made_once_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "new" / "key"
    made = load_or_create(str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_or_create(str(path)).public == made.public
    assert os.listdir(path.parent) == ["key"]


def test_rotation_replaces_it_whole(tmp_path: Path) -> None:
    path = tmp_path / "key"
    before = load_or_create(str(path))
    after = rotate(str(path))
    assert after.public != before.public
    assert load_or_create(str(path)).public == after.public
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["key"]


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    load_or_create(str(path))
    path.chmod(0o640)
    with pytest.raises(KeyFileError, match="chmod 600"):
        load_or_create(str(path))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"x" * 5000,
        b'{"version":2,"x25519_private":"","mlkem768_seed":""}',
        b'{"version":1,"x25519_private":"AAAA","mlkem768_seed":"AAAA"}',
        b'{"version":1,"x25519_private":"","mlkem768_seed":"","more":1}',
    ],
)
def test_a_file_that_is_no_key_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(KeyFileError, match="not a key file"):
        load_or_create(str(path))
    assert path.read_bytes() == content


def test_what_a_link_leads_to_counts(tmp_path: Path) -> None:
    """Secrets that are mounted into containers are links."""
    made = load_or_create(str(tmp_path / "elsewhere"))
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    assert load(str(link)).public == made.public
    rotated = rotate(str(link))
    assert link.is_symlink()
    assert load(str(tmp_path / "elsewhere")).public == rotated.public != made.public
    (tmp_path / "elsewhere").chmod(0o640)
    with pytest.raises(KeyFileError, match="others can read"):
        load(str(link))
    with pytest.raises(KeyFileError, match="not a regular file"):
        load_or_create(str(tmp_path))


def test_nothing_is_made_where_somebody_only_looks_or_rotates(tmp_path: Path) -> None:
    for act in (load, rotate, lock):
        with pytest.raises(KeyFileError, match=r"missing\.key"):
            act(str(tmp_path / "missing.key"))
    assert list(tmp_path.iterdir()) == []


def test_one_at_a_time_serves_with_a_key(tmp_path: Path) -> None:
    path = str(tmp_path / "key")
    load_or_create(path)
    held = lock(path)
    with pytest.raises(KeyFileError, match=rf"another environment .* \(process {os.getpid()}\)"):
        lock(path)
    os.close(held)
    os.close(lock(path))


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KeyFileError, match=str(tmp_path)):
        load_or_create(str(tmp_path / "file" / "key"))


def test_the_public_object_and_back() -> None:
    key = Identity.generate().public
    value = key.to_object()
    assert value["suite"] == SUITE
    assert (len(value["x25519_public_key"]), len(value["mlkem768_public_key"])) == (44, 1580)
    assert PublicKey.from_object(json.loads(json.dumps(value))) == key
    assert hash(PublicKey.from_object(value)) == hash(key)


GOOD = Identity.generate().public.to_object()


@pytest.mark.parametrize(
    "bad",
    [
        None,
        [],
        {},
        {**GOOD, "more": 1},
        {**GOOD, "suite": SUITE.replace("X25519", "25519")},
        {**GOOD, "x25519_public_key": GOOD["x25519_public_key"][:-1]},
        {**GOOD, "x25519_public_key": "*" * 44},
        {**GOOD, "x25519_public_key": "A" * 44},
        {**GOOD, "x25519_public_key": 7},
        {**GOOD, "mlkem768_public_key": "é" * 1580},
        {**GOOD, "mlkem768_public_key": "/" * 1579 + "="},
        {name: value for name, value in GOOD.items() if name != "suite"},
    ],
)
def test_other_objects_are_no_keys(bad: Any) -> None:
    with pytest.raises(BadKey):
        PublicKey.from_object(bad)


def test_keys_compare_as_wholes() -> None:
    key, other = Identity.generate().public, Identity.generate().public
    assert key == PublicKey(key.x25519, key.mlkem768)
    assert key != PublicKey(key.x25519, other.mlkem768)
    assert key != PublicKey(other.x25519, key.mlkem768)
    assert key != "a key"
    with pytest.raises(BadKey):
        PublicKey(key.x25519[:-1], key.mlkem768)
    with pytest.raises(BadKey):
        PublicKey(key.x25519, key.mlkem768 + b"x")
    with pytest.raises(BadKey):
        Identity.from_secrets(bytes(31), bytes(64))
