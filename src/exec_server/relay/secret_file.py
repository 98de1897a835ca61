"""Files that hold a secret: read only where nobody else can read them."""

from __future__ import annotations

import os
import stat

__all__ = ["SecretFileError", "SecretFileMissing", "read_secret_file"]


class SecretFileError(Exception):
    """The file cannot be used; the text says what to do."""


class SecretFileMissing(SecretFileError):
    """There is no such file."""


def read_secret_file(path: str, what: str, advice: str, most: int) -> bytes:
    """Up to `most` bytes and one more of a file that is ours alone. Where the path is a link, what it leads
    to counts. `what` it is called in errors, and `advice` for a file that others could read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise SecretFileMissing(f"there is no {what} {path}") from None
    except OSError as error:
        raise SecretFileError(f"cannot open the {what} {path}: {error.strerror}") from None
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise SecretFileError(f"the {what} {path} is not a regular file")
        if facts.st_mode & 0o077 and not _is_lent(facts):
            raise SecretFileError(
                f"others can read the {what} {path}; `chmod 600 {path}` if nobody has{advice}"
            )
        if facts.st_uid not in (os.geteuid(), 0):
            raise SecretFileError(f"the {what} {path} belongs to somebody else (uid {facts.st_uid})")
        return os.read(fd, most + 1)
    finally:
        os.close(fd)


def _is_lent(facts: os.stat_result) -> bool:
    """Root's own file that an access list lets one more account read, as systemd does with credentials: the
    list shows as rights of the group, which is root's."""
    return facts.st_uid == 0 and facts.st_gid == 0 and stat.S_IMODE(facts.st_mode) == 0o440
