"""Tools of servers in a turn: what is told of them, and who may let them be called."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from exec_server.agent.approvals import Question
from exec_server.agent.mcp_client import McpServer
from exec_server.agent.policy import Policy, ToolRule
from support import streams
from support.agent import play
from support.model_server import (
    Say,
    call,
)

TOOLS = str(Path(__file__).parent.parent / "support" / "mcp_tools.py")


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


RAW = str(Path(__file__).parent.parent / "support" / "mcp_raw.py")


def test_tools_that_change_during_a_turn(tmp_path: Path) -> None:
    raw = McpServer(name="raw", command=sys.executable, args=(RAW, "changing"))
    calls = [Say([call(f"mcp__raw__{name}", {}, f"call_{name}")]) for name in ("echo", "later")]
    done = play(tmp_path, *calls, "ok", servers=[raw])
    assert [item["status"] for item in done.items("mcp_tool_call")] == ["completed", "completed"]
    offered = [
        [tool["name"] for tool in request["tools"] if tool["name"].startswith("mcp__")]
        for request in done.model.requests
    ]
    assert offered == [["mcp__raw__echo"], ["mcp__raw__later"], ["mcp__raw__later"]]
    assert "## Tools mcp__raw__*\nUse me well." in done.model.said_to(0)


def test_arguments_that_are_no_object(tmp_path: Path) -> None:
    raw = McpServer(name="raw", command=sys.executable, args=(RAW, ""))
    done = play(tmp_path, Say([call("mcp__raw__echo", "[1]")]), "ok", servers=[raw])
    (item,) = done.items("mcp_tool_call")
    assert (item["status"], item["arguments"]) == ("failed", [1])
    assert item["error"]["message"].endswith("MCP tool arguments must be a JSON object, got [1]")


# Approvals -------------------------------------------------------------------------------------------------

ECHO = call("mcp__docs__echo", {"q": 1})


def docs(**more: Any) -> list[McpServer]:
    return [McpServer(name="docs", command=sys.executable, args=(TOOLS,), **more)]


def test_a_call_that_needs_approval_as_recorded(tmp_path: Path) -> None:
    done = play(tmp_path, Say([ECHO]), "Not allowed.", servers=docs(), mode="workspace-write")
    recorded = [json.loads(line) for line in streams.stream("mcp_needs_approval").split(b"\n") if line]
    assert done.events[1:] == recorded[1:]
    assert done.output() == "err: MCP tool call requires approval, but approval policy is never"


def test_somebody_is_asked_about_a_call(tmp_path: Path) -> None:
    asked: list[str] = []

    async def ask(question: Question) -> bool:
        asked.append(f"{question.text} {question.what}")
        return '"q": 1' in question.what

    calls = [ECHO, call("mcp__docs__echo", {"q": 2}, "call_2")]
    done = play(tmp_path, Say(calls), "ok", servers=docs(), approvals="on-request", ask=ask)
    assert asked == [f'May this tool be called? docs/echo {{"q": {number}}}' for number in (1, 2)]
    allowed, refused = sorted(done.items("mcp_tool_call"), key=lambda item: item["arguments"]["q"])
    assert (allowed["status"], refused["status"]) == ("completed", "failed")
    assert refused["error"] == {"message": "user rejected MCP tool call"}


@pytest.mark.parametrize(
    ("configured", "rules", "completed"),
    [
        # As the tools say of themselves; one that contradicts itself is taken at its worst word.
        ({}, (), {"structured", "picture"}),
        (
            {"approval": "approve", "tool_approvals": {"echo": "prompt"}},
            (ToolRule("docs", "picture", "ask"), ToolRule("docs", "empty", "forbid", "no")),
            {"structured"},
        ),
        (
            {"approval": "prompt", "tool_approvals": {"echo": "approve"}},
            (ToolRule("docs", "empty", "allow"),),
            {"echo", "empty"},
        ),
    ],
)
def test_what_is_configured_about_calls(
    tmp_path: Path, configured: dict[str, Any], rules: tuple[ToolRule, ...], completed: set[str]
) -> None:
    names = ["echo", "structured", "picture", "empty"]
    calls = [call(f"mcp__docs__{name}", {}, f"call_{name}") for name in names]
    servers, policy = docs(**configured), Policy(tools=rules)
    done = play(tmp_path, Say(calls), "ok", servers=servers, mode="read-only", policy=policy)
    items = {item["tool"]: item["status"] for item in done.items("mcp_tool_call")}
    assert items == {name: "completed" if name in completed else "failed" for name in names}
