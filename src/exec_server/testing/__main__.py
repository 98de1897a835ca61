"""`python -m exec_server.testing URL` or `… COMMAND ARGS`: check a server, print, exit 1 on failures."""

from __future__ import annotations

import asyncio
import sys

from ..client.errors import ExecServerError
from .conformance import check_server


def main() -> int:
    """Check what the command line names."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        sys.stderr.write("usage: python -m exec_server.testing URL | COMMAND [ARGS...]\n")
        return 2
    target = words[0] if len(words) == 1 and "://" in words[0] else words
    try:
        report = asyncio.run(check_server(target))
    except (ExecServerError, OSError, AssertionError) as error:
        sys.stderr.write(f"Error: the server could not even be talked to: {error}\n")
        return 1
    sys.stdout.write(f"{report}\n")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
