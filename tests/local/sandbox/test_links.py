"""Where paths lead, step by step, is where the kernel says they lead."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exec_server.local.sandbox.links import MAX_LINKS, Real, resolve
from exec_server.local.sandbox.look import ThisMachine
from exec_server.local.sandbox.plan import PlanError
from support.tree import Tree

TREE = Tree(
    {"/a/b/f": b"", "/l": "a/b", "/abs": "/a", "/up": "l/../b/f", "/gone": "nowhere/x", "/a/deep": "../l/f"}
)


def lead(path: str) -> Real:
    return resolve(path.encode(), TREE.look)


@pytest.mark.parametrize(
    ("path", "real", "links"),
    [
        ("/", b"/", 0),
        ("/a/b/f", b"/a/b/f", 0),
        ("/a/./b/../b/f", b"/a/b/f", 0),
        ("/l/f", b"/a/b/f", 1),
        ("/abs/b", b"/a/b", 1),
        ("/up", b"/a/b/f", 2),
        ("/a/deep", b"/a/b/f", 2),
        ("/../../a", b"/a", 0),
    ],
)
def test_existing(path: str, real: bytes, links: int) -> None:
    found = lead(path)
    assert (found.path, found.exists, len(found.links), found.existing) == (real, True, links, real)


def test_missing() -> None:
    found = lead("/a/x/y/z")
    assert (found.path, found.exists, found.existing, found.first_missing) == (
        b"/a/x/y/z",
        False,
        b"/a",
        b"/a/x",
    )
    assert lead("/x").first_missing == b"/x"
    dangling = lead("/gone")
    assert (dangling.path, dangling.first_missing) == (b"/nowhere/x", b"/nowhere")
    assert dangling.links == ((b"/gone", b"nowhere/x"),)
    below = lead("/a/b/f/x")  # nothing is below a file
    assert (below.exists, below.existing, below.first_missing) == (False, b"/a/b/f", b"/a/b/f/x")


def test_loops() -> None:
    with pytest.raises(PlanError, match="too many symbolic links"):
        resolve(b"/loop", Tree({"/loop": "loop"}).look)
    long = {f"/l{number}": f"l{number + 1}" for number in range(MAX_LINKS)}
    assert resolve(b"/l0", Tree({**long, f"/l{MAX_LINKS}": None}).look).exists


NAMES = ("a", "b", "c")
targets = st.lists(st.sampled_from([*NAMES, "..", "."]), min_size=1, max_size=4).map("/".join)
places = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map("/".join)


@settings(max_examples=30)
@given(st.dictionaries(places, st.none() | targets, max_size=8), targets)
def test_the_kernel_agrees(tree: dict[str, str | None], asked: str) -> None:
    base = tempfile.mkdtemp()
    try:
        # Deep enough for any number of `..` to stay inside.
        root = Path(os.path.realpath(base), *["deep"] * 12)
        root.mkdir(parents=True)
        _build(root, tree)
        _compare(os.fsencode(f"{root}/{asked}"))
    finally:
        shutil.rmtree(base)


def _build(root: Path, tree: dict[str, str | None]) -> None:
    for name, leads_to in sorted(tree.items()):
        try:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).mkdir() if leads_to is None else (root / name).symlink_to(leads_to)
        except OSError:
            continue  # something else is there


def _compare(path: bytes) -> None:
    try:
        descriptor = os.open(path, os.O_PATH)
    except FileNotFoundError:
        assert not resolve(path, ThisMachine().look).exists
        return
    except OSError as error:
        assert error.errno == errno.ELOOP  # noqa: PT017  # nothing else can be wrong with these
        with pytest.raises(PlanError):
            resolve(path, ThisMachine().look)
        return
    real = os.readlink(f"/proc/self/fd/{descriptor}")
    os.close(descriptor)
    found = resolve(path, ThisMachine().look)
    assert (found.path, found.exists) == (os.fsencode(real), True)
