"""Our server passes our own kit, and the kit notices servers that do not."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from exec_server.testing import check_server
from exec_server.testing.conformance import CHECKS
from support.server import COMMAND, RunningServer

MODULE = [sys.executable, "-m", "exec_server.testing"]


def test_we_conform_over_websocket(server: RunningServer) -> None:
    report = asyncio.run(check_server(server.url))
    report.raise_for_failures()
    skipped = {outcome.detail for outcome in report.outcomes if outcome.result == "skipped"}
    assert skipped == {"only for a server that is started here"}
    assert len(report.outcomes) == len(CHECKS)


def test_we_conform_over_stdio() -> None:
    """As everybody can ask it: from the command line."""
    done = subprocess.run([*MODULE, f"stdio:{COMMAND} --listen stdio"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    skipped = [line for line in done.stdout.splitlines() if line.startswith("skipped")]
    assert skipped
    assert all("one connection per server" in line for line in skipped)
    assert f"{len(CHECKS) - len(skipped)} passed, 0 failed, {len(skipped)} skipped" in done.stdout


LIAR = """
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("method") == "initialize":
        answer = {"sessionId": "s", "environmentInfo": {"capabilities": {"processWait": True}}}
    elif message.get("method") == "environment/status":
        answer = {"status": "ready"}
    elif "id" in message:
        answer = {}
    else:
        continue
    print(json.dumps({"id": message["id"], "result": answer}), flush=True)
"""


def test_a_server_that_only_pretends_fails(tmp_path: Path) -> None:
    script = tmp_path / "liar.py"
    script.write_text(LIAR)
    report = asyncio.run(check_server([sys.executable, str(script)], only="refused"))
    assert [outcome.result for outcome in report.failures] == ["failed"]
    with pytest.raises(AssertionError, match="methods before the handshake are refused"):
        report.raise_for_failures()
    assert "failed" in str(report)


def test_the_command_line() -> None:
    assert subprocess.run(MODULE, capture_output=True).returncode == 2
    assert subprocess.run([*MODULE, "stdio:"], capture_output=True).returncode == 2
    told = subprocess.run([*MODULE, "--help"], capture_output=True, text=True)
    assert (told.returncode, told.stderr) == (0, "")
    assert "stdio:COMMAND" in told.stdout
    nobody = subprocess.run([*MODULE, "ws://127.0.0.1:1"], capture_output=True, text=True)
    assert (nobody.returncode, nobody.stdout) == (1, "")
    assert "could not even be talked to" in nobody.stderr
