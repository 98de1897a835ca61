"""Where the reference's native binary is. `make compliance` puts it there."""

import os
from pathlib import Path

__all__ = ["find_reference"]

CACHE = Path("~/.cache/exec-server/codex-0.166.0")
NATIVE = "node_modules/@openai/codex-*/vendor/*/bin/codex"
"""Inside an npm prefix. The launcher `codex` is a node script that would be timed with it."""


def find_reference() -> str:
    """The path of the binary; `SystemExit` with what to do when there is none."""
    if named := os.environ.get("EXEC_SERVER_REFERENCE"):
        if not os.access(named, os.X_OK):
            raise SystemExit(f"EXEC_SERVER_REFERENCE is {named}, which cannot be executed")
        return named
    cache = CACHE.expanduser()
    for path in sorted([*cache.glob(NATIVE), *cache.glob("lib/" + NATIVE)]):
        if os.access(path, os.X_OK):
            return str(path)
    raise SystemExit(
        f"No reference to compare with in {cache}.\n"
        "`make compliance` installs it; or set EXEC_SERVER_REFERENCE to the native `codex` 0.166.0,\n"
        "or give the whole command: python -m benchmarks --reference '/path/to/codex exec-server'"
    )
