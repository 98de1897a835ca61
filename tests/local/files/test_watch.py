"""Watching: what is told, when, and what is not."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path

import pytest

from exec_server.local.files import notifier, watch
from exec_server.local.files.watch import FileWatch
from exec_server.loop import Pending
from support.wait import eventually_async


class Ear:
    """Watches one path and remembers what it was told."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.batches: list[tuple[float, list[str], bool]] = []
        self.room: Pending[None] | None = None

    def told(self, paths: list[bytes], overflowed: bool) -> Pending[None] | None:
        names = [os.path.relpath(os.fsdecode(path), self.root) for path in paths]
        self.batches.append((time.monotonic(), names, overflowed))
        return self.room

    async def next(self) -> list[str]:
        await eventually_async(lambda: self.batches, "a batch")
        return self.batches.pop(0)[1]

    async def nothing(self) -> None:
        await asyncio.sleep(watch.DEBOUNCE_SECONDS * 2)
        assert self.batches == []


def run(
    root: Path,
    path: str,
    test: Callable[[Ear, FileWatch], Awaitable[object]],
    *,
    recursive: bool = False,
) -> None:
    async def main() -> None:
        loop, ear = asyncio.get_running_loop(), Ear(root)
        one = FileWatch(loop, os.fsencode(root / path if path else root), recursive, ear.told)
        try:
            await asyncio.to_thread(one.start)
            one.listen()
            await asyncio.wait_for(test(ear, one), 50)
        finally:
            one.close()
        assert not notifier._notifiers, "nobody watches any more"

    asyncio.run(main())


@pytest.fixture(autouse=True)
def short_debounce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "DEBOUNCE_SECONDS", 0.1)


def test_entries_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "old").touch()
    (tmp_path / "sub").mkdir()

    async def test(ear: Ear, _: FileWatch) -> None:
        (tmp_path / "new").write_text("x")
        (tmp_path / "old").unlink()
        (tmp_path / "sub" / "not told").touch()
        assert await ear.next() == ["new", "old"]
        os.rename(tmp_path / "new", tmp_path / "renamed")
        assert await ear.next() == ["new", "renamed"]
        os.chmod(tmp_path / "renamed", 0o600)
        assert await ear.next() == ["renamed"]
        (tmp_path / "renamed").read_text()
        os.listdir(tmp_path)
        await ear.nothing()
        os.chmod(tmp_path, 0o700)
        assert await ear.next() == ["."]

    run(tmp_path, "", test)


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("1")

    async def test(ear: Ear, _: FileWatch) -> None:
        (tmp_path / "other").touch()
        await ear.nothing()
        path.write_text("2")
        assert await ear.next() == ["f"]
        (tmp_path / "other").write_text("3")
        os.rename(tmp_path / "other", path)
        assert await ear.next() == ["f"]
        await asyncio.sleep(0.05)
        with path.open("a") as file:
            file.write("in the new inode")
        assert await ear.next() == ["f"]
        path.unlink()
        assert await ear.next() == ["f"]
        path.touch()
        assert await ear.next() == ["f"]

    run(tmp_path, "f", test)


def test_something_that_is_not_there_yet(tmp_path: Path) -> None:
    async def test(ear: Ear, _: FileWatch) -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "unrelated").touch()
        await ear.nothing()
        (tmp_path / "a" / "b").mkdir()
        await ear.nothing()
        (tmp_path / "a" / "b" / "c").mkdir()
        assert await ear.next() == ["a/b/c"]
        (tmp_path / "a" / "b" / "c" / "child").touch()
        assert await ear.next() == ["a/b/c/child"]
        os.rename(tmp_path / "a", tmp_path / "z")
        assert await ear.next() == ["a/b/c"]
        (tmp_path / "z" / "b" / "c" / "elsewhere").touch()
        await ear.nothing()
        os.rename(tmp_path / "z", tmp_path / "a")
        assert await ear.next() == ["a/b/c"]
        (tmp_path / "a" / "b" / "c" / "again").touch()
        assert await ear.next() == ["a/b/c/again"]

    run(tmp_path, "a/b/c", test)


def test_a_directory_that_is_removed_and_made_again(tmp_path: Path) -> None:
    (tmp_path / "d" / "sub").mkdir(parents=True)
    (tmp_path / "d" / "f").touch()

    async def test(ear: Ear, _: FileWatch) -> None:
        shutil.rmtree(tmp_path / "d")
        assert await ear.next() == ["d", "d/f", "d/sub"]
        (tmp_path / "d").mkdir()
        assert await ear.next() == ["d"]
        (tmp_path / "d" / "g").touch()
        assert await ear.next() == ["d/g"]

    run(tmp_path, "d", test)


def test_the_spelling_of_the_request_is_kept(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real" / "f").touch()
    (tmp_path / "flink").symlink_to("real/f")

    async def test(ear: Ear, _: FileWatch) -> None:
        (tmp_path / "real" / "new").touch()
        assert await ear.next() == ["link/new"]
        (tmp_path / "link").unlink()
        (tmp_path / "other").mkdir()
        (tmp_path / "link").symlink_to("other")
        assert await ear.next() == ["link"]
        (tmp_path / "other" / "there").touch()
        assert await ear.next() == ["link/there"]

    run(tmp_path, "link", test)

    async def watch_file(ear: Ear, _: FileWatch) -> None:
        (tmp_path / "real" / "f").write_text("through")
        assert await ear.next() == ["flink"]

    run(tmp_path, "flink", watch_file)


def test_a_batch_begins_with_its_first_event(tmp_path: Path) -> None:
    async def test(ear: Ear, _: FileWatch) -> None:
        end = time.monotonic() + 0.6
        number = 0
        while time.monotonic() < end:
            (tmp_path / str(number)).touch()
            number += 1
            await asyncio.sleep(0.005)
        await eventually_async(lambda: sum(len(batch[1]) for batch in ear.batches) == number)
        assert 2 <= len(ear.batches) <= 8
        times = [batch[0] for batch in ear.batches]
        assert all(later - earlier > 0.09 for earlier, later in pairwise(times))

    run(tmp_path, "", test)


def test_a_tree(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)

    async def test(ear: Ear, _: FileWatch) -> None:
        (tmp_path / "a" / "b" / "f").touch()
        assert await ear.next() == ["a/b/f"]
        (tmp_path / "x" / "y" / "z").mkdir(parents=True)
        (tmp_path / "x" / "y" / "z" / "deep").touch()
        assert await ear.next() == ["x", "x/y", "x/y/z", "x/y/z/deep"]
        await asyncio.sleep(0.05)
        (tmp_path / "x" / "y" / "z" / "more").touch()
        assert await ear.next() == ["x/y/z/more"]
        os.rename(tmp_path / "x" / "y", tmp_path / "a" / "moved")
        assert await ear.next() == ["a/moved", "a/moved/z", "a/moved/z/deep", "a/moved/z/more", "x/y"]
        await asyncio.sleep(0.05)
        (tmp_path / "a" / "moved" / "z" / "deep").write_text("!")
        assert await ear.next() == ["a/moved/z/deep"]
        shutil.rmtree(tmp_path / "a")
        assert "a/moved/z/deep" in await ear.next()

    run(tmp_path, "", test, recursive=True)


def test_names_that_are_not_utf8_and_our_own(tmp_path: Path) -> None:
    async def test(ear: Ear, _: FileWatch) -> None:
        (tmp_path / ".exec-server-0123").touch()
        await ear.nothing()
        open(os.fsencode(tmp_path) + b"/bad\xff", "w").close()
        assert await ear.next() == ["bad\udcff"]

    run(tmp_path, "", test)


def test_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MAX_COLLECTED_PATHS", 50)

    async def test(ear: Ear, one: FileWatch) -> None:
        for number in range(60):
            (tmp_path / str(number)).touch()
        await eventually_async(lambda: ear.batches)
        assert ear.batches[0][2]
        assert "." in ear.batches[0][1]
        await asyncio.sleep(0.2)
        ear.batches.clear()
        one.lost()
        await eventually_async(lambda: ear.batches)
        assert ear.batches[0][1:] == (["."], True)
        ear.batches.clear()
        (tmp_path / "and on").touch()
        assert await ear.next() == ["and on"]

    run(tmp_path, "", test)


def test_many_paths_come_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MAX_CHANGED_PATHS", 10)

    async def test(ear: Ear, _: FileWatch) -> None:
        for number in range(25):
            (tmp_path / f"{number:02}").touch()
        await eventually_async(lambda: sum(len(batch[1]) for batch in ear.batches) == 25)
        assert [len(batch[1]) for batch in ear.batches] == [10, 10, 5]

    run(tmp_path, "", test)


def test_nobody_is_told_more_than_he_can_take(tmp_path: Path) -> None:
    async def test(ear: Ear, _: FileWatch) -> None:
        ear.room = Pending()
        (tmp_path / "one").touch()
        assert await ear.next() == ["one"]
        (tmp_path / "two").touch()
        await ear.nothing()
        room, ear.room = ear.room, None
        room.resolve(None)
        assert await ear.next() == ["two"]

    run(tmp_path, "", test)


def test_watchers_of_one_directory_share_it(tmp_path: Path) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        ears = [Ear(tmp_path) for _ in range(20)]
        watches = [FileWatch(loop, os.fsencode(tmp_path), False, ear.told) for ear in ears]
        for one in watches:
            await asyncio.to_thread(one.start)
            one.listen()
        shared = notifier.notifier_of(loop)
        assert len(shared._roles) == len(tmp_path.parts)
        (tmp_path / "f").touch()
        for ear in ears:
            assert await ear.next() == ["f"]
        watches[0].close()
        (tmp_path / "g").touch()
        assert await ears[1].next() == ["g"]
        assert ears[0].batches == []
        for one in watches:
            one.close()
        assert not notifier._notifiers

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(main())
    assert len(os.listdir("/proc/self/fd")) == before
