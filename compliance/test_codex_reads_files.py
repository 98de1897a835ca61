"""The reference's client reads its project through the server under test: its instructions, skills, images.

The server has another disk than the client: where the client sees an empty workspace, the server sees the
project. What reaches the model can only have come through `fs/*`.
"""

from __future__ import annotations

import base64
import json
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from compliance.harness import Codex, Run
from compliance.model import Turn, exec_command, view_image
from compliance.proxy import Message, Proxy
from compliance.server import Server

HIDE = 'mount --bind "$0" "$1" && shift && exec "$@"'
"""Shell: put one folder in the place of another, for this program only, and become the program."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """What the server sees as the workspace."""
    project = tmp_path / "project"
    (project / ".git").mkdir(parents=True)
    return project


@pytest.fixture
def elsewhere(server_command: list[str], tmp_path: Path, workspace: Path, project: Path) -> Iterator[Server]:
    """A server on a machine of its own, as far as the workspace goes."""
    user = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
    apart = ["unshare", *user, "--mount", "--propagation", "private"]
    server = Server([*apart, "sh", "-c", HIDE, str(project), str(workspace), *server_command], tmp_path)
    try:
        yield server
        assert server.exit_code is None, f"the server died during the test\n{server.report()}"
    finally:
        server.stop()


def seen_by_the_model(run: Run) -> str:
    """Everything the model was told before its first answer."""
    return json.dumps(run.requests[0]["input"])


def contents_read(proxy: Proxy, workspace: Path) -> dict[str, bytes]:
    """What the client read, by the path below the workspace."""
    found = {}
    for request in proxy.sent("fs/readFile"):
        result = (proxy.reply_to(request) or {}).get("result")
        if result is not None:
            path = request.params["path"].removeprefix(f"{workspace.as_uri()}/")
            found[path] = base64.b64decode(result["dataBase64"])
    return found


def refusals(proxy: Proxy) -> list[tuple[Message, object]]:
    """Calls that failed for another reason than that there is no such file."""
    not_found = -32004
    asked = [m for m in proxy.messages if m.direction == "c2s" and "id" in m.body]
    errors = [(m, (proxy.reply_to(m) or {}).get("error")) for m in asked]
    return [(m, error) for m, error in errors if error is not None and error["code"] != not_found]


def red_square(size: int) -> bytes:
    """A PNG file (RFC 2083): signature, header, one row after the other, end."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    rows = (b"\0" + b"\xff\0\0" * size) * size
    header = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def test_project_instructions(codex: Codex, elsewhere: Server, workspace: Path, project: Path) -> None:
    """The AGENTS.md of the project's root is in what the model is told."""
    text = "Wear a hat of colour ümber when you answer.\n"
    (project / "AGENTS.md").write_text(text)
    with Proxy(elsewhere.url) as proxy:
        run = codex.run(["done"], url=proxy.url)

    assert contents_read(proxy, workspace)["AGENTS.md"] == text.encode()
    assert json.dumps(text.strip())[1:-1] in seen_by_the_model(run)
    assert not list(workspace.iterdir()), "the client itself has nothing to read here"
    assert refusals(proxy) == []


def test_skills(codex: Codex, elsewhere: Server, workspace: Path, project: Path) -> None:
    """Skills are found by fs/walk and listed to the model; one that the prompt names is read out to it."""
    for name in ("folding", "juggling"):
        folder = project / ".agents" / "skills" / name
        folder.mkdir(parents=True)
        front = f"---\nname: {name}\ndescription: All about {name} of paper.\n---\n"
        (folder / "SKILL.md").write_text(f"{front}The secret of {name}.\n")
    with Proxy(elsewhere.url) as proxy:
        run = codex.run(["done"], url=proxy.url, prompt="use $folding and play the script")

    told = seen_by_the_model(run)
    assert "All about folding of paper." in told
    assert "All about juggling of paper." in told
    assert "The secret of folding." in told
    assert "The secret of juggling." not in told
    assert {m.params["path"] for m in proxy.sent("fs/walk")} == {f"{workspace.as_uri()}/.agents/skills"}
    assert refusals(proxy) == []


@pytest.mark.parametrize("size", [8, 1500], ids=["small", "large"])
def test_an_image(codex: Codex, elsewhere: Server, workspace: Path, project: Path, size: int) -> None:
    """The model gets the picture, and the bytes of it came from the server."""
    image = red_square(size)
    (project / "square.png").write_bytes(image)
    turns: list[Turn] = [view_image("square.png"), exec_command("wc -c < square.png"), "done"]
    with Proxy(elsewhere.url) as proxy:
        run = codex.run(turns, url=proxy.url)

    assert contents_read(proxy, workspace)["square.png"] == image
    (shown,) = run.results[0].images
    kind, _, data = shown.partition(";base64,")
    assert kind == "data:image/png"
    shown_bytes = base64.b64decode(data)
    assert shown_bytes == image if size == 8 else shown_bytes.startswith(image[:8])
    assert run.results[1].output.strip() == str(len(image)), "commands run on the same machine"
    assert refusals(proxy) == []


def test_an_image_that_is_not_there(codex: Codex, elsewhere: Server) -> None:
    """The model is told why, and can go on."""
    run = codex.run([view_image("none.png"), exec_command("echo on"), "done"], url=elsewhere.url)

    missing, after = run.results
    assert missing.images == ()
    assert "none.png" in missing.text
    assert "No such file or directory" in missing.text
    assert after.output == "on\n"
