"""Who says whether something may be done: a person at the terminal, or nobody."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from exec_server.agent.approvals import Approver, Question
from exec_server.agent.exec import Declined

QUESTION = """
import asyncio, fcntl, termios
from exec_server.agent.approvals import Question, ask_on_terminal
QUESTION = Question(kind="command", what="rm \\x1b[2Jx", why="because", outside=True)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
raise SystemExit(7 if asyncio.run(ask_on_terminal(QUESTION)) else 8)
"""


@pytest.mark.parametrize(("typed", "code"), [(b"y\n", 7), (b"yes\n", 7), (b"\n", 8), (b"no\n", 8)])
def test_a_question_on_the_terminal(typed: bytes, code: int) -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, "-c", QUESTION]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as asking:
        os.close(theirs)
        shown = b""
        while not shown.endswith(b"[y/N] "):
            shown += os.read(ours, 1000)
        os.write(ours, typed)
        assert asking.wait(30) == code
    os.close(ours)
    assert b"May this run outside the sandbox?" in shown
    assert b"rm \\u001b[2Jx" in shown, "what a model wrote does not steer the terminal"


def test_what_was_typed_before_the_question_is_no_answer() -> None:
    """Whatever somebody meant who typed ahead, it was not this."""
    ours, theirs = os.openpty()
    os.write(ours, b"y\nyes\ny")
    with subprocess.Popen(
        [sys.executable, "-c", QUESTION], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as asking:
        os.close(theirs)
        shown = b""
        while not shown.endswith(b"[y/N] "):
            shown += os.read(ours, 1000)
        assert asking.poll() is None
        os.write(ours, b"\n")
        assert asking.wait(30) == 8
    os.close(ours)


def test_a_question_can_be_interrupted() -> None:
    """Ctrl-C at the question ends it; nobody has to answer first."""
    ours, theirs = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", QUESTION], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as asking:
        os.close(theirs)
        shown = b""
        while not shown.endswith(b"[y/N] "):
            shown += os.read(ours, 1000)
        os.write(ours, b"\x03")
        try:
            assert asking.wait(20) not in (7, 8)
        finally:
            asking.kill()
    os.close(ours)


def test_nobody_to_ask() -> None:
    command = [sys.executable, "-c", QUESTION.replace("fcntl.ioctl(0, termios.TIOCSCTTY, 0)", "")]
    done = subprocess.run(command, start_new_session=True, stdin=subprocess.DEVNULL, timeout=30, check=False)
    assert done.returncode == 8


def test_one_question_at_a_time() -> None:
    asking = 0
    most = 0

    async def ask(question: Question) -> bool:
        nonlocal asking, most
        asking += 1
        most = max(most, asking)
        await asyncio.sleep(0)
        asking -= 1
        return question.what == "yes"

    async def main() -> list[object]:
        approver = Approver("on-request", None, ask)
        questions = [Question(kind="edit", what=what) for what in ("yes", "no", "yes")]
        return await asyncio.gather(*map(approver.approve, questions), return_exceptions=True)

    first, second, third = asyncio.run(main())
    assert (first, third) == (None, None)
    assert isinstance(second, Declined)
    assert most == 1


@pytest.mark.parametrize("mode", ["never", "on-request"])
def test_nobody_who_could_be_asked(mode: str) -> None:
    async def main() -> None:
        approver = Approver("never" if mode == "never" else "on-request")
        assert not approver.can_ask
        await approver.approve(Question(kind="tool", what="x"))

    with pytest.raises(Declined, match="the approval policy is never"):
        asyncio.run(main())
