"""The words of `exec`, and what is piped to it: as callers of the reference give them."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
import pytest

from exec_server.cli.exec_input import read_prompt, take_words


@pytest.mark.parametrize(
    ("words", "last", "prompt", "chosen"),
    [
        ((), False, None, {}),
        (("do it",), False, "do it", {}),
        (("resume", "ID", "go on"), False, "go on", {"resume": "ID"}),
        (("resume", "ID"), False, None, {"resume": "ID"}),
        (("resume", "go on"), True, "go on", {}),
        (("resume",), True, None, {}),
        (("fork", "ID", "another way"), False, "another way", {"fork": "ID"}),
    ],
)
def test_words(words: tuple[str, ...], last: bool, prompt: str | None, chosen: dict[str, str]) -> None:
    options: dict[str, Any] = {"last": last}
    assert take_words(words, options) == prompt
    assert options == {"last": last, **chosen}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("resume",), "resume which thread?"),
        (("fork",), "fork which thread?"),
        (("two", "prompts"), "put it in quotes"),
        (("resume", "ID", "two", "prompts"), "put it in quotes"),
    ],
)
def test_words_that_make_no_sense(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(click.UsageError, match=said):
        take_words(words, {"last": False})


@contextmanager
def piped(monkeypatch: pytest.MonkeyPatch, data: bytes | None) -> Iterator[None]:
    """A pipe with this in it where stdin is; None for the null device."""
    if data is None:
        reading = os.open(os.devnull, os.O_RDONLY)
    else:
        reading, writing = os.pipe()
        os.write(writing, data)
        os.close(writing)
    with io.TextIOWrapper(open(reading, "rb")) as stdin, monkeypatch.context() as patched:
        patched.setattr("sys.stdin", stdin)
        yield


@pytest.mark.parametrize(
    ("prompt", "data", "whole"),
    [
        ("look", b"one\ntwo\n", "look\n\n<stdin>\none\ntwo\n</stdin>"),
        ("look", b"one", "look\n\n<stdin>\none\n</stdin>"),
        ("look", b" \n", "look"),
        ("look", None, "look"),
        (None, b"from the pipe\n", "from the pipe\n"),
        ("-", b"from the pipe", "from the pipe"),
        ("look", b"\xff", "look\n\n<stdin>\n\ufffd\n</stdin>"),
    ],
)
def test_prompts(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    prompt: str | None,
    data: bytes | None,
    whole: str,
) -> None:
    with piped(monkeypatch, data):
        assert read_prompt(prompt) == whole
    waits = prompt == "look" and data is not None
    assert ("Reading additional input from stdin..." in capsys.readouterr().err) == waits


@pytest.mark.parametrize("prompt", [None, "-"])
def test_no_prompt(monkeypatch: pytest.MonkeyPatch, prompt: str | None) -> None:
    with piped(monkeypatch, b" "), pytest.raises(SystemExit):
        read_prompt(prompt)


def test_nobody_who_could_type_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some starters close stdin altogether."""
    monkeypatch.setattr("sys.stdin", None)
    assert read_prompt("look") == "look"
    with pytest.raises(click.UsageError):
        read_prompt("-")
