"""From an address to an environment."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import exec_server
from exec_server import Environment, ExecServerError
from exec_server.client.recovery import State
from exec_server.environments.connect import IN_PROCESS
from support.machine import running, sleep_forever
from support.server import COMMAND, RunningServer


@pytest.mark.parametrize(
    ("target", "address", "remote"),
    [
        (None, "this machine", False),
        (IN_PROCESS, IN_PROCESS, False),
        ([COMMAND, "--listen", "stdio"], f"{COMMAND} --listen stdio", True),
        (f"stdio:{COMMAND} --listen stdio", f"{COMMAND} --listen stdio", True),
        (f"stdio://'{COMMAND}' --listen 'stdio'", f"{COMMAND} --listen stdio", True),
    ],
)
def test_each_kind_says_where_it_is(target: Any, address: str, remote: bool) -> None:
    async def main() -> None:
        async with exec_server.connect(target) as machine:
            assert isinstance(machine, Environment)
            assert (machine.address, machine.is_remote) == (address, remote)
            assert repr(machine) == f"<Environment {address} connected>"
            assert machine.processes is machine
            await machine.check()
        assert machine.state is State.CLOSED

    asyncio.run(main())


def test_a_url_is_remote(server: RunningServer) -> None:
    async def main() -> None:
        machine = await exec_server.connect(server.url)
        assert (machine.address, machine.is_remote) == (server.url, True)
        await machine.close()

    asyncio.run(main())


def test_facts(server: RunningServer) -> None:
    async def main() -> None:
        async with exec_server.connect(server.url) as machine:
            info = machine.info
            assert info.shell is not None
            assert info.platform_os == "linux"
            assert info.executor_version == exec_server.__version__
            assert info.has("processResize")
            assert machine.has("processResize")
            assert info.temp_dir is not None
            assert info.limits["detachTtlMs"] == 5000

    asyncio.run(main())


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("ws://", "expected ws://HOST:PORT"),
        ("ws://127.0.0.1:99999", "cannot connect to `ws://127.0.0.1:99999`"),
        ("stdio:", "no command is named"),
        ("stdio:'", "cannot connect to `stdio:'`"),
        ([], "neither an address nor a command"),
        (7, "neither an address nor a command"),
    ],
)
def test_addresses_that_are_none(target: Any, text: str) -> None:
    async def main() -> None:
        await exec_server.connect(target)

    with pytest.raises(ExecServerError, match=text):
        asyncio.run(main())


def test_a_context_that_is_left_by_an_error_ends_its_processes(server: RunningServer) -> None:
    marker = sleep_forever()

    async def main() -> None:
        async with exec_server.connect(server.url) as machine:
            await machine.start(["sleep", marker])
            raise KeyError("the caller's own")

    with pytest.raises(KeyError):
        asyncio.run(main())
    assert not running(marker)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"token": "a\r\nX-Evil: 1"}, "the token cannot be sent: its value has a line break or a NUL in it"),
        ({"token": "a\0"}, "the token cannot be sent: its value has a line break"),
        ({"token": "日本"}, "the token cannot be sent: character 8 of its value is not Latin-1"),
        ({"headers": {"X-A": "b\nX-Evil: 1"}}, "the header 'X-A' cannot be sent: its value has a line"),
        ({"headers": {"X-A: b\r\nX-Evil": "1"}}, "cannot be sent: that is no name for a header"),
        ({"headers": {"": "1"}}, "that is no name for a header"),
        ({"recovery_timeout": -1}, "recovery_timeout is a number of seconds"),
        ({"recovery_timeout": float("nan")}, "recovery_timeout is a number of seconds"),
    ],
)
def test_options_that_cannot_be(server: RunningServer, options: dict[str, Any], said: str) -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match=said) as caught:
            await exec_server.connect(server.url, **options)
        assert "Evil: 1" not in str(caught.value), "values may be secret"

    asyncio.run(main())


def test_a_port_that_is_none() -> None:
    async def main() -> None:
        with pytest.raises(
            exec_server.ExecServerError, match="cannot connect to `ws://h:99999`: Port out of"
        ):
            await exec_server.connect("ws://h:99999")

    asyncio.run(main())


def plant(project: Path, *names: str) -> None:
    for name in names:
        (project / name).mkdir()
        (project / name / "__init__.py").write_text("import os; os.write(2, b'planted'); os._exit(3)")


def test_a_local_server_imports_nothing_from_the_directory_it_is_started_in(tmp_path: Path) -> None:
    """That is a project: a command in a sandbox may write there, and would have something run outside."""
    plant(tmp_path, "exec_server", "urllib", "json")
    script = """if True:
        import asyncio, exec_server

        async def main():
            async with exec_server.connect() as machine:
                print(bool(await machine.files.list("/")))

        asyncio.run(main())
    """
    argv = [sys.executable, "-P", "-c", script]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_nor_does_one_that_is_started_as_a_module(tmp_path: Path) -> None:
    """Where the package is found is up to Python; what it imports is not."""
    plant(tmp_path, "urllib")
    argv = [sys.executable, "-m", "exec_server", "fs", "ls", "/"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
