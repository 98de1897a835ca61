"""Items in few words: what every renderer says of a command, a patch, a tool call, a search, a plan.

Everything returned here is fit for a terminal.
"""

from __future__ import annotations

import json
import os.path
import re
import shlex
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from .model import (
    COMPLETED,
    AgentMessage,
    CollabToolCall,
    CommandExecution,
    ErrorItem,
    FileChange,
    Item,
    McpToolCall,
    Reasoning,
    TodoList,
    Usage,
    WebSearch,
    succeeded,
)
from .notice import Notice
from .printable import cut, one_line, printable

__all__ = [
    "agent_call",
    "agent_states",
    "command_result",
    "command_script",
    "compact",
    "content_blocks",
    "duration",
    "edits",
    "failure_reason",
    "first_line",
    "notice_text",
    "plan",
    "search",
    "short_form",
    "shown_path",
    "size",
    "tokens",
    "truncated",
]

ARGUMENT_COLUMNS: Final = 120
"""How much of a tool call's arguments is shown."""

_SHELLS: Final = frozenset({"sh", "bash", "zsh", "dash"})
_SHELL_FLAGS: Final = frozenset({"-c", "-lc"})
_LONGEST_SPLIT: Final = 64 * 1024
"""Splitting a longer command word by word takes seconds; of its script, only this much is shown anyway."""

_LONG_SCRIPT: Final = re.compile(r"([^\s'\"\\]+) (-l?c) '")
_QUOTE: Final = "'\"'\"'"
"""A single quote within single quotes, as `shlex.join` writes it."""

_NOT_STARTED: Final = ("Failed to create unified exec process", "execution error:")
"""How the output begins of a command that could not be spawned, today's and older ones."""

_OMITTED: Final = re.compile(r"^\.\.\. [0-9]+ bytes omitted \.\.\.$", re.MULTILINE)
_EDIT_LETTERS: Final = {"add": "A", "update": "M", "delete": "D"}


# Commands ----------------------------------------------------------------------------------------


def command_script(command: str) -> str:
    """The script in `/bin/bash -lc 'SCRIPT'`, or the command as it is; on one line."""
    if len(command) <= _LONGEST_SPLIT:
        try:
            words = shlex.split(command)
        except ValueError:
            words = []
        if len(words) == 3 and os.path.basename(words[0]) in _SHELLS and words[1] in _SHELL_FLAGS:
            return one_line(words[2])
    elif (script := _long_script(command)) is not None:
        return one_line(script)
    return one_line(command[:_LONGEST_SPLIT])


def _long_script(command: str) -> str | None:
    """The beginning of the one quoted word that a shell is given; None if it is something else."""
    found = _LONG_SCRIPT.match(command)
    if found is None or os.path.basename(found[1]) not in _SHELLS:
        return None
    body = command[found.end() : -1]
    if not command.endswith("'") or "'" in body.replace(_QUOTE, ""):
        return None
    return body.replace(_QUOTE, "'")[:_LONGEST_SPLIT]


def command_result(item: CommandExecution) -> str:
    """`ok`, `exit 3`, `exit 137 (signal 9)`, `not started`, `lost, no exit code`, `declined`."""
    code = item.exit_code
    if item.status == "declined":
        return "declined"
    if code == -1:
        # The wire has one number for both; the reason, which comes last of the output, tells them apart.
        return "not started" if item.aggregated_output.startswith(_NOT_STARTED) else "lost, no exit code"
    if code is not None and code != 0:
        return f"exit {code} (signal {code - 128})" if 129 <= code <= 192 else f"exit {code}"
    return "ok" if item.status == COMPLETED else one_line(item.status)


def truncated(output: str) -> bool:
    """Whether the producer left something out."""
    return output.endswith("\n...(truncated)") or _OMITTED.search(output) is not None


# Files -------------------------------------------------------------------------------------------


def shown_path(path: str, cwd: str | None) -> str:
    """Relative to `cwd` if it is inside."""
    if cwd is not None:
        inside = path.removeprefix(cwd.rstrip("/") + "/")
        if inside != path and inside:
            path = inside
    return one_line(path)


def edits(item: FileChange, cwd: str | None) -> str:
    """`add docs/new.md, update src/app.py`."""
    return ", ".join(f"{one_line(edit.kind)} {shown_path(edit.path, cwd)}" for edit in item.changes)


def edit_letter(kind: str) -> str:
    """`A`, `M`, `D`."""
    return _EDIT_LETTERS.get(kind, "?")


# Tools -------------------------------------------------------------------------------------------


def compact(value: Any, columns: int = ARGUMENT_COLUMNS) -> str:
    """A JSON value on one line, cut."""
    return cut(one_line(json.dumps(value, ensure_ascii=False, separators=(",", ":"))), columns)


def first_line(text: str) -> str:
    """The first line that says something."""
    return next((line.strip() for line in printable(text).split("\n") if line.strip()), "")


def failure_reason(item: McpToolCall) -> str:
    """Why a tool call failed: its error, or what the tool said."""
    if item.error is not None:
        return first_line(item.error.message)
    for block in item.result.content if item.result is not None else ():
        if isinstance(block, Mapping) and block.get("type") == "text" and isinstance(block.get("text"), str):
            return first_line(block["text"])
    return "no reason given"


def content_blocks(item: McpToolCall) -> str:
    """`2 text, image/png 70 B, link README.md`; never the data itself."""
    if item.result is None:
        return ""
    texts = 0
    others: list[str] = []
    for block in item.result.content:
        described = _block(block)
        if described is None:
            texts += 1
        else:
            others.append(described)
    return ", ".join([f"{texts} text"] * (texts > 0) + others)


def _block(block: Any) -> str | None:
    """One content block; None for text."""
    if not isinstance(block, Mapping):
        return "?"
    kind = block.get("type")
    if kind == "text":
        return None
    if kind in ("image", "audio"):
        return f"{_word(block.get('mimeType'), str(kind))} {size(_decoded_size(block.get('data')))}"
    if kind == "resource_link":
        return f"link {_word(block.get('name'), '?')}"
    resource = block.get("resource")
    if kind == "resource" and isinstance(resource, Mapping):
        text = resource.get("text")
        count = len(text.encode("utf-8", "replace")) if isinstance(text, str) else None
        count = _decoded_size(resource.get("blob")) if count is None else count
        return f"resource {_word(resource.get('uri'), '?')} {size(count)}"
    return _word(kind, "?")


def _word(value: Any, otherwise: str) -> str:
    return cut(one_line(value), ARGUMENT_COLUMNS) if isinstance(value, str) and value else otherwise


def _decoded_size(data: Any) -> int:
    """Bytes in base64 text, without decoding it."""
    if not isinstance(data, str):
        return 0
    return len(data) * 3 // 4 - data[-2:].count("=")


def size(count: int) -> str:
    """Bytes for people."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


# Agents, searches, plans -------------------------------------------------------------------------


def agent_call(item: CollabToolCall) -> str:
    """What another agent is told."""
    prompt = one_line(item.prompt or "")
    names = ", ".join(_short_id(name) for name in item.receiver_thread_ids)
    match item.tool:
        case "spawn_agent":
            return f"agent spawn: {prompt}"
        case "send_input":
            return f"agent input → {names}: {prompt}"
        case "wait":
            return f"agent wait ({len(item.receiver_thread_ids)})"
        case "close_agent":
            return f"agent close {names}"
    return f"agent {one_line(item.tool)} {names}".rstrip()


def agent_states(item: CollabToolCall) -> list[str]:
    """`ID: STATUS MESSAGE` for every agent."""
    return [
        f"{_short_id(name)}: {one_line(state.status)} {one_line(state.message or '')}".rstrip()
        for name, state in item.agents_states.items()
    ]


def _short_id(name: str) -> str:
    return one_line(name)[-8:]


def search(item: WebSearch) -> str:
    """`search: Q (+N more)`, `open: URL`, `find: PATTERN in URL`."""
    action = item.action
    if action.type == "open_page" and action.url:
        return f"open: {one_line(action.url)}"
    if action.type == "find_in_page" and action.pattern is not None:
        return f"find: {one_line(action.pattern)} in {one_line(action.url or '?')}"
    queries = [query for query in action.queries or () if query]
    query = action.query or (queries[0] if queries else item.query)
    more = len([other for other in queries if other != query])
    return f"search: {one_line(query)}".removesuffix(": ") + (f" (+{more} more)" if more else "")


def plan(item: TodoList) -> tuple[str, list[str]]:
    """`plan D/T`, and a line for every step."""
    done = sum(step.completed for step in item.items)
    lines = [f"[{'x' if step.completed else ' '}] {one_line(step.text)}" for step in item.items]
    return f"plan {done}/{len(item.items)}", lines


# The rest ----------------------------------------------------------------------------------------


def notice_text(notice: Notice) -> str:
    """`retrying 2/5` or `waiting for network`."""
    return "waiting for network" if notice.attempt is None else f"retrying {notice.attempt}/{notice.max}"


def tokens(usage: Usage) -> str:
    """`tokens in 15,000 (cached 9,500, cache write 512) out 521 (reasoning 104)`."""
    ins = Counter({"cached": usage.cached_input_tokens, "cache write": usage.cache_write_input_tokens})
    inside = ", ".join(f"{name} {count:,}" for name, count in ins.items() if count)
    text = f"tokens in {usage.input_tokens:,}" + (f" ({inside})" if inside else "")
    text += f" out {usage.output_tokens:,}"
    return text + (f" (reasoning {usage.reasoning_output_tokens:,})" if usage.reasoning_output_tokens else "")


def duration(seconds: float) -> str:
    """`0.8s`, `42s`, `3m 05s`, `2h 03m`."""
    seconds = max(seconds, 0.0)
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m {rest:02}s" if minutes < 60 else f"{minutes // 60}h {minutes % 60:02}m"


def short_form(item: Item, cwd: str | None = None) -> str:
    """An item in a few words, for lists of what goes on or did not finish."""
    match item:
        case CommandExecution():
            return f"$ {command_script(item.command)}"
        case FileChange():
            return f"edit: {edits(item, cwd)}"
        case McpToolCall():
            return f"tool {one_line(item.server)}/{one_line(item.tool)}"
        case CollabToolCall():
            return agent_call(item)
        case WebSearch():
            return search(item)
        case TodoList():
            return plan(item)[0]
        case AgentMessage() | Reasoning():
            return first_line(item.text)
        case ErrorItem():
            return f"warning: {first_line(item.message)}"
    return one_line(item.type)


def went_well(item: Item) -> bool:
    """Whether to say nothing bad of it."""
    return succeeded(item) is not False
