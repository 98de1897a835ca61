"""Every event and every item of the stream, as immutable values.

Statuses and kinds are plain strings: a value nobody knew when this was written passes through and counts
as neither success nor failure. Everything that was read keeps `raw`, the JSON object it came from.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final, Literal

from msgspec import Struct, field

__all__ = [
    "ITEM_KINDS",
    "PHASES",
    "AgentMessage",
    "AgentState",
    "CollabToolCall",
    "CommandExecution",
    "ErrorEvent",
    "ErrorItem",
    "Event",
    "Failure",
    "FileChange",
    "FileEdit",
    "Item",
    "ItemEvent",
    "KnownItem",
    "MalformedEvent",
    "McpResult",
    "McpToolCall",
    "Noise",
    "Phase",
    "Reasoning",
    "Record",
    "SearchAction",
    "ThreadStarted",
    "TodoList",
    "TodoStep",
    "TurnCompleted",
    "TurnFailed",
    "TurnStarted",
    "UnknownEvent",
    "UnknownItem",
    "Usage",
    "WebSearch",
    "status_of",
    "succeeded",
]

IN_PROGRESS: Final = "in_progress"
COMPLETED: Final = "completed"
"""Success, not merely the end."""
FAILED: Final = "failed"
DECLINED: Final = "declined"
"""Refused before it ran; commands only."""

Phase = Literal["started", "updated", "completed"]
PHASES: Final[tuple[Phase, ...]] = ("started", "updated", "completed")


class _Value(Struct, frozen=True, kw_only=True):
    pass


# Items -------------------------------------------------------------------------------------------


class _Item(_Value, frozen=True, kw_only=True):
    id: str = ""
    """Unique within one run of the producer; empty until a writer has given it one."""
    raw: dict[str, Any] = field(default_factory=dict)


class AgentMessage(_Item, frozen=True, kw_only=True):
    """Something the model says, as markdown. The last one of a completed turn is its answer."""

    type: ClassVar[str] = "agent_message"
    text: str
    phase: str | None = None
    """`commentary` or `final_answer`, where a producer says so."""


class Reasoning(_Item, frozen=True, kw_only=True):
    """A summary of what the model thought."""

    type: ClassVar[str] = "reasoning"
    text: str


class CommandExecution(_Item, frozen=True, kw_only=True):
    """A command. `exit_code` is null until it has ended, -1 if it never started, 128 + N after signal N."""

    type: ClassVar[str] = "command_execution"
    command: str
    aggregated_output: str
    exit_code: int | None = None
    status: str


class FileEdit(_Value, frozen=True, kw_only=True):
    """One path of a file change; `kind` is `add`, `delete` or `update`."""

    path: str
    kind: str


class FileChange(_Item, frozen=True, kw_only=True):
    """A patch. `failed` does not promise that nothing was written."""

    type: ClassVar[str] = "file_change"
    changes: tuple[FileEdit, ...]
    status: str


class McpResult(_Value, frozen=True, kw_only=True):
    """What a tool answered: content blocks as the server sent them."""

    content: tuple[Any, ...]
    meta: Any = field(default=None, name="_meta")
    structured_content: Any = None


class Failure(_Value, frozen=True, kw_only=True):
    """Why something failed."""

    message: str


class McpToolCall(_Item, frozen=True, kw_only=True):
    """A call of a tool server. `status` decides: a failed call may have a result and no error."""

    type: ClassVar[str] = "mcp_tool_call"
    server: str
    tool: str
    arguments: Any = None
    result: McpResult | None = None
    error: Failure | None = None
    status: str


class AgentState(_Value, frozen=True, kw_only=True):
    """How another agent is."""

    status: str
    message: str | None = None


class CollabToolCall(_Item, frozen=True, kw_only=True):
    """A word to another agent: `spawn_agent`, `send_input`, `wait` or `close_agent`."""

    type: ClassVar[str] = "collab_tool_call"
    tool: str
    sender_thread_id: str
    receiver_thread_ids: tuple[str, ...]
    prompt: str | None = None
    agents_states: dict[str, AgentState]
    status: str


class SearchAction(_Value, frozen=True, kw_only=True):
    """What a web search did: `search`, `open_page`, `find_in_page` or `other`."""

    type: str = "other"
    query: str | None = None
    queries: tuple[str, ...] | None = None
    url: str | None = None
    pattern: str | None = None


class WebSearch(_Item, frozen=True, kw_only=True):
    """A search by the model's provider. `source_id` is the provider's own id for it."""

    type: ClassVar[str] = "web_search"
    query: str
    action: SearchAction = SearchAction()
    source_id: str | None = None


class TodoStep(_Value, frozen=True, kw_only=True):
    """A line of a plan."""

    text: str
    completed: bool


class TodoList(_Item, frozen=True, kw_only=True):
    """The plan. Its `item.completed` says that the turn is over, not that the steps are done."""

    type: ClassVar[str] = "todo_list"
    items: tuple[TodoStep, ...]


class ErrorItem(_Item, frozen=True, kw_only=True):
    """A warning: it never ends the turn."""

    type: ClassVar[str] = "error"
    message: str


class UnknownItem(_Item, frozen=True, kw_only=True):
    """An item of a type this version does not know, kept as it came."""

    type: str


KnownItem = (
    AgentMessage
    | Reasoning
    | CommandExecution
    | FileChange
    | McpToolCall
    | CollabToolCall
    | WebSearch
    | TodoList
    | ErrorItem
)
Item = KnownItem | UnknownItem

ITEM_KINDS: Final[dict[str, type[KnownItem]]] = {
    kind.type: kind
    for kind in (
        AgentMessage,
        Reasoning,
        CommandExecution,
        FileChange,
        McpToolCall,
        CollabToolCall,
        WebSearch,
        TodoList,
        ErrorItem,
    )
}


def status_of(item: Item) -> str | None:
    """The status of an item, None for types that have none."""
    if isinstance(item, CommandExecution | FileChange | McpToolCall | CollabToolCall):
        return item.status
    if isinstance(item, UnknownItem):
        status = item.raw.get("status")
        return status if isinstance(status, str) else None
    return None


def succeeded(item: Item) -> bool | None:
    """Whether a completed item went well; None where its status is one that nobody knows."""
    if isinstance(item, CommandExecution) and item.exit_code not in (None, 0):
        return False
    status = status_of(item)
    if status is None or status == COMPLETED:
        return True
    return False if status in (FAILED, DECLINED) else None


# Events ------------------------------------------------------------------------------------------


class Usage(_Value, frozen=True, kw_only=True):
    """Tokens of the whole thread so far. Cached ones are part of the input, reasoning of the output."""

    input_tokens: int = 0
    cached_input_tokens: int = 0
    cache_write_input_tokens: int = 0
    output_tokens: int = 0
    reasoning_output_tokens: int = 0

    def since(self, before: Usage) -> Usage:
        """What was added after an earlier total."""
        return Usage(
            **{name: max(0, getattr(self, name) - getattr(before, name)) for name in self.__struct_fields__}
        )


class _Event(_Value, frozen=True, kw_only=True):
    raw: dict[str, Any] = field(default_factory=dict)
    line: int = 0
    """Number of the line it was read from, the first being 1."""


class ThreadStarted(_Event, frozen=True, kw_only=True):
    """The first line of a run: also of one that resumes a thread, under the same id."""

    type: ClassVar[str] = "thread.started"
    thread_id: str


class TurnStarted(_Event, frozen=True, kw_only=True):
    """The model gets to work."""

    type: ClassVar[str] = "turn.started"


class TurnCompleted(_Event, frozen=True, kw_only=True):
    """The turn ran to its end, which does not mean that its commands succeeded."""

    type: ClassVar[str] = "turn.completed"
    usage: Usage = Usage()


class TurnFailed(_Event, frozen=True, kw_only=True):
    """The turn was given up."""

    type: ClassVar[str] = "turn.failed"
    error: Failure


class ErrorEvent(_Event, frozen=True, kw_only=True):
    """A notice that something is tried again, or what will make the turn fail; notice.py tells which."""

    type: ClassVar[str] = "error"
    message: str


class ItemEvent(_Event, frozen=True, kw_only=True):
    """A whole snapshot of an item."""

    phase: Phase
    item: Item

    @property
    def type(self) -> str:
        return f"item.{self.phase}"


class UnknownEvent(_Event, frozen=True, kw_only=True):
    """An event of a type this version does not know."""

    type: str


class MalformedEvent(_Event, frozen=True, kw_only=True):
    """An event of a known type that lacks something; it changes no state."""

    type: str
    reason: str


class Noise(_Value, frozen=True, kw_only=True):
    """A line that is no event: a log line, half a line, an over-long one."""

    line: int
    text: str
    """Its beginning."""
    reason: str


Event = ThreadStarted | TurnStarted | TurnCompleted | TurnFailed | ErrorEvent | ItemEvent
Record = Event | UnknownEvent | MalformedEvent | Noise
