"""Tool servers over both transports, and what becomes of them. Their answers are in test_runner.py."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from exec_server.agent.mcp_client import McpOutcome, McpServer, McpServers, RequiredServerDown
from exec_server.events.model import Failure, McpResult

LISTEN = "while read line; do :; done"
"""A program that takes everything and says nothing."""

TOOLS = str(Path(__file__).parent.parent / "support" / "mcp_tools.py")


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
    assert outcome.for_model() == "a\nb\nx:z\n<audio content omitted>\n<None content omitted>"
    assert McpOutcome(None, Failure(message="no"), True).for_model() == "err: no"
