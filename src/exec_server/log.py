"""Logs for the person at 3 a.m.: silent by default, one line per event when asked.

structlog does the work, and is imported by the first line that is really written.
"""

from __future__ import annotations

import sys
from typing import Any, Final

__all__ = ["LEVELS", "configure", "debug", "error", "info", "warning"]

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
    if _logger is None:
        import structlog

        renderer: Any = (
            structlog.processors.JSONRenderer()
            if _as_json
            else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
        )
        _logger = structlog.wrap_logger(
            structlog.PrintLogger(sys.stderr),
            processors=[
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso"),
                structlog.processors.format_exc_info,
                renderer,
            ],
        )
    try:
        getattr(_logger, level)(event, **details)
    except (OSError, ValueError):
        pass  # nobody takes the log any more; the work goes on
