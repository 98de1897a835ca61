"""What a stream comes down to: exactly what was written down for every recording."""

from __future__ import annotations

from pathlib import Path

import pytest

from exec_server.events.reader import read_events
from exec_server.events.summary import summarise
from support.streams import EXPECTED, NAMES, chunks, stream


@pytest.mark.parametrize("name", NAMES)
def test_every_recording(name: str) -> None:
    assert summarise([stream(name)]) == EXPECTED[name]
    assert summarise(chunks(stream(name), 1009)) == EXPECTED[name]
    assert summarise(iter(chunks(stream(name), 4096))) == EXPECTED[name]
    assert summarise(read_events([stream(name)])) == EXPECTED[name]


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(stream("resume_1_first") + stream("web_search"))
    assert summarise(str(path)) == EXPECTED["web_search"], "the last run counts"


def test_nothing() -> None:
    assert summarise([])["outcome"] == summarise([b""])["outcome"] == "none"
    assert summarise([])["thread_id"] is None
