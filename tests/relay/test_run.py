"""An environment as a process: what it does with stdin, and how it ends."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import exec_server
from exec_server.relay.run import BadTrust, _Trusted, default_key_file
from support.server import COMMAND, RunningServer, server_environment

from .stage import KEY, add_key


@pytest.fixture(scope="module")
def rendezvous(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """URL and key of a rendezvous that runs; the tests take turns as its only environment."""
    data = tmp_path_factory.mktemp("rendezvous")
    asyncio.run(add_key(data))
    node = subprocess.Popen([COMMAND, "rendezvous", "--data", str(data)], stdout=subprocess.PIPE, text=True)
    assert node.stdout is not None
    try:
        yield node.stdout.readline().strip(), KEY
    finally:
        node.terminate()
        node.wait(20)
        node.stdout.close()


Starter = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path, rendezvous: tuple[str, str]) -> Iterator[Starter]:
    """Start environments of that rendezvous, with a pipe to their stdin."""
    with ExitStack() as stack:

        def make(*words: str, command: tuple[str, ...] = ()) -> subprocess.Popen[str]:
            program = subprocess.Popen(
                [
                    COMMAND,
                    *command,
                    *("--remote", rendezvous[0], "--environment-id", "box"),
                    *("--key-file", str(tmp_path / "key"), *words),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=server_environment(CODEX_API_KEY=rendezvous[1]),
            )

            def end() -> None:
                if program.poll() is None:
                    program.kill()
                program.wait(20)
                for stream in (program.stdin, program.stdout, program.stderr):
                    if stream is not None:
                        stream.close()

            stack.callback(end)
            return program

        yield make


def say(program: subprocess.Popen[str], text: str) -> None:
    assert program.stdin is not None
    program.stdin.write(text)
    program.stdin.flush()


def heard(program: subprocess.Popen[str]) -> str:
    assert program.stderr is not None
    return program.stderr.readline()


def until(program: subprocess.Popen[str], text: str) -> None:
    """Listen until it has said so."""
    while text not in (line := heard(program)):
        assert line, f"it ended without {text!r}"


def credential(token: str, **changes: object) -> str:
    found = {"version": 1, "environment_id": "box", "token": token, "expires_at": int(time.time()) + 3600}
    return json.dumps({**found, **changes}) + "\n"


def test_tokens_on_stdin(start: Starter, rendezvous: tuple[str, str]) -> None:
    program = start("--executor-credential-stdin")
    say(program, credential(rendezvous[1]))
    assert "is connected" in heard(program)
    assert program.stdin is not None
    program.stdin.close()
    assert program.wait(20) == 0


def test_a_bad_token_line_later_on(start: Starter, rendezvous: tuple[str, str]) -> None:
    program = start("--executor-credential-stdin")
    say(program, credential(rendezvous[1]))
    assert "is connected" in heard(program)
    say(program, "nonsense\n")
    assert program.wait(20) == 1
    assert "not a credential" in heard(program)


@pytest.mark.parametrize("bad", [{"environment_id": "other"}, {"expires_at": 1}, {"more": 1}])
def test_a_first_token_that_is_wrong(start: Starter, bad: dict[str, object]) -> None:
    program = start("--executor-credential-stdin")
    say(program, credential("token", **bad))
    assert program.wait(20) == 1
    assert "credential" in heard(program)


def test_stdin_that_ends_before_a_token(start: Starter) -> None:
    program = start("--executor-credential-stdin")
    assert program.stdin is not None
    program.stdin.close()
    assert program.wait(20) == 0


def test_the_key_variable_counts_for_nothing_then(start: Starter) -> None:
    program = start("--executor-credential-stdin")
    say(program, credential("not-the-key"))
    assert program.wait(20) == 1
    said = heard(program)
    assert "401" in said
    assert "its words are not shown" in said


def test_a_signal_ends_it_with_0(start: Starter) -> None:
    program = start()
    assert "is connected" in heard(program)
    program.terminate()
    assert program.wait(20) == 0


def test_a_second_one_with_the_same_key_does_not_start(start: Starter) -> None:
    first = start()
    assert "is connected" in heard(first)
    second = start()
    assert second.wait(20) == 1
    assert f"(process {first.pid})" in heard(second)


def test_where_keys_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert default_key_file("a_b") == "/state/exec-server/relay/a_b.key"
    odd = {default_key_file(name) for name in ("a/b", "a b", "a?b")}
    assert len(odd | {default_key_file("a_b")}) == 4
    assert all(path.startswith("/state/exec-server/relay/a_b-") for path in odd)
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert default_key_file("box") == "/home/me/.local/state/exec-server/relay/box.key"


def test_trusted_harnesses_in_a_file(tmp_path: Path, fresh_log: None) -> None:
    path = tmp_path / "trusted"
    with pytest.raises(BadTrust, match="No such file"):
        _Trusted(str(path))
    path.write_text(f"# laptop\n{'AB' * 32}  # mine\n\n{'cd' * 32}\n")
    trusted = _Trusted(str(path))
    assert trusted() == {"ab" * 32, "cd" * 32}
    path.write_text("ab" * 31)
    assert trusted() == frozenset()
    with pytest.raises(BadTrust, match="line 1 of"):
        _Trusted(str(path))
    path.unlink()
    assert trusted() == frozenset()


def test_forwarding_to_another_server(
    start: Starter, rendezvous: tuple[str, str], server: RunningServer
) -> None:
    program = start("--connect", server.url, command=("forward",))
    assert "is connected" in heard(program)

    async def main() -> None:
        async with exec_server.connect(f"relay+{rendezvous[0]}/box", token=KEY) as machine:
            done = await machine.run(["/bin/sh", "-c", "echo forwarded; exit 4"])
            assert (done.stdout, done.exit_code) == (b"forwarded\n", 4)

    asyncio.run(main())


def test_no_command_sees_the_key(start: Starter, rendezvous: tuple[str, str], tmp_path: Path) -> None:
    """Neither in its environment nor in the server's, and in a sandbox not in the files, either."""
    file = tmp_path / "api-key"
    file.write_text(f"{KEY}\n")
    file.chmod(0o600)
    program = start("--api-key-file", str(file))
    assert "is connected" in heard(program)
    look = f"env; cat /proc/{program.pid}/environ | tr '\\0' '\\n'; true"
    peek = f"cat {file} {tmp_path}/key; true"

    async def main() -> None:
        async with exec_server.connect(f"relay+{rendezvous[0]}/box", token=KEY) as machine:
            done = await machine.run(["/bin/sh", "-c", look])
            assert b"PATH=" in done.stdout
            assert KEY.encode() not in done.stdout
            done = await machine.run(["/bin/sh", "-c", peek], sandbox=exec_server.Sandbox.read_only())
            assert (KEY.encode() in done.stdout, b"x25519" in done.stdout) == (False, False), done
            confined = machine.files.under(exec_server.Sandbox.read_only())
            for path in (file, tmp_path / "key"):
                with pytest.raises(exec_server.ExecServerError, match="denied"):
                    await confined.read(path)
            given = await machine.run(["/bin/sh", "-c", "echo $CODEX_API_KEY"], env={"CODEX_API_KEY": "mine"})
            assert given.stdout == b"mine\n"

    asyncio.run(main())


def test_a_key_file_that_others_can_read(start: Starter, tmp_path: Path) -> None:
    file = tmp_path / "api-key"
    file.write_text(KEY)
    file.chmod(0o644)
    program = start("--api-key-file", str(file))
    assert program.wait(20) == 1
    assert "others can read the file of the API key" in heard(program)
    both = start("--api-key-file", str(file), "--executor-credential-stdin")
    assert both.wait(20) == 2


def test_keys_are_taken_on_sighup(start: Starter, rendezvous: tuple[str, str], tmp_path: Path) -> None:
    """A new key in the file, and whoever is there stays there."""
    program = start("--log-level", "info")
    until(program, "is connected")
    url = f"relay+{rendezvous[0]}/box"
    key_file = ("--key-file", str(tmp_path / "key"))

    def relay(*words: str) -> str:
        done = subprocess.run([COMMAND, "relay", "key", *words, *key_file], capture_output=True, check=True)
        return done.stdout.decode()

    async def main() -> None:
        async with exec_server.connect(url, token=KEY) as here:
            process = await here.start(["cat"], stdin=True)
            program.send_signal(signal.SIGHUP)
            until(program, "the keys are the same")
            relay("rotate")
            program.send_signal(signal.SIGHUP)
            until(program, "connected to the rendezvous")
            fingerprint = relay("show").splitlines()[0]
            async with exec_server.connect(f"{url}?executor={fingerprint}", token=KEY) as there:
                assert (await there.run(["echo", "new"])).stdout == b"new\n"
            await process.write(b"old\n")
            await process.close_stdin()
            assert b"".join([chunk.data async for chunk in process.output()]) == b"old\n"

    asyncio.run(main())
    (tmp_path / "key").write_text("broken")
    program.send_signal(signal.SIGHUP)
    until(program, "this environment goes on as it was")
    assert program.poll() is None
    program.terminate()
    assert program.wait(20) == 0


def test_another_api_key_on_sighup(start: Starter, rendezvous: tuple[str, str], tmp_path: Path) -> None:
    """A bad one is not taken; and neither ends it."""
    file = tmp_path / "api-key"
    file.write_text(KEY)
    file.chmod(0o600)
    program = start("--api-key-file", str(file), "--log-level", "info")
    until(program, "is connected")
    for bad, said in (("", "is empty or has characters"), ("esk_wrong", "unknown or was revoked")):
        file.write_text(bad)
        program.send_signal(signal.SIGHUP)
        until(program, said)

    async def main() -> None:
        async with exec_server.connect(f"relay+{rendezvous[0]}/box", token=KEY) as machine:
            assert (await machine.run(["echo", "there"])).stdout == b"there\n"

    asyncio.run(main())
    assert program.poll() is None
