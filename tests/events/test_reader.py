"""From lines to events: every recording, every oddity, and any garbage at all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.events import model
from exec_server.events.encoding import encode
from exec_server.events.model import (
    AgentMessage,
    CommandExecution,
    ItemEvent,
    MalformedEvent,
    Noise,
    Record,
    ThreadStarted,
    TurnCompleted,
    UnknownEvent,
    UnknownItem,
    Usage,
    WebSearch,
    status_of,
    succeeded,
)
from exec_server.events.reader import StreamError, parse_line, read_events, read_events_async
from support.streams import GARBAGE, NAMES, chunks, stream


def item_line(phase: str = "completed", **item: Any) -> bytes:
    return json.dumps({"type": f"item.{phase}", "item": item}).encode()


def item_of(record: Record) -> model.Item:
    assert isinstance(record, ItemEvent), record
    return record.item


@pytest.mark.parametrize("name", NAMES)
def test_every_recording_is_read_whole(name: str) -> None:
    records = list(read_events([stream(name)], strict=True))
    assert len(records) == stream(name).count(b"\n")
    assert not [record for record in records if isinstance(record, Noise | MalformedEvent | UnknownEvent)]
    assert not [
        record for record in records if isinstance(record, ItemEvent) and type(record.item) is UnknownItem
    ]


@pytest.mark.parametrize("name", NAMES)
def test_reading_what_was_read_gives_the_same(name: str) -> None:
    records = list(read_events([stream(name)]))
    again = list(read_events([encode(record.raw) for record in records]))  # type: ignore[union-attr]
    assert again == records


@pytest.mark.parametrize("name", NAMES)
def test_pieces_ends_and_marks_do_not_matter(name: str) -> None:
    data = stream(name)
    if len(data) > 100_000:
        sizes = [7, 1000]
        data = data if len(data) < 1_000_000 else data[-300_000:]  # a byte at a time takes its time
    else:
        sizes = [1, 7]
    whole = list(read_events([data]))
    for size in sizes:
        assert list(read_events(chunks(data, size))) == whole
    assert list(read_events([b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n")])) == whole
    assert list(read_events([data.removesuffix(b"\n")])) == whole


@pytest.mark.parametrize(
    "name", ["command_huge_output", "command_large_output", "command_unicode_separators"]
)
def test_lines_of_any_length_through_the_asynchronous_path(name: str) -> None:
    async def trickle() -> AsyncIterator[bytes]:
        for block in chunks(stream(name), 8192):
            yield block

    async def gather() -> list[Record]:
        return [record async for record in read_events_async(trickle())]

    records = asyncio.run(gather())
    assert records == list(read_events([stream(name)]))
    assert len(records) == 6


def test_a_stream_cut_at_any_byte_of_its_last_line() -> None:
    data = stream("plain_message")
    start = data.rindex(b"\n", 0, -1) + 1
    for end in range(start + 1, len(data) - 1):
        *before, last = read_events([data[:end]])
        assert len(before) == 3
        assert isinstance(last, Noise)
        assert last.reason.startswith("the stream was cut off in this line")


# The duplicate key ---------------------------------------------------------------------------------


def test_the_second_id_of_a_search_is_its_source() -> None:
    records = list(read_events([stream("web_search")]))
    item = item_of(records[2])
    assert isinstance(item, WebSearch)
    assert (item.id, item.source_id) == ("item_0", "ws_1")
    assert item.raw["id"] == "item_0", "what is written again has one id"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"id":"a","type":"web_search","id":"b","query":""}', ("a", "b")),
        ('{"\\u0069d":"a","type":"web_search","i\\u0064":"b","query":""}', ("a", "b")),
        ('{"id":"a","type":"web_search","id":"b","id":"c","query":""}', ("a", "c")),
        ('{"id":"a","type":"web_search","query":"","action":{"type":"x","id":"y","id":"z"}}', ("a", None)),
        ('{"id":"a","type":"web_search","query":"","source_id":"s"}', ("a", "s")),
        ('{"id":"a","type":"web_search","query":"","source_id":"s","id":"b"}', ("a", "s")),
    ],
)
def test_which_id_counts(text: str, expected: tuple[str, str | None]) -> None:
    item = item_of(parse_line(f'{{"type":"item.completed","item":{text}}}'))
    assert isinstance(item, WebSearch)
    assert (item.id, item.source_id) == expected


def test_of_other_duplicates_the_last_counts() -> None:
    record = parse_line('{"type":"thread.started","thread_id":"a","thread_id":"b"}')
    assert isinstance(record, ThreadStarted)
    assert record.thread_id == "b"
    message = '{"id":"i","type":"agent_message","text":"a","text":"b","id":"j"}'
    item = item_of(parse_line(f'{{"type":"item.completed","item":{message}}}'))
    assert isinstance(item, AgentMessage)
    assert (item.id, item.text) == ("i", "b")


# Tolerance -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"2026-01-01T00:00:00Z ERROR codex: something", "not JSON"),
        (b"[1,2]", "not an object"),
        (b"17", "not an object"),
        (b"null", "not an object"),
        (b"{}", "without a `type`"),
        (b'{"type":5}', "without a `type`"),
        (b'{"type":"error","message":NaN}', "NaN is not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"type":"x","a":' + b"[" * 128 + b"]" * 128 + b"}", "nested too deeply"),
        (b"\xff\xfe{", "not JSON"),
        (b'{"type":"error","message":' + b"9" * 10_000 + b"}", "not JSON"),
    ],
)
def test_what_is_no_event_is_noise(line: bytes, reason: str) -> None:
    record = parse_line(line)
    assert isinstance(record, Noise)
    assert reason in record.reason
    assert len(record.text) <= 500
    with pytest.raises(StreamError, match="line 1"):
        parse_line(line, strict=True)


@pytest.mark.parametrize(
    "line",
    [
        b'{"type":"thread.started"}',
        b'{"type":"thread.started","thread_id":5}',
        b'{"type":"turn.failed","error":"x"}',
        b'{"type":"turn.failed"}',
        b'{"type":"turn.completed","usage":{"input_tokens":"many"}}',
        b'{"type":"error"}',
        b'{"type":"item.completed"}',
        b'{"type":"item.completed","item":[]}',
        item_line(type="agent_message", text="no id"),
        item_line(id="i", text="no type"),
        item_line(id="i", type="agent_message"),
        item_line(id=7, type="agent_message", text="x"),
        item_line(id="i", type="agent_message", text=None),
        item_line(id="i", type="command_execution", command="x", status="completed"),
        item_line(
            id="i", type="command_execution", command="x", aggregated_output="", exit_code="0", status="x"
        ),
        item_line(id="i", type="file_change", changes=[{"path": "x"}], status="completed"),
        item_line(id="i", type="todo_list", items=[{"text": "x"}]),
        item_line(id="i", type="mcp_tool_call", server="s", tool="t", result={}, status="completed"),
    ],
)
def test_an_event_that_lacks_something_is_malformed(line: bytes) -> None:
    record = parse_line(line)
    assert isinstance(record, MalformedEvent), record
    assert record.reason
    assert record.raw == json.loads(line)
    with pytest.raises(StreamError):
        parse_line(line, strict=True)


def test_nesting_up_to_what_the_reference_writes() -> None:
    deep = b'{"type":"x","a":' + b"[" * 127 + b"]" * 127 + b"}"
    assert isinstance(parse_line(deep), UnknownEvent)
    wide = b'{"type":"x","a":[' + b",".join([b"{}"] * 1000) + b"]}"
    assert isinstance(parse_line(wide), UnknownEvent)


def test_the_unknown_is_kept() -> None:
    event = parse_line(b'{"type":"turn.paused","why":[1]}')
    assert event == UnknownEvent(type="turn.paused", raw={"type": "turn.paused", "why": [1]}, line=1)
    item = item_of(parse_line(item_line(id="i", type="dance", status="done", steps=3)))
    assert isinstance(item, UnknownItem)
    assert (item.id, item.type, item.raw["steps"], status_of(item)) == ("i", "dance", 3, "done")
    odd = item_of(
        parse_line(
            item_line(id="i", type="command_execution", command="x", aggregated_output="", status="odd")
        )
    )
    assert isinstance(odd, CommandExecution)
    assert odd.status == "odd"
    assert succeeded(odd) is None, "neither success nor failure"
    extra = item_of(parse_line(item_line(id="i", type="reasoning", text="x", new=1, raw={"a": 1}, line=9)))
    assert extra.raw["new"] == 1


def test_old_spellings() -> None:
    session = parse_line(b'{"type":"session.created","session_id":"s"}')
    assert isinstance(session, ThreadStarted)
    assert session.thread_id == "s"
    item = item_of(parse_line(item_line(id="i", item_type="assistant_message", text="hi")))
    assert isinstance(item, AgentMessage)
    done = parse_line(b'{"type":"turn.completed"}')
    assert isinstance(done, TurnCompleted)
    assert done.usage == Usage()
    partly = parse_line(b'{"type":"turn.completed","usage":{"input_tokens":5,"output_tokens":null}}')
    assert isinstance(partly, TurnCompleted)
    assert partly.usage == Usage(input_tokens=5)


def test_a_failed_command_is_failed_whatever_its_status_says() -> None:
    command = CommandExecution(command="x", aggregated_output="", exit_code=3, status="completed")
    assert succeeded(command) is False


def test_noise_does_not_touch_its_neighbours() -> None:
    noise = [b"ERROR log line\n", b"\n", b"[1]\n", b'{"type":5}\n', b'{"type":"x"}\n']
    lines = stream("command_failure").splitlines(keepends=True)
    mixed = [part for line in lines for part in (*noise, line)]
    records = [record for record in read_events(mixed) if not isinstance(record, Noise | UnknownEvent)]
    assert [record.type for record in records] == [json.loads(line)["type"] for line in lines]


# Anything ----------------------------------------------------------------------------------------------


@given(GARBAGE, st.integers(1, 30))
def test_garbage_never_raises_and_reads_the_same_in_pieces(data: bytes, size: int) -> None:
    whole = list(read_events([data]))
    assert list(read_events(chunks(data, size))) == whole
    for record in whole:
        assert record.line >= 1
