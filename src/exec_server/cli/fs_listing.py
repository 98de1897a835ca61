"""What `exec-server fs ls` prints: files, and the entries of directories."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import click

from .shown import on_one_line, without_surrogates

if TYPE_CHECKING:
    from ..client.files import RemoteFiles
    from ..services import FileMetadata

__all__ = ["print_listing"]

LOOKS_AT_ONCE: Final = 64
"""Entries of a directory asked about at the same time."""


async def print_listing(files: RemoteFiles, path: str, as_json: bool) -> None:
    """One line for a file, or for each entry of a directory."""
    entries: list[tuple[str, FileMetadata | None]] = []
    found = await files.metadata(path)
    if not found.is_directory:
        entries.append((path, found))
    else:
        directory = files.native(path).rstrip("/")
        names = [entry.name for entry in await files.list(path)]
        for start in range(0, len(names), LOOKS_AT_ONCE):
            some = names[start : start + LOOKS_AT_ONCE]
            looks = [files.metadata(f"{directory}/{name}") for name in some]
            for name, look in zip(some, await asyncio.gather(*looks, return_exceptions=True), strict=True):
                if isinstance(look, OSError):
                    entries.append((name, None))  # a link that leads nowhere or in circles, or gone meanwhile
                elif isinstance(look, BaseException):
                    raise look
                else:
                    entries.append((name, look))
    width = max([len(str(entry.size)) for _, entry in entries if entry is not None], default=1)
    for name, entry in entries:
        click.echo(_json_line(name, entry) if as_json else _line(name, entry, width))


def _json_line(name: str, entry: FileMetadata | None) -> bytes:
    import msgspec

    values: dict[str, Any] = {"name": without_surrogates(name), "kind": "nowhere"}
    if entry is not None:
        values |= {"kind": _kind(entry), "isSymlink": entry.is_symlink, "size": entry.size}
        values |= {"modifiedAtMs": entry.modified_at_ms, "createdAtMs": entry.created_at_ms}
    return msgspec.json.encode(values)


def _line(name: str, entry: FileMetadata | None, width: int) -> str:
    if entry is None:
        return f"?  {'-':>{width}} {'-':>19} {on_one_line(name)} (leads nowhere, or cannot be looked at)"
    letter = {"directory": "d", "file": "-", "other": "?"}[_kind(entry)]
    link = "l" if entry.is_symlink else " "
    when = datetime.fromtimestamp(entry.modified_at_ms / 1000).astimezone()
    return f"{letter}{link} {entry.size:>{width}} {when:%Y-%m-%d %H:%M:%S} {on_one_line(name)}"


def _kind(entry: FileMetadata) -> str:
    return "directory" if entry.is_directory else "file" if entry.is_file else "other"
