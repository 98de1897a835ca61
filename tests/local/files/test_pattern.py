"""Patterns for paths."""

from __future__ import annotations

import time

import pytest

from exec_server.local.files.pattern import BadPattern, PathPattern, check_closed


@pytest.mark.parametrize(
    ("pattern", "fitting", "others"),
    [
        ("*.py", ["a.py", ".py"], ["a/b.py", "a.pyc", ""]),
        ("**/*.py", ["a.py", "a/b.py", "a/b/c.py"], ["a/b.txt"]),
        ("src/**", ["src/a", "src/a/b"], ["a", "lib/src"]),
        ("a/**/b", ["a/b", "a/x/b", "a/x/y/b"], ["b", "a/b/c"]),
        ("**", ["a", "a/b"], []),
        ("?.c", ["x.c", "ü.c"], ["xx.c", ".c"]),
        ("[a-c]x", ["ax", "cx"], ["dx", "x"]),
        ("[!a-c]x", ["dx"], ["ax"]),
        ("[]]x", ["]x"], ["x"]),
        ("[x", ["[x"], ["x"]),
        ("[[]x", ["[x"], ["x"]),
        ("[{]x[}]", ["{x}"], ["x"]),
        ("{a,b{c,d}}.x", ["a.x", "bc.x", "bd.x"], ["b.x"]),
        ("{a}", ["{a}"], ["a"]),
        (r"\*", ["*"], ["a"]),
        ("./a//b/", ["a/b"], ["a"]),
        ("a.b", ["a.b"], ["axb"]),
        ("*a*b*c", ["abc", "xaybzc", "aabbcc"], ["acb"]),
        ("***", ["a"], []),
    ],
)
def test_what_fits(pattern: str, fitting: list[str], others: list[str]) -> None:
    compiled = PathPattern(pattern)
    for path in fitting:
        assert compiled.fits(path), path
    for path in others:
        assert not compiled.fits(path), path


def test_hidden_names() -> None:
    assert not PathPattern("*").fits(".x", hidden=False)
    assert PathPattern(".*").fits(".x", hidden=False)
    assert not PathPattern("**/f").fits(".git/f", hidden=False)
    assert PathPattern(".git/**").fits(".git/f", hidden=False)


@pytest.mark.parametrize("pattern", ["", "/", "../x", "a/../b", "[z-a]", "{a,b}" * 9])
def test_what_is_no_pattern(pattern: str) -> None:
    with pytest.raises(BadPattern):
        PathPattern(pattern)


@pytest.mark.parametrize("pattern", ["[", "[x", "[!", "{a", "a}", "{a,{b}", "[]"])
def test_what_is_not_closed(pattern: str) -> None:
    with pytest.raises(BadPattern, match=r"is not closed|has no"):
        check_closed(pattern)
    PathPattern(pattern)


def test_what_is_closed() -> None:
    for pattern in ("[]]", "[{]", "{a,[}]}", r"\{", r"\[", "{a,{b,c}}"):
        check_closed(pattern)


def test_stars_do_not_think_for_ever() -> None:
    begun = time.process_time()
    assert not PathPattern("a*" * 100 + "b").fits("a" * 250)
    assert time.process_time() - begun < 1
