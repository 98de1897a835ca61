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


def test_we_conform_over_websocket(server: RunningServer) -> None:
    report = asyncio.run(check_server(server.url))
    report.raise_for_failures()
    skipped = {outcome.detail for outcome in report.outcomes if outcome.result == "skipped"}
    assert skipped == {"only for a server that is started here"}
    assert len(report.outcomes) == len(CHECKS)


def test_we_conform_over_stdio() -> None:
    report = asyncio.run(check_server([COMMAND, "--listen", "stdio"]))
    report.raise_for_failures()
    skipped = [outcome.detail for outcome in report.outcomes if outcome.result == "skipped"]
    assert set(skipped) == {"one connection per server"}


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


def test_the_command_line(server: RunningServer) -> None:
    module = [sys.executable, "-m", "exec_server.testing"]
    assert subprocess.run(module, capture_output=True).returncode == 2
    assert subprocess.run([*module, "stdio:"], capture_output=True).returncode == 2
    told = subprocess.run([*module, "--help"], capture_output=True, text=True)
    assert (told.returncode, told.stderr) == (0, "")
    assert "stdio:COMMAND" in told.stdout
    pipe = f"stdio:{COMMAND} --listen stdio"
    assert subprocess.run([*module, pipe], capture_output=True).returncode == 0
    done = subprocess.run([*module, server.url], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    skipped = sum(bool(check.options) for check in CHECKS)
    assert f"{len(CHECKS) - skipped} passed, 0 failed, {skipped} skipped" in done.stdout
