"""fs/* under a sandbox, from outside: what is allowed, what is said otherwise, and who does it."""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from exec_server.server.handlers.files import METHODS
from exec_server.wire.uri import path_to_uri
from support.profiles import managed, path, pattern, sandbox, special
from support.rpc import Peer, WebSocketPeer, b64, unb64
from support.sandbox import FORBIDDING, needs_bubblewrap
from support.sandboxed_files import ABSENT, DENIED, READ_ONLY, WALK, Sandboxed, root
from support.server import COMMAND, RunningServer
from support.wait import eventually

__all__ = ["needs_bubblewrap", "root"]

pytestmark = pytest.mark.usefixtures("needs_bubblewrap")

PIDFD_GETFD = 438
"""The system call's number on every architecture."""


@pytest.fixture
def files(peer: Peer, root: Path) -> Sandboxed:
    return Sandboxed(peer, root)


@pytest.fixture
def own(start_server: Callable[..., RunningServer], connect: Callable[..., WebSocketPeer]) -> WebSocketPeer:
    """A connection to a server that nobody else uses."""
    ready = connect(start_server())
    ready.initialize(extensions=True)
    return ready


def helpers(server: int) -> list[int]:
    """The programs inside of sandboxes that belong to a server."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _is_helper(int(name), server)]


def _is_helper(pid: int, server: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        keeper = b"--args" in command  # bubblewrap, which waits outside and inside for the end of the program
        return b"local.sandbox.helper" in command and not keeper and server in ancestors(pid)
    except OSError:
        return False  # it ended meanwhile


def unread_bytes(helper: int) -> int:
    """How much of a request a helper that was stopped has not taken yet."""
    command = Path(f"/proc/{helper}/cmdline").read_bytes()
    (number,) = re.findall(rb"^main\((\d+)\)$", command, re.MULTILINE)
    libc = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(helper)
    try:
        copy = libc.syscall(PIDFD_GETFD, process, int(number), 0)
        assert copy >= 0, os.strerror(ctypes.get_errno())
    finally:
        os.close(process)
    try:
        return int.from_bytes(fcntl.ioctl(copy, termios.FIONREAD, bytes(4)), sys.byteorder)
    finally:
        os.close(copy)


def ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        stat = Path(f"/proc/{pid}/stat").read_text()
        pid = int(stat.rpartition(")")[2].split()[1])
        yield pid


# What is allowed -----------------------------------------------------------------------------------


def test_every_reading_call_sees_what_it_may_and_nothing_else(files: Sandboxed) -> None:
    inside = files.reading("w")
    assert files.get("w/a", inside) == b"inside"
    assert files.call("getMetadata", "w/a", inside)["size"] == 6
    assert files.call("canonicalize", "w/../w/a", inside) == {"path": files.uri("w/a")}
    names = [entry["fileName"] for entry in files.call("readDirectory", "w", inside)["entries"]]
    assert sorted(names) == ["a", "sub"]  # the link leads to nothing here
    walked = files.call("walk", "w", inside, options=WALK)["entries"]
    assert files.uri("w/sub/b") in [entry["path"] for entry in walked]
    for name in ("o/s", "w/link/s", "o"):
        for method in ("readFile", "getMetadata", "canonicalize", "readDirectory"):
            assert files.refused(method, name, inside) == ABSENT
    assert files.refused("walk", "o", inside, options=WALK)[0] in (-32004, -32600)
    part = files.call("readFile", "w/a", inside, offset=2, length=3)
    assert (unb64(part["dataBase64"]), part["eof"]) == (b"sid", False)


def test_every_changing_call_changes_what_it_may_and_nothing_else(files: Sandboxed, root: Path) -> None:
    w = files.writing("w")
    files.put("w/new", b"x", w)
    assert files.call("createDirectory", "w/d/e", w) == {}
    both = {"sourcePath": files.uri("o/s"), "destinationPath": files.uri("w/copied"), "recursive": False}
    assert files.peer.call("fs/copy", {**both, "sandbox": w}) == {}
    assert files.call("remove", "w/a", w) == {}
    assert sorted(os.listdir(root / "w")) == ["copied", "d", "link", "new", "sub"]
    assert (root / "w/copied").read_bytes() == b"outside"
    assert files.refused("writeFile", "o/n", w, dataBase64="eA==") == READ_ONLY
    assert files.refused("writeFile", "w/link/n", w, dataBase64="eA==") == READ_ONLY
    assert files.refused("createDirectory", "o/n", w) == READ_ONLY
    assert files.refused("remove", "o/s", w) == READ_ONLY
    assert files.refused("remove", "w/link/s", w) == READ_ONLY
    back = {"sourcePath": files.uri("w/new"), "destinationPath": files.uri("o/n"), "recursive": False}
    assert files.peer.refused("fs/copy", {**back, "sandbox": w}) == READ_ONLY
    assert files.call("remove", "o/absent", w) == {}
    assert os.listdir(root / "o") == ["s"]


def test_protected_names_cannot_be_made_and_leave_nothing_behind(files: Sandboxed, root: Path) -> None:
    w = files.writing("w")
    before = sorted(os.listdir(root / "w"))
    for name in (".git", ".agents", ".codex", ".aws"):
        assert files.refused("writeFile", f"w/{name}/x", w, dataBase64="eA==") == READ_ONLY
        assert files.refused("writeFile", f"w/{name}", w, dataBase64="eA==") == (
            -32603,
            "Is a directory (os error 21)",
        )
        assert files.call("createDirectory", f"w/{name}", w) == {}  # says so, and has no effect
        assert sorted(os.listdir(root / "w")) == before


def test_a_workspace_of_somebody_else_needs_no_protection(files: Sandboxed, root: Path) -> None:
    """Root in a sandbox may not make anything there, and so nothing has to stand guard, either."""
    if os.getuid() == 0:
        os.chown(root / "w", 1234, 1234)
    (root / "w").chmod(0o555 if os.getuid() else 0o755)
    w = files.writing("w")
    assert files.refused("writeFile", "w/new", w, dataBase64="eA==") == DENIED
    assert files.refused("writeFile", "w/.git/x", w, dataBase64="eA==")[0] in (-32004, -32600)
    files.put("w/a", b"changed", w)
    assert (root / "w/a").read_bytes() == b"changed"
    (root / "w").chmod(0o755)


def test_denied_paths(files: Sandboxed) -> None:
    denying = managed(
        special("root", "read"), path(files.root / "o", "none"), path(files.root / "w/a", "deny")
    )
    assert files.get("w/sub/b", denying) == b"deeper"
    assert files.refused("readFile", "o/s", denying) == DENIED
    assert files.refused("readDirectory", "o", denying) == DENIED
    assert files.refused("readFile", "w/link/s", denying) == DENIED
    assert files.refused("readFile", "w/a", denying) == DENIED
    mask = files.call("getMetadata", "o", denying)
    assert (mask["isDirectory"], mask["size"]) == (True, 40)
    copied = {"sourcePath": files.uri("w/sub/b"), "destinationPath": files.uri("o/c"), "recursive": False}
    assert files.peer.refused("fs/copy", {**copied, "sandbox": denying}) == DENIED


def test_profiles_that_forbid_nothing_are_done_here(own: WebSocketPeer, root: Path) -> None:
    files = Sandboxed(own, root)
    for number, profile in enumerate(
        [
            sandbox({"type": "disabled"}),
            sandbox({"type": "external", "network": "restricted"}),
            managed(special("root", "write")),
        ]
    ):
        files.put(f"w/{number}", b"x", profile)
    assert files.get("w/a", files.writing()) == b"inside"
    assert helpers(own.server_pid) == []


@pytest.mark.parametrize("guarded", [False, True], ids=("plain", "guarded"))
def test_nothing_private_can_be_written_and_believed(files: Sandboxed, root: Path, guarded: bool) -> None:
    inside = managed(path(root / "w", "write")) if guarded else files.reading("w")
    places = ("/exec-server-test", "/dev/shm/exec-server-test", "/dev/exec-server-test")
    for place in (*places, "/proc/self/comm", "/proc/self/mem", "/proc/self/oom_score_adj"):
        params = {"path": f"file://{place}", "sandbox": inside}
        assert files.peer.refused("fs/writeFile", {**params, "dataBase64": "eA=="}) == READ_ONLY, place
        opening = {**params, "handleId": "h", "mode": "replace"}
        assert files.peer.refused("fs/open", opening) == READ_ONLY, place


def test_names_that_are_not_text(files: Sandboxed, root: Path) -> None:
    odd = os.fsencode(root) + b"/\xff w"
    os.mkdir(odd)
    uri = path_to_uri(odd)
    profile = managed(path(odd, "write"))
    params = {"path": f"{uri}/f", "dataBase64": "eA==", "sandbox": profile}
    assert files.peer.call("fs/writeFile", params) == {}
    params["path"] = f"{uri}/.git/x"
    assert files.peer.refused("fs/writeFile", params) == READ_ONLY
    assert os.listdir(odd) == [b"f"]


def test_streams(files: Sandboxed, root: Path) -> None:
    def stream(method: str, **params: Any) -> Any:
        return files.peer.call(f"fs/{method}", {"handleId": "h", **params})

    data = os.urandom(300_000)
    inside = managed(path(root / "w", "write"))
    assert stream("open", path=files.uri("w/s"), mode="replace", sandbox=inside) == {"handleId": "h"}
    assert stream("writeBlock", offset=0, chunk=b64(data)) == {}
    assert stream("close") == {}
    assert (root / "w/s").read_bytes() == data
    assert stream("open", path=files.uri("w/s"), sandbox=inside) == {"handleId": "h"}
    assert stream("readBlock", offset=0, len=1 << 20) == {"chunk": b64(data), "eof": True}
    assert stream("close") == {}
    for name, mode, error in (("o/s", "read", ABSENT), ("w/.git/x", "replace", READ_ONLY)):
        params = {"handleId": "h", "path": files.uri(name), "mode": mode, "sandbox": inside}
        assert files.peer.refused("fs/open", params) == error


def test_a_file_that_a_stream_writes_to_stays_the_same_file(files: Sandboxed, root: Path) -> None:
    opened = {"handleId": "h", "path": files.uri("w/a"), "mode": "replace"}
    assert files.peer.call("fs/open", opened) == {"handleId": "h"}
    files.put("w/a", b"12345", files.writing("w"))
    block = {"handleId": "h", "offset": 5, "chunk": b64(b"678")}
    assert files.peer.call("fs/writeBlock", block) == {}
    assert (root / "w/a").read_bytes() == b"12345678"


def test_extensions(own: WebSocketPeer, root: Path) -> None:
    files = Sandboxed(own, root)
    inside = managed(path(root / "w", "write"))
    move = {"sourcePath": files.uri("w/a"), "destinationPath": files.uri("w/z"), "sandbox": inside}
    own.call("fs/move", move)
    assert (root / "w/z").read_bytes() == b"inside"
    out = {"sourcePath": files.uri("w/z"), "destinationPath": files.uri("o/z"), "sandbox": inside}
    assert own.refused("fs/move", out)[0] in (-32004, -32603)
    found = files.call("glob", "w", inside, pattern="**/*")
    assert files.uri("w/sub/b") in found["paths"]
    assert files.refused("glob", "o", inside, pattern="*") == ABSENT
    searched = files.call("search", "w", inside, pattern="deeper")
    assert [match["path"] for match in searched["matches"]] == [files.uri("w/sub/b")]
    watch = {"watchId": "x", "path": files.uri("w"), "sandbox": inside}
    code, words = own.refused("fs/watch", watch)
    assert code == -32600
    assert "sandbox" in words
    for number, name in enumerate(("o/s", "o/missing", "w/missing"), 1):
        missing = {"watchId": number, "missing": [files.uri(name)], "sandbox": inside}
        assert own.call("fs/watchMissing", missing) == {"watching": False}, "that would tell what is there"


def test_a_move_out_of_what_cannot_be_changed_changes_nothing(own: WebSocketPeer, root: Path) -> None:
    files = Sandboxed(own, root)
    for target in ("w/a", "w/new"):
        move = {"sourcePath": files.uri("o/s"), "destinationPath": files.uri(target), "overwrite": True}
        assert own.refused("fs/move", {**move, "sandbox": files.writing("w")}) == READ_ONLY
    assert (root / "w/a").read_bytes() == b"inside"
    assert not (root / "w/new").exists()
    assert (root / "o/s").read_bytes() == b"outside"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_ends_in_the_middle_leaves_no_covers(
    start_server: Callable[..., RunningServer],
    connect: Callable[..., WebSocketPeer],
    root: Path,
    number: signal.Signals,
) -> None:
    server = start_server()
    peer = connect(server)
    peer.initialize()
    files = Sandboxed(peer, root)
    files.put("w/warm", b"", files.writing("w"))
    for count in range(300):
        write = files.params(f"w/{count}", files.writing("w"), dataBase64=b64(b"x" * 1000))
        peer.send({"id": 1000 + count, "method": "fs/writeFile", "params": write})
    eventually((root / "w/.git").exists, "a call is being done")
    server.end(number)
    if number == signal.SIGTERM:
        assert list((root / "w").glob(".*")) == []  # who ends by himself leaves nothing to others
    eventually(lambda: not any((root / "w").glob(".*")), "nothing is covered any more")


def test_discovery(files: Sandboxed, root: Path) -> None:
    for place in ("w/skill", "o/skill"):
        (root / place).mkdir()
        (root / place / "SKILL.md").write_text("---\nname: n\ndescription: d\n---\nDo it.\n")
    inside = files.reading("w")
    roots = [{"id": name, "path": files.uri(name), "sandbox": inside} for name in ("w", "o")]
    seen, hidden = files.peer.call("capabilityRoots/discoverV1", {"roots": roots})["roots"]
    assert [skill["instructions"]["path"] for skill in seen["skills"]] == [files.uri("w/skill/SKILL.md")]
    assert seen["error"] is None
    assert "No such file or directory" in hidden["error"]
    own = files.peer.call("capabilities/discoverV2", {"cwd": files.uri("w"), "sandbox": inside})
    assert set(own) == {"plugins", "skills", "warnings"}


# What is said otherwise ----------------------------------------------------------------------------


def test_errors_come_in_the_order_of_the_protocol(files: Sandboxed) -> None:
    foreign, invalid = "file:///C:/x", "'file:///C:/x' is invalid on 'linux'"
    entry = {"path": {"type": "path", "path": foreign}, "access": "read"}
    wrong = f"invalid sandbox permission path URI: {invalid}"
    bad = managed(special("root", "write"), entry)
    assert files.peer.refused("fs/readFile", {"path": foreign, "sandbox": bad}) == (-32600, wrong)
    assert files.refused("readFile", "w/a", bad) == (-32600, wrong)
    code, words = files.refused("writeFile", "w/a", bad, dataBase64="!!")
    assert (code, words.split(":")[0]) == (-32600, "fs/writeFile requires valid base64 dataBase64")
    elsewhere = managed(cwd=foreign)
    assert files.refused("readFile", "w/a", elsewhere) == (-32600, invalid)
    assert files.peer.refused("fs/readFile", {"path": foreign, "sandbox": files.reading("w")}) == (
        -32600,
        invalid,
    )


def test_what_cannot_be_enforced_is_not_done(files: Sandboxed, root: Path) -> None:
    start = (
        "fs sandbox helper failed with status exit status: 1: "
        "error building bubblewrap command: Fatal error: "
    )
    everywhere = managed(special("root", "read"), pattern("/**/*.env"))
    code, words = files.refused("readFile", "w/a", everywhere)
    assert (code, words.startswith(f"{start}unreadable glob `/**/*.env`")) == (-32603, True)
    turned = managed(special("root", "read"), path(root / "w", "write"), path(root / "w/link", "deny"))
    code, words = files.refused("writeFile", "w/x", turned, dataBase64="eA==")
    assert code == -32603
    assert words == (
        f"{start}cannot enforce sandbox deny-read path {root}/w/link "
        f"because it crosses writable symlink {root}/w/link"
    )
    assert not (root / "w/x").exists()


def test_without_a_mechanism_nothing_is_done(
    root: Path,
    tmp_path: Path,
    start_server: Callable[..., RunningServer],
    connect: Callable[..., WebSocketPeer],
) -> None:
    """A bubblewrap that accepts everything and does nothing but fail."""
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "bwrap").write_text("#!/bin/sh\nexec 2>&1; echo --perms --args --seccomp --cap-drop; exit 1\n")
    (fake / "bwrap").chmod(0o755)
    peer = connect(start_server(env={"PATH": f"{fake}:/usr/bin:/bin"}))
    peer.initialize()
    files = Sandboxed(peer, root)
    code, words = files.refused("writeFile", "w/x", files.writing("w"), dataBase64="eA==")
    assert code in (-32600, -32603)
    assert "sandbox" in words
    assert not (root / "w/x").exists()


# Helpers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guarded", [False, True], ids=("plain", "guarded"))
def test_a_helper_has_nothing_but_its_view(own: WebSocketPeer, root: Path, guarded: bool) -> None:
    files = Sandboxed(own, root)
    inside = managed(path(root / "w", "write")) if guarded else files.reading("w")

    def proc(name: str) -> bytes:
        answer = own.call("fs/readFile", {"path": f"file:///proc/self/{name}", "sandbox": inside})
        return unb64(answer["dataBase64"])

    variables = {line.partition(b"=")[0] for line in proc("environ").split(b"\0") if line}
    assert variables <= {b"PATH", b"TMPDIR", b"TMP", b"TEMP", b"PWD"}
    status = dict(line.split(b":\t", 1) for line in proc("status").splitlines() if b":\t" in line)
    assert (status[b"NoNewPrivs"], status[b"Seccomp"], status[b"CapEff"].strip(b"0")) == (b"1", b"2", b"")
    assert own.call("fs/canonicalize", {"path": "file:///proc/self/cwd", "sandbox": inside}) == {
        "path": "file:///"
    }
    devices = proc("net/dev")
    assert [line.split(b":")[0].strip() for line in devices.splitlines()[2:]] == [b"lo"]
    for place in (f"/proc/{own.server_pid}/environ", "/proc/1/root" + str(root / "o/s"), "/proc/self/mem"):
        code, _ = own.refused(
            "fs/writeFile", {"path": f"file://{place}", "dataBase64": "eA==", "sandbox": inside}
        )
        assert code in (-32603, -32600, -32004), place
    assert own.refused("fs/readFile", {"path": f"file:///proc/1/root{root}/o/s", "sandbox": inside})[0] in (
        -32004,
        -32600,
    )


def test_a_policy_is_never_served_by_the_helper_of_another(own: WebSocketPeer, root: Path) -> None:
    files = Sandboxed(own, root)
    w, o = files.reading("w"), files.reading("o")
    for _ in range(3):
        assert files.get("w/a", w) == b"inside"
        assert files.get("o/s", o) == b"outside"
        assert files.refused("readFile", "o/s", w) == ABSENT
        assert files.refused("readFile", "w/a", o) == ABSENT
    assert len(helpers(own.server_pid)) == 2
    # The same policy in other words is the same.
    assert files.get("w/a", managed(path(root / "w", "read"), path(root / "w/sub", "read"))) == b"inside"
    assert len(helpers(own.server_pid)) == 2


def test_a_helper_is_kept_for_the_next_call(own: WebSocketPeer, root: Path) -> None:
    files = Sandboxed(own, root)
    files.get("w/a", files.reading("w"))
    (first,) = helpers(own.server_pid)
    for _ in range(20):
        files.get("w/sub/b", files.reading("w"))
    assert helpers(own.server_pid) == [first]


def test_who_only_reads_a_workspace_makes_nothing_there_and_is_kept(own: WebSocketPeer, root: Path) -> None:
    """Nothing can be made by reading, so nothing has to stand guard, and no helper has to leave."""
    files = Sandboxed(own, root)
    inside = managed(path(root / "w", "write"), path(root / "later", "write"))
    assert files.get("w/a", inside) == b"inside"
    (reader,) = helpers(own.server_pid)
    made = os.stat(root / "w").st_mtime_ns
    assert files.refused("getMetadata", "w/.git", inside) == ABSENT
    names = [entry["fileName"] for entry in files.call("readDirectory", "w", inside)["entries"]]
    assert sorted(names) == ["a", "sub"]
    files.peer.call("fs/open", files.params("w/a", inside, handleId="h", mode="read"))
    assert helpers(own.server_pid) == [reader]
    assert os.stat(root / "w").st_mtime_ns == made
    files.put("w/a", b"written", inside)
    assert files.refused("writeFile", "w/.git/x", inside, dataBase64="eA==") == READ_ONLY
    assert files.get("w/a", inside) == b"written"
    assert reader in helpers(own.server_pid)


def test_a_denied_name_that_is_not_there_stays_covered_for_who_reads(files: Sandboxed, root: Path) -> None:
    inside = managed(path(root / "w", "write"), path(root / "w/.git", "deny"))
    assert files.refused("readDirectory", "w/.git", inside) == DENIED
    assert files.get("w/a", inside) == b"inside"
    assert sorted(os.listdir(root / "w")) == ["a", "link", "sub"]


def test_plans_are_about_files_as_they_are_now(files: Sandboxed, root: Path) -> None:
    hiding = managed(special("root", "read"), pattern(f"{root}/w/**/*.env"))
    assert files.get("w/a", hiding) == b"inside"
    (root / "w/sub/late.env").write_bytes(b"secret")
    assert files.refused("readFile", "w/sub/late.env", hiding) == DENIED
    # Another file in the place of one that is covered takes the cover away; the next plan notices.
    (root / "w/fresh").write_bytes(b"secret, too")
    os.replace(root / "w/fresh", root / "w/sub/late.env")
    assert files.refused("readFile", "w/sub/late.env", hiding) == DENIED
    os.unlink(root / "w/sub/late.env")
    assert files.refused("readFile", "w/sub/late.env", hiding) == ABSENT


def test_a_directory_that_was_made_anew_is_the_one_that_is_seen(files: Sandboxed, root: Path) -> None:
    inside = files.reading("w")
    assert files.get("w/a", inside) == b"inside"
    os.rename(root / "w", root / "old")
    (root / "w").mkdir()
    (root / "w/a").write_bytes(b"another")
    assert files.get("w/a", inside) == b"another"
    (root / "w/a").unlink()
    (root / "w").rmdir()
    assert files.refused("readFile", "w/a", inside) == ABSENT
    (root / "w").symlink_to("old")
    assert files.get("w/a", inside) == b"inside"


def test_a_dead_helper_is_replaced(own: WebSocketPeer, root: Path) -> None:
    files = Sandboxed(own, root)
    inside = files.reading("w")
    files.get("w/a", inside)
    (first,) = helpers(own.server_pid)
    os.kill(first, signal.SIGKILL)
    assert files.get("w/a", inside) == b"inside"
    (second,) = helpers(own.server_pid)
    assert second != first


def test_a_helper_that_dies_in_the_middle_is_replaced_and_the_call_answered(
    own: WebSocketPeer, root: Path
) -> None:
    files = Sandboxed(own, root)
    inside = files.reading("w")
    files.get("w/a", inside)
    (first,) = helpers(own.server_pid)
    os.kill(first, signal.SIGSTOP)
    asked = own.request("fs/readFile", files.params("w/a", inside))
    own.alive()  # the request before this one has been taken
    os.kill(first, signal.SIGKILL)
    assert unb64(own.result(asked)["dataBase64"]) == b"inside"


def test_nobody_works_for_a_client_that_is_gone(
    start_server: Callable[..., RunningServer], connect: Callable[..., WebSocketPeer], root: Path
) -> None:
    server = start_server("--detach-ttl", "0")
    peer, other = connect(server), connect(server)
    peer.initialize()
    other.initialize()
    files = Sandboxed(peer, root)
    files.get("w/a", files.reading("w"))
    (busy,) = helpers(server.pid)
    os.kill(busy, signal.SIGSTOP)
    peer.request("fs/readFile", files.params("w/a", files.reading("w")))
    eventually(lambda: unread_bytes(busy), "the helper has work")
    peer.drop()
    eventually(lambda: busy not in helpers(server.pid), "the helper is gone")
    assert Sandboxed(other, root).get("w/a", files.reading("w")) == b"inside"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=("killed", "asked"))
def test_helpers_end_with_their_server(
    start_server: Callable[..., RunningServer],
    connect: Callable[..., WebSocketPeer],
    root: Path,
    number: signal.Signals,
) -> None:
    server = start_server()
    peer = connect(server)
    peer.initialize()
    files = Sandboxed(peer, root)
    files.get("w/a", files.reading("w"))
    (left,) = helpers(server.pid)
    server.end(number)
    eventually(lambda: not os.path.exists(f"/proc/{left}"), "the helper has followed")


def test_a_busy_helper_does_not_hold_up_others(own: WebSocketPeer, root: Path) -> None:
    """A second call of the same policy gets a helper of its own, plain calls are not concerned at all."""
    files = Sandboxed(own, root)
    inside = files.reading("w")
    files.get("w/a", inside)
    (first,) = helpers(own.server_pid)
    os.kill(first, signal.SIGSTOP)
    waiting = own.request("fs/readFile", files.params("w/a", inside))
    assert files.get("w/sub/b", inside) == b"deeper"
    assert unb64(own.call("fs/readFile", {"path": files.uri("o/s")})["dataBase64"]) == b"outside"
    os.kill(first, signal.SIGCONT)
    assert unb64(own.result(waiting)["dataBase64"]) == b"inside"


def test_calls_take_effect_in_order_whoever_does_them(files: Sandboxed) -> None:
    writing, reading = files.writing("w"), managed(path(files.root / "w", "read"))
    asked = []
    for number in range(6):
        profile = writing if number % 2 else None
        params = {"path": files.uri("w/n"), "dataBase64": b64(str(number).encode())}
        files.peer.request("fs/writeFile", {**params, **({} if profile is None else {"sandbox": profile})})
        asked.append(files.peer.request("fs/readFile", files.params("w/n", reading)))
    answers = [unb64(files.peer.result(request)["dataBase64"]) for request in asked]
    assert answers == [str(number).encode() for number in range(6)]


def test_a_link_that_is_turned_all_the_time_leads_nowhere_else(own: WebSocketPeer, root: Path) -> None:
    """Between the look and the use of a path somebody turns it; the kernel does not care."""
    files = Sandboxed(own, root)
    writing = managed(path(root / "w", "write"), path(root / "w/.git", "write"), cwd=files.uri("w"))
    (root / "w/.git").mkdir()
    stop = threading.Event()

    def turn() -> None:
        while not stop.is_set():
            for target in ("sub", "../o"):
                temporary = root / "w/turning"
                temporary.symlink_to(target)
                os.replace(temporary, root / "w/turned")

    (root / "w/turned").symlink_to("sub")
    thread = threading.Thread(target=turn)
    thread.start()
    try:
        for number in range(15):
            params = files.params("w/turned/x", writing, dataBase64=b64(str(number).encode()))
            own.answer(own.request("fs/writeFile", params))
    finally:
        stop.set()
        thread.join()
    assert os.listdir(root / "o") == ["s"]
    assert (root / "o/s").read_bytes() == b"outside"


# Machines without namespaces -----------------------------------------------------------------------


@pytest.fixture
def forbidden(
    start_server: Callable[..., RunningServer], connect: Callable[..., WebSocketPeer], root: Path
) -> Sandboxed:
    """A server in a place where nobody may make a namespace, as in many containers."""
    peer = connect(start_server(command=[*FORBIDDING, COMMAND]))
    peer.initialize(extensions=True)
    return Sandboxed(peer, root)


def test_landlock_enforces_what_it_can_express(forbidden: Sandboxed, root: Path) -> None:
    inside = forbidden.reading("w")
    searched = forbidden.call("search", "w", inside, pattern="deeper")
    assert [match["path"] for match in searched["matches"]] == [forbidden.uri("w/sub/b")]
    assert forbidden.get("w/a", inside) == b"inside"
    names = {entry["fileName"] for entry in forbidden.call("readDirectory", "w", inside)["entries"]}
    assert {"a", "sub"} <= names
    for name in ("o/s", "w/link/s"):
        assert forbidden.refused("readFile", name, inside) == DENIED
    assert forbidden.refused("writeFile", "w/n", inside, dataBase64="eA==")[0] in (-32600, -32603)
    assert forbidden.refused("remove", "w/a", inside)[0] in (-32600, -32603)
    read_only = managed(special("root", "read"))
    assert forbidden.refused("writeFile", "w/n", read_only, dataBase64="eA==")[0] in (-32600, -32603)
    assert sorted(os.listdir(root / "w")) == ["a", "link", "sub"]


def test_landlock_refuses_what_it_cannot(forbidden: Sandboxed, root: Path) -> None:
    for profile in (
        forbidden.writing("w"),  # what must stay as it is in it
        managed(special("root", "read"), path(root / "o", "deny")),
    ):
        code, words = forbidden.refused("readFile" if "deny" in str(profile) else "remove", "w/a", profile)
        assert code == -32600
        assert words.startswith("filesystem sandbox cannot be enforced on this executor: ")
    assert (root / "w/a").exists()


# Nothing is forgotten ------------------------------------------------------------------------------

BY_HANDLE = {"fs/readBlock", "fs/writeBlock", "fs/close", "fs/watchMissing", "fs/unwatch"}
"""Calls without a sandbox: about what was opened or watched before, or about what is missing."""

MORE: dict[str, dict[str, Any]] = {
    "fs/readFile": {},
    "fs/getMetadata": {},
    "fs/canonicalize": {},
    "fs/readDirectory": {},
    "fs/walk": {"options": WALK},
    "fs/createDirectory": {"recursive": False},
    "fs/writeFile": {"dataBase64": "eA=="},
    "fs/remove": {"force": False},
    "fs/copy": {"recursive": True},
    "fs/open": {"handleId": "h"},
    "fs/watch": {"watchId": "w"},
    "fs/move": {},
    "fs/glob": {"pattern": "*"},
    "fs/search": {"pattern": "outside"},
}
"""Every other one, and what it takes besides paths."""


def test_every_method_is_known_here() -> None:
    assert {name for name in METHODS if name.startswith("fs/")} == BY_HANDLE | set(MORE)


@pytest.mark.parametrize("name", MORE)
def test_no_call_reaches_what_its_profile_hides(
    connect: Callable[..., WebSocketPeer], root: Path, name: str
) -> None:
    peer = connect()
    peer.initialize(extensions=True)
    files = Sandboxed(peer, root)
    inside = files.reading("w")
    for place in ("o", "o/s", "w/link/s"):
        paths = (
            {"sourcePath": files.uri(place), "destinationPath": files.uri("o/new")}
            if name in ("fs/copy", "fs/move")
            else {"path": files.uri(place)}
        )
        code, words = peer.refused(name, {**paths, **MORE[name], "sandbox": inside})
        assert code in (-32004, -32600, -32603), words
    assert os.listdir(root / "o") == ["s"]
    assert (root / "o/s").read_bytes() == b"outside"
