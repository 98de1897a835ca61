"""`exec-server run -- CMD…`: one command, here or far away, as if it ran in this terminal."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import TYPE_CHECKING, Any, Final

import click

from ..local.process import descriptors
from ..local.process.environ import is_own_credential
from .options import directory_there, environment_option, fail, read_token, refuse_two_places, server_options
from .shown import printable
from .starting import started

if TYPE_CHECKING:
    from ..client.process import RemoteProcess
    from ..environments.environment import Environment
    from ..wire.sandbox import SandboxContext

__all__ = ["run", "run_on"]

MAX_SECONDS: Final = 1e9
"""Longer than anybody waits, and still a time the loop can be told."""

INTERRUPTED_EXIT: Final = 128 + signal.SIGINT
NOT_ALLOWED_EXIT: Final = 126
NOT_FOUND_EXIT: Final = 127
"""What shells answer for commands that may not be run, and that are not there."""

BUILDER_EXIT: Final = 1
BUILDER_BYTES: Final = 64 * 1024
"""How bubblewrap ends when it cannot run a command in the sandbox it has made, and more than it says then."""


@click.command(context_settings={"allow_interspersed_args": False})
@server_options(required=False)
@environment_option
@click.option("-t", "--tty", is_flag=True, help="Run on a terminal, connected to this one.")
@click.option("--cwd", metavar="DIR", help="Directory to run in (default: here, or the server's own).")
@click.option("--setenv", "variables", multiple=True, metavar="K=V", help="Set a variable (repeatable).")
@click.option(
    "--timeout",
    type=float,
    callback=lambda _, __, value: _seconds(value),
    metavar="SECONDS",
    help="Kill the command after this time.",
)
@click.option(
    "--sandbox",
    "policy",
    type=click.Choice(["read-only", "workspace-write", "full-access"]),
    help="What the command may touch; workspace-write is the directory it runs in, and temporary ones.",
)
@click.option(
    "--writable", multiple=True, metavar="DIR", help="A sandbox that may write here, too (repeatable)."
)
@click.option(
    "--network/--no-network", default=None, help="A sandbox with or without a network (default: without)."
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(
    url: str | None,
    token_file: str | None,
    environment: str | None,
    tty: bool,
    cwd: str | None,
    variables: tuple[str, ...],
    timeout: float | None,
    policy: str | None,
    writable: tuple[str, ...],
    network: bool | None,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND, pass on its input, output, signals and terminal size, and exit with its code.

    Without --env, --url and EXEC_SERVER_URL it runs on this machine, whatever default is configured.

    A command that dies of signal N gives 128 + N; one that is not found gives 127, one that may not be
    run 126; --timeout gives 124. A signal that does not get through to the command, because the connection
    is lost or (at the second one) because the server does not answer, ends this program.
    """
    from ..client.errors import ExecServerError

    env: dict[str, str] = {}
    for variable in variables:
        name, equals, value = variable.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{variable!r} is not NAME=VALUE", param_hint="--setenv")
        env[name] = value
    descriptors.hide_inherited()  # so that 0, 1 and 2 are what they should be
    try:
        if environment is not None:
            refuse_two_places()
        machine = _connected(url, read_token(token_file)) if environment is None else started(environment)
        if url is None and environment is None:
            cwd = os.path.abspath(cwd or ".")
            if not os.path.isdir(cwd):
                fail(f"{cwd}: no such directory")
        else:
            cwd = directory_there(cwd)
        for text in (*command, *env, *env.values()):
            if not _is_text(text):
                fail(f"{text!r}: not UTF-8, which is all that the protocol carries")
        sandbox = _sandbox(policy, writable, network, cwd)
        if url is None and environment is None and sandbox is None:
            # No server hands on what is its own; this is ours, and so is the command.
            ours = ((name, os.environ[name]) for name in filter(is_own_credential, os.environ))
            env = {name: value for name, value in ours if _is_text(name) and _is_text(value)} | env
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # so far it just ended us
        code = asyncio.run(run_on(machine, tty, cwd, env, timeout, command, sandbox))
    except (ExecServerError, OSError, TimeoutError) as error:
        fail(_explained(error, url))
    except KeyboardInterrupt:
        code = INTERRUPTED_EXIT
    # Threads that wait for input which never comes must not keep this process.
    os._exit(code)


def _seconds(value: float | None) -> float | None:
    if value is not None and not 0 < value < MAX_SECONDS:
        raise click.BadParameter(f"{value:g} is no number of seconds to wait", param_hint="--timeout")
    return value


def _explained(error: Exception, url: str | None) -> str:
    """What went wrong, and the likeliest reason where the words alone would leave one guessing."""
    from ..client.errors import ServerRejected
    from ..transport.address import without_password
    from ..wire.errors import METHOD_NOT_FOUND

    if isinstance(error, ServerRejected) and error.method == "initialize" and error.code == METHOD_NOT_FOUND:
        place = without_password(url or "")
        return f"{place}: that is not an exec-server; it does not know `initialize` ({error.message})"
    if url is not None and url.startswith("ws://") and "closed the connection before" in str(error):
        return f"{error} (if it is served with TLS, its address begins with wss://)"
    return str(error)


def _connected(url: str | None, token: str | None) -> AbstractAsyncContextManager[Environment]:
    from ..environments.connect import IN_PROCESS, connect

    target = IN_PROCESS if url is None else url
    return connect(target, token=token, client_name="exec-server-run", dedicated_process=True)


def _sandbox(
    policy: str | None, writable: tuple[str, ...], network: bool | None, cwd: str | None
) -> SandboxContext | None:
    """What the options ask for. Any of them alone asks for a sandbox, and none is ever ignored."""
    if policy is None and not writable and network is None:
        return None
    from ..client.sandbox import Sandbox

    chosen = policy or ("workspace-write" if writable else "read-only")
    if chosen == "full-access":
        if writable or network is False:
            raise click.UsageError("--sandbox full-access restricts nothing, not even with these options")
        return Sandbox.full_access()
    if chosen == "read-only":
        if writable:
            raise click.UsageError(
                "with --sandbox read-only nothing is --writable; with workspace-write it is"
            )
        return Sandbox.read_only(network=bool(network))
    if cwd is None:
        raise click.UsageError("somewhere else, --sandbox workspace-write needs to be told where: --cwd DIR")
    roots = [os.path.normpath(os.path.join(cwd, directory)) for directory in writable]
    return Sandbox.workspace_write(cwd, writable=roots, network=bool(network))


async def run_on(
    machine: AbstractAsyncContextManager[Environment],
    tty: bool,
    cwd: str | None,
    env: dict[str, str],
    timeout: float | None,
    command: tuple[str, ...],
    sandbox: SandboxContext | None = None,
) -> int:
    """Run a command on a machine as if it ran in this terminal; its exit code. No command is its shell."""
    from ..client.client import INHERIT_ALL
    from ..client.errors import ServerRejected
    from .attend import TIMEOUT_EXIT, attend, terminal_size
    from .outage import outages_told

    _be_quiet_about_what_is_cancelled()
    loop = asyncio.get_running_loop()
    deadline = None if timeout is None else loop.time() + timeout
    async with AsyncExitStack() as stack:
        try:
            async with asyncio.timeout_at(deadline) as limit:
                client = await stack.enter_async_context(machine)
        except TimeoutError:
            if not limit.expired():
                raise
            click.echo(f"exec-server: {timeout:g}s are over, and there is no connection", err=True)
            return TIMEOUT_EXIT
        if not command:
            command = (client.info.shell.path if client.info.shell else "/bin/sh", "-l")
        rows, cols = terminal_size() if tty else (None, None)
        if not client.has("processPtySize"):
            rows = cols = None
        forward = tty or client.has("processCloseStdin")
        if not forward and not sys.stdin.isatty():
            click.echo("exec-server: this server cannot pass on the end of input; running without", err=True)
        if tty and "TERM" in os.environ:
            env.setdefault("TERM", os.environ["TERM"])
        try:
            async with asyncio.timeout_at(deadline) as limit:
                process = await client.start(
                    command,
                    cwd=cwd,
                    env=env,
                    env_policy=INHERIT_ALL,
                    tty=tty,
                    stdin=forward,
                    rows=rows,
                    cols=cols,
                    sandbox=sandbox,
                )
        except TimeoutError:
            if not limit.expired():
                raise
            # Nobody answers, so nobody is asked to end what may have begun: its session does, or our server.
            cause = "the server does not answer" if client.connected else "the connection is lost"
            click.echo(
                f"exec-server: {timeout:g}s are over, and {cause}: whether the command runs is not known",
                err=True,
            )
            os._exit(TIMEOUT_EXIT)
        except ServerRejected as error:
            where = f" in {cwd}" if cwd else ""
            click.echo(f"exec-server: cannot run {command[0]}{where}: {printable(error.message)}", err=True)
            unprepared = error.message.startswith("failed to prepare process sandbox")
            refused = unprepared or "Permission denied" in error.message
            return NOT_ALLOWED_EXIT if refused else NOT_FOUND_EXIT
        async with process:
            with outages_told(client):
                code = await attend(client, process, tty, forward, timeout, deadline)
                if sandbox is not None and code == BUILDER_EXIT:
                    code = await _as_without_a_sandbox(process, command[0], code)
                return code


async def _as_without_a_sandbox(process: RemoteProcess, name: str, code: int) -> int:
    """What a shell would answer if there was a sandbox, but no such program in it."""
    from ..client.errors import ExecServerError

    try:
        kept = await process.read(max_bytes=BUILDER_BYTES)
    except ExecServerError:
        return code
    said = b"".join([output.data for output in kept.chunks]).decode("utf-8", "replace").strip()
    what, _, reason = said.rpartition(": ")
    if what != f"bwrap: execvp {name}" or "\n" in reason:
        return code
    click.echo(f"exec-server: cannot run {name} in its sandbox: {reason}", err=True)
    return NOT_FOUND_EXIT if reason == os.strerror(errno.ENOENT) else NOT_ALLOWED_EXIT


def _be_quiet_about_what_is_cancelled() -> None:
    """Ctrl-C may hit a connection just as it is made, of which asyncio 3.11 complains with a traceback."""
    loop, ourselves = asyncio.get_running_loop(), asyncio.current_task()

    def complain(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if ourselves is None or not ourselves.cancelling():
            loop.default_exception_handler(context)

    loop.set_exception_handler(complain)


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
