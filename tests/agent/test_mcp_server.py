"""The MCP server with the official client: the real command, over both transports, on a real machine."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from support.server import RunningServer
from support.wait import PATIENCE, eventually, eventually_async

PROGRAM = [sys.executable, "-m", "exec_server", "mcp"]

Work = Callable[[Client], Awaitable[None]]


@contextmanager
def listening(*arguments: str, cwd: Path, listen: str = "http://127.0.0.1:0") -> Iterator[str]:
    """The server over HTTP; gives its address."""
    process = subprocess.Popen(
        [*PROGRAM, "--listen", listen, *arguments], cwd=cwd, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        if process.stdout is not None:
            process.stdout.close()


def on_stdio(*arguments: str, cwd: Path, mode: Any = "auto") -> Client:
    command, *words = PROGRAM
    env = {name: value for name, value in os.environ.items() if not name.startswith("EXEC_SERVER_")}
    parameters = StdioServerParameters(command=command, args=[*words, *arguments], cwd=cwd, env=env)
    return Client(parameters, mode=mode, read_timeout_seconds=60)


@pytest.fixture(params=["stdio", "http"])
def talk(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., None]:
    """Do something with a client that is connected, over either transport. The server ends with it."""

    def run(work: Work, mode: Any = "auto") -> None:
        async def main(client: Client) -> None:
            async with client:
                await work(client)

        if request.param == "stdio":
            asyncio.run(main(on_stdio(cwd=tmp_path, mode=mode)))
        else:
            with listening(cwd=tmp_path) as url:
                asyncio.run(main(Client(url, mode=mode, read_timeout_seconds=60)))

    return run


async def said(client: Client, name: str, **arguments: Any) -> str:
    """What a tool answers; AssertionError if that is an error."""
    result = await client.call_tool(name, arguments)
    text = "".join(getattr(block, "text", "") for block in result.content)
    assert not result.is_error, text
    return text


async def refused(client: Client, name: str, **arguments: Any) -> str:
    result = await client.call_tool(name, arguments)
    text = "".join(getattr(block, "text", "") for block in result.content)
    assert result.is_error, text
    return text


async def seen(client: Client, number: int, text: str) -> None:
    """Wait until something is on the screen."""
    async with asyncio.timeout(PATIENCE):
        while text not in await said(client, "screen", session_id=number):
            await said(client, "write_stdin", session_id=number, yield_time_ms=250)


def test_everything_a_client_can_do(talk: Callable[..., None], tmp_path: Path) -> None:
    async def work(client: Client) -> None:
        listed = await client.list_tools()
        names = [tool.name for tool in listed.tools]
        assert names == [
            *("exec_command", "write_stdin", "screen", "list_commands", "terminate", "apply_patch"),
            *("read_file", "write_file", "list_directory", "find_files", "search_files"),
        ]
        assert all(tool.input_schema["type"] == "object" for tool in listed.tools)
        assert all(tool.title and tool.annotations for tool in listed.tools)
        hints = {tool.name: tool.annotations for tool in listed.tools if tool.annotations is not None}
        assert [name for name, hint in hints.items() if hint.read_only_hint] == [
            *("screen", "list_commands", "read_file", "list_directory", "find_files", "search_files")
        ]
        assert not any(hint.read_only_hint and hint.destructive_hint for hint in hints.values())
        assert [name for name, hint in hints.items() if hint.open_world_hint] == [
            *("exec_command", "write_stdin")
        ]
        # What comes back is checked against these by the client, with every call below.
        assert [tool.name for tool in listed.tools if tool.output_schema is not None] == [
            *("exec_command", "write_stdin", "screen", "list_commands")
        ]
        assert "no command is running" in await said(client, "list_commands")

        result = await client.call_tool("exec_command", {"cmd": "echo hi; exit 3", "login": False})
        assert result.structured_content is not None
        assert result.structured_content["exit_code"] == 3
        assert result.structured_content["output"] == "hi\n"

        ask = "printf 'name? '; read x; echo got $x"
        text = await said(client, "exec_command", cmd=ask, tty=True, login=False, yield_time_ms=250)
        found = re.search(r"session ID (\d+)", text)
        assert found is not None, text
        number = int(found[1])
        await seen(client, number, "name?")
        assert "got me" in await said(
            client, "write_stdin", session_id=number, chars="me\n", yield_time_ms=5000
        )
        assert (
            await refused(client, "screen", session_id=number)
            == f"screen failed: Unknown process id {number}"
        )

        assert (
            await said(client, "write_file", path="deep/a.py", content="x = 1\ny = 2\n")
            == "wrote 12 bytes to deep/a.py"
        )
        assert (tmp_path / "deep/a.py").read_text() == "x = 1\ny = 2\n"
        assert await said(client, "read_file", path="deep/a.py", line=2) == "y = 2\n"
        assert await said(client, "list_directory") == "deep/"
        assert (await said(client, "find_files", pattern="**/*.py")).endswith("deep/a.py")
        assert (await said(client, "search_files", pattern="y =")).endswith("deep/a.py:2: y = 2")
        patch = "*** Begin Patch\n*** Update File: deep/a.py\n@@\n-x = 1\n+x = 3\n*** End Patch"
        assert "M deep/a.py" in await said(client, "apply_patch", input=patch)
        assert (tmp_path / "deep/a.py").read_text() == "x = 3\ny = 2\n"

        assert "verification failed" in await refused(client, "apply_patch", input=patch)
        assert "read_file failed: nowhere: No such file" in await refused(client, "read_file", path="nowhere")
        assert "failed to parse function arguments" in await refused(client, "exec_command", command="echo")
        assert "Unknown process id 77" in await refused(client, "write_stdin", session_id=77)
        with pytest.raises(MCPError, match="Unknown tool: frobnicate"):
            await client.call_tool("frobnicate", {})

    talk(work)


def test_a_client_of_the_older_protocol(talk: Callable[..., None]) -> None:
    async def work(client: Client) -> None:
        assert len((await client.list_tools()).tools) == 11
        assert "hi" in await said(client, "exec_command", cmd="echo hi", login=False)

    talk(work, "legacy")


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_a_command_nobody_can_reach_any_more_is_ended(tmp_path: Path, mode: Any) -> None:
    """A call that is cancelled before it has told its session id."""

    async def work(client: Client) -> None:
        sleep = "echo $$ > pid; exec sleep 1000"
        arguments = {"cmd": sleep, "login": False, "yield_time_ms": 30_000}
        call = asyncio.ensure_future(client.call_tool("exec_command", arguments))
        await eventually_async(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "it")
        call.cancel()
        await asyncio.wait([call])
        await eventually_async(lambda: is_gone(tmp_path / "pid"), "the end of the command")
        assert await said(client, "list_commands") == "no command is running"
        await list_and_end(client, tmp_path / "pid")

    async def main() -> None:
        async with on_stdio(cwd=tmp_path, mode=mode) as client:
            await work(client)

    asyncio.run(main())


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_a_client_that_vanishes_leaves_no_command_behind(tmp_path: Path, mode: str) -> None:
    """One over HTTP that is killed in the middle of a call; the server goes on."""
    program = (
        "import asyncio, sys; from mcp import Client\n"
        "async def main():\n"
        "    async with Client(sys.argv[1], mode=sys.argv[2]) as client:\n"
        "        await client.call_tool('exec_command', {'cmd': 'echo $$ > pid; exec sleep 1000',\n"
        "            'login': False, 'yield_time_ms': 30000})\n"
        "asyncio.run(main())"
    )
    with listening(cwd=tmp_path) as url:
        client = subprocess.Popen([sys.executable, "-c", program, url, mode])
        try:
            eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the command")
        finally:
            client.kill()
            client.wait()
        eventually(lambda: is_gone(tmp_path / "pid"), "the end of the command")


async def list_and_end(client: Client, pid_file: Path) -> None:
    """What runs is listed, and can be ended."""
    arguments = {"cmd": "echo $$ > pid; exec sleep 1000", "login": False, "yield_time_ms": 250}
    begun = (await client.call_tool("exec_command", arguments)).structured_content
    assert begun is not None
    number = begun["session_id"]
    listed = await client.call_tool("list_commands", {})
    assert listed.structured_content is not None
    (one,) = listed.structured_content["commands"]
    assert one["session_id"] == number
    assert one["command"][-1] == arguments["cmd"]
    assert str(number) in await said(client, "list_commands")
    assert await said(client, "terminate", session_id=number) == f"ended {number}"
    await eventually_async(lambda: is_gone(pid_file), "the end of the command")
    assert f"Unknown process id {number}" in await refused(client, "terminate", session_id=number)
    assert await said(client, "list_commands") == "no command is running"


def is_gone(pid_file: Path) -> bool:
    """Whether the process whose number is in the file is over."""
    try:
        return not Path(f"/proc/{int(pid_file.read_text())}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):  # the latter while it is being read
        return True


def test_every_line_on_stdin_is_answered(tmp_path: Path) -> None:
    hello = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "initialize",
        "params": {
            "protocolVersion": "2025-06-18",
            "capabilities": {},
            "clientInfo": {"name": "test", "version": "1"},
        },
    }
    half = (
        '{"jsonrpc":"2.0","id":4,"method":"tools/call","params":{"name":"exec_command",'
        '"arguments":{"cmd":"printf %s \\ud800x","login":false}}}'
    )
    lines = [
        "this is no json",
        json.dumps(hello),
        '{"jsonrpc":"2.0","method":"notifications/initialized"}',
        '{"jsonrpc":"2.0","id":7}',
        "[]",
        '{"jsonrpc":"2.0","id":null,"method":"ping"}',
        '{"jsonrpc":"2.0","id":1.5,"method":"ping"}',
        '{"jsonrpc":"2.0","id":true,"method":"ping"}',
        half,
    ]
    process = subprocess.Popen(
        PROGRAM, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("".join(line + "\n" for line in lines))
        process.stdin.flush()
        answers = [json.loads(process.stdout.readline()) for _ in range(8)]
        process.stdin.close()
    codes = [(one["id"], one["error"]["code"]) for one in answers if "error" in one]
    assert sorted(codes, key=str) == [(7, -32600), *[(None, -32600)] * 4, (None, -32700)]
    (said_to_it,) = [one["result"] for one in answers if one["id"] == 4]
    assert said_to_it["structuredContent"]["output"] == "\ufffdx"


def test_commands_end_with_the_server(talk: Callable[..., None], tmp_path: Path) -> None:
    async def work(client: Client) -> None:
        sleep = "echo $$ > pid; exec sleep 1000"
        await said(client, "exec_command", cmd=sleep, login=False, yield_time_ms=250)
        await eventually_async((tmp_path / "pid").exists, "the command")
        await eventually_async((tmp_path / "pid").read_text, "its number")

    talk(work)
    eventually(lambda: is_gone(tmp_path / "pid"), "the end of the command")


def test_a_sandbox_confines_commands_and_files(tmp_path: Path, needs_bubblewrap: None) -> None:
    async def main() -> None:
        async with on_stdio("--sandbox", "read-only", cwd=tmp_path) as client:
            result = await client.call_tool("exec_command", {"cmd": "echo x > file"})
            assert not (tmp_path / "file").exists(), result
            await refused(client, "write_file", path="file", content="x")
            patch = "*** Begin Patch\n*** Add File: file\n+x\n*** End Patch"
            await refused(client, "apply_patch", input=patch)
            assert await said(client, "list_directory", path=str(tmp_path)) == "[the directory is empty]"

    asyncio.run(main())
    assert not (tmp_path / "file").exists()


def test_another_machine(server: RunningServer, tmp_path: Path) -> None:
    async def main() -> None:
        async with on_stdio("--url", server.url, cwd=tmp_path) as client:
            parent = await said(client, "exec_command", cmd="cat /proc/$PPID/cmdline | tr '\\0' ' '")
            assert "--listen" in parent

    asyncio.run(main())


def test_a_machine_that_was_lost_is_found_again(
    start_server: Callable[..., RunningServer], tmp_path: Path
) -> None:
    socket = f"unix://{tmp_path}/s"

    async def main() -> None:
        first = start_server("--detach-ttl", "0", listen=socket)
        async with on_stdio("--url", socket, cwd=tmp_path) as client:
            assert "hi" in await said(client, "exec_command", cmd="echo hi")
            first.end()
            start_server(listen=socket)
            # The first call finds out that its session is gone, and says so; the next has another.
            for _ in range(2):
                result = await client.call_tool("exec_command", {"cmd": "echo again"})
            assert not result.is_error, result

    asyncio.run(main())


def test_a_machine_that_is_not_there(tmp_path: Path) -> None:
    done = subprocess.run(
        [*PROGRAM, "--url", f"unix://{tmp_path}/nobody"],
        input="",
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "address", ["ws://127.0.0.1:0", "http://localhost:0", "http://127.0.0.1", "nonsense"]
)
def test_an_address_that_is_none(tmp_path: Path, address: str) -> None:
    done = subprocess.run(
        [*PROGRAM, "--listen", address], capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "expected http://IP:PORT" in done.stderr


def test_nobody_gets_in_off_loopback_without_a_token(tmp_path: Path) -> None:
    done = subprocess.run(
        [*PROGRAM, "--listen", "http://0.0.0.0:0"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "refusing to listen on 0.0.0.0:0 without authentication" in done.stderr


@asynccontextmanager
async def with_token(url: str, token: str) -> AsyncIterator[Client]:
    import httpx2

    headers = {"Authorization": f"Bearer {token}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=60) as http,
        Client(streamable_http_client(url, http_client=http)) as client,
    ):
        yield client


def test_a_token(tmp_path: Path) -> None:
    import httpx2

    (tmp_path / "token").write_text("secret-of-the-house\n")
    with listening("--listen-token-file", "token", cwd=tmp_path) as url:

        async def main() -> None:
            async with with_token(url, "secret-of-the-house") as client:
                assert "hi" in await said(client, "exec_command", cmd="echo hi")

        asyncio.run(main())
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            answer = httpx2.post(url, json={}, headers=headers)
            assert answer.status_code == 401, headers


def test_a_page_in_a_browser_is_kept_out(tmp_path: Path) -> None:
    import httpx2

    with listening(cwd=tmp_path) as url:
        ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
        accept = {"Accept": "application/json, text/event-stream"}
        evil = httpx2.post(url, json=ping, headers={**accept, "Origin": "https://evil.example"})
        assert evil.status_code == 403
        rebound = httpx2.post(url, json=ping, headers={**accept, "Host": "evil.example"})
        assert rebound.status_code == 421
