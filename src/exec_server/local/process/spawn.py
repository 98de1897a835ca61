"""Starting a program: find it, give it its descriptors, its directory, its session, its tag.

`posix_spawn` through ctypes, because it starts a child without copying this process (vfork), can change
directory and open a terminal on the way, and lets other threads run meanwhile.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import struct
import sys
import termios
from collections.abc import Callable, Iterator
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from ...wire.errors import RpcError, internal_error, os_error_text
from . import descriptors
from .tree import tagged

__all__ = ["Launch", "SpawnSpec", "Spawned", "spawn"]

DEFAULT_PATH: Final = "/usr/local/bin:/bin:/usr/bin"
"""Where a bare name is looked for when the child has no PATH."""

NAME_MAX: Final = 255
"""Bytes in the name of a file."""

_SETSIGDEF: Final = 0x04
_SETSIGMASK: Final = 0x08
_SETSID: Final = 0x400 if sys.platform == "darwin" else 0x80
_OPAQUE_BYTES: Final = 512
"""Room for any C library's posix_spawnattr_t, posix_spawn_file_actions_t or sigset_t."""

_SAY_AND_EXIT: Final = 'printf "%s\\n" "$1" >&2; exit "$2"'
"""What a shell runs in place of a command that cannot be started where starting must not fail."""

NOT_FOUND_EXIT: Final = 127
NOT_ALLOWED_EXIT: Final = 126
"""What shells answer for a command that is not there, and for one that may not be run."""

_libc = ctypes.CDLL(None)
_Buffer = ctypes.c_char * _OPAQUE_BYTES
_ALL_SIGNALS = _Buffer()
_NO_SIGNALS = _Buffer()
_libc.sigfillset(_ALL_SIGNALS)
_libc.sigemptyset(_NO_SIGNALS)
# Also the two that C libraries keep for themselves and leave out: a child would begin by ignoring them.
ctypes.memset(_ALL_SIGNALS, 0xFF, 8)


class Launch(Struct):
    """How a child is really started where that is more than executing its argv: inside of a sandbox.

    Starting one never fails for want of its program: then the child says so itself, and exits.
    """

    argv: list[str]
    env: dict[str, str]
    arg0: str | None = None
    inherited: list[int] = []
    """Descriptors the child gets by their numbers. Ours are closed when it has been started."""
    confine: Callable[[str | None, Callable[[], int]], int] | None = None
    """Does the last step with fewer rights. Is told which terminal the child will open."""
    inside: bool = False
    """Whether the command is a grandchild in a process-id namespace of its own."""
    started: Callable[[], None] | None = None
    """Called once it runs, or could not be started at all."""
    release: Callable[[int | None], None] | None = None
    """Called with the child's pidfd when it has ended and before it is reaped, in a worker thread."""

    def close(self) -> None:
        """Let go of the descriptors."""
        for fd in self.inherited:
            os.close(fd)
        self.inherited = []


class SpawnSpec(Struct):
    """Everything about a child that is decided before it exists."""

    argv: list[str]
    cwd: str
    env: dict[str, str]
    tty: bool
    pipe_stdin: bool
    arg0: str | None = None
    rows: int = 24
    cols: int = 80
    tag: int | None = None
    prepare: Callable[[SpawnSpec], Launch] | None = None
    """Makes the sandbox. Called where the child is started, in a worker thread: it may look at disks."""
    sandboxed: bool = False
    """Whether a sandbox was asked for; `prepare` is forgotten when it has been used."""


class Spawned(Struct):
    """A running child. The descriptors are ours, non-blocking, and not inherited by anybody."""

    pid: int
    pidfd: int | None
    stdin: int | None
    outputs: list[tuple[str, int]]
    """Stream name and descriptor to read it from."""
    inside: bool = False
    release: Callable[[int | None], None] | None = None
    """As in Launch."""


def spawn(spec: SpawnSpec) -> Spawned:
    """Start the child, or raise RpcError -32603 with the operating system's words."""
    _check_text(spec)
    if spec.prepare is not None:
        return _spawn_prepared(spec, spec.prepare)
    return _spawn(spec, None)


def _spawn_prepared(spec: SpawnSpec, prepare: Callable[[SpawnSpec], Launch]) -> Spawned:
    try:
        _check_directory(spec)
    except OSError as error:
        raise internal_error(os_error_text(error)) from None
    launch = prepare(spec)
    try:
        spawned = _spawn(replace(spec, argv=launch.argv, env=launch.env, arg0=launch.arg0), launch)
    except BaseException:
        if launch.release is not None:
            launch.release(None)
        raise
    finally:
        launch.close()
        if launch.started is not None:
            launch.started()
    spawned.inside = launch.inside
    spawned.release = launch.release
    return spawned


def _spawn(spec: SpawnSpec, launch: Launch | None) -> Spawned:
    owned: list[int] = []  # closed if anything fails
    handed: list[int] = []  # the child's ends, closed in any case
    actions = _Actions()
    start = _spawn_on_terminal if spec.tty else _spawn_on_pipes
    try:
        return start(spec, launch, owned, handed, actions)
    except BaseException as error:
        for fd in owned:
            os.close(fd)
        if isinstance(error, OSError):
            raise internal_error(os_error_text(error)) from None
        raise
    finally:
        actions.destroy()
        for fd in handed:
            os.close(fd)


def _check_text(spec: SpawnSpec) -> None:
    if not spec.argv[0]:
        raise internal_error(f"missing program for {'PTY' if spec.tty else 'pipe'} spawn")
    if any("\0" in word for word in (*spec.argv, spec.arg0 or "")):
        raise internal_error("nul byte found in provided data")
    if any("\0" in name or "\0" in value for name, value in spec.env.items()):
        raise internal_error(
            "nul byte found in provided data" if spec.tty else "data provided contains a nul byte"
        )


def _spawn_on_pipes(
    spec: SpawnSpec, launch: Launch | None, owned: list[int], handed: list[int], actions: _Actions
) -> Spawned:
    stdin: int | None = None
    if spec.pipe_stdin:
        theirs, stdin = _pipe()
        handed.append(theirs)
        owned.append(stdin)
        actions.duplicate(theirs, 0)
    else:
        actions.open(0, "/dev/null", os.O_RDONLY)
    outputs: list[tuple[str, int]] = []
    for target, name in ((1, "stdout"), (2, "stderr")):
        ours, theirs = _pipe()
        owned.append(ours)
        handed.append(theirs)
        outputs.append((name, ours))
        actions.duplicate(theirs, target)
    for fd in owned:
        os.set_blocking(fd, False)
    pid = _start(spec, launch, actions, None)
    return Spawned(pid, _watchable(pid), stdin, outputs)


def _spawn_on_terminal(
    spec: SpawnSpec, launch: Launch | None, owned: list[int], handed: list[int], actions: _Actions
) -> Spawned:
    master, slave = os.openpty()
    owned.append(master)
    handed.append(slave)
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", spec.rows, spec.cols, 0, 0))
    os.set_blocking(master, False)
    # The first terminal a session leader opens becomes its controlling terminal.
    terminal = os.ttyname(slave)
    actions.open(0, terminal, os.O_RDWR)
    actions.duplicate(0, 1)
    actions.duplicate(0, 2)
    pid = _start(spec, launch, actions, terminal)
    return Spawned(pid, _watchable(pid), master, [("pty", master)])


def _check_directory(spec: SpawnSpec) -> None:
    if not os.path.isdir(spec.cwd):
        code = errno.ENOTDIR if os.path.exists(spec.cwd) else errno.ENOENT
        raise OSError(code, os.strerror(code))


def _start(spec: SpawnSpec, launch: Launch | None, actions: _Actions, terminal: str | None) -> int:
    _check_directory(spec)
    actions.change_directory(spec.cwd)
    attributes = _Buffer()
    _libc.posix_spawnattr_init(attributes)
    _libc.posix_spawnattr_setflags(attributes, ctypes.c_short(_SETSIGDEF | _SETSIGMASK | _SETSID))
    _libc.posix_spawnattr_setsigdefault(attributes, _ALL_SIGNALS)
    _libc.posix_spawnattr_setsigmask(attributes, _NO_SIGNALS)
    try:
        with tagged(spec.tag):
            if launch is None:
                return _execute(spec, actions, attributes)
            return _execute_prepared(spec, launch, actions, attributes, terminal)
    finally:
        _libc.posix_spawnattr_destroy(attributes)


def _execute(spec: SpawnSpec, actions: _Actions, attributes: Any) -> int:
    argv = _string_array([spec.argv[0] if spec.arg0 is None else spec.arg0, *spec.argv[1:]])
    env = _string_array([f"{name}={value}" for name, value in spec.env.items()])
    return _try_candidates(spec, actions, attributes, argv, env)


def _execute_prepared(
    spec: SpawnSpec, launch: Launch, actions: _Actions, attributes: Any, terminal: str | None
) -> int:
    for fd in launch.inherited:
        actions.duplicate(fd, fd)  # onto itself: it is no longer closed on exec
    try:
        if launch.confine is None:
            return _execute(spec, actions, attributes)
        return launch.confine(terminal, lambda: _execute(spec, actions, attributes))
    except (OSError, RpcError) as error:
        words = error.message if isinstance(error, RpcError) else os_error_text(error)
        said = f"exec-server: cannot run {spec.argv[0]}: {words}"
        code = NOT_ALLOWED_EXIT if isinstance(error, PermissionError) else NOT_FOUND_EXIT
        shell = ["/bin/sh", "-c", _SAY_AND_EXIT, "sh", said, str(code)]
        return _execute(replace(spec, argv=shell, arg0=None, env={}), actions, attributes)


def _try_candidates(spec: SpawnSpec, actions: _Actions, attributes: Any, argv: Any, env: Any) -> int:
    """Like execvp: go on past what is missing, remember what was there but not allowed."""
    pid = ctypes.c_int()
    failure = errno.ENOENT
    searched = "/" not in spec.argv[0]
    for path in _candidates(spec):
        code = _libc.posix_spawn(ctypes.byref(pid), _encoded(path), actions.buffer, attributes, argv, env)
        if code == 0:
            return pid.value
        if code == errno.EACCES:
            failure = code
        elif not searched or code not in (errno.ENOENT, errno.ENOTDIR):
            raise OSError(code, os.strerror(code))
    if failure == errno.ENOENT and searched:
        if spec.tty:
            raise _no_candidate(spec)
        if len(_encoded(spec.argv[0])) > NAME_MAX:
            failure = errno.ENAMETOOLONG
    raise OSError(failure, os.strerror(failure))


def _candidates(spec: SpawnSpec) -> Iterator[str]:
    name = spec.argv[0]
    if "/" in name:
        yield name
        return
    path = spec.env.get("PATH", DEFAULT_PATH)
    for directory in path.split(":") if path else ():
        candidate = f"{directory}/{name}" if directory else name
        if os.path.exists(os.path.join(spec.cwd, candidate)):
            yield candidate


def _no_candidate(spec: SpawnSpec) -> RpcError:
    path = spec.env.get("PATH")
    why = "Unable to resolve the PATH" if path is None else f'No viable candidates found in PATH "{path}"'
    return internal_error(f"Unable to spawn {spec.argv[0]} because:\n{why}")


class _Actions:
    """What the child does between being made and becoming the program."""

    def __init__(self) -> None:
        self.buffer = _Buffer()
        _check(_libc.posix_spawn_file_actions_init(self.buffer))

    def duplicate(self, source: int, target: int) -> None:
        _check(_libc.posix_spawn_file_actions_adddup2(self.buffer, source, target))

    def open(self, target: int, path: str, flags: int) -> None:
        _check(_libc.posix_spawn_file_actions_addopen(self.buffer, target, _encoded(path), flags, 0))

    def change_directory(self, path: str) -> None:
        _check(_libc.posix_spawn_file_actions_addchdir_np(self.buffer, _encoded(path)))

    def destroy(self) -> None:
        _libc.posix_spawn_file_actions_destroy(self.buffer)


def _check(code: int) -> None:
    if code:
        raise OSError(code, os.strerror(code))


def _string_array(words: list[str]) -> Any:
    return (ctypes.c_char_p * (len(words) + 1))(*map(_encoded, words), None)


def _pipe() -> tuple[int, int]:
    """A pipe whose ends are above the standard descriptors, even if those were closed."""
    read, write = os.pipe()
    return _above_standard(read), _above_standard(write)


def _above_standard(fd: int) -> int:
    if fd > 2:
        return fd
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(fd)
    return moved


def _watchable(pid: int) -> int | None:
    """A descriptor that tells when the child is gone; a child that cannot be watched is not kept."""
    descriptors.restore_in_child(pid)
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
