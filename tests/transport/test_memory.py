"""transport/memory.py: two channels tied together."""

from __future__ import annotations

import asyncio

from exec_server.transport.memory import pair


class Ear:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, bytes]] = []
        self.paused = False
        self.ended: str | None = None

    def message_received(self, message: bytes) -> None:
        self.heard.append(("text", message))

    def binary_received(self, message: bytes) -> None:
        self.heard.append(("binary", message))

    def writing_paused(self) -> None:
        assert not self.paused
        self.paused = True

    def writing_resumed(self) -> None:
        assert self.paused
        self.paused = False

    def channel_closed(self, reason: str) -> None:
        assert self.ended is None
        self.ended = reason


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_messages_arrive_in_order_and_later() -> None:
    async def run() -> None:
        one, other = pair(1000)
        ear = Ear()
        one.send(b"before anybody listens")
        other.attach(ear)
        one.send(b"a")
        one.send_parts(b"b", b"c", b"d", binary=True)
        one.send_parts(b"e", b"f", b"", binary=False)
        assert ear.heard == []
        await turns()
        assert ear.heard == [
            ("text", b"before anybody listens"),
            ("text", b"a"),
            ("binary", b"bcd"),
            ("text", b"ef"),
        ]
        assert one.unsent() == 0

    asyncio.run(run())


def test_who_does_not_read_makes_the_other_pause() -> None:
    async def run() -> None:
        one, other = pair(1000)
        sender, receiver = Ear(), Ear()
        one.attach(sender)
        other.attach(receiver)
        other.pause_reading()
        for _ in range(5):
            one.send(bytes(300))
        await turns()
        assert sender.paused
        assert receiver.heard == []
        assert one.unsent() == 1500
        other.resume_reading()
        await turns()
        assert not sender.paused
        assert len(receiver.heard) == 5

    asyncio.run(run())


def test_reading_can_be_paused_by_a_message() -> None:
    async def run() -> None:
        one, other = pair(1000)

        class Busy(Ear):
            def message_received(self, message: bytes) -> None:
                super().message_received(message)
                other.pause_reading()

        ear = Busy()
        other.attach(ear)
        for number in range(3):
            one.send(bytes([number]))
        for expected in range(1, 4):
            await turns()
            assert [message for _, message in ear.heard] == [bytes([n]) for n in range(expected)]
            other.resume_reading()

    asyncio.run(run())


def test_what_was_sent_before_the_end_arrives_before_it() -> None:
    async def run() -> None:
        one, other = pair(1000)
        mine, theirs = Ear(), Ear()
        one.attach(mine)
        other.attach(theirs)
        other.pause_reading()
        one.send(b"last words")
        one.close()
        one.close()
        one.send(b"too late")
        await turns()
        assert theirs.heard == [("text", b"last words")]
        assert theirs.ended is not None
        assert mine.ended is not None
        other.send(b"to nobody")
        other.abort()
        await turns()
        assert mine.heard == []

    asyncio.run(run())
