"""The command line. One file per command; this one decides which, and imports no other.

Serving is the default and must start fast, so it does not wait for the command-line library of the
other commands: its options are few and are read here and in serve.py.
"""

from __future__ import annotations

import sys

__all__ = ["main"]

COMMANDS = (
    "run",
    "ps",
    "fs",
    "env",
    "token",
    "doctor",
    "render",
    "rendezvous",
    "relay",
    "mcp",
    "exec",
    "help",
)


def main() -> None:
    """Entry point of the `exec-server` script."""
    arguments = sys.argv[1:]
    if arguments and arguments[0] in COMMANDS:
        quiet = _end_quietly_when_interrupted()
        from .commands import commands

        if quiet and arguments[0] != "run":
            _be_interrupted_as_usual()
        commands(prog_name="exec-server")
    elif arguments[:1] == ["forward"] or any(word.partition("=")[0] == "--remote" for word in arguments):
        from .relay import run as run_remote

        sys.exit(run_remote(arguments))
    else:
        from .serve import run

        sys.exit(run(arguments))


def _end_quietly_when_interrupted() -> bool:
    """Before a command runs, Ctrl-C is no more than that, and no reason to show where we were."""
    import os
    import signal

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return False
    signal.signal(signal.SIGINT, lambda number, _: os._exit(128 + number))
    return True


def _be_interrupted_as_usual() -> None:
    """`run` does so itself, when it has imported what it needs."""
    import signal

    signal.signal(signal.SIGINT, signal.default_int_handler)
