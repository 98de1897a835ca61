"""What file calls may use at once: searches, and the memory of answers nobody reads yet."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from support.rpc import StdioPeer
from support.wait import eventually

SLOW = "(a+)+$b"


@pytest.fixture
def without_ripgrep(tmp_path: Path) -> dict[str, str]:
    """An environment in which searches are our own program's, which such an expression can keep busy."""
    (tmp_path / "bin").mkdir()
    return {"PATH": str(tmp_path / "bin")}


def searching(place: Path) -> list[int]:
    """The programs that search here now."""
    found: list[int] = []
    for name in os.listdir("/proc"):
        try:
            words = Path(f"/proc/{name}/cmdline").read_bytes() if name.isdigit() else b""
        except OSError:
            continue
        if os.fsencode(place) in words and b"files.grep" in words:
            found.append(int(name))
    return found


def slow_file(tmp_path: Path) -> Path:
    place = tmp_path / "slow"
    place.mkdir()
    (place / "file").write_text("a" * 200 + "\n")
    return place


def test_searches_die_with_the_server(tmp_path: Path, without_ripgrep: dict[str, str]) -> None:
    place = slow_file(tmp_path)
    with StdioPeer(env=without_ripgrep) as peer:
        peer.initialize(extensions=True)
        peer.request("fs/search", {"path": place.as_uri(), "pattern": SLOW})
        eventually(lambda: searching(place), "a search")
        peer.end(signal.SIGKILL)
    eventually(lambda: not searching(place), "the end of the search")


def test_searches_die_with_the_connection(tmp_path: Path, without_ripgrep: dict[str, str]) -> None:
    place = slow_file(tmp_path)
    with StdioPeer(env=without_ripgrep) as peer:
        peer.initialize(extensions=True)
        peer.request("fs/search", {"path": place.as_uri(), "pattern": SLOW})
        eventually(lambda: searching(place), "a search")
    eventually(lambda: not searching(place), "the end of the search")


def test_many_slow_searches_stop_nobody_else(tmp_path: Path, without_ripgrep: dict[str, str]) -> None:
    place = slow_file(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with StdioPeer(env=without_ripgrep) as peer:
        peer.initialize(extensions=True)
        for _ in range(40):
            peer.request("fs/search", {"path": place.as_uri(), "pattern": SLOW})
        for _ in range(20):
            code, message = peer.refused("fs/search", {"path": (tmp_path / "fifo").as_uri(), "pattern": "x"})
            assert (code, "neither a file nor a directory" in message) == (-32600, True)
        assert peer.call("fs/getMetadata", {"path": tmp_path.as_uri()})["isDirectory"]
        write = {"path": (tmp_path / "new").as_uri(), "dataBase64": "eA=="}
        assert peer.call("fs/writeFile", write) == {}
        eventually(lambda: searching(place), "a search")
        assert len(searching(place)) <= 4


def test_searches_wait_their_turn_and_are_all_answered(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("needle\n")
    with StdioPeer() as peer:
        peer.initialize(extensions=True)
        uri = (tmp_path / "file").as_uri()
        asked = [peer.request("fs/search", {"path": uri, "pattern": "needle"}) for _ in range(12)]
        # Sent after them, so they must not see it.
        removed = peer.request("fs/remove", {"path": uri})
        for request in asked:
            assert len(peer.result(request)["matches"]) == 1
        assert peer.result(removed) == {}


def test_answers_nobody_reads_take_little_memory(tmp_path: Path) -> None:
    size, count = 60_000_000, 6
    with (tmp_path / "large").open("wb") as file:
        file.truncate(size)
    with StdioPeer() as peer:
        peer.initialize()
        before = peak(peer.server_pid)
        for _ in range(count):
            peer.request("fs/readFile", {"path": (tmp_path / "large").as_uri()})
        assert peer.process.stdout is not None
        answers = read = 0
        while answers < count:
            data = os.read(peer.process.stdout.fileno(), 1 << 20)
            assert data
            answers += data.count(b"\n")
            read += len(data)
        assert read > count * size * 4 // 3
        # All at once would be 480 MB, and more than twice that while they are made.
        assert peak(peer.server_pid) - before < 350_000_000


def peak(pid: int) -> int:
    """The most memory a process ever had, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")
