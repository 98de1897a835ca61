"""The relay with whole programs at both ends: an agent has a command print, and waits for all of it.

On one side `exec-server exec` and `exec-server --remote`, on the other `codex exec` and `codex exec-server
--remote`, as their users start them; the router in between is ours, and the model a script on loopback.
"""

import contextlib
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from compliance.harness import CLOSED_PORT, CONFIG
from compliance.model import Model, Turn, exec_command

from .client import WrongAnswer
from .deadline import SECONDS_PER_ROUND
from .relay import ENVIRONMENT_ID, Rendezvous, environment
from .server import Command
from .workloads import Effort

__all__ = ["open_stage"]

BYTES_PER_TOKEN = 4
"""How both agents count what they show the model only a part of."""

YIELD_MS = 30_000
"""The longest that an agent waits for a command before it lets the model speak."""


@contextlib.contextmanager
def open_stage(command: Command) -> Iterator[Callable[[Effort], tuple[float, ...]]]:
    """Bytes per second that arrive at the agent."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=command.environment["CODEX_HOME"])))
        rendezvous = stack.enter_context(Rendezvous(folder, command.log))
        stack.enter_context(environment(command, rendezvous))
        yield lambda effort: (_output(command, rendezvous, folder, effort.pipe_bytes),)


def _output(command: Command, rendezvous: Rendezvous, folder: Path, size: int) -> float:
    moments: list[float] = []

    def begin(_: Model) -> Turn:
        moments.append(time.perf_counter())
        return exec_command(f"head -c {size} /dev/zero", yield_time_ms=YIELD_MS, max_output_tokens=100)

    def end(_: Model) -> Turn:
        moments.append(time.perf_counter())
        return "done"

    with Model([exec_command("true"), begin, end]) as model:
        (folder / "config.toml").write_text(CONFIG.format(base_url=model.base_url))
        argv, more = _agent(command, rendezvous, folder)
        done = subprocess.run(
            argv,
            cwd=folder,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(folder),
                "CODEX_HOME": str(folder),
                **{f"{kind}_PROXY": CLOSED_PORT for kind in ("HTTP", "HTTPS", "ALL")},
                "NO_PROXY": "127.0.0.1",
                **more,
            },
            stdin=subprocess.DEVNULL,
            stdout=command.log,
            stderr=command.log,
            timeout=SECONDS_PER_ROUND,
            check=False,
        )
        if done.returncode or len(moments) != 2:
            raise WrongAnswer(f"the agent ended with {done.returncode} after {len(moments)} of 2 turns")
        said = model.results[-1].text
    tokens = re.search(r"^Original token count: (\d+)$", said, re.MULTILINE)
    if tokens is None:
        raise WrongAnswer(f"the agent does not say how much arrived: {said[:200]!r}")
    # Of what is printed faster than the reference reads it, some may be lost; what arrived counts.
    return int(tokens[1]) * BYTES_PER_TOKEN / (moments[1] - moments[0])


def _agent(command: Command, rendezvous: Rendezvous, folder: Path) -> tuple[list[str], dict[str, str]]:
    """What to run with a prompt, and its variables: the agent of the family the server is of."""
    options = ["--json", "--skip-git-repo-check", "-s", "danger-full-access"]
    if command.argv[-1] == "exec-server" and len(command.argv) > 1:
        relay = {
            "CODEX_EXEC_SERVER_NOISE_REGISTRY_URL": rendezvous.url,
            "CODEX_EXEC_SERVER_NOISE_ENVIRONMENT_ID": ENVIRONMENT_ID,
            "CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN": rendezvous.key,
        }
        return [*command.argv[:-1], "exec", *options, "-C", str(folder), "print"], relay
    token = folder / "token"
    token.write_text(rendezvous.key)
    token.chmod(0o600)
    url = ["--url", f"relay+{rendezvous.url}/{ENVIRONMENT_ID}", "--token-file", str(token)]
    return [*command.argv, "exec", *options, *url, "-C", str(folder), "print"], {}
