"""`exec-server [--listen URL] …`: serve this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, Final

from .. import log
from ..limits import Limits
from ..transport.address import BadAddress, Listen, parse_listen
from ..version import __version__

__all__ = ["run"]

HELP: Final = """\
Run commands and touch files on this machine for somebody who is not on it.

Usage: exec-server [OPTIONS]
       exec-server COMMAND ...

Commands (each with --help):
  run      run one command, here or on a server, as if it ran in this terminal
  ps       list the processes of every session of a server
  fs       list, print, bring, fetch, remove and watch files, here or on a server
  env      list and check the environments that are configured, open a shell in one
  token    make capability tokens and signed bearer tokens
  doctor   say which sandbox this machine has, and how to get a better one
  render   show the event stream of a run: codex exec --json ... | exec-server render
  exec     let a model work on this machine or another one, and tell what it does
  mcp      offer this machine or another one to any MCP client
  rendezvous  run a registry and router through which machines behind a NAT are reached; make its keys
  relay    show and rotate the key under which this machine is known to a rendezvous
  forward  offer another server through a rendezvous (exec-server forward --help)

Offering this machine through a rendezvous, instead of listening:
  --remote URL --environment-id ID ...           (exec-server --remote --help)

Listening:
  --listen URL                 ws://IP:PORT (default ws://127.0.0.1:0), wss://IP:PORT, unix://PATH,
                               stdio, or off. The bound address is the first line of stdout.
  --tls-cert FILE, --tls-key FILE
                               certificate chain and key for wss://, read again on SIGHUP
  --exit-on-stdin-close        stop when stdin ends  [env: CODEX_EXEC_SERVER_EXIT_ON_STDIN_CLOSE]
  --hello                      say on stderr how to use the server

Who may connect:
  --ws-auth MODE               capability-token or signed-bearer-token
  --ws-token-file PATH         file that holds the capability token
  --ws-token-sha256 HEX        or the token's SHA-256
  --ws-shared-secret-file PATH secret of signed bearer tokens, at least 32 bytes
  --ws-issuer S, --ws-audience S
                               what a signed bearer token must say
  --ws-max-clock-skew-seconds N
                               how far clocks may be apart (default 30)
  --allow-origin ORIGIN        let pages of this origin connect (repeatable; default none)
  --insecure-no-auth           listen off loopback without authentication: anybody who can reach
                               the port can run commands as you

Limits:
  --concurrent-requests N      requests of one connection that may wait at once (default 1024)
  --detach-ttl SECONDS         how long a session without a connection is kept (default 30);
                               0: it ends with its connection, and with it its processes
  --retention SECONDS          how long a process that has ended can still be read (default 30);
                               0: it is forgotten at once
  --retain-output BYTES        newest output kept per process, at least 1 (default 1048576)
  --max-processes N            processes of one session at once (default no limit)
  --shutdown-grace SECONDS     between SIGTERM and SIGKILL at the end (default 0)
  --no-direct, --no-prepared   refuse starts of that kind

Other:
  --log-level LEVEL            debug, info, warning, error (default) or off
  --log-json                   log lines for machines
  --version, -h, --help
"""


class UsageError(Exception):
    """The command line itself is wrong; exit code 2."""


class _Options:
    """What was given."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origins: list[str] = []


def _positive(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise UsageError(f"invalid value '{text}' for '{name}': a whole number of at least 1 is needed")
    return int(text)


def _whole(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise UsageError(f"invalid value '{text}' for '{name}': a whole number is needed")
    return int(text)


def _seconds(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise UsageError(f"invalid value '{text}' for '{name}': a number of seconds is needed")
    return value


def _text(name: str, text: str) -> str:
    del name
    return text


def _one_of(*choices: str) -> Callable[[str, str], str]:
    def convert(name: str, text: str) -> str:
        if text not in choices:
            raise UsageError(f"invalid value '{text}' for '{name}' [possible values: {', '.join(choices)}]")
        return text

    return convert


VALUED: Final[dict[str, Callable[[str, str], Any]]] = {
    "--listen": _text,
    "--tls-cert": _text,
    "--tls-key": _text,
    "--ws-auth": _one_of("capability-token", "signed-bearer-token"),
    "--ws-token-file": _text,
    "--ws-token-sha256": _text,
    "--ws-shared-secret-file": _text,
    "--ws-issuer": _text,
    "--ws-audience": _text,
    "--ws-max-clock-skew-seconds": _whole,
    "--allow-origin": _text,
    "--concurrent-requests": _positive,
    "--detach-ttl": _seconds,
    "--retention": _seconds,
    "--retain-output": _positive,
    "--max-processes": _positive,
    "--shutdown-grace": _seconds,
    "--log-level": _one_of(*log.LEVELS),
}
FLAGS: Final = frozenset(
    (
        "--exit-on-stdin-close",
        "--hello",
        "--insecure-no-auth",
        "--no-direct",
        "--no-prepared",
        "--log-json",
    )
)


def run(arguments: list[str]) -> int:
    """Parse, serve, and give the exit code."""
    if any(argument in ("-h", "--help") for argument in arguments):
        sys.stdout.write(HELP)
        return 0
    if "--version" in arguments:
        sys.stdout.write(f"exec-server {__version__}\n")
        return 0
    try:
        options = _parse(arguments)
        exit_on_stdin_close = _exit_on_stdin_close(options)
    except UsageError as error:
        sys.stderr.write(f"error: {error}\n\nFor more information, try 'exec-server --help'.\n")
        return 2
    values = options.values
    log.configure(values.get("--log-level", "error"), "--log-json" in values)
    try:
        _serve(options, exit_on_stdin_close)
    except (BadAddress, _Refused) as error:
        sys.stderr.write(f"Error: {error}\n")
        return 1
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        sys.stderr.write(f"Error: {error.strerror or error}{where} (os error {error.errno})\n")
        return 1
    return 0


class _Refused(Exception):
    """The server will not start like this."""


def _serve(options: _Options, exit_on_stdin_close: bool) -> None:
    from ..local.process.own_credentials import take_credentials

    take_credentials()  # none of them is for us, and the commands that we run are not to find them
    values = options.values
    listen = parse_listen(values.get("--listen", "ws://127.0.0.1:0"))
    authenticator = None
    if any(name.startswith("--ws-") for name in values):
        authenticator = _authenticator(values, listen)
    _check_exposure(listen, authenticator is not None, values)
    from ..server.serve import ServeError, serve

    try:
        serve(_serve_options(options, listen, authenticator, exit_on_stdin_close))
    except ServeError as error:
        raise _Refused(str(error)) from None


def _serve_options(options: _Options, listen: Listen, authenticator: Any, exit_on_stdin_close: bool) -> Any:
    from ..server.serve import ServeOptions

    values = options.values
    return ServeOptions(
        listen=listen,
        limits=_limits(values),
        authenticator=authenticator,
        allowed_origins=frozenset(options.origins),
        tls_cert=values.get("--tls-cert"),
        tls_key=values.get("--tls-key"),
        exit_on_stdin_close=exit_on_stdin_close,
        hello="--hello" in values,
    )


def _authenticator(values: dict[str, Any], listen: Listen) -> Any:
    from ..server.auth import ConfigError, Settings, authenticator

    if listen.kind == "stdio" and "--ws-auth" in values:
        raise _Refused("WebSocket auth requires a WebSocket listener, not stdio")
    try:
        return authenticator(
            Settings(
                mode=values.get("--ws-auth"),
                token_file=values.get("--ws-token-file"),
                token_sha256=values.get("--ws-token-sha256"),
                shared_secret_file=values.get("--ws-shared-secret-file"),
                issuer=values.get("--ws-issuer"),
                audience=values.get("--ws-audience"),
                max_clock_skew_seconds=values.get("--ws-max-clock-skew-seconds"),
            )
        )
    except ConfigError as error:
        raise _Refused(str(error)) from None


def _check_exposure(listen: Listen, authenticated: bool, values: dict[str, Any]) -> None:
    if listen.kind == "wss" and not ("--tls-cert" in values and "--tls-key" in values):
        raise _Refused("`wss://` needs `--tls-cert` and `--tls-key`")
    if listen.kind != "wss" and ("--tls-cert" in values or "--tls-key" in values):
        raise _Refused("`--tls-cert` and `--tls-key` need a `wss://` address to `--listen` on")
    if listen.kind not in ("ws", "wss") or listen.is_loopback or authenticated:
        return
    if "--insecure-no-auth" not in values:
        raise _Refused(
            f"refusing to start non-loopback websocket listener {listen.host}:{listen.port} without auth;"
            " configure `--ws-auth capability-token` or `--ws-auth signed-bearer-token`"
            " (`exec-server token` makes tokens; `--insecure-no-auth` overrides)"
        )


def _limits(values: dict[str, Any]) -> Limits:
    settings = {
        "waiting_requests": values.get("--concurrent-requests"),
        "detach_ttl": values.get("--detach-ttl"),
        "retention": values.get("--retention"),
        "retained_output": values.get("--retain-output"),
        "max_processes": values.get("--max-processes"),
        "shutdown_grace": values.get("--shutdown-grace"),
    }
    return Limits(
        **{name: value for name, value in settings.items() if value is not None},
        allow_direct="--no-direct" not in values,
        allow_prepared="--no-prepared" not in values,
    )


def _parse(arguments: list[str]) -> _Options:
    options = _Options()
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name in FLAGS and not equals:
            options.values[name] = True
        elif name in VALUED:
            if not equals:
                given = next(rest, None)
                if given is None:
                    raise UsageError(f"a value is required for '{name}' but none was supplied")
                value = given
            converted = VALUED[name](name, value)
            if name == "--allow-origin":
                options.origins.append(converted)
            elif name in options.values:
                raise UsageError(f"the argument '{name}' cannot be used multiple times")
            else:
                options.values[name] = converted
        else:
            raise UsageError(f"unexpected argument '{argument}' found")
    return options


def _exit_on_stdin_close(options: _Options) -> bool:
    name = "CODEX_EXEC_SERVER_EXIT_ON_STDIN_CLOSE"
    variable = os.environ.get(name)
    if variable not in (None, "true", "false"):
        raise UsageError(f"invalid value '{variable}' for {name} [possible values: true, false]")
    return "--exit-on-stdin-close" in options.values or variable == "true"
