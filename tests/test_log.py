"""Log lines that get through."""

from __future__ import annotations

import subprocess
import sys

LINES = """
import sys
from exec_server import log
{setup}
log.configure({level!r}, {as_json})
log.debug("d"); log.info("i", a=1); log.warning("w"); log.error("e", reason="why")
"""


def written(level: str, as_json: bool = False, setup: str = "") -> str:
    code = LINES.format(level=level, as_json=as_json, setup=setup)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == ""
    return done.stderr


def test_levels() -> None:
    assert written("off") == ""
    assert [line.split("]")[0].split("[")[-1].strip() for line in written("info").splitlines()] == [
        "info",
        "warning",
        "error",
    ]


def test_lines_for_machines() -> None:
    import json

    (line,) = written("error", as_json=True).splitlines()
    parsed = json.loads(line)
    assert (parsed["event"], parsed["reason"], parsed["level"]) == ("e", "why", "error")


def test_a_line_gets_through_when_nothing_can_be_imported() -> None:
    assert written("error", setup="sys.modules['structlog'] = None") == "[error] e reason='why'\n"


def test_a_closed_stderr_is_survived() -> None:
    assert written("debug", setup="sys.stderr.close()") == ""


def test_text_of_others_stays_on_its_line() -> None:
    """And moves no cursor; what came with an exception is shown over several lines, as ever."""
    said = written(
        "off",
        setup="""
log.configure("error", False)
log.error("e\\x1b[2J", reason="a\\r\\nError: forged \\x9b1m", number=3, what=b"\\x1b")
try:
    raise ValueError("first\\x1b[2J")
except ValueError as error:
    log.error("x", exc_info=error)
""",
    )
    first, *rest = said.splitlines()
    assert r"e\x1b[2J" in first
    assert r"nError: forged" in first  # with as many backslashes as its quotes need
    assert r"x9b1m" in first
    assert "number=3" in first
    assert any(r"ValueError: first\x1b[2J" in line for line in rest), rest
    assert "\x1b" not in said
