"""A server of our own: started beside us, not under our terminal, and gone when we are."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

import exec_server
from exec_server import ConnectionLost, ExecServerError, ExecServerLaunchCommand, ProtocolError, log
from exec_server.client import launch as module
from exec_server.client.launch import launch
from support.machine import gone, sleep_forever, stat
from support.server import COMMAND


def test_it_has_a_group_of_its_own_and_ends_with_its_input() -> None:
    async def main() -> None:
        server = launch(ExecServerLaunchCommand(program=COMMAND, args=["--listen", "stdio"]))
        assert stat(server.pid).group == server.pid != os.getpgrp()
        os.close(server._write_fd)
        await server.stop()
        os.close(server._read_fd)
        assert server._server.returncode == 0
        await server.stop()  # again: nothing to do

    asyncio.run(main())


@pytest.mark.parametrize("trap", ["", "trap '' TERM;"])
def test_one_that_does_not_end_is_told_to_and_then_killed(trap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole group goes, whatever the command was a wrapper of."""
    monkeypatch.setattr(module, "STOP_SECONDS", 0.2)
    marker = sleep_forever()

    async def main() -> int:
        script = f"{trap} sleep {marker} & {trap} sleep {marker}; wait"
        server = launch(ExecServerLaunchCommand(program="/bin/sh", args=["-c", script]))
        os.close(server._read_fd)
        os.close(server._write_fd)
        await server.stop()
        return int(server._server.returncode)

    assert asyncio.run(main()) in (-15, -9, 143)
    gone(marker)


def test_without_the_help_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")

    async def main() -> None:
        async with exec_server.connect() as machine:
            assert (await machine.run(["echo", "x"])).stdout == b"x\n"

    began = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - began < 20


def test_variables_and_directory(tmp_path: Path) -> None:
    async def main() -> None:
        command = ExecServerLaunchCommand(
            program=COMMAND,
            args=["--listen", "stdio"],
            env={"PATH": os.environ["PATH"], "ONLY": "this"},
            cwd=str(tmp_path),
        )
        async with exec_server.connect(command) as machine:
            done = await machine.run(["sh", "-c", "pwd; echo $ONLY ${HOME:-nowhere}"])
            assert done.stdout.decode() == f"{tmp_path}\nthis nowhere\n"
            assert machine.address == f"{COMMAND} --listen stdio"

    asyncio.run(main())


def test_what_cannot_be_started() -> None:
    with pytest.raises(ExecServerError, match=r"failed to spawn exec-server: .*No such file"):
        launch(ExecServerLaunchCommand(program="/no/such/server"))


def test_what_a_server_complains_about_is_in_the_debug_log_only(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(log, "debug", lambda event, **details: said.append(details["line"]))
    script = (
        f"echo one >&2; printf 'two\\033[31m\\n\\nthr' >&2; printf ee >&2; exec '{COMMAND}' --listen stdio"
    )

    async def main() -> None:
        async with exec_server.connect(["/bin/sh", "-c", script]) as machine:
            assert (await machine.run(["echo", "x"])).stdout == b"x\n"
            assert said == ["one", "two\\x1b[31m"]

    asyncio.run(main())
    assert said == ["one", "two\\x1b[31m", "three"], "also what had no end"
    assert capfd.readouterr() == ("", "")


def test_much_and_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(log, "debug", lambda event, **details: said.append(details["line"]))

    async def main() -> None:
        script = "head -c 1000000 /dev/zero | tr '\\0' x >&2"
        server = launch(ExecServerLaunchCommand(program="/bin/sh", args=["-c", script]))
        os.close(server._read_fd)
        os.close(server._write_fd)
        while sum(map(len, said)) < 900_000:  # the rest comes with the end
            await asyncio.sleep(0.01)
        await server.stop()
        assert len(server.last_words) < 2000

    asyncio.run(main())
    assert sum(map(len, said)) == 1_000_000
    assert max(map(len, said)) <= module.LINE_BYTES


@pytest.mark.parametrize(
    ("script", "error", "text"),
    [
        ("exit 1", ConnectionLost, "exec-server transport disconnected"),
        ("echo not a message; cat", ConnectionLost, "the server sent something that is not a message"),
        ('echo \'{"id":1,"result":[]}\'; cat', ProtocolError, "the answer to `initialize` is not"),
        ("cat > /dev/null", TimeoutError, "timed out waiting for exec-server"),
    ],
)
def test_a_server_that_does_not_start_has_the_last_word(
    script: str, error: type[Exception], text: str
) -> None:
    complaints = "; ".join(f"echo line {number} >&2" for number in range(1, 9))

    async def main() -> None:
        with pytest.raises(error) as caught:
            await exec_server.connect(["/bin/sh", "-c", f"{complaints}; {script}"], initialize_timeout=2)
        assert text in str(caught.value)
        assert str(caught.value).endswith("; the last it said: line 4 | line 5 | line 6 | line 7 | line 8")

    asyncio.run(main())


def test_what_a_server_has_left_running_is_not_waited_for() -> None:
    marker = sleep_forever()

    async def main() -> None:
        server = launch(
            ExecServerLaunchCommand(program="/bin/sh", args=["-c", f"sleep {marker} & echo x >&2"])
        )
        os.close(server._read_fd)
        os.close(server._write_fd)
        await server.stop()
        assert server.last_words == "x"
        os.killpg(server.pid, signal.SIGKILL)

    asyncio.run(main())
    gone(marker)
