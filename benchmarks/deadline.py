"""No measurement waits for ever."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from .client import WrongAnswer

__all__ = ["SECONDS_PER_ROUND", "deadline"]

SECONDS_PER_ROUND = 60
"""A server that has not started, or not finished a round, by then has failed."""


@contextlib.contextmanager
def deadline(seconds: int) -> Iterator[None]:
    """`WrongAnswer` after so long, wherever the code is blocked."""

    def expire(_signal: int, _frame: FrameType | None) -> None:
        raise WrongAnswer(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
