"""Codes and words of what the operating system refuses."""

from __future__ import annotations

import errno

import pytest

from exec_server.local.files.errors import failure, os_error, text


@pytest.mark.parametrize(
    ("number", "code", "message"),
    [
        (errno.ENOENT, -32004, "No such file or directory (os error 2)"),
        (errno.EACCES, -32600, "Permission denied (os error 13)"),
        (errno.EPERM, -32600, "Operation not permitted (os error 1)"),
        (errno.EINVAL, -32600, "Invalid argument (os error 22)"),
        (errno.ELOOP, -32603, "Symbolic link loop (os error 40)"),
        (errno.EBUSY, -32603, "Resource busy (os error 16)"),
        (errno.EMFILE, -32603, "No file descriptors available (os error 24)"),
        (errno.ENAMETOOLONG, -32603, "Filename too long (os error 36)"),
    ],
)
def test_known(number: int, code: int, message: str) -> None:
    error = failure(os_error(number))
    assert (error.code, error.message) == (code, message)


def test_unknown_ones_are_what_this_machine_calls_them() -> None:
    assert text(errno.ECHILD) == "No child processes (os error 10)"


def test_without_a_number() -> None:
    assert failure(OSError("strange")).message == "strange"
