"""A plan as bubblewrap's arguments and the descriptors that go with them.

Everything but the command itself travels through `--args`, a file in memory: no limit on the length of a
command line is met, and no other user sees the variables of a command in the list of processes. The
program gets an empty environment and sets the command's variables on the way in, so that nothing a
client puts there (LD_PRELOAD for one) has any effect outside of the sandbox.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from typing import Final

from ..process import descriptors
from .plan import Bind, Directory, EmptyFile, Link, Plan, PrivateDevices, ReadOnly, Step, Tmpfs
from .probe import Backend, partition

__all__ = ["Command", "Unbuildable", "arguments", "build"]

MOST_ARGUMENTS: Final = 9000
"""bubblewrap takes no more."""

PLAIN_MODE: Final = 0o755
"""What a new directory gets without being told."""

_RENAME: Final = 'exec -a "$0" -- "$@"'
"""A shell that starts a command under another name. It must be told to read no file of the user's: where it
may not ask who is at the other end of its input, it takes that for a network, and itself for a login."""

INITCTL: Final = b"/run/initctl"
"""A named pipe through which root tells the init of a machine what to do. A view that can only be read does
not keep anybody from writing into a pipe."""

_SHELLS: Final = (b"/bin/bash", b"/usr/bin/bash", b"/usr/local/bin/bash")


class Unbuildable(Exception):
    """A plan or a command that this bubblewrap cannot take, in words."""


class Command:
    """What is to be run: bubblewrap's argv and the descriptors it inherits, ours to close afterwards."""

    def __init__(self, argv: list[bytes], inherited: list[int]) -> None:
        self.argv = argv
        self.inherited = inherited


def build(
    plan: Plan,
    backend: Backend,
    argv: list[bytes],
    env: dict[bytes, bytes],
    *,
    arg0: bytes | None = None,
    program: bytes | None = None,
    hidden: Iterable[bytes] = (),
    badge: bytes | None = None,
    more: Iterable[tuple[bytes, int]] = (),
) -> Command:
    """The command line that runs `argv` as the plan says.

    `program` is the filter of system calls; `hidden` are directories of ours that nobody inside may look
    into; `badge` is one to put over the first process inside; `more` are options that take a descriptor,
    which must be inheritable by number.
    """
    inherited: list[int] = []
    first = _apart() if plan.spread else []
    try:
        words = arguments(plan, backend, inherited, badge)
        for directory in hidden:
            words += [b"--perms", b"000", b"--tmpfs", directory, b"--remount-ro", directory]
        if os.geteuid() == 0 and plan.access(INITCTL) != "none" and _is_pipe(INITCTL):
            words += [b"--ro-bind", os.fsencode(os.devnull), INITCTL]
        for option, fd in more:
            words += [option, b"%d" % fd]
        if program is not None:
            words += [b"--seccomp", b"%d" % _hold(program, inherited)]
        if arg0 is not None and arg0 != argv[0]:
            argv = _renamed(plan, backend, argv, arg0, words)
        for name, value in env.items():
            if name:  # nobody can ask for a variable without a name
                words += [b"--setenv", *_variable(name, value)]
        if len(words) + len(argv) > MOST_ARGUMENTS:
            raise Unbuildable(
                f"the sandbox and its command would take {len(words) + len(argv)} arguments, and bubblewrap "
                f"takes {MOST_ARGUMENTS}: fewer paths, variables and words, please"
            )
        listed = _hold(b"".join(word + b"\0" for word in words), inherited)
    except BaseException:
        for fd in inherited:
            os.close(fd)
        raise
    name = os.fsencode(backend.program or "bwrap")
    return Command([*first, name, b"--args", b"%d" % listed, b"--", *argv], inherited)


def _apart() -> list[bytes]:
    """bubblewrap leaves every mount of a view a follower of the host's: where those are shared, as systemd
    has them, what is mounted later appears inside, and can be written. So it is started apart from them."""
    found = partition()
    if found.problem:
        raise Unbuildable(
            "the mounts of this machine are shared, and what is mounted later would appear in the sandbox; "
            f"to keep it out needs unshare, which does not work ({found.problem}). A server that is started "
            "by systemd with PrivateMounts=yes and MountFlags=private, or in a container, does without"
        )
    return [os.fsencode(word) for word in found.prefix]


def arguments(plan: Plan, backend: Backend, inherited: list[int], badge: bytes | None = None) -> list[bytes]:
    """The plan alone. Descriptors that were opened for it are added to `inherited`."""
    masks = sum(isinstance(step, EmptyFile) for step in plan.steps)
    descriptors.make_room(masks)
    words = [b"--new-session", b"--die-with-parent"]
    private = any(isinstance(step, PrivateDevices) for step in plan.steps)
    for number, step in enumerate(plan.steps):
        if isinstance(step, ReadOnly) and step.target == b"/proc" and not backend.proc:
            continue  # it is part of the host's view, which is bound for reading
        words += _step(step, inherited, devices=not private)
        if isinstance(step, PrivateDevices) or (number == 0 and not private):
            words += _kernel(plan, backend, badge)  # here, so that a later step may seal it
    words += [b"--unshare-user", b"--unshare-pid", b"--unshare-ipc"]
    if plan.network != "open":
        words.append(b"--unshare-net")
    return [*words, b"--chdir", plan.cwd, b"--cap-drop", b"ALL"]


def _kernel(plan: Plan, backend: Backend, badge: bytes | None) -> list[bytes]:
    """A fresh /proc, and nothing through which the first process or, as root, the kernel could be steered.

    The first process inside is bubblewrap's and has the rights of the command, which could write its memory.
    Where there is no fresh /proc the host's can only be read.
    The kernel lets whoever is user 0 outside write its settings, without any capability: a program named
    in core_pattern is run by the real root. bubblewrap covers only some of that.
    """
    words: list[bytes] = []
    if backend.proc:
        words = [b"--proc", b"/proc"]
        if badge is not None:
            words += [b"--ro-bind", badge, b"/proc/1"]
    elif plan.access(b"/proc") == "write":
        words = [b"--ro-bind", b"/proc", b"/proc"]
    if os.geteuid() == 0:
        if backend.proc or plan.access(b"/proc/sys") == "write":
            words += [b"--ro-bind-try", b"/proc/sys", b"/proc/sys"]
        if plan.access(b"/sys") == "write":
            words += [b"--ro-bind-try", b"/sys", b"/sys"]
    return words


def _is_pipe(path: bytes) -> bool:
    try:
        return stat.S_ISFIFO(os.lstat(path).st_mode)
    except OSError:
        return False


def _step(step: Step, inherited: list[int], *, devices: bool = False) -> list[bytes]:
    """`devices`: those of the host work, because the plan has no private ones."""
    match step:
        case Bind(source, target, writable):
            way = b"--dev-bind" if devices and writable else b"--bind" if writable else b"--ro-bind"
            return [way, source, target]
        case PrivateDevices(target):
            return [b"--dev", target]
        case Tmpfs(target, mode):
            return [*_mode(None if mode == PLAIN_MODE else mode), b"--tmpfs", target]
        case Directory(target):
            return [b"--dir", target]
        case EmptyFile(target, mode):
            inherited.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))  # each is read to its end
            return [*_mode(mode), b"--ro-bind-data", b"%d" % inherited[-1], target]
        case Link(target, leads_to):
            return [b"--symlink", leads_to, target]
        case ReadOnly(target):
            return [b"--remount-ro", target]


def _mode(mode: int | None) -> list[bytes]:
    return [] if mode is None else [b"--perms", b"%03o" % mode]


def _hold(data: bytes, inherited: list[int]) -> int:
    """A descriptor that delivers the data."""
    fd = os.memfd_create("exec-server-sandbox")
    inherited.append(fd)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _variable(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    """A name with `=` in it is a shorter name, as it would be without a sandbox."""
    head, _, rest = (name + b"=" + value).partition(b"=")
    return head, rest


def _renamed(plan: Plan, backend: Backend, argv: list[bytes], arg0: bytes, words: list[bytes]) -> list[bytes]:
    """The argv that makes a command see another name; old versions of bubblewrap need a shell for it."""
    if backend.argv0:
        words += [b"--argv0", arg0]
        return argv
    for shell in _SHELLS:
        if os.path.isfile(shell) and plan.access(os.path.realpath(shell)) != "none":
            return [shell, b"--norc", b"--noprofile", b"-p", b"-c", os.fsencode(_RENAME), arg0, *argv]
    raise Unbuildable("arg0 needs bubblewrap 0.9 or later, or a bash that can be read inside of the sandbox")
