"""The program inside of the sandbox: does file calls for the server, one after the other.

It is given one socket and nothing else, and does what the server would do itself, with the same code and
fewer rights. It knows nothing of policies: what it may do was decided before it was started and cannot
change. It ends when the server lets go of the socket.

A request is a length (8 bytes) and a JSON array, the method's name, its params and what to guard meanwhile
(guards.py); an answer is a length, one byte that says what it is, and JSON. The descriptor of an opened
file travels with that byte. After a guarded call one more answer says that whoever did it is gone, and
before the first one another that it is there at all.

    python -I -S -c '…; from exec_server.local.sandbox.helper import main; main(FD)'   (see helpers.py)
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from msgspec import Raw, Struct
from msgspec.json import decode, encode

from ...wire.envelope import Encoded
from ...wire.errors import INTERNAL_ERROR, RpcError
from ..files.errors import failure
from ..files.lane import ALONE

__all__ = [
    "CANNOT_NEST",
    "DESCRIPTOR",
    "ERROR",
    "GONE",
    "HEADER",
    "HERE",
    "METHODS",
    "OTHER_WAY",
    "RESULT",
    "Failed",
    "main",
    "perform",
]

HEADER: Final = struct.Struct("=Qc")
"""Length of what follows, and what it is."""

LENGTH: Final = struct.Struct("=Q")

RESULT: Final = b"R"
"""A result follows."""
ERROR: Final = b"E"
"""A `Failed` follows."""
DESCRIPTOR: Final = b"D"
"""A result follows, and a descriptor came with this byte."""
CANNOT_NEST: Final = b"N"
"""Nothing was done: on this machine nothing can be guarded for single calls."""
OTHER_WAY: Final = b"O"
"""Nothing was done: this call needs a helper of its own."""
HERE: Final = b"H"
"""It has started, and will answer. Said once, before everything else."""
GONE: Final = b"G"
"""Who did the call before is gone, and with it what it had guarded."""

RECEIVE_BYTES: Final = 8 * 1024
"""Asked for at first; most messages are smaller, and a large buffer costs more than they do."""

TOGETHER_BYTES: Final = 64 * 1024
"""A result up to this size is sent together with its header."""


class Failed(Struct):
    """An error, as it travels."""

    code: int
    message: str


def main(socket: int) -> None:
    """Serve until the other end is closed, and end at once: there is nothing to tidy up."""
    _send(socket, HEADER.pack(0, HERE))
    buffer = bytearray()
    while True:
        try:
            method, params, guards = _receive(socket, buffer)
        except EOFError:
            os._exit(0)
        if guards:
            _answer_guarded(socket, method, params, guards)
        else:
            _answer(socket, method, params)


def _answer_guarded(socket: int, method: str, params: Any, guards: list[tuple[str, int]]) -> None:
    """By a child, which alone has what it needs to guard, and has given it up before it does the call."""
    _load()
    parent = os.getpid()
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        if status:
            os._exit(1)  # it has not answered
        _send(socket, HEADER.pack(0, GONE))
        return
    from .guards import CannotNest, Guard, end_with, stand

    try:
        try:
            if not _can_be_guarded(method, params):
                _send(socket, HEADER.pack(0, OTHER_WAY))
                os._exit(0)
            stand([Guard(path.encode("latin-1"), mode) for path, mode in guards])
            end_with(parent)
        except CannotNest as error:
            _send(socket, HEADER.pack(0, CANNOT_NEST if error.for_good else OTHER_WAY))
        except OSError as error:
            place = os.fsencode(error.filename or b"").decode("utf-8", "replace")
            words = f"cannot protect {place}: {error.strerror} (os error {error.errno})"
            failed = Failed(INTERNAL_ERROR, f"fs sandbox helper failed with status exit status: 1: {words}")
            _send_error(socket, failed)
        else:
            _answer(socket, method, params)
        os._exit(0)
    finally:
        os._exit(1)


def _load() -> None:
    """What children need, once for all of them."""
    from importlib import import_module

    for name in ("copy", "directory", "handles", "metadata", "move", "read", "remove", "write"):
        import_module(f"..files.{name}", __package__)
    import_module(".guards", __package__)


def _can_be_guarded(method: str, params: Any) -> bool:
    """Not what replaces a file that is perhaps not ours: whose it is cannot be seen then, and so not kept."""
    from ..files.paths import to_native

    if method == "fs/writeFile":
        try:
            found = os.stat(to_native(params["path"]))
        except OSError:
            return True
        return (found.st_uid, found.st_gid) == (os.getuid(), os.getgid())
    return method != "fs/copy" or not os.path.lexists(to_native(params["destinationPath"]))


def _receive(socket: int, buffer: bytearray) -> tuple[str, Any, list[tuple[str, int]]]:
    wanted = LENGTH.size
    length: int | None = None
    while len(buffer) < wanted:
        data = os.read(socket, max(RECEIVE_BYTES, wanted - len(buffer)))
        if not data:
            raise EOFError
        buffer += data
        if length is None and len(buffer) >= wanted:
            (length,) = LENGTH.unpack_from(buffer)
            wanted += length
    method, params, guards = decode(bytes(memoryview(buffer)[LENGTH.size : wanted]))
    del buffer[:wanted]
    return method, params, guards


def _answer(socket: int, method: str, params: Any) -> None:
    descriptor: int | None = None
    try:
        outcome = perform(method, params)
        if method == "fs/open":
            descriptor, outcome = outcome, {}
        kind, payload = RESULT if descriptor is None else DESCRIPTOR, _encoded(outcome)
    except RpcError as error:
        _send_error(socket, Failed(error.code, error.message))
        return
    try:
        header = HEADER.pack(len(payload), kind)
        if descriptor is None:
            together = len(payload) < TOGETHER_BYTES
            _send(socket, b"".join((header, payload)) if together else header)
            if not together:
                _send(socket, payload)
        else:
            _send_with_descriptor(socket, header + payload, descriptor)
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _send_error(socket: int, failed: Failed) -> None:
    payload = encode(failed)
    _send(socket, HEADER.pack(len(payload), ERROR) + payload)


def _encoded(outcome: Any) -> Any:
    if isinstance(outcome, Encoded):
        return bytes(outcome)
    return outcome if isinstance(outcome, Raw) else encode(outcome)


def _send(socket: int, data: Any) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(socket, view) :]


def _send_with_descriptor(socket: int, data: bytes, descriptor: int) -> None:
    import _socket  # the wrapper around it would cost as much as everything else here

    kind = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM, 0, socket)
    try:
        rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack("=i", descriptor))
        sent = kind.sendmsg([data], [rights])
        _send(socket, data[sent:])
    finally:
        kind.detach()


# What it can do ----------------------------------------------------------------------------------

Method: TypeAlias = Callable[[Any], Any]

_ready: dict[str, Method] = {}
"""Methods that were needed before, with what they import: looking that up again takes longer than a read."""


def perform(method: str, params: Any) -> Any:
    """The result of one call, or RpcError."""
    try:
        run = _ready.get(method)
        if run is None:
            run = _ready[method] = METHODS[method]()
        return run(params)
    except OSError as error:
        raise failure(error) from None


def _read_file() -> Method:
    from ...wire.files import decode_read_file
    from ..files.paths import to_native
    from ..files.read import read_file, read_range

    def run(params: Any) -> Any:
        wanted = decode_read_file(params)
        path = to_native(wanted.path)
        if wanted.offset is None and wanted.length is None:
            return read_file(path, wanted.follow_symlinks, ALONE)
        return read_range(path, wanted.follow_symlinks, wanted.offset or 0, wanted.length, turn=ALONE)

    return run


def _get_metadata() -> Method:
    from ...wire.files import decode_metadata
    from ..files.metadata import get_metadata
    from ..files.paths import to_native

    def run(params: Any) -> Any:
        wanted = decode_metadata(params)
        return get_metadata(to_native(wanted.path), wanted.follow_symlinks)

    return run


def _canonicalize() -> Method:
    from ...wire.files import decode_path
    from ..files.metadata import canonicalize
    from ..files.paths import to_native

    def run(params: Any) -> Any:
        return canonicalize(to_native(decode_path(params).path))

    return run


def _read_directory() -> Method:
    from ...wire.files import decode_path
    from ..files.directory import read_directory
    from ..files.paths import to_native

    def run(params: Any) -> Any:
        return read_directory(to_native(decode_path(params).path), ALONE)

    return run


def _walk() -> Method:
    from ...wire.files import decode_walk
    from ..files.paths import to_native
    from ..files.walk import walk

    def run(params: Any) -> Any:
        wanted = decode_walk(params)
        return walk(to_native(wanted.path), wanted.path, wanted.options, ALONE)

    return run


def _create_directory() -> Method:
    from ...wire.files import decode_create_directory
    from ..files.directory import create_directory
    from ..files.paths import to_native

    def run(params: Any) -> Any:
        wanted = decode_create_directory(params)
        return create_directory(to_native(wanted.path), wanted.recursive, wanted.follow_symlinks, ALONE)

    return run


def _write_file() -> Method:
    from ...wire.files import decode_write_file
    from ..files.paths import to_native
    from ..files.write import PINS, write_file

    def run(params: Any) -> Any:
        wanted = decode_write_file(params)
        path = to_native(wanted.path)
        if not params.get("pinned"):
            return write_file(path, wanted.data_base64, wanted.follow_symlinks, ALONE)
        pinned = os.stat(path)  # the server has a stream that writes to it
        PINS.add(pinned)
        try:
            return write_file(path, wanted.data_base64, wanted.follow_symlinks, ALONE)
        finally:
            PINS.remove(pinned)

    return run


def _remove() -> Method:
    from ...wire.files import decode_remove
    from ..files.paths import to_native
    from ..files.remove import remove

    def run(params: Any) -> Any:
        wanted = decode_remove(params)
        return remove(to_native(wanted.path), wanted.recursive, wanted.force, wanted.follow_symlinks, ALONE)

    return run


def _copy() -> Method:
    from ...wire.files import decode_copy
    from ..files.copy import copy
    from ..files.paths import to_native

    def run(params: Any) -> Any:
        wanted = decode_copy(params)
        return copy(
            to_native(wanted.source_path), to_native(wanted.destination_path), wanted.recursive, ALONE
        )

    return run


def _move() -> Method:
    from ...wire.files import decode_move
    from ..files.move import move
    from ..files.paths import to_native

    def run(params: Any) -> Any:
        wanted = decode_move(params)
        return move(
            to_native(wanted.source_path), to_native(wanted.destination_path), wanted.overwrite, ALONE
        )

    return run


def _open() -> Method:
    """Gives a descriptor, which is sent with the answer."""
    from ...wire.files import decode_open
    from ..files.handles import open_file
    from ..files.paths import to_native

    def run(params: Any) -> int:
        wanted = decode_open(params)
        return open_file(to_native(wanted.path), wanted.mode)

    return run


def _glob() -> Method:
    from ...wire.files import decode_glob
    from ..files.glob import glob
    from ..files.paths import to_native

    def run(params: Any) -> Any:
        wanted = decode_glob(params)
        return glob(to_native(wanted.path), wanted, ALONE)

    return run


def _search() -> Method:
    from ...wire.files import decode_search
    from ..files.paths import to_native
    from ..files.search import search

    def run(params: Any) -> Any:
        wanted = decode_search(params)
        return search(to_native(wanted.path), wanted, ALONE)

    return run


def _discover_root() -> Method:
    from ...wire.capabilities import decode_roots
    from ..files.discovery import discover_root

    def run(params: Any) -> Any:
        return discover_root(decode_roots(params).roots[0], ALONE)

    return run


def _discover_user() -> Method:
    from ..files.skills import discover_user

    def run(params: Any) -> Any:
        homes = [None if home is None else home.encode("latin-1") for home in params]
        return discover_user(homes[0] or b"/", homes[1], ALONE)

    return run


METHODS: Final[dict[str, Callable[[], Method]]] = {
    "fs/readFile": _read_file,
    "fs/getMetadata": _get_metadata,
    "fs/canonicalize": _canonicalize,
    "fs/readDirectory": _read_directory,
    "fs/walk": _walk,
    "fs/createDirectory": _create_directory,
    "fs/writeFile": _write_file,
    "fs/remove": _remove,
    "fs/copy": _copy,
    "fs/move": _move,
    "fs/open": _open,
    "fs/glob": _glob,
    "fs/search": _search,
    "capabilityRoots/discoverV1": _discover_root,
    "capabilities/discoverV2": _discover_user,
}
