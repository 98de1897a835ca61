"""Credentials leave the environment of a process, and what /proc shows of it."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, pathlib
from exec_server.local.process.own_credentials import take_credentials

taken = take_credentials()
assert taken == {"EXEC_SERVER_API_KEY": "esk_one", "CODEX_API_KEY": "esk_two", "EXEC_SERVER_TOKEN": ""}
assert "EXEC_SERVER_API_KEY" not in os.environ
seen = pathlib.Path("/proc/self/environ").read_bytes()
assert b"esk_" not in seen and b"OTHER=stays" in seen, seen
assert b"esk_" not in os.popen("env").read().encode()
assert take_credentials() == {}
print("done")
"""


def test_they_are_gone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={
            "PATH": "/usr/bin:/bin",
            "EXEC_SERVER_API_KEY": "esk_one",
            "OTHER": "stays",
            "CODEX_API_KEY": "esk_two",
            "EXEC_SERVER_TOKEN": "",
        },
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("done\n", "")
