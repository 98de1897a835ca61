"""The load client over WebSocket: a blocking socket and hand-made frames."""

import base64
import os
import socket
import struct
from urllib.parse import urlsplit

from .client import Client, WrongAnswer

__all__ = ["WebSocketClient"]

TEXT, PING, PONG = 1, 9, 10
ZERO_MASK = bytes(4)
"""Client frames must be masked; a mask of zeros is a legal mask that costs nothing to apply."""


class WebSocketClient(Client):
    """Connects in the constructor; `handshake()` is the caller's."""

    def __init__(self, url: str) -> None:
        super().__init__()
        address = urlsplit(url)
        self._socket = socket.create_connection((address.hostname, address.port or 80))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._upgrade(address.netloc)

    def _upgrade(self, host: str) -> None:
        key = base64.b64encode(os.urandom(16)).decode()
        self._socket.sendall(
            f"GET / HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n".encode()
        )
        while (end := self.buffer.find(b"\r\n\r\n", 0, self._end)) < 0:
            self.fill()
        head = bytes(self.buffer[:end])
        if not head.startswith(b"HTTP/1.1 101"):
            raise WrongAnswer(f"the upgrade was refused: {head[:80]!r}")
        self._start = end + 4

    def _read_into(self, room: memoryview) -> int:
        return self._socket.recv_into(room)

    def _span(self, start: int, end: int) -> tuple[int, int, int] | None:
        if end - start < 2:
            return None
        buffer = self.buffer
        head, length = buffer[start], buffer[start + 1]
        first = start + 2
        if length == 126:
            first = start + 4
            if end < first:
                return None
            length = buffer[start + 2] << 8 | buffer[start + 3]
        elif length == 127:
            first = start + 10
            if end < first:
                return None
            length = int.from_bytes(buffer[start + 2 : first], "big")
        last = first + length
        if end < last:
            return None
        if head in (0x81, 0x82):
            return first, last, last
        return self._control(head, first, last)

    def _control(self, head: int, first: int, last: int) -> tuple[int, int, int]:
        if head == 0x80 | PING:
            self.send_raw(self.frame(bytes(self.buffer[first:last]), PONG))
        elif head != 0x80 | PONG:
            raise WrongAnswer(f"unexpected frame with first byte {head:#04x}")
        return 1, 0, last  # an empty span: nothing for the caller

    def receive_large(self, room: int) -> memoryview:
        """The next message of up to `room` bytes, fragments and all, received straight into place."""
        end, view = 0, memoryview(bytearray(room))
        while True:
            head, length = self._take(2)
            if length > 125:
                length = int.from_bytes(self._take(2 if length == 126 else 8), "big")
            last = end + length
            if last > room:
                raise WrongAnswer(f"a message has more than {room} bytes")
            while end < last and self._start < self._end:  # what the handshake brought along
                view[end : end + 1] = self._take(1)
                end += 1
            while end < last:
                end += self._socket.recv_into(view[end:last])
            if head & 0x0F in (PING, PONG):
                raise WrongAnswer("a ping in the middle of a measurement")
            if head & 0x80:
                return view[:end]

    def _take(self, count: int) -> bytes:
        """So many bytes of what was received, or what will be."""
        while self._end - self._start < count:
            if self._start == self._end:
                self._start = self._end = 0
            wanted = count - (self._end - self._start)
            self._end += self._socket.recv_into(self._view[self._end :], wanted)
        self._start += count
        return bytes(self._view[self._start - count : self._start])

    def frame(self, message: bytes, opcode: int = TEXT) -> bytes:
        size = len(message)
        if size < 126:
            head = struct.pack("!BB", 0x80 | opcode, 0x80 | size)
        elif size < 1 << 16:
            head = struct.pack("!BBH", 0x80 | opcode, 0xFE, size)
        else:
            head = struct.pack("!BBQ", 0x80 | opcode, 0xFF, size)
        return head + ZERO_MASK + message

    def send_raw(self, data: bytes) -> None:
        self._socket.sendall(data)

    def close(self) -> None:
        self._socket.close()
