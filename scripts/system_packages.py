"""Install the system packages that the sandbox and its tests need, when that is allowed.

Run by `make setup`. With root, or sudo that asks for no password, Debian's package manager is used.
Otherwise, and when that fails, it says what is missing and what to type; the setup goes on, because
everything but the sandbox works without.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

PROGRAMS = {"bwrap": "bubblewrap"}
"""Which program comes in which package, by its name in most distributions."""

PATIENCE_SECONDS = 300


def main() -> None:
    missing = [package for program, package in PROGRAMS.items() if shutil.which(program) is None]
    if not missing or not sys.platform.startswith("linux"):
        return
    names = " ".join(missing)
    print(f"setup: installing the system package {names} (the sandbox needs it)", flush=True)
    why = _install(missing)
    if why is not None:
        print(
            f"setup: could not install {names}: {why}\n"
            f"setup: commands with a sandbox will be refused until it is there. Install it with your\n"
            f"setup: package manager, for example: sudo apt-get install {names}",
            file=sys.stderr,
        )


def _install(packages: list[str]) -> str | None:
    """None, or why it did not work."""
    if shutil.which("apt-get") is None:
        return "there is no apt-get on this machine"
    become_root = _become_root()
    if become_root is None:
        return "this user is not root, and sudo is missing or asks for a password"
    install = [*become_root, "apt-get", "install", "--yes", "--quiet", "--no-install-recommends", *packages]
    failure = _run(install)
    if failure is not None and _run([*become_root, "apt-get", "update", "--quiet"]) is None:
        failure = _run(install)  # the list of packages was old or empty
    return failure


def _become_root() -> list[str] | None:
    if os.geteuid() == 0:
        return []
    if shutil.which("sudo") is not None and _run(["sudo", "-n", "true"]) is None:
        return ["sudo", "-n"]
    return None


def _run(command: list[str]) -> str | None:
    """None if it worked, else the last thing it said."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    said = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return said[-1] if said else f"{command[0]} ended with status {done.returncode}"


if __name__ == "__main__":
    main()
