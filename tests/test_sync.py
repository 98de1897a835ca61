"""The blocking twin: the same names, from threads, from notebooks, and under Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import exec_server
from exec_server import services, sync
from exec_server.testing.faults import Faults
from support.client import target_of
from support.machine import gone, running, sleep_forever
from support.server import COMMAND, RunningServer
from support.wait import eventually


@pytest.fixture(params=["local", "in-process", "websocket", "unix", "stdio"])
def machine(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A machine of every kind."""
    with sync.connect(target_of(request)) as connected:
        yield connected


def test_run(machine: Any) -> None:
    done = machine.run(["sh", "-c", "cat; exit 3"], data=b"input")
    assert (done.stdout, done.exit_code) == (b"input", 3)
    assert isinstance(done, services.Completed)
    assert machine.info.cwd.startswith("file:///")
    assert machine.is_remote in (True, False)
    machine.check()


def test_a_process(machine: Any) -> None:
    with machine.start(["sh", "-c", "echo ready; read x; echo got $x; exit 4"], stdin=True) as process:
        output = process.output()
        assert next(output).data == b"ready\n"
        process.write(b"it\n")
        assert [chunk.data for chunk in output] == [b"got it\n"]
        assert process.wait().exit_code == 4
        assert process.exit_code == 4
        kinds = [type(event).__name__ for event in process.events()]
        assert kinds == ["Output", "Output", "Exited", "Closed"]


def test_an_iterator_is_closed_as_any_other(server: RunningServer, tmp_path: Path) -> None:
    with (
        sync.connect(server.url) as machine,
        machine.start(["sh", "-c", "echo a; cat"], stdin=True) as process,
    ):
        with closing(process.output()) as output:
            assert next(output).data == b"a\n"
        assert list(output) == []
        assert {"close"} <= set(dir(output))
        assert not {"aclose", "asend", "athrow", "ag_frame"} & set(dir(output))
        process.write(b"b\n")
        assert next(process.output()).data == b"b\n", "the next one goes on where it was"
        with machine.files.watch(str(tmp_path)) as changes, closing(changes):
            (tmp_path / "x").touch()
            assert next(changes).paths


def test_leaving_a_block_ends_the_process(machine: Any) -> None:
    marker = sleep_forever()
    with machine.start(["sh", "-c", f"echo ready; sleep {marker}"]) as process:
        for _ in process.output():
            break
        assert running(marker)
    gone(marker)


def test_files(machine: Any, tmp_path: Path) -> None:
    path = f"{tmp_path}/file"
    machine.files.write(path, b"content")
    assert machine.files.read(path) == b"content"
    assert b"".join(machine.files.stream(path)) == b"content"
    assert machine.files.write_stream(path, (b"%d\n" % number for number in range(5))) == 10
    assert machine.files.read(path) == b"0\n1\n2\n3\n4\n"
    # A stream of one machine goes into another, here itself, without passing through this thread.
    copy = f"{path}.copy"
    assert machine.files.write_stream(copy, machine.files.stream(path)) == 10
    with pytest.raises(FileNotFoundError):
        machine.files.read(tmp_path / "none")
    with machine.files.watch(tmp_path) as changes:
        machine.files.remove(copy)
        assert copy in next(iter(changes)).paths


def test_an_iterator_of_the_caller_may_use_the_machine(machine: Any, tmp_path: Path) -> None:
    def blocks() -> Iterator[bytes]:
        for number in range(3):
            yield machine.run(["echo", str(number)]).stdout

    assert machine.files.write_stream(f"{tmp_path}/file", blocks()) == 6
    assert (tmp_path / "file").read_bytes() == b"0\n1\n2\n"


def test_the_names_are_the_same() -> None:
    """Whatever the interface offers is offered here, with its own documentation."""

    def names(protocol: type) -> set[str]:
        return {name for name in vars(protocol) if not name.startswith("_")}

    with sync.connect() as typed:
        machine: Any = typed  # some of this is what a type checker would not let pass
        assert names(services.Environment) <= set(dir(machine))
        assert names(services.Processes) <= set(dir(machine.processes))
        assert names(services.Files) <= set(dir(machine.files))
        assert names(services.Http) <= set(dir(machine.http))
        process = machine.start(["true"])
        assert names(services.Process) <= set(dir(process))
        assert "Start a command" in machine.start.__doc__
        with pytest.raises(AttributeError):
            machine.no_such_thing  # noqa: B018  # it is the looking that raises
        with pytest.raises(TypeError, match="cannot be iterated over"):
            iter(machine)
        assert repr(machine).startswith("<blocking <Environment this machine")


def test_several_threads_use_one_machine(machine: Any) -> None:
    results: dict[int, bytes] = {}

    def use(number: int) -> None:
        results[number] = machine.run(["echo", str(number)]).stdout

    threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: b"%d\n" % number for number in range(8)}


def test_inside_a_running_loop() -> None:
    """As in a notebook, whose cells run on a loop."""

    async def cell() -> bytes:
        with sync.connect() as machine:
            return bytes(machine.run(["echo", "from a cell"]).stdout)

    assert asyncio.run(cell()) == b"from a cell\n"


def test_a_callback_cannot_wait_for_itself(tmp_path: Path) -> None:
    with sync.connect() as machine:
        (tmp_path / "source").write_bytes(b"x")

        def progress(done: int, total: int, path: str) -> None:
            machine.run(["true"])

        with pytest.raises(RuntimeError, match="cannot wait for the thread that called it"):
            machine.files.upload(f"{tmp_path}/source", f"{tmp_path}/target", progress)


def test_recovery_is_not_noticed(server: RunningServer) -> None:
    faults = Faults()
    with sync.connect(server.url, wrap_dialer=faults.wrap) as machine:
        with machine.start(["sh", "-c", "for i in $(seq 50); do echo $i; sleep 0.005; done"]) as process:
            text = b""
            for chunk in process.output():
                if not text:
                    faults._current._loop.call_soon_threadsafe(faults.cut)  # type: ignore[union-attr]
                text += chunk.data
        assert text.split() == [b"%d" % number for number in range(1, 51)]
        assert faults.connections == 2
        with machine.fail_fast():
            machine.check()


INTERRUPTED = """
import sys
from exec_server import sync

machine = sync.connect()
try:
    {work}
except KeyboardInterrupt:
    print("interrupted", flush=True)
print(machine.run(["echo", "still there"]).stdout.decode(), end="", flush=True)
machine.close()
"""


WAITING = "print('ready', flush=True); machine.run(['sleep', '{marker}'])"
READING = (
    "chunks = machine.start(['sh', '-c', 'echo ready; exec sleep {marker}']).output();"
    " [print(chunk.data.decode(), end='', flush=True) for chunk in chunks]"
)


@pytest.mark.parametrize("work", [WAITING, READING])
def test_ctrl_c(work: str) -> None:
    """As a terminal does it: the whole foreground group gets the signal, the server at home does not."""
    marker = sleep_forever()
    code = INTERRUPTED.format(work=work.format(marker=marker))
    program = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert program.stdout is not None
        assert program.stdout.readline() == b"ready\n"
        eventually(lambda: running(marker), "the command running")
        os.killpg(program.pid, signal.SIGINT)
        assert program.communicate(timeout=40)[0] == b"interrupted\nstill there\n"
        assert program.returncode == 0
    finally:
        program.kill()
        program.wait()
    gone(marker)


FORGOTTEN = """
from exec_server import sync
machine = sync.connect({target!r})
machine.start(["sleep", {marker!r}])
print("end")
"""


@pytest.mark.parametrize("kind", ["local", "websocket", "in-process"])
def test_what_is_left_open_is_closed_at_the_end(kind: str, server: RunningServer) -> None:
    marker = sleep_forever()
    target = {"local": None, "websocket": server.url, "in-process": "in-process:"}[kind]
    code = FORGOTTEN.format(target=target, marker=marker)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=40, check=False)
    assert (done.stdout, done.stderr, done.returncode) == (b"end\n", b"", 0)
    gone(marker)


FORKED = """
import os, sys
from exec_server import sync
machine = sync.connect()
machine.run(["true"])
child = os.fork()
if child == 0:
    with sync.connect() as own:
        sys.stdout.write(own.run(["echo", "child"]).stdout.decode())
        sys.stdout.flush()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(machine.run(["echo", "parent"]).stdout.decode(), end="")
machine.close()
"""


def test_a_fork_starts_afresh() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, timeout=40, check=False)
    assert (done.stdout, done.returncode) == (b"child\nparent\n", 0), done.stderr


INHERITED = """
import os, sys
from exec_server import sync
target, directory = sys.argv[1:]
with sync.connect(target) as machine:
    read, files = machine.files.read, machine.files
    sleeper = machine.start(["cat"], stdin=True)
    output = sleeper.output()
    child = os.fork()
    if child == 0:
        refused = 0
        for use in (
            lambda: machine.run(["touch", directory + "/touched"]),
            lambda: machine.start(["touch", directory + "/touched"]),
            lambda: read(directory + "/parent"),
            lambda: files.read(directory + "/parent"),
            lambda: sleeper.write(b"child"),
            lambda: next(output),
            lambda: machine.state,
        ):
            try:
                use()
            except Exception as error:
                refused += "belongs to process %d" % os.getppid() in str(error)
        machine.close()
        with open(directory + "/refused", "w") as file:
            file.write(str(refused))
        sys.exit(0)  # through the `with` and the end of the program: neither may hang up on the parent
    for number in range(20):
        assert read(directory + "/parent") == b"content"
    assert os.waitpid(child, 0)[1] == 0
    sleeper.write(b"parent")
    assert next(output).data == b"parent"
    print(machine.run(["echo", "parent"]).stdout.decode(), end="")
"""


@pytest.mark.parametrize("kind", ["websocket", "stdio"])
def test_what_was_made_before_a_fork_is_the_parents(server: RunningServer, tmp_path: Path, kind: str) -> None:
    (tmp_path / "parent").write_bytes(b"content")
    target = server.url if kind == "websocket" else f"stdio:{COMMAND} --listen stdio"
    done = subprocess.run(
        [sys.executable, "-c", INHERITED, target, str(tmp_path)],
        capture_output=True,
        timeout=40,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == (b"parent\n", b"", 0)
    assert (tmp_path / "refused").read_text() == "7"
    assert not (tmp_path / "touched").exists()


def test_errors_are_those_of_the_library(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="failed to connect"):
        sync.connect("ws://127.0.0.1:1")
    with sync.connect() as machine:
        with pytest.raises(exec_server.CommunicateTimeout):
            machine.run(["sleep", "60"], timeout=0.05)
        with pytest.raises(exec_server.StdinClosed):
            machine.start(["sleep", "60"]).communicate(b"x")
