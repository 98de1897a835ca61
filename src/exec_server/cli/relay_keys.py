"""`exec-server relay key …`: the identity of this machine towards a rendezvous."""

from __future__ import annotations

import click

from .options import fail

__all__ = ["relay"]


@click.group()
def relay() -> None:
    """Look after this machine's end of a relay."""


@relay.group()
def key() -> None:
    """The identity this machine registers under."""


def _path(environment_id: str | None, key_file: str | None) -> str:
    if key_file is not None:
        return key_file
    if environment_id is None:
        fail("name the environment (--environment-id) or the file (--key-file)", 2)
    from ..relay.run import default_key_file

    return default_key_file(environment_id)


_environment_id = click.option("--environment-id", metavar="ID", help="The environment whose key it is.")
_key_file = click.option("--key-file", metavar="PATH", help="The file, where it is not the default one.")


@key.command()
@_environment_id
@_key_file
@click.option("--create", is_flag=True, help="Make the key if there is none.")
def show(environment_id: str | None, key_file: str | None, create: bool) -> None:
    """Print the fingerprint, and the public key as the registry sees it."""
    import json

    from ..relay.keys import KeyFileError, KeyFileMissing, load, load_or_create

    try:
        identity = (load_or_create if create else load)(_path(environment_id, key_file))
    except KeyFileMissing as error:
        fail(f"{error}; an environment makes its own when it starts, and `--create` makes one now")
    except KeyFileError as error:
        fail(str(error))
    click.echo(identity.public.fingerprint)
    click.echo(json.dumps(identity.public.to_object()))


@key.command()
@_environment_id
@_key_file
def rotate(environment_id: str | None, key_file: str | None) -> None:
    """Replace the key by a new one.

    A running environment takes it when it is sent SIGHUP, or else with its next registration. Streams that
    are open go on; whoever has pinned the old fingerprint must be told the new one.
    """
    from ..relay.keys import KeyFileError
    from ..relay.keys import rotate as rotate_key

    path = _path(environment_id, key_file)
    try:
        rotate_key(path)
    except KeyFileError as error:
        fail(str(error))
    click.echo(f"{path} holds a new key; send the environment SIGHUP to use it now", err=True)
