"""Selected capability roots: what a thread wants to use, and what one step can have of it. Pure.

A selection is durable intent, "this root, of that environment", and is all that is ever written down.
Whether the environment is there, and through which handle, is looked up anew in every step, by the table
below. A root that cannot be had is left out; it is never forgotten, and nothing is raised.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

from msgspec import Struct

from .. import log
from ..wire.errors import RpcError
from ..wire.uri import parse, path_to_uri

__all__ = [
    "MAX_ADDED_ROOTS",
    "OUTCOMES",
    "BadRoot",
    "Candidate",
    "Outcome",
    "ResolvedRoot",
    "Seen",
    "SelectedRoot",
    "candidates",
    "combine",
]

MAX_ADDED_ROOTS: Final = 256
"""Roots beyond the thread's own that environments may add; the reference's bound."""

H = TypeVar("H")

_DRIVE: Final = re.compile(r"[A-Za-z]:[\\/]")
_FOREIGN: Final = str.maketrans({"\\": "/", "%": "%25", "?": "%3F", "#": "%23"})


class BadRoot(ValueError):
    """Not a selected root; says why."""


class SelectedRoot(Struct, frozen=True):
    """Use this root of that environment. Equal when all three are; `path` is a `file:` URI."""

    id: str
    environment_id: str
    path: str

    @classmethod
    def select(cls, root_id: str, environment_id: str, path: str) -> SelectedRoot:
        """A selection; the path is a `file:` URI or an absolute path as the environment writes it."""
        for text, what in (
            (root_id, "id of a root"),
            (environment_id, "id of an environment"),
            (path, "path"),
        ):
            if not isinstance(text, str):
                raise TypeError(f"the {what} is text, not {type(text).__name__}: {text!r}")
            if not text.strip():
                raise BadRoot(f"the {what} cannot be empty")
        return cls(root_id, environment_id, _to_uri(path))

    @classmethod
    def from_json(cls, value: Any) -> SelectedRoot:
        """As it was written down; BadRoot if it was not."""
        try:
            root_id, location = value["id"], value["location"]
            kind, environment_id, path = location["type"], location["environmentId"], location["path"]
        except (TypeError, KeyError) as error:
            raise BadRoot(f"a selected capability root without {error}: {value!r}") from None
        if kind != "environment":
            raise BadRoot(f"a selected capability root in a `{kind}`, which is no known kind of place")
        if not all(isinstance(text, str) for text in (root_id, environment_id, path)):
            raise BadRoot(f"a selected capability root whose members are not all text: {value!r}")
        return cls(root_id, environment_id, _to_uri(path))

    def to_json(self) -> dict[str, Any]:
        """As it is written down."""
        location = {"type": "environment", "environmentId": self.environment_id, "path": self.path}
        return {"id": self.id, "location": location}


def _to_uri(path: str) -> str:
    if path.startswith("/"):
        path = path_to_uri(path)
    elif _DRIVE.match(path):
        # A path of another operating system: its environment knows what it means.
        path = "file:///" + path.translate(_FOREIGN)
    try:
        return parse(path)
    except RpcError as error:
        raise BadRoot(f"`{path}` is neither an absolute path nor a file: URI ({error.message})") from None


# One step ----------------------------------------------------------------------------------------


class Seen(enum.Enum):
    """What a step finds when it looks for the environment of a root."""

    CAPTURED_READY = "the step captured its handle, ready"
    CAPTURED_STARTING = "the step captured it while it was starting"
    MISSING = "the step did not capture it, and there is none of that id"
    FINISHED = "the step did not capture it; there is a handle whose startup has finished"
    UNFINISHED = "the step did not capture it; there is a handle that has not started or is starting"


class Outcome(enum.Enum):
    """What comes of it."""

    USE = "use that very handle"
    LEAVE_OUT = "not in this step"
    USE_IF_READY = "wait for the handle's own verdict, which does not take long, and use it if that is good"
    ASK_TO_START = "ask it to start; not in this step, but perhaps in a later one"


OUTCOMES: Final[dict[Seen, Outcome]] = {
    Seen.CAPTURED_READY: Outcome.USE,
    Seen.CAPTURED_STARTING: Outcome.LEAVE_OUT,
    Seen.MISSING: Outcome.LEAVE_OUT,
    Seen.FINISHED: Outcome.USE_IF_READY,
    Seen.UNFINISHED: Outcome.ASK_TO_START,
}
"""Everything there is to decide. The handle that is used is the one that was looked at, in every row."""


class Candidate(Struct, Generic[H], frozen=True):
    """A root that may be had in a step: through this handle, after this."""

    root: SelectedRoot
    handle: H
    outcome: Outcome


class ResolvedRoot(Struct, Generic[H], frozen=True):
    """A root that can be used in a step, and the handle to use it through."""

    root: SelectedRoot
    handle: H


def candidates(
    roots: Iterable[SelectedRoot],
    captured: Mapping[str, H | None],
    registry: Mapping[str, H],
    finished: Callable[[H], bool],
) -> list[Candidate[H]]:
    """The roots that may be had, in their order. Looks once, waits for nothing, starts nothing.

    What the step captured hides the registry.
    """
    found: list[Candidate[H]] = []
    looked: dict[str, tuple[Seen, H | None]] = {}
    for root in roots:
        name = root.environment_id
        if name not in looked:
            if name in captured:
                handle = captured[name]
                seen = Seen.CAPTURED_STARTING if handle is None else Seen.CAPTURED_READY
            elif (handle := registry.get(name)) is None:
                seen = Seen.MISSING
            else:
                seen = Seen.FINISHED if finished(handle) else Seen.UNFINISHED
            looked[name] = seen, handle
        seen, handle = looked[name]
        if handle is not None and OUTCOMES[seen] is not Outcome.LEAVE_OUT:
            found.append(Candidate(root, handle, OUTCOMES[seen]))
    return found


def combine(
    own: Sequence[SelectedRoot], reported: Iterable[tuple[Sequence[SelectedRoot], bool]]
) -> list[SelectedRoot]:
    """The roots of a thread and of its ready environments, in their order; each id once.

    `reported` has, for each environment in the order of selection, its roots and whether the thread itself
    configured it: then it knows better where a root of the thread is.
    """
    reported = list(reported)
    moved = {
        (root.id, root.environment_id): root
        for roots, configured_by_thread in reported
        if configured_by_thread
        for root in roots
    }
    combined: dict[str, SelectedRoot] = {}
    for root in own:
        combined.setdefault(root.id, moved.get((root.id, root.environment_id), root))
    room = len(combined) + MAX_ADDED_ROOTS
    for roots, _ in reported:
        for root in roots:
            known = combined.get(root.id)
            if known is None and len(combined) >= room:
                log.warning("capability roots beyond the limit are ignored", limit=MAX_ADDED_ROOTS)
                return list(combined.values())
            if known is None:
                combined[root.id] = root
            elif known != root:
                log.info("capability root is selected elsewhere already", root=root.id, path=known.path)
    return list(combined.values())
