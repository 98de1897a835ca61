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
from _thread import start_new_thread
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from time import monotonic
from typing import Any, Final, TypeAlias

from ... import log
from ...limits import Limits
from ...wire.errors import RpcError, internal_error
from ..files.lane import Turn
from ..process.machine import ProcessMachine
from ..process.spawn import Launch, SpawnSpec, spawn
from . import confine, mountpoints
from .helper_process import (
    Answer,
    CannotGuard,
    HelperDied,
    HelperProcess,
    Key,
    socket_pair,
)
from .places import GRACE_SECONDS, OWN_SECONDS, Places, Waiter
from .plan import Identity, Plan

__all__ = ["Helpers", "program_roots"]

ATTEMPTS: Final = 2
"""A helper that ends in the middle of a call is replaced once; who kills two of them gets an error."""

VANISHED_SECONDS: Final = 5.0
"""How often idle helpers are looked after: one whose files are gone would keep their disk busy."""

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


Prepare: TypeAlias = Callable[[Plan, SpawnSpec, Callable[[], Plan] | None], Launch]
"""How a command is started in the sandbox of a plan, which can be made once more."""


class Helpers:
    """The helpers of one server."""

    def __init__(self, machine: ProcessMachine, limits: Limits, prepare: Prepare) -> None:
        """`prepare` says how a command is started in the sandbox of a plan, or raises RpcError."""
        self._machine = machine
        self._limits = limits
        self._prepare = prepare
        self._places = Places(limits.sandbox_helpers)
        self._nesting = True
        """Whether helpers can cover names for single calls, as far as is known."""
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = Lock()
        self._thread: Thread | None = None
        self._claiming = Lock()
        """Held by who is about to cover something: nobody is, any more, when all of it is taken away at the
        end. One after the other they go anyway."""
        self._looking = Lock()
        """Held by who looks whether what idle helpers were started for is still there."""
        self._tags = machine.tags.open_session()

    @property
    def count(self) -> int:
        """How many there are now."""
        return self._places.count

    def call(self, key: Key, method: str, params: bytes, turn: Turn, *, repeatable: bool) -> Answer:
        """Have it done in the sandbox of a plan. `repeatable`: doing it twice is like doing it once."""
        if key.guards and self._nesting:
            losses: list[str] = []
            claim = self._claim(key, turn)
            try:
                return self._call(key, method, params, turn, losses, repeatable=repeatable, guarded=True)
            except CannotGuard as error:
                if error.for_good:
                    self._nesting = False
            finally:
                # Whoever did it has said that it is gone, or was lost: then it has to be looked for.
                if claim is not None and not claim.release(orderly=not losses):
                    log.warning("mount points are left behind until this server ends", paths=key.guarded)
        return self._call(key, method, params, turn, [], repeatable=repeatable, guarded=False)

    def _claim(self, key: Key, turn: Turn) -> mountpoints.Claim | None:
        try:
            with self._claiming:
                if self._places.closed:
                    raise internal_error("the server is ending")
                return mountpoints.claim({path: True for path, _ in key.guards}, turn.check)
        except OSError as error:
            raise internal_error(
                f"fs sandbox helper failed with status exit status: 1: cannot protect {key.guarded}: {error}"
            ) from None

    def _call(
        self,
        key: Key,
        method: str,
        params: bytes,
        turn: Turn,
        losses: list[str],
        *,
        repeatable: bool,
        guarded: bool,
    ) -> Answer:
        """`losses`: to be told how helpers ended that were at it."""
        for attempt in range(ATTEMPTS):
            helper = self._take(key, turn, guarded)
            warm = helper.answered
            try:
                answer = helper.call(method, params, turn)
            except HelperDied:
                how = self.end(helper)
                losses.append(how)
                again = repeatable and attempt + 1 < ATTEMPTS and (warm or how.startswith("signal"))
                if not again:
                    raise _failed(how, unknown=warm and not repeatable) from None
            except (RpcError, CannotGuard):
                self._done(helper)
                raise
            except BaseException:
                losses.append("killed")
                self.end(helper, kill=True)  # it is busy with something that nobody wants any more
                raise
            else:
                self._done(helper)
                return answer
        raise AssertionError("the last attempt either answers or raises")

    # For direct calls

    def take_idle(self, key: Key) -> HelperProcess | None:
        """A helper that has answered before, if one is free. Does not wait."""
        helper = None if key.plan.created else self._places.take(key)
        if helper is not None and not helper.answered:
            self._places.give_back(helper)
            return None
        return helper

    def give_back(self, helper: HelperProcess) -> bool:
        """Whether it was taken back; if not it has to be ended, in a thread."""
        return self._places.give_back(helper)

    def finish(self, helper: HelperProcess, turn: Turn) -> Answer | None:
        """Wait for the answer to what a helper was asked; None if it has died."""
        try:
            answer = helper.wait_for_answer(turn)
        except HelperDied:
            self.end(helper)
            return None
        except RpcError:
            self._done(helper)
            raise
        except BaseException:
            self.end(helper, kill=True)
            raise
        self._done(helper)
        return answer

    def close(self) -> None:
        """End all that are idle; those at work are ended by who uses them. Nothing is covered from now on."""
        idle = self._places.close()
        with self._claiming:
            pass  # whoever was about to has done so, and has noted it
        for helper in idle:
            try:
                helper.end(kill=True)
            finally:
                self._places.forget()
        self._jobs.put(lambda: None)

    # Taking and giving back

    def _take(self, key: Key, turn: Turn, guarded: bool) -> HelperProcess:
        reusing = guarded or not key.plan.created
        free = self._places.take(key) if reusing else None
        if free is not None:
            if free.is_alive():
                return free
            self.end(free)
        waiter = self._places.ask(key, reusing=reusing)
        try:
            pause = OWN_SECONDS
            while not waiter.granted.wait(pause):
                turn.check()
                self._places.look_again()
                pause = GRACE_SECONDS
        except BaseException:
            if not self._places.leave(waiter):
                self._return(waiter)
            raise
        if self._places.closed:
            self._return(waiter)
            raise internal_error("the server is ending")
        helper = waiter.helper
        if helper is not None and waiter.fits and helper.is_alive():
            return helper
        try:
            if helper is not None:
                helper.end()
            return self._start(key, guarded)
        except BaseException:
            self._places.free(key, reusable=reusing)
            raise

    def _return(self, waiter: Waiter) -> None:
        """What was granted is not wanted any more."""
        if waiter.refused:
            return
        if waiter.helper is not None:
            if waiter.fits:
                self._done(waiter.helper)
                return
            waiter.helper.end()
        self._places.free(waiter.key, reusable=waiter.reusing)

    def _done(self, helper: HelperProcess) -> None:
        if not self._places.give_back(helper):
            self.end(helper)

    def end(self, helper: HelperProcess, *, kill: bool = False) -> str:
        """Of one that was taken: how it ended, and what it said."""
        try:
            return helper.end(kill=kill)
        finally:
            self._places.free(helper.key, reusable=helper.reusable)

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

        with self._lock:
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
        confine.new_session_keyring()  # nobody it starts gets at the keys of whoever started this server
        pause = min(self._limits.sandbox_helper_idle / 2, VANISHED_SECONDS)
        while True:
            try:
                self._jobs.get(timeout=pause if self._places.count else None)()
            except Empty:
                if self._looking.acquire(blocking=False):
                    try:
                        start_new_thread(self._look_after_idle, ())
                    except RuntimeError:  # too many threads for now
                        self._looking.release()
            if self._places.closed and not self._places.count:
                return

    def _look_after_idle(self) -> None:
        """End those that nobody needs. In a thread of its own: a look at a disk may take for ever."""
        try:
            before = monotonic() - self._limits.sandbox_helper_idle
            vanished = {id(helper) for helper in self._places.idle() if _has_lost(helper.key.plan)}
            for helper in self._places.withdraw(
                lambda helper: helper.idle_since < before or id(helper) in vanished
            ):
                try:
                    helper.end()
                except OSError as error:
                    log.warning("a file helper did not end as it should", reason=str(error))
                finally:
                    self._places.forget()
        finally:
            self._looking.release()

    def _spawn(self, key: Key, guarded: bool) -> HelperProcess:
        ours, descriptor = socket_pair()
        environment = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        program = _PROGRAM.format(files={name: _file_of(name) for name in _PACKAGES}, fd=descriptor)
        argv = [os.path.realpath(sys.executable), "-I", "-S", "-B", "-c", program]
        handed = False

        def prepare(spec: SpawnSpec) -> Launch:
            nonlocal handed
            launch = self._prepare(key.unguarded if guarded else key.plan, spec, key.again)
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


def _has_lost(plan: Plan) -> bool:
    """Whether something it is about is not there any more: no plan that is made now can be equal to it."""
    return any(_is_lost(seen) for seen in plan.seen)


def _is_lost(seen: Identity) -> bool:
    try:
        found = os.lstat(seen.path)
    except (FileNotFoundError, NotADirectoryError):
        return seen.inode != 0
    except OSError:
        return False
    return seen.inode != 0 and (found.st_dev, found.st_ino) != (seen.device, seen.inode)


def _failed(how: str, *, unknown: bool) -> RpcError:
    doubt = " (whether the call was done is not known)" if unknown else ""
    return internal_error(f"fs sandbox helper failed with status {how}{doubt}")
