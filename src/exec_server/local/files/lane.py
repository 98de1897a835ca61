"""In which order the file calls of one connection take effect, and who waits for whom.

The rule: a call takes effect before every call that arrived after it and that could tell the
difference. Calls that could not tell are free to overtake.

How it is kept:

1. A connection has one lane. Calls run in it one after the other, in a thread of the pool, in the
   order in which they arrived. Nearly every call is short, and its whole life is this.
2. A call that will take long (a large transfer, a tree, a device) leaves the lane as soon as it is
   clear what it touches. So does, without being asked, one that has kept others waiting for longer
   than PATIENCE: a dead network mount stops the calls that need it and no others.
3. While a call is aside, each next one of the lane is compared with it: when both touch the same path,
   or one a directory above the other's path, and at least one of them writes, the later call steps
   aside too and runs when the earlier one is done. All others go on.

Paths are compared as they were written and as they are with every link resolved, so a file cannot be
read early by another of its names. What is not seen: two hard links to one file, and a link that
leads into a mount which is stuck before anything could be resolved.

4. What costs more than a thread (memory for an answer, a process that searches) is asked for at a gate.
   Where that is full, the call gives its thread back, waits aside, and begins again when there is room.

Reading a large file does not hold up a later write of it longer than the call itself: the write waits
aside. Order holds within a connection and among file calls; between connections, and between files and
processes, a client that needs an order waits for the answer.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from threading import Lock
from time import monotonic
from typing import Any, Final, NamedTuple, TypeVar

from ...loop import Loop, Pending, Timer
from .errors import failure
from .pool import POOL, Pool

__all__ = [
    "ALONE",
    "ANSWERS",
    "SEARCHES",
    "Abandoned",
    "Gate",
    "Lane",
    "Touch",
    "Turn",
    "reads",
    "writes",
]

T = TypeVar("T")

PATIENCE: Final = 0.02
"""Seconds a call may keep the lane while others wait. Ten times what a cold disk needs for one."""

MAX_ASIDE: Final = 16
"""Threads one connection may occupy beside its lane, a quarter of the pool's."""


ANSWERS: Final = "answers"
"""The gate at which reads ask for the memory of their answers."""

SEARCHES: Final = "searches"
"""The gate at which searches ask for a process."""


class Touch(NamedTuple):
    """A path and all below it, and whether it may be changed."""

    path: bytes
    writes: bool


def reads(*paths: bytes) -> tuple[Touch, ...]:
    """Looked at."""
    return tuple([Touch(path, False) for path in paths])


def writes(*paths: bytes) -> tuple[Touch, ...]:
    """Perhaps changed."""
    return tuple([Touch(path, True) for path in paths])


class Abandoned(Exception):
    """Nobody waits for the answer any more."""


class _Full(Exception):
    """Begin again when there is room."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.gate = gate


class Gate:
    """How much of something the calls of one connection may use at once. One alone is always let in.

    With `room`, what a call uses counts until its answer has been sent: `room` says what to wait for.
    """

    def __init__(self, most: int, room: Callable[[], Pending[None] | None] | None = None) -> None:
        self.most = most
        self.room = room
        self.used = 0
        self.waiting: deque[_Job] = deque()

    def lets_in(self, weight: int) -> bool:
        """Whether there is room, and nobody came earlier."""
        return not self.waiting and self.has_room(weight)

    def has_room(self, weight: int) -> bool:
        return not self.used or self.used + weight <= self.most


class Turn:
    """What a call knows of its place: how to leave the lane, and whether anybody still waits."""

    def leave(self, *real_paths: bytes | None) -> None:
        """Let others pass; the first call counts.

        `real_paths` are what is touched with every link resolved, where that is known.
        """

    def admit(self, gate: str, weight: int) -> None:
        """Ask for this much at a gate, once. Where it is full this raises, and all is done again later: call
        it after `leave`, and before anything was changed."""

    def check(self) -> None:
        """Raise Abandoned when the answer is no longer wanted. For loops that may be long."""


ALONE: Final = Turn()
"""For calls that are made outside of any lane."""


class _Job(Turn):
    __slots__ = (
        "abandoned",
        "args",
        "aside",
        "blockers",
        "followers",
        "gate",
        "lane",
        "left",
        "number",
        "parked",
        "pending",
        "started",
        "to_resolve",
        "touches",
        "weight",
        "work",
    )

    def __init__(
        self,
        lane: Lane,
        number: int,
        touches: tuple[Touch, ...],
        work: Callable[..., Any],
        args: tuple[Any, ...],
    ) -> None:
        self.lane = lane
        self.number = number
        self.touches = touches
        self.work = work
        self.args = args
        self.pending: Pending[Any] = Pending(self.abandon)
        self.started = 0.0
        self.abandoned = False
        self.left = False
        self.aside = False
        self.parked = False
        self.to_resolve = False
        """Whether its real paths have not been looked for yet: nobody has had to be compared with it."""
        self.blockers: set[_Job] = set()
        self.followers: list[_Job] = []
        self.gate: Gate | None = None
        """Where it was let in."""
        self.weight = 0

    def admit(self, gate: str, weight: int) -> None:
        there = self.lane.gates.get(gate)
        if there is not None and self.gate is None:
            self.weight = weight
            with self.lane._lock:
                if not there.lets_in(weight):
                    raise _Full(there)
                there.used += weight
                self.gate = there

    def abandon(self) -> None:
        self.abandoned = True

    def check(self) -> None:
        if self.abandoned:
            raise Abandoned

    def leave(self, *real_paths: bytes | None) -> None:
        if self.left:
            return
        self.left = True
        known = [touch.path for touch in self.touches]
        more = [path for path in real_paths if path is not None and path not in known]
        self.touches += writes(*more) if self.changes else reads(*more)
        self.lane._leave(self)

    def resolve(self) -> None:
        """Add the real paths of what is touched. May block."""
        known = {touch.path for touch in self.touches}
        for touch in self.touches:
            named = touch.path.startswith(b"/")
            real = os.path.realpath(touch.path) if named else self.lane.where(touch.path)
            if real is not None and real not in known:
                known.add(real)
                self.touches += (Touch(real, touch.writes),)

    @property
    def changes(self) -> bool:
        return any(touch.writes for touch in self.touches)


def _conflict(one: _Job, other: _Job) -> bool:
    return any(
        (mine.writes or theirs.writes) and _related(mine.path, theirs.path)
        for mine in one.touches
        for theirs in other.touches
    )


def _related(one: bytes, other: bytes) -> bool:
    """Whether they are the same, or one is above the other."""
    if len(one) > len(other):
        one, other = other, one
    return other.startswith(one) and (len(one) == len(other) or one == b"/" or other[len(one)] == 0x2F)


class Lane:
    """The file calls of one connection."""

    def __init__(
        self,
        loop: Loop,
        pool: Pool = POOL,
        where: Callable[[bytes], bytes | None] = lambda _: None,
        gates: Mapping[str, Gate] | None = None,
    ) -> None:
        self._loop = loop
        self.gates = gates or {}
        self.where = where
        """The real path of something that calls touch under another name than a path."""
        self._pool = pool
        self._lock = Lock()
        self._queue: deque[_Job] = deque()
        self._current: _Job | None = None
        self._draining = False
        self._aside: set[_Job] = set()
        self._running_aside = 0
        self._jobs = 0
        self._timer: Timer | None = None
        self._settled: deque[tuple[Callable[[Any], None], Any, _Job]] = deque()
        self._waking = False

    # On the loop ---------------------------------------------------------------------------------

    def submit(self, touches: tuple[Touch, ...], work: Callable[..., T], *args: Any) -> Pending[T]:
        """Do `work(*args, turn)` in its turn."""
        self._jobs += 1
        job = _Job(self, self._jobs, touches, work, args)
        with self._lock:
            self._queue.append(job)
            start = not self._draining
            self._draining = True
        if start:
            self._pool.run(self._drain)
        elif self._timer is None:
            self._timer = self._loop.call_later(PATIENCE, self._look)
        return job.pending

    @property
    def free_for_reading(self) -> bool:
        """Whether a read that is done now comes after everything that must come before it."""
        if self._draining:
            return False
        return not self._aside or not any(job.changes for job in tuple(self._aside))

    def alongside(self, touches: tuple[Touch, ...]) -> _Job | None:
        """Begin a call that reads, now, without a thread of this lane; None if it has to wait for its turn.

        Whoever does it settles the job's `pending`, after `finish`.
        """
        if not self.free_for_reading:
            return None
        with self._lock:
            if self._running_aside >= MAX_ASIDE:
                return None
            self._jobs += 1
            job = _Job(self, self._jobs, touches, _nothing, ())
            job.left = job.aside = job.to_resolve = True
            self._running_aside += 1
            self._aside.add(job)
        return job

    def finish(self, job: _Job) -> None:
        """What was begun alongside is done: those that waited for it may run."""
        with self._lock:
            self._aside.discard(job)
            self._running_aside -= 1
            ready = self._release(job)
        for follower in ready:
            self._pool.run(self._run, follower)

    def close(self) -> None:
        """Forget what has not begun, and tell the rest that nobody waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        with self._lock:
            jobs = [*self._queue, *self._aside]
            if self._current is not None:
                jobs.append(self._current)
            self._queue.clear()
        for job in jobs:
            job.abandoned = True

    def _look(self) -> None:
        """Somebody waits: has the one in front had time enough?"""
        self._timer = None
        with self._lock:
            if not self._queue:
                return
            job = self._current
            if job is not None and monotonic() - job.started >= PATIENCE:
                self._set_aside(job)
        self._timer = self._loop.call_later(PATIENCE, self._look)

    def _deliver(self) -> None:
        self._waking = False
        settled = self._settled
        while settled:
            settle, outcome, job = settled.popleft()
            settle(outcome)
            if job.gate is not None and job.gate.room is not None:
                sent = job.gate.room()
                if sent is None:
                    self._go_out(job)
                else:
                    sent.then(partial(self._go_out, job))

    def _go_out(self, job: _Job, sent: Pending[None] | None = None) -> None:
        del sent
        with self._lock:
            ready = self._free(job)
        for waiting in ready:
            self._pool.run(self._run, waiting)

    # In the threads ------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Be the lane's thread, until there is nothing to do or somebody else has taken over."""
        while True:
            with self._lock:
                if not self._queue:
                    self._current = None
                    self._draining = False
                    return
                job = self._current = self._queue.popleft()
                job.started = monotonic()
                compare = bool(self._aside)
            if compare and self._must_wait(job):
                if job.aside:
                    return
                continue
            if self._run(job):
                return

    def _must_wait(self, job: _Job) -> bool:
        """Whether something aside comes first; if so the job is parked behind it."""
        job.resolve()
        for other in tuple(self._aside):
            if other.to_resolve:
                other.resolve()
                other.to_resolve = False
        with self._lock:
            # A job that was set aside while it resolved may itself be waited for by later ones.
            blockers = {other for other in self._aside if other.number < job.number and _conflict(job, other)}
            if not blockers:
                return False
            taken_over = job.aside
            job.blockers = blockers
            job.parked = True
            for blocker in blockers:
                blocker.followers.append(job)
            self._aside.add(job)
            if taken_over:
                self._running_aside -= 1
            else:
                self._current = None
            return True

    def _leave(self, job: _Job) -> None:
        with self._lock:
            if self._current is job:
                self._set_aside(job)

    def _set_aside(self, job: _Job) -> None:
        """With the lock held: let the queue go on without this one, if there is a thread to spare."""
        if self._running_aside >= MAX_ASIDE:
            return
        self._running_aside += 1
        job.aside = True
        self._aside.add(job)
        self._current = None
        if self._queue:
            self._pool.run(self._drain)
        else:
            self._draining = False

    def _run(self, job: _Job) -> bool:
        """Do it, and then what waited for it; whether this thread is no longer the lane's."""
        todo: _Job | None = job
        left = False
        while todo is not None:
            try:
                settle, outcome = _outcome(todo)
            except _Full as full:
                with self._lock:
                    if full.gate.lets_in(todo.weight):
                        continue  # somebody has left meanwhile
                    full.gate.waiting.append(todo)
                    left |= todo is job and todo.aside
                    self._park(todo)
                return left
            todo.args = ()
            ready: list[_Job] = []
            with self._lock:
                left |= todo is job and todo.aside
                if self._current is todo:
                    self._current = None
                if todo.aside:
                    self._aside.discard(todo)
                    self._running_aside -= 1
                ready = self._release(todo)
                if todo.gate is not None and todo.gate.room is None:
                    ready += self._free(todo)
                self._settled.append((settle, outcome, todo))
                wake = not self._waking
                self._waking = True
            del settle, outcome
            if wake:
                try:
                    self._loop.call_soon_threadsafe(self._deliver)
                except RuntimeError:
                    pass  # the loop is closed; nobody is waiting
            # The lane's own thread has the queue to go on with.
            mine = ready[:1] if left or todo is not job else []
            for follower in ready[len(mine) :]:
                self._pool.run(self._run, follower)
            todo = mine[0] if mine else None
        return left

    def _park(self, job: _Job) -> None:
        """With the lock held: it waits at a gate, without a thread."""
        if job.aside:
            self._running_aside -= 1
            job.aside = False
        else:
            self._aside.add(job)
        if self._current is job:
            self._current = None

    def _free(self, job: _Job) -> list[_Job]:
        """With the lock held: it needs nothing any more. Those who waited for that may run now."""
        gate, job.gate = job.gate, None
        ready: list[_Job] = []
        if gate is None:
            return ready
        gate.used -= job.weight
        while gate.waiting and gate.has_room(gate.waiting[0].weight):
            waiting = gate.waiting.popleft()
            waiting.gate = gate
            gate.used += waiting.weight
            waiting.aside = True
            self._running_aside += 1
            ready.append(waiting)
        return ready

    def _release(self, job: _Job) -> list[_Job]:
        """With the lock held: those that waited for this one alone may run now."""
        ready: list[_Job] = []
        for follower in job.followers:
            follower.blockers.discard(job)
            if not follower.blockers and follower.parked:
                follower.parked = False
                follower.aside = True
                self._running_aside += 1
                ready.append(follower)
        job.followers.clear()
        return ready


def _nothing() -> None:
    """What the lane itself does for a call alongside."""


def _outcome(job: _Job) -> tuple[Callable[[Any], None], Any]:
    if job.abandoned:
        return job.pending.fail, Abandoned()
    try:
        return job.pending.resolve, job.work(*job.args, job)
    except _Full:
        raise
    except OSError as error:
        return job.pending.fail, failure(error)
    except BaseException as error:
        return job.pending.fail, error
