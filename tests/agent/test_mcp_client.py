"""Tool servers over both transports, and what becomes of them. Their answers are in test_runner.py."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from exec_server.agent import mcp_http, mcp_listing, mcp_process
from exec_server.agent.mcp_client import McpServer, McpServers, RequiredServerDown
from exec_server.agent.mcp_outcome import McpOutcome
from exec_server.events.model import Failure, McpResult
from support.mcp_http import HttpTools, Refuse
from support.wait import PATIENCE, eventually

LISTEN = "while read line; do :; done"
"""A program that takes everything and says nothing."""

TOOLS = str(Path(__file__).parent.parent / "support" / "mcp_tools.py")
RAW = str(Path(__file__).parent.parent / "support" / "mcp_raw.py")


def raw(what: str, **more: Any) -> McpServer:
    return McpServer(name="raw", command=sys.executable, args=(RAW, what), **more)


def started(server: McpServer) -> McpServers:
    """What came of starting a server and letting it go again."""

    async def main() -> McpServers:
        async with McpServers([server]) as servers:
            return servers

    return asyncio.run(main())


def names(servers: McpServers) -> list[str]:
    return [tool.name for tool in servers.tools.values()]


def test_over_http(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("word")
    command = [
        sys.executable,
        "-m",
        "exec_server",
        "mcp",
        "--listen",
        "http://127.0.0.1:0",
        "--listen-token-file",
        "token",
    ]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()

        async def main() -> None:
            allowed = McpServer(name="box", url=url, headers={"Authorization": "Bearer word"})
            stranger = McpServer(name="stranger", url=url)
            async with McpServers([allowed, stranger]) as servers:
                assert "mcp__box__exec_command" in servers.tools
                assert len(servers.warnings) == 1
                assert servers.warnings[0].startswith("MCP server `stranger` failed to start: ")
                outcome = await servers.call("box", "exec_command", {"cmd": "echo hi", "login": False})
                assert not outcome.failed
                assert '"output":"hi\\n"' in str(outcome.for_model())

        try:
            asyncio.run(main())
        finally:
            process.terminate()


def test_names_that_models_cannot_say() -> None:
    async def main() -> None:
        twins = [McpServer(name=name, command=sys.executable, args=(TOOLS,)) for name in ("a b", "a.b")]
        async with McpServers(twins) as servers:
            tool = servers.tools["mcp__a_b__echo"]
            assert (tool.server, tool.name) == ("a b", "echo")
            assert "MCP tool `echo` of `a.b` is left out: `mcp__a_b__echo` is taken" in servers.warnings

    asyncio.run(main())


def test_a_server_that_does_not_answer() -> None:
    async def main(required: bool) -> list[str]:
        mute = McpServer(
            name="mute", command="sh", args=("-c", LISTEN), startup_seconds=0.2, required=required
        )
        async with McpServers([mute]) as servers:
            return servers.warnings

    (warning,) = asyncio.run(main(False))
    assert warning == "MCP server `mute` failed to start: no answer within 0.2 s"
    with pytest.raises(RequiredServerDown, match="required MCP server `mute` failed to start: no answer"):
        asyncio.run(main(True))


def test_blocks_of_every_kind() -> None:
    blocks = (
        {"type": "text", "text": "a"},
        {"type": "resource", "resource": {"uri": "x:y", "text": "b"}},
        {"type": "resource_link", "uri": "x:z", "name": "z"},
        {"type": "audio", "data": "", "mimeType": "audio/wav"},
        "nonsense",
    )
    outcome = McpOutcome(McpResult(content=blocks), None, False)
    assert outcome.for_model() == 'a\nb\nx:z\n<audio content omitted>\n"nonsense"'
    assert McpOutcome(None, Failure(message="no"), True).for_model() == "err: no"


ODD = """
import json, sys

def say(**message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)

print("a line of a log, on stdout", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    if asked["method"] == "initialize":
        told = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
                "serverInfo": {"name": "odd", "version": "1"}}
    elif asked["method"] == "tools/list":
        told = {"tools": [{"name": "odd", "inputSchema": {"type": "object"}}]}
    elif asked["method"] == "tools/call":
        told = {"strange": {"content": [{"type": "hologram", "data": [1, 2]}, {"type": "text", "text": "and"},
                                        {"type": "image", "data": "aGk="}]},
                "silent": {"content": [], "isError": True},
                "half": {"content": [{"type": "text", "text": "\\ud800x"}]}}[asked["params"]["name"]]
    else:
        say(id=asked["id"], error={"code": -32601, "message": "no"})
        continue
    say(id=asked["id"], result=told)
"""


def test_a_server_that_says_odd_things(capfd: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        async with McpServers([McpServer(name="odd", command=sys.executable, args=("-c", ODD))]) as servers:
            assert servers.warnings == []
            strange = await servers.call("odd", "strange", {})
            assert strange.result is not None
            assert strange.result.content == (
                {"type": "hologram", "data": [1, 2]},
                {"type": "text", "text": "and"},
                {"type": "image", "data": "aGk="},
            ), "as they came"
            assert not strange.failed
            parts = strange.for_model()
            assert isinstance(parts, list)
            assert parts[0]["text"] == '{"type": "hologram", "data": [1, 2]}'
            silent = await servers.call("odd", "silent", {})
            assert silent.failed
            assert silent.for_model() == "err: the tool failed, and did not say why"
            half = await servers.call("odd", "half", {})
            assert half.for_model() == "\ufffdx"

    asyncio.run(main())
    assert capfd.readouterr().err == "", "a line of a server's log is no reason for a traceback"


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import sys; sys.exit('no licence\\nfound')", "it exited with code 1, saying: no licence; found"),
        ("import os; os.kill(os.getpid(), 9)", "it was killed by signal 9"),
        ("raise SystemExit(3)", "it exited with code 3"),
    ],
)
def test_a_server_that_ends_at_once_says_how(program: str, said: str) -> None:
    async def main() -> list[str]:
        server = McpServer(name="gone", command=sys.executable, args=("-c", program))
        async with McpServers([server]) as servers:
            return servers.warnings

    assert asyncio.run(main()) == [f"MCP server `gone` failed to start: {said}"]


def test_a_server_whose_pipes_somebody_else_holds_is_not_waited_for(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    stays = (
        f"import subprocess; open({str(pid_file)!r}, 'w').write(str(subprocess.Popen(['sleep', '60']).pid))\n"
    )

    async def main() -> None:
        server = McpServer(name="odd", command=sys.executable, args=("-c", stays + ODD))
        async with asyncio.timeout(50), McpServers([server]) as servers:
            assert servers.warnings == []

    try:
        asyncio.run(main())
    finally:
        os.kill(int(pid_file.read_text()), signal.SIGKILL)


def test_a_server_that_does_not_go_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With everything it has started."""
    monkeypatch.setattr(mcp_process, "END_SECONDS", 0.2)
    stays = (
        "import os, subprocess, signal, sys; signal.signal(15, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
    )
    program = stays + ODD + "\nimport time; time.sleep(1000)"

    async def main() -> None:
        async with McpServers(
            [McpServer(name="odd", command=sys.executable, args=("-c", program))]
        ) as servers:
            assert servers.warnings == []

    asyncio.run(main())
    pid = (tmp_path / "pid").read_text()

    def is_gone() -> bool:
        try:
            return not Path(f"/proc/{pid}/cmdline").read_bytes()
        except FileNotFoundError:
            return True

    eventually(is_gone, "the end of what it started")


# What they offer -------------------------------------------------------------------------------------------


def test_a_list_of_tools_that_comes_in_pages() -> None:
    assert names(started(raw("pages"))) == ["p0", "p1", "p2", "p3", "p4", "p5"]


def test_a_list_of_tools_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_listing, "MAX_PAGES", 7)
    endless = started(raw("endless"))
    assert len(names(endless)) == 7
    assert endless.warnings == ["MCP server `raw`: its list of tools has no end; the first 7 are offered"]
    circle = started(raw("circle"))
    assert names(circle) == ["p0", "p1", "p2"]
    assert "its list of tools has no end" in circle.warnings[-1]


@pytest.mark.parametrize(
    ("configured", "offered"),
    [
        ({"enabled_tools": ("p1", "p3")}, ["p1", "p3"]),
        ({"disabled_tools": ("p0", "p2", "p4")}, ["p1", "p3", "p5"]),
        ({"enabled_tools": ("p1", "p3"), "disabled_tools": ("p3",)}, ["p1"]),
        ({"enabled_tools": ()}, []),
    ],
)
def test_tools_that_are_not_for_the_model(configured: dict[str, Any], offered: list[str]) -> None:
    assert names(started(raw("pages", **configured))) == offered


def test_one_tool_that_cannot_be_told_of_does_not_cost_the_others() -> None:
    servers = started(raw("unfit"))
    assert names(servers) == ["echo", "none", "bare"]
    empty = {"type": "object", "properties": {}}
    assert [tool.offered["parameters"] for tool in servers.tools.values()] == [empty] * 3
    assert servers.warnings == [
        "MCP server `raw`: tool `null` is left out: its `inputSchema` is not the schema of an object",
        "MCP server `raw`: tool `text` is left out: its `inputSchema` is not the schema of an object",
        "MCP server `raw`: a tool without a name is left out",
        "MCP server `raw`: tool `described` is left out: `description`: Input should be a valid string",
    ]


def test_what_is_no_answer_is_said_in_one_line() -> None:
    (warning,) = started(raw("odd")).warnings
    assert warning.startswith("MCP server `raw` failed to start: it answered what is none: `")
    assert "\n" not in warning
    assert "http" not in warning


def test_tools_that_change() -> None:
    async def main() -> None:
        async with McpServers([raw("changing")]) as servers:
            assert await servers.refresh() == []
            assert names(servers) == ["echo"]
            await servers.call("raw", "echo", {})
            assert await servers.refresh() == []
            assert names(servers) == ["later"]

    asyncio.run(main())


CHANGING = """
import anyio, mcp_types as types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ToolsListChanged

bus, names = InMemorySubscriptionBus(), ["echo"]

async def list_tools(_, __):
    return types.ListToolsResult(tools=[types.Tool(name=n, input_schema={"type": "object"}) for n in names])

async def call_tool(_, params):
    names[:] = ["later"]
    await bus.publish(ToolsListChanged())
    return types.CallToolResult(content=[])

async def main():
    server = Server("changing", on_list_tools=list_tools, on_call_tool=call_tool,
                    on_subscriptions_listen=ListenHandler(bus))
    async with stdio_server() as (incoming, outgoing):
        await server.run(incoming, outgoing, server.create_initialization_options())

anyio.run(main)
"""


def test_tools_that_change_in_the_newer_protocol() -> None:
    """There, only those are told who listen."""

    async def main() -> None:
        server = McpServer(name="new", command=sys.executable, args=("-c", CHANGING))
        async with McpServers([server]) as servers, asyncio.timeout(PATIENCE):
            assert names(servers) == ["echo"]
            while names(servers) != ["later"]:  # it may not be listened to yet when it changes first
                await servers.call("new", "echo", {})
                await servers.refresh()

    asyncio.run(main())


def test_instructions() -> None:
    assert started(raw("")).instructions == {"raw": "Use me well."}
    assert started(raw("", disabled_tools=("echo",))).instructions == {}, "of what is not offered"


@pytest.mark.parametrize(("given", "shown"), [([1], "[1]"), ("x", '"x"'), (7, "7"), (False, "false")])
def test_arguments_that_are_no_object(given: Any, shown: str) -> None:
    async def main() -> McpOutcome:
        async with McpServers([raw("")]) as servers:
            return await servers.call("raw", "echo", given)

    outcome = asyncio.run(main())
    assert outcome.failed
    assert outcome.for_model() == (
        "err: tool call error: tool call failed for `raw/echo`\n\nCaused by:\n"
        f"    MCP tool arguments must be a JSON object, got {shown}"
    )


# Over HTTP -------------------------------------------------------------------------------------------------


def called(tools: HttpTools, times: int, **more: Any) -> list[str]:
    """What comes of that many calls, one after the other."""

    async def main() -> list[str]:
        async with McpServers([McpServer(name="h", url=tools.url, **more)]) as servers:
            assert servers.warnings == []
            outcomes = [await servers.call("h", "echo", {}) for _ in range(times)]
            return [str(outcome.for_model()).rpartition("\n    ")[2] for outcome in outcomes]

    return asyncio.run(main())


def test_a_call_over_http_that_is_not_answered_costs_only_itself() -> None:
    with HttpTools(None, "here again") as tools:
        first, second = called(tools, 2, tool_seconds=0.2)
    assert (first, second) == ("timed out awaiting tools/call after 0.2s", "here again")


def test_a_request_that_fails_late_costs_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its caller has given up before; the request itself does so later."""
    monkeypatch.setattr(mcp_http, "GRACE_SECONDS", 0.1)
    with HttpTools(None, None, "here again") as tools:
        *_, last = called(tools, 3, tool_seconds=0.2)
    assert last == "here again"


def test_a_status_is_told() -> None:
    with HttpTools(Refuse(500, '{"x": 1}'), Refuse(503), "back") as tools:
        assert called(tools, 3) == [
            'Mcp error: -32603: unexpected server response: HTTP 500: {"x": 1}',
            "Mcp error: -32603: unexpected server response: HTTP 503",
            "back",
        ]
    with HttpTools(door=Refuse(401, "who are you?")) as tools:
        (warning,) = started(McpServer(name="h", url=tools.url)).warnings
    assert warning == ("MCP server `h` failed to start: unexpected server response: HTTP 401: who are you?")


def test_a_server_over_http_that_is_gone() -> None:
    with HttpTools("unused") as tools:
        url = tools.url
    (warning,) = started(McpServer(name="h", url=url)).warnings
    assert warning.startswith("MCP server `h` failed to start: HTTP request failed: ")


def test_a_session_that_the_server_has_forgotten_begins_again() -> None:
    with HttpTools(Refuse(404, "session not found"), "new session") as tools:
        assert called(tools, 1) == ["new session"]
    assert [method for method, _ in tools.asked].count("initialize") == 2
