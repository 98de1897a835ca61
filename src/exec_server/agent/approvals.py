"""Whether a model may do something, and who says so: a rule, a person at the terminal, or nobody."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Literal

from msgspec import Struct

from .exec import Declined
from .policy import Decided, Policy

__all__ = ["ApprovalMode", "Approver", "Ask", "Question", "ask_on_terminal", "forbid"]

ApprovalMode = Literal["never", "on-request"]

NEVER: Final = "it needs approval, and the approval policy is never"


class Question(Struct, frozen=True, kw_only=True):
    """What a person is asked."""

    kind: Literal["command", "edit", "tool"]
    what: str
    """The command, the changes, or the call."""
    why: str = ""
    outside: bool = False
    """Whether it would be done without the sandbox."""

    @property
    def text(self) -> str:
        """The question itself."""
        asked = {
            "command": "May this run",
            "edit": "May these files be edited",
            "tool": "May this tool be called",
        }
        return f"{asked[self.kind]}{' outside the sandbox' if self.outside else ''}?"


Ask = Callable[[Question], Awaitable[bool]]
"""Asks a person; True if it may be done."""


class Approver:
    """The rules of a run, and whoever can be asked about the rest: one question at a time."""

    def __init__(
        self, mode: ApprovalMode = "never", policy: Policy | None = None, ask: Ask | None = None
    ) -> None:
        self.mode: ApprovalMode = mode
        self.policy = policy or Policy()
        self._ask = ask
        self._asking = asyncio.Lock()

    @property
    def can_ask(self) -> bool:
        return self.mode != "never" and self._ask is not None

    async def approve(
        self, question: Question, meanwhile: AbstractContextManager[object] | None = None
    ) -> None:
        """Ask; Declined if nobody says yes. `meanwhile` holds for as long as it takes."""
        if self.mode == "never" or self._ask is None:
            raise Declined(NEVER)
        with meanwhile or nullcontext():
            async with self._asking:
                approved = await self._ask(question)
        if not approved:
            raise Declined("rejected by user")


def forbid(decided: Decided | None) -> None:
    """Declined if a rule forbids it."""
    if decided is not None and decided[0] == "forbid":
        raise Declined(f"rejected by the policy{f': {decided[1]}' if decided[1] else ''}")


async def ask_on_terminal(question: Question) -> bool:
    """Ask whoever sits at this terminal; False if nobody does.

    The loop waits for the answer, not a thread: a thread that reads cannot be called back, and whoever
    interrupts the question would have to answer it first.
    """
    import termios

    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        reason = f"\n  {_printable(question.why)}" if question.why else ""
        shown = f"\n{question.text}\n  {_printable(question.what)}{reason}\n[y/N] "
        # What was typed until now answers something else.
        termios.tcflush(terminal, termios.TCIFLUSH)
        with open(os.dup(terminal), "wb") as file:
            file.write(shown.encode())
        os.set_blocking(terminal, False)
        return (await _line(terminal)).strip().lower() in (b"y", b"yes")
    except (OSError, termios.error):
        return False  # the terminal went away
    finally:
        os.close(terminal)


async def _line(terminal: int) -> bytes:
    """What is typed, up to the end of the line or of the terminal."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    typed = b""
    loop.add_reader(terminal, readable.set)
    try:
        while not typed.endswith(b"\n"):
            await readable.wait()
            readable.clear()
            try:
                more = os.read(terminal, 4096)
            except BlockingIOError:
                continue
            if not more:
                break
            typed += more
    finally:
        loop.remove_reader(terminal)
    return typed


def _printable(text: str) -> str:
    """What a model wrote must not steer the terminal on which it is judged."""
    return "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in text)
