"""The command lines in the documentation are ones that the programs take."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from exec_server.cli.commands import commands

DOCS = Path(__file__).parents[2] / "docs"


def shown() -> list[str]:
    text = (DOCS / "exec.md").read_text() + (DOCS / "mcp.md").read_text()
    return re.findall(r"^\$ (exec-server (?:exec|mcp|ps|fs) ?.*)$", text, re.MULTILINE)


@pytest.mark.parametrize("line", shown())
def test_a_command_line(line: str) -> None:
    words = shlex.split(line.partition("|")[0], comments=True)
    words = words[: words.index(">")] if ">" in words else words
    arguments = [word for word in words[2:] if word != "&"]
    command: click.Command | None = commands.get_command(click.Context(commands), words[1])
    assert command is not None
    if isinstance(command, click.Group):
        command = command.get_command(click.Context(command), arguments.pop(0))
        assert command is not None
    command.make_context(words[1], arguments)


def test_there_are_some() -> None:
    assert len(shown()) >= 10
