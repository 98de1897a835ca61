"""The public conformance kit: put any server of this protocol, or any environment, through its paces.

    report = await check_server("ws://127.0.0.1:36041")      # a running server
    report = await check_server(["my-server", "--listen", "stdio"])
    report = await check_environment(lambda: exec_server.connect("ws://127.0.0.1:36041"))
    report.raise_for_failures()

Or from the shell: `python -m exec_server.testing URL-or-command`. `faults` breaks connections as told;
`ManualLoop` and `StillLoop` are loops whose time moves when a test says so.
"""

from __future__ import annotations

from .clock import ManualLoop
from .conformance import Report, check_server
from .environment import check_environment
from .faults import Faults
from .still import StillLoop

__all__ = ["Faults", "ManualLoop", "Report", "StillLoop", "check_environment", "check_server"]
