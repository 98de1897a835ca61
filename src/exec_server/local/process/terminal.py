"""SIGHUP says two things: read your files again, or the terminal you were started from is gone."""

from __future__ import annotations

import os
import signal

__all__ = ["StartedFrom"]


class StartedFrom:
    """The terminal that this process was started from, if there was one and its end is ours (no `nohup`)."""

    def __init__(self) -> None:
        self._there = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and _has_terminal()

    def is_gone(self) -> bool:
        """Whether there was one and is none now: whoever started us has closed the window."""
        return self._there and not _has_terminal()


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
