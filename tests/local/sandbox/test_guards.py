"""Names that must not be made are covered while a call is done, and only then."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from exec_server.local.process.spawn import Launch, SpawnSpec
from exec_server.local.sandbox.confine import Confinement
from exec_server.local.sandbox.helper_process import Key
from exec_server.local.sandbox.plan import Bind, MountPoint, Plan, ReadOnly, Tmpfs
from exec_server.wire.errors import RpcError
from support.pool import Pool


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return Path(os.path.realpath(tmp_path))


def guarding(root: Path, *names: str, mode: int = 0o555) -> Key:
    places = [os.fsencode(root / name) for name in names]
    steps: list[Any] = [Bind(os.fsencode(root), os.fsencode(root), writable=True)]
    for place in places:
        steps += [Tmpfs(place, mode), ReadOnly(place)]
    created = tuple(MountPoint(place, True) for place in places)
    return Key(Plan(kind="view", network="closed", steps=tuple(steps), created=created))


@pytest.fixture
def pool() -> Iterator[Callable[..., Pool]]:
    made: list[Pool] = []

    def make(*arguments: Any) -> Pool:
        made.append(Pool(*arguments))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_key_knows_what_its_calls_have_to_cover(root: Path) -> None:
    key = guarding(root, ".git", ".codex")
    assert key.guards == [(os.fsencode(root / name), 0o555) for name in (".git", ".codex")]
    assert key.unguarded.steps == key.plan.steps[:1]
    assert key.unguarded.created == ()
    plain = Key(Plan(kind="view", network="closed"))
    assert (plain.guards, plain.unguarded) == ([], plain.plan)


def test_one_helper_covers_for_each_call(pool: Callable[..., Pool], root: Path) -> None:
    one, key = pool(), guarding(root, ".git", ".codex")
    for number in range(3):
        assert one.call(key, "fs/writeFile", path=(root / f"f{number}").as_uri(), dataBase64="eA==") == {}
        with pytest.raises(RpcError, match="Read-only file system"):
            one.call(key, "fs/writeFile", path=(root / ".git/x").as_uri(), dataBase64="eA==")
        with pytest.raises(RpcError, match="Is a directory"):
            one.call(key, "fs/writeFile", path=(root / ".codex").as_uri(), dataBase64="eA==")
        assert sorted(os.listdir(root)) == [f"f{done}" for done in range(number + 1)]
    assert one.started == [key.unguarded]
    assert one.helpers.count == 1


def test_an_empty_directory_of_somebody_stays(pool: Callable[..., Pool], root: Path) -> None:
    (root / ".git").mkdir()
    one, key = pool(), guarding(root, ".git")
    with pytest.raises(RpcError, match="Read-only file system"):
        one.call(key, "fs/createDirectory", path=(root / ".git/x").as_uri())
    assert os.listdir(root) == [".git"]


def test_denied_names(pool: Callable[..., Pool], root: Path) -> None:
    one, key = pool(), guarding(root, ".git", mode=0)
    with pytest.raises(RpcError, match=r"Permission denied|Read-only file system"):
        one.call(key, "fs/writeFile", path=(root / ".git/x").as_uri(), dataBase64="eA==")
    with pytest.raises(RpcError, match="Permission denied"):
        one.call(key, "fs/readDirectory", path=(root / ".git").as_uri())


def test_a_name_that_turned_into_something_else_stops_the_call(pool: Callable[..., Pool], root: Path) -> None:
    one, key = pool(), guarding(root, ".git")
    (root / "other").mkdir()
    (root / ".git").symlink_to("other")
    with pytest.raises(RpcError, match=r"cannot protect .*/\.git"):
        one.call(key, "fs/writeFile", path=(root / "f").as_uri(), dataBase64="eA==")
    assert sorted(os.listdir(root)) == [".git", "other"]
    (root / ".git").unlink()
    assert one.call(key, "fs/writeFile", path=(root / "f").as_uri(), dataBase64="eA==") == {}


def test_whoever_does_the_call_has_given_up_what_it_took_to_guard(
    pool: Callable[..., Pool], root: Path
) -> None:
    import base64

    read = pool().call(guarding(root, ".git"), "fs/readFile", path="file:///proc/self/status")
    lines = base64.b64decode(read["dataBase64"]).splitlines()
    rights = [
        line.split()[1].strip(b"0") for line in lines if line.startswith((b"CapEff", b"CapPrm", b"CapBnd"))
    ]
    assert rights == [b"", b"", b""]


def test_files_of_others_keep_their_owner(pool: Callable[..., Pool], root: Path) -> None:
    """Where it cannot be seen whose a file is, it is done another way."""
    one, key = pool(), guarding(root, ".git")
    target = root / "f"
    target.write_bytes(b"old")
    target.chmod(0o666)
    if os.getuid() == 0:
        os.chown(target, 1234, 1234)
    owner = (target.stat().st_uid, target.stat().st_gid)
    assert one.call(key, "fs/writeFile", path=target.as_uri(), dataBase64="eA==") == {}
    assert (target.stat().st_uid, target.stat().st_gid) == owner
    assert target.read_bytes() == b"x"
    copied = {"sourcePath": target.as_uri(), "destinationPath": (root / "g").as_uri(), "recursive": False}
    assert [one.call(key, "fs/copy", **copied) for _ in range(2)] == [{}, {}]
    assert one.started[-1] == key.plan  # the second had something to replace
    assert one.helpers.count == 1


UNSHARE = {"x86_64": 272, "aarch64": 97}


def without_namespaces(code: int) -> Callable[[SpawnSpec], Launch]:
    """Where nobody gets a namespace of his own, and what he is told."""
    number = UNSHARE[os.uname().machine]
    steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | code), (0x06, 0, 0, 0x7FFF0000)]
    program = b"".join(struct.pack("=HBBI", *step) for step in steps)
    confinement = Confinement(program, None, network=True)
    return lambda spec: Launch(
        spec.argv, spec.env, spec.arg0, confine=lambda _, start: confinement.run(start)
    )


def test_without_namespaces_a_helper_serves_one_call(pool: Callable[..., Pool], root: Path) -> None:
    """As inside of some containers."""
    one, key = pool(without_namespaces(errno.EPERM)), guarding(root, ".git")
    for name in ("a", "b"):
        assert one.call(key, "fs/writeFile", path=(root / name).as_uri(), dataBase64="eA==") == {}
    # The first try found out; from then on the sandbox itself has to cover what is missing.
    assert one.started == [key.unguarded, key.plan, key.plan]


def test_too_few_namespaces_for_now_may_be_enough_later(pool: Callable[..., Pool], root: Path) -> None:
    one, key = pool(without_namespaces(errno.ENOSPC)), guarding(root, ".git")
    for name in ("a", "b"):
        assert one.call(key, "fs/writeFile", path=(root / name).as_uri(), dataBase64="eA==") == {}
    assert one.started == [key.unguarded, key.plan, key.plan]
    assert one.helpers.count == 1, "the one that could not, and is asked again"
