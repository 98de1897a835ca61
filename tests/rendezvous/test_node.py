"""How a node may be started, and how not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from exec_server.cli.rendezvous import rendezvous
from exec_server.relay.credentials import Bearer
from exec_server.relay.environment import RemoteEnvironment
from exec_server.relay.harness import dialer
from exec_server.relay.keys import Identity
from exec_server.relay.registry import Registry
from exec_server.rendezvous.node import Node, NodeOptions, StartFailed
from exec_server.transport.channel import Channel
from exec_server.transport.websocket import ConnectFailed
from relay.stage import KEY, Wire, add_key
from relay.support import Remembering
from support.server import COMMAND, server_environment
from support.tls import certificate, trusting
from support.wait import eventually_async


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"listen": "ws://127.0.0.1:0"}, "expected http://"),
        ({"listen": "http://127.0.0.1"}, "expected http://"),
        ({"listen": "http://127.0.0.1:99999"}, "expected http://"),
        ({"listen": "http://127.0.0.1:0/path"}, "expected http://"),
        ({"listen": "http://0.0.0.0:0"}, "in the clear"),
        ({"listen": "https://127.0.0.1:0"}, "needs `--tls-cert`"),
        ({"tls_cert": "x"}, "go together"),
        ({"tls_cert": "x", "tls_key": "y"}, "need an `https://`"),
        ({"listen": "https://127.0.0.1:0", "tls_cert": "/x", "tls_key": "/y"}, "not a certificate"),
    ],
)
def test_starts_that_are_refused(options: dict[str, str], message: str) -> None:
    async def main() -> None:
        async with Node(NodeOptions(**options)):  # type: ignore[arg-type]  # texts only
            pass

    with pytest.raises(StartFailed, match=message):
        asyncio.run(main())


def test_a_port_that_is_taken() -> None:
    async def main() -> None:
        async with Node(NodeOptions()) as first:
            with pytest.raises(StartFailed, match="cannot listen"):
                async with Node(NodeOptions(listen=first.url)):
                    pass

    asyncio.run(main())


def test_tls(tmp_path: Path) -> None:
    """Both ends over TLS with a certificate that only they trust."""
    cert, key = certificate(tmp_path)
    options = NodeOptions(
        listen="https://127.0.0.1:0", tls_cert=str(cert), tls_key=str(key), data=str(tmp_path)
    )

    async def main() -> None:
        await add_key(tmp_path)
        trust = trusting(cert)
        async with asyncio.timeout(40), Node(options) as node:
            assert node.url.startswith("https://127.0.0.1:")
            identity = Identity.generate()
            environment = RemoteEnvironment(
                Registry(node.url, "env-1", Bearer(KEY), ssl=trust),
                lambda: identity,
                lambda channel: Remembering(channel, echo=True),
                ssl=trust,
            )
            connected = asyncio.Event()
            environment.on_connected = connected.set
            task = asyncio.ensure_future(environment.run())
            await connected.wait()
            receiver = Remembering()
            channel = await dialer(f"relay+{node.url}/env-1", token=KEY, ssl=trust)(receiver)
            channel.send(b"[1]")
            await eventually_async(lambda: receiver.messages == [b"[1]"])
            with pytest.raises(ConnectFailed, match="not trusted"):
                await dialer(f"relay+{node.url}/env-1", token=KEY)(Remembering())
            channel.abort()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())


@pytest.mark.parametrize("secure", [False, True])
def test_what_a_slow_harness_has_not_taken_yet_stays_what_it_is(tmp_path: Path, secure: bool) -> None:
    """The router hands on views of what it has just received; whoever keeps them has to copy them."""
    options, trust = NodeOptions(data=str(tmp_path)), None
    if secure:
        cert, key = certificate(tmp_path)
        trust = trusting(cert)
        options = NodeOptions(
            listen="https://127.0.0.1:0", tls_cert=str(cert), tls_key=str(key), data=str(tmp_path)
        )
    messages = [b"[" + os.urandom(1 << 20) for _ in range(12)]

    def accept(channel: Channel) -> Remembering:
        for message in messages:
            channel.send(message)
        return Remembering(channel)

    async def main() -> None:
        await add_key(tmp_path)
        identity = Identity.generate()
        async with asyncio.timeout(50), Node(options) as node:
            wire = Wire(node.url.replace("https:", "http:"))
            await wire.open()
            environment = RemoteEnvironment(
                Registry(node.url, "env-1", Bearer(KEY), ssl=trust), lambda: identity, accept, ssl=trust
            )
            connected = asyncio.Event()
            environment.on_connected = connected.set
            task = asyncio.ensure_future(environment.run())
            await connected.wait()
            receiver = Remembering()
            wire.delay = 0.001
            url = wire.url.replace("http:", "https:") if secure else wire.url
            channel = await dialer(f"relay+{url}/env-1?acks=off", token=KEY, ssl=trust)(receiver)
            await eventually_async(lambda: len(receiver.messages) == len(messages) or receiver.closed)
            assert receiver.closed is None
            assert receiver.messages == messages
            channel.abort()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await wire.close()

    asyncio.run(main())


def exec_server(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *words],
        capture_output=True,
        text=True,
        timeout=30,
        env=server_environment(**(env or {})),
        check=False,
    )


def test_keys_on_the_command_line(tmp_path: Path) -> None:
    data = str(tmp_path / "data")

    def run(*words: str) -> Result:
        return CliRunner().invoke(rendezvous, words)

    added = run("key", "add", "laptop", "--data", data, "--role", "harness")
    assert added.exit_code == 0, added.output
    assert added.stdout.startswith("esk_")
    again = run("key", "add", "laptop", "--data", data)
    assert (again.exit_code, "already" in again.output) == (1, True)
    listed = run("--data", data, "key", "list")
    assert listed.stdout.split("\t")[:3] == ["laptop", "default", "harness"]
    assert listed.stdout.split("\t")[4:] == ["active", "all", "never\n"]
    assert added.stdout.strip() not in listed.stdout
    assert run("key", "revoke", "laptop", "--data", data).exit_code == 0
    assert run("key", "revoke", "laptop", "--data", data).exit_code == 1
    assert "\trevoked\t" in run("key", "list", "--data", data).stdout
    assert run("key", "list").exit_code == 2
    assert run().exit_code == 2
    refused = run("--listen", "http://0.0.0.0:0", "--data", data)
    assert (refused.exit_code, "in the clear" in refused.output) == (1, True)


def test_the_whole_way_on_the_command_line(tmp_path: Path) -> None:
    """A rendezvous, an environment, and a command run in it, as a reader of the manual does it."""
    data = str(tmp_path / "data")
    key = exec_server("rendezvous", "key", "add", "me", "--data", data).stdout.strip()
    programs: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        program = subprocess.Popen(
            [COMMAND, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=server_environment(EXEC_SERVER_API_KEY=key, XDG_STATE_HOME=str(tmp_path / "state")),
        )
        programs.append(program)
        return program

    try:
        node = start("rendezvous", "--listen", "http://127.0.0.1:0", "--data", data)
        assert node.stdout is not None
        url = node.stdout.readline().strip()
        environment = start("--remote", url, "--environment-id", "box", "--exit-on-stdin-close")
        assert environment.stderr is not None
        line = environment.stderr.readline()
        address = f"relay+{url}/box"
        assert address in line
        token = tmp_path / "token"
        token.write_text(key)
        done = exec_server(
            "run", "--url", address, "--token-file", str(token), "--", "sh", "-c", "echo there; exit 5"
        )
        assert (done.stdout, done.returncode) == ("there\n", 5), done.stderr
        kept = tmp_path / "state" / "exec-server" / "relay" / "box.key"
        assert kept.stat().st_mode & 0o777 == 0o600
        shown = exec_server("relay", "key", "show", "--key-file", str(kept)).stdout
        assert exec_server("relay", "key", "rotate", "--key-file", str(kept)).returncode == 0
        assert exec_server("relay", "key", "show", "--key-file", str(kept)).stdout != shown
        assert environment.stdin is not None
        environment.stdin.close()
        assert environment.wait(20) == 0
        node.send_signal(signal.SIGTERM)
        assert node.wait(20) == 0
    finally:
        for program in programs:
            if program.poll() is None:
                program.kill()
            program.wait(20)
            for stream in (program.stdin, program.stdout, program.stderr):
                if stream is not None:
                    stream.close()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--remote", "http://127.0.0.1:9"), "--environment-id"),
        (("--remote", "http://127.0.0.1:9", "--environment-id", "e", "--listen", "stdio"), "--listen"),
        (("forward", "--remote", "http://127.0.0.1:9", "--environment-id", "e"), "--connect"),
        (("--remote", "x", "--environment-id", "e", "--connect", "ws://x"), "belongs to"),
        (("--remote", "x", "--environment-id", "e", "--remote-transport", "direct"), "--aws-sigv4"),
        (("--remote", "x", "--environment-id", "e", "--aws-region", "r"), "belongs to"),
        (("--remote", "x", "--environment-id", "e", "--nonsense"), "unexpected argument"),
        (("--remote",), "a value is required"),
    ],
)
def test_command_lines_that_are_wrong(words: tuple[str, ...], message: str) -> None:
    done = exec_server(*words)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("words", "env", "message"),
    [
        ((), {}, "EXEC_SERVER_API_KEY"),
        (("--remote", "http://example.com"), {"EXEC_SERVER_API_KEY": "k"}, "in the clear"),
        (("--key-file", os.devnull), {"EXEC_SERVER_API_KEY": "k"}, "not a regular file"),
        (("--use-agent-identity-auth",), {}, "CODEX_ACCESS_TOKEN is not set"),
    ],
)
def test_environments_that_cannot_start(
    tmp_path: Path, words: tuple[str, ...], env: dict[str, str], message: str
) -> None:
    remote = () if "--remote" in words else ("--remote", "http://127.0.0.1:9")
    key_file = () if "--key-file" in words else ("--key-file", str(tmp_path / "key"))
    done = exec_server(*remote, "--environment-id", "e", *key_file, *words, env=env)
    assert (done.returncode, message in done.stderr) == (1, True), done.stderr
