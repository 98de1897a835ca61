"""The command line. One file per command; this one decides which, and imports no other.

Serving is the default and must start fast, so it does not wait for the command-line library of the
other commands: its options are few and are read here and in serve.py.
"""

from __future__ import annotations

import sys

__all__ = ["main"]

COMMANDS = ("run", "ps", "fs", "token", "help")


def main() -> None:
    """Entry point of the `exec-server` script."""
    arguments = sys.argv[1:]
    if arguments and arguments[0] in COMMANDS:
        from .commands import commands

        commands(prog_name="exec-server")
    else:
        from .serve import run

        sys.exit(run(arguments))
