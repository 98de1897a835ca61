"""The one-shot watch for what is not there."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from exec_server.local.files.missing import watch_missing
from support.wait import eventually_async


def fires(missing: list[Path], present: Path | None, act: Callable[[], object]) -> bool:
    """Whether it does, having been able to watch at all."""

    async def main() -> bool:
        watch = watch_missing(
            [os.fsencode(path) for path in missing], None if present is None else os.fsencode(present)
        )
        assert watch is not None
        fired: list[bool] = []
        watch.listen(asyncio.get_running_loop(), lambda: fired.append(True))
        act()
        try:
            await eventually_async(lambda: fired, timeout=0.3)
        except AssertionError:
            return False
        finally:
            watch.close()
        assert fired == [True]
        return True

    before = len(os.listdir("/proc/self/fd"))
    result = asyncio.run(main())
    assert len(os.listdir("/proc/self/fd")) == before
    return result


def refused(missing: list[Path], present: Path | None = None) -> bool:
    before = len(os.listdir("/proc/self/fd"))
    watch = watch_missing(
        [os.fsencode(path) for path in missing], None if present is None else os.fsencode(present)
    )
    if watch is not None:
        watch.close()
    assert len(os.listdir("/proc/self/fd")) == before
    return watch is None


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path.resolve()
    (root / "d" / "e").mkdir(parents=True)
    (root / "f").write_text("1")
    return root


def append(path: Path) -> None:
    with path.open("a") as file:
        file.write("more")


def test_what_fires(root: Path) -> None:
    assert fires([root / "x"], None, (root / "x").touch)
    assert fires([root / "d" / "x" / "y" / "z"], None, (root / "d" / "x").mkdir)
    (root / "aside").touch()
    assert fires([root / "d" / "q"], None, lambda: os.rename(root / "aside", root / "d" / "q"))
    assert fires([root / "d" / "r"], None, lambda: os.symlink("nowhere", root / "d" / "r"))
    assert fires([root / "d" / "e" / "m"], None, lambda: os.rename(root / "d", root / "dd"))
    os.rename(root / "dd", root / "d")
    assert fires([root / "d" / "e" / "m"], None, lambda: os.chmod(root / "d", 0o700))
    assert fires([root / "d" / "e" / "m"], None, lambda: shutil.rmtree(root / "d"))


def test_what_fires_for_what_is_there(root: Path) -> None:
    missing = [root / "never"]
    assert fires(missing, root / "f", lambda: append(root / "f"))
    assert fires(missing, root / "f", lambda: os.utime(root / "f"))
    os.link(root / "f", root / "hard")
    assert fires(missing, root / "f", lambda: append(root / "hard"))
    (root / "g").touch()
    assert fires(missing, root / "f", lambda: os.rename(root / "g", root / "f"))
    assert fires(missing, root / "f", (root / "f").unlink)
    assert fires(missing, root / "d" / "e", lambda: os.chmod(root / "d" / "e", 0o700))
    assert fires(missing, root / "d" / "e", (root / "d" / "e").rmdir)


def test_what_does_not(root: Path) -> None:
    assert not fires([root / "x"], None, (root / "xx").touch)
    assert not fires([root / "d" / "x"], None, (root / "d" / "y").touch)
    assert not fires([root / "x"], root / "f", (root / "f").read_text)
    assert not fires([root / "x"], root / "d", (root / "d" / "child").touch)
    assert not fires([root / "x"], root / "f", lambda: append(root / "other"))


def test_what_is_refused(root: Path) -> None:
    (root / "link").symlink_to("d")
    (root / "dangling").symlink_to("nowhere")
    assert refused([])
    assert refused([root / f"m{index}" for index in range(65)])
    assert not refused([root / f"m{index}" for index in range(64)])
    assert not refused([root / "m", root / "m"])
    assert refused([root / "f"])
    assert refused([root / "m", root / "f"])
    assert refused([root / "dangling"])
    assert refused([root / "link" / "m"])
    assert refused([root / "f" / "m"])
    assert refused([Path("/")])
    assert refused([Path("/proc/self/nothing")])
    assert refused([Path("/sys/nothing")])
    assert refused([root / "m"], root / "nothing")
    assert refused([root / "m"], root / "link")
    assert refused([root / "m"], root / "link" / "e")


def test_one_that_nobody_wanted_any_more_closes_itself(root: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    assert watch_missing([os.fsencode(root / "m")], None) is not None
    assert len(os.listdir("/proc/self/fd")) == before
