"""Starting a command in a sandbox: from a profile, by a plan, to what the spawner executes.

Runs in a worker thread, right before the spawn, so that the plan is about the file system as it is now.
What cannot be had is refused here; nothing is ever started with less of a sandbox than was asked for.
"""

from __future__ import annotations

import os
from _thread import _local
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from ... import log
from ...wire.errors import RpcError, invalid_params
from ...wire.sandbox import SandboxContext
from ...wire.uri import ForeignPath, native_path
from ..files.errors import failure
from ..process import tree
from ..process.spawn import Launch, SpawnSpec
from . import bubblewrap, confine, landlock, mountpoints, probe, seccomp
from .compile import compile_plan
from .confine import Confinement
from .entries import Unsuitable, check_entries
from .first import FirstProcess
from .installation import server_roots
from .landlock import Inexpressible
from .look import ThisMachine, secret_files
from .plan import Bind, Plan, PlanError, covers
from .probe import Backend
from .proxies import NoProxies, Route, reroute

__all__ = ["carry_out", "check_context", "preparer", "refusal", "unenforceable"]

ATTEMPTS: Final = 3
"""How often a plan is made whose mount points another sandbox takes away meanwhile."""

NO_PROXIES_EXIT: Final = 101
"""How the reference's launcher ends when a managed network has no proxies."""

_SAY_AND_EXIT: Final = 'printf "%s\\n" "$0" >&2; exit "$1"'

_of_thread = _local()


def check_context(context: SandboxContext) -> None:
    """Unsuitable, if any path is of another kind of machine. Looks at nothing."""
    check_entries(context)
    places = [("cwd", context.policy_cwd), *(("workspace root", root) for root in context.project_roots)]
    for part, uri in places:
        try:
            if uri is not None:
                native_path(uri)
        except ForeignPath as error:
            raise Unsuitable(part, uri, str(error)) from None  # type: ignore[arg-type]  # the two above


def preparer(context: SandboxContext, *, proxy: bool = False) -> Callable[[SpawnSpec], Launch]:
    """What makes the sandbox when the time has come."""

    def prepare(spec: SpawnSpec) -> Launch:
        _leave_keys_behind()
        backend = probe.backend()
        routes: list[Route] = []
        if proxy:
            try:
                spec.env, routes = reroute(spec.env)
            except NoProxies as error:
                return refusal(f"failed to prepare host proxy routing bridge: {error}", NO_PROXIES_EXIT)
        tmpdir = spec.env.get("TMPDIR")

        def make_plan() -> Plan:
            return compile_plan(
                context,
                ThisMachine(),
                cwd=os.fsencode(spec.cwd),
                tmpdir=os.fsencode(tmpdir) if tmpdir else None,
                hidden=secret_files(),
                kept=server_roots(),
                proxy=proxy,
            )

        for _ in range(ATTEMPTS):
            try:
                plan = make_plan()
            except PlanError as error:
                return refusal(f"error building bubblewrap command: Fatal error: {error}", 1)
            except OSError as error:
                return refusal(f"error building bubblewrap command: Fatal error: {failure(error).message}", 1)
            launch = carry_out(plan, backend, spec, routes, again=make_plan)
            if all(os.path.lexists(step.source) for step in plan.steps if isinstance(step, Bind)):
                return launch
            _give_back(launch)
        raise invalid_params(
            "failed to prepare process sandbox: paths that it is about come and go too fast to be protected"
        )

    return prepare


def carry_out(
    plan: Plan,
    backend: Backend,
    spec: SpawnSpec,
    routes: Sequence[Route] = (),
    *,
    helper: bool = False,
    again: Callable[[], Plan] | None = None,
) -> Launch:
    """The plan by what this machine has. RpcError -32602 if it cannot be carried out in full.

    `routes` are the proxies that can be reached, if the plan's network leads to any. `helper`: our
    own code runs inside, which may cover names there. Releasing it sees to the end of everybody inside.
    `again` makes the plan once more, to see whether what
    is denied has moved meanwhile.
    """
    if plan.kind == "plain":
        return Launch(spec.argv, spec.env, spec.arg0)
    try:
        if plan.kind == "filter" and backend.filters:
            confinement = Confinement(seccomp.program(plan.network), None, network=False)
            return Launch(spec.argv, spec.env, spec.arg0, confine=lambda _, start: confinement.run(start))
        if plan.kind == "view" and backend.name == "bubblewrap":
            return _in_bubblewrap(plan, backend, spec, list(routes), helper, again)
        if plan.kind == "view" and backend.name == "landlock":
            return _under_landlock(plan, spec)
    except mountpoints.Turned as error:
        return refusal(f"error building bubblewrap command: Fatal error: {error}", 1)
    except (bubblewrap.Unbuildable, Inexpressible, OSError) as error:
        raise invalid_params(f"failed to prepare process sandbox: {error}") from None
    raise unenforceable(backend)


def unenforceable(backend: Backend) -> RpcError:
    """There is no mechanism: what is missing, and how to get it."""
    missing = "; ".join(backend.reasons)
    return invalid_params(f"sandbox intent cannot be enforced on this executor: {missing}")


def refusal(message: str, code: int) -> Launch:
    """In place of a command: says why it is not run, and exits. Peers expect a process that fails."""
    return Launch(["/bin/sh", "-c", _SAY_AND_EXIT, message, str(code)], {})


def _leave_keys_behind() -> None:
    """Once per worker thread, for everything it starts."""
    if not hasattr(_of_thread, "keys_left"):
        confine.new_session_keyring()
        _of_thread.keys_left = True


def _give_back(launch: Launch) -> None:
    launch.close()
    if launch.release is not None:
        launch.release(None)


# Landlock ----------------------------------------------------------------------------------------


def _under_landlock(plan: Plan, spec: SpawnSpec) -> Launch:
    landlock.grants(plan)  # or it cannot be expressed, terminal or not
    program = seccomp.program(plan.network, landlock=True)

    def confined(terminal: str | None, start: Callable[[], int]) -> int:
        rules = landlock.grants(plan, None if terminal is None else os.fsencode(terminal))
        return Confinement(program, rules, network=plan.network == "open").run(start)

    return Launch(spec.argv, spec.env, spec.arg0, confine=confined)


# bubblewrap --------------------------------------------------------------------------------------


def _in_bubblewrap(
    plan: Plan,
    backend: Backend,
    spec: SpawnSpec,
    routes: list[Route],
    helper: bool,
    again: Callable[[], Plan] | None,
) -> Launch:
    badge = mountpoints.badge()
    claim = mountpoints.claim(_mount_points(plan))
    tag = spec.tag
    inspection = None
    first = None

    def release(pidfd: int | None) -> None:
        orderly = pidfd is None or _ended_by_itself(pidfd)
        if not orderly and tag is not None:
            # A keeper that is killed while it makes a view leaves somebody behind who waits for it, for ever.
            with suppress(OSError):
                tree.kill_tagged(lambda other: other == tag)
        gone = True
        if first is not None and pidfd is None:
            first.close()
        elif first is not None:
            gone = first.end()
            if not gone:
                log.warning("a process in a sandbox was killed and has not ended", plan=str(plan))
        if claim is not None and not claim.release(orderly=gone):
            log.warning("mount points of a sandbox are left behind until this server ends", plan=str(plan))

    try:
        first = FirstProcess()
        if plan.seen or routes:
            from .inspection import Inspection

            inspection = Inspection(plan, look=bool(plan.seen), routes=routes, tag=spec.tag, again=again)
        command = bubblewrap.build(
            plan,
            backend,
            [os.fsencode(word) for word in spec.argv],
            {os.fsencode(name): os.fsencode(value) for name, value in spec.env.items()},
            arg0=None if spec.arg0 is None else os.fsencode(spec.arg0),
            # Helpers, which run nothing but our own code, cover names for single calls.
            program=seccomp.program(plan.network, mounting=helper),
            # Who can see them could read where others work, and lock them for ever.
            hidden=mountpoints.hideouts(plan.access),
            badge=badge,
            more=[first.option, *([] if inspection is None else inspection.options)],
        )
    except BaseException:
        if inspection is not None:
            inspection.close()
        if first is not None:
            os.close(first.handed)
        release(None)
        raise
    return Launch(
        [os.fsdecode(word) for word in command.argv],
        {},
        inherited=[
            first.handed,
            *([] if inspection is None else inspection.handed),
            *command.inherited,
        ],
        inside=True,
        started=None if inspection is None else inspection.start,
        release=release,
    )


def _mount_points(plan: Plan) -> dict[bytes, bool | None]:
    """What is mounted upon below something that can be written, and so may not have existed before.

    With whether each is to be a directory where there is nothing, as far as the plan says.
    """
    points: dict[bytes, bool | None] = {}
    for step in plan.steps:
        target = getattr(step, "target", b"/")
        if any(target != root and covers(root, target) for root in plan.writable):
            points[target] = None
    points.update((point.path, point.directory) for point in plan.created)
    return points


def _ended_by_itself(pidfd: int) -> bool:
    """Whether the keeper has seen the end of the command, and was not killed before."""
    try:
        status = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except OSError:
        return False
    return status is not None and status.si_code == os.CLD_EXITED
