"""Files that hold a secret."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from exec_server.relay.secret_file import SecretFileError, SecretFileMissing, read_secret_file


def test_whose_file_it_must_be(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with pytest.raises(SecretFileMissing, match="there is no key"):
        read_secret_file(str(path), "key", "", 8)
    path.write_bytes(b"123456789ab")
    path.chmod(0o600)
    assert read_secret_file(str(path), "key", "", 8) == b"123456789"
    link = tmp_path / "link"
    link.symlink_to(path)
    assert read_secret_file(str(link), "key", "", 3) == b"1234"
    for mode in (0o640, 0o604, 0o620):
        path.chmod(mode)
        with pytest.raises(
            SecretFileError, match=r"others can read the key .*chmod 600 .* if nobody has, do"
        ):
            read_secret_file(str(path), "key", ", do", 8)
    with pytest.raises(SecretFileError, match="not a regular file"):
        read_secret_file(str(tmp_path), "key", "", 8)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    with pytest.raises(SecretFileError, match="not a regular file"):
        read_secret_file(str(fifo), "key", "", 8)


def test_a_credential_as_systemd_lends_it(tmp_path: Path) -> None:
    """Root's, with a list of access for one account, which looks like a right of root's group."""
    if os.geteuid() != 0:
        pytest.skip("only root can make such a file")
    path = tmp_path / "secret"
    path.write_bytes(b"1")
    path.chmod(0o440)
    assert read_secret_file(str(path), "key", "", 8) == b"1"
    os.chown(path, 0, 1)
    with pytest.raises(SecretFileError, match="others can read"):
        read_secret_file(str(path), "key", "", 8)
