"""Images that a model looks at: files of a machine, and files that come with a prompt."""

from __future__ import annotations

import base64
import os
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from ..client.errors import ExecServerError, ServerRejected
from ..wire.errors import RpcError
from .confinement import shown

if TYPE_CHECKING:
    from .machines import Machines

__all__ = ["VIEW_IMAGE", "BadImage", "ViewImage", "prompt_image", "view"]

MAX_IMAGE_BYTES: Final = 20 * 1024 * 1024
"""Largest image that is sent; what providers take is of that order."""

_IMAGES: Final = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)

VIEW_IMAGE: Final[dict[str, Any]] = {
    "type": "function",
    "name": "view_image",
    "description": "Look at an image file of the machine.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"path": {"type": "string", "description": "Path of the file."}},
        "required": ["path"],
        "additionalProperties": False,
    },
}


class BadImage(ExecServerError):
    """A file that cannot be looked at; says why."""


class ViewImage(Struct, frozen=True, kw_only=True):
    """Arguments of `view_image`."""

    path: str
    environment_id: str | None = None


async def view(call: ViewImage, machines: Machines) -> str | list[dict[str, Any]]:
    """The image as a model gets it, or what is wrong with it."""
    name = call.environment_id or machines.primary
    machine = machines.find(name)
    place = machines.place(call.path, name)
    path = shown(place)
    files = machines.confinement(name).files(machine)
    try:
        found = await files.metadata(place)
        if not found.is_file:
            return f"image path `{path}` is not a file"
        if found.size > MAX_IMAGE_BYTES:
            return f"image at `{path}` has {found.size} bytes; at most {MAX_IMAGE_BYTES} can be looked at"
        data = await files.read(place)
    except (ExecServerError, OSError, RpcError, ValueError) as error:
        said = error.message if isinstance(error, ServerRejected) else str(error)
        return f"unable to locate image at `{path}`: {said}"
    part = _part(data)
    if part is None:
        return f"unable to process image at `{path}`: not a PNG, JPEG, GIF or WebP image"
    return [part]


def prompt_image(path: str, number: int) -> list[dict[str, Any]]:
    """A file of this machine as parts of a prompt, in the reference's wrapping. BadImage if it is none."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_IMAGE_BYTES + 1)
    except OSError as error:
        raise BadImage(f"the image {path} cannot be read: {error.strerror}") from None
    if len(data) > MAX_IMAGE_BYTES:
        raise BadImage(f"the image {path} has more than {MAX_IMAGE_BYTES} bytes")
    part = _part(data)
    if part is None:
        raise BadImage(f"{path} is not a PNG, JPEG, GIF or WebP image")
    opening = f'<image name=[Image #{number}] path="{os.path.abspath(path)}">'
    return [
        {"type": "input_text", "text": opening},
        part,
        {"type": "input_text", "text": "</image>"},
    ]


def _part(data: bytes) -> dict[str, Any] | None:
    kind = _kind(data)
    if kind is None:
        return None
    url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "input_image", "image_url": url, "detail": "high"}


def _kind(data: bytes) -> str | None:
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for start, kind in _IMAGES if data.startswith(start)), None)
