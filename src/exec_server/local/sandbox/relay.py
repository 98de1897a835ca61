"""The relay: a program outside of a sandbox that listens inside and connects to proxies outside.

    python -I -S relay.py PID DESCRIPTOR PORT=HOST:PORT...

A socket belongs to the network it was made in, whoever holds it. So a child of this process steps into
the sandbox's network, makes the listening sockets, hands them back and ends; this process never leaves
the host's network, and only ever connects to the endpoints it was given. A byte is written to DESCRIPTOR
when everything is ready, and it ends when process PID, the first one inside, does.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import socket
import sys
from _thread import start_new_thread

__all__ = ["main"]

NEW_USER = 0x10000000
NEW_NET = 0x40000000
GET_OWNER = 0xB701
"""ioctl NS_GET_USERNS: the user namespace that a namespace belongs to."""

CHUNK_BYTES = 64 * 1024

_libc = ctypes.CDLL(None, use_errno=True)


def main(pid: int, go: int, routes: list[str]) -> None:
    """Relay for as long as there is anybody inside."""
    pidfd = os.pidfd_open(pid)
    try:
        endpoints = dict(map(_route, routes))
        for listener, endpoint in zip(_listeners(pid, list(endpoints)), endpoints.values(), strict=True):
            start_new_thread(_accept, (listener, endpoint))
        os.write(go, b"!")
    except BaseException:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)  # whoever waits for us must not begin without
        raise
    os.close(go)
    select.select([pidfd], [], [])
    os._exit(0)


def _route(words: str) -> tuple[int, tuple[str, int]]:
    port, _, endpoint = words.partition("=")
    host, _, host_port = endpoint.rpartition(":")
    return int(port), (host, int(host_port))


def _listeners(pid: int, ports: list[int]) -> list[socket.socket]:
    """Sockets that listen in the network of a process."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        try:
            _enter_network(pid)
            made = [socket.create_server(("0.0.0.0", port)) for port in ports]  # noqa: S104  # only lo is there
            socket.send_fds(theirs, [b"!"], [listener.fileno() for listener in made])
            os._exit(0)
        finally:
            os._exit(1)
    theirs.close()
    data, descriptors, _, _ = socket.recv_fds(ours, 1, len(ports))
    os.waitpid(child, 0)
    ours.close()
    if not data or len(descriptors) != len(ports):
        raise OSError("no sockets could be made inside of the sandbox")
    return [socket.socket(fileno=descriptor) for descriptor in descriptors]


def _enter_network(pid: int) -> None:
    """Root may do it at once; others have to become root of the user namespace it belongs to."""
    network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    if _libc.setns(network, NEW_NET):
        owner = fcntl.ioctl(network, GET_OWNER)
        for namespace, kind in ((owner, NEW_USER), (network, NEW_NET)):
            if _libc.setns(namespace, kind):
                raise OSError(ctypes.get_errno(), "setns")


def _accept(listener: socket.socket, endpoint: tuple[str, int]) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        start_new_thread(_relay, (connection, endpoint))


def _relay(inside: socket.socket, endpoint: tuple[str, int]) -> None:
    with inside:
        try:
            outside = socket.create_connection(endpoint)
        except OSError:
            return  # as if nobody listened: the connection ends
        with outside:
            for end in (inside, outside):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            done = os.pipe()
            start_new_thread(_carry, (inside, outside, done[1]))
            _carry(outside, inside, None)
            os.read(done[0], 1)  # until the other way has ended, too
            os.close(done[0])


def _carry(source: socket.socket, target: socket.socket, done: int | None) -> None:
    try:
        while data := source.recv(CHUNK_BYTES):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        # One way is broken: so is the other.
        for end in (source, target):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
    finally:
        if done is not None:
            os.close(done)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
