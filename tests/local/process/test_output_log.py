"""local/process/output_log.py: against a model that keeps everything."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from exec_server.local.process.output_log import Chunk, OutputLog


class Model:
    """Says what a log of these bounds must say, in the words of the specification."""

    def __init__(self, max_bytes: int, max_chunks: int, head: int) -> None:
        self.max_bytes, self.max_chunks, self.head_limit = max_bytes, max_chunks, head
        self.all: list[Chunk] = []
        self.retained: list[Chunk] = []
        self.next_seq = 1
        self.exited = self.closed = False

    def take(self) -> int:
        self.next_seq += 1
        return self.next_seq - 1

    def append(self, stream: Any, data: bytes) -> int:
        chunk = Chunk(self.take(), stream, data)
        self.all.append(chunk)
        self.retained.append(chunk)
        while self.size > self.max_bytes or len(self.retained) > self.max_chunks:
            del self.retained[0]
        return chunk.seq

    @property
    def size(self) -> int:
        return sum(len(chunk.data) for chunk in self.retained)

    @property
    def total(self) -> int:
        return sum(len(chunk.data) for chunk in self.all)

    def read(self, after: int, budget: int | None) -> tuple[list[Chunk], int]:
        chunks: list[Chunk] = []
        total, following = 0, self.next_seq
        for chunk in self.retained:
            if chunk.seq <= after:
                continue
            if chunks and budget is not None and total + len(chunk.data) > budget:
                break
            chunks.append(chunk)
            total += len(chunk.data)
            following = chunk.seq + 1
            if budget is not None and total >= budget:
                break
        return chunks, self.next_seq if budget is None else following

    def joined(self, stream: Any) -> bytes:
        evicted = self.all[: len(self.all) - len(self.retained)]
        head, left = [], self.head_limit
        for chunk in evicted:
            head.append((chunk.stream, chunk.data[:left]))
            left -= len(head[-1][1])
        parts = [*head, *((chunk.stream, chunk.data) for chunk in self.retained)]
        return b"".join(data for name, data in parts if name == stream)


appends = st.tuples(st.sampled_from(["stdout", "stderr"]), st.binary(min_size=1, max_size=12))
operations = st.lists(appends | st.sampled_from(["exit", "close"]), max_size=40)
bounds = st.tuples(st.integers(1, 60), st.integers(1, 12), st.integers(0, 20))


@given(
    bounds, operations, st.lists(st.tuples(st.integers(0, 50), st.none() | st.integers(0, 40)), max_size=8)
)
def test_says_what_the_model_says(
    limits: tuple[int, int, int], steps: list[Any], reads: list[tuple[int, int | None]]
) -> None:
    log, model = OutputLog(*limits), Model(*limits)
    for step in steps:
        if model.closed:
            break
        if step == "exit":
            if not model.exited:
                model.exited = True
                assert log.exit(7) == model.take()
        elif step == "close":
            if model.exited:
                model.closed = True
                assert log.close() == model.take()
        else:
            assert log.append(*step) == model.append(*step)
        assert log.next_seq == model.next_seq
        assert (log.exited, log.closed) == (model.exited, model.closed)
        assert log.exit_code == (7 if model.exited else None)

        retained, following = log.read(0, None)
        assert sum(len(chunk.data) for chunk in retained) <= limits[0]
        assert len(retained) <= limits[1]
        assert (retained, following) == model.read(0, None)
        for after, budget in reads:
            assert log.read(after, budget) == model.read(after, budget)

        shown = [log.joined(stream) for stream in ("stdout", "stderr", "pty")]
        assert shown == [model.joined(stream) for stream in ("stdout", "stderr", "pty")]
        assert log.total_bytes == model.total
        assert sum(map(len, shown)) + log.dropped_bytes == log.total_bytes
        assert log.dropped_bytes >= 0


def test_a_reader_that_follows_gets_everything_once() -> None:
    log = OutputLog(1000, 1000, 0)
    seen: list[int] = []
    after = 0
    for number in range(50):
        log.append("stdout", b"x" * (number % 7 + 1))
        if number == 20:
            log.exit(0)
        if number % 3 == 0:
            while True:
                chunks, following = log.read(after, 5)
                seen.extend(chunk.seq for chunk in chunks)
                if after == following - 1:
                    break
                after = following - 1
    chunks, _ = log.read(after, None)
    seen.extend(chunk.seq for chunk in chunks)
    assert seen == [seq for seq in range(1, 52) if seq != log.exited_seq]


def test_a_chunk_larger_than_all_that_is_kept_is_numbered_and_counted() -> None:
    log = OutputLog(10, 100, 4)
    assert log.append("stdout", b"0123456789abc") == 1
    assert log.read(0, None) == ([], 2)
    assert log.joined("stdout") == b"0123"
    assert log.dropped_bytes == 9
    assert log.append("stdout", b"next") == 2
    assert log.joined("stdout") == b"0123next"


@given(
    st.lists(st.integers(1, 30) | st.tuples(st.just("received"), st.integers(0, 60)), max_size=80),
    st.integers(20, 120),
)
def test_what_was_not_received_is_kept_longer(steps: list[Any], window: int) -> None:
    """Within the window nothing falls out that was not received; what was received falls out as ever."""
    log = OutputLog(20, 1000, 0, window)
    log.acknowledged = 0
    sizes: list[int] = []
    lost: set[int] = set()
    for step in steps:
        if isinstance(step, int):
            log.append("stdout", b"x" * step)
            sizes.append(step)
        else:
            log.acknowledge(step[1])
        retained = [chunk.seq for chunk in log.read(0, None)[0]]
        kept = sum(sizes[seq - 1] for seq in retained)
        assert retained == list(range(len(sizes) - len(retained) + 1, len(sizes) + 1))
        assert kept <= window
        if retained and retained[0] <= log.acknowledged:
            assert kept <= 20
        missing = {seq for seq in range(log.acknowledged + 1, len(sizes) + 1) if seq not in retained}
        if missing - lost:
            assert isinstance(step, int)
            assert sum(size for seq, size in enumerate(sizes, 1) if seq > log.acknowledged) > window
        lost |= missing


def test_many_small_chunks_have_a_bound_of_their_own() -> None:
    log = OutputLog(10_000, 5, 0, 100_000)
    log.acknowledged = 0
    for _ in range(100):
        log.append("stdout", b"x")
    assert len(log.read(0, None)[0]) == 20
    log.acknowledge(100)
    assert len(log.read(0, None)[0]) == 5
