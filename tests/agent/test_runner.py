"""An agent with a model that plays a script: what it does, what it tells, and how it ends."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from exec_server.agent.runner import Runner
from exec_server.agent.thread import Threads
from exec_server.environments.manager import EnvironmentManager
from support import streams
from support.agent import play, played
from support.calls import patch, plan, run, search
from support.model_server import (
    USAGE,
    Cut,
    ModelServer,
    Play,
    Say,
    Silent,
    Status,
    call,
    message,
    reasoning,
)
from support.wait import eventually_async

CACHED = {
    "input_tokens": 5000,
    "input_tokens_details": {"cached_tokens": 1000, "cache_write_tokens": 256},
    "output_tokens": 70,
    "output_tokens_details": {"reasoning_tokens": 33},
}
BINARY = r"printf 'a\377\000b\033[31mred\033[0m\r\nc'"
CUT = Cut()


SUMMARIES = ("**Scanning the repo**\n\nLooking for tests.", "**Deciding**\n\nRun them.")


BAD_REQUEST = json.dumps(
    {
        "error": {
            "message": "Invalid schema for response_format",
            "type": "invalid_request_error",
            "code": "invalid_json_schema",
        }
    }
)


SEPARATORS = r"printf 'a\342\200\250b\342\200\251c\302\205d\013e\014f\034g\n'"


SEARCHES: list[Any] = [
    {"type": "search", "query": "codex exec json schema"},
    {"type": "search", "query": "alpha", "queries": ["alpha", "beta"]},
    {"type": "open_page", "url": "https://example.com/doc"},
    {"type": "find_in_page", "url": "https://example.com/doc", "pattern": "usage"},
    {"type": "teleport"},
    None,
]


def type_into_it(model: ModelServer) -> Play:
    found = re.search(r"session ID (\d+)", str(model.outputs()["call_1"]))
    assert found is not None, model.outputs()
    typed = {"session_id": int(found[1]), "chars": "hello\n", "yield_time_ms": 20_000}
    return Say([call("write_stdin", typed, "call_2")])


RECORDED: dict[str, tuple[list[Play], dict[str, Any]]] = {
    "plain_message": (["Hello from the mock."], {}),
    "empty_message": ([""], {}),
    "no_message": ([Say([])], {}),
    "no_usage": ([Say([message("ok")], usage=None)], {}),
    "cache_write_usage": ([Say([message("ok")], CACHED)], {}),
    "command_binary_output": ([Say([run(BINARY)]), "bytes"], {}),
    "output_schema": (['{"answer":"42","confidence":0.9}'], {"output_schema": {"type": "object"}}),
    "several_messages": (
        [
            Say([message("Looking first."), run("echo a")]),
            Say([message("Second note."), message("Final: all good.\n\n- one\n- two")]),
        ],
        {},
    ),
    "reasoning": (
        [
            Say([reasoning(*SUMMARIES), run("true")]),
            Say([reasoning("**Wrapping up**"), reasoning(), message("Finished.")]),
        ],
        {},
    ),
    "todo_list": (
        [
            Say([plan(Look_around="in_progress", Fix_it="pending", Test="pending")]),
            Say([plan(Look_around="completed", Fix_it="in_progress", Test="pending"), run("true")]),
            Say(
                [plan(Look_around="completed", Fix_it="completed", Test="completed", Write_notes="completed")]
            ),
            "Plan done.",
        ],
        {},
    ),
    "command_failure": (
        [
            Say([run("echo boom >&2; exit 3")]),
            Say([run("definitely-not-a-command-xyz", "call_2")]),
            "Both failed.",
        ],
        {},
    ),
    "command_signal": ([Say([run("echo before; kill -9 $$")]), "It died."], {}),
    "command_unicode_separators": (
        [Say([run(SEPARATORS)]), streams.EXPECTED["command_unicode_separators"]["answer"]],
        {},
    ),
    "command_spawn_failure": (
        [Say([run("echo hi", shell="/bin/sh")]), Say([run("echo hi", "call_2", workdir="/nowhere")]), "ok"],
        {},
    ),
    "command_session_stdin": (
        [
            Say([run("read x; echo got:$x; sleep 0.3; exit 0", tty=True, yield_time_ms=250)]),
            type_into_it,
            "Talked to it.",
        ],
        {},
    ),
    "file_change_bad_context": (
        [Say([patch("*** Update File: a.txt", "@@", "-nope", "+x")]), "Could not patch."],
        {},
    ),
    "file_change_apply_error": ([Say([patch("*** Add File: blocked/new.md", "+x")]), "Could not write."], {}),
    "web_search": (
        [Say([*(search(number, action) for number, action in enumerate(SEARCHES, 1)), message("Searched.")])],
        {"web_search": True},
    ),
    "reconnect_then_ok": ([CUT, CUT, "Recovered."], {}),
    "reconnect_exhausted": ([CUT], {"model_settings": {"max_retries": 3}}),
    "reconnect_twice": (
        [CUT, Say([run("echo one")]), CUT, CUT, "Recovered twice."],
        {"model_settings": {"max_retries": 4}},
    ),
    "reconnect_mid_turn": (
        [
            Say([run("echo hi")]),
            Cut([message("Half an answer that was complete as an item.")]),
            "Whole answer.",
        ],
        {"model_settings": {"max_retries": 2}},
    ),
    "http_400": ([Status(400, BAD_REQUEST)], {}),
    "http_401": ([Status(401, '{"error": {"message": "Bad key"}}')], {}),
}


def comparable(stream: bytes, cwd: str) -> list[dict[str, Any]]:
    """Without what differs between any two runs."""
    events = []
    for line in stream.split(b"\n"):
        if line:
            text = re.sub(r"127\.0\.0\.1:\w+", "127.0.0.1:PORT", line.decode())
            event = json.loads(text.replace(cwd, "$CWD"), object_pairs_hook=first_id)
            if "command" in event.get("item", {}):
                # Quoted in different ways; the words are what counts.
                event["item"]["command"] = shlex.split(event["item"]["command"])
            events.append(event | ({"thread_id": ""} if "thread_id" in event else {}))
    return events


def first_id(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The reference writes two ids for a search; we write the second under a name of its own."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        found["source_id" if name == "id" and name in found else name] = value
    return found


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_the_stream_is_the_recorded_one(name: str, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "a.txt").write_text("one\n")
    (work / "blocked").write_text("a file where a directory would be needed")
    script, options = RECORDED[name]
    ours = play(tmp_path, *script, **options)
    assert comparable(ours.stream, str(work)) == comparable(streams.stream(name), "$CWD")


def test_what_still_runs_ends_with_the_turn(tmp_path: Path) -> None:
    done = play(tmp_path, Say([run("echo up; sleep 1000", yield_time_ms=1000, login=False)]), "Left it.")
    (command,) = done.items("command_execution")
    assert (command["status"], command["exit_code"]) == ("failed", 137)
    assert command["aggregated_output"] == "up\n"
    assert done.kinds[-3:] == ["agent_message completed", "command_execution completed", "turn.completed"]


@pytest.mark.parametrize("cause", ["interrupted", "terminated"])
def test_an_interrupted_turn_has_an_outcome(tmp_path: Path, cause: str) -> None:
    async def interrupt(runner: Runner, _: EnvironmentManager) -> None:
        await eventually_async((tmp_path / "work/up").exists, "the command")
        runner.interrupt(cause)

    calls = [plan(wait="in_progress"), run("sleep 0.5; touch up; sleep 1000", login=False)]
    done = play(tmp_path, Say(calls), during=interrupt)
    assert done.kinds[-3:] == ["command_execution completed", "todo_list completed", "turn.failed"]
    assert done.events[-1]["error"]["message"] == cause
    assert done.items("command_execution")[0]["exit_code"] == 137

    def again(threads: Threads) -> Any:
        return threads.resume(done.thread_id)

    resumed = play(tmp_path, "Back.", thread=again)
    assert resumed.outcome.answer == "Back."
    assert resumed.output() == "aborted", "a call that was given up is answered in the history"


def test_an_interrupt_while_the_model_thinks(tmp_path: Path) -> None:
    async def interrupt(runner: Runner, _: EnvironmentManager) -> None:
        await eventually_async(lambda: model.requests, "the request")
        runner.interrupt()

    with ModelServer(Silent()) as model:
        done = asyncio.run(played(model, tmp_path, during=interrupt))
    assert done.kinds == ["thread.started", "turn.started", "turn.failed"]


@pytest.mark.parametrize("number", range(1, 12))
def test_an_interrupt_at_any_event(tmp_path: Path, number: int) -> None:
    """Whenever it comes, there is one outcome, nothing is left open, and the thread can go on."""
    script: list[Play] = [
        Say([reasoning("hm"), plan(first="in_progress"), run("sleep 0.2; echo a", login=False)]),
        Cut([message("half")]),
        Say([patch("*** Add File: n", "+n", call_id="call_2"), run("sleep 1000", "call_3", login=False)]),
        "never reached",
    ]

    def interrupt(runner: Runner, lines: int) -> None:
        if lines == number:
            runner.interrupt()

    done = play(tmp_path, *script, on_event=interrupt)
    assert done.kinds.count("turn.failed") == 1
    assert done.events[-1]["error"]["message"] == "interrupted"
    edited = done.items("file_change")
    assert (tmp_path / "work/n").exists() == any(item["status"] == "completed" for item in edited)
    again = play(tmp_path, "Back.", thread=lambda threads: threads.resume(done.thread_id))
    assert again.outcome.answer == "Back."


def test_a_thread_goes_on_where_it_was(tmp_path: Path) -> None:
    first = play(tmp_path, Say([run("echo one")]), "First.")
    second = play(tmp_path, "Second.", prompt="more", thread=lambda threads: threads.resume(first.thread_id))
    assert second.thread_id == first.thread_id
    assert second.events[-1]["usage"]["input_tokens"] == 3600, "a total of the whole thread"
    said = second.model.said_to()
    assert said.index("go") < said.index("First.") < said.index("more")
    assert "one\n" in second.output()
    fork = play(tmp_path, "Third.", prompt="else", thread=lambda threads: threads.fork(first.thread_id))
    assert fork.thread_id != first.thread_id
    assert "First." in fork.model.said_to()
    assert "Second." in fork.model.said_to()
    assert fork.events[-1]["usage"]["input_tokens"] == 4800


def test_only_one_may_write_a_thread(tmp_path: Path) -> None:
    from exec_server.agent.rollout import ThreadBusy

    first = play(tmp_path, "First.")
    threads = Threads(str(tmp_path / "home"))
    with threads.resume(first.thread_id), pytest.raises(ThreadBusy):
        threads.resume(first.thread_id)


def test_what_is_asked_of_the_model(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {}}
    done = play(tmp_path, "ok", output_schema=schema, reasoning_effort="low", web_search=True)
    (request,) = done.model.requests
    assert request["text"]["format"] == {
        "type": "json_schema",
        "name": "output",
        "schema": schema,
        "strict": True,
    }
    assert request["reasoning"] == {"summary": "auto", "effort": "low"}
    assert request["store"] is False
    names = [tool.get("name", tool["type"]) for tool in request["tools"]]
    assert names == ["exec_command", "write_stdin", "apply_patch", "update_plan", "view_image", "web_search"]
    assert request["prompt_cache_key"] == done.thread_id


def test_extras(tmp_path: Path) -> None:
    done = play(tmp_path, CUT, Say([run("true")]), "ok", ext=True)
    assert all("ts" in event["ext"] for event in done.events)
    notice = next(event for event in done.events if event["type"] == "error")
    assert (notice["ext"]["will_retry"], notice["ext"]["attempt"], notice["ext"]["max_attempts"]) == (
        True,
        1,
        5,
    )


def test_tokens_are_counted(tmp_path: Path) -> None:
    usage = {**USAGE, "input_tokens_details": {"cached_tokens": 100, "cache_write_tokens": 7}}
    nonsense = {"input_tokens": "many", "output_tokens": -5, "output_tokens_details": 3}
    done = play(tmp_path, Say([run("true")], usage), Say([message("ok")], nonsense))
    assert done.events[-1]["usage"] == {
        "input_tokens": 1200,
        "cached_input_tokens": 100,
        "cache_write_input_tokens": 7,
        "output_tokens": 40,
        "reasoning_output_tokens": 8,
    }


@pytest.fixture(autouse=True)
def _needs_bash() -> None:
    assert shutil.which("bash"), "the recorded streams are of bash"


def test_what_cannot_be_written_down(tmp_path: Path) -> None:
    """Half a character is shown as well as that goes; a turn that cannot be kept fails in words."""
    half = play(tmp_path, Say([message("a\ud800b")]), prompt="go \udcff")
    assert half.outcome.answer == "a\ufffdb"
    assert "go \ufffd" in half.model.said_to()
    deep: Any = "x"
    for _ in range(200):
        deep = [deep]
    done = play(tmp_path, Say([{**message("hi"), "odd": deep}]))
    assert done.outcome.error == "the thread cannot be written down: nested more than 100 levels deep"


def test_arguments_that_are_an_object(tmp_path: Path) -> None:
    asked = {"type": "function_call", "call_id": "call_1", "name": "exec_command"}
    done = play(tmp_path, Say([{**asked, "arguments": {"cmd": "echo obj", "login": False}}]), "ok")
    assert done.items("command_execution")[0]["aggregated_output"] == "obj\n"
    assert isinstance(done.model.requests[-1]["input"][-2]["arguments"], str), "as it is written"


def test_a_message_that_is_a_text(tmp_path: Path) -> None:
    done = play(tmp_path, Say([{"type": "message", "role": "assistant", "content": "plain"}]))
    assert done.outcome.answer == "plain"
