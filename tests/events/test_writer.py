"""Writing the stream: what is promised is kept, and what would break a promise is refused."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from exec_server.events.check import check
from exec_server.events.encoding import encode, event_value
from exec_server.events.model import (
    AgentMessage,
    AgentState,
    CollabToolCall,
    CommandExecution,
    ErrorItem,
    Failure,
    FileChange,
    FileEdit,
    ItemEvent,
    KnownItem,
    McpResult,
    McpToolCall,
    Reasoning,
    SearchAction,
    ThreadStarted,
    TodoList,
    TodoStep,
    TurnCompleted,
    TurnFailed,
    TurnStarted,
    Usage,
    WebSearch,
)
from exec_server.events.notice import Notice
from exec_server.events.reader import parse_line, read_events
from exec_server.events.truncation import Truncation
from exec_server.events.writer import EventWriter, Misuse

# Any text but halves of characters, which do not survive on purpose.
TEXT = st.text(st.characters(exclude_categories=("Cs",)))
COUNT = st.integers(0, 2**53)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
NOT_NULL = JSON.filter(lambda value: value is not None)
STATUS = st.sampled_from(["in_progress", "completed", "failed"])

ITEMS: st.SearchStrategy[KnownItem] = st.one_of(
    st.builds(AgentMessage, id=TEXT, text=TEXT, phase=st.none() | st.just("final_answer")),
    st.builds(Reasoning, id=TEXT, text=TEXT),
    st.builds(
        CommandExecution,
        id=TEXT,
        command=TEXT,
        aggregated_output=TEXT,
        exit_code=st.none() | st.integers(-(2**31), 2**31 - 1),
        status=STATUS | st.just("declined"),
    ),
    st.builds(
        FileChange,
        id=TEXT,
        changes=st.lists(st.builds(FileEdit, path=TEXT, kind=TEXT), max_size=3).map(tuple),
        status=STATUS,
    ),
    st.builds(
        McpToolCall,
        id=TEXT,
        server=TEXT,
        tool=TEXT,
        arguments=JSON,
        result=st.none()
        | st.builds(
            McpResult,
            content=st.lists(JSON, max_size=3).map(tuple),
            meta=st.none() | NOT_NULL,
            structured_content=JSON,
        ),
        error=st.none() | st.builds(Failure, message=TEXT),
        status=STATUS,
    ),
    st.builds(
        CollabToolCall,
        id=TEXT,
        tool=TEXT,
        sender_thread_id=TEXT,
        receiver_thread_ids=st.lists(TEXT, max_size=2).map(tuple),
        prompt=st.none() | TEXT,
        agents_states=st.dictionaries(
            TEXT, st.builds(AgentState, status=TEXT, message=st.none() | TEXT), max_size=2
        ),
        status=STATUS,
    ),
    st.builds(
        WebSearch,
        id=TEXT,
        query=TEXT,
        action=st.builds(
            SearchAction,
            type=TEXT,
            query=st.none() | TEXT,
            queries=st.none() | st.lists(TEXT, max_size=2).map(tuple),
            url=st.none() | TEXT,
            pattern=st.none() | TEXT,
        ),
        source_id=st.none() | TEXT,
    ),
    st.builds(
        TodoList,
        id=TEXT,
        items=st.lists(st.builds(TodoStep, text=TEXT, completed=st.booleans()), max_size=3).map(tuple),
    ),
    st.builds(ErrorItem, id=TEXT, message=TEXT),
)
EVENTS = st.one_of(
    st.builds(ThreadStarted, thread_id=TEXT.filter(bool)),
    st.just(TurnStarted()),
    st.builds(TurnCompleted, usage=st.builds(Usage, *[], **dict.fromkeys(Usage.__struct_fields__, COUNT))),
    st.builds(TurnFailed, error=st.builds(Failure, message=TEXT)),
    st.builds(ItemEvent, phase=st.sampled_from(["started", "updated", "completed"]), item=ITEMS),
)


def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), pairs
    return dict(pairs)


@given(EVENTS)
def test_what_was_written_is_read(event: Any) -> None:
    line = encode(event_value(event))
    assert line.endswith(b"\n")
    assert len(line.decode().splitlines()) == 1, "even for readers that break lines everywhere"
    read = parse_line(line[:-1], strict=True)
    assert event_value(read) == event_value(event)  # type: ignore[arg-type]
    assert read.raw == json.loads(line, object_pairs_hook=refuse_duplicates)  # type: ignore[union-attr]
    if isinstance(event, ItemEvent):
        assert isinstance(read, ItemEvent)
        for name in event.item.__struct_fields__:
            if name != "raw":
                assert getattr(read.item, name) == getattr(event.item, name)


def test_the_bytes_of_a_line() -> None:
    item = CommandExecution(
        id="item_0", command="é\u2028\x85", aggregated_output="\x00\n", exit_code=0, status="completed"
    )
    event = ItemEvent(phase="completed", item=item)
    assert (
        encode(event_value(event))
        == (
            '{"type":"item.completed","item":{"id":"item_0","type":"command_execution","command":"é\\u2028\\u0085",'
            '"aggregated_output":"\\u0000\\n","exit_code":0,"status":"completed"}}\n'
        ).encode()
    )


def test_halves_of_characters_and_numbers_that_are_none() -> None:
    assert (
        encode({"a" + chr(0xD800 + number): ["\udfff"] for number in range(2)})
        == '{"a\ufffd":["\ufffd"]}\n'.encode()
    )
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="JSON compliant"):
            encode({"a": value})


# The writer ----------------------------------------------------------------------------------------------

RUNNING = CommandExecution(command="sleep 9", aggregated_output="", status="in_progress")
ENDED = CommandExecution(command="sleep 9", aggregated_output="o", exit_code=0, status="completed")
PLAN = TodoList(items=(TodoStep(text="s", completed=False),))
EDIT = FileChange(changes=(FileEdit(path="/a", kind="add"),), status="in_progress")


def begun(**options: Any) -> tuple[EventWriter, io.BytesIO]:
    file = io.BytesIO()
    writer = EventWriter(file, **options)
    writer.thread_started("t")
    writer.turn_started()
    return writer, file


def written(file: io.BytesIO) -> list[dict[str, Any]]:
    return [json.loads(line, object_pairs_hook=refuse_duplicates) for line in file.getvalue().splitlines()]


def test_a_turn() -> None:
    writer, file = begun()
    command = writer.started(RUNNING)
    writer.todo(PLAN)
    writer.todo(PLAN)
    writer.notice(Notice(1, 5, "gone"))
    writer.completed(ENDED, command)
    writer.completed(AgentMessage(text="hi"))
    writer.turn_completed(Usage(input_tokens=5))
    lines = written(file)
    assert [(line["type"], line.get("item", {}).get("id")) for line in lines] == [
        ("thread.started", None),
        ("turn.started", None),
        ("item.started", "item_0"),
        ("item.started", "item_1"),
        ("item.updated", "item_1"),
        ("error", None),
        ("item.completed", "item_0"),
        ("item.completed", "item_2"),
        ("item.completed", "item_1"),
        ("turn.completed", None),
    ]
    assert lines[5] == {"type": "error", "message": "Reconnecting... 1/5 (gone)"}
    assert not list(check(read_events([file.getvalue()]), ours=True))


def test_nothing_stays_open() -> None:
    writer, file = begun()
    writer.todo(PLAN)
    for item in (RUNNING, EDIT, WebSearch(query="")):
        writer.started(item)
    writer.fail("the machine is gone")
    assert [(line["type"], line.get("item", line).get("status")) for line in written(file)[6:]] == [
        ("error", None),
        ("item.completed", "failed"),
        ("item.completed", "failed"),
        ("item.completed", None),
        ("item.completed", None),
        ("turn.failed", None),
    ]
    assert written(file)[7]["item"]["exit_code"] is None
    assert written(file)[10]["item"]["type"] == "todo_list", "the plan comes last"
    assert not list(check(read_events([file.getvalue()]), ours=True))


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (ENDED, "starts `in_progress`"),
        (AgentMessage(text="x"), "no beginning"),
        (FileChange(changes=(FileEdit(path="a", kind="add"),), status="in_progress"), "not absolute"),
        (FileChange(changes=(FileEdit(path="/a", kind="grow"),), status="in_progress"), "no kind"),
        (
            FileChange(
                changes=(FileEdit(path="/b", kind="add"), FileEdit(path="/a", kind="add")),
                status="in_progress",
            ),
            "sorted",
        ),
        (
            CommandExecution(command="", aggregated_output="", exit_code=1, status="in_progress"),
            "no exit code",
        ),
    ],
)
def test_what_cannot_be_started(item: KnownItem, text: str) -> None:
    writer, file = begun()
    before = file.getvalue()
    with pytest.raises(Misuse, match=text):
        writer.started(item)
    assert file.getvalue() == before
    assert writer.started(RUNNING) == "item_0", "and takes no id"


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (
            CommandExecution(command="", aggregated_output="", exit_code=1, status="completed"),
            "means success",
        ),
        (CommandExecution(command="", aggregated_output="", exit_code=2**31, status="failed"), "32 bits"),
        (CommandExecution(command="", aggregated_output="", status="odd"), "no status"),
        (RUNNING, "not `in_progress`"),
        (EDIT, "does not become"),
    ],
)
def test_what_cannot_be_completed(item: KnownItem, text: str) -> None:
    writer, _ = begun()
    command = writer.started(RUNNING)
    with pytest.raises(Misuse, match=text):
        writer.completed(item, command)
    writer.completed(ENDED, command)
    with pytest.raises(Misuse, match="not open"):
        writer.completed(ENDED, command)


def test_the_order_of_things() -> None:
    writer = EventWriter(io.BytesIO())
    for call in (
        writer.turn_started,
        lambda: writer.completed(ErrorItem(message="w")),
        lambda: writer.fail("x"),
    ):
        with pytest.raises(Misuse):
            call()
    writer.thread_started("t")
    writer.completed(ErrorItem(message="a warning before the first turn"))
    for call in (
        lambda: writer.thread_started("t"),
        lambda: writer.started(RUNNING),
        lambda: writer.completed(AgentMessage(text="x")),
        lambda: writer.turn_completed(Usage()),
    ):
        with pytest.raises(Misuse):
            call()
    writer.turn_started()
    with pytest.raises(Misuse):
        writer.turn_started()
    writer.started(PLAN)
    for call in (
        lambda: writer.started(PLAN),
        lambda: writer.completed(ENDED),
        lambda: writer.completed(Reasoning(text=" ")),
    ):
        with pytest.raises(Misuse):
            call()
    writer.turn_completed(Usage(input_tokens=2))
    with pytest.raises(Misuse):
        writer.completed(ErrorItem(message="too late"))
    writer.turn_started()
    with pytest.raises(Misuse, match="cannot become smaller"):
        writer.turn_completed(Usage(input_tokens=1))


def test_output_is_cut() -> None:
    writer, file = begun(truncation=Truncation("prefix", 100))
    command = writer.started(RUNNING)
    writer.completed(
        CommandExecution(command="c", aggregated_output="x" * 200, exit_code=0, status="completed"), command
    )
    assert written(file)[-1]["item"]["aggregated_output"] == "x" * 85 + "\n...(truncated)"


def test_snapshots_of_a_running_command_are_rare_and_only_on_request() -> None:
    writer, file = begun()
    assert not writer.updated(writer.started(RUNNING), RUNNING)
    now = [0.0]
    writer, file = begun(live_output=True, clock=lambda: now[0])
    command = writer.started(RUNNING)
    seen = []
    for _ in range(10):
        seen.append(writer.updated(command, RUNNING))
        now[0] += 0.125
    assert seen == [True, False] * 5
    assert len(written(file)) == 3 + 5


def test_extras_only_on_request() -> None:
    now = [100.0]
    writer, file = begun(ext=True, clock=lambda: now[0], now=lambda: 1_700_000_000.5)
    command = writer.started(RUNNING, ext={"cwd": "/tmp"})
    now[0] += 1.5
    writer.completed(ENDED, command)
    writer.notice(Notice(2, 5, None))
    writer.turn_failed("interrupted", ext={"cause": "interrupted"})
    lines = written(file)
    assert lines[0]["ext"] == {"ts": "2023-11-14T22:13:20.500Z"}
    assert lines[2]["ext"]["cwd"] == "/tmp"
    assert lines[3]["ext"]["duration_ms"] == 1500
    assert lines[4]["ext"] | {"ts": ""} == {"ts": "", "will_retry": True, "attempt": 2, "max_attempts": 5}
    assert lines[5]["ext"]["cause"] == "interrupted"
    assert all("ext" not in line.get("item", {}) for line in lines)


class Gone(io.BytesIO):
    def flush(self) -> None:
        raise BrokenPipeError


def test_a_reader_that_has_gone_does_not_stop_the_work() -> None:
    writer = EventWriter(Gone())
    writer.thread_started("t")
    writer.turn_started()
    writer.completed(ENDED, writer.started(RUNNING))
    writer.turn_completed(Usage())
    assert writer.reader_gone


class Writing(RuleBasedStateMachine):
    """Starts, ends, plans, warnings and outcomes in any order the writer lets through."""

    def __init__(self) -> None:
        super().__init__()
        self.file = io.BytesIO()
        self.writer = EventWriter(self.file)
        self.writer.thread_started("t")
        self.total = 0

    @rule()
    def turn(self) -> None:
        self._try(self.writer.turn_started)

    @rule(item=st.sampled_from([RUNNING, EDIT, WebSearch(query=""), PLAN]))
    def start(self, item: KnownItem) -> None:
        self._try(lambda: self.writer.started(item))

    @rule(which=st.integers(0, 5), item=st.sampled_from([ENDED, EDIT, WebSearch(query="q"), PLAN]))
    def complete(self, which: int, item: KnownItem) -> None:
        self._try(lambda: self.writer.completed(item, f"item_{which}"))

    @rule(item=st.sampled_from([AgentMessage(text="m"), Reasoning(text="r"), ErrorItem(message="w"), ENDED]))
    def say(self, item: KnownItem) -> None:
        self._try(lambda: self.writer.completed(item))

    @rule()
    def plan(self) -> None:
        self._try(lambda: self.writer.todo(PLAN))

    @rule(number=st.integers(1, 5))
    def retry(self, number: int) -> None:
        self._try(lambda: self.writer.notice(Notice(number, 5, "x")))

    @rule(how=st.sampled_from(["complete", "fail", "interrupt"]))
    def end(self, how: str) -> None:
        self.total += 1
        if how == "complete":
            self._try(lambda: self.writer.turn_completed(Usage(input_tokens=self.total)))
        else:
            self._try(
                lambda: self.writer.fail("x") if how == "fail" else self.writer.turn_failed("interrupted")
            )

    def _try(self, call: Any) -> None:
        before = self.file.getvalue()
        try:
            call()
        except Misuse:
            assert self.file.getvalue() == before, "what is refused leaves no trace"

    @invariant()
    def promises_are_kept(self) -> None:
        broken = list(check(read_events([self.file.getvalue()], strict=True), ours=True))
        assert [violation for violation in broken if violation.text != "the last turn has no outcome"] == []


TestWriting = Writing.TestCase
TestWriting.settings = settings(max_examples=40, stateful_step_count=25)
