"""The processes of one owner: their ids, who may start another, how long they are remembered."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from ... import log
from ...loop import Pending, resolved
from ...wire.errors import invalid_request
from . import descriptors
from .machine import ProcessMachine
from .output_log import EVERYTHING
from .process import Listener, ManagedProcess, State
from .spawn import Spawned, SpawnSpec, spawn
from .tree import SessionTags

__all__ = ["BACK_PRESSURE", "ON_REQUEST", "ProcessTable"]

BACK_PRESSURE = "back-pressure"
"""Output is held because the connection cannot take more."""

ON_REQUEST = "request"
"""Output is held because the client asked for it."""


CERTAIN_SECONDS: Final = 5.0
"""Who is heard this long after a process has closed was told so: nothing stays on a line for longer."""


class ProcessTable:
    """Ids are the owner's; each stays taken until some time after its process has closed.

    That time does not run while the owner is away. Where nothing is `heard` of an owner that says what it has
    received, its connection may have broken, and nobody knows yet: for it, a closed process is kept for as
    long again as a session without a connection.
    """

    def __init__(self, machine: ProcessMachine, heard: Callable[[], float] = lambda: float("inf")) -> None:
        self._machine = machine
        self._heard = heard
        """When the owner was last heard, on the loop's clock."""
        self._away = False
        self._tags: SessionTags | None = None
        """Taken with the first process: who never starts one has nothing to look for at the end."""
        self._processes: dict[str, ManagedProcess] = {}
        self._closed = False
        self._holding = False
        self._acknowledging = False
        self._retained: deque[tuple[float, ManagedProcess]] = deque()
        self._retained_bytes = 0
        self._forgetting = False

    def __iter__(self) -> Iterator[ManagedProcess]:
        return iter(list(self._processes.values()))

    def get(self, process_id: str) -> ManagedProcess | None:
        return self._processes.get(process_id)

    def start(self, process_id: str, spec: SpawnSpec, listener: Listener) -> ManagedProcess:
        """Take the id and begin to start; `started` of what is returned settles when it runs or cannot."""
        machine = self._machine
        if process_id in self._processes and not self._forget_if_over(process_id):
            raise invalid_request(f"process {process_id} already exists")
        limit = machine.limits.max_processes
        if limit is not None and sum(process.live for process in self._processes.values()) >= limit:
            raise invalid_request(f"process limit reached ({limit})")
        descriptors.make_room(len(self._processes))
        if self._tags is None:
            try:
                self._tags = machine.tags.open_session()
            except RuntimeError as error:
                raise invalid_request(str(error)) from None
        spec.tag = self._tags.new() if machine.tag_trees else None
        process = ManagedProcess(
            machine.loop,
            process_id,
            spec,
            machine.limits,
            listener,
            machine.killer,
            machine.watcher,
            machine.sandboxer,
        )
        if self._holding:
            process.hold_output(BACK_PRESSURE)
        if self._acknowledging:
            process.log.acknowledged = 0
            process.guard_output(attached=True)
        if machine.tag_trees:
            machine.guard.start()
        self._processes[process_id] = process
        worker = machine.spawner if spec.prepare is None else machine.sandboxer
        worker.run(spawn, spec).then(lambda spawned: self._spawned(process, spawned))
        return process

    def forget(self, process: ManagedProcess) -> None:
        """Free the id now."""
        if self._processes.get(process.id) is process:
            del self._processes[process.id]

    def forget_later(self, process: ManagedProcess) -> None:
        """Free the id when the retention of a closed process is over, or sooner if there are too many."""
        if self._closed:
            self.forget(process)  # nobody can ask any more
            return
        limits = self._machine.limits
        self._retained.append((self._machine.loop.time() + limits.retention, process))
        self._retained_bytes += process.log.retained_bytes
        while (
            len(self._retained) > limits.retained_processes
            or self._retained_bytes > limits.retained_closed_output
        ):
            self._forget_oldest()
        self._plan_forgetting(limits.retention)

    def owner_left(self) -> None:
        """Nobody can ask for what has closed, so the time to do so does not run."""
        self._away = True

    def owner_is_back(self) -> None:
        """The time to ask for what has closed begins anew."""
        self._away = False
        retention = self._machine.limits.retention
        over = self._machine.loop.time() + retention
        self._retained = deque((over, process) for _, process in self._retained)
        if self._retained:
            self._plan_forgetting(retention)

    def _plan_forgetting(self, delay: float) -> None:
        if not self._forgetting:
            self._forgetting = True
            self._machine.loop.call_later(delay, self._forget_due)

    def _forget_due(self) -> None:
        """Forget everybody whose time is over, and come back for the next."""
        self._forgetting = False
        if self._away:
            return
        limits = self._machine.limits
        now = self._machine.loop.time()
        # A loop's clock may be some milliseconds coarse.
        while self._retained and self._retained[0][0] <= now + 0.01:
            over = self._retained[0][0]
            if self._may_not_know(over - limits.retention) and now < over + limits.detach_ttl:
                # If its connection is broken we may learn of that in time, and then this one is kept.
                self._plan_forgetting(max(limits.retention, CERTAIN_SECONDS))
                return
            self._forget_oldest()
        if self._retained:
            self._plan_forgetting(self._retained[0][0] - now)

    def _may_not_know(self, told: float) -> bool:
        """Whether who comes back for what it has missed may have missed what it was told then."""
        return self._acknowledging and self._heard() < told + CERTAIN_SECONDS

    def _forget_if_over(self, process_id: str) -> bool:
        """Whether an id is free, since its time is over and its owner, who wants it again, is there."""
        now = self._machine.loop.time()
        for over, process in self._retained:
            if process.id == process_id and self._processes.get(process_id) is process:
                if over > now + 0.01:
                    return False
                self._retained.remove((over, process))
                self._retained_bytes -= process.log.retained_bytes
                self.forget(process)
                return True
        return False

    def _forget_oldest(self) -> None:
        _, process = self._retained.popleft()
        self._retained_bytes -= process.log.retained_bytes
        self.forget(process)

    def hold_output(self) -> None:
        """Stop reading output: whoever listens cannot take more."""
        self._holding = True
        for process in self._processes.values():
            process.hold_output(BACK_PRESSURE)

    def release_output(self) -> None:
        """Go on reading output."""
        self._holding = False
        for process in list(self._processes.values()):
            process.release_output(BACK_PRESSURE)

    def expect_acknowledgements(self, expected: bool) -> None:
        """Whether whoever listens now says what it has received, so that what it has not is kept longer."""
        self._acknowledging = expected
        for process in list(self._processes.values()):
            if expected:
                process.guard_output(attached=True)
            else:
                self.acknowledge(process, EVERYTHING)
                process.unguard_output()

    def acknowledge(self, process: ManagedProcess, seq: int) -> None:
        """Output up to this number has been received. What is kept of a closed process stays as it is."""
        if not process.log.closed:
            process.log.acknowledge(seq)
            process.output_acknowledged()

    def guard_output(self) -> None:
        """Nobody listens for now. If who did acknowledges, processes rather wait than lose what is not."""
        if self._acknowledging:
            for process in list(self._processes.values()):
                process.guard_output(attached=False)

    def release_requested_output(self) -> None:
        """Whoever asked for a process to wait has gone; who comes next may ask again."""
        for process in list(self._processes.values()):
            process.release_output(ON_REQUEST)

    def terminate_all(self) -> Pending[int]:
        """Kill every tree that was ever started here, and stay open for more; how many were killed."""
        for process in self._processes.values():
            process.terminate()
        return resolved(0) if self._tags is None else self._machine.killer.kill(self._tags.contains)

    @property
    def used(self) -> bool:
        """Whether anything was ever started here."""
        return self._tags is not None

    def kill_all(self, done: Callable[[int], object] | None = None) -> None:
        """The owner is gone: SIGTERM and some time if so configured, then kill every tree it ever started."""
        if not self._closed:
            self.ask_to_end().then(lambda _: self._kill_trees(done))

    def ask_to_end(self) -> Pending[None]:
        """The owner is gone: SIGTERM if so configured. Settles when it is time to kill."""
        self._closed = True
        grace = self._machine.limits.shutdown_grace
        running = [process for process in self._processes.values() if process.state is State.RUNNING]
        exited: Pending[None] = Pending()
        if grace <= 0 or not running:
            exited.resolve(None)
            return exited
        timer = self._machine.loop.call_later(grace, exited.resolve, None)

        def one_exited(_: Pending[None]) -> None:
            if not any(process.state is State.RUNNING for process in running):
                timer.cancel()
                exited.resolve(None)

        for process in running:
            process.ask_to_end()
            process.wait(State.EXITED).then(one_exited)
        return exited

    def _kill_trees(self, done: Callable[[int], object] | None) -> None:
        tags = self._tags
        if tags is None:
            if done is not None:
                done(0)
            return

        def finish(killed: Pending[int]) -> None:
            self.let_go()
            try:
                count = killed.result()
            except OSError:
                count = 0  # it is tried again; nobody else may have these tags
            else:
                tags.release()
                log.info("killed the processes of a session", killed=count)
            if done is not None:
                done(count)

        if not self._machine.tag_trees:
            for process in self._processes.values():
                process.signal(signal.SIGKILL)  # there is nothing to search for
        self._machine.killer.kill(tags.contains).then(finish)

    def let_go(self) -> None:
        """Every tree has been killed: kill whoever shed the tag but stayed in the group, and forget all."""
        for process in self._processes.values():
            process.signal(signal.SIGKILL)
            process.abandon()
        self._processes.clear()
        self._retained.clear()

    def _spawned(self, process: ManagedProcess, outcome: Pending[Spawned]) -> None:
        try:
            spawned = outcome.result()
        except Exception as error:
            self.forget(process)
            process.fail_to_start(error)
            return
        finally:
            process.spec.env = {}  # it has its copy; ours would be kept for as long as the process is
            process.spec.prepare = None
        if self._closed:
            # The owner went away while the child was being made.
            tag = process.spec.tag
            if tag is not None:
                self._machine.killer.kill(tag.__eq__)
            os.kill(spawned.pid, signal.SIGKILL)
        process.run(spawned)
        if self._closed:
            process.abandon()
