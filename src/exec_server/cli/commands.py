"""Every command but serving, gathered for click."""

from __future__ import annotations

import click

from ..version import __version__
from .doctor import doctor
from .env import env
from .exec import exec_
from .fs import fs
from .mcp import mcp
from .ps import ps
from .relay_keys import relay
from .render import render
from .rendezvous import rendezvous
from .run import run
from .token import token

__all__ = ["commands"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="exec-server")
def commands() -> None:
    """Run commands and touch files on a machine for somebody who is not on it."""


@commands.command(name="help")
def show_help() -> None:
    """Show how to serve, and what else there is."""
    from .serve import HELP

    click.echo(HELP, nl=False)


commands.add_command(run)
commands.add_command(ps)
commands.add_command(fs)
commands.add_command(env)
commands.add_command(token)
commands.add_command(doctor)
commands.add_command(render)
commands.add_command(rendezvous)
commands.add_command(relay)
commands.add_command(mcp)
commands.add_command(exec_)
