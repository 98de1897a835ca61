"""Every command but serving, gathered for click."""

from __future__ import annotations

from importlib import import_module
from typing import Final

import click

from ..version import __version__

__all__ = ["commands"]

PLACES: Final = {
    "run": ("run", "run"),
    "ps": ("ps", "ps"),
    "fs": ("fs", "fs"),
    "env": ("env", "env"),
    "token": ("token", "token"),
    "doctor": ("doctor", "doctor"),
    "render": ("render", "render"),
    "rendezvous": ("rendezvous", "rendezvous"),
    "relay": ("relay_keys", "relay"),
    "mcp": ("mcp", "mcp"),
    "exec": ("exec", "exec_"),
}
"""Where each command is: the module here, and its name there."""


class _Commands(click.Group):
    """Imports the one command that is asked for; what the others need, it would only wait for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*PLACES, *super().list_commands(ctx)])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in PLACES:
            return super().get_command(ctx, cmd_name)
        module, name = PLACES[cmd_name]
        found = getattr(import_module(f".{module}", __package__), name)
        return found if isinstance(found, click.Command) else None


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="exec-server")
def commands() -> None:
    """Run commands and touch files on a machine for somebody who is not on it."""


@commands.command(name="help")
def show_help() -> None:
    """Show how to serve, and what else there is."""
    from .serve import HELP

    click.echo(HELP, nl=False)
