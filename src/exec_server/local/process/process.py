"""One child process: its life as a table, its output pumped into a log, its tree killed when asked.

    STARTING -> RUNNING -> EXITED -> CLOSED
        |           (FAILED: it never ran)
        +-------> FAILED

EXITED means the child has been reaped; CLOSED that its output has ended as well. Background children
may keep the streams open, and talk, between the two. Everything here happens on the loop's thread;
only the spawn itself and the search for a tree's members run in worker threads.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import os
import signal
import struct
import termios
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol, cast

from ...limits import MAX_OUTPUT_CHUNK_BYTES, Limits
from ...loop import Loop, Pending, Timer, resolved
from ...wire.process import StreamName, WriteStatus
from . import tree
from .output_log import OutputLog
from .stdin import Stdin

if TYPE_CHECKING:
    from ..worker import Worker
    from .killer import Killer
    from .spawn import Spawned, SpawnSpec

__all__ = ["ExitWatcher", "Listener", "ManagedProcess", "State"]

READS_PER_WAKE: Final = 8
"""Chunks read from one stream before others get their turn."""

TERMINAL_READ_BYTES: Final = 4096
"""What the kernel hands out of a terminal at once; several are joined into one chunk."""

DRAIN_BYTES: Final = 1024 * 1024
"""Read at most this much more when the child has exited: what a pipe can hold."""

PIPE_BYTES: Final = 1024 * 1024
"""Size asked for a pipe that carries heavy output: fewer wake-ups."""

F_SETPIPE_SZ: Final = getattr(fcntl, "F_SETPIPE_SZ", 1031)

TERMINAL_DELAY: Final = 0.05
"""Seconds between looks at a terminal that the child has let go of."""

TRACED_EXIT_DELAY: Final = 0.02
"""Seconds between looks at a dead child that its debugger has not let go of."""

INSIDE_DELAY: Final = 0.002
"""Seconds between looks for a command whose sandbox is still being put together."""

UNACKNOWLEDGED: Final = "unacknowledged"
"""Output is held because what is kept for a client that has not received it is full."""

SILENCE_SECONDS: Final = 120.0
"""How long a process waits for a client that is there and acknowledges nothing: it may have forgotten the
process. Clients acknowledge every few MiB, which a slow line needs some time for."""

UNKNOWN_EXIT: Final = -1
"""The exit code when the kernel could not be asked for the real one."""


class State(enum.Enum):
    STARTING = "starting"
    RUNNING = "running"
    EXITED = "exited"
    CLOSED = "closed"
    FAILED = "failed"


TRANSITIONS: Final = {
    State.STARTING: frozenset({State.RUNNING, State.FAILED}),
    State.RUNNING: frozenset({State.EXITED}),
    State.EXITED: frozenset({State.CLOSED}),
    State.CLOSED: frozenset[State](),
    State.FAILED: frozenset[State](),
}
"""Every change of state there is."""


class Listener(Protocol):
    """Whoever wants to know, at once and on the loop's thread."""

    def process_started(self, process: ManagedProcess) -> None: ...
    def process_output(self, process: ManagedProcess, seq: int, stream: StreamName, data: bytes) -> None: ...
    def process_exited(self, process: ManagedProcess, seq: int) -> None: ...
    def process_closed(self, process: ManagedProcess, seq: int) -> None: ...


class _Stream:
    """One descriptor a child writes to."""

    __slots__ = ("enlarged", "fd", "name", "process", "reading", "terminal")

    def __init__(self, process: ManagedProcess, name: StreamName, fd: int) -> None:
        self.process = process
        self.name: StreamName = name
        self.fd = fd
        self.terminal = name == "pty"
        self.enlarged = False
        self.reading = False

    def pump(self) -> None:
        """Take what is there, up to a few chunks."""
        process = self.process
        for _ in range(READS_PER_WAKE):
            data, more = self._read_terminal() if self.terminal else self._read_pipe()
            if data:
                process.take_output(self.name, data)
            elif data is not None:
                process.stream_ended(self)
                return
            if not more or not self.reading:
                return

    def drain(self) -> bool:
        """Take what is there now; whether the stream has ended."""
        left = DRAIN_BYTES
        while left > 0:
            data, more = self._read_terminal() if self.terminal else self._read_pipe()
            if data:
                self.process.take_output(self.name, data)
                left -= len(data)
            elif data is not None:
                return True
            if not more:
                return False
        return False

    def _read_pipe(self) -> tuple[bytes | None, bool]:
        """What could be read (None: nothing yet, empty: the end), and whether more may be there."""
        try:
            data = os.read(self.fd, MAX_OUTPUT_CHUNK_BYTES)
        except BlockingIOError:
            return None, False
        except OSError:
            return b"", False
        if len(data) == MAX_OUTPUT_CHUNK_BYTES and not self.enlarged:
            self._enlarge()
        return data, True

    def _enlarge(self) -> None:
        """The pipe was full: give it more room, so that child and server wait for each other less."""
        self.enlarged = True
        try:
            fcntl.fcntl(self.fd, F_SETPIPE_SZ, PIPE_BYTES)
        except OSError:
            pass  # the account's share of pipe memory is used up; a small pipe works too

    def _read_terminal(self) -> tuple[bytes | None, bool]:
        parts: list[bytes] = []
        size = 0
        while size <= MAX_OUTPUT_CHUNK_BYTES - TERMINAL_READ_BYTES:
            try:
                part = os.read(self.fd, TERMINAL_READ_BYTES)
            except BlockingIOError:
                return (b"".join(parts), False) if parts else (None, False)
            except OSError:  # EIO: the last one who had the terminal open is gone
                part = b""
            if not part:
                return b"".join(parts), True  # the end is found again by the next read
            parts.append(part)
            size += len(part)
        return b"".join(parts), True


class ManagedProcess:
    """A child from before it exists until nobody may ask about it any more."""

    def __init__(
        self,
        loop: Loop,
        process_id: str,
        spec: SpawnSpec,
        limits: Limits,
        listener: Listener,
        killer: Killer,
        watcher: ExitWatcher,
        sandboxer: Worker,
    ) -> None:
        self.id = process_id
        self.spec = spec
        self.state = State.STARTING
        self.started: Pending[None] = Pending()
        self.started_at = time.time()
        self.log = OutputLog(
            limits.retained_output,
            limits.retained_chunks,
            limits.retained_head,
            limits.unacknowledged_output,
        )
        self.pid: int | None = None
        self.sandbox_denied = False
        """By the reference's rule, which takes the word for the deed; see local/sandbox/denial.py."""
        self._surely_denied = False
        self.failure: str | None = None
        self.terminated = False
        self._loop = loop
        self._limits = limits
        self._listener = listener
        self._killer = killer
        self._watcher = watcher
        self._sandboxer = sandboxer
        self._inside = False
        self._release: Callable[[int | None], None] | None = None
        self._ending = False
        self._streams: list[_Stream] = []
        self._stdin: Stdin | None = None
        self._pidfd: int | None = None
        self._holds: set[str] = set()
        self._guarded = False
        self._receiver_is_there = True
        self._silence: Timer | None = None
        self._killing: Pending[int] | None = None
        self._exit_noticed = False
        self._force_timer: Timer | None = None
        self._force_at = float("inf")
        self._waiters: list[Pending[None]] = []

    # Life ----------------------------------------------------------------------------------------

    def _become(self, state: State) -> None:
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"process {self.id!r} cannot go from {self.state.value} to {state.value}")
        self.state = state

    def run(self, spawned: Spawned) -> None:
        """The child exists: watch it."""
        self._become(State.RUNNING)
        self.pid = spawned.pid
        self._pidfd = spawned.pidfd
        self._inside = spawned.inside
        self._release = spawned.release
        self._streams = [_Stream(self, cast("StreamName", name), fd) for name, fd in spawned.outputs]
        if spawned.stdin is not None:
            self._stdin = Stdin(self._loop, spawned.stdin, terminal=self.spec.tty, limits=self._limits)
        self._listener.process_started(self)
        self._read_streams()
        self._watcher.watch(self)
        self.started.resolve(None)

    def fail_to_start(self, error: BaseException) -> None:
        """The child never was."""
        self._become(State.FAILED)
        self.started.fail(error)

    @property
    def live(self) -> bool:
        """Starting or running: what a limit on processes counts."""
        return self.state in (State.STARTING, State.RUNNING)

    @property
    def pidfd(self) -> int | None:
        return self._pidfd

    def wait(self, until: State) -> Pending[None]:
        """Settles when the process has exited, or closed."""
        pending: Pending[None] = Pending()
        self._wait_for(pending, until)
        return pending

    def _wait_for(self, pending: Pending[None], until: State) -> None:
        if self.log.closed or (until is State.EXITED and self.log.exited):
            pending.resolve(None)
        else:
            self.changed().then(lambda _: self._wait_for(pending, until))

    def changed(self) -> Pending[None]:
        """Settles at the next output, exit or close."""
        pending: Pending[None] = Pending()
        pending.on_cancel = lambda: self._waiters.remove(pending) if pending in self._waiters else None
        self._waiters.append(pending)
        return pending

    def _wake_waiters(self) -> None:
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                waiter.resolve(None)

    # Output --------------------------------------------------------------------------------------

    def hold_output(self, reason: str) -> None:
        """Leave output in the pipes, where it makes the child wait, until the reason is gone."""
        self._holds.add(reason)
        for stream in self._streams:
            self._stop_reading(stream)

    def release_output(self, reason: str) -> None:
        """Go on reading, unless there is another reason not to."""
        self._holds.discard(reason)
        self._read_streams()

    def guard_output(self, *, attached: bool) -> None:
        """Rather wait than lose output that was not acknowledged, while its receiver is away or slow."""
        self._guarded = True
        self._receiver_is_there = attached
        self._wait_for_acknowledgement()

    def unguard_output(self) -> None:
        """There is nobody to wait for."""
        self._guarded = False
        self._wait_for_acknowledgement()

    def output_acknowledged(self) -> None:
        """Some of it was received."""
        if UNACKNOWLEDGED in self._holds:
            self._wait_for_acknowledgement()

    def _wait_for_acknowledgement(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None
        if not self._guarded or not self.log.full:
            self.release_output(UNACKNOWLEDGED)
            return
        self.hold_output(UNACKNOWLEDGED)
        if self._receiver_is_there:
            self._silence = self._loop.call_later(SILENCE_SECONDS, self.unguard_output)

    def take_output(self, stream: StreamName, data: bytes) -> None:
        """Number a chunk, keep it, tell."""
        seq = self.log.append(stream, data)
        if self._guarded and self.log.full and UNACKNOWLEDGED not in self._holds:
            self._wait_for_acknowledgement()
        self._listener.process_output(self, seq, stream, data)
        if self._waiters:
            self._wake_waiters()

    def stream_ended(self, stream: _Stream) -> None:
        """EOF on one of the streams."""
        if stream.terminal and self.state is State.RUNNING:
            # Closing our end would hang up on a child that only let go of its terminal, as many do on
            # their way out. It may also come back to it, which nobody tells us.
            self._stop_reading(stream)
            self._loop.call_later(TERMINAL_DELAY, self._read_streams)
            return
        self._close_stream(stream)
        self._close_if_done()

    def _read_streams(self) -> None:
        if self._holds:
            return
        for stream in self._streams:
            if not stream.reading:
                stream.reading = True
                self._loop.add_reader(stream.fd, stream.pump)

    def _stop_reading(self, stream: _Stream) -> None:
        if stream.reading:
            stream.reading = False
            self._loop.remove_reader(stream.fd)

    def _close_stream(self, stream: _Stream) -> None:
        self._stop_reading(stream)
        self._streams.remove(stream)
        if stream.terminal and self._stdin is not None:
            self._stdin.discard()
        os.close(stream.fd)

    # Exit ----------------------------------------------------------------------------------------

    def exit_noticed(self) -> None:
        """The child is dead but not reaped: its pid and its group are still ours to kill."""
        self._exit_noticed = True
        if self._killing is None:
            self._end()

    def _end(self) -> None:
        """Clear up after a sandbox before anybody hears of the end; then reap."""
        if self._ending:
            return
        self._ending = True
        if self._release is None:
            self._reap()
        else:
            self._sandboxer.run(self._release, self._pidfd).then(lambda _: self._reap())

    def _reap(self) -> None:
        code = self._watcher.reap(self)
        self._pidfd = None
        if code is None:
            code = UNKNOWN_EXIT
            self.failure = "the exit status of the process was taken by somebody else"
        if self._force_timer is not None:
            self._force_timer.cancel()
            self.kill_tree()  # it went when it was asked to; what it left behind was not asked
        if not self._holds or self.terminated:
            # What it said before it died belongs before the news of its death.
            for stream in list(self._streams):
                if stream.drain() or self.terminated:
                    self._close_stream(stream)
        if self.spec.sandboxed and code:
            self._look_for_denial(code)
        self._become(State.EXITED)
        seq = self.log.exit(code)
        self._listener.process_exited(self, seq)
        self._wake_waiters()
        self._close_if_done()

    def _look_for_denial(self, code: int) -> None:
        from ..sandbox import denial

        streams = [self.log.joined(name) for name in ("stdout", "stderr", "pty")]
        together = b"".join(chunk.data for chunk in self.log.read(0, None)[0])
        self.sandbox_denied = denial.reported(code, [*streams, together])
        self._surely_denied = denial.found(code, streams)

    def denied(self, surely: bool) -> bool:
        """Whether the sandbox kept something from it: by the reference's rule, or surely, by ours."""
        return self._surely_denied if surely else self.sandbox_denied

    def _close_if_done(self) -> None:
        if self.state is State.EXITED and not self._streams:
            if self._stdin is not None:
                self._stdin.discard()
            self._become(State.CLOSED)
            seq = self.log.close()
            self._listener.process_closed(self, seq)
            self._wake_waiters()

    def abandon(self) -> None:
        """The owner is gone: let go of every descriptor without a word. The tree is killed elsewhere."""
        if self._silence is not None:
            self._silence.cancel()
        for stream in list(self._streams):
            self._close_stream(stream)
        if self._stdin is not None:
            self._stdin.discard()

    # Input ---------------------------------------------------------------------------------------

    def write(self, data: bytes, write_id: str | None) -> Pending[WriteStatus]:
        """Queue bytes for the child's stdin."""
        stdin = self._stdin
        if stdin is None:
            return resolved("stdinClosed")
        earlier = None if write_id is None else stdin.earlier(write_id)
        if earlier is not None:
            return earlier
        if stdin.broken:
            raise BrokenPipeError("failed to write to process stdin")
        if stdin.close_requested:
            return resolved("stdinClosed")
        return stdin.write(data, write_id)

    def close_stdin(self) -> WriteStatus:
        """Deliver EOF after what was accepted."""
        stdin = self._stdin
        if stdin is None or stdin.close_requested or self.state is not State.RUNNING:
            return "stdinClosed"
        stdin.request_close()
        return "accepted"

    def resize(self, rows: int, cols: int) -> None:
        """Change the terminal's size; its foreground group hears of it."""
        for stream in self._streams:
            if stream.terminal:
                fcntl.ioctl(stream.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))
                if self._inside:  # where it is nobody's controlling terminal
                    self.signal(signal.SIGWINCH)

    # Signals -------------------------------------------------------------------------------------

    def signal(self, number: int) -> None:
        """Signal the child's process group. Nothing happens to a child that has exited."""
        if self._inside and number != signal.SIGKILL:
            self._signal_inside(number)
        elif self.state is State.RUNNING and self.pid is not None:
            try:
                # Not reaped yet, so the number cannot have been given to somebody else.
                os.killpg(self.pid, number)
            except ProcessLookupError:
                pass
            except PermissionError:
                if not self._exit_noticed and not self._is_dead():
                    raise

    def _signal_inside(self, number: int) -> None:
        """Signal the group of a command in a namespace of its own: our child is only its keeper.

        The keeper's child is the first process in there and leads the group; it is deaf to all that does
        not kill, and until it has a child itself there is nobody to hear.
        """
        if self.state is not State.RUNNING or self._exit_noticed or self.pid is None:
            return
        if not tree.knows_children():
            os.killpg(self.pid, number)  # the keeper, and with it everybody: better than nobody
            return
        group = tree.first_child(self.pid)
        if group is None or tree.first_child(group) is None:
            self._loop.call_later(INSIDE_DELAY, self._signal_inside, number)
            return
        try:
            os.killpg(group, number)
        except ProcessLookupError:
            pass

    def _is_dead(self) -> bool:
        """Some systems answer EPERM for a group of zombies."""
        try:
            os.kill(cast("int", self.pid), 0)
        except OSError as error:
            return error.errno == errno.ESRCH
        return False

    def terminate(self) -> Pending[int]:
        """Kill the whole tree now; how many processes were killed."""
        if self.state is not State.RUNNING:
            return resolved(0)
        if self._killing is not None:
            return self._killing
        self.terminated = True
        if self._stdin is not None:
            self._stdin.break_off()
        killing: Pending[int] = Pending()
        self._killing = killing
        tag = self.spec.tag
        if tag is None:
            self.signal(signal.SIGKILL)
            self._killed(killing, 1)
        else:
            self._killer.kill(tag.__eq__).then(lambda done: self._kill_done(killing, done))
        return killing

    def kill_tree(self) -> Pending[int]:
        """Kill whatever still carries this process's tag; how many there were."""
        tag = self.spec.tag
        if tag is None:
            return resolved(0)
        return self._killer.kill(tag.__eq__)

    def ask_to_end(self) -> None:
        """SIGTERM, and whoever is stopped goes on so that it can obey."""
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)

    def terminate_gracefully(self, grace: float) -> None:
        """Ask first, and kill when the time is over. Asking again can only shorten it."""
        if self.state is not State.RUNNING or self.terminated:
            return
        deadline = self._loop.time() + grace
        if self._force_timer is None:
            self.ask_to_end()
        elif deadline >= self._force_at:
            return
        else:
            self._force_timer.cancel()
        self._force_at = deadline
        self._force_timer = self._loop.call_later(grace, self.terminate)

    def _kill_done(self, killing: Pending[int], done: Pending[int]) -> None:
        # Whoever shed the tag but stayed in the group.
        self.signal(signal.SIGKILL)
        try:
            outcome: int | OSError = max(done.result(), 1)
        except OSError as error:
            outcome = error
        self._killed(killing, outcome)

    def _killed(self, killing: Pending[int], outcome: int | OSError) -> None:
        self._killing = None
        if isinstance(outcome, OSError):
            killing.fail(outcome)
        else:
            killing.resolve(outcome)
        if self._exit_noticed and self.state is State.RUNNING:
            self._end()


class ExitWatcher:
    """Tells processes that their child is dead, and reaps it when they are ready."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._statuses: dict[int, int | None] = {}

    def watch(self, process: ManagedProcess) -> None:
        if process.pidfd is not None:
            self._loop.add_reader(process.pidfd, self._readable, process, process.pidfd)
        else:
            self._watch_in_thread(process)

    def reap(self, process: ManagedProcess) -> int | None:
        """The exit code, 128 + N for a death by signal N, or None if nobody knows."""
        pid = cast("int", process.pid)
        if process.pidfd is None:
            return self._statuses.pop(pid, None)
        try:
            status = os.waitid(os.P_PIDFD, process.pidfd, os.WEXITED)
        except ChildProcessError:
            status = None
        os.close(process.pidfd)
        if status is None:
            return None
        return status.si_status if status.si_code == os.CLD_EXITED else 128 + status.si_status

    def _readable(self, process: ManagedProcess, pidfd: int) -> None:
        self._loop.remove_reader(pidfd)
        self._notice(process, pidfd)

    def _notice(self, process: ManagedProcess, pidfd: int) -> None:
        try:
            dead = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except BlockingIOError:
            dead = False
        except ChildProcessError:
            dead = True  # somebody else has reaped it
        if dead:
            process.exit_noticed()
        else:
            # A debugger is told first; its parent has to wait until it has heard.
            self._loop.call_later(TRACED_EXIT_DELAY, self._notice, process, pidfd)

    def _watch_in_thread(self, process: ManagedProcess) -> None:
        """Where there are no pidfds."""
        from threading import Thread

        Thread(target=self._wait_in_thread, args=(process,), daemon=True).start()

    def _wait_in_thread(self, process: ManagedProcess) -> None:
        pid = cast("int", process.pid)
        code: int | None
        try:
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            code = status if status >= 0 else 128 - status
        except ChildProcessError:
            code = None
        self._statuses[pid] = code
        self._loop.call_soon_threadsafe(process.exit_noticed)
