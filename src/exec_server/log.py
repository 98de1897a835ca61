"""Logs for the person at 3 a.m.: silent by default, one line per event when asked.

structlog does the work, and is imported by the first line that is really written.
"""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from typing import Any, Final

__all__ = ["LEVELS", "configure", "debug", "error", "escaped", "info", "warning"]

LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40, "off": 100}
"""Names for `--log-level`."""

_level: int = LEVELS["error"]
_as_json: bool = False
_logger: Any = None


def configure(level: str, as_json: bool) -> None:
    """Set what is logged, and whether a line is for people or for machines."""
    global _level, _as_json, _logger
    _level, _as_json, _logger = LEVELS[level], as_json, None


def debug(event: str, **details: Any) -> None:
    """Something a developer of this program wants to see."""
    if _level <= 10:
        _write("debug", event, details)


def info(event: str, **details: Any) -> None:
    """Something that happened as it should."""
    if _level <= 20:
        _write("info", event, details)


def warning(event: str, **details: Any) -> None:
    """Something an operator may want to act on."""
    if _level <= 30:
        _write("warning", event, details)


def error(event: str, **details: Any) -> None:
    """Something an operator must act on."""
    if _level <= 40:
        _write("error", event, details)


def _write(level: str, event: str, details: dict[str, Any]) -> None:
    global _logger
    try:
        if _logger is None:
            _logger = _make_logger()
        getattr(_logger, level)(event, **details)
    except (OSError, ImportError):
        _write_plainly(level, event, details)
    except ValueError:
        pass  # stderr is closed; the work goes on


def _make_logger() -> Any:
    import structlog

    renderer: Any = (
        structlog.processors.JSONRenderer()
        if _as_json
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    return structlog.wrap_logger(
        structlog.PrintLogger(sys.stderr),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            _escape,
            renderer,
        ],
    )


def escaped(text: str) -> str:
    """On one line, and without anything that would steer a terminal: there may be words of a peer in it."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _escape(_: Any, __: str, details: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Every text of a line; a traceback keeps its lines."""
    if _as_json:
        return details  # which escapes in its own way
    for name, value in details.items():
        if isinstance(value, str):
            lines = value.split("\n") if name == "exception" else [value]
            details[name] = "\n".join(map(escaped, lines))
    return details


def _write_plainly(level: str, event: str, details: dict[str, Any]) -> None:
    """When nothing can be opened any more, not even the logger, which is when a log line matters most."""
    words = [f"[{level}] {event}", *(f"{name}={value!r}" for name, value in details.items())]
    try:
        sys.stderr.write(" ".join(words) + "\n")
    except (OSError, ValueError):
        pass  # nobody takes the log any more; the work goes on
