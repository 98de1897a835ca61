"""local/sandbox/denial.py: the reference's rule to the letter, and ours where that is plainly wrong."""

from __future__ import annotations

import pytest

from exec_server.local.sandbox import denial


@pytest.mark.parametrize(
    ("code", "output", "reported", "found"),
    [
        (0, b"touch: Read-only file system", False, False),
        (5, b"", False, False),
        (5, b"nothing special", False, False),
        (1, b"touch: cannot touch 'b': Read-only file system", True, True),
        (1, b"[Errno 1] Operation not permitted", True, True),
        (2, b"Permission Denied\n", True, True),
        (127, b"sh: 1: nosuchcmd: not found", False, False),
        (126, b"sh: ./x: Permission denied", True, True),
        (159, b"", True, True),
        (2, b"", False, False),
        # The word is not the deed.
        (5, b"a sandbox word\n", True, False),
        (1, b"FAILED tests/test_landlock.py::test_seccomp", True, False),
        (1, b"failed to write file", True, False),
        # A sandbox that could not be made, so nothing ran.
        (1, b"bwrap: Can't mkdir /x: Not a directory", False, True),
        # There is a sandbox, and no such program in it.
        (1, b"bwrap: execvp nope: No such file or directory\n", False, False),
        (1, b"bwrap: execvp ./x: Permission denied\n", True, True),
        (1, b"error building bubblewrap command: Fatal error: no", False, True),
    ],
)
def test_rules(code: int, output: bytes, reported: bool, found: bool) -> None:
    assert denial.reported(code, [b"", output]) is reported
    assert denial.found(code, [b"", output]) is found
