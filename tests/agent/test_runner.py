"""An agent with a model that plays a script: what it does, what it tells, and what it makes of lies."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exec_server.agent.approvals import Policy, Rule
from exec_server.agent.mcp_client import McpServer
from exec_server.agent.runner import Runner
from exec_server.agent.thread import Threads
from exec_server.environments.config import LOCAL_ID, Configuration, NamedEnvironment, WebsocketTransport
from exec_server.environments.manager import DISABLED_TEXT, EnvironmentManager
from exec_server.environments.roots import SelectedRoot
from support import streams
from support.agent import play, played
from support.model_server import (
    USAGE,
    Cut,
    Endless,
    ModelServer,
    Play,
    Raw,
    Say,
    Silent,
    Status,
    call,
    message,
    reasoning,
)
from support.server import RunningServer
from support.wait import eventually_async

TOOLS = str(Path(__file__).parent.parent / "support" / "mcp_tools.py")
PNG = bytes.fromhex("89504e470d0a1a0a") + b"rest of it"


def run(cmd: str, call_id: str = "call_1", **more: Any) -> dict[str, Any]:
    return call("exec_command", {"cmd": cmd, **more}, call_id)


def patch(*lines: str, call_id: str = "call_1") -> dict[str, Any]:
    return call("apply_patch", {"input": "\n".join(["*** Begin Patch", *lines, "*** End Patch"])}, call_id)


def plan(**steps: str) -> dict[str, Any]:
    listed = [{"step": step.replace("_", " "), "status": status} for step, status in steps.items()]
    return call("update_plan", {"plan": listed}, f"call_{len(steps)}{''.join(steps.values())}")


def failed(code: str, text: str) -> Raw:
    """An answer in which the endpoint reports a failure."""
    event = {"type": "response.failed", "response": {"error": {"code": code, "message": text}}}
    return Raw([f"data: {json.dumps(event)}\n\n"])


def search(number: int, action: Any) -> dict[str, Any]:
    item = {"type": "web_search_call", "id": f"ws_{number}", "status": "completed"}
    return item if action is None else {**item, "action": action}


# As recorded -----------------------------------------------------------------------------------------------

CUT = Cut()
REASON = {"incomplete_details": {"reason": "max_output_tokens"}}
INCOMPLETE = Raw([f"data: {json.dumps({'type': 'response.incomplete', 'response': REASON})}\n\n"])
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


def test_several_commands_run_side_by_side(tmp_path: Path) -> None:
    """Two that wait for each other: one after the other they would never end."""
    calls = [run("mkfifo f; echo one > f"), run("until [ -p f ]; do sleep 0.01; done; cat f", "call_2")]
    done = play(tmp_path, Say(calls), "Both.")
    assert [item["exit_code"] for item in done.items("command_execution")] == [0, 0]
    assert done.outcome.answer == "Both."


def test_an_edit_waits_for_what_came_before_and_is_waited_for(tmp_path: Path) -> None:
    calls = [
        run("sleep 0.3; ls"),
        patch("*** Add File: new", "+x", call_id="call_2"),
        run("cat new", "call_3"),
        run("apply_patch <<'EOF'\n*** Begin Patch\n*** Delete File: new\n*** End Patch\nEOF", "call_4"),
        run("ls", "call_5"),
    ]
    done = play(tmp_path, Say(calls), "ok")
    shown = [item.get("aggregated_output") for item in done.items("command_execution")]
    assert shown == ["", "x\n", ""]
    assert done.output("call_4").startswith("Wall time: ")
    assert "Success. Updated the following files:\nD new\n" in done.output("call_4")


# Files and images ------------------------------------------------------------------------------------------


def test_a_rename_is_told_as_two_changes(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "old.txt").write_text("a\n")
    edit = patch("*** Update File: old.txt", "*** Move to: new.txt", "@@", "-a", "+b")
    (change,) = play(tmp_path, Say([edit]), "ok").items("file_change")
    assert change["changes"] == [
        {"path": f"{work}/new.txt", "kind": "add"},
        {"path": f"{work}/old.txt", "kind": "delete"},
    ]
    assert (work / "new.txt").read_text() == "b\n"


def test_a_patch_of_its_own_kind_of_call(tmp_path: Path) -> None:
    text = "*** Begin Patch\n*** Add File: n.txt\n+n\n*** End Patch"
    item = {
        "type": "custom_tool_call",
        "id": "ct_1",
        "call_id": "call_1",
        "name": "apply_patch",
        "input": text,
    }
    other = {**item, "id": "ct_2", "call_id": "call_2", "name": "dance"}
    done = play(tmp_path, Say([item, other]), "ok")
    assert (tmp_path / "work/n.txt").read_text() == "n\n"
    assert done.output().startswith("Exit code: 0\n")
    assert done.output("call_2") == "unsupported custom tool call: dance"


def test_images(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "i.png").write_bytes(PNG)
    (work / "text.png").write_bytes(b"not an image")
    paths = ["i.png", "none.png", ".", "text.png"]
    calls = [call("view_image", {"path": path}, f"call_{number}") for number, path in enumerate(paths)]
    done = play(tmp_path, Say(calls), "ok")
    (image,) = done.output("call_0")
    assert image["type"] == "input_image"
    assert image["image_url"].startswith("data:image/png;base64,iVBORw0KGgpyZXN0")
    assert (
        done.output("call_1")
        == f"unable to locate image at `{work}/none.png`: No such file or directory (os error 2)"
    )
    assert done.output("call_2") == f"image path `{work}` is not a file"
    assert "not a PNG, JPEG, GIF or WebP image" in done.output("call_3")


# Tool servers ----------------------------------------------------------------------------------------------


def test_tool_servers(tmp_path: Path) -> None:
    docs = McpServer(name="docs", command=sys.executable, args=(TOOLS,), tool_seconds=2)
    gone = McpServer(name="gone", command="/nonexistent/program")
    names = ["echo", "structured", "picture", "empty", "fail", "boom", "slow", "die", "echo"]
    calls = [
        Say([call(f"mcp__docs__{name}", {"q": 1} if name == "echo" else {}, f"call_{number}")])
        for number, name in enumerate(names)
    ]
    done = play(tmp_path, *calls, "ok", servers=[docs, gone])
    items = done.items("mcp_tool_call")
    assert [(item["server"], item["tool"]) for item in items] == [("docs", name) for name in names]
    assert [item["status"] for item in items] == ["completed"] * 4 + ["failed"] * 5

    def ends(name: str) -> dict[str, Any]:
        """The recorded items by tool; ids differ with what else was called."""
        lines = [json.loads(line) for line in streams.stream(name).split(b"\n") if line]
        found = [
            line["item"] for line in lines if line["type"] == "item.completed" and "tool" in line["item"]
        ]
        return {item["tool"]: {**item, "id": ""} for item in found}

    ours = {item["tool"]: {**item, "id": ""} for item in items[:8]}
    for recorded, tool in [
        ("mcp_success", "structured"),
        ("mcp_success", "empty"),
        ("mcp_failure", "boom"),
        ("mcp_failure", "slow"),
        ("mcp_server_dies", "die"),
    ]:
        assert ours[tool] == ends(recorded)[tool]
    assert ours["fail"]["result"] == ends("mcp_failure")["fail"]["result"]
    assert items[-1]["error"]["message"].endswith("Transport closed")
    assert done.items("error")[0]["message"].startswith("MCP server `gone` failed to start: ")
    assert done.output("call_0") == 'echo: {"q": 1}'
    assert done.output("call_1") == '{"matches":3,"nested":{"ok":true}}'
    assert [part["type"] for part in done.output("call_2")] == ["input_text", "input_image"]


# Lies ------------------------------------------------------------------------------------------------------


def test_calls_that_make_no_sense_get_clear_answers(tmp_path: Path) -> None:
    huge = json.dumps({"cmd": "true #" + "x" * 3_000_000})
    calls = [
        call("exec_command", "{bad", "call_1"),
        call("exec_command", '{"command": "ls"}', "call_2"),
        call("exec_command", '{"cmd": 5}', "call_3"),
        call("exec_command", "[" * 100_000, "call_4"),
        call("no_such_tool", "{}", "call_5"),
        call("write_stdin", {"session_id": 5}, "call_6"),
        call("exec_command", huge, "call_7"),
        call("update_plan", {"plan": [{"step": "x", "status": "dancing"}]}, "call_8"),
        call("exec_command", {"cmd": "ls", "environment_id": "moon"}, "call_9"),
        call("exec_command", {"cmd": "ls", "workdir": "file://%"}, "call_10"),
        call("apply_patch", {"input": "not a patch"}, "call_11"),
        call("view_image", {"path": "a\0b"}, "call_12"),
    ]
    done = play(tmp_path, Say(calls), "I am sorry.")
    assert done.outcome.answer == "I am sorry."
    told = done.model.outputs()
    for number in (1, 2, 3, 4, 8):
        assert told[f"call_{number}"].startswith("failed to parse function arguments: "), number
    assert told["call_5"] == "unsupported call: no_such_tool"
    assert told["call_6"] == "write_stdin failed: Unknown process id 5"
    assert "exec_command failed" in told["call_7"] or "exited with code" in told["call_7"]
    assert told["call_9"] == "unknown turn environment id `moon`"
    assert told["call_10"].startswith("exec_command failed: workdir 'file://%'")
    assert told["call_11"].startswith("apply_patch verification failed: ")
    assert told["call_12"].startswith("view_image failed: ")


def test_arguments_longer_than_any_edit(tmp_path: Path) -> None:
    done = play(tmp_path, Say([call("apply_patch", "x" * (16 * 1024 * 1024 + 1))]), "ok")
    assert "longer than 16777216 characters" in done.output()


def test_calls_without_an_id_of_their_own(tmp_path: Path) -> None:
    nameless = {
        "type": "function_call",
        "id": "fc",
        "name": "exec_command",
        "arguments": '{"cmd": "echo three"}',
    }
    done = play(tmp_path, Say([run("echo one"), run("echo two"), nameless]), Say([run("echo four")]), "ok")
    told = [text.partition("Output:\n")[2] for text in done.model.outputs().values()]
    assert sorted(told) == ["four\n", "one\n", "three\n", "two\n"]


@pytest.mark.parametrize(
    ("play_once", "detail"),
    [
        (
            Raw(["data: {nonsense\n\n"]),
            "stream disconnected before completion: the endpoint sent what is no event",
        ),
        (Raw(["data: [1,2]\n\n", "data: 5\n\n"]), "stream disconnected before completion: "),
        (
            Raw(['data: {"type":"response.output_item.done","item":7}\n\n']),
            "stream closed before response.completed",
        ),
        (
            failed("server_error", "Oops"),
            "stream disconnected before completion: Oops",
        ),
        (
            INCOMPLETE,
            "stream disconnected before completion: Incomplete response returned, reason: max_output_tokens",
        ),
        (
            Raw(['event: error\ndata: {"error":{"message":"Broken"}}\n\n']),
            "stream disconnected before completion: Broken",
        ),
        (
            Raw(['data: {"type":"error","code":"x","message":"Bad day"}\n\n']),
            "stream disconnected before completion: Bad day",
        ),
        (Status(500, "<html>"), "unexpected status 500 Internal Server Error: Unknown error, url: http://"),
        (
            Status(429, '{"error":{"code":"rate_limit_exceeded","message":"Slow down"}}'),
            "unexpected status 429 Too Many Requests: Slow down",
        ),
        (Silent(), "stream disconnected before completion: idle timeout waiting for SSE"),
    ],
)
def test_an_endpoint_that_fails_once_is_asked_again(tmp_path: Path, play_once: Play, detail: str) -> None:
    done = play(
        tmp_path,
        play_once,
        "Fine now.",
        model_settings={"idle_seconds": 0.5 if isinstance(play_once, Silent) else 20},
    )
    assert done.kinds[2:4] == ["error", "agent_message completed"]
    assert detail in done.events[2]["message"]
    assert done.events[2]["message"].startswith("Reconnecting... 1/5 (")


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (
            failed("context_length_exceeded", "x"),
            "context window",
        ),
        (
            failed("insufficient_quota", "No money"),
            "No money",
        ),
        (
            Status(429, '{"error":{"type":"usage_limit_reached","message":"You had enough"}}'),
            "You had enough",
        ),
        (Status(422, "nope"), "nope"),
    ],
)
def test_what_another_try_would_not_mend_fails_at_once(tmp_path: Path, reply: Play, said: str) -> None:
    done = play(tmp_path, reply)
    assert done.kinds == ["thread.started", "turn.started", "error", "turn.failed"]
    assert said in done.events[2]["message"]
    assert done.outcome.error == done.events[3]["error"]["message"] == done.events[2]["message"]


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
ITEMS = st.fixed_dictionaries(
    {
        "type": st.sampled_from(
            [
                "message",
                "reasoning",
                "function_call",
                "custom_tool_call",
                "local_shell_call",
                "web_search_call",
            ]
        )
        | ANYTHING
    },
    optional={
        "name": st.sampled_from(["update_plan", "write_stdin", "apply_patch", "view_image", "dance"])
        | ANYTHING,
        "arguments": st.sampled_from(['{"plan": []}', '{"session_id": 1}', '{"path": "x"}', "{"]) | ANYTHING,
        **dict.fromkeys(["id", "call_id", "role", "content", "summary", "input", "action"], ANYTHING),
    },
)


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(st.lists(ITEMS, max_size=6))
def test_whatever_a_model_says_the_turn_has_an_outcome(
    tmp_path_factory: pytest.TempPathFactory, items: list[dict[str, Any]]
) -> None:
    done = play(tmp_path_factory.mktemp("lies"), Say(items), "ok", model_settings={"max_retries": 0})
    assert done.kinds[-1] in ("turn.completed", "turn.failed")
    assert done.outcome.error is None or not done.outcome.error.startswith("internal error")
    assert not [text for text in done.model.outputs().values() if "internal error" in str(text)]


def test_an_answer_without_end(tmp_path: Path) -> None:
    done = play(tmp_path, Endless(), model_settings={"max_retries": 0})
    assert (
        done.outcome.error
        == "stream disconnected before completion: the answer is longer than 67108864 bytes"
    )


def test_a_model_that_never_stops_calling(tmp_path: Path) -> None:
    done = play(tmp_path, Say([call("update_plan", {"plan": []})]), max_steps=5)
    assert done.outcome.error == "gave up after 5 answers of the model in one turn"
    assert len(done.model.requests) == 5


def test_a_call_is_made_once_although_the_answer_broke_off(tmp_path: Path) -> None:
    done = play(tmp_path, Cut([run("echo x >> log")]), "ok")
    assert (tmp_path / "work/log").read_text() == "x\n"
    last = done.model.requests[-1]["input"]
    assert [item["type"] for item in last[-2:]] == ["function_call", "function_call_output"]


def test_nobody_there(tmp_path: Path) -> None:
    with ModelServer("never asked") as model:
        url = model.url
    settings = {"base_url": url, "network_give_up_seconds": 0.002}
    done = play(tmp_path, "x", model_settings=settings)
    notices = [event["message"] for event in done.events if event["type"] == "error"]
    assert notices[0].startswith("Reconnecting... waiting for network (Connection failed: ")
    assert done.outcome.error is not None
    assert done.outcome.error.startswith("Connection failed: ")


# Ends ------------------------------------------------------------------------------------------------------


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


# Threads ---------------------------------------------------------------------------------------------------


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


# Policy ----------------------------------------------------------------------------------------------------


def test_rules_and_questions(tmp_path: Path) -> None:
    asked: list[tuple[str, str]] = []

    async def ask(command: str, why: str) -> bool:
        asked.append((command, why))
        return "yes" in command

    policy = Policy(
        (Rule(("rm",), "forbid", "nothing is removed here"), Rule(("touch",), "ask", "it leaves a trace"))
    )
    calls = [run("rm -rf x"), run("touch yes", "call_2"), run("echo ok; touch no", "call_3")]
    done = play(tmp_path, Say(calls), "ok", policy=policy, approvals="on-request", ask=ask)
    by_command = {item["command"].partition("-lc ")[2]: item for item in done.items("command_execution")}
    assert by_command["'rm -rf x'"]["status"] == "declined"
    assert by_command["'rm -rf x'"]["exit_code"] is None
    assert "nothing is removed here" in by_command["'rm -rf x'"]["aggregated_output"]
    assert by_command["'touch yes'"]["status"] == "completed"
    assert by_command["'echo ok; touch no'"]["status"] == "declined"
    assert sorted(asked) == [("echo ok; touch no", "it leaves a trace"), ("touch yes", "it leaves a trace")]
    assert done.output() == "exec_command failed: rejected by the policy: nothing is removed here"
    assert done.output("call_3") == "exec_command failed: rejected by user"


@pytest.mark.parametrize("approvals", ["never", "on-request"])
def test_a_way_out_of_the_sandbox(tmp_path: Path, needs_bubblewrap: None, approvals: str) -> None:
    async def ask(command: str, why: str) -> bool:
        return (command, why) == ("touch out", "because")

    wanted = {"sandbox_permissions": "require_escalated", "justification": "because"}
    calls = [run("touch in"), run("touch out", "call_2", **wanted)]
    done = play(tmp_path, Say(calls), "ok", mode="read-only", approvals=approvals, ask=ask)
    items = {item["command"].partition("-lc ")[2]: item for item in done.items("command_execution")}
    assert items["'touch in'"]["status"] == "failed"
    assert not (tmp_path / "work/in").exists()
    assert (tmp_path / "work/out").exists() == (approvals == "on-request")
    assert items["'touch out'"]["status"] == ("completed" if approvals == "on-request" else "declined")


def test_a_sandbox_confines_patches_too(tmp_path: Path, needs_bubblewrap: None) -> None:
    outside = tmp_path / "outside"
    edits = [patch("*** Add File: in", "+x"), patch(f"*** Add File: {outside}", "+x", call_id="call_2")]
    # The folder of this test is below /tmp, which a workspace may write; so the workspace is all there is.
    done = play(tmp_path, Say(edits), "ok", mode="read-only")
    assert [item["status"] for item in done.items("file_change")] == ["failed", "failed"]
    assert not outside.exists()
    assert not (tmp_path / "work/in").exists()


def test_a_workspace_can_be_written_and_nothing_else(tmp_path: Path, needs_bubblewrap: None) -> None:
    outside = Path("/var/tmp") / f"exec-server-{uuid.uuid4().hex}"
    calls = [
        patch("*** Add File: in", "+x"),
        patch(f"*** Add File: {outside}", "+x", call_id="call_2"),
        run(f"echo y > by-command; touch {outside}", "call_3", login=False),
    ]
    try:
        done = play(tmp_path, Say(calls), "ok", mode="workspace-write")
        assert not outside.exists()
    finally:
        outside.unlink(missing_ok=True)
    assert [item["status"] for item in done.items("file_change")] == ["completed", "failed"]
    assert done.output("call_2").startswith(
        f"Exit code: 1\nWall time: 0 seconds\nOutput:\nFailed to write file {outside}: "
    )
    assert (tmp_path / "work/in").read_text() == "x\n"
    assert (tmp_path / "work/by-command").read_text() == "y\n"


# Environments ----------------------------------------------------------------------------------------------


def test_no_environment_at_all(tmp_path: Path) -> None:
    nothing = Configuration(default=None, include_local=False)
    done = play(tmp_path, Say([run("ls")]), "ok", configuration=nothing, environment_ids=(), cwd=None)
    assert done.output() == DISABLED_TEXT
    assert "<environment_context>" not in done.model.said_to(0)


def test_an_environment_that_cannot_be_reached(tmp_path: Path) -> None:
    there = Configuration(
        environments=(NamedEnvironment("far", WebsocketTransport(url=f"unix://{tmp_path}/nobody")),),
        include_local=False,
        default="far",
    )
    done = play(tmp_path, Say([run("ls")]), "ok", configuration=there, environment_ids=("far",), cwd=None)
    assert done.output() == DISABLED_TEXT
    assert done.items("error")[0]["message"].startswith("environment `far` cannot be used: ")
    assert done.outcome.completed


def test_two_machines(tmp_path: Path, server: RunningServer) -> None:
    far = NamedEnvironment("far", WebsocketTransport(url=server.url))
    both = Configuration(environments=(far,), default=LOCAL_ID)
    calls = [run("echo $PPID"), run("tr '\\0' ' ' < /proc/$PPID/cmdline", "call_2", environment_id="far")]

    async def both_ready(_: Runner, manager: EnvironmentManager) -> None:
        await manager.handles["far"].wait_until_ready()

    def when_far_is_there(model: ModelServer) -> Play:
        """The tools name the second machine as soon as it is ready; perhaps not yet in the first step."""
        if "call_2" in model.outputs():
            return "ok"
        if "environment_id" in str(model.requests[-1]["tools"][0]):
            return Say(calls)
        return Say([run("true", f"call_{len(model.requests)}0", login=False)])

    done = play(
        tmp_path,
        when_far_is_there,
        configuration=both,
        environment_ids=(LOCAL_ID, "far"),
        during=both_ready,
    )
    assert "--listen" in done.output("call_2")
    assert done.outcome.answer == "ok"


def test_skills_of_selected_roots_are_shown(tmp_path: Path) -> None:
    skill = tmp_path / "root/skills/tidy"
    skill.mkdir(parents=True)
    (skill / "SKILL.md").write_text("---\nname: tidy\ndescription: Keeps things tidy.\n---\nSweep.\n")
    root = SelectedRoot.select("root@local", LOCAL_ID, str(tmp_path / "root"))

    def begin(threads: Threads) -> Any:
        return threads.start(str(tmp_path / "work"), roots=[root])

    first = play(tmp_path, "ok", thread=begin)
    assert f"- tidy: Keeps things tidy. (file: {skill}/SKILL.md, environment: local)" in first.model.said_to()
    again = play(tmp_path, "ok", thread=lambda threads: threads.resume(first.thread_id))
    assert "- tidy: " in again.model.said_to(), "the selection is part of the thread"


def test_what_a_project_says_to_agents(tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / "sub").mkdir(parents=True)
    (work / ".git").mkdir()
    (work / "AGENTS.md").write_text("Be kind.\n")
    (work / "sub/AGENTS.md").write_text("not this\n")
    (work / "sub/AGENTS.override.md").write_text("Be quick.\n")
    said = play(tmp_path, "ok", cwd=str(work / "sub")).model.said_to()
    assert said.index("Be kind.") < said.index("Be quick.") < said.index("<environment_context>")
    assert "not this" not in said


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
