"""Items in few words."""

from __future__ import annotations

import base64
import shlex
from typing import Any

import pytest

from exec_server.events.model import (
    AgentMessage,
    AgentState,
    CollabToolCall,
    CommandExecution,
    ErrorItem,
    Failure,
    FileChange,
    FileEdit,
    Item,
    McpResult,
    McpToolCall,
    Reasoning,
    SearchAction,
    TodoList,
    TodoStep,
    UnknownItem,
    Usage,
    WebSearch,
)
from exec_server.events.wording import (
    agent_call,
    agent_states,
    command_script,
    compact,
    content_blocks,
    duration,
    failure_reason,
    search,
    short_form,
    shown_path,
    size,
    tokens,
)


def called(*content: Any, error: str | None = None) -> McpToolCall:
    return McpToolCall(
        server="s",
        tool="t",
        status="failed",
        result=McpResult(content=content) if content else None,
        error=None if error is None else Failure(message=error),
    )


@pytest.mark.parametrize(
    ("block", "shown"),
    [
        ({"type": "text", "text": "x"}, "1 text"),
        (
            {"type": "image", "mimeType": "image/png", "data": base64.b64encode(b"x" * 70).decode()},
            "image/png 70 B",
        ),
        ({"type": "image", "data": "AAAA"}, "image 3 B"),
        ({"type": "audio", "mimeType": "audio/wav"}, "audio/wav 0 B"),
        ({"type": "resource_link", "name": "README.md"}, "link README.md"),
        ({"type": "resource_link"}, "link ?"),
        ({"type": "resource", "resource": {"uri": "file:///a", "text": "né"}}, "resource file:///a 3 B"),
        ({"type": "resource", "resource": {"uri": "file:///a", "blob": "AAA="}}, "resource file:///a 2 B"),
        ({"type": "resource"}, "resource"),
        ({"type": "hologram\x1b[2J"}, "hologram"),
        ({}, "?"),
        (17, "?"),
    ],
)
def test_content_blocks(block: Any, shown: str) -> None:
    assert content_blocks(called(block)) == shown


def test_the_data_of_a_block_is_never_shown() -> None:
    secret = base64.b64encode(b"secret bytes").decode()
    many = called(
        {"type": "text", "text": "a"}, {"type": "image", "data": secret}, {"type": "text", "text": "b"}
    )
    assert content_blocks(many) == "2 text, image 12 B"
    assert content_blocks(called()) == ""


def test_why_a_call_failed() -> None:
    assert failure_reason(called(error="\n\nfirst\nsecond")) == "first"
    assert failure_reason(called({"type": "image"}, {"type": "text", "text": "no\nway"})) == "no"
    assert failure_reason(called({"type": "text", "text": 5})) == "no reason given"


@pytest.mark.parametrize(
    ("item", "shown"),
    [
        (WebSearch(query="q"), "search: q"),
        (WebSearch(query=""), "search"),
        (
            WebSearch(query="a", action=SearchAction(type="search", queries=("a", "b", "c"))),
            "search: a (+2 more)",
        ),
        (WebSearch(query="", action=SearchAction(type="search", queries=("b",))), "search: b"),
        (WebSearch(query="u", action=SearchAction(type="open_page", url="u")), "open: u"),
        (WebSearch(query="u", action=SearchAction(type="open_page")), "search: u"),
        (
            WebSearch(query="x", action=SearchAction(type="find_in_page", pattern="p", url="u")),
            "find: p in u",
        ),
        (WebSearch(query="x", action=SearchAction(type="find_in_page", pattern="p")), "find: p in ?"),
    ],
)
def test_searches(item: WebSearch, shown: str) -> None:
    assert search(item) == shown


def collab(tool: str, *receivers: str, prompt: str | None = None) -> CollabToolCall:
    return CollabToolCall(
        tool=tool,
        sender_thread_id="s",
        receiver_thread_ids=receivers,
        prompt=prompt,
        agents_states={"0123456789": AgentState(status="errored", message="a\nb")},
        status="completed",
    )


def test_agents() -> None:
    assert agent_call(collab("spawn_agent", prompt="do\nit")) == "agent spawn: do⏎it"
    assert agent_call(collab("send_input", "0123456789", prompt="go")) == "agent input → 23456789: go"
    assert agent_call(collab("wait", "a", "b")) == "agent wait (2)"
    assert agent_call(collab("close_agent", "a")) == "agent close a"
    assert agent_call(collab("promote_agent", "a")) == "agent promote_agent a"
    assert agent_states(collab("wait")) == ["23456789: errored a⏎b"]


@pytest.mark.parametrize(
    ("item", "shown"),
    [
        (CommandExecution(command="bash -lc ls", aggregated_output="", status="in_progress"), "$ ls"),
        (FileChange(changes=(FileEdit(path="/w/a", kind="add"),), status="in_progress"), "edit: add a"),
        (called(), "tool s/t"),
        (collab("wait"), "agent wait (0)"),
        (WebSearch(query=""), "search"),
        (TodoList(items=(TodoStep(text="x", completed=True),)), "plan 1/1"),
        (AgentMessage(text="\nhello\nworld"), "hello"),
        (Reasoning(text="hm"), "hm"),
        (ErrorItem(message="careful"), "warning: careful"),
        (UnknownItem(type="dance"), "dance"),
    ],
)
def test_short_forms(item: Item, shown: str) -> None:
    assert short_form(item, "/w") == shown


def test_paths() -> None:
    assert shown_path("/w/a/b", "/w") == "a/b"
    assert shown_path("/w/a/b", "/w/") == "a/b"
    assert shown_path("/wide/a", "/w") == "/wide/a"
    assert shown_path("/w/", "/w") == "/w/"
    assert shown_path("/a\nb", None) == "/a⏎b"


def test_numbers() -> None:
    assert [size(count) for count in (0, 1023, 1536, 5 * 2**20, 2**41)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 MiB",
        "2.0 TiB",
    ]
    assert [duration(seconds) for seconds in (-1, 0.84, 9.99, 42.9, 185, 7380)] == [
        "0.0s", "0.8s", "10.0s", "42s", "3m 05s", "2h 03m"
    ]  # fmt: skip
    assert tokens(Usage(input_tokens=15_000, output_tokens=521)) == "tokens in 15,000 out 521"
    every = Usage(
        input_tokens=15_000,
        cached_input_tokens=9_500,
        cache_write_input_tokens=512,
        output_tokens=521,
        reasoning_output_tokens=104,
    )
    assert tokens(every) == "tokens in 15,000 (cached 9,500, cache write 512) out 521 (reasoning 104)"


def test_values_on_one_line() -> None:
    assert compact({"a": ["é\n", None]}) == '{"a":["é\\n",null]}'
    assert len(compact("x" * 500)) == 120
    assert compact("x" * 500, 10) == '"xxxxxxxx…'


LONG = "cat > f <<'E'\n" + 'it\'s "some" text\n' * 60_000 + "E"


def test_the_script_of_a_long_command() -> None:
    """However long it is, in no time: it is one word, quoted."""
    for shell in ("/bin/bash -lc", "sh -c"):
        assert command_script(f"{shell} {shlex.quote(LONG)}").startswith("cat > f <<'E'⏎it's \"some\" text⏎")
    for odd in (f"/bin/bash -lc {shlex.quote(LONG)} more'", f"python3 -c {shlex.quote(LONG)}"):
        assert command_script(odd).startswith(odd[:14])
