"""The server as somebody who may not do everything: root runs the tests, and to root nothing is denied."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from typing import Any

import pytest

__all__ = ["NOBODY", "as_nobody", "reachable_command"]

NOBODY = 65534
"""User and group without rights of their own."""

_MAIN = "import sys; sys.path[:0] = {path!r}; from exec_server.cli import main; main()"


@functools.cache
def reachable_command() -> list[str]:
    """The `exec-server` command through a Python that NOBODY may start and that finds our modules.

    The interpreter of these tests may lie in root's home; then the one of the system does. A machine with
    neither fails the test: what is denied to whom is not proven there.
    """
    # The standard library must be that of the interpreter that runs it.
    path = [entry for entry in sys.path if entry.endswith(("site-packages", "/src"))]
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    reasons = []
    for interpreter in (os.path.realpath(sys.executable), f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        command = [interpreter, "-c", _MAIN.format(path=path)]
        try:
            done = subprocess.run(
                [*command, "--version"],
                cwd="/",
                capture_output=True,
                text=True,
                timeout=20,
                check=False,
                **as_nobody(),
            )
        except OSError as error:
            reasons.append(f"{interpreter}: {error.strerror}")
            continue
        if done.returncode == 0:
            return command
        reasons.append(f"{interpreter}: {done.stderr.strip()[-200:]}")
    pytest.fail(f"no Python that user {NOBODY} can run the server with: {'; '.join(reasons)}")


def as_nobody() -> dict[str, Any]:
    """Options of subprocess that give up root; none when we are not root, and denied enough."""
    if os.getuid() != 0:
        return {}
    return {"user": NOBODY, "group": NOBODY, "extra_groups": []}
