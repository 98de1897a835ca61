"""fs/* when the machine does not play along: full disks, other people's files, vanishing directories,
crowds of writers, and the end of the server in the middle of it all."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from exec_server.local.files.write import TEMPORARY_PREFIX
from support.rpc import Peer, WebSocketPeer, b64, unb64
from support.server import COMMAND, RunningServer
from support.unprivileged import as_nobody, reachable_command
from support.wait import eventually

MIB = 1024 * 1024

NO_SPACE = (-32603, "No space left on device (os error 28)")
DENIED = (-32600, "Permission denied (os error 13)")
NOT_FOUND = (-32004, "No such file or directory (os error 2)")


class Files:
    """The calls, by path below a root that only the server may be able to see."""

    def __init__(self, peer: Peer, root: str) -> None:
        self.peer = peer
        self.root = root

    def uri(self, name: str) -> str:
        return f"file://{self.root}/{name}".rstrip("/")

    def call(self, method: str, name: str, **more: Any) -> Any:
        return self.peer.call(f"fs/{method}", {"path": self.uri(name), **more})

    def refused(self, method: str, name: str, **more: Any) -> tuple[int, str]:
        return self.peer.refused(f"fs/{method}", {"path": self.uri(name), **more})

    def put(self, name: str, data: bytes) -> None:
        assert self.call("writeFile", name, dataBase64=b64(data)) == {}

    def get(self, name: str) -> bytes:
        return unb64(self.call("readFile", name)["dataBase64"])

    def names(self, name: str = "") -> list[str]:
        return sorted(entry["fileName"] for entry in self.call("readDirectory", name)["entries"])

    def copy(self, source: str, target: str) -> Any:
        """The request's id."""
        params = {"sourcePath": self.uri(source), "destinationPath": self.uri(target), "recursive": True}
        return self.peer.request("fs/copy", params)


# A full disk ---------------------------------------------------------------------------------------

DISK_BYTES = 4 * MIB


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Files]:
    """A server whose /mnt is a disk of four megabytes: nobody else sees it, and it goes with the server."""
    user = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
    mount = f'mount -t tmpfs -o size={DISK_BYTES} tmpfs /mnt && exec "$@"'
    command = ["unshare", *user, "--mount", "--propagation", "private", "sh", "-c", mount, "sh", COMMAND]
    with RunningServer(command=command) as server, WebSocketPeer(server.url) as peer:
        peer.initialize()
        yield Files(peer, "/mnt")


@pytest.mark.parametrize("existing", ["small", "large"])
def test_a_full_disk_leaves_the_old_content(small_disk: Files, existing: str) -> None:
    files = small_disk
    old = os.urandom(1000 if existing == "small" else 3 * MIB)
    files.put("f", old)
    assert files.refused("writeFile", "f", dataBase64=b64(bytes(5 * MIB))) == NO_SPACE
    assert files.refused("writeFile", "new", dataBase64=b64(bytes(5 * MIB))) == NO_SPACE
    assert files.get("f") == old
    assert files.names() == ["f"], "nothing is left of what did not fit"
    files.put("f", b"fits")
    assert files.get("f") == b"fits"


def test_a_disk_that_others_fill(small_disk: Files) -> None:
    """Not even room for a directory entry's block: every change says so, every look still works."""
    files = small_disk
    files.put("f", b"old")
    done = files.peer.run("/bin/sh", "-c", "cat /dev/zero > /mnt/filler", cwd="file:///")
    assert done.exit_code != 0
    for _ in range(3):
        assert files.refused("writeFile", "f", dataBase64=b64(bytes(100_000))) == NO_SPACE
    assert files.get("f") == b"old"
    assert files.call("getMetadata", "f")["size"] == 3
    assert files.names() == ["f", "filler"]
    files.call("remove", "filler")
    files.put("f", b"new")
    assert files.get("f") == b"new"


def test_a_copy_onto_a_full_disk(small_disk: Files, tmp_path: Path) -> None:
    files = small_disk
    (tmp_path / "source").write_bytes(bytes(5 * MIB))
    files.put("f", b"old")
    params = {"sourcePath": (tmp_path / "source").as_uri(), "recursive": False}
    for target in ("f", "new"):
        assert files.peer.refused("fs/copy", {**params, "destinationPath": files.uri(target)}) == NO_SPACE
    assert files.get("f") == b"old"
    assert files.names() == ["f"]


@pytest.mark.parametrize(("atomic", "discard"), [(True, True), (True, False), (False, False)])
def test_a_stream_onto_a_full_disk(small_disk: Files, atomic: bool, discard: bool) -> None:
    """The block that does not fit says so, and the handle stays open. An atomic stream costs nothing: it
    never replaces anything after that, whatever else is written to it."""
    files, peer = small_disk, small_disk.peer
    files.put("f", b"old")
    more = {"atomic": True} if atomic else {}
    peer.call("fs/open", {"handleId": "h", "path": files.uri("f"), "mode": "replace", **more})
    block = {"handleId": "h", "chunk": b64(bytes(MIB))}
    answers = [peer.answer(peer.request("fs/writeBlock", {**block, "offset": at * MIB})) for at in range(5)]
    errors = [answer["error"] for answer in answers if "error" in answer]
    assert [(error["code"], error["message"]) for error in errors] == [NO_SPACE] * len(errors)
    assert errors
    assert peer.call("fs/writeBlock", {"handleId": "h", "offset": 0, "chunk": b64(b"x")}) == {}
    if atomic and not discard:
        assert peer.refused("fs/close", {"handleId": "h"}) == NO_SPACE
    assert peer.call("fs/close", {"handleId": "h", "discard": discard}) == {}
    assert files.names() == ["f"]
    if atomic:
        assert files.get("f") == b"old"
    files.call("remove", "f")
    files.put("f", b"room again")


# Other people's files ------------------------------------------------------------------------------


@pytest.fixture
def stranger() -> Iterator[Files]:
    """A server of a user without rights, in a place that this user can reach but not change."""
    root = Path(tempfile.mkdtemp(prefix="exec-server-test-", dir="/var/tmp"))
    (root / "file").write_bytes(b"content")
    (root / "secret").write_bytes(b"secret")
    (root / "closed").mkdir()
    (root / "closed" / "file").touch()
    (root / "mine").mkdir()
    if os.getuid() == 0:
        os.chown(root / "mine", as_nobody()["user"], as_nobody()["group"])
    for name, mode in (("", 0o555), ("file", 0o444), ("secret", 0), ("closed", 0)):
        (root / name).chmod(mode)
    try:
        with (
            RunningServer(command=reachable_command(), cwd="/", **as_nobody()) as server,
            WebSocketPeer(server.url) as peer,
        ):
            peer.initialize()
            yield Files(peer, str(root))
    finally:
        for name in ("", "closed"):
            (root / name).chmod(0o755)
        shutil.rmtree(root)


def test_what_a_stranger_may_not_read(stranger: Files) -> None:
    files = stranger
    assert files.get("file") == b"content"
    assert files.refused("readFile", "secret") == DENIED
    assert files.refused("readFile", "secret", followSymlinks=False) == DENIED
    assert files.refused("open", "secret", handleId="h") == DENIED
    assert files.refused("readDirectory", "closed") == DENIED
    for method in ("getMetadata", "canonicalize", "readFile", "readDirectory"):
        assert files.refused(method, "closed/file") == DENIED
    assert files.call("getMetadata", "secret")["size"] == 6, "looking at it needs no right to read it"
    assert files.names() == ["closed", "file", "mine", "secret"]
    options = {"maxDepth": 9, "maxDirectories": 99, "maxEntries": 99, "followDirectorySymlinks": False}
    walked = files.call("walk", "", options=options)
    assert [entry["path"] for entry in walked["entries"]] == [
        files.uri(name) for name in ("closed", "file", "mine", "secret")
    ]
    assert walked["errors"] == [{"path": files.uri("closed"), "message": DENIED[1]}]


def test_what_a_stranger_may_not_change(stranger: Files) -> None:
    files, peer = stranger, stranger.peer
    assert files.refused("writeFile", "file", dataBase64="") == DENIED
    assert files.refused("writeFile", "new", dataBase64="") == DENIED
    assert files.refused("writeFile", "new", dataBase64="", followSymlinks=False) == DENIED
    assert files.refused("createDirectory", "new") == DENIED
    assert files.refused("createDirectory", "new/deep", followSymlinks=False) == DENIED
    assert files.refused("remove", "file") == DENIED
    assert files.refused("remove", "mine", recursive=False) == DENIED
    for more in ({}, {"atomic": True}):
        assert files.refused("open", "file", handleId="h", mode="replace", **more) == DENIED
        assert files.refused("open", "new", handleId="h", mode="replace", **more) == DENIED
    for source, target in (("file", "new"), ("secret", "mine/copy"), ("closed", "mine/copy")):
        error = peer.answer(files.copy(source, target))["error"]
        assert (error["code"], error["message"]) == DENIED
    files.put("mine/f", b"own")
    assert files.get("mine/f") == b"own"
    assert files.get("file") == b"content"


@pytest.mark.skipif(os.getuid() != 0, reason="needs files of two users")
def test_a_copy_that_cannot_be_made_alike(stranger: Files) -> None:
    """It is refused before anything is changed; where there is nothing to make alike, it is done."""
    files, root = stranger, Path(stranger.root)
    files.put("mine/source", b"new")
    (root / "mine" / "source").chmod(0o646)
    for name, mode in (("other", 0o666), ("alike", 0o646)):
        (root / name).write_bytes(b"old")
        (root / name).chmod(mode)
    error = files.peer.answer(files.copy("mine/source", "other"))["error"]
    assert (error["code"], error["message"]) == (-32600, "Operation not permitted (os error 1)")
    assert files.get("other") == b"old"
    assert files.peer.result(files.copy("mine/source", "alike")) == {}
    assert files.get("alike") == b"new"


def test_an_ordinary_user_copies_no_rights_of_others(stranger: Files) -> None:
    """As when such a file is written to: the kernel takes these bits away."""
    files, mine = stranger, Path(stranger.root) / "mine"
    files.put("mine/program", b"x")
    files.put("mine/existing", b"old")
    files.put("mine/linked", b"old")
    os.link(mine / "linked", mine / "second name")
    (mine / "program").chmod(0o6755)
    for name in ("new", "existing", "linked"):
        assert files.peer.result(files.copy("mine/program", f"mine/{name}")) == {}
        assert stat.S_IMODE((mine / name).stat().st_mode) == 0o755, name
        assert files.get(f"mine/{name}") == b"x"


def test_a_walk_through_what_may_only_be_listed(stranger: Files) -> None:
    """Names can be read there, and nothing more: what cannot be looked at is an error and no entry."""
    files, root = stranger, Path(stranger.root) / "mine"
    (root / "listed").mkdir()
    (root / "listed" / "a").touch()
    (root / "listed" / "b").mkdir()
    (root / "listed" / "link").symlink_to("a")
    (root / "listed").chmod(0o644)
    options = {"maxDepth": 9, "maxDirectories": 99, "maxEntries": 99, "followDirectorySymlinks": False}
    walked = files.call("walk", "mine/listed", options=options)
    (root / "listed").chmod(0o755)
    assert walked == {
        "entries": [],
        "errors": [{"path": files.uri(f"mine/listed/{name}"), "message": DENIED[1]} for name in ("a", "b")],
        "truncated": False,
    }


# Vanishing directories -----------------------------------------------------------------------------


def test_parents_that_are_not_there(ws: WebSocketPeer, tmp_path: Path) -> None:
    files = Files(ws, str(tmp_path.resolve()))
    files.put("f", b"x")
    for method, more in (
        ("writeFile", {"dataBase64": ""}),
        ("writeFile", {"dataBase64": "", "followSymlinks": False}),
        ("createDirectory", {"recursive": False}),
        ("open", {"handleId": "h", "mode": "replace"}),
        ("open", {"handleId": "h", "mode": "replace", "atomic": True}),
        ("remove", {"force": False}),
        ("readFile", {}),
        ("getMetadata", {}),
    ):
        assert files.refused(method, "none/deep/f", **more) == NOT_FOUND, method
    assert ws.answer(files.copy("f", "none/f"))["error"]["code"] == NOT_FOUND[0]
    assert files.names() == ["f"], "nobody made a directory on the way"


@pytest.mark.parametrize("atomic", [True, False])
def test_a_directory_that_vanishes_under_a_stream(
    connect: Callable[..., WebSocketPeer], tmp_path: Path, atomic: bool
) -> None:
    """Blocks still go into the file that was opened; one that was to get its name at the end gets none."""
    peer, other = connect(), connect()
    peer.initialize()
    other.initialize()
    files = Files(peer, str(tmp_path.resolve()))
    files.call("createDirectory", "d")
    more = {"atomic": True} if atomic else {}
    files.call("open", "d/f", handleId="h", mode="replace", **more)
    assert other.call("fs/remove", {"path": files.uri("d")}) == {}
    assert peer.call("fs/writeBlock", {"handleId": "h", "offset": 0, "chunk": b64(b"x")}) == {}
    if atomic:
        assert peer.refused("fs/close", {"handleId": "h"}) == NOT_FOUND
    else:
        assert peer.call("fs/close", {"handleId": "h"}) == {}
    assert peer.refused("fs/writeBlock", {"handleId": "h", "offset": 0, "chunk": b64(b"x")})[0] == -32004
    assert os.listdir(tmp_path) == []


def test_a_directory_that_comes_and_goes(connect: Callable[..., WebSocketPeer], tmp_path: Path) -> None:
    """Writers into it succeed or find nothing there; nothing else ever comes of it."""
    writer, remover = connect(), connect()
    writer.initialize()
    remover.initialize()
    files = Files(writer, str(tmp_path.resolve()))
    path = files.uri("d/f")
    writes, removals = [], []
    for number in range(150):
        data = b64(bytes([number]) * 20_000)
        writes.append(writer.request("fs/writeFile", {"path": path, "dataBase64": data}))
        writes.append(writer.request("fs/createDirectory", {"path": files.uri("d")}))
        removals.append(remover.request("fs/remove", {"path": files.uri("d")}))
    errors = [writer.answer(request).get("error") for request in writes]
    assert {error["message"] for error in errors if error is not None} <= {NOT_FOUND[1]}
    gone = [remover.answer(request).get("error") for request in removals]
    allowed = "Directory not empty (os error 39)"  # a file was written between the last look and the end
    assert {error["message"] for error in gone if error is not None} <= {allowed, NOT_FOUND[1]}
    files.call("remove", "d")
    assert os.listdir(tmp_path) == []


# A crowd of writers --------------------------------------------------------------------------------

WRITERS = 100


@pytest.mark.parametrize("how", ["writeFile", "atomic stream"])
def test_a_hundred_writers_of_one_file(
    connect: Callable[..., WebSocketPeer], tmp_path: Path, how: str
) -> None:
    """Whoever is last has the file whole, and whoever reads meanwhile sees one content and no mixture."""
    reader = connect()
    reader.initialize()
    files = Files(reader, str(tmp_path.resolve()))
    size = 300_000
    contents = [bytes([number + 1]) * (size + number) for number in range(WRITERS)]
    files.put("f", contents[0])
    peers = [connect() for _ in range(WRITERS)]
    for peer in peers:
        peer.initialize()
    asked = []
    for peer, content in zip(peers, contents, strict=True):
        if how == "writeFile":
            params = {"path": files.uri("f"), "dataBase64": b64(content)}
            asked.append([peer.request("fs/writeFile", params)])
        else:
            opened = {"handleId": "h", "path": files.uri("f"), "mode": "replace", "atomic": True}
            block = {"handleId": "h", "offset": 0, "chunk": b64(content)}
            asked.append(
                [
                    peer.request("fs/open", opened),
                    peer.request("fs/writeBlock", block),
                    peer.request("fs/close", {"handleId": "h"}),
                ]
            )
    seen = {files.get("f") for _ in range(20)}
    for peer, requests in zip(peers, asked, strict=True):
        assert [peer.answer(request).get("error") for request in requests] == [None] * len(requests)
    seen.add(files.get("f"))
    assert seen <= set(contents)
    assert os.listdir(tmp_path) == ["f"]


# The end of the server -----------------------------------------------------------------------------


def half_written(pid: int, directory: Path, whole: int) -> bool:
    """Whether the server has a file other than `f` open in that directory, and a part of it is there.

    It is stopped while we look, and left so if that is how it is.
    """
    os.kill(pid, signal.SIGSTOP)
    for name in os.listdir(f"/proc/{pid}/fd"):
        link = f"/proc/{pid}/fd/{name}"
        try:
            path = os.readlink(link)
            info = os.stat(link)
        except OSError:
            continue
        other = path.startswith(f"{directory}/") and path != f"{directory}/f"
        if other and stat.S_ISREG(info.st_mode) and 0 < info.st_size < whole:
            return True
    os.kill(pid, signal.SIGCONT)
    return False


@pytest.mark.parametrize("existing", [True, False])
def test_killed_in_the_middle_of_a_write(
    start_server: Callable[..., RunningServer], tmp_path: Path, existing: bool
) -> None:
    """The old content is there, or nothing; and no other file."""
    root = tmp_path.resolve()
    old, new = os.urandom(1000), os.urandom(11 * MIB)
    server = start_server()
    peer = WebSocketPeer(server.url)
    peer.initialize()
    message = {"path": (root / "f").as_uri(), "dataBase64": b64(new)}

    def caught() -> bool:
        """Write once, looking all the time; True once a write was met half way."""
        if existing:
            (root / "f").write_bytes(old)
        else:
            (root / "f").unlink(missing_ok=True)
        request = peer.request("fs/writeFile", message)
        while not half_written(server.pid, root, len(new)):
            try:
                peer.pump(0)
            except TimeoutError:
                continue
            assert peer.answer(request)["result"] == {}
            return False
        return True

    eventually(caught, "a write that is met half way", timeout=40)
    server.process.kill()
    server.process.wait(20)
    assert {path.name: path.read_bytes() for path in root.iterdir()} == ({"f": old} if existing else {})
    assert not [name for name in os.listdir(root) if name.startswith(TEMPORARY_PREFIX.decode())]
    peer.close()


@pytest.mark.parametrize("atomic", [True, False])
def test_killed_in_the_middle_of_a_stream(
    start_server: Callable[..., RunningServer], tmp_path: Path, atomic: bool
) -> None:
    """A stream in place leaves what was written, as the protocol has it; an atomic one the old content."""
    server = start_server()
    peer = WebSocketPeer(server.url)
    peer.initialize()
    files = Files(peer, str(tmp_path.resolve()))
    files.put("f", b"old")
    more = {"atomic": True} if atomic else {}
    files.call("open", "f", handleId="h", mode="replace", **more)
    block = os.urandom(MIB)
    assert peer.call("fs/writeBlock", {"handleId": "h", "offset": 0, "chunk": b64(block)}) == {}
    server.process.kill()
    server.process.wait(20)
    assert (tmp_path / "f").read_bytes() == (b"old" if atomic else block)
    assert os.listdir(tmp_path) == ["f"]
    peer.close()
