"""`python -m exec_server`: the same as the `exec-server` command."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Python puts the current directory first. That is somebody's project: what lies there is not imported.
    sys.path[:] = [place for place in sys.path if place not in ("", os.getcwd())]

    from .cli import main

    main()
