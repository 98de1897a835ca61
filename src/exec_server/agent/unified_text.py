"""What the model is told about a command: a few facts and as much output as its budget allows.

Pure. A token counts as four bytes.
"""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from .buffer import HeadTailBuffer, omission_marker

__all__ = ["DEFAULT_MODEL_POLICY", "DEFAULT_OUTPUT_TOKENS", "Policy", "ToolOutput", "truncate"]

Unit = Literal["bytes", "tokens"]

BYTES_PER_TOKEN: Final = 4

DEFAULT_OUTPUT_TOKENS: Final = 10_000
"""What a call gets unless it asks for another amount."""

SLACK_PERCENT: Final = 120
"""How much larger than the model's budget a whole result may be, its header included."""


class Policy(Struct, frozen=True):
    """How much output there may be. The unit also decides in what the marker counts."""

    unit: Unit
    amount: int

    @property
    def budget(self) -> int:
        """In bytes."""
        return self.amount * BYTES_PER_TOKEN if self.unit == "tokens" else self.amount

    def reduced(self, excess: int) -> Policy:
        """With so many bytes less."""
        less = tokens(excess) if self.unit == "tokens" else excess
        return replace(self, amount=max(self.amount - less, 0))


DEFAULT_MODEL_POLICY: Final = Policy("bytes", 10_000)
"""That of a model nothing is known of."""


def tokens(size: int) -> int:
    """Tokens in so many bytes."""
    return -(-size // BYTES_PER_TOKEN)


def truncate(text: str, budget: int, unit: Unit) -> str:
    """The beginning and the end of a text of too many bytes, and between them how much was left out."""
    data = text.encode()
    if len(data) <= budget:
        return text
    head_end = budget // 2
    while head_end > 0 and _inside(data, head_end):
        head_end -= 1
    tail_start = len(data) - (budget - budget // 2)
    while tail_start < len(data) and _inside(data, tail_start):
        tail_start += 1
    head, tail = data[:head_end].decode(), data[tail_start:].decode()
    if unit == "tokens":
        marker = f"…{tokens(len(data) - budget)} tokens truncated…"
    else:
        marker = f"…{len(text) - len(head) - len(tail)} chars truncated…"
    return f"{head}{marker}{tail}"


def _inside(data: bytes, position: int) -> bool:
    """Whether a cut here would split a character."""
    return position < len(data) and data[position] & 0xC0 == 0x80


class ToolOutput(Struct, frozen=True, kw_only=True):
    """The result of one call. `exit_code` of a finished command may be unknown; then neither is set."""

    wall_time: float
    """Seconds."""
    buffer: HeadTailBuffer
    """What was collected."""
    chunk_id: str = ""
    exit_code: int | None = None
    session_id: int | None = None
    max_output_tokens: int | None = None

    @property
    def original_token_count(self) -> int:
        """Of all the output, what was dropped included."""
        return tokens(self.buffer.total)

    @property
    def collected(self) -> str:
        """All that is there, as text."""
        return self.buffer.joined().decode("utf-8", "replace")

    def text(self, model_policy: Policy = DEFAULT_MODEL_POLICY) -> str:
        """The result as the model gets it."""
        policy = self._policy(model_policy)
        header = self._header()
        limit = -(-model_policy.budget * SLACK_PERCENT // 100)
        while True:
            text = f"{header}\n{self._shown(policy)}"
            excess = len(text.encode()) - limit
            if excess <= 0 or policy.amount == 0:
                return text
            policy = policy.reduced(excess)

    def structured(self, model_policy: Policy = DEFAULT_MODEL_POLICY) -> dict[str, object]:
        """The same as a JSON object; what is not known is left out."""
        fields: dict[str, object] = {
            "chunk_id": self.chunk_id or None,
            "wall_time_seconds": self.wall_time,
            "exit_code": self.exit_code,
            "session_id": self.session_id,
            "original_token_count": self.original_token_count,
            "output": self._shown(self._policy(model_policy)),
        }
        return {name: value for name, value in fields.items() if value is not None}

    def _policy(self, model_policy: Policy) -> Policy:
        """What the call asked for, within what the model takes."""
        wanted = self.max_output_tokens if self.max_output_tokens is not None else DEFAULT_OUTPUT_TOKENS
        asked = Policy("tokens", wanted)
        return asked if asked.budget < model_policy.budget else model_policy

    def _header(self) -> str:
        lines = [f"Chunk ID: {self.chunk_id}"] if self.chunk_id else []
        lines.append(f"Wall time: {self.wall_time:.4f} seconds")
        if self.exit_code is not None:
            lines.append(f"Process exited with code {self.exit_code}")
        if self.session_id is not None:
            lines.append(f"Process running with session ID {self.session_id}")
        lines.append(f"Original token count: {self.original_token_count}")
        lines.append("Output:")
        return "\n".join(lines)

    def _shown(self, policy: Policy) -> str:
        text = self.collected
        shown = truncate(text, policy.budget, policy.unit)
        omitted = self.buffer.omitted
        marker = omission_marker(omitted)
        if shown == text:
            return shown if not omitted or marker in shown else f"{marker}\n{shown}"
        if omitted:
            moved = "" if marker in shown else f"{marker}\n"
            return f"{_warning(self.original_token_count)}{moved}\n{shown}"
        lines = text.count("\n") + (not text.endswith("\n"))
        return f"{_warning(tokens(len(text.encode())))}Total output lines: {lines}\n\n{shown}"


def _warning(count: int) -> str:
    return f"Warning: truncated output (original token count: {count})\n"
