"""One stream after its handshake: whole messages in, frames out, and back. Sans-I/O; time is passed in.

Everything that makes a stream reliable lives here, and nothing here waits, sends or looks at a clock:

- messages are framed (4 bytes of length), cut into records of at most 61,440 bytes, sealed once, numbered;
- arriving records are put in order, copies are dropped, messages put together again;
- *plain*, with a peer of the reference: that is all, and what is lost on the way is lost;
- *acked*, with one of ours: every frame carries what has arrived; records are kept and repeated until they
  have; a window keeps within what the peer buffers; a lost connection is resumed on the next one.

    Sender, acked                                   Receiver
    queued -(window)-> sent -(ack)-> forgotten      arrived -(in order)-> opened -> message -> taken
                        ^  |                            '-(ahead, or taker behind)-> held
                        '--'-(time is up, 3 above it arrived, resumed)

A stream that raises StreamFailed is over; the caller tells the peer with a reset.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from .frame import NOTHING_RECEIVED, Ack, Data, Frame, Heartbeat, Reset, Resume, encode, encode_data, head
from .noise import MAX_COUNTER, MAX_RECORD_BYTES, TAG_BYTES, BadRecord, Opener, Sealer

__all__ = ["MAX_MESSAGE_BYTES", "PROTOCOL_ERROR", "Stream", "StreamFailed"]

PROTOCOL_ERROR: Final = "noise_relay_protocol_error"
"""The only reason for a reset that the reference gives, whatever happened."""

MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
"""Of one message; the reference's limit."""

REORDER_DISTANCE: Final = 64
"""How far ahead of the first missing record one may be; the reference's limit, and so the window."""

REORDER_BYTES: Final = 1024 * 1024
"""Of records ahead of the first missing one; likewise."""

WIDE_REORDER_BYTES: Final = 4 * 1024 * 1024
"""The same between two ends that said so in their handshakes: as much as 64 records have, and half of what a
rendezvous keeps for a socket. A distant or busy path carries no more at a time than may be on its way."""

UNTAKEN_MESSAGES: Final = 1024
UNTAKEN_BYTES: Final = 64 * 1024 * 1024
"""What may wait for a taker that is behind, before the peer is made to wait."""

MAX_PIECES: Final = 8
"""Of a message that is not complete. Pieces may be of one byte, and each costs more than its bytes."""

ACK_DELAY: Final = 0.1
"""Seconds an ack may wait for a frame to travel with."""

ACK_RECORDS: Final = 16
"""Or so many records arrived, or a quarter of the window: a busy peer never waits for the delay."""

FIRST_RTO: Final = 1.0
MIN_RTO: Final = 0.2
MAX_RTO: Final = 8.0
"""Seconds until a record is repeated: at first, at least, at most."""

MAX_TRIES: Final = 20
"""Repetitions of one record without an answer, two and a half minutes, after which the peer is gone."""

FAST_RETRANSMIT: Final = 3
"""Later records that must have arrived before an earlier one is taken for lost; as in TCP."""

HEARTBEAT_INTERVAL: Final = 15.0
SILENCE_LIMIT: Final = 45.0
"""Seconds without any frame from the peer, three heartbeats, after which the path is taken for lost."""

RESUME_INTERVAL: Final = 1.0
RESUME_LIMIT: Final = 5.0
"""Seconds between calls for the peer on a new path, and until it is given up."""


class StreamFailed(Exception):
    """The stream is over. `reason` goes into the reset; the text says what happened."""

    def __init__(self, text: str, reason: str = PROTOCOL_ERROR) -> None:
        super().__init__(text)
        self.reason = reason


class _Record:
    """A sealed record the peer may not have yet."""

    __slots__ = ("ciphertext", "due", "fast", "held", "repeated", "rto", "sent_at", "tries")

    def __init__(self, ciphertext: bytes, now: float, rto: float) -> None:
        self.ciphertext = ciphertext
        self.sent_at = now
        self.due = now + rto
        self.rto = rto
        self.tries = 0
        self.repeated = False
        self.fast = False
        self.held = False
        """The peer has it, but not all before it."""


class Stream:
    """One direction each way, between two ends that share keys."""

    def __init__(
        self,
        stream_id: str,
        sealer: Sealer,
        opener: Opener,
        *,
        acked: bool,
        now: float,
        wide: bool = False,
    ) -> None:
        self.id = stream_id
        self.acked = acked
        self._ahead_bytes = WIDE_REORDER_BYTES if acked and wide else REORDER_BYTES
        self._head = head(stream_id)
        self._sealer = sealer
        self._opener = opener
        # Sending
        self._queue: deque[memoryview] = deque()
        self._queued = 0
        self._sent: dict[int, _Record] = {}
        self._sent_bytes = 0
        self._rtt: float | None = None
        self._peer_behind = False
        self._repeat_at: float | None = None
        self._last_sent = now
        # Receiving
        self._next = 0
        self._held: dict[int, bytes] = {}
        self._held_bytes = 0
        self._prefix = b""
        self._wanted = 0
        self._pieces: list[memoryview | bytearray] = []
        self._missing = 0
        self._messages: deque[bytes] = deque()
        self._untaken = 0
        self._was_behind = False
        # Acknowledging
        self._ack_at: float | None = None
        self._news_records = 0
        self._news_bytes = 0
        # The path
        self._heard = now
        self._down = False
        self._resume_at: float | None = None
        self._resume_until = 0.0

    # Messages ------------------------------------------------------------------------------------

    def send(self, *parts: bytes | memoryview) -> None:
        """Queue one message, given in parts; they must not change afterwards."""
        size = sum(map(len, parts))
        if not 1 <= size <= MAX_MESSAGE_BYTES:
            raise ValueError(f"a message has 1 to {MAX_MESSAGE_BYTES} bytes, not {size}")
        prefix = size.to_bytes(4, "big")
        if size <= MAX_RECORD_BYTES:
            self._queue.append(memoryview(b"".join((prefix, *parts))))
        else:
            self._queue.append(memoryview(prefix))
            self._queue.extend(memoryview(part) for part in parts if len(part))
        self._queued += size + 4

    @property
    def unsent(self) -> int:
        """Bytes that the peer may not have: queued, or sent and not acknowledged."""
        return self._queued + self._sent_bytes

    @property
    def queued(self) -> int:
        """Bytes that wait for the window, or for room on the connection."""
        return self._queued

    @property
    def drained(self) -> bool:
        """Whether everything was sent and, where the peer says so, has arrived."""
        return not self._queued and not self._sent

    def take(self) -> bytes | None:
        """The next message from the peer, or None."""
        if not self._messages:
            return None
        message = self._messages.popleft()
        self._untaken -= len(message)
        if self._was_behind and not self.behind:
            self._was_behind = False
            self._open_held()
            self._ack_soon(0.0)
        return message

    @property
    def behind(self) -> bool:
        """Whether more waits to be taken than should."""
        return len(self._messages) > UNTAKEN_MESSAGES or self._untaken > UNTAKEN_BYTES

    # Frames in -----------------------------------------------------------------------------------

    def receive(self, frame: Frame, now: float) -> None:
        """A frame of this stream: data, ack, resume or heartbeat. What it completes waits in `take`."""
        self._heard = now
        if self.acked:
            self._apply_ack(frame.ack, frame.ack_bits, now)
            if self._resume_at is not None:
                # The peer is there again. What was on the old path is gone.
                self._resume_at = None
                self._repeat_all(now, now)
        body = frame.body
        if type(body) is Data:
            self._receive_data(body, now)
        elif type(body) is Resume and self.acked:
            # A peer may call as often as it likes; what was only just sent is not sent again for it.
            self._repeat_all(now, now - MIN_RTO)
            self._ack_soon(now)

    def _receive_data(self, data: Data, now: float) -> None:
        if not self.acked and (data.segment_index, data.segment_count) != (0, 1):
            return  # not valid between ends of the reference, which drop it
        seq, payload = data.seq, data.payload
        size = len(payload)
        if not TAG_BYTES <= size <= MAX_RECORD_BYTES + TAG_BYTES:
            raise StreamFailed(f"a record of {size} bytes")
        if seq < self._next or seq in self._held:
            self._ack_soon(now)
        elif seq == self._next and not self.behind:
            self._open(payload)
            self._news(size, now)
            if self._held:
                self._open_held()
                self._ack_soon(now)
        else:
            self._hold(seq, payload)
            self._ack_soon(now)

    def _hold(self, seq: int, payload: bytes | memoryview) -> None:
        if seq == self._next:
            self._was_behind = True
            if not self.acked:
                raise StreamFailed("more messages than are taken, from a peer that cannot be made to wait")
        elif seq - self._next > REORDER_DISTANCE:
            raise StreamFailed(f"record {seq} came when {self._next} was missing")
        elif self._held_bytes + len(payload) > self._ahead_bytes:
            raise StreamFailed(f"too much came while record {self._next} was missing")
        else:
            self._held_bytes += len(payload)
        self._held[seq] = bytes(payload)

    def _open_held(self) -> None:
        """Go on with what came early, as far as it goes."""
        while self._next in self._held:
            if self.behind:
                self._was_behind = True
                if not self.acked:
                    raise StreamFailed(
                        "more messages than are taken, from a peer that cannot be made to wait"
                    )
                return
            self._open(self._held.pop(self._next))

    def _open(self, payload: bytes | memoryview) -> None:
        try:
            plaintext = self._opener.open(payload)
        except BadRecord as error:
            raise StreamFailed(str(error)) from None
        self._next += 1
        following = self._held.get(self._next)
        if following is not None:
            self._held_bytes -= len(following)  # the first missing one is not ahead of itself
        self._assemble(plaintext)

    def _assemble(self, plaintext: bytes) -> None:
        """Records are pieces of one long run of bytes, cut anywhere."""
        at, end = 0, len(plaintext)
        while at < end:
            if not self._wanted:
                missing = 4 - len(self._prefix)
                self._prefix += plaintext[at : at + missing]
                at += missing
                if len(self._prefix) < 4:
                    return
                self._wanted = self._missing = int.from_bytes(self._prefix, "big")
                self._prefix = b""
                if not 1 <= self._wanted <= MAX_MESSAGE_BYTES:
                    raise StreamFailed(f"a message of {self._wanted} bytes")
                continue
            size = min(self._missing, end - at)
            if size == self._wanted:
                self._complete(plaintext[at : at + size])
            else:
                self._keep_piece(memoryview(plaintext)[at : at + size])
                if not self._missing:
                    message = b"".join(self._pieces)
                    self._pieces.clear()
                    self._complete(message)
            at += size

    def _keep_piece(self, piece: memoryview) -> None:
        """A message of a few records is put together in one copy; of more, in one place as they come."""
        self._missing -= len(piece)
        self._pieces.append(piece)
        if len(self._pieces) > MAX_PIECES:
            first = self._pieces[0]
            whole = first if isinstance(first, bytearray) else bytearray(first)
            for other in self._pieces[1:]:
                whole += other
            self._pieces = [whole]

    def _complete(self, message: bytes) -> None:
        self._wanted = 0
        self._messages.append(message)
        self._untaken += len(message)

    # Acknowledging -------------------------------------------------------------------------------

    def _news(self, size: int, now: float) -> None:
        self._news_records += 1
        self._news_bytes += size
        enough = self._news_records >= ACK_RECORDS or self._news_bytes >= self._ahead_bytes // 4
        self._ack_soon(now if enough else now + ACK_DELAY)

    def _ack_soon(self, when: float) -> None:
        if self.acked and (self._ack_at is None or when < self._ack_at):
            self._ack_at = when

    def _ack_fields(self) -> tuple[int, int]:
        if not self.acked:
            return 0, 0
        first = self._next
        bits = 0
        for seq in self._held:
            if seq - first < 32:
                bits |= 1 << (seq - first)
        return (first - 1) & 0xFFFF_FFFF, bits

    def _apply_ack(self, ack: int, bits: int, now: float) -> None:
        if ack != NOTHING_RECEIVED and ack >= self._sealer.counter:
            return  # of records never sent: not from our peer
        first_missing = (ack + 1) & 0xFFFF_FFFF
        sent = self._sent
        sample: float | None = None
        while sent:
            seq = next(iter(sent))
            if seq >= first_missing:
                break
            record = sent.pop(seq)
            self._sent_bytes -= len(record.ciphertext)
            if not record.repeated:
                sample = now - record.sent_at
        if sample is not None:
            self._rtt = sample if self._rtt is None else self._rtt + (sample - self._rtt) / 8
        if not sent or next(iter(sent)) == first_missing:
            self._hear_whether_behind(bool(bits & 1), now)
        if bits:
            self._apply_bits(first_missing, bits, now)

    def _hear_whether_behind(self, behind: bool, now: float) -> None:
        """A peer that holds the very record it waits for has a taker that is behind."""
        if self._peer_behind and not behind:
            # It goes on: what could not be told from lost until now gets its time again.
            for record in self._sent.values():
                record.due = max(record.due, now + self._rto())
            self._repeat_by(now + self._rto())
        self._peer_behind = behind

    def _apply_bits(self, first: int, bits: int, now: float) -> None:
        for index in range(bits.bit_length()):
            record = self._sent.get(first + index)
            if record is None:
                continue
            if bits >> index & 1:
                record.held = True
            elif not record.fast and (bits >> index).bit_count() >= FAST_RETRANSMIT:
                record.fast = True
                record.due = now
                self._repeat_by(now)

    # Frames out ----------------------------------------------------------------------------------

    def frames(self, now: float, room: int) -> list[bytes]:
        """What should go out now; new records only while they fit into `room` bytes."""
        out: list[bytes] = []
        if self._down:
            return out
        if self._resume_at is not None:
            if now >= self._resume_until:
                raise StreamFailed("the peer does not answer on the new connection", "closed")
            if now >= self._resume_at:
                self._resume_at = now + RESUME_INTERVAL
                out.append(self._frame(Resume(self._sealer.counter)))
            return out
        if self._repeat_at is not None and now >= self._repeat_at and room > 0:
            self._repeat_due(out, now)
        while self._queued and room > 0 and self._window_open():
            record = self._next_record(now)
            out.append(record)
            room -= len(record)
        if out:
            self._said(now)
        elif self._ack_at is not None and now >= self._ack_at:
            out.append(self._frame(Ack()))
            self._said(now)
        elif self.acked and now >= self._last_sent + HEARTBEAT_INTERVAL:
            out.append(self._frame(Heartbeat()))
            self._said(now)
        return out

    def wake_at(self) -> float | None:
        """When `frames` has something to say again, if nothing happens before."""
        if not self.acked or self._down:
            return None
        if self._resume_at is not None:
            return min(self._resume_at, self._resume_until)
        at = min(self._last_sent + HEARTBEAT_INTERVAL, self._heard + SILENCE_LIMIT)
        if self._ack_at is not None and self._ack_at < at:
            at = self._ack_at
        if self._repeat_at is not None and self._repeat_at < at:
            at = self._repeat_at
        return at

    def reset(self, reason: str) -> bytes:
        """The frame that tells the peer that this stream is over."""
        return self._frame(Reset(reason))

    def _frame(self, body: Ack | Resume | Heartbeat | Reset) -> bytes:
        ack, bits = self._ack_fields()
        return encode(Frame(self.id, body, ack, bits))

    def _said(self, now: float) -> None:
        """Whatever went out told the peer what has arrived."""
        self._last_sent = now
        self._ack_at = None
        self._news_records = self._news_bytes = 0

    def _window_open(self) -> bool:
        """Whether the peer has room for the next record, also if everything before it is late."""
        if not self._sent:
            return True
        first, record = next(iter(self._sent.items()))
        ahead = self._sent_bytes - len(record.ciphertext) + min(self._queued, MAX_RECORD_BYTES) + TAG_BYTES
        return self._sealer.counter <= first + REORDER_DISTANCE and ahead <= self._ahead_bytes

    def _next_record(self, now: float) -> bytes:
        """Seal the next record, once and for all, and frame it."""
        seq = self._sealer.counter
        if seq > MAX_COUNTER:
            raise StreamFailed("all record numbers are used up", "closed")
        ciphertext = self._sealer.seal(self._take_plaintext())
        if self.acked:
            record = self._sent[seq] = _Record(ciphertext, now, self._rto())
            self._sent_bytes += len(ciphertext)
            self._repeat_by(record.due)
        return encode_data(self._head, *self._ack_fields(), seq, ciphertext)

    def _take_plaintext(self) -> bytes | memoryview:
        """As much of the queue as fits into a record; messages may share one."""
        queue = self._queue
        first = queue.popleft()
        size = len(first)
        if size >= MAX_RECORD_BYTES:
            if size > MAX_RECORD_BYTES:
                queue.appendleft(first[MAX_RECORD_BYTES:])
            self._queued -= MAX_RECORD_BYTES
            return first[:MAX_RECORD_BYTES]
        pieces = [first]
        while queue and size < MAX_RECORD_BYTES:
            piece = queue.popleft()
            if size + len(piece) > MAX_RECORD_BYTES:
                fits = MAX_RECORD_BYTES - size
                queue.appendleft(piece[fits:])
                piece = piece[:fits]
            pieces.append(piece)
            size += len(piece)
        self._queued -= size
        return first if len(pieces) == 1 else b"".join(pieces)

    # Repeating -----------------------------------------------------------------------------------

    def _repeat_by(self, when: float) -> None:
        if self._repeat_at is None or when < self._repeat_at:
            self._repeat_at = when

    def _rto(self) -> float:
        return FIRST_RTO if self._rtt is None else min(max(2 * self._rtt, MIN_RTO), MAX_RTO)

    def _repeat_due(self, out: list[bytes], now: float) -> None:
        """Send again what is due. While the peer is behind, only the first: it asks whether it still is."""
        soonest: float | None = None
        for seq, record in self._sent.items():
            if record.held:
                continue
            if record.due <= now:
                if not self._peer_behind:
                    record.tries += 1
                    if record.tries > MAX_TRIES:
                        raise StreamFailed(f"record {seq} was sent {MAX_TRIES} times in vain", "closed")
                record.repeated = True
                record.rto = min(2 * record.rto, MAX_RTO)
                record.due = now + record.rto
                record.sent_at = now
                out.append(encode_data(self._head, *self._ack_fields(), seq, record.ciphertext))
            if soonest is None or record.due < soonest:
                soonest = record.due
            if self._peer_behind:
                break
        if soonest is None and self._sent:
            soonest = now + MAX_RTO  # the peer holds all of it and will say when it goes on
            self._probe(out, now)
        self._repeat_at = soonest

    def _probe(self, out: list[bytes], now: float) -> None:
        """Ask a peer that holds everything whether it has gone on: its answer to that may have been lost."""
        seq, record = next(iter(self._sent.items()))
        if now - record.sent_at >= MAX_RTO:
            record.sent_at, record.repeated = now, True
            out.append(encode_data(self._head, *self._ack_fields(), seq, record.ciphertext))

    def _repeat_all(self, now: float, sent_before: float) -> None:
        """The path has changed: all that is not acknowledged goes again, in order, and starts afresh."""
        for record in self._sent.values():
            if record.sent_at <= sent_before:
                record.due, record.rto, record.tries, record.fast = now, self._rto(), 0, False
                self._repeat_by(now)

    # The path ------------------------------------------------------------------------------------

    def silent(self, now: float) -> bool:
        """Whether a peer that should be heard from has not been."""
        return (
            self.acked and not self._down and self._resume_at is None and now >= self._heard + SILENCE_LIMIT
        )

    def path_lost(self) -> None:
        """Frames go nowhere for now. Nothing is sent, and no time runs out."""
        self._down = True
        self._resume_at = None

    def resume(self, now: float) -> None:
        """There is a path again, or there may be: call for the peer until it answers."""
        if not self.acked:
            raise RuntimeError("only acked streams can be resumed")
        self._down = False
        self._heard = now
        self._resume_at = now
        self._resume_until = now + RESUME_LIMIT
