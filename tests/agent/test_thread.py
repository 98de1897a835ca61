"""Threads: start, resume, fork, list. R15 to R23, T1 to T7."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.agent.history import turn_starts
from exec_server.agent.record import Record
from exec_server.agent.rollout import RolloutError, ThreadBusy
from exec_server.agent.thread import Thread, Threads, new_thread_id
from exec_server.environments.roots import SelectedRoot

P = SelectedRoot.select("plugin@1", "worker", "/plugins/demo")
Q = SelectedRoot.select("q", "other", "file:///C:/q")


@pytest.fixture
def threads(tmp_path: Path) -> Threads:
    return Threads(str(tmp_path))


def say(thread: Thread, text: str, role: str = "user") -> None:
    thread.append(
        "response_item",
        {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]},
    )


def talk(thread: Thread, turns: int, first: int = 1) -> None:
    for number in range(first, first + turns):
        thread.append("event_msg", {"type": "task_started"})
        if number == 1:
            say(thread, "<environment_context>…")
        say(thread, f"question {number}")
        say(thread, f"answer {number}", "assistant")
        thread.append("event_msg", {"type": "task_complete"})


def said(records: list[Record]) -> list[str]:
    return [record.payload["content"][0]["text"] for record in records if record.type == "response_item"]


def lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_bytes().splitlines()]


def selected(path: str) -> Any:
    """The member of the first record, as it is on disk."""
    first = lines(path)[0]
    assert first["type"] == "session_meta"
    return first["payload"].get("selected_capability_roots", "absent")


@given(st.floats(0, 2**38))
def test_an_id_is_a_uuid_that_knows_its_time(seconds: float) -> None:
    made = UUID(new_thread_id(lambda: seconds))
    assert (made.version, made.variant) == (7, "specified in RFC 4122")
    assert made.int >> 80 == int(seconds * 1000)


def test_ids_are_not_the_same() -> None:
    assert len({new_thread_id(lambda: 0.0) for _ in range(1000)}) == 1000


def test_t7_a_thread_without_a_word_has_no_file(threads: Threads) -> None:
    thread = threads.start("/w", roots=[P])
    assert not thread.exists
    thread.sync()
    thread.close()
    assert not os.path.exists(thread.path)
    assert threads.list() == []


def test_r15_r16_the_first_record_has_the_selection(threads: Threads) -> None:
    with threads.start("/w", roots=[P, Q], model_provider="m", more={"base_instructions": None}) as thread:
        talk(thread, 1)
    assert selected(thread.path) == [P.to_json(), Q.to_json()]
    assert P.path == "file:///plugins/demo"
    payload = lines(thread.path)[0]["payload"]
    assert payload["id"] == payload["session_id"] == thread.id
    assert (payload["cwd"], payload["model_provider"], payload["base_instructions"]) == ("/w", "m", None)
    assert {"timestamp", "originator", "cli_version", "source"} <= payload.keys()


def test_r18_no_roots_no_member(threads: Threads) -> None:
    with threads.start("/w") as thread:
        talk(thread, 1)
    assert selected(thread.path) == "absent"
    with threads.resume(thread.id) as resumed:
        assert resumed.roots == ()


def test_where_the_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Etc/GMT-5")
    time.tzset()
    try:
        thread = Threads(str(tmp_path), clock=lambda: 1767297845.6).start("/w")
    finally:
        monkeypatch.undo()
        time.tzset()
    # 20:04:05 in Greenwich is the next day, five hours further east.
    name = f"rollout-2026-01-02T01-04-05-{thread.id}.jsonl"
    assert thread.path == str(tmp_path / "sessions" / "2026" / "01" / "02" / name)


def test_r19_t1_resumed(threads: Threads) -> None:
    with threads.start("/w", roots=[P]) as thread:
        talk(thread, 1)
    with threads.resume(thread.id) as resumed:
        assert resumed.roots == (P,)
        assert said(resumed.history()) == ["<environment_context>…", "question 1", "answer 1"]
        talk(resumed, 1, first=2)
        assert said(resumed.history())[-1] == "answer 2"
    assert [line["ordinal"] for line in lines(thread.path)] == list(range(10))
    assert selected(thread.path) == [P.to_json()]
    with threads.resume(thread.path, roots=[Q]) as resumed:
        assert resumed.roots == (Q,), "roots that are given win"
    assert selected(thread.path) == [P.to_json()]


def test_only_one_goes_on_with_a_thread(threads: Threads) -> None:
    with threads.start("/w") as thread:
        talk(thread, 1)
        with pytest.raises(ThreadBusy):
            threads.resume(thread.id)
        assert said(threads.read(thread.id)[1])[-1] == "answer 1", "but everybody may read it"


def test_r17_an_older_record(threads: Threads, tmp_path: Path) -> None:
    path = tmp_path / "rollout-old.jsonl"
    meta = {
        "id": "old",
        "timestamp": "T",
        "cwd": "/",
        "originator": "o",
        "cli_version": "0",
        "instructions": None,
    }
    path.write_text(json.dumps({"timestamp": "T", "type": "session_meta", "payload": meta}) + "\n")
    with threads.resume(str(path)) as thread:
        assert thread.roots == ()
        say(thread, "hello")
        say(thread, "taken back")
        thread.append("event_msg", {"type": "thread_rolled_back", "num_turns": 1})
    assert "ordinal" not in lines(str(path))[1], "a thread that does not count goes on not counting"
    child = threads.fork(str(path))
    assert child.meta.forked_from_id == "old"
    assert [line["type"] for line in lines(child.path)] == ["session_meta", "response_item"]
    child.close()


def test_r20_a_whole_fork(threads: Threads) -> None:
    with threads.start("/w", roots=[P], more={"base_instructions": {"text": "x"}}) as parent:
        talk(parent, 2)
        with threads.fork(parent) as child:
            assert child.roots == (P,)
            inherited = [record.line for record in parent.history()]
            assert [record.line for record in child.history()] == inherited
            talk(child, 1, first=7)
            talk(parent, 1, first=3)
            assert said(child.history())[-2:] == ["question 7", "answer 7"]
    assert child.id != parent.id
    assert selected(child.path) == [P.to_json()]
    payload = lines(child.path)[0]["payload"]
    assert payload["forked_from_id"] == parent.id
    assert payload["base_instructions"] == {"text": "x"}
    assert "parent_thread_id" not in payload
    # It continues its parent's count, and its parent's later words are not its own.
    assert [line["ordinal"] for line in lines(child.path)] == list(range(10, 15))
    expected = ["<environment_context>…", "question 1", "answer 1", "question 2", "answer 2"]
    history = threads.read(child.id)[1]
    assert said(history) == [*expected, "question 7", "answer 7"]
    assert [record.line for record in history][: len(inherited)] == inherited
    assert len(history) == len(inherited) + 4
    with threads.resume(child.id) as again:
        assert said(again.history()) == [*expected, "question 7", "answer 7"]
        assert again.roots == (P,)


def test_forks_of_forks_go_back_to_the_beginning(threads: Threads) -> None:
    with threads.start("/w", roots=[P]) as parent:
        talk(parent, 1)
    current = parent.id
    for number in range(2, 6):
        with threads.fork(current) as child:
            talk(child, 1, first=number)
            current = child.id
    meta, history = threads.read(current)
    assert said(history)[1:] == [
        f"{word} {number}" for number in range(1, 6) for word in ("question", "answer")
    ]
    assert meta.selected_capability_roots == [P]
    with threads.fork(current, turns=2) as bounded:
        assert said(bounded.history()) == ["question 4", "answer 4", "question 5", "answer 5"]


def test_r21_the_last_two_turns_of_five(threads: Threads) -> None:
    with threads.start("/w", roots=[P]) as parent:
        talk(parent, 5)
        with threads.fork(parent, turns=2, subagent=True) as child:
            assert child.roots == (P,)
            assert said(child.history()) == ["question 4", "answer 4", "question 5", "answer 5"]
    written = lines(child.path)
    assert selected(child.path) == [P.to_json()]
    assert written[0]["payload"]["forked_from_id"] == parent.id
    assert written[0]["payload"]["parent_thread_id"] == parent.id
    assert written[0]["payload"]["session_id"] == parent.id
    assert "history_base" not in written[0]["payload"]
    assert [line["ordinal"] for line in written] == list(range(len(written)))
    assert [line["type"] for line in written].count("session_meta") == 1
    assert turn_starts(threads.read(child.id)[1])[0] == 0, "nothing before the first turn"


def test_r22_the_last_two_turns_of_one(threads: Threads) -> None:
    with threads.start("/w", roots=[P]) as parent:
        talk(parent, 1)
    with threads.fork(parent.id, turns=2) as child:
        assert said(child.history()) == ["question 1", "answer 1"]
        assert child.roots == (P,)


@pytest.mark.parametrize("turns", [0, 3, None])
def test_a_fork_without_history_still_has_the_selection(threads: Threads, turns: int | None) -> None:
    parent = threads.start("/w", roots=[P])
    if turns == 0:
        talk(parent, 2)
    with threads.fork(parent, turns=turns) as child:
        assert child.roots == (P,)
        assert child.history() == []
        assert not child.exists
        talk(child, 1)
    assert selected(child.path) == [P.to_json()]
    assert lines(child.path)[0]["payload"]["forked_from_id"] == parent.id
    parent.close()


def test_a_fork_of_a_fork_says_whose_it_is(threads: Threads) -> None:
    with threads.start("/w") as parent:
        talk(parent, 1)
    with threads.fork(parent.id, subagent=True) as child:
        pass
    with threads.fork(child.id, cwd="/elsewhere") as grandchild:
        payload = lines(grandchild.path)[0]["payload"]
    assert payload["forked_from_id"] == child.id
    assert "parent_thread_id" not in payload, "it works for nobody"
    assert payload["cwd"] == "/elsewhere"
    assert payload["history_base"]["thread_id"] == child.id


def test_turns_that_were_taken_back_are_not_inherited(threads: Threads) -> None:
    with threads.start("/w") as parent:
        talk(parent, 3)
        parent.append("event_msg", {"type": "thread_rolled_back", "num_turns": 2})
        talk(parent, 1, first=4)
        kept = ["<environment_context>…", "question 1", "answer 1", "question 4", "answer 4"]
        assert said(parent.history()) == kept
        for turns, expected in ((None, kept), (2, kept[1:]), (1, kept[3:])):
            with threads.fork(parent, turns=turns) as child:
                assert said(child.history()) == expected
            assert said(threads.read(child.id)[1]) == expected


def test_r23_what_is_selected_survives_whatever_happens(threads: Threads) -> None:
    """Nothing here asks whether `worker` is there, and a repair of the file does not touch the selection."""
    with threads.start("/w", roots=[P]) as thread:
        talk(thread, 1)
    with open(thread.path, "ab") as file:
        file.write(b'{"type":"torn')
    with threads.resume(thread.id) as resumed:
        talk(resumed, 1, first=2)
        assert resumed.roots == (P,)
    assert selected(thread.path) == [P.to_json()]


def test_t2_what_we_do_not_know_survives_a_fork(threads: Threads) -> None:
    with threads.start("/w", more={"future": {"x": [1]}}) as parent:
        say(parent, "question")
        parent.append("from_the_future", {"deep": {"er": None}}, also=[1, 2])
    with threads.fork(parent.id, turns=1) as child:
        pass
    first, _, strange = lines(child.path)
    assert first["payload"]["future"] == {"x": [1]}
    original = lines(parent.path)[2]
    assert {**strange, "ordinal": original["ordinal"]} == original


def test_a_base_that_is_missing_or_a_circle(threads: Threads) -> None:
    with threads.start("/w") as parent:
        talk(parent, 1)
    with threads.fork(parent.id) as child:
        pass
    os.unlink(parent.path)
    with pytest.raises(RolloutError, match=f"{child.id} goes on where the thread {parent.id} was"):
        threads.read(child.id)
    with pytest.raises(RolloutError):
        threads.resume(child.id)
    base = {"thread_id": child.id, "end_ordinal_exclusive": 1}
    meta = {"type": "session_meta", "ordinal": 0, "payload": {**child.meta.payload, "history_base": base}}
    Path(child.path).write_text(json.dumps(meta) + "\n")
    with pytest.raises(RolloutError, match="goes on where it was itself"):
        threads.read(child.id)


def test_who_is_not_there(threads: Threads) -> None:
    with pytest.raises(RolloutError, match="there is no thread `nobody`"):
        threads.resume("nobody")
    assert threads.find("nobody") is None


def test_the_list_is_newest_first(tmp_path: Path) -> None:
    now = 1767297845.0
    threads = Threads(str(tmp_path), clock=lambda: now)
    made = []
    for _ in range(4):
        with threads.start("/w", roots=[P]) as thread:
            say(thread, "hello")
        made.append(thread.id)
        now += 40_000
    directory = Path(thread.path).parent
    (directory / "notes.txt").write_text("x")
    (directory / f"rollout-2026-01-01T00-00-00-{new_thread_id()}.jsonl").write_text("not a thread\n")
    (directory / f"rollout-2026-01-01T00-00-01-{new_thread_id()}.jsonl").write_text("")
    found = threads.list()
    assert [summary.id for summary in found] == made[::-1]
    assert found[0].path == thread.path
    assert found[0].started in thread.path
    assert found[0].meta.selected_capability_roots == [P]


def test_a_link_beside_a_file_is_not_another_thread(threads: Threads) -> None:
    with threads.start("/w") as thread:
        say(thread, "hello")
    beside = Path(thread.path).parent / f"rollout-2026-01-01T00-00-00-{new_thread_id()}.jsonl"
    beside.symlink_to(thread.path)
    assert [(summary.id, summary.path) for summary in threads.list()] == [(thread.id, thread.path)]


def test_paths_are_taken_as_paths(threads: Threads) -> None:
    with threads.start(Path("/w")) as thread:
        say(thread, "hello")
    assert lines(thread.path)[0]["payload"]["cwd"] == "/w"
    with threads.resume(Path(thread.path)) as again:
        assert (again.id, again.skipped) == (thread.id, 0)
    assert said(threads.read(Path(thread.path))[1]) == ["hello"]
    with threads.fork(Path(thread.path), cwd=Path("/v")) as child:
        assert child.meta.cwd == "/v"


def test_what_makes_no_sense_is_refused_at_once(threads: Threads) -> None:
    anything: Any = threads
    with threads.start("/w") as thread:
        say(thread, "hello")
    for wrong in (
        lambda: anything.start(None),
        lambda: anything.start(b"/w"),
        lambda: anything.start("/w", roots=["x"]),
        lambda: anything.resume(7),
        lambda: anything.resume(thread.id, roots=[{"id": "x"}]),
        lambda: anything.fork(thread.id, turns=1.5),
        lambda: anything.fork(thread.id, turns=True),
        lambda: anything.fork(thread.id, cwd=7),
    ):
        with pytest.raises(TypeError):
            wrong()
    for name in ("id", "cwd", "session_id", "timestamp", "history_mode"):
        with pytest.raises(ValueError, match=f"`{name}` cannot be given in `more`"):
            threads.start("/w", more={name: "x", "base_instructions": None})
    with pytest.raises(ValueError, match="0 or more"):
        threads.fork(thread.id, turns=-1)


def test_lines_that_cannot_be_read_are_counted(threads: Threads) -> None:
    with threads.start("/w") as thread:
        say(thread, "hello")
    with open(thread.path, "ab") as file:
        file.write(b"nonsense\n[]\n")
    with threads.resume(thread.id) as again:
        say(again, "on")
        assert again.skipped == 2


def test_a_parent_that_was_changed_is_noticed(threads: Threads) -> None:
    with threads.start("/w") as parent:
        talk(parent, 3)
    whole = Path(parent.path).read_bytes()
    with threads.fork(parent.id) as child:
        say(child, "on")
    expected = len(threads.read(child.id)[1])
    lines = whole.splitlines(keepends=True)
    changed = [*lines[:-1], lines[-1].replace(b'"payload":', b'"payload" :   ')]
    for content in (b"".join(lines[:-2]), b"".join(lines[:1]), b"".join(changed)):
        Path(parent.path).write_bytes(content)
        with pytest.raises(RolloutError, match=f"the thread {parent.id} was, and that was changed since"):
            threads.read(child.id)
        with pytest.raises(RolloutError, match="changed since"):
            threads.resume(child.id)
    Path(parent.path).write_bytes(whole)
    with threads.resume(parent.id) as parent:
        talk(parent, 2)  # what comes later is not the child's
    assert len(threads.read(child.id)[1]) == expected


def test_a_thread_that_is_closed_says_so(threads: Threads) -> None:
    for words in (0, 1):
        thread = threads.start("/w")
        if words:
            say(thread, "hello")
        thread.close()
        with pytest.raises(RolloutError, match="is closed; resume it to go on with it"):
            say(thread, "more")


def test_turns_are_not_negative(threads: Threads) -> None:
    with threads.start("/w") as thread:
        talk(thread, 2)
    with pytest.raises(ValueError, match="0 or more, not -1"):
        threads.fork(thread.id, turns=-1)


def test_a_pipe_among_the_threads_is_not_waited_for(threads: Threads) -> None:
    with threads.start("/w") as thread:
        say(thread, "hello")
    os.mkfifo(
        os.path.join(os.path.dirname(thread.path), f"rollout-2026-01-02T03-04-05-{new_thread_id()}.jsonl")
    )
    assert [found.id for found in threads.list()] == [thread.id]
