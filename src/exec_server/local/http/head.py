"""The head of an answer, line by line, between the socket and aiohttp's parser.

The parser refuses what servers do send and other clients accept: a length said twice, or beside a
transfer coding. So the lines that say it are held back until the head is over, and passed on as one, or
not at all. All others go on as they come. What was really said is kept here, for whoever asked.
"""

from __future__ import annotations

from typing import Final

__all__ = ["MAX_HEADER_BYTES", "Head"]

MAX_HEADER_BYTES: Final = 256 * 1024
"""Longest status line or header field accepted from a server; some put whole documents in them."""

MAX_LENGTHS: Final = 32
"""Most fields that say the length of one answer; beyond, the parser gets them all and refuses the second."""

_SWITCHING_PROTOCOLS: Final = 101
_WITHOUT_BODY: Final = frozenset((204, 304))


class Head:
    """The heads of one answer: any number of provisional ones, then the last."""

    def __init__(self, *, body_expected: bool = True) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        """Names and values as they were received."""
        self.complete = False
        self.refused = False
        """Lines were folded, or names badly set off: the parser would guess what they say."""
        self._body_expected = body_expected
        self._status: int | None = None
        self._lengths: list[bytes] = []
        """The lines that say a length."""
        self._coded = False
        self._unfinished = b""

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """What of it the parser gets first, and what comes after the head."""
        data = self._unfinished + data
        passed: list[bytes] = []
        at = 0
        while not self.complete and (end := data.find(b"\n", at) + 1):
            passed.append(self._line(data[at:end]))
            at = end
        rest = data[at:]
        if self.complete:
            return b"".join(passed), rest
        if self._is_no_answer(rest) or len(rest) > MAX_HEADER_BYTES:
            self.complete = True  # not ours to complain about
            return b"".join((*passed, *self._lengths)), rest
        self._unfinished = rest
        return b"".join(passed), b""

    def _is_no_answer(self, begin: bytes) -> bool:
        begin = begin.lstrip(b"\r")  # half of an empty line
        return self._status is None and begin[:5] != b"HTTP/"[: len(begin)]

    def _line(self, line: bytes) -> bytes:
        """What of a line goes on now."""
        text = line.rstrip(b"\r\n")
        if self._status is None:
            if text:
                self._status = _status(text)
            return line
        if not text:
            return self._end(line)
        name, _, value = text.partition(b":")
        if name != name.strip(b" \t"):
            self.complete = self.refused = True
            return b""
        value = value.strip(b" \t")
        self.headers.append((name, value))
        if name.lower() == b"transfer-encoding":
            self._coded = True
        elif name.lower() == b"content-length" and len(self._lengths) < MAX_LENGTHS:
            self._lengths.append(line)
            return b""
        return line

    def _end(self, line: bytes) -> bytes:
        lengths = self._agreed_lengths()
        provisional = self._status is not None and 100 <= self._status < 200
        if provisional and self._status != _SWITCHING_PROTOCOLS:
            self.headers.clear()
            self._lengths.clear()
            self._status, self._coded = None, False
        else:
            self.complete = True
        return lengths + line

    def _agreed_lengths(self) -> bytes:
        """The lines about the length, as the parser accepts them if anybody does."""
        if not self._lengths or self._coded:
            return b""  # where there is a coding, it says where the body ends
        if not self._body_expected or self._status in _WITHOUT_BODY:
            return b"content-length: 0\r\n"
        said = [part.strip() for line in self._lengths for part in line.partition(b":")[2].split(b",")]
        if len(said) > 1 and all(part.isdigit() and len(part) < 20 for part in said):
            numbers = {int(part) for part in said}
            if len(numbers) == 1:
                return b"content-length: %d\r\n" % numbers.pop()
        return b"".join(self._lengths)


def _status(line: bytes) -> int:
    """The number in a status line; 0 if there is none, which is for the parser to find."""
    number = line.partition(b" ")[2][:3]
    return int(number) if number.isdigit() else 0
