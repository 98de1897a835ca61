"""Starting the real `exec-server` command, and stopping it with care."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from types import TracebackType
from typing import IO, Any, Self

__all__ = ["COMMAND", "RunningServer", "fail_to_start", "server_environment"]

COMMAND = os.path.join(os.path.dirname(sys.executable), "exec-server")
"""The installed script."""


def server_environment(**more: str) -> dict[str, str]:
    """Ours, without what would change how the server behaves."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CODEX_")}
    return {**kept, **more}


class RunningServer:
    """A server that listens. Leaving the context ends it and looks at how it ended."""

    def __init__(
        self,
        *arguments: str,
        listen: str = "ws://127.0.0.1:0",
        env: dict[str, str] | None = None,
        command: Sequence[str] = (COMMAND,),
        **options: Any,
    ) -> None:
        """`command` starts it otherwise than by the script, `options` are subprocess.Popen's."""
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the server
        self.process = subprocess.Popen(
            [*command, "--listen", listen, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=server_environment(**(env or {})),
            **options,
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().decode().rstrip("\n") if listen != "off" else ""
        if listen != "off" and not self.url:
            self.process.wait(10)
            raise AssertionError(f"the server did not start: {self.errors()}")

    @property
    def pid(self) -> int:
        return self.process.pid

    def errors(self) -> str:
        """Everything on stderr so far."""
        self._errors.seek(0)
        return self._errors.read().decode()

    def end(self, number: int = signal.SIGTERM) -> int:
        """Signal it and give its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(20)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self.process.stdout is not None
        assert self.process.stdin is not None
        ended_before = self.process.poll() is not None
        try:
            code = self.end()
        except subprocess.TimeoutExpired:
            code = self.end(signal.SIGKILL)
        rest = self.process.stdout.read()
        errors = self.errors() if code != -signal.SIGKILL or ended_before else "the server had to be killed"
        self.process.stdout.close()
        self.process.stdin.close()
        self._errors.close()
        if kind is None:
            assert rest == b"", "nothing but the URL belongs on stdout"
            assert errors == "", errors
            assert ended_before or code == 0


def fail_to_start(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a server that does not start."""
    done = subprocess.run(
        [COMMAND, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=20,
        env=server_environment(**(env or {})),
        check=False,
    )
    return done.returncode, done.stdout, done.stderr
