"""What every environment must do, wherever its machine is, as a table of checks.

    report = await check_environment(lambda: exec_server.connect("ws://127.0.0.1:36041"))
    report.raise_for_failures()

A maker gives an environment as a context; it is called again after a check that failed. Nothing here knows
how the machine is reached: what passes on one kind of environment and fails on another is a difference that
callers would notice. A machine needs `sh`, `cat`, `sleep`, `seq`, `stty` and `mktemp`. What it announces by
a capability flag is checked when it announces it.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, Final

import msgspec

from ..client.errors import ConnectionLost, ExecServerError, ServerRejected
from ..services import Closed, Environment, Event, Exited, Failed, Output
from .conformance import Outcome, Report
from .faults import Faults

__all__ = ["CHECKS", "Maker", "Place", "check_environment"]

Maker = Callable[[], AbstractAsyncContextManager[Environment]]
"""Makes an environment."""

CHECK_SECONDS: Final = 60.0
"""How long one check may take, on a machine that is busy with other things."""


class Place(msgspec.Struct):
    """Where a check takes place: a machine, and an empty directory on it."""

    machine: Environment
    directory: str
    web_address: str | None
    faults: Faults | None

    def path(self, name: str) -> str:
        """Of something in the directory."""
        return f"{self.directory}/{name}"


Run = Callable[[Place], Awaitable[None]]


class Check(msgspec.Struct, frozen=True):
    """One thing an environment must do."""

    name: str
    run: Run
    flag: str | None = None
    """Only where the machine announces this capability."""
    needs: str | None = None
    """`web` or `faults`: only where the caller has given that."""
    alone: bool = False
    """The environment is of no use after it."""


CHECKS: list[Check] = []


def check(flag: str | None = None, *, needs: str | None = None, alone: bool = False) -> Callable[[Run], Run]:
    """Put a function into the table."""

    def register(run: Run) -> Run:
        CHECKS.append(Check(run.__name__.removeprefix("_").replace("_", " "), run, flag, needs, alone))
        return run

    return register


async def check_environment(
    maker: Maker,
    *,
    only: str | None = None,
    web_address: str | None = None,
    faults: Faults | None = None,
) -> Report:
    """Put an environment through every check, or those whose name contains `only`.

    `web_address` is an `http://` address that answers GET with status 200 and the body `hello`, as seen from
    the machine. `faults` are those the maker's connections go through (`wrap_dialer=faults.wrap`), where
    they can be resumed: then breaking them is checked, too.
    """
    if only is not None and not any(only in entry.name for entry in CHECKS):
        raise ValueError(f"no check has {only!r} in its name")
    outcomes: list[Outcome] = []
    kept: _Kept | None = None
    for entry in CHECKS:
        if only is not None and only not in entry.name:
            continue
        if kept is None:
            kept = _Kept(maker)
        outcome = await _outcome(entry, kept, web_address, faults)
        outcomes.append(outcome)
        if outcome.result == "failed" or entry.alone:
            await kept.close()  # what one check has broken, another should not be blamed for
            kept = None
    if kept is not None:
        await kept.close()
    return Report(outcomes)


class _Kept:
    """An environment that is made when it is first needed, and used by several checks."""

    def __init__(self, maker: Maker) -> None:
        self._maker = maker
        self._stack = AsyncExitStack()
        self._machine: Environment | None = None

    async def machine(self) -> Environment:
        if self._machine is None:
            self._machine = await self._stack.enter_async_context(self._maker())
        return self._machine

    async def close(self) -> None:
        await self._stack.aclose()


async def _outcome(entry: Check, kept: _Kept, web_address: str | None, faults: Faults | None) -> Outcome:
    if entry.needs == "web" and web_address is None:
        return Outcome(entry.name, "skipped", "no address to ask for")
    if entry.needs == "faults" and faults is None:
        return Outcome(entry.name, "skipped", "no connection to break")
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            machine = await kept.machine()
            if entry.flag is not None and not machine.info.has(entry.flag):
                return Outcome(entry.name, "skipped", f"no capability {entry.flag}")
            made = await machine.processes.run(["mktemp", "-d"])
            directory = made.stdout.decode().rstrip("\n")
            try:
                await entry.run(Place(machine, directory, web_address, faults))
            finally:
                await _tidy_up(machine, directory)
    except AssertionError as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return Outcome(entry.name, "failed", str(error) or f"line {place.lineno}: {place.line}")
    except Exception as error:
        return Outcome(entry.name, "failed", f"{type(error).__name__}: {error}")
    return Outcome(entry.name, "passed")


async def _tidy_up(machine: Environment, directory: str) -> None:
    try:
        await machine.files.remove(directory, recursive=True, force=True)
    except ConnectionLost:
        pass  # closed by the check itself, which had nothing there


async def _raises(kind: type[Exception], call: Awaitable[Any]) -> None:
    try:
        result = await call
    except kind:
        return
    raise AssertionError(f"{kind.__name__} expected, but it worked: {result!r}")


# The machine -------------------------------------------------------------------------------------


@check()
async def _it_says_what_it_is(place: Place) -> None:
    info = place.machine.info
    assert info.cwd is not None
    assert info.cwd.startswith("file:///"), info.cwd
    assert info.shell is not None
    assert not info.has("noSuchCapability")
    await place.machine.check()


@check(alone=True)
async def _closing_twice_is_closing_once(place: Place) -> None:
    async with asyncio.timeout(CHECK_SECONDS):
        process = await place.machine.processes.start(["sleep", "600"])
        await place.machine.files.remove(place.directory)
        await place.machine.close()
        await place.machine.close()
        await _raises(ConnectionLost, place.machine.processes.start(["true"]))
        assert (await process.wait()).exit_code == 137


# Processes ---------------------------------------------------------------------------------------


@check()
async def _output_per_stream_and_the_exit_code(place: Place) -> None:
    done = await place.machine.processes.run(["sh", "-c", "printf out; printf err >&2; exit 7"])
    assert (done.stdout, done.stderr, done.terminal, done.exit_code) == (b"out", b"err", b"", 7)


@check()
async def _words_are_not_interpreted(place: Place) -> None:
    words = ["a b", "$HOME", "*", "", "'\"", "ümläut"]
    done = await place.machine.processes.run(["printf", "%s\n", *words])
    assert done.stdout.decode().split("\n")[:-1] == words


@check()
async def _directory_and_variables(place: Place) -> None:
    processes = place.machine.processes
    variables = {"ONE": "1", "PATH": "/usr/local/bin:/usr/bin:/bin"}
    done = await processes.run(["sh", "-c", "pwd; echo $ONE"], cwd=place.directory, env=variables)
    assert done.stdout.decode() == f"{place.directory}\n1\n"
    inherited = await processes.run(["sh", "-c", "echo ${PATH:+yes} ${ONE:-no}"])
    assert inherited.stdout == b"yes no\n", inherited.stdout


@check()
async def _a_command_that_is_not_there_is_an_error(place: Place) -> None:
    await _raises(ServerRejected, place.machine.processes.start(["/no/such/command"]))
    await _raises(TypeError, place.machine.processes.start("echo"))


@check()
async def _a_lot_of_output_comes_whole(place: Place) -> None:
    process = await place.machine.processes.start(["seq", "0", "99999"])
    text = b"".join([chunk.data async for chunk in process.output()])
    assert text.split() == [b"%d" % number for number in range(100_000)]
    assert (await process.wait()).exit_code == 0


@check()
async def _events_are_numbered_and_end_with_the_close(place: Place) -> None:
    process = await place.machine.processes.start(["sh", "-c", "echo one; echo two; exit 3"])
    for _ in range(2):  # the second reader gets the same
        events: list[Event] = [event async for event in process.events()]
        numbers = [event.seq for event in events if not isinstance(event, Failed)]
        assert numbers == list(range(1, len(events) + 1))
        assert isinstance(events[-1], Closed)
        assert [event.exit_code for event in events if isinstance(event, Exited)] == [3]
        assert b"".join(event.data for event in events if isinstance(event, Output)) == b"one\ntwo\n"


@check()
async def _a_terminal_and_what_is_typed(place: Place) -> None:
    script = "stty -echo; echo ready; read x; echo got $x"
    async with await place.machine.processes.start(["sh", "-c", script], tty=True) as process:
        output = process.output()
        assert (await anext(output)).data == b"ready\r\n"
        await process.write(b"it\n")
        assert b"".join([chunk.data async for chunk in output]) == b"got it\r\n"


@check()
async def _stdin_and_several_writes(place: Place) -> None:
    script = "n=0; while read x; do n=$((n+1)); echo $n $x; [ $n = 20 ] && exit 5; done"
    process = await place.machine.processes.start(["sh", "-c", script], stdin=True)
    for number in range(20):
        await process.write(b"%d\n" % number)
    text = b"".join([chunk.data async for chunk in process.output()])
    assert text.splitlines() == [b"%d %d" % (number + 1, number) for number in range(20)]
    assert (await process.wait()).exit_code == 5


@check("processCloseStdin")
async def _input_and_its_end(place: Place) -> None:
    data = bytes(range(256)) * 2000
    done = await place.machine.processes.run(["cat"], data=data)
    assert done.stdout == data


@check()
async def _interrupt_and_terminate(place: Place) -> None:
    processes = place.machine.processes
    script = "trap 'exit 5' INT; echo ready; while :; do sleep 0.05; done"
    process = await processes.start(["sh", "-c", script])
    await anext(process.output())
    await process.signal("interrupt")
    assert (await process.wait()).exit_code == 5
    process = await processes.start(["sleep", "600"])
    await process.terminate()
    assert (await process.wait()).exit_code == 137
    await process.terminate()  # of one that has ended: nothing to do


@check()
async def _leaving_a_process_ends_it(place: Place) -> None:
    script = "echo $$; exec sleep 600"
    async with await place.machine.processes.start(["sh", "-c", script]) as process:
        pid = int((await anext(process.output())).data)
    left = await place.machine.processes.run(["sh", "-c", f"kill -0 {pid} 2>/dev/null && echo there"])
    assert left.stdout == b"", "the process outlived its context"


@check()
async def _waiting_has_a_limit_and_no_effect(place: Place) -> None:
    async with await place.machine.processes.start(["sleep", "600"]) as process:
        await _raises(TimeoutError, process.wait(0.05))
        result = await process.read()
        assert not result.exited
        collected = await process.collect(0.05)
        assert (collected.data, collected.exited) == (b"", False)
        assert (await process.snapshot()).running


@check()
async def _output_can_be_read_again(place: Place) -> None:
    process = await place.machine.processes.start(["sh", "-c", "echo one; sleep 0.05; echo two"])
    await process.wait()
    result = await process.read()
    assert b"".join(chunk.data for chunk in result.chunks) == b"one\ntwo\n"
    assert (result.exited, result.closed, result.exit_code) == (True, True, 0)
    later = await process.read(after_seq=result.chunks[0].seq)
    assert later.chunks == result.chunks[1:]


@check()
async def _one_does_not_wait_for_another(place: Place) -> None:
    async with await place.machine.processes.start(["sleep", "600"]) as slow:
        quick = [place.machine.processes.run(["echo", str(number)]) for number in range(10)]
        done = await asyncio.gather(*quick)
        assert [result.stdout for result in done] == [b"%d\n" % number for number in range(10)]
        assert not (await slow.read()).exited


@check()
async def _an_id_is_used_once(place: Place) -> None:
    async with await place.machine.processes.start(["sleep", "600"], process_id="mine") as process:
        assert process.id == "mine"
        await _raises(ValueError, place.machine.processes.start(["true"], process_id="mine"))


@check("processList")
async def _what_runs_is_listed(place: Place) -> None:
    async with await place.machine.processes.start(["sleep", "600"], process_id="listed"):
        listed = await place.machine.processes.list()
        assert ("listed", "running") in [(entry.process_id, entry.state) for entry in listed]


@check("processResize")
async def _terminals_have_sizes(place: Place) -> None:
    script = "stty size; read x; stty size"
    process = await place.machine.processes.start(["sh", "-c", script], tty=True, rows=11, cols=22)
    output = process.output()
    assert (await anext(output)).data.startswith(b"11 22")
    await process.resize(33, 44)
    await process.write(b"\n")
    assert b"33 44" in b"".join([chunk.data async for chunk in output])


@check("processSignals")
async def _signals_have_names(place: Place) -> None:
    script = "trap 'echo usr; exit 4' USR1; echo ready; while :; do sleep 0.05; done"
    process = await place.machine.processes.start(["sh", "-c", script])
    output = process.output()
    await anext(output)
    await process.signal("SIGUSR1")
    assert b"usr\n" in [chunk.data async for chunk in output]
    assert (await process.wait()).exit_code == 4


# Files -------------------------------------------------------------------------------------------


@check()
async def _what_is_written_is_read(place: Place) -> None:
    files, path = place.machine.files, place.path("file")
    for data in (b"", b"text\n", bytes(range(256)) * 10):
        await files.write(path, data)
        assert await files.read(path) == data
    part = await files.read_range(path, 250, 10)
    assert part.data == bytes([250, 251, 252, 253, 254, 255, 0, 1, 2, 3])
    seen = await place.machine.processes.run(["cat", path])
    assert seen.stdout == data, "files and processes see different machines"


@check()
async def _what_is_not_there_is_an_os_error(place: Place) -> None:
    files = place.machine.files
    await _raises(FileNotFoundError, files.read(place.path("none")))
    await _raises(FileNotFoundError, files.metadata(place.path("none")))
    await _raises(OSError, files.list(place.path("none")))
    await _raises(OSError, files.read(place.directory))
    assert not await files.exists(place.path("none"))
    await files.remove(place.path("none"), force=True)


@check()
async def _directories_and_what_is_in_them(place: Place) -> None:
    files = place.machine.files
    await files.make_directory(place.path("a/b/c"))
    await files.make_directory(place.path("a/b/c"))
    await files.write(place.path("a/one"), b"1")
    await files.write(place.path("a/ümläut"), b"22")
    listed = [(entry.name, entry.is_directory, entry.is_file) for entry in await files.list(place.path("a"))]
    assert listed == [("b", True, False), ("one", False, True), ("ümläut", False, True)]
    found = await files.metadata(place.path("a/ümläut"))
    assert (found.is_file, found.is_directory, found.size) == (True, False, 2)
    walked = await files.walk(place.path("a"))
    paths = {entry.path: entry.kind for entry in walked.entries}
    assert paths == {
        place.path("a/b"): "directory",
        place.path("a/b/c"): "directory",
        place.path("a/one"): "file",
        place.path("a/ümläut"): "file",
    }
    assert not walked.truncated


@check()
async def _copy_move_and_remove(place: Place) -> None:
    files = place.machine.files
    await files.make_directory(place.path("tree/inner"))
    await files.write(place.path("tree/inner/file"), b"content")
    await files.copy(place.path("tree"), place.path("copy"), recursive=True)
    await files.move(place.path("copy/inner/file"), place.path("moved"))
    assert await files.read(place.path("moved")) == b"content"
    assert await files.exists(place.path("tree/inner/file"))
    assert not await files.exists(place.path("copy/inner/file"))
    await _raises(FileExistsError, files.move(place.path("moved"), place.path("tree/inner/file")))
    await _raises(OSError, files.remove(place.path("tree")))
    await files.remove(place.path("tree"), recursive=True)
    assert not await files.exists(place.path("tree"))


@check()
async def _large_files_are_streamed(place: Place) -> None:
    path = place.path("large")
    made = await place.machine.processes.run(["sh", "-c", f"seq 0 399999 > {path}"])
    assert made.exit_code == 0
    data = b"".join([block async for block in place.machine.files.stream(path)])
    assert data.split() == [b"%d" % number for number in range(400_000)]
    assert await place.machine.files.read(path) == data


@check("fileWriteStreaming")
async def _streams_are_written(place: Place) -> None:
    path = place.path("streamed")
    size = await place.machine.files.write_stream(path, (b"%07d\n" % number for number in range(300_000)))
    assert size == 2_400_000
    counted = await place.machine.processes.run(["sh", "-c", f"wc -c < {path}; tail -n 1 {path}"])
    assert counted.stdout.split() == [b"2400000", b"0299999"]


@check()
async def _paths_are_absolute_relative_or_uris(place: Place) -> None:
    files = place.machine.files
    await files.write(place.path("with space"), b"x")
    uri = "file://" + place.path("with%20space")
    assert await files.read(uri) == b"x"
    await place.machine.processes.run(["ln", "-s", place.path("with space"), place.path("link")])
    real = (await place.machine.processes.run(["pwd", "-P"], cwd=place.directory)).stdout.decode().rstrip()
    assert await files.canonicalize(place.path("link")) == f"{real}/with space"
    assert (await files.metadata(place.path("link"))).is_symlink
    await _raises(ValueError, files.read(""))


@check("fsGlob")
async def _paths_are_found_by_pattern(place: Place) -> None:
    await place.machine.files.make_directory(place.path("src"))
    for name in ("src/a.py", "src/b.txt", "c.py"):
        await place.machine.files.write(place.path(name), b"")
    found = await place.machine.files.glob(place.directory, "**/*.py")
    assert found.paths == [place.path("c.py"), place.path("src/a.py")]


@check("fsSearch")
async def _lines_are_found(place: Place) -> None:
    await place.machine.files.write(place.path("file"), b"one\ntwo\nthree\n")
    found = await place.machine.files.search(place.directory, "^t")
    assert [(match.line_number, match.line.rstrip("\n")) for match in found.matches] == [
        (2, "two"),
        (3, "three"),
    ]


@check("fsWatch")
async def _changes_are_told(place: Place) -> None:
    async with place.machine.files.watch(place.directory) as changes:
        await place.machine.processes.run(["sh", "-c", f"echo x > {place.path('new')}"])
        async for change in changes:
            if place.path("new") in change.paths or change.overflowed:
                break


# HTTP --------------------------------------------------------------------------------------------


@check()
async def _a_request_without_an_answer_is_an_error(place: Place) -> None:
    await _raises(ExecServerError, place.machine.http.request("GET", "http://127.0.0.1:1/"))
    await _raises(ExecServerError, place.machine.http.request("GET", "gopher://127.0.0.1/"))


@check(needs="web")
async def _requests_and_streamed_bodies(place: Place) -> None:
    assert place.web_address is not None
    answer = await place.machine.http.request("GET", place.web_address)
    assert (answer.status, answer.body) == (200, b"hello")
    async with place.machine.http.stream("GET", place.web_address) as streamed:
        assert streamed.status == 200
        assert b"".join([block async for block in streamed]) == b"hello"


# Broken connections ------------------------------------------------------------------------------


@check(needs="faults")
async def _output_survives_a_broken_connection(place: Place) -> None:
    assert place.faults is not None
    script = "i=0; while [ $i -lt 60 ]; do i=$((i+1)); echo $i; sleep 0.005; done; exit 9"
    process = await place.machine.processes.start(["sh", "-c", script])
    text = b""
    async for chunk in process.output():
        text += chunk.data
        if len(text.split()) in (10, 30):
            place.faults.cut()
    assert text.split() == [b"%d" % number for number in range(1, 61)]
    assert (await process.wait()).exit_code == 9


@check(needs="faults")
async def _writes_survive_a_broken_connection(place: Place) -> None:
    assert place.faults is not None
    for tty in (False, True):
        script = "stty -echo 2>/dev/null; echo ready; n=0; while read x; do n=$((n+1)); echo $n $x; done"
        async with await place.machine.processes.start(
            ["sh", "-c", script], tty=tty, stdin=not tty
        ) as process:
            output = process.output()
            text = (await anext(output)).data
            for number in range(20):
                writing = asyncio.ensure_future(process.write(b"%d\n" % number))
                if number % 5 == 0:
                    await asyncio.sleep(0)
                    place.faults.cut()
                await writing
            while len(text.split()) < 41:
                text += (await anext(output)).data
        expected = b"".join(b"%d %d " % (number + 1, number) for number in range(20))
        assert text.split() == b"ready ".split() + expected.split()


@check(needs="faults")
async def _calls_wait_for_a_connection_that_is_made_again(place: Place) -> None:
    assert place.faults is not None
    place.faults.refuse()
    place.faults.cut()
    waiting = asyncio.ensure_future(place.machine.files.write(place.path("file"), b"x"))
    while not place.faults.refused:
        await asyncio.sleep(0.01)
    place.faults.allow()
    try:
        await waiting
    except ConnectionLost:
        await place.machine.files.write(place.path("file"), b"x")  # it was on its way when the line was cut
    assert await place.machine.files.read(place.path("file")) == b"x"
