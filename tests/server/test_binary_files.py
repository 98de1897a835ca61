"""server/connection.py and wire/binary.py: file contents as they are, without base64."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection
from websockets.sync.client import connect as open_websocket

from support.rpc import Peer, StdioPeer, b64, unb64
from support.server import RunningServer
from support.wait import PATIENCE

NewPeer = Callable[..., Peer]

MIB = 1024 * 1024


class FilesPeer:
    """A connection that has agreed on `binaryFiles`, and builds its frames by the description of them."""

    def __init__(self, websocket: ClientConnection, **agreed: Any) -> None:
        self.websocket = websocket
        self.reply = self.call("initialize", {"clientName": "t", **agreed})["result"]
        websocket.send('{"method":"initialized"}')

    def ask(self, method: str, params: Any, request_id: Any = 7) -> str | bytes:
        self.websocket.send(json.dumps({"id": request_id, "method": method, "params": params}))
        return self.websocket.recv(timeout=PATIENCE)

    def call(self, method: str, params: Any, request_id: Any = 7) -> Any:
        answer = self.ask(method, params, request_id)
        assert isinstance(answer, str)
        return json.loads(answer)

    def block(self, request_id: bytes, handle: bytes, offset: int, data: bytes) -> Any:
        sizes = bytes([3, len(handle)]) + len(request_id).to_bytes(4, "big") + offset.to_bytes(8, "big")
        self.websocket.send(sizes + request_id + handle + data)
        answer = self.websocket.recv(timeout=PATIENCE)
        assert isinstance(answer, str)
        return json.loads(answer)


@pytest.fixture
def websocket(server: RunningServer) -> Iterator[ClientConnection]:
    with open_websocket(server.url, compression=None, max_size=None) as connection:
        yield connection


def part(frame: str | bytes) -> tuple[bytes, int, int, bytes]:
    """The id, whether it is the end, the size of the file, and the bytes."""
    assert isinstance(frame, bytes)
    assert frame[0] == 2
    end = 14 + int.from_bytes(frame[2:6], "big")
    return frame[14:end], frame[1], int.from_bytes(frame[6:14], "big"), frame[end:]


def test_file_contents_come_as_they_are(websocket: ClientConnection, tmp_path: Path) -> None:
    content = bytes(range(256)) * 8192
    (tmp_path / "f").write_bytes(content)
    uri = (tmp_path / "f").as_uri()
    peer = FilesPeer(websocket, binaryFiles=True, extensions=True)
    assert peer.reply["binaryFiles"] is True
    assert "binaryOutput" not in peer.reply
    assert peer.call("fs/open", {"handleId": "h", "path": uri})["result"] == {"handleId": "h"}

    def block(offset: int, length: int, request_id: Any = 7) -> Any:
        params = {"handleId": "h", "offset": offset, "len": length}
        return part(peer.ask("fs/readBlock", params, request_id))

    assert block(0, MIB) == (b"7", 0, 2 * MIB, content[:MIB])
    assert block(2 * MIB - 3, 10, "é") == (b'"\xc3\xa9"', 1, 2 * MIB, content[-3:])
    assert block(2 * MIB, 10, "x" * 70_000) == (b'"' + b"x" * 70_000 + b'"', 1, 2 * MIB, b"")
    assert peer.call("fs/readBlock", {"handleId": "no", "offset": 0, "len": 1})["error"]["code"] == -32004

    def ranged(**more: int) -> str | bytes:
        return peer.ask("fs/readFile", {"path": uri, **more})

    assert part(ranged(offset=5, length=3)) == (b"7", 0, 2 * MIB, content[5:8])
    assert part(ranged(length=MIB)) == (b"7", 0, 2 * MIB, content[:MIB])
    assert part(ranged(offset=MIB, length=MIB)) == (b"7", 1, 2 * MIB, content[MIB:])
    assert part(ranged(offset=2**63, length=1)) == (b"7", 1, 2 * MIB, b"")
    assert part(ranged(offset=2**63 - 1, length=MIB)) == (b"7", 1, 2 * MIB, b"")
    assert part(ranged(offset=2**63 - 5, length=4)) == (b"7", 1, 2 * MIB, b"")
    # More than a block, or all of it, is JSON to everybody.
    for more in ({}, {"length": MIB + 1}, {"offset": 1}):
        answer = ranged(**more)
        assert isinstance(answer, str)
        assert (
            unb64(json.loads(answer)["result"]["dataBase64"])
            == content[more.get("offset", 0) :][: more.get("length", 2 * MIB)]
        )
    # A file that does not say how large it is.
    found = part(peer.ask("fs/readFile", {"path": "file:///proc/self/status", "offset": 0, "length": MIB}))
    assert found[:3] == (b"7", 1, 0)
    assert found[3].startswith(b"Name:")


def test_blocks_are_written_as_they_are(websocket: ClientConnection, tmp_path: Path) -> None:
    peer = FilesPeer(websocket, binaryFiles=True)
    uri = (tmp_path / "f").as_uri()
    peer.call("fs/open", {"handleId": "hé", "path": uri, "mode": "replace"})
    handle = "hé".encode()
    assert peer.block(b"8", handle, 3, b"d\0\xff") == {"id": 8, "result": {}}
    assert peer.block(b'"\\u0061"', handle, 0, b"abc") == {"id": "a", "result": {}}
    assert peer.block(b"9", handle, 0, b"")["error"] == {
        "code": -32600,
        "message": "file write block length must be between 1 and 1048576",
    }
    assert peer.block(b"9", handle, 0, bytes(MIB + 1))["error"]["code"] == -32600
    assert peer.block(b"9", handle, 2**64 - 1, b"x")["error"]["message"] == (
        "file write range exceeds the signed 64-bit file offset limit"
    )
    assert peer.block(b"9", b"no", 0, b"x")["error"]["code"] == -32004
    assert peer.call("fs/close", {"handleId": "hé"})["result"] == {}
    assert (tmp_path / "f").read_bytes() == b"abcd\0\xff"
    # What is not a block is an error to nobody in particular, and JSON may be binary as ever.
    for bad in (b"\3", b"\3\1" + bytes(12), b"\2" + bytes(20), b"\0", b""):
        websocket.send(bad)
        assert json.loads(websocket.recv(timeout=PATIENCE))["id"] == -1
    websocket.send(b'{"id":1,"method":"environment/status"}')
    assert json.loads(websocket.recv(timeout=PATIENCE))["result"]["status"] == "ready"


def test_blocks_keep_their_place_among_other_calls(websocket: ClientConnection, tmp_path: Path) -> None:
    peer = FilesPeer(websocket, binaryFiles=True)
    uri, size = (tmp_path / "f").as_uri(), 600_000
    requests: list[str | bytes] = [
        json.dumps(
            {"id": 1, "method": "fs/open", "params": {"handleId": "h", "path": uri, "mode": "replace"}}
        )
    ]
    for number in range(20):
        head = bytes([3, 1]) + (2).to_bytes(4, "big") + bytes(8) + str(number + 10).encode() + b"h"
        requests.append(head + bytes([number]) * size)
        params = {"handleId": "h", "offset": 0, "chunk": b64(bytes([100 + number]) * size)}
        requests.append(json.dumps({"id": number + 50, "method": "fs/writeBlock", "params": params}))
    requests.append(json.dumps({"id": 2, "method": "fs/close", "params": {"handleId": "h"}}))
    for request in requests:
        peer.websocket.send(request)
    answers = [json.loads(peer.websocket.recv(timeout=PATIENCE)) for _ in requests]
    assert all(answer.get("result") is not None for answer in answers)
    assert (tmp_path / "f").read_bytes() == bytes([119]) * size


def test_without_an_agreement_contents_are_json(websocket: ClientConnection, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    peer = FilesPeer(websocket, binaryOutput=True, extensions=True)
    assert "binaryFiles" not in peer.reply
    assert peer.reply["environmentInfo"]["capabilities"]["binaryFiles"] is True
    peer.call("fs/open", {"handleId": "h", "path": (tmp_path / "f").as_uri()})
    answer = peer.call("fs/readBlock", {"handleId": "h", "offset": 0, "len": 9})
    assert answer["result"] == {"chunk": "YWJj", "eof": True}
    assert peer.block(b"9", b"h", 0, b"x")["id"] == -1


def test_lines_carry_no_binary_contents(start_stdio: Callable[..., StdioPeer]) -> None:
    assert "binaryFiles" not in start_stdio().initialize(binaryFiles=True)


def test_large_contents_in_json(new_peer: NewPeer, tmp_path: Path) -> None:
    peer = new_peer()
    peer.initialize()
    content = bytes(range(256)) * 4000
    uri = (tmp_path / "f").as_uri()
    assert peer.call("fs/writeFile", {"path": uri, "dataBase64": b64(content)}) == {}
    assert (tmp_path / "f").read_bytes() == content
    peer.call("fs/open", {"handleId": "h", "path": uri, "mode": "replace"})
    assert peer.call("fs/writeBlock", {"handleId": "h", "offset": 0, "chunk": b64(content)}) == {}
    bad = b64(content)[:1000] + "!" + b64(content)[1001:]
    assert peer.refused("fs/writeBlock", {"handleId": "h", "offset": 0, "chunk": bad}) == (
        -32602,
        "Invalid symbol 33, offset 1000.",
    )
    peer.call("fs/close", {"handleId": "h"})
    assert (tmp_path / "f").read_bytes() == content
    code, text = peer.refused("fs/writeFile", {"path": uri, "dataBase64": bad})
    assert (code, text) == (
        -32600,
        "fs/writeFile requires valid base64 dataBase64: Invalid symbol 33, offset 1000.",
    )
