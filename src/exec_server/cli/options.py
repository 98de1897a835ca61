"""Options that several commands share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import click

from .shown import printable

__all__ = [
    "authority_option",
    "directory_there",
    "environment_option",
    "fail",
    "read_token",
    "refuse_two_places",
    "server_options",
]

F = TypeVar("F", bound=Callable[..., Any])


def server_options(required: bool) -> Callable[[F], F]:
    """`--url`, `--token-file` and `--ca-file`."""

    def decorate(command: F) -> F:
        command = click.option(
            "--url",
            required=required,
            envvar="EXEC_SERVER_URL",
            metavar="URL",
            help="Server to use: ws://, wss://, unix://, relay+https:// or stdio:COMMAND."
            + ("" if required else " Without it the command runs on this machine."),
        )(command)
        command = authority_option(command)
        return click.option(
            "--token-file",
            envvar="EXEC_SERVER_TOKEN_FILE",
            type=click.Path(exists=True, dir_okay=False),
            help="File that holds the bearer token the server asks for.",
        )(command)

    return decorate


def authority_option(command: F) -> F:
    """`--ca-file`, which the command itself does not see."""
    return click.option(
        "--ca-file",
        envvar="EXEC_SERVER_CA_FILE",
        type=click.Path(exists=True, dir_okay=False),
        expose_value=False,
        callback=lambda _, __, value: _trust(value),
        help="Certificate authority of the server, where the system does not know it.",
    )(command)


def _trust(path: str | None) -> None:
    """Told to whoever connects, also to a name of the configuration, by the variable that says the same."""
    if path is not None:
        os.environ["EXEC_SERVER_CA_FILE"] = os.path.abspath(path)


def environment_option(command: F) -> F:
    """`--env`, instead of a URL."""
    return click.option(
        "--env", "environment", metavar="NAME", help="Environment to use (see `exec-server env list`)."
    )(command)


def refuse_two_places() -> None:
    """A URL that is only set in a variable gives way to a name; one that was typed does not."""
    source = click.get_current_context().get_parameter_source("url")
    if source is click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError("--env and --url both name a machine; give one of them")


def directory_there(cwd: str | None) -> str | None:
    """`--cwd` of another machine, which has no "here" that a relative path could begin at."""
    if cwd is not None and not cwd.startswith(("/", "file:")):
        raise click.BadParameter(
            f"{cwd!r} is not absolute: whose directory would it be in?", param_hint="--cwd"
        )
    return cwd


def read_token(path: str | None) -> str | None:
    """The token in a file, without the blanks around it."""
    if path is None:
        return None
    with open(path, encoding="utf-8") as file:
        return file.read().strip()


def fail(message: str, code: int = 1) -> NoReturn:
    """Say what went wrong, on one line, as it may be in words of somebody else; and end."""
    click.echo(f"Error: {printable(message)}", err=True)
    sys.exit(code)
