"""From a tool call to a request that can be started: shell, directory, variables, and who decided.

Approval and the choice of a sandbox are not made here. A `Prepare` function turns a direct request into a
prepared one, or refuses; what it returns is started exactly like that.
"""

from __future__ import annotations

import json
import posixpath
import re
import shutil
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Struct

from ..services import Environment, Process
from ..version import __version__
from ..wire.process import EnvPolicy, Metadata
from ..wire.sandbox import SandboxContext
from ..wire.uri import native_path, parse, path_to_uri

__all__ = [
    "Declined",
    "DirectExec",
    "ExecCommand",
    "ExecRequest",
    "Prepare",
    "PreparedExec",
    "ToolError",
    "WriteStdin",
    "about",
    "arguments",
    "command_line",
    "request_of",
    "start",
    "variables",
    "without_surrogates",
]

A = TypeVar("A", bound=Struct)

COMMAND_VARIABLES: Final = {
    "NO_COLOR": "1",
    "TERM": "dumb",
    "LANG": "C.UTF-8",
    "LC_CTYPE": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "COLORTERM": "",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "GH_PAGER": "cat",
    "CODEX_CI": "1",
}
"""What every command of a model gets: plain output, nothing that waits for a key."""

INHERIT: Final = EnvPolicy(
    inherit="all",
    ignore_default_excludes=True,
    exclude=[
        "CODEX_PERMISSION_PROFILE",
        "CODEX_VERSION",
        "CODEX_APPLY_PATCH_PRESERVE_LINE_ENDINGS",
        "CODEX_PLUGIN_METRICS_OUTPUT",
    ],
    set={},
    include_only=[],
)
"""The machine's own variables, without those that belong to a harness."""

_DRIVE: Final = re.compile(r"[A-Za-z]:[\\/]")


class ToolError(Exception):
    """A call that did not work. The text is for the model."""


class Declined(Exception):
    """A person or a rule refused the command; the text says why."""


# Arguments ---------------------------------------------------------------------------------------

Count = Annotated[int, msgspec.Meta(ge=0)]


class ExecCommand(Struct, frozen=True, kw_only=True):
    """Arguments of `exec_command`. The last four are for whoever decides whether it may run."""

    cmd: str
    workdir: str | None = None
    tty: bool = False
    yield_time_ms: Count | None = None
    max_output_tokens: Count | None = None
    shell: str | None = None
    login: bool | None = None
    environment_id: str | None = None
    sandbox_permissions: Any = None
    justification: str | None = None
    prefix_rule: Any = None
    additional_permissions: Any = None


class WriteStdin(Struct, frozen=True, kw_only=True):
    """Arguments of `write_stdin`. Without `chars` it only looks."""

    session_id: int
    chars: str = ""
    yield_time_ms: Count | None = None
    max_output_tokens: Count | None = None


def arguments(text: str | bytes, kind: type[A]) -> A:
    """The arguments a model wrote, which may be anything."""
    try:
        given = _decoded(text)
        unknown = given.keys() - set(kind.__struct_encode_fields__)
        if unknown:
            known = ", ".join(f"`{name}`" for name in kind.__struct_encode_fields__)
            named = ", ".join(f"`{name[:100]}`" for name in sorted(unknown)[:5])
            raise ToolError(f"failed to parse function arguments: there is no {named}, only {known}")
        return msgspec.convert(given, kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError) as error:
        raise ToolError(f"failed to parse function arguments: {error}") from None


def _decoded(text: str | bytes) -> dict[str, Any]:
    if not text.strip():
        raise ValueError("they are empty; expected a JSON object")
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError) as error:
        if isinstance(error, msgspec.ValidationError):
            raise
        # Half of a character is called a truncated input there. It has no place in a command either way.
        try:
            value = json.loads(text)
        except RecursionError:
            raise
        except ValueError:
            raise error from None
        whole = without_surrogates(value)
        if not isinstance(whole, dict):
            raise
        return whole


def without_surrogates(value: Any) -> Any:
    """The same with U+FFFD for every half of a character, which no UTF-8 can carry."""
    if isinstance(value, str):
        if value.isascii():
            return value
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [without_surrogates(one) for one in value]
    if isinstance(value, dict):
        return {without_surrogates(key): without_surrogates(one) for key, one in value.items()}
    return value


# Requests ----------------------------------------------------------------------------------------


class DirectExec(Struct, frozen=True, kw_only=True):
    """A command as it was asked for, with no policy applied: for what is trusted already."""

    argv: list[str]
    cwd: str
    """A `file:` URI of the machine."""
    env: dict[str, str]
    tty: bool = False
    arg0: str | None = None
    rows: int | None = None
    cols: int | None = None
    env_policy: EnvPolicy | None = msgspec.field(default_factory=lambda: INHERIT)
    """What is inherited from the machine; None for nothing."""
    metadata: Metadata | None = None
    """For which thread and which call it is."""

    def confined(self, sandbox: SandboxContext) -> PreparedExec:
        """The same command in a sandbox."""
        return PreparedExec(**{**msgspec.structs.asdict(self), "sandbox": sandbox})

    def final(self, variables: Mapping[str, str]) -> PreparedExec:
        """The same command with these variables under its own and none of the machine's.

        Nothing is left for the machine to decide, so a server takes it that takes only prepared starts.
        """
        env = {**variables, **self.env}
        return PreparedExec(**{**msgspec.structs.asdict(self), "env": env, "env_policy": None})


class PreparedExec(DirectExec, frozen=True, kw_only=True):
    """A command together with what policy decided for it; the machine enforces exactly that."""

    sandbox: SandboxContext | None = None

    @property
    def is_final(self) -> bool:
        """Whether the machine has nothing to add: what the protocol calls a prepared start."""
        return self.sandbox is None and self.env_policy is None


ExecRequest = DirectExec | PreparedExec

Prepare = Callable[[DirectExec, ExecCommand], Awaitable[ExecRequest]]
"""Approval, sandbox and network policy. Raises Declined if the command is not to run."""


async def start(environment: Environment, request: ExecRequest, process_id: str) -> Process:
    """Start exactly what was decided. A process without a terminal has no stdin, as in the reference."""
    return await environment.processes.start(
        request.argv,
        cwd=request.cwd,
        env=request.env,
        env_policy=request.env_policy,
        tty=request.tty,
        stdin=False,
        arg0=request.arg0,
        rows=request.rows if request.tty else None,
        cols=request.cols if request.tty else None,
        process_id=process_id,
        sandbox=request.sandbox if isinstance(request, PreparedExec) else None,
        spawn="prepared" if isinstance(request, PreparedExec) and request.is_final else None,
        metadata=request.metadata,
    )


def request_of(
    call: ExecCommand, environment: Environment, environment_id: str, env: dict[str, str], login_allowed: bool
) -> DirectExec:
    """What a call comes down to on a machine. Raises ToolError for what cannot be."""
    argv = command_line(call, environment, environment_id, login_allowed)
    return DirectExec(argv=argv, cwd=directory(call.workdir, environment.info.cwd), env=env, tty=call.tty)


def command_line(
    call: ExecCommand, environment: Environment, environment_id: str, login_allowed: bool
) -> list[str]:
    """The words to start: the machine's shell, or another if the call names one and the machine is here."""
    if call.login and not login_allowed:
        raise ToolError("login shell is disabled by config; omit `login` or set it to false.")
    login = login_allowed if call.login is None else call.login
    known = environment.info.shell
    if known is None and (environment.is_remote or not call.shell):
        raise ToolError(f"environment `{environment_id}` does not report a shell")
    path = known.path if known is not None else ""
    name = shell_name(known.name if known is not None else path)
    if call.shell:
        wanted = shell_name(call.shell)
        if not environment.is_remote:
            # One that is not installed is replaced by the machine's own, as in the reference: what a model
            # writes for zsh mostly runs in any shell.
            if known is None or shutil.which(call.shell) is not None:
                path, name = call.shell, wanted
        elif wanted != name:
            raise ToolError(f"environment `{environment_id}` only supports `{name}`")
    if name in ("powershell", "pwsh"):
        return [path, *([] if login else ["-NoProfile"]), "-Command", call.cmd]
    if name == "cmd":
        return [path, "/c", call.cmd]
    return [path, "-lc" if login else "-c", call.cmd]


def shell_name(path: str) -> str:
    """What kind of shell a path or a name is."""
    base = re.split(r"[\\/]", path)[-1].lower()
    return base.removesuffix(".exe")


def directory(workdir: str | None, cwd: str | None) -> str:
    """The directory of a command as a URI: `cwd`, which is one already, or relative to that."""
    cwd = cwd or "file:///"
    if not workdir:
        return cwd
    if workdir.startswith("file:"):
        return parse(workdir)
    foreign = _foreign_root(cwd)
    if foreign is not None:
        if _DRIVE.match(workdir):
            return parse("file:///" + workdir.replace("\\", "/"))
        rooted = workdir.startswith(("/", "\\"))
        base = foreign[: len("file:///C:")] if rooted else foreign.rstrip("/")
        return parse(f"{base}/{workdir.replace(chr(92), '/').lstrip('/')}")
    return path_to_uri(posixpath.normpath(posixpath.join(native_path(parse(cwd)), workdir)))


def _foreign_root(uri: str) -> str | None:
    """The URI itself if it names a directory of Windows."""
    return uri if re.match(r"file:///[A-Za-z]:(?:/|\Z)", uri) else None


def variables(
    thread_id: str | None, session_id: str | None, call_id: str, term: str | None
) -> dict[str, str]:
    """What is laid over the machine's own variables."""
    env = dict(COMMAND_VARIABLES)
    if term is not None:
        env["TERM"] = term
    if thread_id is not None:
        env["CODEX_THREAD_ID"] = thread_id
    if session_id is not None:
        env["CODEX_SESSION_ID"] = session_id
    env["CODEX_TOOL_CALL_ID"] = call_id
    env["CODEX_VERSION"] = __version__
    return env


def about(thread_id: str | None, call_id: str) -> Metadata | None:
    """The same for the machine itself: it takes the id of a call from nowhere else.

    A thread whose id is no UUID cannot be named there; its variable alone says it.
    """
    try:
        return Metadata(thread_id=thread_id, tool_call_id=call_id)
    except ValueError:
        return None
