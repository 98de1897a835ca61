"""The relay on the command line: keys that are looked at, and harnesses that name their authority."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from pathlib import Path

import pytest
from aiohttp import web
from click.testing import CliRunner, Result

from exec_server.cli.relay_keys import relay
from exec_server.limits import Limits
from exec_server.relay.credentials import Bearer
from exec_server.relay.environment import RemoteEnvironment
from exec_server.relay.keys import Identity
from exec_server.relay.registry import Registry
from exec_server.rendezvous.node import Node, NodeOptions
from exec_server.server.server import Server
from relay.stage import KEY, add_key
from support.server import COMMAND, server_environment
from support.tls import certificate, trusting


def call(*words: str) -> Result:
    return CliRunner().invoke(relay, words)


async def program(*words: str, **env: str) -> tuple[int | None, str]:
    started = await asyncio.create_subprocess_exec(
        COMMAND,
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=server_environment(**env),
    )
    said, _ = await started.communicate()
    return started.returncode, said.decode()


def test_a_key_is_made_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for words in (("show", "--environment-id", "typo"), ("rotate", "--key-file", str(tmp_path / "typo.key"))):
        done = call("key", *words)
        assert (done.exit_code, "there is no key file" in done.output) == (1, True), done.output
    assert list(tmp_path.iterdir()) == []
    made = call("key", "show", "--environment-id", "box", "--create").output.splitlines()
    assert call("key", "show", "--environment-id", "box").output.splitlines() == made
    assert call("key", "rotate", "--environment-id", "box").exit_code == 0
    assert call("key", "show", "--environment-id", "box").output.splitlines()[0] != made[0]


def test_an_authority_of_ones_own(tmp_path: Path) -> None:
    """Named on the command line, for an address and for a name in the file."""
    cert, key = certificate(tmp_path)
    home = tmp_path / "home"
    home.mkdir()
    token = tmp_path / "token"
    token.write_text(KEY)

    async def main() -> None:
        await add_key(tmp_path)
        options = NodeOptions(
            listen="https://127.0.0.1:0", tls_cert=str(cert), tls_key=str(key), data=str(tmp_path)
        )
        async with asyncio.timeout(50), Node(options) as node:
            server = Server(asyncio.get_running_loop(), Limits(), tag_trees=False)
            identity, trust = Identity.generate(), trusting(cert)
            registry = Registry(node.url, "box", Bearer(KEY), ssl=trust)
            environment = RemoteEnvironment(registry, lambda: identity, server.accept, ssl=trust)
            connected = asyncio.Event()
            environment.on_connected = connected.set
            task = asyncio.ensure_future(environment.run())
            await connected.wait()
            url = f"relay+{node.url}/box"
            (home / "environments.toml").write_text(
                f'[[environments]]\nid = "box"\nurl = "{url}"\nauth_bearer_token = "{KEY}"\n'
            )
            by_url = ("run", "--url", url, "--token-file", str(token))
            by_name = ("run", "--env", "box", "--ca-file", str(cert))
            answers = await asyncio.gather(
                program(*by_url, "--ca-file", str(cert), "--", "echo", "there"),
                program(*by_name, "--", "echo", "there", CODEX_HOME=str(home)),
                program(*by_url, "--ca-file", str(token), "--", "echo", "there"),
                program(*by_url, "--bogus", "--", "echo", "there"),
                program("env", "check", "--ca-file", str(cert), "box", CODEX_HOME=str(home)),
            )
            for code, said in answers[:2]:  # one may say that it waits
                assert (code, said.splitlines()[-1:]) == (0, ["there"]), said
            assert answers[2][0] == 1
            assert "is not a file of certificates" in answers[2][1]
            assert answers[3][0] == 2
            assert "--bogus" in answers[3][1]
            assert answers[4][0] == 0, answers[4][1]
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            server.close()

    asyncio.run(main())


EVIL = "\x1b[2J\x1b]0;title\x07evil\r\nError: forged \x9b1m"


@pytest.mark.parametrize(
    "answer",
    [
        {"text": EVIL},
        {"text": json.dumps({"error": {"code": EVIL, "message": EVIL}}), "content_type": "application/json"},
    ],
)
def test_what_a_registry_says_stays_on_one_line(tmp_path: Path, answer: dict[str, str]) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=403, **answer)  # type: ignore[arg-type]  # all are texts

    async def main() -> None:
        app = web.Application()
        app.router.add_route("*", "/{rest:.*}", refuse)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        token = tmp_path / "token"
        token.write_text("t")
        ends = await asyncio.gather(
            program("run", "--url", f"relay+{url}/box", "--token-file", str(token), "--", "true"),
            program(
                *("--remote", url, "--environment-id", "box", "--key-file", str(tmp_path / "key")),
                EXEC_SERVER_API_KEY="k",
            ),
        )
        for code, said in ends:
            (line,) = said.splitlines()
            assert (code, line.startswith("Error: ")) == (1, True), said
            assert r"evil\r\nError: forged \x9b1m" in line
            assert "\x1b" not in said
        await runner.cleanup()

    asyncio.run(main())


SERVER = """
import json, sys
evil = sys.argv[2].encode().decode("unicode_escape")
for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    answer = {"id": message["id"], "error": {"code": -32000, "message": evil}}
    if message["method"] == "initialize" and sys.argv[1] == "later":
        answer = {"id": message["id"], "result": {"sessionId": "s"}}
    print(json.dumps(answer), flush=True)
"""


@pytest.mark.parametrize("when", ["at once", "later"])
def test_what_a_server_says_stays_on_one_line(tmp_path: Path, when: str) -> None:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    evil = EVIL.encode("unicode_escape").decode()
    command = shlex.join([sys.executable, str(script), when, evil])
    code, said = asyncio.run(program("run", "--url", f"stdio:{command}", "--", "true"))
    assert code == (1 if when == "at once" else 127), said
    assert "\x1b" not in said
    assert r"evil\r\nError: forged \x9b1m" in said
    assert "\nError: forged" not in said
