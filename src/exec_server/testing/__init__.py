"""The public conformance kit: put any server of this protocol through its paces.

    report = await check_server("ws://127.0.0.1:36041")      # a running server
    report = await check_server(["my-server", "--listen", "stdio"])
    report.raise_for_failures()

Or from the shell: `python -m exec_server.testing URL-or-command`.
"""

from __future__ import annotations

from .clock import ManualLoop
from .conformance import Report, check_server

__all__ = ["ManualLoop", "Report", "check_server"]
