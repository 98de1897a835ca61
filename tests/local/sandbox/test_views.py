"""Plans carried out: what the kernel allows inside of a view is what the plan says."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exec_server.local.process.spawn import SpawnSpec, spawn
from exec_server.local.sandbox import probe
from exec_server.local.sandbox.compile import compile_plan
from exec_server.local.sandbox.launch import carry_out
from exec_server.local.sandbox.look import ThisMachine
from exec_server.local.sandbox.plan import Plan, PlanError
from support.profiles import context, path, pattern, special
from support.sandbox import needs_bubblewrap

__all__ = ["needs_bubblewrap"]

pytestmark = pytest.mark.usefixtures("needs_bubblewrap")

PYTHON = os.path.realpath(sys.executable)
NEEDED = tuple(map(os.fsencode, (PYTHON, sys.base_prefix, "/usr", "/lib", "/lib64")))

LOOK = """
import json, os, sys

def attempt(act):
    try:
        act()
        return True
    except OSError:
        return False

def read(name):
    os.listdir(name) if os.path.isdir(name) else open(name, "rb").read()

def write(name):
    if os.path.isdir(name):
        os.mkdir(name + "/made")
        os.rmdir(name + "/made")
    else:
        os.close(os.open(name, os.O_WRONLY))

def create(name):
    os.mkdir(name)
    os.rmdir(name)

found = {}
for name in json.loads(sys.argv[1]):
    try:
        info = os.lstat(name)
        found[name] = [info.st_dev, info.st_ino, attempt(lambda: read(name)), attempt(lambda: write(name))]
    except OSError:
        found[name] = attempt(lambda: create(name))
print(json.dumps(found))
"""


def look_inside(plan: Plan, places: list[str]) -> dict[str, Any]:
    """For what exists inside: device, number, can it be read, can it be written. Else: can it be made."""
    argv = [PYTHON, "-I", "-S", "-c", LOOK, json.dumps(places)]
    spec = SpawnSpec(
        argv=argv,
        cwd="/",
        env={},
        tty=False,
        pipe_stdin=False,
        prepare=lambda spec: carry_out(plan, probe.backend(), spec),
    )
    child = spawn(spec)
    said = {}
    try:
        for name, descriptor in child.outputs:
            os.set_blocking(descriptor, True)
            with open(descriptor, "rb") as stream:
                said[name] = stream.read()
    finally:
        assert child.pidfd is not None
        if said.get("stderr") != b"":
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
        ended = os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED | os.WNOWAIT)
        if child.release is not None:
            child.release(child.pidfd)
        os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED)
        os.close(child.pidfd)
    assert ended is not None
    assert (ended.si_status, said["stderr"]) == (0, b""), f"{said}\n{plan}"
    found: dict[str, Any] = json.loads(said["stdout"])
    return found


def listing(root: Path) -> list[str]:
    return sorted(str(item) for item in root.rglob("*"))


def check(plan: Plan, root: Path, places: list[str]) -> None:
    before = listing(root)
    inside = look_inside(plan, places)
    guards = {os.fsdecode(point.path) for point in plan.created}
    for place in places:
        access = plan.access(os.fsencode(place))
        seen = inside[place]
        about = f"{place} should be {access}: {seen}\n{plan}"
        if isinstance(seen, bool):
            # Something that is not there can be made exactly where the plan lets it be.
            allowed = access == "write" and os.path.isdir(os.path.dirname(place))
            assert seen == allowed, about
            assert access == "none" or not os.path.lexists(place), about
            continue
        device, number, readable, writable = seen
        if place in guards:
            assert not writable, about
            continue
        info = os.lstat(place) if os.path.lexists(place) else None
        same = info is not None and (info.st_dev, info.st_ino) == (device, number)
        if access == "none":
            assert (same, writable) == (False, False), about
        else:
            assert (same, readable, writable) == (True, True, access == "write"), about
    assert listing(root) == before, f"something was left behind\n{plan}"


NAMES = ("a", "b", ".git", ".codex")
PLACES = [
    *NAMES,
    *(f"{first}/{second}" for first in NAMES for second in NAMES),
    *(f"{first}/{second}/{third}" for first in ("a", ".git") for second in NAMES for third in ("a", ".git")),
]
trees = st.dictionaries(st.sampled_from(PLACES), st.booleans(), max_size=14)
entries = st.lists(
    st.tuples(st.sampled_from([".", *PLACES]), st.sampled_from(["read", "write", "deny"])), max_size=7
)


@pytest.fixture
def folders() -> Iterator[Path]:
    """Where each example gets a folder of its own; in none of the places that profiles name."""
    root = Path(os.path.realpath(tempfile.mkdtemp(prefix="exec-server-views-")))
    yield root
    shutil.rmtree(root)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trees, entries, st.sampled_from(["read", "scoped", "narrowed"]))
def test_the_kernel_agrees_with_the_plan(
    folders: Path, tree: dict[str, bool], chosen: list[tuple[str, str]], base: str
) -> None:
    root = Path(tempfile.mkdtemp(dir=folders))
    for name, directory in sorted(tree.items()):
        place = root / name
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.mkdir(exist_ok=True) if directory else place.write_bytes(b"content")
        except OSError:
            continue  # below a file, or a file where a directory is already
    rules = [path(os.path.normpath(root / name), access) for name, access in chosen]
    if base != "scoped":
        rules.append(special("root", "read"))
    if base == "narrowed":
        rules.append(path(folders, "write"))
    try:
        plan = compile_plan(context(*rules), ThisMachine(), cwd=b"/", readable=NEEDED, for_files=True)
    except PlanError as error:
        assert "is not a directory" in str(error)  # noqa: PT017  # nothing else can be wrong without links
        return
    check(plan, root, [str(root), *(str(root / name) for name in PLACES)])


def test_links_patterns_and_nested_rules_together(folders: Path) -> None:
    for name in ("w/sub/deep", "w/priv", "o/in", "w/.git/refs"):
        (folders / name).mkdir(parents=True)
    for name in ("w/a.env", "w/sub/b.env", "w/sub/c", "o/s", "o/x.env", "w/priv/p", "w/.git/config"):
        (folders / name).write_bytes(b"content")
    (folders / "L").symlink_to("w")
    (folders / "o/link.env").symlink_to("in")
    (folders / "o/away.env").symlink_to("s")
    rules = [
        special("root", "read"),
        path(folders / "L", "write"),
        path(folders / "w/priv", "deny"),
        path(folders / "L/sub/deep", "read"),
        path(folders / "w/.git/refs", "write"),
        path(folders / "w/later/x", "deny"),
        pattern(f"{folders}/w/**/*.env"),
        pattern(f"{folders}/o/*.env"),
    ]
    plan = compile_plan(context(*rules), ThisMachine(), cwd=os.fsencode(folders), for_files=True)
    places = [name for name in listing(folders) if not os.path.islink(name)]
    check(
        plan, folders, [*places, *(str(folders / name) for name in ("w/later", "w/new", "o/new", "w/.aws"))]
    )
    denied = {os.fsencode(folders / name) for name in ("o/s", "o/in", "o/x.env", "w/a.env", "w/sub/b.env")}
    assert denied <= set(plan.denied)
    assert plan.access(os.fsencode(folders / "w/.git/refs/x")) == "write"


def test_directories_on_the_way_cannot_be_renamed(folders: Path) -> None:
    (folders / "w/a/ro").mkdir(parents=True)
    rules = [special("root", "read"), path(folders / "w", "write"), path(folders / "w/a/ro", "read")]
    plan = compile_plan(context(*rules), ThisMachine(), cwd=b"/")
    argv = [
        "/bin/sh",
        "-c",
        f"mv {folders}/w/a {folders}/w/b 2>&1; mkdir -p {folders}/w/c; mv {folders}/w/c {folders}/w/d",
    ]
    spec = SpawnSpec(
        argv=argv,
        cwd="/",
        env={"PATH": os.environ["PATH"]},
        tty=False,
        pipe_stdin=False,
        prepare=lambda spec: carry_out(plan, probe.backend(), spec),
    )
    child = spawn(spec)
    assert child.pidfd is not None
    os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED | os.WNOWAIT)
    if child.release is not None:
        child.release(child.pidfd)
    os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED)
    os.close(child.pidfd)
    for _, descriptor in child.outputs:
        os.close(descriptor)
    assert sorted(os.listdir(folders / "w")) == ["a", "d"]
