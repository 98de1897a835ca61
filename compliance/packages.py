"""Public programs from npm that are made for the reference or for a protocol, and are run against us.

They are kept beside the reference, each in a folder of its own, and installed when they are not there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

__all__ = ["INSPECTOR", "SDK", "TEST_DEADLINE", "Package"]

CACHE = "EXEC_SERVER_PACKAGES_CACHE"
"""Environment variable: the folder to keep them in."""

INSTALL_DEADLINE = 300
"""Seconds for npm; they are small, and the line may be slow."""

TEST_DEADLINE = INSTALL_DEADLINE + 60
"""Seconds for a test that may be the first to need one."""


class Package:
    """A package in one release: others may take other options, or say other things."""

    def __init__(self, name: str, version: str, entry: str) -> None:
        self.name = name
        self.version = version
        self._entry = entry

    def entry(self) -> Path:
        """Its entry point, installed first if need be. Fails the test with what to do if it cannot be."""
        base = os.environ.get(CACHE) or Path.home() / ".cache" / "exec-server"
        folder = Path(base).expanduser().absolute() / f"{self.name.rpartition('/')[2]}-{self.version}"
        entry = folder / "node_modules" / self.name / self._entry
        if not entry.exists():
            self._install(folder)
        if not entry.exists():
            pytest.fail(f"{self.name} {self.version} in {folder} has no {self._entry}; remove the folder")
        return entry

    def _install(self, folder: Path) -> None:
        npm = shutil.which("npm")
        wanted = f"{self.name}@{self.version}"
        if npm is None or shutil.which("node") is None:
            pytest.fail(
                f"{wanted} is not in {folder}, and there is no npm on the PATH to put it there. Install"
                f" Node.js with npm, or set {CACHE} to a folder that holds it"
            )
        # Optional dependencies are the reference's programs for every platform; none of them is needed.
        command = [
            npm,
            "install",
            "--prefix",
            str(folder),
            "--no-audit",
            "--no-fund",
            "--omit=optional",
            wanted,
        ]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=INSTALL_DEADLINE, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            pytest.fail(f"{wanted} could not be installed into {folder}: {error}")
        if done.returncode:
            pytest.fail(
                f"npm could not install {wanted} (exit status {done.returncode}). Check that it can reach its"
                f" registry, or set {CACHE} to a folder that holds it. npm said:\n{done.stderr.strip()}"
            )


SDK = Package("@openai/codex-sdk", "0.163.0", "dist/index.js")
"""The reference's TypeScript SDK: it starts a program by `exec --experimental-json` and reads its stream."""

INSPECTOR = Package("@modelcontextprotocol/inspector-cli", "0.16.8", "build/index.js")
"""The command line of the MCP inspector; the last release of which runs without the rest of it."""
