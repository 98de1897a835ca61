"""`/proc` where everything may be read: calls that the server does itself see nothing of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.rpc import RpcFailure, WebSocketPeer, unb64
from support.sandbox import needs_bubblewrap
from support.sandboxed_files import ABSENT, WALK, Sandboxed, root
from support.server import RunningServer

__all__ = ["needs_bubblewrap", "root"]

pytestmark = pytest.mark.usefixtures("needs_bubblewrap")

SECRET = "EXEC_SERVER_TEST_SECRET"


@pytest.fixture
def secretive(
    start_server: Callable[..., RunningServer], connect: Callable[..., WebSocketPeer]
) -> WebSocketPeer:
    """A server that has a secret in its environment."""
    ready = connect(start_server(env={**os.environ, SECRET: "s3cret"}))
    ready.initialize(extensions=True)
    return ready


@pytest.mark.parametrize("way", ["named", "link", "link to a directory", "link to a link"])
def test_nobody_who_may_read_everything_reads_what_the_server_knows(
    secretive: WebSocketPeer, root: Path, way: str
) -> None:
    """Inside of a sandbox /proc is another one, and so it is for calls that the server does itself."""
    files = Sandboxed(secretive, root)
    everything = files.writing("w")
    pid = secretive.server_pid
    (root / "w/leak").symlink_to(f"/proc/{pid}/environ" if way == "link" else "/proc/self/environ")
    (root / "w/proc").symlink_to("/proc/self")
    (root / "w/again").symlink_to("leak")
    place = {
        "named": "file:///proc/self/environ",
        "link": files.uri("w/leak"),
        "link to a directory": files.uri("w/proc/environ"),
        "link to a link": files.uri("w/again"),
    }[way]
    plain = unb64(secretive.call("fs/readFile", {"path": place})["dataBase64"])
    assert b"s3cret" in plain  # who has no sandbox may

    def seen(method: str, **more: Any) -> bytes:
        params = {"path": place, "sandbox": everything, **more}
        if way == "link":  # there is no such process inside
            assert secretive.refused(method, params) == ABSENT
            return b""
        return unb64(secretive.call(method, params)["dataBase64"])

    assert b"s3cret" not in seen("fs/readFile")
    assert b"s3cret" not in seen("fs/readFile", offset=0, length=4096)
    opening = {"path": place, "sandbox": everything, "handleId": "h", "mode": "read"}
    if way == "link":
        assert secretive.refused("fs/open", opening) == ABSENT
    else:
        secretive.call("fs/open", opening)
        block = secretive.call("fs/readBlock", {"handleId": "h", "offset": 0, "len": 4096})
        assert b"s3cret" not in unb64(block["chunk"])
    searching = {"path": place, "sandbox": everything, "pattern": "s3cret"}
    assert b"s3cret" not in json.dumps(_answer_or_error(secretive, "fs/search", searching)).encode()


def _answer_or_error(peer: WebSocketPeer, method: str, params: Any) -> Any:
    try:
        return peer.call(method, params)
    except RpcFailure as error:
        return str(error)


def test_open_files_of_others_are_not_reached_through_proc(secretive: WebSocketPeer, root: Path) -> None:
    """The links to open files skip what is on the way to them, and lead to files that have no name."""
    files = Sandboxed(secretive, root)
    everything = files.writing("w")
    with open(root / "gone", "w+b") as nameless:
        nameless.write(b"nameless")
        nameless.flush()
        (root / "gone").unlink()
        place = f"file:///proc/{os.getpid()}/fd/{nameless.fileno()}"
        assert unb64(secretive.call("fs/readFile", {"path": place})["dataBase64"]) == b"nameless"
        params = {"path": place, "sandbox": everything}
        assert secretive.refused("fs/readFile", params) == ABSENT
        assert secretive.refused("fs/open", {**params, "handleId": "h", "mode": "read"}) == ABSENT
        assert secretive.refused("fs/getMetadata", params) == ABSENT
        assert secretive.refused("fs/canonicalize", params) == ABSENT


def test_names_in_proc_are_those_of_a_sandbox(secretive: WebSocketPeer, root: Path) -> None:
    files = Sandboxed(secretive, root)
    everything = files.writing("w")
    (root / "w/proc").symlink_to("/proc")
    (root / "w/top").symlink_to("/")
    pid = str(secretive.server_pid)
    for place in ("file:///proc", files.uri("w/proc")):
        params = {"path": place, "sandbox": everything}
        names = [entry["fileName"] for entry in secretive.call("fs/readDirectory", params)["entries"]]
        assert "self" in names
        assert pid not in names
        found = secretive.call("fs/glob", {**params, "pattern": "*/status"})["paths"]
        assert found
        assert f"{place}/{pid}/status" not in found
    assert (
        secretive.refused("fs/getMetadata", {"path": f"file:///proc/{pid}", "sandbox": everything}) == ABSENT
    )
    for place in ("file:///", files.uri("w/top")):
        options = {**WALK, "maxDepth": 2, "maxDirectories": 2000, "maxEntries": 20000}
        walked = secretive.call("fs/walk", {"path": place, "sandbox": everything, "options": options})
        paths = [entry["path"] for entry in walked["entries"]]
        assert not [found for found in paths if found.endswith(f"/proc/{pid}")]
    assert secretive.call("fs/canonicalize", {"path": "file:///proc/self/cwd", "sandbox": everything}) == {
        "path": "file:///"
    }


def test_instructions_are_not_read_from_proc(secretive: WebSocketPeer, root: Path) -> None:
    skill = root / "w/skills/leak"
    (skill / "agents").mkdir(parents=True)
    (skill / "SKILL.md").write_text("---\nname: leak\ndescription: leaks\n---\n")
    (skill / "agents/openai.yaml").symlink_to("/proc/self/environ")
    asked = {"id": "r", "path": (root / "w").as_uri(), "sandbox": Sandboxed(secretive, root).writing("w")}
    found = secretive.call("capabilityRoots/discoverV1", {"roots": [asked]})
    assert "s3cret" not in json.dumps(found)
    assert "Permission denied" in json.dumps(found)
