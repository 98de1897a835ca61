"""A cable between a client and a server, in other processes: it can be cut, and mended."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

__all__ = ["Cable"]


class Cable:
    """Passes bytes on. While it is cut, connections are refused by hanging up."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._server = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"ws://127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._whole = True
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def cut(self) -> None:
        with self._lock:
            self._whole = False
            self._hang_up()

    def mend(self) -> None:
        with self._lock:
            self._whole = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _start(self, work: Callable[..., None], *args: socket.socket) -> None:
        self._threads.append(threading.Thread(target=work, args=args, daemon=True))
        self._threads[-1].start()

    def _hang_up(self) -> None:
        for end in self._sockets:
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it has ended by itself
        self._sockets.clear()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if not self._whole:
                    here.close()
                    continue
                there = socket.create_connection(self._server)
                self._sockets += [here, there]
            self._start(_carry, here, there)


def _carry(here: socket.socket, there: socket.socket) -> None:
    with here, there:
        back = threading.Thread(target=_pass_on, args=(there, here), daemon=True)
        back.start()
        _pass_on(here, there)
        back.join()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # cut
