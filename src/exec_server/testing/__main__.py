"""`python -m exec_server.testing URL` or `… COMMAND ARGS`: check a server, print, exit 1 on failures."""

from __future__ import annotations

import asyncio
import shlex
import sys
from typing import Final

from ..client.errors import ExecServerError
from .conformance import check_server

HELP: Final = """\
Check whether a server keeps the protocol: every promise is tried, and what came of it printed.

Usage: python -m exec_server.testing URL
       python -m exec_server.testing COMMAND [ARGS...]

URL is ws://HOST:PORT, wss://HOST:PORT, unix://PATH, or stdio:COMMAND for a server that is started
and spoken to through its stdin and stdout; COMMAND with its words says the same.

Exit code: 0 if everything that the server offers works, 1 if something does not, 2 if the question was wrong.
"""


def main() -> int:
    """Check what the command line names."""
    words = sys.argv[1:]
    if words and words[0] in ("-h", "--help"):
        sys.stdout.write(HELP)
        return 0
    try:
        target = _target(words)
    except ValueError as error:
        sys.stderr.write(f"Error: {error}; see python -m exec_server.testing --help\n")
        return 2
    try:
        report = asyncio.run(check_server(target))
    except (ExecServerError, OSError, AssertionError) as error:
        sys.stderr.write(f"Error: the server could not even be talked to: {error}\n")
        return 1
    sys.stdout.write(f"{report}\n")
    return 1 if report.failures else 0


def _target(words: list[str]) -> str | list[str]:
    """An address, or the words of a command. Raises ValueError."""
    if len(words) == 1 and words[0].startswith("stdio:"):
        words = shlex.split(words[0].removeprefix("stdio:").removeprefix("//"))
    elif len(words) == 1 and "://" in words[0]:
        return words[0]
    if not words:
        raise ValueError("no server is named")
    return words


if __name__ == "__main__":
    sys.exit(main())
