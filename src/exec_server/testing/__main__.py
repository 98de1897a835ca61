"""`python -m exec_server.testing URL` or `… COMMAND ARGS`: check a server, print, exit 1 on failures."""

from __future__ import annotations

import asyncio
import sys

from .conformance import check_server


def main() -> int:
    """Check what the command line names."""
    words = sys.argv[1:]
    if not words:
        sys.stderr.write("usage: python -m exec_server.testing URL | COMMAND [ARGS...]\n")
        return 2
    target = words[0] if len(words) == 1 and "://" in words[0] else words
    report = asyncio.run(check_server(target))
    sys.stdout.write(f"{report}\n")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
