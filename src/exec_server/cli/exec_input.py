"""What is said to `exec-server exec`: its words, and what is piped to it."""

from __future__ import annotations

import os
import stat
import sys
from typing import Any

import click

from .options import fail

__all__ = ["read_prompt", "take_words"]


def take_words(words: tuple[str, ...], options: dict[str, Any]) -> str | None:
    """The prompt; and how the thread begins, if the words say so as they do to the reference."""
    rest = list(words)
    if rest and rest[0] in ("resume", "fork"):
        how = rest.pop(0)
        if how == "resume" and options["last"]:
            pass  # the newest one: no id, only a prompt
        elif rest:
            options[how] = rest.pop(0)
        else:
            raise click.UsageError(f"{how} which thread? give its ID")
    if len(rest) > 1:
        raise click.UsageError(
            f"the prompt is one word for the shell: put it in quotes ({rest[1]!r} is left)"
        )
    return rest[0] if rest else None


def read_prompt(prompt: str | None) -> str:
    """The prompt, with what is piped here; a pipe is read to its end before anything is done."""
    piped = ""
    if sys.stdin is None or sys.stdin.isatty():
        if prompt is None or (prompt == "-" and sys.stdin is None):
            raise click.UsageError("what is to be done? give a PROMPT, or `-` and write it to stdin")
        if prompt != "-":
            return prompt
    elif prompt not in (None, "-") and not _at_end(sys.stdin.fileno()):
        click.echo("Reading additional input from stdin...", err=True)
    piped = sys.stdin.buffer.read().decode("utf-8", "replace")
    if prompt is not None and prompt != "-":
        return f"{prompt}\n\n<stdin>\n{piped.rstrip(chr(10))}\n</stdin>" if piped.strip() else prompt
    if not piped.strip():
        fail("there is no prompt: stdin was empty")
    return piped


def _at_end(fd: int) -> bool:
    """Whether there is nothing to wait for: a file or the null device, not a pipe somebody may write to."""
    return not stat.S_ISFIFO(os.fstat(fd).st_mode) and not stat.S_ISSOCK(os.fstat(fd).st_mode)
