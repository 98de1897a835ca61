"""Whether a command failed because its sandbox kept something from it, as far as its output tells.

Nobody is told when the kernel says no; there is only what the command printed, and how it ended. The
reference takes any output with the word "sandbox", "seccomp" or "landlock" in it for a denial, so a
failing test that prints its file name (`test_sandbox.py`) counts. Its clients rely on its answer, so
they get it (`reported`); who asks for extensions gets one that goes by what the kernel says (`found`).
Both can be wrong: a command may print anything, and one that is denied something may go on and succeed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = ["found", "reported"]

KERNEL_WORDS: Final = (b"operation not permitted", b"permission denied", b"read-only file system")
"""EPERM, EACCES and EROFS, as every program prints them."""

REFERENCE_WORDS: Final = (*KERNEL_WORDS, b"seccomp", b"sandbox", b"landlock", b"failed to write file")

BUILDER_WORDS: Final = (b"bwrap: ", b"error building bubblewrap command: ")
"""How whoever puts a sandbox together begins when it cannot; the command has not even started."""

NO_PROGRAM_WORDS: Final = b"bwrap: execvp "
"""How it begins when there is a sandbox, and no such program in it. Nobody denied anything, then."""

BAD_SYSTEM_CALL_EXIT: Final = 128 + 31
"""Killed by SIGSYS, which is how a filter kills."""


def reported(exit_code: int, outputs: Sequence[bytes]) -> bool:
    """The reference's rule, over each stream and all of them as they came."""
    if exit_code == 0:
        return False
    lowered = [output.lower() for output in outputs if output]
    return any(word in output for output in lowered for word in REFERENCE_WORDS) or (
        exit_code == BAD_SYSTEM_CALL_EXIT
    )


def found(exit_code: int, outputs: Sequence[bytes]) -> bool:
    """Ours: an error of the kernel's in the output, a filter that killed, or a sandbox that never was."""
    if exit_code == 0:
        return False
    if exit_code == BAD_SYSTEM_CALL_EXIT:
        return True
    return any(
        (output.startswith(BUILDER_WORDS) and not output.startswith(NO_PROGRAM_WORDS))
        or any(word in output.lower() for word in KERNEL_WORDS)
        for output in outputs
        if output
    )
