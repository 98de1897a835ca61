"""fs/* from outside: the protocol's order of checks, the order of calls, and who waits for whom."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.machine import descriptors
from support.rpc import Peer, RpcFailure, WebSocketPeer, b64, unb64
from support.server import RunningServer
from support.wait import eventually

WALK = {"maxDepth": 8, "maxDirectories": 100, "maxEntries": 1000, "followDirectorySymlinks": False}


class Files:
    """The calls, by path below a root."""

    def __init__(self, peer: Peer, root: Path) -> None:
        self.peer = peer
        self.root = root

    def uri(self, name: str = "") -> str:
        return (self.root / name).as_uri()

    def ask(self, method: str, name: str, **more: Any) -> Any:
        """Send a request and give its id."""
        return self.peer.request(f"fs/{method}", {"path": self.uri(name), **more})

    def call(self, method: str, name: str, **more: Any) -> Any:
        return self.peer.result(self.ask(method, name, **more))

    def put(self, name: str, data: bytes) -> None:
        assert self.call("writeFile", name, dataBase64=b64(data)) == {}

    def get(self, name: str) -> bytes:
        return unb64(self.call("readFile", name)["dataBase64"])


@pytest.fixture
def files(peer: Peer, tmp_path: Path) -> Files:
    """Over either transport."""
    return Files(peer, tmp_path)


def test_a_day_in_the_life(files: Files) -> None:
    call = files.call
    assert call("createDirectory", "d/e") == {}
    files.put("d/f", b"hello")
    assert files.get("d/f") == b"hello"
    metadata = call("getMetadata", "d/f")
    assert (metadata["isFile"], metadata["isDirectory"], metadata["size"]) == (True, False, 5)
    assert call("canonicalize", "d/../d/f") == {"path": files.uri("d/f")}
    assert sorted(entry["fileName"] for entry in call("readDirectory", "d")["entries"]) == ["e", "f"]
    assert [entry["path"] for entry in call("walk", "", options=WALK)["entries"]] == [
        files.uri(name) for name in ("d", "d/e", "d/f")
    ]
    copied = {"sourcePath": files.uri("d"), "destinationPath": files.uri("c"), "recursive": True}
    assert files.peer.call("fs/copy", copied) == {}
    assert files.get("c/f") == b"hello"
    assert call("remove", "d") == {}
    assert files.peer.refused("fs/readFile", {"path": files.uri("d/f")}) == (
        -32004,
        "No such file or directory (os error 2)",
    )


def test_streams(files: Files) -> None:
    def stream(method: str, **params: Any) -> Any:
        return files.peer.call(f"fs/{method}", {"handleId": "h", **params})

    data = os.urandom(2_500_000)
    assert stream("open", path=files.uri("f"), mode="replace") == {"handleId": "h"}
    for offset in range(0, len(data), 1 << 20):
        assert stream("writeBlock", offset=offset, chunk=b64(data[offset : offset + (1 << 20)])) == {}
    assert stream("close") == {}
    assert stream("open", path=files.uri("f")) == {"handleId": "h"}
    received, eof = b"", False
    while not eof:
        block = stream("readBlock", offset=len(received), len=1 << 20)
        received += unb64(block["chunk"])
        eof = block["eof"]
    assert received == data
    assert stream("close") == {}


def test_the_order_of_checks(new_peer: Callable[..., Peer], tmp_path: Path) -> None:
    peer = new_peer()
    good = {"path": tmp_path.as_uri()}
    assert peer.refused("fs/getMetadata", {}) == (-32602, "missing field `path`")
    assert peer.refused("fs/getMetadata", good) == (
        -32600,
        "client must call initialize before using filesystem methods",
    )
    peer.call("initialize", {"clientName": "test"})
    assert peer.refused("fs/getMetadata", good) == (
        -32600,
        "client must send initialized before using filesystem methods",
    )
    peer.notify("initialized")
    assert peer.call("fs/getMetadata", good)["isDirectory"]
    assert peer.refused("fs/rename", {}) == (
        -32601,
        "exec-server stub does not implement `fs/rename` yet",
    )
    assert peer.refused("fs/getMetadata", {"path": "file:///C:/x"}) == (
        -32600,
        "'file:///C:/x' is invalid on 'linux'",
    )
    sandbox = {"permissions": {"type": "managed"}, "windowsSandboxLevel": "disabled"}
    assert peer.refused("fs/getMetadata", {**good, "sandbox": sandbox})[0] == -32602


# Order -------------------------------------------------------------------------------------------


def test_pipelined_calls_take_effect_in_order(files: Files) -> None:
    """Nobody waits for an answer, and every read sees the write before it."""
    small, large = [b"%d" % n for n in range(40)], [bytes([n]) * 300_000 for n in range(20)]
    (files.root / "d").mkdir()
    (files.root / "link").symlink_to("d")
    asked = []
    for contents in (small, large):
        for data in contents:
            files.ask("writeFile", "d/f", dataBase64=b64(data))
            asked.append((files.ask("readFile", "link/f"), data))
            files.ask("remove", "link/f")
            asked.append((files.ask("readFile", "d/f"), None))
    for request_id, data in asked:
        answer = files.peer.answer(request_id)
        if data is None:
            assert answer["error"]["code"] == -32004
        else:
            assert unb64(answer["result"]["dataBase64"]) == data


def test_a_pipelined_stream(files: Files) -> None:
    data = os.urandom(5_000_000)
    peer = files.peer
    wanted = [peer.request("fs/open", {"handleId": "h", "path": files.uri("f"), "mode": "replace"})]
    for offset in range(0, len(data), 1 << 20):
        chunk = b64(data[offset : offset + (1 << 20)])
        wanted.append(peer.request("fs/writeBlock", {"handleId": "h", "offset": offset, "chunk": chunk}))
    wanted.append(peer.request("fs/close", {"handleId": "h"}))
    read = files.ask("readFile", "f")
    again = peer.request("fs/open", {"handleId": "h", "path": files.uri("f")})
    for request_id in wanted:
        peer.result(request_id)
    assert unb64(peer.result(read)["dataBase64"]) == data
    assert peer.result(again) == {"handleId": "h"}


def test_closing_comes_after_every_block_before_it(new_peer: Callable[..., Peer], tmp_path: Path) -> None:
    """Also when more was sent at once than the server works on at a time."""
    peer = new_peer("--concurrent-requests", "2")
    peer.initialize()
    files = Files(peer, tmp_path)
    blocks = [bytes([number]) * 100_000 for number in range(40)]
    asked = [peer.request("fs/open", {"handleId": "h", "path": files.uri("f"), "mode": "replace"})]
    for number, block in enumerate(blocks):
        params = {"handleId": "h", "offset": number * 100_000, "chunk": b64(block)}
        asked.append(peer.request("fs/writeBlock", params))
    asked.append(peer.request("fs/close", {"handleId": "h"}))
    assert [peer.answer(request_id).get("error") for request_id in asked] == [None] * len(asked)
    assert (tmp_path / "f").read_bytes() == b"".join(blocks)


@pytest.mark.parametrize("size", [10, 1 << 20], ids=["small", "large"])
def test_a_pipelined_atomic_stream(files: Files, size: int) -> None:
    """What is sent before the close sees the old content, what is sent after it the new one."""
    files.put("f", b"old")
    (files.root / "link").symlink_to("f")
    peer, new = files.peer, os.urandom(size)
    for number in range(10):
        handle = f"h{number}"
        params = {"handleId": handle, "path": files.uri("link"), "mode": "replace", "atomic": True}
        opening = peer.request("fs/open", params)
        block = {"handleId": handle, "offset": 0, "chunk": b64(new)}
        writing = peer.request("fs/writeBlock", block)
        before = files.ask("readFile", "f")
        closing = peer.request("fs/close", {"handleId": handle})
        after = [files.ask("readFile", "f"), files.ask("getMetadata", "link")]
        assert peer.result(opening) == {"handleId": handle}
        assert peer.result(writing) == {}
        assert unb64(peer.result(before)["dataBase64"]) == b"old"
        assert peer.result(closing) == {}
        assert unb64(peer.result(after[0])["dataBase64"]) == new
        assert peer.result(after[1])["size"] == size
        files.put("f", b"old")


def test_file_calls_are_of_the_current_dialect(files: Files) -> None:
    peer = files.peer
    peer.call("command/exec/terminate", {"processId": "none"})
    assert peer.refused("x/y") == (-32600, "unknown method: x/y")
    files.call("getMetadata", "")
    assert peer.refused("x/y") == (-32601, "exec-server stub does not implement `x/y` yet")


def test_an_id_is_free_again_when_opening_failed(files: Files) -> None:
    files.put("f", b"x")
    peer = files.peer
    bad = peer.request("fs/open", {"handleId": "h", "path": files.uri("missing")})
    good = peer.request("fs/open", {"handleId": "h", "path": files.uri("f")})
    block = peer.request("fs/readBlock", {"handleId": "h", "offset": 0, "len": 9})
    assert peer.answer(bad)["error"]["code"] == -32004
    assert peer.result(good) == {"handleId": "h"}
    assert peer.result(block) == {"chunk": b64(b"x"), "eof": True}


NAMES = ["a", "b", "d", "d/a", "d/b", "d/e", "d/e/a", "s", "s/a", "s/e", "s/e/a"]
"""`d` is a directory, `s` a link to it; both stay."""

DATA = [b"", b"small", b"\xff" * 300_000]

operations = st.lists(
    st.one_of(
        st.tuples(st.just("writeFile"), st.sampled_from(NAMES), st.sampled_from(DATA)),
        st.tuples(st.just("readFile"), st.sampled_from(NAMES)),
        st.tuples(st.just("createDirectory"), st.sampled_from(NAMES), st.booleans()),
        st.tuples(
            st.just("remove"), st.sampled_from([name for name in NAMES if name not in "ds"]), st.booleans()
        ),
        st.tuples(st.just("readDirectory"), st.sampled_from(NAMES)),
        st.tuples(st.just("getMetadata"), st.sampled_from(NAMES)),
        st.tuples(
            st.just("copy"),
            st.sampled_from(["a", "d/a", "s/e", "d/e/a"]),
            st.sampled_from(["b", "d/b", "s/b", "a"]),
        ),
    ),
    max_size=25,
)


class Model:
    """A file system that fits on a page: names to bytes, directories to None."""

    def __init__(self) -> None:
        self.tree: dict[str, bytes | None] = {"": None, "d": None}

    def answer(self, method: str, name: str, *more: Any) -> Any:
        """A result, or the code of an error."""
        try:
            return getattr(self, method)(self._real(name), *more)
        except RpcFailure as failure:
            return failure.code

    @staticmethod
    def _real(name: str) -> str:
        return "d" + name[1:] if name == "s" or name.startswith("s/") else name

    def _find(self, name: str) -> bytes | None:
        parent = name.rpartition("/")[0]
        if parent and self._find(parent) is not None:
            raise RpcFailure({"code": -32603, "message": "not a directory"})
        if name not in self.tree:
            raise RpcFailure({"code": -32004, "message": "not found"})
        return self.tree[name]

    def _exists(self, name: str) -> bool:
        try:
            self._find(name)
        except RpcFailure as failure:
            if failure.code != -32004:
                raise
            return False
        return True

    def _parent_must_exist(self, name: str) -> None:
        if self._find(name.rpartition("/")[0]) is not None:
            raise RpcFailure({"code": -32603, "message": "not a directory"})

    def writeFile(self, name: str, data: bytes) -> Any:
        if self._exists(name) and self.tree[name] is None:
            return -32603
        self._parent_must_exist(name)
        self.tree[name] = data
        return {}

    def readFile(self, name: str) -> Any:
        data = self._find(name)
        return -32600 if data is None else {"dataBase64": b64(data)}

    def createDirectory(self, name: str, recursive: bool) -> Any:
        if self._exists(name):
            return {} if recursive and self.tree[name] is None else -32603
        parent = name.rpartition("/")[0]
        if recursive and not self._exists(parent):
            self.createDirectory(parent, True)
        self._parent_must_exist(name)
        self.tree[name] = None
        return {}

    def _below(self, name: str) -> list[str]:
        return [other for other in self.tree if other.startswith(name + "/")]

    def remove(self, name: str, recursive: bool) -> Any:
        if not self._exists(name):
            return {}
        if self._below(name) and not recursive:
            return -32603
        for other in [name, *self._below(name)]:
            del self.tree[other]
        return {}

    def readDirectory(self, name: str) -> Any:
        if self._find(name) is not None:
            return -32603
        names = {other[len(name) + 1 :] for other in self._below(name)}
        return sorted(other for other in names if "/" not in other)

    def getMetadata(self, name: str) -> Any:
        data = self._find(name)
        return (data is None, None if data is None else len(data))

    def copy(self, source: str, target: str) -> Any:
        target, data = self._real(target), self._find(source)
        if data is not None:
            return self.writeFile(target, data)
        if target == source or target.startswith(source + "/"):
            return -32600
        if self._exists(target) and self.tree[target] is not None:
            return -32603
        copied = {target + name[len(source) :]: self.tree[name] for name in [source, *self._below(source)]}
        # Files are written over files, directories merge; everything else is an error half way.
        for name, content in copied.items():
            if name in self.tree and (self.tree[name] is None) != (content is None):
                return "undefined"
        self.tree.update(copied)
        return {}


def _request(files: Files, operation: tuple[Any, ...]) -> Any:
    method, name, *more = operation
    if method == "copy":
        params = {"sourcePath": files.uri(name), "destinationPath": files.uri(more[0]), "recursive": True}
        return files.peer.request("fs/copy", params)
    extra: dict[str, Any] = {}
    if method == "writeFile":
        extra["dataBase64"] = b64(more[0])
    elif more:
        extra["recursive"] = more[0]
    return files.ask(method, name, **extra)


def _shape(method: str, answer: dict[str, Any]) -> Any:
    if "error" in answer:
        return answer["error"]["code"]
    result = answer["result"]
    if method == "readDirectory":
        return sorted(entry["fileName"] for entry in result["entries"])
    if method == "getMetadata":
        return (result["isDirectory"], None if result["isDirectory"] else result["size"])
    return result


@given(operations, st.booleans())
@settings(max_examples=150)
def test_like_a_model_whether_pipelined_or_not(
    server: RunningServer,
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[Any, ...]],
    pipelined: bool,
) -> None:
    root = tmp_path_factory.mktemp("model").resolve()
    (root / "d").mkdir()
    (root / "s").symlink_to("d")
    model = Model()
    with WebSocketPeer(server.url) as peer:
        peer.initialize()
        files = Files(peer, root)
        expected, answers, asked = [], [], []
        for step in steps:
            expected.append(model.answer(*step))
            if expected[-1] == "undefined":
                expected.pop()
                break
            asked.append(_request(files, step))
            if not pipelined:
                answers.append(peer.answer(asked[-1]))
        if pipelined:
            answers = [peer.answer(request_id) for request_id in asked]
    found = [_shape(step[0], answer) for step, answer in zip(steps, answers, strict=False)]
    assert found == expected
    on_disk = {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
        if not path.is_symlink()
    }
    if len(found) == len(steps):
        assert on_disk == {name: data for name, data in model.tree.items() if name}


# Nobody waits who need not -------------------------------------------------------------------------


def test_a_fifo_hangs_only_who_writes_to_it(files: Files) -> None:
    os.mkfifo(files.root / "fifo")
    files.put("f", b"x")
    assert files.peer.refused("fs/readFile", {"path": files.uri("fifo")}) == (
        -32600,
        f"path `{files.root}/fifo` is not a file",
    )
    reader = os.open(files.root / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    stuck = [files.ask("writeFile", "fifo", dataBase64=b64(bytes(200_000))) for _ in range(3)]
    for _ in range(20):
        assert files.get("f") == b"x"
        files.put("g", b"y")
    assert not any(files.peer.answers[request_id] for request_id in stuck)
    received = 0
    deadline = time.monotonic() + 30
    while received < 600_000 and time.monotonic() < deadline:
        try:
            received += len(os.read(reader, 1 << 20))
        except BlockingIOError:
            time.sleep(0.001)
    os.close(reader)
    assert [files.peer.result(request_id) for request_id in stuck] == [{}] * 3


def test_what_a_connection_leaves_behind_is_closed(
    connect: Callable[..., WebSocketPeer], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "fifo")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    peer = connect()
    peer.initialize()
    files = Files(peer, tmp_path)
    for index in range(10):
        peer.call("fs/open", {"handleId": str(index), "path": files.uri("f"), "mode": "replace"})
    files.ask("writeFile", "fifo", dataBase64=b64(bytes(200_000)))

    def held() -> list[str]:
        return [name for name in descriptors(peer.server_pid).values() if name.startswith(str(tmp_path))]

    eventually(lambda: len(held()) == 11)
    peer.drop()
    eventually(lambda: held() == [])
    os.close(reader)


def test_handles_belong_to_their_connection(connect: Callable[..., WebSocketPeer], tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    one, two = connect(), connect()
    for peer in (one, two):
        peer.initialize()
    one.call("fs/open", {"handleId": "h", "path": (tmp_path / "f").as_uri()})
    assert two.refused("fs/readBlock", {"handleId": "h", "offset": 0, "len": 1}) == (
        -32004,
        "unknown file handle `h`",
    )


def test_a_large_listing_does_not_hold_up_small_calls(ws: WebSocketPeer, tmp_path: Path) -> None:
    many = tmp_path / "many"
    many.mkdir()
    for index in range(20_000):
        (many / f"{index}").touch()
    files = Files(ws, tmp_path)
    files.put("f", b"x")
    listings = [files.ask("readDirectory", "many") for _ in range(10)]
    read = files.ask("readFile", "f")
    assert unb64(ws.result(read)["dataBase64"]) == b"x"
    assert not ws.answers[listings[-1]], "the small call came first"
    for request_id in listings:
        assert len(ws.result(request_id)["entries"]) == 20_000


# What we add ---------------------------------------------------------------------------------------


@pytest.fixture
def extended(new_peer: Callable[..., Peer], tmp_path: Path) -> Files:
    """A client that knows our extensions."""
    peer = new_peer()
    peer.initialize(extensions=True)
    return Files(peer, tmp_path)


def changed(files: Files) -> dict[str, Any]:
    """The next `fs/changed`."""
    notifications = files.peer.notifications
    files.peer.until(lambda: [note for note in notifications if note["method"] == "fs/changed"], "fs/changed")
    index = next(i for i, note in enumerate(notifications) if note["method"] == "fs/changed")
    params: dict[str, Any] = notifications.pop(index)["params"]
    return params


def test_extensions_are_only_for_those_who_know_them(files: Files) -> None:
    for method in ("watch", "unwatch", "move", "glob", "search"):
        assert files.peer.refused(f"fs/{method}", {})[0] == -32601


def test_watching(extended: Files) -> None:
    (extended.root / "d").mkdir()
    uri = extended.uri("d")
    asked = extended.peer.request("fs/watch", {"watchId": "w", "path": uri + "/./"})
    extended.ask("writeFile", "d/f", dataBase64=b64(b"x"))  # at once: it is seen all the same
    assert extended.peer.result(asked) == {"path": uri}
    assert changed(extended) == {"watchId": "w", "changedPaths": [uri + "/f"]}
    assert extended.peer.refused("fs/watch", {"watchId": "w", "path": uri}) == (
        -32600,
        "watchId already exists: w",
    )
    (extended.root / "d" / "ü").touch()
    assert changed(extended) == {"watchId": "w", "changedPaths": [uri + "/%C3%BC"]}
    assert extended.peer.call("fs/unwatch", {"watchId": "w"}) == {}
    assert extended.peer.call("fs/unwatch", {"watchId": "w"}) == {}
    (extended.root / "d" / "g").touch()
    time.sleep(0.4)
    extended.call("getMetadata", "d")
    assert not [note for note in extended.peer.notifications if note["method"] == "fs/changed"]


def test_watches_have_a_limit_and_end_with_the_connection(
    connect: Callable[..., WebSocketPeer], tmp_path: Path
) -> None:
    peer = connect()
    peer.initialize(extensions=True)
    for index in range(512):
        peer.request("fs/watch", {"watchId": str(index), "path": tmp_path.as_uri()}, request_id=f"w{index}")
    for index in range(512):
        peer.result(f"w{index}")
    assert peer.refused("fs/watch", {"watchId": "more", "path": tmp_path.as_uri()}) == (
        -32600,
        "at most 512 watches may be open per connection",
    )

    def watching() -> bool:
        return "anon_inode:inotify" in descriptors(peer.server_pid).values()

    assert list(descriptors(peer.server_pid).values()).count("anon_inode:inotify") == 1
    peer.drop()
    eventually(lambda: not watching())


def test_missing_files(files: Files) -> None:
    def watch(watch_id: int, *names: str) -> bool:
        params = {"watchId": watch_id, "missing": [files.uri(name) for name in names]}
        watching: bool = files.peer.call("fs/watchMissing", params)["watching"]
        return watching

    def fired() -> list[int]:
        return [note["params"]["watchId"] for note in files.peer.notifications]

    files.put("there", b"x")
    assert not watch(1, "there")
    assert watch(2, "m")
    assert not watch(2, "other")
    assert watch(3, "n")
    files.put("m", b"the watch for this has ended")
    files.put("n", b"x")
    files.peer.until(fired, "fs/missingChanged")
    assert fired() == [3]
    (files.root / "n").unlink()
    files.call("getMetadata", "m")
    assert fired() == [3]


def test_moving_searching_and_parts(extended: Files) -> None:
    extended.put("a", b"one\ntwo\n")
    uri = extended.uri
    peer = extended.peer
    assert peer.call("fs/move", {"sourcePath": uri("a"), "destinationPath": uri("b")}) == {}
    extended.put("a", b"x")
    assert peer.refused("fs/move", {"sourcePath": uri("a"), "destinationPath": uri("b")}) == (
        -32603,
        "File exists (os error 17)",
    )
    assert extended.call("readFile", "b", offset=4, length=3) == {"dataBase64": b64(b"two"), "eof": False}
    assert extended.call("readFile", "b", offset=4) == {"dataBase64": b64(b"two\n"), "eof": True}
    assert extended.call("glob", "", pattern="*") == {"paths": [uri("a"), uri("b")], "truncated": False}
    result = extended.call("search", "", pattern="^t")
    assert [(match["path"], match["lineNumber"], match["line"]) for match in result["matches"]] == [
        (uri("b"), 2, "two")
    ]


def test_discovery(new_peer: Callable[..., Peer], tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "skills" / "s").mkdir(parents=True)
    (home / "skills" / "s" / "SKILL.md").write_text("---\nname: s\ndescription: d\n---\n")
    peer = new_peer(env={"CODEX_HOME": str(home), "HOME": str(tmp_path)})
    assert peer.refused("capabilities/discoverV2", {"cwd": "file:///"}) == (
        -32600,
        "client must call initialize before using capability discovery methods",
    )
    peer.initialize()
    assert peer.info["capabilities"]["capabilityDiscoveryV2"]
    result = peer.call("capabilities/discoverV2", {"cwd": "file:///"})
    assert [skill["name"] for skill in result["skills"]] == ["s"]
    roots = [{"id": "r", "path": (home / "skills").as_uri()}]
    result = peer.call("capabilityRoots/discoverV1", {"roots": roots})
    assert [skill["instructions"]["path"] for skill in result["roots"][0]["skills"]] == [
        (home / "skills" / "s" / "SKILL.md").as_uri()
    ]
    assert peer.refused("capabilityRoots/discoverV1", {"roots": roots * 129}) == (
        -32600,
        "capability root discovery accepts at most 128 roots",
    )
