"""Which commands there are, and that each imports only what it needs itself."""

from __future__ import annotations

import subprocess
import sys

import click

from exec_server.cli import COMMANDS
from exec_server.cli.commands import commands


def test_every_command_is_where_it_is_looked_for() -> None:
    context = click.Context(commands)
    assert commands.list_commands(context) == sorted(COMMANDS)
    for name in COMMANDS:
        command = commands.get_command(context, name)
        assert command is not None
        assert command.name == name
    assert commands.get_command(context, "dance") is None


PROGRAM = """
import atexit, sys
from exec_server.cli import main
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
main()
"""


def test_a_command_does_not_wait_for_what_others_need() -> None:
    command = [sys.executable, "-c", PROGRAM, "render", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("Usage: exec-server render ")
    imported = set(done.stderr.split())
    assert "exec_server.cli.render" in imported
    assert not imported & {"asyncio", "exec_server.cli.run", "exec_server.cli.exec"}
