"""`python -m compliance [PYTEST OPTIONS]`: fetch the pinned reference, then run the compliance tests.

Ends with pytest's exit status, or with 2 and a sentence when there is no reference to comply with: a run
that could not test anything must not look like one that passed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGE = "@openai/codex"
"""The npm package of the reference."""

VERSION = "0.166.0"
"""The release everything here was observed on; another one may say other things."""

CACHE = "EXEC_SERVER_CODEX_CACHE"
"""Environment variable: the folder to keep the reference in."""

NATIVE = "node_modules/@openai/codex-*/vendor/*/bin/codex"
"""Where the package keeps the program itself. Its command is a Node script around it that starts slower."""

INSTALL_DEADLINE = 600
"""Seconds for npm: the program alone has 300 MB unpacked, and the line may be slow."""

EXIT_NO_REFERENCE = 2
"""Exit status when the reference could not be had."""


class NoReferenceError(Exception):
    """The reference is not here and could not be fetched; the text says why and what to do."""


def main(arguments: list[str]) -> int:
    """Run the tests with the reference; the exit status."""
    cache = Path(os.environ.get(CACHE) or Path.home() / ".cache" / "exec-server" / f"codex-{VERSION}")
    try:
        binary = ensure_reference(cache.expanduser().absolute())
    except NoReferenceError as error:
        print(f"compliance: {error}", file=sys.stderr)
        return EXIT_NO_REFERENCE
    here = Path(__file__).resolve().parent
    pytest = [sys.executable, "-m", "pytest", str(here), *arguments]
    return subprocess.run(
        pytest, cwd=here.parent, env=os.environ | {"EXEC_SERVER_REFERENCE": str(binary)}, check=False
    ).returncode


def ensure_reference(cache: Path) -> Path:
    """The reference's native binary in `cache`, installed first if it is not there."""
    if not native_binary(cache):
        install(cache)
    binary = native_binary(cache)
    if binary is None:
        raise NoReferenceError(
            f"{PACKAGE} {VERSION} is installed in {cache} but brought no program for this machine "
            f"({NATIVE}). Is the platform supported, and may npm install optional dependencies? "
            f"Remove {cache / 'node_modules'} to try again."
        )
    try:
        said = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise NoReferenceError(
            f"{binary} does not run: {error}. Remove {cache / 'node_modules'} to fetch it again."
        ) from error
    if said.split()[-1:] != [VERSION]:
        raise NoReferenceError(
            f"{binary} says it is {said.strip()!r}, but the pinned reference is {VERSION}. "
            f"Remove {cache / 'node_modules'} to fetch the right one."
        )
    return binary


def native_binary(cache: Path) -> Path | None:
    """The installed program; None if there is none."""
    return next(cache.glob(NATIVE), None)


def install(cache: Path) -> None:
    """Let npm put the reference into `cache`."""
    npm = shutil.which("npm")
    if npm is None:
        raise NoReferenceError(
            f"npm is not on the PATH, and the reference ({PACKAGE} {VERSION}) is not in {cache}. "
            f"Install Node.js with npm from your distribution, or set {CACHE} to a folder in which "
            f"`npm install --prefix FOLDER {PACKAGE}@{VERSION}` was run."
        )
    print(f"compliance: installing {PACKAGE} {VERSION} into {cache}", flush=True)
    command = [npm, "install", "--prefix", str(cache), "--no-audit", "--no-fund", f"{PACKAGE}@{VERSION}"]
    try:
        cache.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_DEADLINE, check=False)
    except OSError as error:
        raise NoReferenceError(f"{cache} cannot be used: {error}. Set {CACHE} to another folder.") from error
    except subprocess.TimeoutExpired:
        raise NoReferenceError(f"after {INSTALL_DEADLINE} s still running: {' '.join(command)}") from None
    if done.returncode:
        raise NoReferenceError(
            f"npm could not install {PACKAGE}@{VERSION} (exit status {done.returncode}). "
            f"Check that npm can reach its registry, or set {CACHE} to a folder that already holds it. "
            f"npm said:\n{done.stderr.strip()}"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
