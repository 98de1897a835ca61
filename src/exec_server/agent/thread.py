"""Threads on disk: start, resume, fork and list them.

A thread that nobody has said anything in has no file. The selection of capability roots is in its first
record and nowhere else; it is inherited whole by every fork, however little of the history that takes along.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from msgspec import Struct

from .. import log
from ..environments.roots import SelectedRoot
from ..version import __version__
from .exec import without_surrogates
from .history import last_turns, without_rolled_back
from .record import SESSION_META, BadRecord, HistoryBase, Record, SessionMeta
from .rollout import Clock, Loaded, RolloutError, RolloutWriter, read_meta, read_rollout, timestamp

__all__ = ["Thread", "ThreadSummary", "Threads", "new_thread_id"]

ORIGINATOR: Final = "exec_server"
"""How this program signs the threads it starts."""

NOT_INHERITED: Final = (
    "forked_from_ordinal_exclusive",
    "history_base",
    "parent_thread_id",
    "subagent_history_start_ordinal",
)
"""Members of a first record that say how that very file came to be."""

OWN_MEMBERS: Final = frozenset(
    ("cli_version", "cwd", "history_mode", "id", "originator", "session_id", "timestamp")
)
"""Members of a first record that nobody but the thread itself gives."""

MAX_BASES: Final = 1000
"""Forks of forks that are followed to the beginning; more is a circle."""

_NAME: Final = re.compile(r"rollout-(\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d)-([0-9A-Za-z_-]+)\.jsonl")


def new_thread_id(clock: Clock = time.time) -> str:
    """A UUID of version 7: ids sort by the time they were made."""
    milliseconds = int(clock() * 1000) & ((1 << 48) - 1)
    value = milliseconds << 80 | 7 << 76 | secrets.randbits(12) << 64 | 2 << 62 | secrets.randbits(62)
    return str(UUID(int=value))


class ThreadSummary(Struct, frozen=True):
    """A thread in a listing."""

    id: str
    path: str
    started: str
    """Local time, as in the name of the file: `2026-01-02T03-04-05`."""
    meta: SessionMeta


class Thread:
    """A thread that is being written. `roots` is what it has selected."""

    def __init__(
        self,
        path: str,
        meta: SessionMeta,
        roots: Sequence[SelectedRoot],
        history: Sequence[Record] = (),
        *,
        clock: Clock,
        writer: RolloutWriter | None = None,
        skipped: int = 0,
    ) -> None:
        self._clock = clock
        self._writer = writer
        self._history = list(history)
        self._appending = threading.Lock()
        self._pid = os.getpid()
        self._closed = False
        self.path = path
        self.meta = meta
        self.roots = tuple(roots)
        self.skipped = skipped
        """Lines of its file that could not be read, a torn last one not counted."""

    @property
    def id(self) -> str:
        return self.meta.id

    @property
    def exists(self) -> bool:
        """Whether there is a file already."""
        return self._writer is not None

    def history(self) -> list[Record]:
        """Everything that still counts, oldest first, what came before a fork included."""
        return without_rolled_back(self._history)

    def begin(self, history: Sequence[Record], copied: Sequence[Record], first_ordinal: int = 0) -> None:
        """Make the file of a fork: with this history, of which these records are in the file itself."""
        self._history = list(history)
        self._writer = RolloutWriter.create(
            self.path, self.meta, copied, first_ordinal=first_ordinal, clock=self._clock
        )

    def append(self, kind: str, payload: Mapping[str, Any], **more: Any) -> Record:
        """Write a record that must be kept; the first one makes the file. Threads may share this object."""
        if self._pid != os.getpid():
            raise RolloutError(
                f"the thread {self.id} belongs to process {self._pid}, which forked this one; only one may"
                " go on with a thread"
            )
        with self._appending:
            if self._closed:
                raise RolloutError(f"the thread {self.id} is closed; resume it to go on with it")
            if self._writer is None:
                self._writer = RolloutWriter.create(self.path, self.meta, clock=self._clock)
            record = self._writer.append(kind, payload, **more)
            self._history.append(record)
        return record

    def sync(self) -> None:
        """Make sure that everything so far survives a power cut, too."""
        if self._writer is not None and not self._closed:
            self._writer.sync()

    def close(self) -> None:
        """Let go of the file. May be called more than once."""
        self._closed = True
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> Thread:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Threads:
    """The threads below a home directory (`environments.config.find_home`)."""

    def __init__(self, home: str, clock: Clock = time.time) -> None:
        self.directory = os.path.join(home, "sessions")
        self.clock = clock

    def start(
        self,
        cwd: str | os.PathLike[str],
        *,
        roots: Sequence[SelectedRoot] = (),
        source: str = "exec",
        model_provider: str | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> Thread:
        """A new thread. Nothing is written until it has something to keep.

        `more` are members of its first record beyond those that every thread has.
        """
        cwd = str(without_surrogates(_text(cwd, "cwd")))
        _check_roots(roots)
        if taken := OWN_MEMBERS & (more or {}).keys():
            raise ValueError(
                f"`{'`, `'.join(sorted(taken))}` cannot be given in `more`: a thread has its own"
            )
        now = self.clock()
        meta = SessionMeta.new(
            new_thread_id(self.clock),
            timestamp=timestamp(now),
            cwd=cwd,
            originator=ORIGINATOR,
            cli_version=__version__,
            source=source,
            model_provider=model_provider,
            roots=roots,
            more=more,
        )
        return Thread(self._path(meta.id, now), meta, roots, clock=self.clock)

    def resume(
        self, thread: str | os.PathLike[str], *, roots: Sequence[SelectedRoot] | None = None
    ) -> Thread:
        """Go on with a thread, named by its id or its file. Roots that are given win over its selection."""
        _check_roots(roots or ())
        writer, loaded = RolloutWriter.open(self._find(thread), self.clock)
        try:
            history = self._with_base(loaded)
        except BaseException:
            writer.close()
            raise
        chosen = loaded.meta.selected_capability_roots if roots is None else roots
        return Thread(
            loaded.path,
            loaded.meta,
            chosen,
            history,
            clock=self.clock,
            writer=writer,
            skipped=loaded.skipped,
        )

    def read(self, thread: str | os.PathLike[str]) -> tuple[SessionMeta, list[Record]]:
        """What a thread is and everything in it that still counts. Also while somebody is writing it."""
        loaded = read_rollout(self._find(thread))
        return loaded.meta, without_rolled_back(self._with_base(loaded))

    def fork(
        self,
        parent: str | os.PathLike[str] | Thread,
        *,
        turns: int | None = None,
        subagent: bool = False,
        cwd: str | os.PathLike[str] | None = None,
        keep: Callable[[Record], bool] | None = None,
        roots: Sequence[SelectedRoot] | None = None,
    ) -> Thread:
        """A new thread that begins with what a thread has come to: all of it, or its last `turns` turns.

        The selection of roots is inherited either way, also with no turns at all, unless others are given. A
        `subagent` knows the thread that it works for. Of the history only what is to `keep` is taken along.
        The child's file is there at once if it has any history.
        """
        if turns is not None and type(turns) is not int:
            raise TypeError(f"turns is how many of the last turns to keep, not {turns!r}")
        if turns is not None and turns < 0:
            raise ValueError(f"turns is how many of the last turns to keep, 0 or more, not {turns}")
        cwd = None if cwd is None else without_surrogates(_text(cwd, "cwd"))
        _check_roots(roots or ())
        if isinstance(parent, Thread) and not parent.exists:
            return self._child(parent.meta, subagent, cwd, roots=roots)
        loaded = read_rollout(parent.path if isinstance(parent, Thread) else self._find(parent))
        history = self._with_base(loaded)
        whole = turns is None and keep is None
        if whole and loaded.meta.paginated and loaded.records[-1].ordinal is not None:
            # As the reference: the parent's lines up to here are the child's, without a copy.
            end = loaded.records[-1].ordinal + 1
            base = {"thread_id": loaded.meta.id, "end_ordinal_exclusive": end, "end_byte_offset": loaded.end}
            more = {"forked_from_ordinal_exclusive": end, "history_base": base}
            child = self._child(loaded.meta, subagent, cwd, more, roots=roots)
            child.begin(history, copied=(), first_ordinal=end)
            return child
        kept = without_rolled_back(history) if turns is None else last_turns(history, turns)
        kept = [record for record in kept if keep is None or keep(record)]
        child = self._child(loaded.meta, subagent, cwd, roots=roots)
        if kept:
            child.begin(kept, copied=kept)
        return child

    def _child(
        self,
        parent: SessionMeta,
        subagent: bool,
        cwd: str | None,
        more: Mapping[str, Any] | None = None,
        *,
        roots: Sequence[SelectedRoot] | None = None,
    ) -> Thread:
        now = self.clock()
        child_id = new_thread_id(self.clock)
        payload = {name: value for name, value in parent.payload.items() if name not in NOT_INHERITED}
        payload |= {
            "id": child_id,
            "session_id": parent.session_id if subagent else child_id,
            "forked_from_id": parent.id,
            "timestamp": timestamp(now),
            "originator": ORIGINATOR,
            "cli_version": __version__,
            **(_of_subagent(parent) if subagent else {}),
            **({} if cwd is None else {"cwd": cwd}),
            **(more or {}),
        }
        if roots is not None:
            payload.pop("selected_capability_roots", None)
            payload |= {"selected_capability_roots": [root.to_json() for root in roots]} if roots else {}
        meta = SessionMeta(payload)
        return Thread(self._path(child_id, now), meta, meta.selected_capability_roots, clock=self.clock)

    def find(self, thread_id: str) -> str | None:
        """The file of a thread."""
        return next((path for path, _, found in self._files() if found == thread_id), None)

    def _find(self, thread: str | os.PathLike[str]) -> str:
        thread = _text(thread, "a thread")
        if thread.endswith(".jsonl"):
            return thread
        path = self.find(thread)
        if path is None:
            raise RolloutError(f"there is no thread `{thread}` in {self.directory}")
        return path

    def _files(self) -> Iterator[tuple[str, str, str]]:
        """Path, time and thread id of everything that has the name of a thread's file."""
        for directory, _, names in os.walk(self.directory):
            for name in names:
                if found := _NAME.fullmatch(name):
                    yield os.path.join(directory, name), found[1], found[2]

    def _path(self, thread_id: str, now: float) -> str:
        # Local time, because people look for "the thread of this morning".
        local = datetime.fromtimestamp(now).astimezone()
        name = f"rollout-{local:%Y-%m-%dT%H-%M-%S}-{thread_id}.jsonl"
        return os.path.join(self.directory, f"{local:%Y/%m/%d}", name)

    def _with_base(self, loaded: Loaded) -> list[Record]:
        """The lines of a thread after those it continues, which are in the files of other threads."""
        parts = [loaded.records]
        meta = loaded.meta
        for _ in range(MAX_BASES):
            try:
                base = meta.history_base
            except BadRecord as error:
                raise RolloutError(f"the thread {meta.id} cannot be read: {error}") from None
            if base is None:
                return [record for part in reversed(parts) for record in part if record.type != SESSION_META]
            path = self.find(base.thread_id)
            if path is None:
                raise RolloutError(
                    f"the thread {meta.id} goes on where the thread {base.thread_id} was, and there is no"
                    f" file of that in {self.directory}"
                )
            before = read_rollout(path)
            parts.append(_part_before(before, base, meta.id))
            meta = before.meta
        raise RolloutError(f"the thread {loaded.meta.id} goes on where it was itself")

    def list(self) -> list[ThreadSummary]:
        """Every thread, the newest first. What is no thread is not among them."""
        found: list[ThreadSummary] = []
        seen: set[tuple[int, int]] = set()
        # A link beside a file is the same thread, not another one.
        for path, started, _ in sorted(self._files(), key=lambda file: os.path.islink(file[0])):
            try:
                status = os.stat(path)
                identity = (status.st_dev, status.st_ino)
                meta = read_meta(path)
            except (OSError, RolloutError) as error:
                log.warning("thread cannot be read", path=path, error=str(error))
                continue
            if meta is not None and identity not in seen:
                seen.add(identity)
                found.append(ThreadSummary(meta.id, path, started, meta))
        return sorted(found, key=lambda thread: (thread.started, thread.id), reverse=True)


def _text(value: str | os.PathLike[str], what: str) -> str:
    """A path or an id as text."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        raise TypeError(f"{what} is named by text or a path, not by {type(value).__name__}: {value!r}")
    return text


def _check_roots(roots: Sequence[SelectedRoot]) -> None:
    for root in roots:
        if not isinstance(root, SelectedRoot):
            raise TypeError(
                f"roots are what `SelectedRoot.select` gives, not {type(root).__name__}: {root!r}"
            )


def _of_subagent(parent: SessionMeta) -> dict[str, Any]:
    """What the first record of a subagent's thread says of it, as the reference has it."""
    source: Any = parent.payload.get("source")
    for name in ("subagent", "thread_spawn", "depth"):
        source = source.get(name) if isinstance(source, dict) else None
    depth = source + 1 if type(source) is int else 1
    spawned = {"parent_thread_id": parent.id, "depth": depth, "agent_path": None, "agent_role": None}
    return {
        "parent_thread_id": parent.id,
        "source": {"subagent": {"thread_spawn": spawned}},
        "thread_source": "subagent",
    }


def _part_before(parent: Loaded, base: HistoryBase, child_id: str) -> list[Record]:
    """What a fork has of its parent: up to the very record, at the very place, where it was forked."""
    end = base.end_ordinal_exclusive
    kept = [
        place
        for place, record in enumerate(parent.records)
        if record.ordinal is not None and record.ordinal < end
    ]
    wrong = None
    if not kept or parent.records[kept[-1]].ordinal != end - 1:
        wrong = f"there is no record number {end - 1} any more"
    elif base.end_byte_offset is not None:
        last = kept[-1]
        following = parent.ends[last + 1] if last + 1 < len(parent.ends) else parent.end + 1
        if not parent.ends[last] <= base.end_byte_offset <= following:
            wrong = f"its record number {end - 1} ended at byte {base.end_byte_offset}, and does not any more"
    if wrong is not None:
        raise RolloutError(
            f"the thread {child_id} goes on where the thread {parent.meta.id} was, and that was changed"
            f" since: {wrong} ({parent.path})"
        )
    return [parent.records[place] for place in kept]
