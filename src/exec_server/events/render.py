"""Showing a stream: blocks of bytes in, text out, as the events arrive."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator
from typing import IO, Final

from .minimal import Minimal, Shown
from .model import Record
from .printable import printable, safe_to_encode
from .reducer import Reducer

__all__ = ["Sink", "blocks_of", "discard", "exit_code", "show", "show_answer"]

BLOCK_BYTES: Final = 256 * 1024
"""Read at once. On a pipe a read returns what is there, so nothing waits for a block to fill."""

_COLOURS: Final = {"dim": "2", "bold": "1", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}

EXIT_COMPLETED: Final = 0
EXIT_FAILED: Final = 1
EXIT_INCOMPLETE: Final = 3
EXIT_NO_EVENTS: Final = 4
"""What `exec-server render` ends with."""


def blocks_of(fd: int) -> Iterator[bytes]:
    """What a descriptor gives, as soon as it is there."""
    while block := os.read(fd, BLOCK_BYTES):
        yield block


def is_live(fd: int) -> bool:
    """Whether reading takes as long as the run does, so that times of arrival mean something."""
    return not stat.S_ISREG(os.fstat(fd).st_mode)


def exit_code(reducer: Reducer) -> int:
    """0 completed, 1 failed, 3 incomplete, 4 nothing that could be called a stream."""
    if reducer.events == 0:
        return EXIT_NO_EVENTS
    run = reducer.run
    if run.outcome == "none":
        return EXIT_COMPLETED if run.thread_id is not None else EXIT_INCOMPLETE
    return {"completed": EXIT_COMPLETED, "failed": EXIT_FAILED}.get(run.outcome, EXIT_INCOMPLETE)


class Sink:
    """Where text goes. When nobody takes it any more, it is dropped: the producer must not be stopped."""

    def __init__(self, file: IO[str], colour: bool) -> None:
        self._file = file
        self._colour = colour
        self.closed = False

    def put(self, shown: Iterable[Shown]) -> None:
        """Print lines and flush."""
        text = "".join(self._painted(style, line) for style, line in shown)
        if text:
            self.write(text)

    def write(self, text: str) -> None:
        """Print text and flush."""
        if self.closed:
            return
        try:
            self._file.write(text)
            self._file.flush()
        except (BrokenPipeError, ValueError):
            self.closed = True
            discard(self._file)

    def _painted(self, style: str, text: str) -> str:
        if not self._colour or style not in _COLOURS:
            return f"{text}\n"
        start = f"\x1b[{_COLOURS[style]}m"
        return "".join(f"{start}{line}\x1b[0m\n" for line in text.split("\n"))


def show(records: Iterable[Record], renderer: Minimal, sink: Sink) -> int:
    """Render everything, to the end of the input; gives the exit code."""
    for record in records:
        sink.put(renderer.feed(record))
    sink.put(renderer.end())
    return exit_code(renderer.reducer)


def show_answer(
    records: Iterable[Record], renderer: Minimal, sink: Sink, progress: Sink | None, *, to_people: bool
) -> int:
    """Only the answer on `sink`, and what happens meanwhile on `progress`.

    For a program the answer is what the model wrote; for a person it is made fit for a terminal.
    """
    for record in records:
        shown = list(renderer.feed(record))
        if progress is not None:
            progress.put(shown)
    shown = list(renderer.end())
    if progress is not None:
        progress.put(shown)
    answer = renderer.reducer.run.answer
    if answer is not None:
        answer = printable(answer) if to_people else safe_to_encode(answer)
        sink.write(answer if answer.endswith("\n") else answer + "\n")
    return exit_code(renderer.reducer)


def dump(value: object) -> str:
    """JSON for other programs: one line, nothing a naive line reader would break at."""
    return json.dumps(value, ensure_ascii=True)


def discard(file: IO[str]) -> None:
    """Point a closed pipe at nothing, so that the interpreter does not fail when it flushes at exit."""
    try:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, file.fileno())
        os.close(nothing)
    except (OSError, ValueError):
        pass
