"""File calls inside of sandboxes: from a profile, by a plan made for this very call, to a helper.

Which calls these are is decided in local/files/access.py. All of this blocks, and runs in the threads of
the lanes. What cannot be enforced is an error, never a plain call.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any, Final, NamedTuple

from msgspec import Raw, Struct
from msgspec.json import encode
from msgspec.structs import replace

from ...limits import Limits
from ...loop import Loop, Pending
from ...wire.errors import INVALID_PARAMS, RpcError, internal_error, invalid_request
from ...wire.sandbox import SandboxContext
from ..files.cached import nothing_hangs
from ..files.errors import failure
from ..files.lane import ALONE, Lane, Touch, Turn
from ..files.paths import to_native
from ..files.write import PINS
from ..process.machine import ProcessMachine
from ..process.spawn import Launch, SpawnSpec
from .compile import compile_plan
from .direct import Answers, DirectCall
from .entries import has_full_read
from .helper_process import Answer, Key
from .helpers import Helpers, program_roots
from .installation import server_roots
from .look import Machine, Recorder, ThisMachine, secret_files
from .plan import Plan, PlanError

__all__ = ["SandboxedFiles"]

MAX_PLANS: Final = 64
"""Plans that are kept to be looked at again; one costs a tenth of a millisecond to make."""

_REPEATABLE: Final = frozenset(
    {
        "fs/readFile",
        "fs/getMetadata",
        "fs/canonicalize",
        "fs/readDirectory",
        "fs/walk",
        "fs/glob",
        "fs/search",
        "fs/writeFile",
        "fs/copy",
        "fs/open",
        "capabilityRoots/discoverV1",
        "capabilities/discoverV2",
    }
)
"""Calls that may be made again when a helper has ended in the middle of one."""


_READING: Final = _REPEATABLE - {"fs/writeFile", "fs/copy", "fs/open"}
"""Calls that change nothing, whatever their params say."""


class _Known(NamedTuple):
    """A plan made before, what it was made from, and the same for who only reads."""

    recorder: Recorder
    key: Key
    reading: Key


class SandboxedFiles:
    """The file calls of one server that need a sandbox."""

    def __init__(self, machine: ProcessMachine, limits: Limits, look: Machine | None = None) -> None:
        self._look = look or ThisMachine()
        self._helpers = Helpers(machine, limits, _prepare)
        self._plans: dict[SandboxContext, _Known] = {}
        self._lock = Lock()
        self._roots: tuple[bytes, ...] | None = None
        self._answers: Answers | None = None

    @property
    def helpers(self) -> int:
        """How many helpers there are now."""
        return self._helpers.count

    def close(self) -> None:
        """End the helpers."""
        if self._answers is not None:
            self._answers.close()
        self._helpers.close()

    def perform(self, context: SandboxContext, method: str, params: Any, turn: Turn = ALONE) -> Raw:
        """Do a call in its sandbox; blocks. The result is what the method's result would be."""
        return Raw(self._call(context, method, params, turn).result)

    def begin(
        self,
        context: SandboxContext,
        method: str,
        params: Any,
        loop: Loop,
        lane: Lane,
        touches: tuple[Touch, ...],
    ) -> Pending[Raw] | None:
        """Like `perform`, but on the loop and without a thread, for calls that only read (direct.py).

        None if something about it might take long: then it has to be done in the lane.
        """
        known = self._plans.get(context)
        if known is None or not lane.free_for_reading or not nothing_hangs():
            return None
        if not known.recorder.brief or not known.recorder.still_true():
            return None
        helper = self._helpers.take_idle(known.reading)
        if helper is None:
            return None
        if self._answers is None:
            self._answers = Answers(loop)
        again = partial(self.perform, context, method, params)
        call = DirectCall(self._helpers, helper, loop, self._answers, lane, again)
        return call.begin(touches, method, encode(replace(params, sandbox=None)))

    def open(self, context: SandboxContext, params: Any, turn: Turn = ALONE) -> int:
        """The descriptor of a file that was opened in a sandbox, to be used without."""
        descriptor = self._call(context, "fs/open", params, turn).descriptor
        if descriptor is None:
            raise internal_error("failed to encode or decode fs sandbox helper message: no descriptor came")
        return descriptor

    def _call(self, context: SandboxContext, method: str, params: Any, turn: Turn) -> Answer:
        if isinstance(params, Struct) and hasattr(params, "sandbox"):
            params = replace(params, sandbox=None)
        encoded = encode(params)
        if method == "fs/writeFile" and _is_pinned(params.path):
            encoded = encoded[:-1] + b',"pinned":true}'
        known = self._known(context)
        reading = method in _READING or (method == "fs/open" and params.mode == "read")
        key = known.reading if reading else known.key
        repeatable = method in _REPEATABLE or _is_harmless(method, params)
        return self._helpers.call(key, method, encoded, turn, repeatable=repeatable)

    def _known(self, context: SandboxContext) -> _Known:
        """The plan as of now: the one made before, if everything it was made from is still so."""
        with self._lock:
            known = self._plans.get(context)
        try:
            if known is not None and known.recorder.still_true():
                return known
            if self._roots is None:
                self._roots = program_roots()
            recorder = Recorder(self._look)
            plan = _compile(context, recorder, self._roots)
        except PlanError as error:
            raise _unplanned(str(error)) from None
        except OSError as error:
            raise failure(error) from None
        again = partial(_compile, context, self._look, self._roots)
        key, reading = Key(plan, again), plan.for_reading()
        made = _Known(recorder, key, key if reading is plan else Key(reading, again))
        with self._lock:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self._plans[context] = made
        return made


def _is_pinned(uri: str) -> bool:
    """Whether a stream of ours writes to the file, which must stay the same one. A helper cannot know."""
    try:
        return os.stat(to_native(uri)) in PINS
    except OSError:
        return False


def _is_harmless(method: str, params: Any) -> bool:
    """Whether doing it again would say the same as doing it once."""
    if method == "fs/createDirectory":
        return bool(params.recursive)
    return method == "fs/remove" and bool(params.force)


def _compile(context: SandboxContext, machine: Machine, roots: tuple[bytes, ...]) -> Plan:
    tmpdir = os.environ.get("TMPDIR")
    return compile_plan(
        context,
        machine,
        cwd=os.getcwdb(),
        tmpdir=os.fsencode(tmpdir) if tmpdir else None,
        readable=() if has_full_read(context) else roots,
        hidden=secret_files(),
        kept=server_roots(),
        for_files=True,
    )


def _prepare(plan: Plan, spec: SpawnSpec, again: Callable[[], Plan] | None) -> Launch:
    """How a helper is started. What process/start would call wrong params is no fault of a file call's."""
    from . import probe
    from .launch import carry_out

    backend = probe.backend()
    try:
        return carry_out(plan, backend, spec, helper=True, again=again)
    except RpcError as error:
        if error.code != INVALID_PARAMS:
            raise
        _, _, reason = error.message.partition(": ")
        raise invalid_request(f"filesystem sandbox cannot be enforced on this executor: {reason}") from None


def _unplanned(reason: str) -> RpcError:
    return internal_error(
        "fs sandbox helper failed with status exit status: 1: "
        f"error building bubblewrap command: Fatal error: {reason}"
    )
