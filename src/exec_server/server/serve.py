"""Running a server until it is told to stop: on stdio, or listening.

On stdio everything ends with the connection. A listening server ends on SIGTERM or SIGINT; either way
every process it started is killed first, and the exit code is 0. SIGHUP ends nothing, unless it says that
the terminal is gone: the certificate of `wss://` is read again.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from .. import log
from ..limits import Limits
from ..local.process import descriptors
from ..local.process.terminal import StartedFrom
from ..loop import PollLoop
from ..transport.address import Listen
from ..transport.stdio import StdioChannel
from . import dispatch
from .server import Server

if TYPE_CHECKING:
    import asyncio

    from .auth import Authenticator

__all__ = ["ServeError", "ServeOptions", "serve"]


PRELOAD_DELAY: Final = 3.0
"""Seconds after the start until methods are loaded that nobody has asked for: who started the server to ask
something has asked by then."""

PRELOAD_INTERVAL: Final = 0.02
"""Seconds between two families of methods, for everybody else."""


class ServeError(Exception):
    """The server cannot start like this; the text says what to change."""


class ServeOptions(Struct, frozen=True, kw_only=True):
    """How to serve."""

    listen: Listen
    limits: Limits
    authenticator: Authenticator | None = None
    allowed_origins: frozenset[str] = frozenset()
    tls_cert: str | None = None
    tls_key: str | None = None
    exit_on_stdin_close: bool = False
    hello: bool = False
    """Say on stderr how to use the server, for people."""


def serve(options: ServeOptions) -> None:
    """Serve until told to stop."""
    descriptors.hide_inherited()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if options.listen.kind == "stdio":
        _serve_stdio(options.limits)
    else:
        _serve_listening(options)


def _serve_stdio(limits: Limits) -> None:
    loop = PollLoop()
    server = Server(loop, limits)
    read_fd, write_fd = _take_stdio()
    channel = StdioChannel(loop, read_fd, write_fd, limits)
    connection = server.accept(channel)

    def end() -> None:
        server.sessions.end_all(loop.stop)

    connection.on_end.append(end)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    # When its terminal is gone, stdin ends. Ignoring the signal would make our children ignore it, too.
    loop.add_signal_handler(signal.SIGHUP, lambda: None)
    channel.attach(connection)
    try:
        loop.run()
    finally:
        server.close()


def _take_stdio() -> tuple[int, int]:
    """Keep the protocol's descriptors to ourselves: a stray print must not become a message."""
    read_fd, write_fd = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return read_fd, write_fd


def _serve_listening(options: ServeOptions) -> None:
    import asyncio

    try:
        import uvloop
    except ImportError:
        asyncio.run(_listen(options))
    else:
        uvloop.run(_listen(options))


async def _listen(options: ServeOptions) -> None:
    import asyncio

    from ..transport.websocket import WebSocketChannel
    from .gate import Gate

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_report)
    server = Server(loop, options.limits)
    gate = Gate(options.authenticator, options.allowed_origins, server.metrics)

    def accept(channel: WebSocketChannel) -> None:
        channel.attach(server.accept(channel))

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    listener: Listener | None = None
    tls, terminal = _tls(options), StartedFrom()
    loop.add_signal_handler(
        signal.SIGHUP, lambda: stop.set() if terminal.is_gone() else _read_again(tls, options)
    )
    try:
        listener, url = _open(options, gate, accept, tls)
        if url:
            _say(url)
        if options.hello:
            _say_hello(url)
        loop.call_later(PRELOAD_DELAY, _preload, loop)
        if options.exit_on_stdin_close:
            _stop_at_end_of_stdin(loop, stop)
        await stop.wait()
        listener_to_close, listener = listener, None
        if listener_to_close is not None:
            listener_to_close.close()
        ended = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, ended.set)  # a second signal does not wait for the first
        server.sessions.end_all(ended.set)
        await ended.wait()
    finally:
        if listener is not None:
            listener.close()
        server.close()


def _preload(loop: asyncio.AbstractEventLoop) -> None:
    """Import what the first clients may not have asked for, a little at a time."""
    try:
        if dispatch.load_next():
            loop.call_later(PRELOAD_INTERVAL, _preload, loop)
    except OSError as error:
        log.warning("some methods could not be loaded ahead of their first call", reason=error.strerror)


def _say(url: str) -> None:
    """The one line on stdout. A server whose stdout is closed serves all the same."""
    try:
        os.write(1, f"{url}\n".encode())
    except OSError as error:
        log.warning("the address could not be written to stdout", url=url, reason=str(error))


def _report(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What went wrong in the loop: a peer that broke off its handshake is nothing to wake anybody for."""
    error = context.get("exception")
    kind = error if isinstance(error, type) else type(error)
    if issubclass(kind, ConnectionError | TimeoutError) or kind.__module__ == "ssl":
        log.info("a connection failed", reason=context.get("message"))
    elif isinstance(error, BaseException):
        log.error(str(context.get("message")), exc_info=error)
    else:
        log.error(str(context.get("message")), error=str(error))


def _open(
    options: ServeOptions, gate: Gate, accept: Accept, tls: ssl.SSLContext | None
) -> tuple[Listener | None, str]:
    """The listening socket and the address it got."""
    import socket

    from ..transport import unix
    from ..transport.door import Door
    from ..transport.listener import Listener

    listen = options.listen
    if listen.kind == "off":
        return None, ""
    if listen.kind == "unix":
        from ..local.sandbox.look import keep_private

        listener = unix.listen(listen.path, gate.route, accept, options.limits)
        keep_private(os.fsencode(os.path.abspath(listen.path)))  # whoever reaches it gets out of a sandbox
        return listener, f"unix://{listen.path}"
    sock = socket.socket(socket.AF_INET6 if ":" in listen.host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((listen.host, listen.port))
        timeout = options.limits.handshake_timeout
        listener = Listener(
            sock, lambda: Door(gate.route, accept, options.limits), tls, handshake_timeout=timeout
        )
    except BaseException:
        sock.close()
        raise
    return listener, listen.url(listener.port)


def _tls(options: ServeOptions) -> ssl.SSLContext | None:
    if options.listen.kind != "wss" or options.tls_cert is None:
        return None
    import ssl

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    _load(context, options)
    return context


def _load(context: ssl.SSLContext, options: ServeOptions) -> None:
    import ssl

    def no_passphrase() -> str:
        raise ServeError(f"the key in {options.tls_key} is encrypted; a server cannot be asked for it")

    for path in (options.tls_cert, options.tls_key):
        if path is not None and not os.access(path, os.R_OK):
            raise ServeError(f"cannot read {path}, which `--tls-cert` and `--tls-key` name")
    try:
        context.load_cert_chain(options.tls_cert or "", options.tls_key, no_passphrase)
    except ssl.SSLError as error:
        raise ServeError(
            f"{options.tls_cert} and {options.tls_key} are not a certificate chain and its key in PEM form:"
            f" {error.reason or error}"
        ) from None


def _read_again(context: ssl.SSLContext | None, options: ServeOptions) -> None:
    """SIGHUP: take the certificate that is in the files now, for connections from now on."""
    if context is None:
        log.info("SIGHUP: there is no certificate to read again")
        return
    try:
        _tls(options)  # a pair that does not fit must not be half taken
        _load(context, options)
    except (ServeError, OSError) as error:
        log.error("the server goes on with the certificate it has", reason=str(error))
    else:
        log.info("the certificate was read again", file=options.tls_cert)


def _stop_at_end_of_stdin(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    def readable() -> None:
        try:
            ended = not os.read(0, 65536)
        except BlockingIOError:
            return
        except OSError:
            ended = True
        if ended:
            loop.remove_reader(0)
            stop.set()

    try:
        loop.add_reader(0, readable)
    except (OSError, ValueError):
        stop.set()  # a file or nothing at all: it is at its end already


def _say_hello(url: str) -> None:
    sys.stderr.write(
        f"""
exec-server is listening on {url}

  run a command      exec-server run --url {url} -- uname -a
  from Python        async with exec_server.connect("{url}") as client: ...
  for codex          CODEX_EXEC_SERVER_URL={url} codex exec "..."
  health             curl {url.replace("ws", "http", 1)}/readyz

Press Ctrl-C to stop; every process started through it is stopped with it.
"""
    )


if TYPE_CHECKING:
    import ssl

    from ..transport.door import Accept
    from ..transport.listener import Listener
    from .gate import Gate
