"""Warm helpers: processes inside of sandboxes that do file calls, one kept for the next call that fits.

A helper belongs to one plan for as long as it lives. It serves a call only if that call's plan, made
afresh, is equal to its own; so a policy is never served by another one's helper, and a file that came,
went or was exchanged since then means another helper. A plan that has to cover names which do not exist
has something to be seen on the host meanwhile, and that must be gone when the answer has come: such names
are covered for each call alone (guards.py), or, where that cannot be, the helper ends with the call.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Condition, Event, Thread
from time import monotonic
from typing import Any, Final

from ... import log
from ...limits import Limits
from ...wire.errors import RpcError, internal_error
from ..files.lane import Turn
from ..process.machine import ProcessMachine
from ..process.spawn import Launch, SpawnSpec, spawn
from . import mountpoints
from .helper_process import (
    LOOK_SECONDS,
    Answer,
    CannotGuard,
    HelperDied,
    HelperProcess,
    Key,
    socket_pair,
)
from .plan import Plan

__all__ = ["Helpers", "program_roots"]

ATTEMPTS: Final = 2
"""A helper that ends in the middle of a call is replaced once; who kills two of them gets an error."""

KEPT_VARIABLES: Final = ("PATH", "TMPDIR", "TMP", "TEMP")
"""All that a helper gets of our environment."""

_PROGRAM: Final = """\
import sys
from _frozen_importlib_external import spec_from_file_location

class Packages:
    files = {files!r}

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return spec_from_file_location(name, cls.files[name]) if name in cls.files else None

sys.meta_path.append(Packages)
from exec_server.local.sandbox.helper import main
main({fd})
"""
"""Packages are found by their own places: the directories they lie in need not be readable."""


def program_roots() -> tuple[bytes, ...]:
    """What a helper must be able to read to run at all."""
    return tuple(os.fsencode(root) for root in _roots())


def _roots() -> list[str]:
    return [
        os.path.realpath(sys.executable),
        sys.base_prefix,
        *map(os.path.dirname, map(_file_of, _PACKAGES)),
    ]


_PACKAGES: Final = ("exec_server", "msgspec", "pybase64", "yaml")


def _file_of(package: str) -> str:
    """The file a package starts with, without importing it if it is not yet."""
    from importlib.util import find_spec

    found = find_spec(package)
    if found is None or found.origin is None:
        raise RuntimeError(f"the package {package} of this installation cannot be found")
    return os.path.realpath(found.origin)


class Helpers:
    """The helpers of one server."""

    def __init__(
        self, machine: ProcessMachine, limits: Limits, prepare: Callable[[Plan, SpawnSpec], Launch]
    ) -> None:
        """`prepare` says how a command is started in the sandbox of a plan, or raises RpcError."""
        self._machine = machine
        self._limits = limits
        self._prepare = prepare
        self._changed = Condition()
        self._idle: dict[Key, list[HelperProcess]] = {}
        self._count = 0
        self._closed = False
        self._nesting = True
        """Whether helpers can cover names for single calls, as far as is known."""
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread: Thread | None = None
        self._tags = machine.tags.open_session()

    @property
    def count(self) -> int:
        """How many there are now."""
        return self._count

    def call(self, key: Key, method: str, params: bytes, turn: Turn, *, repeatable: bool) -> Answer:
        """Have it done in the sandbox of a plan. `repeatable`: doing it twice is like doing it once."""
        if key.guards and self._nesting:
            claim = mountpoints.claim(path for path, _ in key.guards)
            try:
                return self._call(key, method, params, turn, repeatable=repeatable, guarded=True)
            except CannotGuard as error:
                self._nesting = not error.for_good
            finally:
                if claim is not None:
                    claim.release(orderly=True)
        return self._call(key, method, params, turn, repeatable=repeatable, guarded=False)

    def _call(
        self, key: Key, method: str, params: bytes, turn: Turn, *, repeatable: bool, guarded: bool
    ) -> Answer:
        for attempt in range(ATTEMPTS):
            helper = self._take(key, turn, guarded)
            warm = helper.answered
            try:
                answer = helper.call(method, params, turn)
            except HelperDied:
                how = self._end(helper)
                again = repeatable and attempt + 1 < ATTEMPTS and (warm or how.startswith("signal"))
                if not again:
                    raise _failed(how, unknown=warm and not repeatable) from None
            except (RpcError, CannotGuard):
                self._done(helper)
                raise
            except BaseException:
                self._end(helper, kill=True)  # it is busy with something that nobody wants any more
                raise
            else:
                self._done(helper)
                return answer
        raise AssertionError("the last attempt either answers or raises")

    def close(self) -> None:
        """End all that are idle; those at work are ended by who uses them."""
        with self._changed:
            self._closed = True
            idle = [helper for helpers in self._idle.values() for helper in helpers]
            self._idle.clear()
            self._changed.notify_all()
        for helper in idle:
            self._end(helper, kill=True)
        self._jobs.put(lambda: None)

    # Taking and giving back

    def _take(self, key: Key, turn: Turn, guarded: bool) -> HelperProcess:
        evicted: HelperProcess | None = None
        while True:
            with self._changed:
                if self._closed:
                    raise internal_error("the server is ending")
                helpers = self._idle.get(key) if guarded or not key.plan.created else None
                if helpers:
                    helper = helpers.pop()
                    if not helpers:
                        del self._idle[key]
                    if helper.is_alive():
                        return helper
                    evicted = helper
                elif self._count < self._limits.sandbox_helpers:
                    self._count += 1
                    break
                elif self._idle:
                    evicted = self._oldest()
                else:
                    self._changed.wait(LOOK_SECONDS)
            if evicted is not None:
                self._end(evicted)
                evicted = None
            turn.check()
        try:
            return self._start(key, guarded)
        except BaseException:
            self._forget_one()
            raise

    def _oldest(self) -> HelperProcess:
        """With the lock held: the one that has been idle for longest."""
        key = min(self._idle, key=lambda key: self._idle[key][0].idle_since)
        helpers = self._idle[key]
        helper = helpers.pop(0)
        if not helpers:
            del self._idle[key]
        return helper

    def _done(self, helper: HelperProcess) -> None:
        keep = helper.guarded or not helper.key.plan.created
        with self._changed:
            if keep and not self._closed:
                helper.idle_since = monotonic()
                self._idle.setdefault(helper.key, []).append(helper)
                self._changed.notify()
                return
        self._end(helper)

    def _end(self, helper: HelperProcess, *, kill: bool = False) -> str:
        try:
            return helper.end(kill=kill)
        finally:
            self._forget_one()

    def _forget_one(self) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify()

    # Starting, and leaving when idle

    def _start(self, key: Key, guarded: bool) -> HelperProcess:
        """What is in a sandbox dies with the thread that started it, so one thread starts them all."""
        outcome: list[Any] = []
        done = Event()

        def job() -> None:
            try:
                outcome.append(self._spawn(key, guarded))
            except BaseException as error:
                outcome.append(error)
            done.set()

        with self._changed:
            if self._thread is None:
                self._thread = Thread(target=self._serve, name="exec-server-helpers", daemon=True)
                self._thread.start()
        self._jobs.put(job)
        done.wait()
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        started: HelperProcess = outcome[0]
        return started

    def _serve(self) -> None:
        """Must not end while there are helpers: they would end with it."""
        while True:
            try:
                self._jobs.get(timeout=self._limits.sandbox_helper_idle / 2)()
            except Empty:
                pass
            for helper in self._outdated():
                try:
                    self._end(helper)
                except OSError as error:
                    log.warning("a file helper did not end as it should", reason=str(error))
            with self._changed:
                if self._closed and not self._count:
                    return

    def _outdated(self) -> list[HelperProcess]:
        before = monotonic() - self._limits.sandbox_helper_idle
        found: list[HelperProcess] = []
        with self._changed:
            for key, helpers in list(self._idle.items()):
                found += [helper for helper in helpers if helper.idle_since < before]
                helpers[:] = [helper for helper in helpers if helper.idle_since >= before]
                if not helpers:
                    del self._idle[key]
        return found

    def _spawn(self, key: Key, guarded: bool) -> HelperProcess:
        ours, descriptor = socket_pair()
        environment = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        program = _PROGRAM.format(files={name: _file_of(name) for name in _PACKAGES}, fd=descriptor)
        argv = [os.path.realpath(sys.executable), "-I", "-S", "-B", "-c", program]
        handed = False

        def prepare(spec: SpawnSpec) -> Launch:
            nonlocal handed
            launch = self._prepare(key.unguarded if guarded else key.plan, spec)
            launch.inherited = [*launch.inherited, descriptor]
            handed = True  # whoever launches closes it
            return launch

        spec = SpawnSpec(
            argv=argv,
            cwd="/",
            env=environment,
            tty=False,
            pipe_stdin=False,
            tag=self._tags.new() if self._machine.tag_trees else None,
            prepare=prepare,
            sandboxed=True,
        )
        try:
            spawned = spawn(spec)
        except BaseException:
            ours.close()
            if not handed:
                os.close(descriptor)
            raise
        return HelperProcess(key, ours, spawned, guarded=guarded)


def _failed(how: str, *, unknown: bool) -> RpcError:
    doubt = " (whether the call was done is not known)" if unknown else ""
    return internal_error(f"fs sandbox helper failed with status {how}{doubt}")
