"""SQLite on a thread of its own. Who finds the file locked, full or gone is told soon; nobody else waits."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from typing import Any, Final, TypeVar

from .worker import Overloaded, Worker

__all__ = ["Database", "StoreUnavailable"]

T = TypeVar("T")

IN_MEMORY: Final = ":memory:"

DISK_SECONDS: Final = 5.0
"""For a disk to write, with everything that waits for it, too; then whoever asked is told that it is slow."""

BUSY: Final = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


class StoreUnavailable(Exception):
    """What is remembered cannot be read or written; the text says where and why."""


class Database:
    """One file, or memory. Statements are done in the order in which they are asked for."""

    def __init__(self, path: str, patience: float, setup: Callable[[sqlite3.Connection], None]) -> None:
        """`patience` is for others who write: after so many seconds it is given up."""
        self._path = path
        self._patience = patience
        self._impatient = False
        try:
            self._db = sqlite3.connect(path, timeout=10.0, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise self._unavailable(error) from None
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            # What was answered is on the disk: a revoked key must not come back when the power does.
            self._db.execute("PRAGMA synchronous=FULL")
            setup(self._db)
            self._be_patient(patience)
        except sqlite3.Error as error:
            self._db.close()
            raise self._unavailable(error) from None
        self._file = self._look()
        self._worker = Worker("rendezvous-database")

    async def one(self, statement: str, values: tuple[Any, ...] = ()) -> tuple[Any, ...] | None:
        """The first row."""
        row: tuple[Any, ...] | None = await self._do(
            lambda: self._db.execute(statement, values).fetchone(), writes=False
        )
        return row

    async def all(
        self, statement: str, values: tuple[Any, ...], read: Callable[[tuple[Any, ...]], T]
    ) -> list[T]:
        """All rows, each as `read` makes of it, which is not done on the loop, either."""
        return await self._do(
            lambda: [read(row) for row in self._db.execute(statement, values).fetchall()], writes=False
        )

    async def change(self, statement: str, values: tuple[Any, ...] = ()) -> int:
        """How many rows it has changed. sqlite3.IntegrityError if they may not be."""
        return await self._do(lambda: self._db.execute(statement, values).rowcount, writes=True)

    async def transact(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """All that the work does, or nothing, and nobody else does anything in between."""

        def whole() -> T:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                done = work(self._db)
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            return done

        return await self._do(whole, writes=True)

    def close(self) -> None:
        self._worker.close(self._db.close)

    async def _do(self, work: Callable[[], T], *, writes: bool) -> T:
        try:
            return await self._worker.do(lambda: self._watch(work, writes), self._patience + DISK_SECONDS)
        except Overloaded as error:
            raise StoreUnavailable(f"the database {self._path} is too slow: {error}") from None

    def _watch(self, work: Callable[[], T], writes: bool) -> T:
        """On the thread."""
        if self._file != self._look():
            what = "deleted" if not os.path.exists(self._path) else "replaced"
            raise StoreUnavailable(
                f"the database {self._path} was {what} under this process, which knows only the old one;"
                " put it back, or restart"
            )
        try:
            done = work()
        except sqlite3.IntegrityError:
            raise
        except sqlite3.Error as error:
            if (getattr(error, "sqlite_errorcode", 0) & 0xFF) in BUSY and not self._impatient:
                # The next one does not wait for what this one has waited for in vain.
                self._impatient = True
                self._be_patient(0.0)
            raise self._unavailable(error) from None
        if writes and self._impatient:
            self._impatient = False
            self._be_patient(self._patience)
        return done

    def _be_patient(self, seconds: float) -> None:
        self._db.execute(f"PRAGMA busy_timeout={int(1000 * seconds)}")

    def _look(self) -> tuple[int, int] | None:
        """Which file it is."""
        if self._path == IN_MEMORY:
            return None
        try:
            facts = os.stat(self._path)
        except OSError:
            return (0, 0)
        return facts.st_dev, facts.st_ino

    def _unavailable(self, error: sqlite3.Error) -> StoreUnavailable:
        advice = ""
        if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
            advice = "; restore it from a backup, or move it away and make the keys anew"
        return StoreUnavailable(f"the database {self._path} cannot be used: {error}{advice}")
