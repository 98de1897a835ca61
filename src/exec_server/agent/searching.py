"""Web searches that the model's provider makes by itself, as they come up in its answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..events.model import SearchAction, WebSearch

if TYPE_CHECKING:
    from ..events.writer import EventWriter

__all__ = ["Searches"]


class Searches:
    """The searches of a run, by the provider's own ids."""

    def __init__(self, writer: EventWriter) -> None:
        self._writer = writer
        self._open: dict[str, str] = {}

    def began(self, item: dict[str, Any]) -> None:
        """Something was begun; shown if it is a search."""
        if item.get("type") == "web_search_call":
            source = str(item.get("id", ""))
            self._open[source] = self._writer.started(WebSearch(query="", source_id=source))

    def ended(self, item: dict[str, Any]) -> None:
        """Something is over; shown if it is a search, also if its beginning was not."""
        if item.get("type") != "web_search_call":
            return
        source = str(item.get("id", ""))
        if source not in self._open:
            self.began(item)
        item_id = self._open.pop(source)
        if item_id not in self._writer.open_items:
            return  # its turn is over, and it was closed with that
        action = _action(item.get("action"))
        self._writer.completed(WebSearch(query=_query(action), action=action, source_id=source), item_id)


def _action(value: Any) -> SearchAction:
    value = value if isinstance(value, dict) else {}

    def text(name: str) -> str | None:
        found = value.get(name)
        return found if isinstance(found, str) else None

    kind = text("type")
    if kind == "search":
        queries = value.get("queries")
        listed = tuple(one for one in queries if isinstance(one, str)) if isinstance(queries, list) else None
        return SearchAction(type=kind, query=text("query"), queries=listed)
    if kind == "open_page":
        return SearchAction(type=kind, url=text("url"))
    if kind == "find_in_page":
        return SearchAction(type=kind, url=text("url"), pattern=text("pattern"))
    return SearchAction()


def _query(action: SearchAction) -> str:
    if action.type == "search":
        return action.query or next(iter(action.queries or ()), "")
    if action.type == "find_in_page" and action.pattern is not None:
        return f"'{action.pattern}' in {action.url}" if action.url else f"'{action.pattern}'"
    return action.url or ""
