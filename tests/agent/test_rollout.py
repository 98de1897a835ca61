"""The file: whatever stops the writer, everything before the last line is there, and it goes on."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exec_server.agent import rollout
from exec_server.agent.record import BadRecord, Record, SessionMeta
from exec_server.agent.rollout import (
    RolloutError,
    RolloutWriter,
    ThreadBusy,
    read_meta,
    read_rollout,
    timestamp,
)
from support.wait import eventually

FACTS = {"id": "t1", "timestamp": "T", "cwd": "/", "originator": "o", "cli_version": "1"}
META = SessionMeta({**FACTS, "history_mode": "paginated"})
LEGACY = SessionMeta(FACTS)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_a_time() -> None:
    assert timestamp(1767323045.678) == "2026-01-02T03:04:05.678Z"
    assert timestamp(0) == "1970-01-01T00:00:00.000Z"


@pytest.mark.parametrize(("meta", "ordinals"), [(META, [0, 1, 2, 3, 4]), (LEGACY, [None] * 5)])
def test_t1_order_and_numbers_go_on(tmp_path: Path, meta: SessionMeta, ordinals: list[int | None]) -> None:
    path = tmp_path / "2026" / "01" / "r.jsonl"
    with RolloutWriter.create(str(path), meta, clock=lambda: 0.0) as writer:
        writer.append("response_item", {"n": 1})
        writer.append("event_msg", {"n": 2}, metadata={"extra": True})
    writer, loaded = RolloutWriter.open(str(path))
    with writer:
        assert [record.payload.get("n") for record in loaded.records] == [None, 1, 2]
        assert loaded.meta.id == "t1"
        writer.append("response_item", {"n": 3})
        writer.sync()
        writer.append("response_item", {"n": 4})
        assert writer.size == path.stat().st_size
    written = lines(path)
    assert [line.get("ordinal") for line in written] == ordinals
    assert [line["type"] for line in written[:3]] == ["session_meta", "response_item", "event_msg"]
    assert written[2]["metadata"] == {"extra": True}
    assert written[0]["timestamp"] == "1970-01-01T00:00:00.000Z"
    assert next(iter(written[1])) == "timestamp"
    assert os.listdir(path.parent) == ["r.jsonl"], "no draft is left behind"


def test_only_the_owner_reads_it(tmp_path: Path) -> None:
    with RolloutWriter.create(str(tmp_path / "r.jsonl"), META):
        assert (tmp_path / "r.jsonl").stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_there_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("precious")
    with pytest.raises(FileExistsError):
        RolloutWriter.create(str(path), META)
    assert path.read_text() == "precious"
    assert os.listdir(tmp_path) == ["r.jsonl"]


def test_a_file_system_without_links_and_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network and FUSE ones. No such file system is here, so the two calls say what they would."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(fcntl, "flock", refuse)
    path = tmp_path / "r.jsonl"
    with RolloutWriter.create(str(path), META) as writer:
        writer.append("x", {})
    assert os.listdir(tmp_path) == ["r.jsonl"]
    with pytest.raises(FileExistsError):
        RolloutWriter.create(str(path), META)
    assert len(lines(path)) == 2
    assert os.listdir(tmp_path) == ["r.jsonl"]


def test_copies_are_numbered_anew(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    copies = [Record({"timestamp": "T", "ordinal": 77, "type": "x", "payload": {"a": 1}, "metadata": 5})]
    with RolloutWriter.create(str(path), META, copies, first_ordinal=10) as writer:
        assert writer.next_ordinal == 12
    assert lines(path)[1] == {**copies[0].value, "ordinal": 11}


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    path = str(tmp_path / "r.jsonl")
    with RolloutWriter.create(path, META) as writer:
        with pytest.raises(ThreadBusy, match="being written by somebody else"):
            RolloutWriter.open(path)
        writer.append("x", {})
        assert len(read_rollout(path).records) == 2, "reading is for everybody"
    RolloutWriter.open(path)[0].close()


# Reading -----------------------------------------------------------------------------------------


def test_what_is_no_line_is_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    meta = json.dumps({"type": "session_meta", "payload": {"id": "first"}})
    other = json.dumps({"type": "session_meta", "payload": {"id": "copied"}})
    unknown = json.dumps({"type": "new", "payload": 1})
    torn = '{"type": "torn'
    path.write_text(f"\n{meta}\n\n   \nnot json\n[1]\n{unknown}\n{other}\n{torn}")
    loaded = read_rollout(str(path))
    assert loaded.meta.id == "first"
    assert [record.type for record in loaded.records] == ["session_meta", "new", "session_meta"]
    assert loaded.skipped == 2
    assert path.read_bytes()[: loaded.end].endswith(b"\n")
    assert path.read_text()[loaded.end :] == torn


@pytest.mark.parametrize(
    "content", ["", "\n\n", "nonsense\n", '{"type": "x"}\n', '{"type": "session_meta"}\n']
)
def test_what_is_no_rollout(tmp_path: Path, content: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(content)
    with pytest.raises(RolloutError, match="is not the record of a thread"):
        read_rollout(str(path))
    with pytest.raises(RolloutError):
        RolloutWriter.open(str(path))
    assert read_meta(str(path)) is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=30),
            st.sampled_from(
                [b'{"type":"session_meta","payload":{"id":"t"}}', b'{"type":"x","ordinal":3}', b"{}"]
            ),
        ),
        max_size=8,
    )
)
def test_any_file_is_read_or_refused(tmp_path: Path, content: list[bytes]) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(b"\n".join(content))
    try:
        loaded = read_rollout(str(path))
    except RolloutError:
        return
    assert loaded.meta.id == "t"
    whole = path.read_bytes()
    for record in loaded.records:
        assert record.line in whole
    assert loaded.end <= len(whole)


def test_the_first_line_alone(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    RolloutWriter.create(str(path), META).close()
    with path.open("a") as file:
        file.write("x" * 10**6)
    meta = read_meta(str(path))
    assert meta is not None
    assert meta.payload == META.payload


# Crashes -----------------------------------------------------------------------------------------


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(
    payloads=st.lists(st.dictionaries(st.text(max_size=4), st.text(max_size=20), max_size=2), max_size=6),
    cut=st.floats(0, 1),
    garbage=st.binary(max_size=4),
)
def test_t3_cut_anywhere_nothing_before_is_lost(
    tmp_path: Path, payloads: list[dict[str, str]], cut: float, garbage: bytes
) -> None:
    path = tmp_path / "r.jsonl"
    path.unlink(missing_ok=True)
    with RolloutWriter.create(str(path), META) as writer:
        for payload in payloads:
            writer.append("x", payload)
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    end = first + round(cut * (len(whole) - first))
    # A power cut may leave anything at the end, but not another line.
    path.write_bytes(whole[:end] + garbage.replace(b"\n", b"?"))
    kept = whole[:end].count(b"\n")
    before = read_rollout(str(path))
    assert [record.line for record in before.records][:kept] == whole[:end].split(b"\n")[:kept]
    writer, loaded = RolloutWriter.open(str(path))
    with writer:
        assert [record.line for record in loaded.records] == [record.line for record in before.records]
        assert kept <= len(loaded.records) <= kept + 1
        writer.append("x", {"after": "the crash"})
    after = path.read_bytes()
    assert after.startswith(whole[: whole[:end].rfind(b"\n") + 1])
    written = [json.loads(line) for line in after.splitlines()]
    assert [line["ordinal"] for line in written] == list(range(len(written)))
    assert written[-1]["payload"] == {"after": "the crash"}
    assert after.endswith(b"\n")


def test_a_last_line_that_only_lacks_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with RolloutWriter.create(str(path), META) as writer:
        writer.append("x", {"kept": True})
    path.write_bytes(path.read_bytes()[:-1])
    writer, loaded = RolloutWriter.open(str(path))
    with writer:
        assert loaded.records[-1].payload == {"kept": True}
        writer.append("x", {})
    assert [line["ordinal"] for line in lines(path)] == [0, 1, 2]


def test_a_long_torn_line_takes_no_longer_than_its_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that are put together again and again would take minutes here."""
    monkeypatch.setattr(rollout, "REPAIR_BYTES", 64)
    path = tmp_path / "file.jsonl"
    with RolloutWriter.create(str(path), META):
        pass
    whole = path.read_bytes()
    with path.open("ab") as file:
        file.write(b'{"type": "' + b"x" * 4_000_000)
    began = time.monotonic()
    RolloutWriter.open(str(path))[0].close()
    assert time.monotonic() - began < 20
    assert path.read_bytes() == whole


def test_a_torn_line_longer_than_any_block(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    RolloutWriter.create(str(path), META).close()
    whole = path.read_bytes()
    with path.open("ab") as file:
        file.write(b'{"type":"x","payload":"' + b"y" * 300_000)
    RolloutWriter.open(str(path))[0].close()
    assert path.read_bytes() == whole


KILLED = """
import json, sys
from exec_server.agent.record import Record, SessionMeta
from exec_server.agent.rollout import RolloutWriter
writer = RolloutWriter.create(sys.argv[1], SessionMeta(json.loads(sys.argv[2])))
while True:
    writer.append("x", {"text": "y" * 5000})
"""


def test_killed_while_writing(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    command = [sys.executable, "-c", KILLED, str(path), json.dumps(META.payload)]
    with subprocess.Popen(command) as writer:
        eventually(lambda: path.exists() and path.stat().st_size > 200_000, "some lines")
        writer.send_signal(signal.SIGKILL)
    survivor, loaded = RolloutWriter.open(str(path))
    with survivor:
        survivor.append("x", {})
    assert loaded.skipped == 0
    assert [line["ordinal"] for line in lines(path)] == list(range(len(loaded.records) + 1))


FULL = """
import resource, signal, sys
from exec_server.agent.rollout import RolloutWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer, loaded = RolloutWriter.open(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (writer.size + 100, resource.RLIM_INFINITY))
try:
    writer.append("x", {"text": "y" * 5000})
except OSError as error:
    print(error.strerror)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
writer.append("x", {"text": "there is room again"})
"""


def test_a_full_disk_leaves_no_part_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    RolloutWriter.create(str(path), META).close()
    done = subprocess.run([sys.executable, "-c", FULL, str(path)], capture_output=True, text=True, timeout=30)
    assert done.stdout == "File too large\n", done.stderr
    written = lines(path)
    assert [line["ordinal"] for line in written] == [0, 1]
    assert written[1]["payload"] == {"text": "there is room again"}


def test_threads_share_a_writer(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with RolloutWriter.create(str(path), META) as writer:

        def append() -> None:
            for number in range(100):
                writer.append("a", {"number": number, "text": "x" * 500})

        workers = [threading.Thread(target=append) for _ in range(8)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert [line["ordinal"] for line in lines(path)] == list(range(801))


def test_processes_do_not(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with RolloutWriter.create(str(path), META) as writer:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                writer.append("a", {})
            except BaseException as error:
                os.write(writing, f"{type(error).__name__}: {error}".encode())
            os._exit(0)
        os.close(writing)
        with open(reading, "rb") as said:
            assert said.read().startswith(b"RolloutError: %b is being written by process" % bytes(path))
        os.waitpid(child, 0)
        writer.append("a", {})
    assert [line["ordinal"] for line in lines(path)] == [0, 1]


@pytest.mark.parametrize(
    ("kind", "payload", "more", "said"),
    [
        ("a", {}, {"ordinal": 7}, "`ordinal` cannot be given"),
        ("a", {}, {"type": "b", "timestamp": "T"}, "`timestamp`, `type` cannot be given"),
        ("session_meta", {"id": "x"}, {}, "is the first record of a thread"),
        ("", {}, {}, "the type of a record is a word"),
        ("a", [], {}, "the payload of a record is an object, not list"),
        ("a", {"x": float("nan")}, {}, "payload.x is nan"),
    ],
)
def test_records_that_are_refused(
    tmp_path: Path, kind: str, payload: Any, more: dict[str, Any], said: str
) -> None:
    path = tmp_path / "r.jsonl"
    with RolloutWriter.create(str(path), META) as writer:
        before = path.read_bytes()
        with pytest.raises(BadRecord, match=said):
            (writer.append)(kind, payload, **more)
        assert path.read_bytes() == before
        assert writer.append("a", {}, extra=1).ordinal == 1


def test_after_the_end(tmp_path: Path) -> None:
    writer = RolloutWriter.create(str(tmp_path / "r.jsonl"), META)
    writer.close()
    for use in (lambda: writer.append("a", {}), writer.sync, lambda: writer.size):
        with pytest.raises(RolloutError, match="is closed here; resume the thread"):
            use()


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    path = str(tmp_path / "r.jsonl")
    os.mkfifo(path)
    for use in (read_meta, read_rollout, RolloutWriter.open):
        with pytest.raises(RolloutError, match="is not a file"):
            use(path)
