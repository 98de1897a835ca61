"""A tool server as a process: its stdin and stdout as a transport of the vendor's client, and its last words.

The vendor's own transport prints a traceback for every line that is no message, collects a line without an
end, and does not say how the process ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from .. import log
from .exec import without_surrogates

__all__ = ["ServerProcess"]

BLOCK_BYTES: Final = 64 * 1024

MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
"""Longest message of a server; one that goes on without an end is not waited for."""

LAST_WORDS_BYTES: Final = 4096
"""How much is kept of what a server prints on stderr, from its end."""

LAST_WORDS_LINES: Final = 3

FLUSH_SECONDS: Final = 0.5
"""How long what was sent may take to leave before stdin is closed."""

END_SECONDS: Final = 2.0
"""How long a server gets to end by itself, and after each signal."""

POLL_SECONDS: Final = 0.01
"""`wait()` of asyncio also waits for pipes that others hold open; so the exit is looked for."""


class ServerProcess:
    """A server that is started by a command. `connected` is the transport; then it can say how it ended."""

    def __init__(
        self,
        command: str,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> None:
        self._command = [command, *args]
        self._env = dict(env or {})
        self._cwd = cwd
        self._own_exit: int | None = None
        self._last_words = bytearray()

    def how_it_ended(self) -> str | None:
        """The exit code and what it said last; None if it did not end by itself."""
        code = self._own_exit
        if code is None:
            return None
        text = f"it was killed by signal {-code}" if code < 0 else f"it exited with code {code}"
        lines = [line.strip() for line in self._last_words.decode("utf-8", "replace").splitlines()]
        said = "; ".join([line for line in lines if line][-LAST_WORDS_LINES:])
        return f"{text}, saying: {said}" if said else text

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Any]:
        """The process, running; the streams of messages from it and to it."""
        import anyio
        from mcp.client.stdio import get_default_environment

        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=get_default_environment() | self._env,
            cwd=self._cwd,
            start_new_session=sys.platform != "win32",
        )
        heard, incoming = anyio.create_memory_object_stream[Any](0)
        outgoing, to_say = anyio.create_memory_object_stream[Any](0)
        tasks = [
            asyncio.ensure_future(self._listen(process, heard)),
            asyncio.ensure_future(self._keep_last_words(process)),
        ]
        speaking = asyncio.ensure_future(self._speak(process, to_say, heard))
        try:
            yield incoming, outgoing
        finally:
            self._own_exit = process.returncode
            with anyio.CancelScope(shield=True):
                outgoing.close()
                await asyncio.wait([speaking], timeout=FLUSH_SECONDS)
                await _end(process)
                # Something else that it has started may hold its pipes; here they are at their end.
                transport = getattr(process, "_transport", None)
                if transport is not None:
                    transport.close()
                for task in (*tasks, speaking):
                    task.cancel()
                await asyncio.gather(*tasks, speaking, return_exceptions=True)
                for stream in (heard, incoming, outgoing, to_say):
                    stream.close()

    async def _listen(self, process: asyncio.subprocess.Process, heard: Any) -> None:
        import anyio

        stdout: Any = process.stdout
        line = bytearray()
        try:
            async with heard:
                while block := await stdout.read(BLOCK_BYTES):
                    *whole, rest = block.split(b"\n")
                    for piece in whole:
                        message = _understood(bytes(line) + piece)
                        line.clear()
                        if message is not None:
                            await heard.send(message)
                    line += rest
                    if len(line) > MAX_MESSAGE_BYTES:
                        log.warning(
                            "an MCP server talks without an end; it is given up", command=self._command[0]
                        )
                        return
                # How it ended is asked for as soon as the stream ends.
                await _ended(process, END_SECONDS)
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            pass  # nobody listens any more
        finally:
            with suppress(OSError):
                while await stdout.read(BLOCK_BYTES):
                    pass  # a server that cannot get rid of its output cannot end

    async def _keep_last_words(self, process: asyncio.subprocess.Process) -> None:
        stderr: Any = process.stderr
        while block := await stderr.read(BLOCK_BYTES):
            self._last_words += block
            del self._last_words[:-LAST_WORDS_BYTES]

    async def _speak(self, process: asyncio.subprocess.Process, to_say: Any, heard: Any) -> None:
        stdin: Any = process.stdin
        try:
            async with to_say:
                async for message in to_say:
                    text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                    stdin.write(text.encode("utf-8", "replace") + b"\n")
                    await stdin.drain()
        except OSError:
            await _ended(process, END_SECONDS)
            heard.close()  # so that whoever waits for an answer learns that there will be none


def _understood(line: bytes) -> Any:
    """A line as a message; None for what is none, which servers that log to stdout say."""
    import mcp_types as types
    from mcp.shared.message import SessionMessage

    text = line.decode("utf-8", "replace").strip()
    if not text:
        return None
    try:
        return SessionMessage(types.jsonrpc_message_adapter.validate_json(text, by_name=False))
    except ValueError:
        pass
    try:
        value = without_surrogates(json.loads(text))
        return SessionMessage(types.jsonrpc_message_adapter.validate_python(value, by_name=False))
    except (ValueError, RecursionError):
        log.debug("an MCP server said what is no message", line=text[:200])
        return None


async def _ended(process: asyncio.subprocess.Process, seconds: float) -> bool:
    deadline = asyncio.get_running_loop().time() + seconds
    while process.returncode is None:
        if asyncio.get_running_loop().time() >= deadline:
            return False
        await asyncio.sleep(POLL_SECONDS)
    return True


async def _end(process: asyncio.subprocess.Process) -> None:
    """As the protocol asks for: stdin is closed, and who does not go by that is ended with all it started."""
    if process.stdin is not None:
        process.stdin.close()
    for number in (signal.SIGTERM, signal.SIGKILL):
        if await _ended(process, END_SECONDS):
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
    if not await _ended(process, END_SECONDS):
        log.warning("an MCP server cannot be ended", pid=process.pid)
