"""The blocking twin, for scripts and notebooks: the same names, without `async` and `await`.

    from exec_server import sync

    with sync.connect("ws://127.0.0.1:36041") as machine:
        print(machine.run(["uname", "-a"]).stdout.decode())
        with machine.start(["ping", "-c", "3", "localhost"]) as ping:
            for chunk in ping.output():
                print(chunk.data.decode(), end="")

There is no second implementation. Every object here stands for one of the asynchronous library, which lives
on a loop in a thread of its own; a call is handed over, and its answer waited for. So it works wherever
Python runs, also in a notebook whose own loop is running. What is raised there is raised here, Ctrl-C
cancels what is being waited for, and several threads may use one machine at a time.

After `os.fork()` what was made before it belongs to the parent alone: in the child it says so when it is
used, closing it does nothing, and the child connects for itself.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import inspect
import os
import selectors
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from types import GenericAlias, TracebackType
from typing import Any, Final, TypeVar

from .client.errors import ExecServerError
from .environments.connect import connect as connect_async

__all__ = ["Blocking", "Environment", "Files", "Http", "HttpBody", "Items", "Process", "Processes", "connect"]

T = TypeVar("T")

CLEANUP_SECONDS: Final = 7.0
"""What a cancelled call may take to tidy up, e.g. to kill its process: somewhat more than it gives itself."""

ASYNC_NAMES: Final = frozenset(("aclose", "asend", "athrow"))
"""What only the iterators of the other side have."""

_END: Final = object()


def connect(*args: Any, **options: Any) -> Blocking:
    """Connect to a server, or (without a target) to one of our own on this machine.

    Takes what `exec_server.connect` takes. Use it in a `with`, or call `close` yourself; what is still
    open at the end of the program is closed then.
    """
    return _BACKGROUND.wait(_connect(args, options))


async def _connect(args: tuple[Any, ...], options: dict[str, Any]) -> Blocking:
    environment = Blocking(await connect_async(*args, **options))
    _OPEN.add(environment)
    return environment


class Blocking:
    """Stands for one asynchronous object: what would have to be awaited or iterated there is waited for here.

    Values (bytes, `Completed`, `Output` and so on) are the same on both sides.
    """

    __slots__ = ("__weakref__", "_entered", "_object", "_pid")

    def __init__(self, of: Any) -> None:
        self._object = of
        self._entered: Any = None
        self._pid = os.getpid()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name == "close":
            if self._pid != os.getpid():
                return _nothing_to_close
            if hasattr(self._object, "__anext__") and not hasattr(self._object, "close"):
                # An iterator has the same names on this side as every other one here.
                if not hasattr(self._object, "aclose"):
                    return _nothing_to_close
                name = "aclose"
        self._check_process()
        found = _BACKGROUND.wait(_get(self._object, name))
        if not callable(found):
            return _here(found)

        @functools.wraps(found)
        def blocking(*args: Any, **kwargs: Any) -> Any:
            self._check_process()
            return _here(_BACKGROUND.wait(_call(found, args, kwargs)))

        return blocking

    def __enter__(self) -> Any:
        if not hasattr(self._object, "__aenter__"):
            raise TypeError(f"{self!r} is not for a `with` block")
        self._check_process()
        self._entered = _BACKGROUND.wait(self._object.__aenter__())
        return self if self._entered is self._object else _here(self._entered)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        if self._pid != os.getpid():
            return None  # a child that leaves its parent's `with`: the parent goes on using it
        handled: bool | None = _BACKGROUND.wait(self._object.__aexit__(kind, error, trace))
        return handled

    def __iter__(self) -> Iterator[Any]:
        if hasattr(self._object, "__anext__"):
            return self
        if not hasattr(self._object, "__aiter__"):
            raise TypeError(f"{self!r} cannot be iterated over")
        self._check_process()
        return Blocking(aiter(self._object))

    def __next__(self) -> Any:
        self._check_process()
        item = _BACKGROUND.wait(_next(self._object))
        if item is _END:
            raise StopIteration
        return _here(item)

    def __dir__(self) -> list[str]:
        names = [name for name in dir(self._object) if not name.startswith("_")]
        if hasattr(self._object, "__anext__"):
            names = [name for name in names if name not in ASYNC_NAMES and not name.startswith("ag_")]
            names = sorted({*names, "close"})
        return names

    def __class_getitem__(cls, item: Any) -> Any:
        """`Items[Output]`, where an annotation is looked at."""
        return GenericAlias(cls, item)

    def __repr__(self) -> str:
        return f"<blocking {self._object!r}>"

    def _check_process(self) -> None:
        """Two processes that speak on one connection would take each other's answers for their own."""
        if self._pid != os.getpid():
            raise ExecServerError(
                f"{type(self._object).__name__} belongs to process {self._pid}, which forked this one"
                f" ({os.getpid()}); nothing was sent. Connect again after os.fork()"
            )


def _nothing_to_close() -> None:
    """What closing comes to in a child of the owner's, and where there is nothing to let go of."""


Environment = Files = Http = HttpBody = Items = Process = Processes = Blocking
"""Names for annotations. What each can do is in sync.pyi, made of services.py by scripts/sync_types.py."""


def _here(value: Any) -> Any:
    """A value as it is; what has to be awaited, entered or iterated, as its twin."""
    kind = type(value)
    if any(hasattr(kind, name) for name in ("__aenter__", "__anext__", "__aiter__")):
        return Blocking(value)
    home = kind.__module__.partition(".")[0]
    has_methods = any(inspect.iscoroutinefunction(member) for member in vars(kind).values())
    return Blocking(value) if home == "exec_server" and has_methods else value


def _there(value: Any) -> Any:
    """A twin as what it stands for; an iterator of the caller's as one that does not stop the loop."""
    if isinstance(value, Blocking):
        value._check_process()
        return value._object
    return _in_thread(value) if isinstance(value, Iterator) else value


async def _in_thread(items: Iterator[T]) -> AsyncIterator[T]:
    while (item := await asyncio.to_thread(next, items, _END)) is not _END:
        yield item  # type: ignore[misc]  # not the sentinel


async def _get(of: Any, name: str) -> Any:
    return getattr(of, name)


async def _call(found: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = found(*map(_there, args), **{name: _there(value) for name, value in kwargs.items()})
    return await result if inspect.isawaitable(result) else result


async def _next(items: Any) -> Any:
    return await anext(items, _END)


class _Background:
    """The loop everything runs on, in a thread that is started when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._selector: selectors.BaseSelector | None = None
        self._thread: threading.Thread | None = None

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Do this on the loop; its result, or what it raised."""
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("a callback of exec_server.sync cannot wait for the thread that called it")
        ended = threading.Event()

        async def watched() -> T:
            try:
                return await work
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(watched(), self._running())
        try:
            return future.result()
        except BaseException:
            if not ended.is_set():
                # Ctrl-C, or another exception out of a signal handler: leave nothing half done behind.
                future.cancel()
                ended.wait(CLEANUP_SECONDS)
            raise

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._selector = selectors.DefaultSelector()
                self._loop = asyncio.SelectorEventLoop(self._selector)
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name="exec-server-sync", daemon=True
                )
                self._thread.start()
            return self._loop

    def abandon(self) -> None:
        """In the child of a fork: let go of the parent's sockets and of its epoll without touching either.

        Their numbers stay taken, by /dev/null: whatever is tidied up later tidies up that, and the parent's
        connections end when the parent ends them.
        """
        if self._selector is None:
            return
        held = [key.fd for key in (self._selector.get_map() or {}).values()]
        own = getattr(self._selector, "fileno", None)  # epoll and kqueue are descriptors themselves
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in [*held, *([own()] if own is not None else [])]:
            os.dup2(nothing, fd, inheritable=False)
        os.close(nothing)


class _Open:
    """Environments that nobody has closed yet."""

    def __init__(self) -> None:
        self._environments: weakref.WeakSet[Blocking] = weakref.WeakSet()

    def add(self, environment: Blocking) -> None:
        self._environments.add(environment)

    def close(self) -> None:
        for environment in list(self._environments):
            environment.close()

    def forget(self) -> None:
        self._environments.clear()


_BACKGROUND = _Background()
_OPEN = _Open()
_ABANDONED: list[_Background] = []
"""Loops of processes that this one descends from. Kept, so that nothing of them is ever finalized here."""


def _forked() -> None:
    """Threads and connections stay with the parent; the child starts afresh."""
    global _BACKGROUND
    _ABANDONED.append(_BACKGROUND)
    _BACKGROUND.abandon()
    _BACKGROUND = _Background()
    _OPEN.forget()


atexit.register(_OPEN.close)
os.register_at_fork(after_in_child=_forked)
