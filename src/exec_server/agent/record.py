"""What a rollout is made of: one JSON object per line, the first of them the session's own. Pure.

A line that was read is kept as it was read: whatever a newer program put into it is there when it is written
again. The values here are views of such lines, not copies of what we understand of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from .. import log
from ..environments.roots import BadRoot, SelectedRoot

__all__ = ["SESSION_META", "BadRecord", "HistoryBase", "Record", "SessionMeta"]

SESSION_META: Final = "session_meta"

PAGINATED: Final = "paginated"
"""The mode in which every line has its number, counted on by forks."""


MAX_DEPTH: Final = 100
"""How deep a record may be nested: the reference reads 128 levels, and skips lines that have more."""


class BadRecord(ValueError):
    """A line that is no record; says why."""


class Record:
    """A line. `value` is all of it, to look at and not to change."""

    __slots__ = ("line", "value")

    def __init__(self, value: dict[str, Any], line: bytes | None = None) -> None:
        """From what was read; without its bytes, something to write, or BadRecord if JSON cannot carry it."""
        self.value = value
        self.line = _encode(value) if line is None else line
        """The bytes without the newline."""

    @classmethod
    def decode(cls, line: bytes) -> Record:
        """A line as it was written; BadRecord if it is not one, for example cut off."""
        try:
            value = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadRecord(f"not JSON: {error}") from None
        if not isinstance(value, dict) or not isinstance(value.get("type"), str):
            raise BadRecord("not an object with a `type`")
        return cls(value, line)

    @property
    def type(self) -> str:
        """`response_item`, `event_msg` and so on; there may be kinds that nobody here knows."""
        return str(self.value["type"])

    @property
    def payload(self) -> dict[str, Any]:
        """What it is about; empty where it is not an object."""
        payload = self.value.get("payload")
        return payload if isinstance(payload, dict) else {}

    @property
    def ordinal(self) -> int | None:
        """Its number in the history; None in threads that do not count."""
        ordinal = self.value.get("ordinal")
        return ordinal if type(ordinal) is int else None

    def numbered(self, ordinal: int | None) -> Record:
        """The same with another number, or with none."""
        value = {name: member for name, member in self.value.items() if name != "ordinal"}
        if ordinal is not None:
            first = {"timestamp": value.pop("timestamp")} if "timestamp" in value else {}
            value = {**first, "ordinal": ordinal, **value}
        return Record(value, msgspec.json.encode(value))  # what JSON has carried once, it carries again

    def __repr__(self) -> str:
        return f"Record({self.ordinal}, {self.type!r})"


def _encode(value: dict[str, Any]) -> bytes:
    _check(value, "", 1)
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError as error:
        # Half a character, say of a file name that is not UTF-8.
        raise BadRecord(f"text that is not Unicode cannot be kept: {error}") from None


def _check(value: Any, where: str, depth: int) -> None:
    """Refuse what would be read back as something else than what was given."""
    if value is None or isinstance(value, str | bool):
        return
    if isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise BadRecord(f"{where or 'the record'} is a number that JSON readers do not keep: {value}")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise BadRecord(f"{where or 'the record'} is {value}, which JSON does not have")
    elif depth > MAX_DEPTH:
        raise BadRecord(f"nested more than {MAX_DEPTH} levels deep")
    elif isinstance(value, Mapping):
        for name, member in value.items():
            if not isinstance(name, str):
                raise BadRecord(f"{where or 'the record'} has {name!r} for a name; JSON has only text")
            _check(member, f"{where}.{name}" if where else name, depth + 1)
    elif isinstance(value, list | tuple):
        for place, member in enumerate(value):
            _check(member, f"{where}[{place}]", depth + 1)
    else:
        raise BadRecord(
            f"{where or 'the record'} is of type {type(value).__name__}, which JSON does not have"
        )


class HistoryBase(msgspec.Struct, frozen=True):
    """The part of another thread's history that comes before one's own."""

    thread_id: str
    end_ordinal_exclusive: int
    end_byte_offset: int | None = None


class SessionMeta:
    """The first record of a thread: who it is, where it began, and which roots it has selected."""

    __slots__ = ("payload",)

    def __init__(self, payload: Mapping[str, Any]) -> None:
        """From what was written; BadRecord without an id."""
        if not isinstance(payload.get("id"), str) or not payload["id"]:
            raise BadRecord("a session_meta without an `id`")
        self.payload: Mapping[str, Any] = payload

    @classmethod
    def new(
        cls,
        thread_id: str,
        *,
        timestamp: str,
        cwd: str,
        originator: str,
        cli_version: str,
        source: str,
        model_provider: str | None = None,
        roots: Sequence[SelectedRoot] = (),
        more: Mapping[str, Any] | None = None,
    ) -> SessionMeta:
        """One for a new thread. `more` are members of its own, e.g. `base_instructions`."""
        payload: dict[str, Any] = {
            "session_id": thread_id,
            "id": thread_id,
            "timestamp": timestamp,
            "cwd": cwd,
            "originator": originator,
            "cli_version": cli_version,
            "source": source,
            "model_provider": model_provider,
            "history_mode": PAGINATED,
            **(more or {}),
        }
        if roots:
            payload["selected_capability_roots"] = [root.to_json() for root in roots]
        return cls(payload)

    @property
    def id(self) -> str:
        """The thread's id."""
        return str(self.payload["id"])

    @property
    def session_id(self) -> str:
        """The id of the session the thread belongs to, which older records do not tell apart."""
        return self._text("session_id") or self.id

    @property
    def timestamp(self) -> str:
        return self._text("timestamp") or ""

    @property
    def cwd(self) -> str:
        return self._text("cwd") or ""

    @property
    def source(self) -> str:
        """What started it: `exec`, `cli`, `vscode`, or an object that says more, as its first word."""
        source = self.payload.get("source", "")
        if isinstance(source, dict):
            return next(iter(source), "")
        return source if isinstance(source, str) else ""

    @property
    def forked_from_id(self) -> str | None:
        return self._text("forked_from_id")

    @property
    def parent_thread_id(self) -> str | None:
        """The thread that started this one to work for it."""
        return self._text("parent_thread_id")

    @property
    def paginated(self) -> bool:
        """Whether the lines are numbered; those of older threads are not."""
        return self.payload.get("history_mode") == PAGINATED

    @property
    def history_base(self) -> HistoryBase | None:
        """The history that comes before this thread's own lines, in another thread's file."""
        value = self.payload.get("history_base")
        if value is None:
            return None
        try:
            return msgspec.convert(value, HistoryBase)
        except msgspec.ValidationError as error:
            raise BadRecord(f"a `history_base` that is not one: {error}") from None

    @property
    def selected_capability_roots(self) -> list[SelectedRoot]:
        """What the thread has selected; nothing in records that are older than selections.

        A selection of a kind that nobody here knows is left out, and stays in the record.
        """
        roots, wrong = self._roots()
        for text in wrong:
            log.warning("selected capability root is not understood", thread=self.id, error=text)
        return roots

    @property
    def unreadable_roots(self) -> int:
        """How many selections `selected_capability_roots` leaves out."""
        return len(self._roots()[1])

    def _roots(self) -> tuple[list[SelectedRoot], list[str]]:
        """What is selected, and what is wrong with the rest."""
        roots: list[SelectedRoot] = []
        wrong: list[str] = []
        written = self.payload.get("selected_capability_roots") or []
        if not isinstance(written, list):
            return [], [f"`selected_capability_roots` is not a list: {written!r}"]
        for value in written:
            try:
                roots.append(SelectedRoot.from_json(value))
            except BadRoot as error:
                wrong.append(str(error))
        return roots, wrong

    def _text(self, name: str) -> str | None:
        value = self.payload.get(name)
        return value if isinstance(value, str) else None
