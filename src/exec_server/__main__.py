"""`python -m exec_server`: the same as the `exec-server` command."""

from __future__ import annotations

from .cli import main

if __name__ == "__main__":
    main()
