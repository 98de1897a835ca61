"""The reference's TypeScript SDK, as it is, with our command where it expects its own program."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
import zlib
from pathlib import Path
from typing import Any

import pytest

from compliance.model import Call, Model, Turn, apply_patch, exec_command
from compliance.packages import SDK, TEST_DEADLINE

pytestmark = pytest.mark.timeout(TEST_DEADLINE)

SCRIPT = """
const [sdk, program, baseUrl, given] = process.argv.slice(2);
const { Codex } = await import(sdk);
const { options, turns } = JSON.parse(given);
const codex = new Codex({ codexPathOverride: program, baseUrl, apiKey: "key", config: options.config });
const told = [];
let thread = codex.startThread(options.thread);
for (const turn of turns) {
  if (turn.resume) thread = codex.resumeThread(thread.id, options.thread);
  const extra = turn.outputSchema ? { outputSchema: turn.outputSchema } : {};
  try {
    const done = await thread.run(turn.input, extra);
    told.push({ id: thread.id, items: done.items, answer: done.finalResponse, usage: done.usage });
  } catch (error) {
    told.push({ id: thread.id, error: error.message });
  }
}
const streamed = [];
try {
  const { events } = await thread.runStreamed("stream it");
  for await (const event of events) streamed.push(event);
} catch (error) {
  streamed.push({ thrown: error.message });
}
console.log(JSON.stringify({ told, streamed }));
"""


def program() -> str:
    """Our command, as it is installed."""
    return str(Path(sysconfig.get_path("scripts")) / "exec-server")


def drive(folder: Path, turns: list[Turn], said: list[dict[str, Any]], **thread: Any) -> tuple[Any, Model]:
    """Let the SDK say something to us, with a scripted model behind us; what it understood."""
    (folder / "script.mjs").write_text(SCRIPT)
    (folder / "home").mkdir(exist_ok=True)
    options = {
        "thread": {
            "model": "scripted",
            "sandboxMode": "danger-full-access",
            "skipGitRepoCheck": True,
            "approvalPolicy": "never",
            "modelReasoningEffort": "low",
            "webSearchEnabled": False,
            "networkAccessEnabled": True,
            **thread,
        },
        "config": {"agents": {"max_threads": 0}},
    }
    node = shutil.which("node")
    assert node is not None, "node ran npm a moment ago"
    with Model(turns) as model:
        words = [
            SDK.entry().as_uri(),
            program(),
            model.base_url,
            json.dumps({"options": options, "turns": said}),
        ]
        own = {"HOME": str(folder / "home"), "CODEX_HOME": str(folder / "home"), "PATH": os.environ["PATH"]}
        done = subprocess.run(
            [node, str(folder / "script.mjs"), *words],
            env=own,
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
        if model.failures:
            raise model.failures[0]
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), model


def png() -> bytes:
    """The smallest picture: one red dot."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4) + kind + data + zlib.crc32(kind + data).to_bytes(4)

    size = (1).to_bytes(4) * 2 + bytes([8, 2, 0, 0, 0])
    pixels = zlib.compress(b"\0\xff\0\0")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def test_the_sdk_drives_us(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "dot.png").write_bytes(png())
    steps = [{"step": "look", "status": "completed"}, {"step": "say", "status": "pending"}]
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}}
    turns: list[Turn] = [
        [exec_command("pwd; exit 3"), Call("update_plan", {"plan": steps})],
        apply_patch("*** Begin Patch\n*** Add File: n.txt\n+n\n*** End Patch"),
        '{"ok": true}',
        "Still here.",
        "Streamed.",
    ]
    pictured = [
        {"type": "text", "text": "look at it"},
        {"type": "local_image", "path": f"{tmp_path}/dot.png"},
    ]
    said = [
        {"input": pictured, "outputSchema": schema},
        {"input": "and now?", "resume": True},
    ]
    understood, model = drive(
        tmp_path, turns, said, workingDirectory=str(work), additionalDirectories=[str(tmp_path)]
    )
    first, second = understood["told"]
    assert first["answer"] == '{"ok": true}'
    kinds = {item["type"]: item for item in first["items"]}
    assert kinds["command_execution"]["aggregated_output"] == f"{work}\n"
    assert (kinds["command_execution"]["status"], kinds["command_execution"]["exit_code"]) == ("failed", 3)
    assert kinds["file_change"]["changes"] == [{"path": f"{work}/n.txt", "kind": "add"}]
    assert kinds["todo_list"]["items"] == [
        {"text": "look", "completed": True},
        {"text": "say", "completed": False},
    ]
    assert first["usage"]["input_tokens"] == 3
    asked = model.requests[0]
    assert asked["model"] == "scripted"
    assert asked["reasoning"]["effort"] == "low"
    assert asked["text"]["format"]["schema"] == schema
    assert "web_search" not in [tool["type"] for tool in asked["tools"]]
    parts = asked["input"][-1]["content"]
    assert [part["type"] for part in parts] == ["input_text", "input_image", "input_text", "input_text"]
    assert parts[-1]["text"] == "look at it"

    assert (second["id"], second["answer"]) == (first["id"], "Still here.")
    assert "look at it" in json.dumps(model.requests[3]["input"]), "it is the same thread"
    types = [event["type"] for event in understood["streamed"]]
    assert types == ["thread.started", "turn.started", "item.completed", "turn.completed"]
    assert understood["streamed"][0]["thread_id"] == first["id"]


def test_the_sdk_hears_of_a_failure(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    understood, model = drive(tmp_path, [], [{"input": "x"}], workingDirectory=nowhere)
    assert f"{nowhere}: no such directory" in understood["told"][0]["error"]
    assert "exited with code 1" in understood["streamed"][0]["thrown"]
    assert model.requests == []
