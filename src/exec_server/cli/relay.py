"""`exec-server --remote …` and `exec-server forward …`: this machine, offered through a rendezvous."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from .. import log
from . import serve

if TYPE_CHECKING:
    from ..server.server import Server
    from ..transport.channel import Channel, Receiver

__all__ = ["run"]

HELP: Final = """\
Offer this machine to others through a rendezvous, encrypted end to end.

Usage: exec-server --remote URL --environment-id ID [OPTIONS]
       exec-server forward --connect ws://HOST:PORT --remote URL --environment-id ID [OPTIONS]

  --remote URL                 base URL of the registry; several nodes of one service separated by commas
  --environment-id ID          the name others connect to: relay+URL/ID
  --connect URL                (forward) pass every stream on to this WebSocket server instead of serving it
  --name NAME                  accepted for the reference's sake; it is sent nowhere
  --api-key-file PATH          the registry's key, in a file that nobody else can read
  --key-file PATH              this machine's identity, made on first use
                               (default ~/.local/state/exec-server/relay/ID.key)
  --trusted-harnesses FILE     let nobody in whose key is not listed here, whatever the registry says;
                               one fingerprint per line (exec-server relay key show)
  --relay-acks auto|off        repeat what was lost, where the other end can, too (default auto)
  --executor-credential-stdin  read tokens from stdin, one JSON object per line:
                               {"version":1,"environment_id":ID,"token":T,"expires_at":SECONDS}
  --use-agent-identity-auth    sign calls with the key in CODEX_ACCESS_TOKEN, for a task that is registered at
                               CODEX_AGENT_IDENTITY_AUTHAPI_BASE_URL, or for EXEC_SERVER_AGENT_TASK_ID
  --remote-transport noise|direct
                               direct: a WebSocket without relay and Noise, signed for AWS; needs --aws-sigv4
  --aws-sigv4, --aws-profile NAME, --aws-region NAME, --aws-service NAME (default execute-api)
  --exit-on-stdin-close        stop when stdin ends  [env: CODEX_EXEC_SERVER_EXIT_ON_STDIN_CLOSE]
  --ca-file PATH               certificate authority of the rendezvous, where the system does not know it
  --log-level LEVEL, --log-json
  and the limits of `exec-server --help`: --concurrent-requests, --detach-ttl, --retention,
  --retain-output, --max-processes, --shutdown-grace, --no-direct, --no-prepared

Without --api-key-file the registry's key is taken from EXEC_SERVER_API_KEY or CODEX_API_KEY; either way
no command sees it in its environment.
Make one where the rendezvous runs: exec-server rendezvous key add NAME --environment ID

SIGHUP: take the keys that are in the files now; streams that are open go on.
"""

_VALUED: Final = {
    "--remote": serve._text,
    "--environment-id": serve._text,
    "--connect": serve._text,
    "--name": serve._text,
    "--api-key-file": serve._text,
    "--key-file": serve._text,
    "--relay-acks": serve._one_of("auto", "off"),
    "--remote-transport": serve._one_of("noise", "direct"),
    "--ca-file": serve._text,
    "--aws-profile": serve._text,
    "--aws-region": serve._text,
    "--aws-service": serve._text,
    "--trusted-harnesses": serve._text,
} | {
    name: convert
    for name, convert in serve.VALUED.items()
    if not name.startswith(("--listen", "--tls", "--ws", "--allow"))
}
_FLAGS: Final = (serve.FLAGS - {"--hello", "--insecure-no-auth"}) | {
    "--executor-credential-stdin",
    "--use-agent-identity-auth",
    "--aws-sigv4",
}


def run(arguments: list[str]) -> int:
    """Parse, serve, and give the exit code."""
    if any(argument in ("-h", "--help") for argument in arguments):
        sys.stdout.write(HELP)
        return 0
    try:
        forward = arguments[:1] == ["forward"]
        values = _parse(arguments[forward:])
        _check(values, forward)
    except serve.UsageError as error:
        sys.stderr.write(f"error: {error}\n\nFor more information, try 'exec-server --remote --help'.\n")
        return 2
    log.configure(values.get("--log-level", "error"), "--log-json" in values)
    try:
        from ..relay.run import RunFailed, RunOptions, run_environment
    except ImportError as error:
        sys.stderr.write(
            f"Error: the relay needs more than is installed ({error}); install `exec-server[relay]`\n"
        )
        return 1
    from ..local.process import descriptors
    from ..local.process.own_credentials import take_credentials
    from ..server.server import Server

    secrets = take_credentials()
    descriptors.hide_inherited()
    limits = serve._limits(values)
    options = RunOptions(
        registry_url=values["--remote"],
        environment_id=values["--environment-id"],
        key_file=values.get("--key-file"),
        secrets=secrets,
        api_key_file=values.get("--api-key-file"),
        forward=values.get("--connect"),
        acks=values.get("--relay-acks", "auto") == "auto",
        credential_stdin="--executor-credential-stdin" in values,
        agent_identity="--use-agent-identity-auth" in values,
        exit_on_stdin_close=values["exit"],
        ca_file=values.get("--ca-file"),
        trusted_harnesses=values.get("--trusted-harnesses"),
        direct=values.get("--remote-transport") == "direct",
        aws_profile=values.get("--aws-profile"),
        aws_region=values.get("--aws-region"),
        aws_service=values.get("--aws-service", "execute-api"),
    )
    try:
        run_environment(options, lambda loop: _Served(Server(loop, limits)))
    except RunFailed as error:
        sys.stderr.write(f"Error: {log.escaped(str(error))}\n")
        return 1
    return 0


class _Served:
    """A server, as far as the relay needs to know it."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.accept: Callable[[Channel], Receiver] = server.accept

    def end(self, then: Callable[[], object]) -> None:
        self._server.sessions.end_all(then)

    def close(self) -> None:
        self._server.close()


def _check(values: dict[str, Any], forward: bool) -> None:
    for name in ("--remote", "--environment-id") + (("--connect",) if forward else ()):
        if not values.get(name, "").strip():
            raise serve.UsageError(f"the following required argument was not provided: {name}")
    if "--connect" in values and not forward:
        raise serve.UsageError("'--connect' belongs to `exec-server forward`")
    direct = values.get("--remote-transport") == "direct"
    if direct and "--aws-sigv4" not in values:
        raise serve.UsageError("'--remote-transport direct' requires '--aws-sigv4'")
    if direct and (forward or "--executor-credential-stdin" in values):
        raise serve.UsageError("'--remote-transport direct' neither forwards nor takes credentials on stdin")
    if not direct and any(name.startswith("--aws-") for name in values):
        raise serve.UsageError("'--aws-…' belongs to '--remote-transport direct'")
    ways = [
        name
        for name in ("--api-key-file", "--executor-credential-stdin", "--use-agent-identity-auth")
        if name in values
    ]
    if len(ways) > 1:
        raise serve.UsageError(f"'{ways[0]}' and '{ways[1]}' exclude each other")
    if direct and "--api-key-file" in values:
        raise serve.UsageError("'--remote-transport direct' signs for AWS and takes no '--api-key-file'")


def _parse(arguments: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name in _FLAGS and not equals:
            values[name] = True
        elif name == "--listen":
            raise serve.UsageError("the argument '--listen' cannot be used with '--remote'")
        elif name in _VALUED:
            if not equals:
                given = next(rest, None)
                if given is None:
                    raise serve.UsageError(f"a value is required for '{name}' but none was supplied")
                value = given
            if name in values:
                raise serve.UsageError(f"the argument '{name}' cannot be used multiple times")
            values[name] = _VALUED[name](name, value)
        else:
            raise serve.UsageError(f"unexpected argument '{argument}' found")
    variable = os.environ.get("CODEX_EXEC_SERVER_EXIT_ON_STDIN_CLOSE")
    if variable not in (None, "true", "false"):
        raise serve.UsageError(f"invalid value '{variable}' for CODEX_EXEC_SERVER_EXIT_ON_STDIN_CLOSE")
    values["exit"] = "--exit-on-stdin-close" in values or variable == "true"
    return values
