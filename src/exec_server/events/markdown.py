"""A run as a markdown document, for job summaries, issues and chats; written as it goes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .full import Full, answer_text, output_tail
from .markdown_text import tamed
from .minimal import Shown, Style
from .model import (
    AgentMessage,
    CommandExecution,
    FileChange,
    ThreadStarted,
    TodoList,
    TurnCompleted,
    TurnFailed,
)
from .notice import readable
from .printable import one_line, printable
from .wording import (
    command_result,
    command_script,
    edit_letter,
    plan,
    shown_path,
    tokens,
    truncated,
    went_well,
)

__all__ = ["Markdown", "code", "fenced"]

_TICKS = re.compile(r"`+")
_BLOCK = re.compile(r"^([0-9]{0,9})([-+=.)])")
"""What would make a line an entry of a list, or the one above it a heading."""
_SPECIAL = re.compile(r"([\\`*_\[\]<>#|~$])")


class Markdown(Full):
    """Headings for the thread and the answer, a block of output under each command, a list for the rest.

    The model's own markdown is a quotation without HTML and images, so that nothing it leaves open reaches
    what follows. Everything else is code or escaped: a file name or a tool's error cannot become a heading,
    a link or HTML.
    """

    def line(self, style: Style, text: str) -> Iterator[Shown]:
        """What has no form of its own here is a line of the text form: an entry of a list."""
        entry = "\\\n  ".join(_BLOCK.sub(r"\1\\\2", escaped(line.strip())) for line in text.split("\n"))
        yield from super().line(style, f"- {entry}\n")

    def _paragraph(self, text: str) -> Iterator[Shown]:
        """Markdown as it is."""
        yield from super().line("", f"{text}\n")

    def thread(self, event: ThreadStarted) -> Iterator[Shown]:
        yield from self._paragraph(f"# Thread {code(one_line(event.thread_id))}")

    def started(self, item: object, text: str) -> Iterator[Shown]:
        """Beginnings are not told: a document is read when things are over."""
        del item, text
        return iter(())

    def command(self, item: CommandExecution) -> Iterator[Shown]:
        result = self._timed(command_result(item))
        mark = escaped(result) if went_well(item) else f"**{escaped(result)}**"
        yield from self._paragraph(f"- {code('$ ' + self.cut(command_script(item.command)))} — {mark}")
        hidden, lines = output_tail(item.aggregated_output, self.options)
        notes = [f"… {hidden} lines hidden"] * bool(hidden and lines)
        if truncated(item.aggregated_output):
            notes.insert(0, "(output truncated by the producer)")
        if lines:
            yield from self._paragraph(_indented(fenced("\n".join([*notes, *lines]))))

    def file_change(self, item: FileChange) -> Iterator[Shown]:
        heading = "edit" if went_well(item) else f"edit **{escaped(one_line(item.status))}**"
        edits = [
            f"  - {edit_letter(edit.kind)} {code(shown_path(edit.path, self.options.cwd))}"
            for edit in item.changes
        ]
        yield from self._paragraph("\n".join([f"- {heading}", *edits]))

    def _todo(self, item: TodoList, last: bool) -> Iterator[Shown]:
        if not last or item.items == self._plan:
            return
        self._plan = item.items
        heading, _ = plan(item)
        steps = [f"  - [{'x' if s.completed else ' '}] {escaped(one_line(s.text))}" for s in item.items]
        yield from self._paragraph("\n".join([f"- {heading}", *steps]))

    def remark(self) -> Iterator[Shown]:
        if self._message is not None:
            message, self._message = self._message, None
            yield from self._paragraph(_quoted(tamed(printable(message.text))))

    def completed(self, event: TurnCompleted) -> Iterator[Shown]:
        message: AgentMessage | None
        message, self._message = self._message, None
        if message is not None and message.text.strip():
            text = answer_text(message.text)
            structured = text != printable(message.text).rstrip("\n")
            said = fenced(text, "json") if structured else _quoted(tamed(text))
            yield from self._paragraph(f"## Answer\n\n{said}")
        yield from self._paragraph(f"**done** · {tokens(event.usage)} — thread total{self._elapsed()}")

    def failed(self, event: TurnFailed) -> Iterator[Shown]:
        text = printable(readable(event.error.message))
        yield from self._paragraph(f"## Failed\n\n{fenced(text)}")


def code(text: str) -> str:
    """A code span that the text cannot leave."""
    longest = max((len(run) for run in _TICKS.findall(text)), default=0)
    fence = "`" * (longest + 1)
    padding = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{padding}{text}{padding}{fence}" if text else "` `"


def fenced(text: str, language: str = "") -> str:
    """A code block that the text cannot leave."""
    longest = max((len(run) for run in _TICKS.findall(text)), default=0)
    fence = "`" * max(longest + 1, 3)
    return f"{fence}{language}\n{text}\n{fence}"


def escaped(text: str) -> str:
    """Text that is only text in markdown."""
    return _SPECIAL.sub(r"\\\1", text).replace("&", "&amp;")


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.split("\n"))


def _quoted(text: str) -> str:
    return "\n".join(f"> {line}" for line in text.rstrip("\n").split("\n"))
