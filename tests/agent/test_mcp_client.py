"""Tool servers over both transports, and what becomes of them. Their answers are in test_runner.py."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from exec_server.agent import mcp_process
from exec_server.agent.mcp_client import McpOutcome, McpServer, McpServers, RequiredServerDown
from exec_server.events.model import Failure, McpResult
from support.wait import eventually

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
