"""What `exec-server exec` shows: the stream, or what people want to see of it; and the answer in a file."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Self

import click

if TYPE_CHECKING:
    from ..agent.outcome import Outcome
    from ..events.live import LiveView

__all__ = ["JsonOutput", "ShownOutput", "write_answer"]


class JsonOutput:
    """The stream itself, on stdout."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """There is nothing to put back."""

    def write(self, line: bytes) -> int:
        return sys.stdout.buffer.write(line)

    def flush(self) -> None:
        sys.stdout.buffer.flush()

    def end(self, outcome: Outcome) -> None:
        """It is all said; only what cannot be written any more must not be tried again at exit."""
        del outcome
        with suppress(BrokenPipeError, ValueError):
            sys.stdout.flush()
            return
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


class ShownOutput:
    """What happens, for people, on stderr; and the answer on stdout.

    On a terminal it is a live view, unless somebody is to be asked something there: it would be painted over.
    """

    def __init__(self, *, questions: bool) -> None:
        from ..events.full import Full
        from ..events.minimal import Options
        from ..events.render import Sink

        terminal = sys.stderr.isatty()
        coloured = terminal and not os.environ.get("NO_COLOR")
        self._sink = Sink(sys.stderr, coloured)
        self._renderer = Full()
        self._live: LiveView | None = None
        if terminal and not questions and os.environ.get("TERM") != "dumb":
            from ..events.live import LiveView

            self._live = LiveView(Options(), sys.stderr, colour=coloured)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.__exit__(None, None, None)

    def write(self, line: bytes) -> int:
        from ..events.reader import parse_line

        if self._live is not None:
            self._live.feed(parse_line(line))
        else:
            self._sink.put(self._renderer.feed(parse_line(line)))
        return len(line)

    def flush(self) -> None:
        """Every event is shown at once."""

    def end(self, outcome: Outcome) -> None:
        from ..events.printable import safe_to_encode
        from ..events.render import Sink

        if self._live is not None:
            self._live.end()
        else:
            self._sink.put(self._renderer.end())
        if outcome.answer is None or (sys.stdout.isatty() and sys.stderr.isatty()):
            return  # on a terminal it has just been shown
        answer = safe_to_encode(outcome.answer)
        Sink(sys.stdout, False).write(answer if answer.endswith("\n") else answer + "\n")


def write_answer(path: str, answer: str | None) -> None:
    """Whole or not at all, to whatever has the name. That it did not work is said, and all."""
    from ..local.files.write import replace_file, write_all

    if answer is None:
        click.echo(f"exec-server: there was no answer; {path} is empty", err=True)
    data = (answer or "").encode("utf-8", "replace")
    try:
        replace_file(os.fsencode(path), lambda descriptor: write_all(descriptor, data), len(data))
    except OSError as error:
        click.echo(f"exec-server: the answer could not be written to {path}: {error}", err=True)
