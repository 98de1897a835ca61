"""Which sandbox this machine can give, found out by trying, once per process and in a worker thread.

In this order: bubblewrap, if it is there and a trial run succeeds; else Landlock, for the plans it can
express; else filters of system calls alone, for plans that restrict nothing but the network; else none.
The choice is made before anything is launched and never changes: a launch that fails is not tried again
with something weaker.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from _thread import allocate_lock
from typing import Final, Literal

from msgspec import Struct

from ..process import tree

__all__ = [
    "Backend",
    "BackendName",
    "Partition",
    "Trial",
    "backend",
    "find_program",
    "known",
    "partition",
    "probe",
    "try_partition",
    "try_run",
]

BackendName = Literal["bubblewrap", "landlock", "filter", "none"]

TRIAL_SECONDS: Final = 10.0
"""A run takes 10 ms; a machine that is busy for a while must not lose its sandbox for good."""

NEEDED_OPTIONS: Final = ("--perms", "--args", "--seccomp", "--cap-drop", "--die-with-parent")
"""What bubblewrap must know; `--perms` came last, with 0.5."""

_TRIAL_NAMESPACES: Final = ("--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-net")
_OUTPUT_BYTES: Final = 64 * 1024


class Backend(Struct, frozen=True, kw_only=True):
    """What was found, and in words why it is not better."""

    name: BackendName
    program: str | None = None
    """Where bubblewrap is."""
    version: str = ""
    """What bubblewrap calls itself."""
    proc: bool = True
    """Whether a fresh /proc can be mounted inside."""
    argv0: bool = False
    """Whether bubblewrap can give a command another name."""
    landlock_abi: int = 0
    filters: bool = False
    """Whether system calls can be filtered."""
    reasons: tuple[str, ...] = ()
    """Why what comes earlier in the order cannot be used, each with its cure."""


class Trial(Struct, frozen=True):
    """How a short program ended; `code` None if it could not be started or had to be killed."""

    code: int | None
    output: str


class Partition(Struct, frozen=True):
    """How a program is started in a mount namespace of its own, in which nothing appears that others
    mount; or in words why that cannot be had."""

    prefix: tuple[str, ...] = ()
    problem: str = ""


_lock = allocate_lock()
_found: Backend | None = None
_partition: Partition | None = None


def backend() -> Backend:
    """What this machine can do, looked at once. May take some time: not for the loop's thread."""
    global _found
    with _lock:
        if _found is None:
            _found = probe()
        return _found


def partition() -> Partition:
    """How to keep out what is mounted later, tried once; only where mounts spread it is needed."""
    global _partition
    program = backend().program
    with _lock:
        if _partition is None:
            _partition = try_partition(program or "")
        return _partition


def known() -> Backend | None:
    """What was found, if anybody has looked yet."""
    return _found


def probe() -> Backend:
    """Look now."""
    if sys.platform != "linux":
        return Backend(name="none", reasons=(f"there is no sandbox for {sys.platform} here, only for Linux",))
    from . import confine, landlock, seccomp

    reasons: list[str] = []
    try:
        unfiltered = confine.can_filter(seccomp.program("closed"))
    except seccomp.Unsupported as error:
        unfiltered = str(error)
    if unfiltered is not None:
        cure = "the kernel needs CONFIG_SECCOMP_FILTER"
        reasons.append(f"system calls cannot be filtered: {unfiltered}; {cure}")
        return Backend(name="none", reasons=tuple(reasons))
    abi = landlock.abi()
    found = _try_bubblewrap(reasons)
    if found is not None:
        program, version, proc, argv0 = found
        return Backend(
            name="bubblewrap",
            program=program,
            version=version,
            proc=proc,
            argv0=argv0,
            landlock_abi=abi,
            filters=True,
            reasons=tuple(reasons),
        )
    if abi >= landlock.MINIMUM_ABI:
        return Backend(name="landlock", landlock_abi=abi, filters=True, reasons=tuple(reasons))
    reasons.append(
        f"the kernel's Landlock is too old (version {abi}, needed {landlock.MINIMUM_ABI}: Linux 6.2)"
        if abi
        else "the kernel has no Landlock; it needs CONFIG_SECURITY_LANDLOCK and `landlock` in its lsm= list"
    )
    return Backend(name="filter", filters=True, reasons=tuple(reasons))


def _try_bubblewrap(reasons: list[str]) -> tuple[str, str, bool, bool] | None:
    """Path, version, whether /proc can be fresh, whether it knows --argv0; or a reason why not."""
    program = find_program("bwrap")
    if program is None:
        reasons.append("bubblewrap is not installed (no bwrap in PATH); install the package bubblewrap")
        return None
    help_text = try_run([program, "--help"]).output
    missing = [option for option in NEEDED_OPTIONS if option not in help_text]
    if missing:
        reasons.append(f"{program} does not know {', '.join(missing)}; bubblewrap 0.5 or later is needed")
        return None
    version = try_run([program, "--version"]).output.strip()
    trial = try_run(trial_run(program, proc=True))
    proc = trial.code == 0
    if not proc:
        without = try_run(trial_run(program, proc=False))
        if without.code != 0:
            reasons.append(f"{program} cannot make a sandbox: {_said(trial)}; `exec-server doctor` says more")
            return None
        reasons.append(f"no fresh /proc inside a sandbox ({_said(trial)}); the host's is visible, read-only")
    return program, version, proc, "--argv0" in help_text


def try_partition(program: str) -> Partition:
    """Try now, with the bubblewrap at a path."""
    unshare = find_program("unshare")
    if unshare is None:
        return Partition(problem="there is no unshare in PATH; install the package util-linux")
    words = [unshare, "--mount", "--propagation", "private"]
    if os.geteuid():
        words[1:1] = ["--user", "--map-current-user"]
    trial = try_run([*words, *trial_run(program, proc=False)])
    return Partition(tuple(words)) if trial.code == 0 else Partition(problem=f"{unshare}: {_said(trial)}")


def trial_run(program: str, *, proc: bool) -> list[str]:
    """The smallest sandbox that uses everything a real one does."""
    mounts = ["--ro-bind", "/", "/", "--dev", "/dev", "--tmpfs", "/tmp"]  # noqa: S108  # inside, and empty
    if proc:
        mounts += ["--proc", "/proc", "--ro-bind-try", "/proc/sys", "/proc/sys"]
    command = "/bin/true" if os.path.exists("/bin/true") else sys.executable
    rest = [] if command == "/bin/true" else ["-I", "-S", "-c", ""]
    return [program, *_TRIAL_NAMESPACES, *mounts, "--cap-drop", "ALL", "--", command, *rest]


def _said(trial: Trial) -> str:
    lines = trial.output.strip().splitlines()
    if lines:
        return lines[-1]
    return "it did not end in time" if trial.code is None else f"exit code {trial.code}"


def find_program(name: str) -> str | None:
    """In PATH, in absolute directories, and not below the working directory: that may be a project."""
    try:
        here = os.path.join(os.path.realpath(os.getcwd()), "")
    except OSError:
        here = "\0"  # the working directory is gone, and nothing is below it
    for directory in os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin").split(":"):
        if not directory.startswith("/"):
            continue
        path = os.path.realpath(os.path.join(directory, name))
        below_here = here != "/" and path.startswith(here)
        if not below_here and os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return None


def try_run(argv: list[str], seconds: float = TRIAL_SECONDS) -> Trial:
    """Run something short without an environment; both its outputs joined. Without `subprocess`, whose
    import would take longer than the run."""
    ours, theirs = os.pipe()
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, theirs, 1),
        (os.POSIX_SPAWN_DUP2, theirs, 2),
    ]
    try:
        with tree.tagged(None):  # not while a child of somebody's is being given its tag
            pid = os.posix_spawn(argv[0], argv, {}, file_actions=actions, setsid=True)
    except OSError as error:
        os.close(ours)
        return Trial(None, str(error))
    finally:
        os.close(theirs)
    output, in_time = _read(ours, time.monotonic() + seconds)
    os.close(ours)
    if not in_time:
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status) if in_time else None
    return Trial(code, output.decode("utf-8", "replace"))


def _read(fd: int, deadline: float) -> tuple[bytes, bool]:
    """Everything up to the end, or what came in time."""
    import select

    parts: list[bytes] = []
    poll = select.poll()
    poll.register(fd, select.POLLIN | select.POLLHUP)
    while (left := deadline - time.monotonic()) > 0:
        if poll.poll(left * 1000):
            part = os.read(fd, _OUTPUT_BYTES)
            if not part:
                return b"".join(parts), True
            parts.append(part)
    return b"".join(parts), False
