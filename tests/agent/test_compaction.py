"""Histories that grow too long: summed up by the model, kept in the reference's form, gone on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from exec_server.agent.compaction import DEFAULT_WINDOW, PREFIX, compacted, limit_of, shortened, worth_it
from exec_server.agent.context import message as item
from exec_server.agent.conversation import conversation, kept_items, last_request_tokens, usage_record
from exec_server.agent.record import Record
from exec_server.agent.thread import Threads
from exec_server.events.model import Usage
from support import streams
from support.agent import Played, play
from support.calls import failed, run
from support.model_server import USAGE, ModelServer, Play, Say, call, message

LONG = {**USAGE, "input_tokens": 90_000}
FULL = failed("context_length_exceeded", "too long")


def asks_for_summary(request: dict[str, Any]) -> bool:
    return "too long to go on" in json.dumps(request["input"][-1])


def history(done: Played) -> list[Record]:
    return Threads(str(done.home)).read(done.thread_id)[1]


def test_a_history_that_has_grown_too_long(tmp_path: Path) -> None:
    script = [Say([run("echo hi")], LONG), "SUMMARY: it said hi", "after compaction"]
    done = play(tmp_path, *script, compact_tokens=1000, prompt="greet it")
    recorded = [json.loads(line) for line in streams.stream("compaction").split(b"\n") if line]
    assert [(event["type"], event.get("item", {}).get("type")) for event in done.events] == [
        (event["type"], event.get("item", {}).get("type")) for event in recorded
    ], "nobody is told of it"
    assert done.events[-1]["usage"]["input_tokens"] == 92_400, "what it costs is in the total"
    first, second, third = done.model.requests
    assert asks_for_summary(second)
    assert not asks_for_summary(first)
    assert "tools" not in second
    assert [one["type"] for one in second["input"]].count("function_call_output") == 1
    sent = json.dumps(third["input"])
    assert "greet it" in sent
    assert "SUMMARY: it said hi" in sent
    assert "echo hi" not in sent
    (record,) = [record for record in history(done) if record.type == "compacted"]
    assert record.payload["message"] == f"{PREFIX}SUMMARY: it said hi"
    said, summary = record.payload["replacement_history"]
    assert said["content"][0]["text"] == "greet it"
    assert summary["content"][0]["text"] == record.payload["message"]

    again = play(tmp_path, "Back.", thread=lambda threads: threads.resume(done.thread_id), prompt="more")
    sent = json.dumps(again.model.requests[0]["input"])
    assert (
        sent.index("greet it") < sent.index("SUMMARY") < sent.index("after compaction") < sent.index("more")
    )
    assert "echo hi" not in sent


def test_a_thread_that_was_too_long_before(tmp_path: Path) -> None:
    first = play(tmp_path, Say([message("Done.")], LONG))
    done = play(
        tmp_path,
        "SUMMARY",
        "ok",
        thread=lambda threads: threads.resume(first.thread_id),
        compact_tokens=1000,
        prompt="and now",
    )
    summing, asking = done.model.requests
    assert asks_for_summary(summing)
    assert "Done." not in json.dumps(asking["input"])
    assert "and now" in json.dumps(asking["input"])
    assert done.outcome.answer == "ok"


def test_an_endpoint_that_says_it_has_no_room(tmp_path: Path) -> None:
    """Nobody configured how much there is. The request for the summary may be too long as well."""

    def endpoint(model: ModelServer) -> Play:
        items = model.request["input"]
        if asks_for_summary(model.request):
            return "SUMMARY" if len(items) < 8 else FULL
        if len(items) > 11:
            return FULL
        if "SUMMARY" in json.dumps(items):
            return "Made it."
        return Say([call("update_plan", {"plan": []}, f"call_{len(items)}")])

    done = play(tmp_path, endpoint)
    assert done.outcome.answer == "Made it."
    assert sum(map(asks_for_summary, done.model.requests)) == 2


@pytest.mark.parametrize("resumed", [False, True])
def test_no_room_at_all(tmp_path: Path, resumed: bool) -> None:
    """A first prompt that does not fit fails at once, as recorded; so does what no summary makes shorter."""
    options: dict[str, Any] = {}
    if resumed:
        first = play(tmp_path, "Hello.")
        options["thread"] = lambda threads: threads.resume(first.thread_id)
    done = play(tmp_path, FULL, **options)
    assert done.kinds == ["thread.started", "turn.started", "error", "turn.failed"]
    assert "context window" in str(done.outcome.error)
    assert len(done.model.requests) <= 4


def test_a_summary_that_breaks_off_is_asked_for_again(tmp_path: Path) -> None:
    script: list[Play] = [Say([run("true")], LONG), failed("server_error", "Oops"), "SUMMARY", "ok"]
    done = play(tmp_path, *script, compact_tokens=1000)
    assert [event["message"] for event in done.events if event["type"] == "error"] == [
        "Reconnecting... 1/5 (stream disconnected before completion: Oops)"
    ]
    assert done.outcome.answer == "ok"


def test_limits() -> None:
    assert limit_of(5, 100) == 5
    assert limit_of(None, 1000) == 900
    assert limit_of(None, None) == int(DEFAULT_WINDOW * 0.9)


def test_what_the_user_said_is_kept_as_far_as_there_is_room() -> None:
    said = [item("user", name * 30_000, kind="user.text") for name in "abc"]
    items = [said[0], item("assistant", "x"), said[1], item("user", "<environment_context>"), said[2]]
    kept = compacted(items, "S")["replacement_history"]
    assert kept[:-1] == said[1:]
    assert worth_it(items)
    assert not worth_it(said)


def test_the_newer_half_is_whole() -> None:
    items = [
        {"type": "function_call", "call_id": "1"},
        {"type": "message"},
        {"type": "function_call_output", "call_id": "1"},
        {"type": "message", "n": 2},
    ]
    assert shortened(items) == [{"type": "message", "n": 2}]
    assert shortened([]) == []


def test_records_of_other_programs() -> None:
    def record(kind: str, payload: dict[str, Any]) -> Record:
        return Record({"type": kind, "payload": payload})

    before = [record("response_item", item("user", "hi")), record("response_item", item("assistant", "yes"))]
    old = record("compacted", {"message": "they said yes"})
    assert [one["content"][0]["text"] for one in conversation([*before, old])] == ["hi", "they said yes"]
    strange = record("compacted", {"message": "m", "replacement_history": [5, item("user", "x")]})
    assert kept_items([*before, strange]) == [item("user", "x")]
    count = record("event_msg", usage_record(Usage(), Usage(input_tokens=7, output_tokens=2)))
    assert last_request_tokens([*before, count]) == 9
    assert last_request_tokens([count, old]) == 0
