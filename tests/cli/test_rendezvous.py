"""`exec-server rendezvous …`: what it refuses, what it lists, and what it says when its directory is bad."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest
from click.testing import CliRunner, Result

from exec_server.cli.rendezvous import rendezvous
from exec_server.rendezvous.store import EmbeddedStore, Registered
from support.server import COMMAND, server_environment
from support.tls import certificate
from support.wait import eventually


def call(*words: str, **env: str) -> Result:
    return CliRunner().invoke(rendezvous, words, env=env)


@contextmanager
def running(data: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    node = subprocess.Popen(
        [COMMAND, "rendezvous", "--data", str(data), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=server_environment(),
    )
    assert node.stdout is not None
    try:
        yield node, node.stdout.readline().strip()
    finally:
        node.terminate()
        node.communicate(timeout=20)


def ask(url: str, key: str = "", body: bytes | None = None, method: str | None = None) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, body, headers, method=method), timeout=20
        ) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--calls-per-second", "0"), "number of calls"),
        (("--calls-per-second", "nan"), "number of calls"),
        (("--calls-per-second", "-5"), "number of calls"),
        (("--calls-per-second", "inf"), "number of calls"),
        (("--public-url", "ftp://x"), "is not http://HOST"),
        (("--public-url", "https://"), "is not http://HOST"),
        (("--public-url", "https://h:x"), "is not http://HOST"),
        (("--cluster", "nats://127.0.0.1:1"), "give one of them"),
        (("key", "add", ""), "printable characters"),
        (("key", "add", "a\nb"), "printable characters"),
        (("key", "add", "\x1b[2J"), "printable characters"),
        (("key", "add", "n", "--tenant", ""), "printable characters"),
        (("key", "add", "n", "--tenant", "*"), "only an admin's key"),
        (("key", "list", "--data", "x", "--cluster", "nats://127.0.0.1:1"), "give one of them"),
    ],
)
def test_what_is_refused(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    done = call("--data", str(tmp_path / "new"), *words)
    assert (done.exit_code, message in done.output) == (2, True), done.output
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("words", [("key", "list"), ("key", "revoke", "n"), ("environment", "list")])
def test_who_only_looks_makes_nothing(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = call(*words, "--data", str(tmp_path / "typo"))
    assert (done.exit_code, "typo" in done.output) == (1, True), done.output
    assert list(tmp_path.iterdir()) == []


def test_a_typed_place_counts_for_more_than_a_variable(tmp_path: Path) -> None:
    cluster = {"EXEC_SERVER_RENDEZVOUS_CLUSTER": "nats://127.0.0.1:1"}
    assert call("key", "add", "n", "--data", str(tmp_path), **cluster).exit_code == 0
    assert call("key", "list", "--data", str(tmp_path), **cluster).output.startswith("n\tdefault\tany\t")


def test_whose_an_admins_key_is(tmp_path: Path) -> None:
    for words in (("all", "--role", "admin"), ("one", "--role", "admin", "--tenant", "b"), ("plain",)):
        assert call("key", "add", *words, "--data", str(tmp_path)).exit_code == 0
    listed = [
        line.split("\t")[:3] for line in call("key", "list", "--data", str(tmp_path)).output.split("\n")
    ]
    assert listed[:3] == [["all", "*", "admin"], ["one", "b", "admin"], ["plain", "default", "any"]]


def test_environments_are_listed_and_removed(tmp_path: Path) -> None:
    async def register() -> None:
        store = EmbeddedStore(str(tmp_path))
        for name, seen in (("a", 0.0), ("b", 86400.0)):
            await store.put_registration(
                Registered(name, "default", name, {}, name, 60.0, (), "k", seen), None
            )
        await store.close()

    asyncio.run(register())
    data = ("--data", str(tmp_path))
    assert call("environment", "list", *data).output.splitlines() == [
        "default\ta\t1970-01-01 00:01:00\tnever connected",
        "default\tb\t1970-01-01 00:01:00\t1970-01-02 00:00:00",
    ]
    assert call("environment", "rm", "a", *data).exit_code == 0
    done = call("environment", "rm", "a", *data)
    assert (done.exit_code, "no environment 'a'" in done.output) == (1, True)
    assert call("environment", "rm", "b", "--tenant", "other", *data).exit_code == 1
    assert len(call("environment", "list", *data).output.splitlines()) == 1


@pytest.mark.parametrize("words", [("key", "list"), ("key", "add", "n"), ()])
def test_a_database_that_is_none(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "rendezvous.sqlite3").write_bytes(b"this is not a database" * 100)
    done = call("--data", str(tmp_path), *words)
    assert done.exit_code == 1
    (line,) = done.output.splitlines()
    assert line.startswith(f"Error: the database {tmp_path}/rendezvous.sqlite3 cannot be used")
    assert "backup" in line


def test_two_in_one_directory(tmp_path: Path) -> None:
    with running(tmp_path) as (node, url):
        with urllib.request.urlopen(f"{url}/healthz", timeout=20) as answer:
            assert answer.headers["Server"] == "exec-server"  # and not what it is made of
        done = call("--data", str(tmp_path))
        assert done.exit_code == 1
        assert f"another rendezvous runs with {tmp_path} (process {node.pid})" in done.output
        assert call("key", "add", "n", "--data", str(tmp_path)).exit_code == 0  # commands may


def test_a_full_disk_shows_in_its_health(tmp_path: Path) -> None:
    """One line in the log, and no traceback; and it recovers."""
    key = call("key", "add", "n", "--data", str(tmp_path)).output.strip()
    with running(tmp_path) as (node, url):
        assert ask(f"{url}/healthz") == (200, "ok")
        before = resource.prlimit(node.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        eventually(lambda: ask(f"{url}/healthz")[0] == 503, "bad health")
        assert "rendezvous.sqlite3 cannot be used" in ask(f"{url}/healthz")[1]
        question = json.dumps(
            {
                "security_profile": "noise_hybrid_ik_v1",
                "executor_public_key": _public_key(),
            }
        ).encode()
        status, text = ask(f"{url}/cloud/environment/e/register", key, question)
        assert (status, "authentication_service_unavailable" in text) == (502, True), text
        resource.prlimit(node.pid, resource.RLIMIT_FSIZE, before)
        assert ask(f"{url}/cloud/environment/e/register", key, question)[0] == 200
        eventually(lambda: ask(f"{url}/healthz") == (200, "ok"), "good health")
        node.terminate()
        _, said = node.communicate(timeout=20)
    assert "Traceback" not in said
    assert said.count("cannot answer calls") == 1


def _public_key() -> dict[str, str]:
    from exec_server.relay.keys import Identity

    return Identity.generate().public.to_object()


def test_keys_with_bounds_are_listed(tmp_path: Path) -> None:
    data = ("--data", str(tmp_path))
    for words in (
        ("plain",),
        ("short", "--expires", "90d"),
        ("a", "--environment", "x", "--environment", "y"),
    ):
        assert call("key", "add", *words, *data).exit_code == 0
    plain, short, scoped = [line.split("\t")[4:] for line in call("key", "list", *data).output.splitlines()]
    assert plain == ["active", "all", "never"]
    assert (short[:2], short[2][:2]) == (["active", "all"], "20")
    assert scoped == ["active", "x,y", "never"]
    assert call("key", "revoke", "short", *data).exit_code == 0
    assert "\trevoked\t" in call("key", "list", *data).output
    for words in (("--expires", "soon"), ("--expires", "0d"), ("--environment", "a/b"), ("--expires", "-1d")):
        assert call("key", "add", "n", *words, *data).exit_code == 2
    assert call("key", "add", "n", "--role", "admin", "--environment", "x", *data).exit_code == 2


def test_a_renewed_certificate_is_taken_on_sighup(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    words = ("--listen", "https://127.0.0.1:0", "--tls-cert", str(cert), "--tls-key", str(key))
    with running(tmp_path / "data", *words) as (node, url):
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        before = ssl.get_server_certificate(address, timeout=20)
        assert before.split() == cert.read_text().split()
        certificate(tmp_path)
        node.send_signal(signal.SIGHUP)
        eventually(lambda: ssl.get_server_certificate(address, timeout=20) != before, "the new certificate")
        now = ssl.get_server_certificate(address, timeout=20)
        assert now.split() == cert.read_text().split()
        cert.write_text("broken")
        node.send_signal(signal.SIGHUP)
        assert node.stderr is not None
        assert "goes on with the certificate it has" in node.stderr.readline()
        assert ssl.get_server_certificate(address, timeout=20) == now
        assert node.poll() is None


def test_sighup_does_not_end_it(tmp_path: Path) -> None:
    with running(tmp_path, "--log-level", "info") as (node, url):
        node.send_signal(signal.SIGHUP)
        assert node.stderr is not None
        assert "SIGHUP" in node.stderr.readline()
        assert ask(f"{url}/healthz") == (200, "ok")


def test_the_signing_secret_is_rotated_while_it_runs(tmp_path: Path) -> None:
    key = call("key", "add", "n", "--data", str(tmp_path)).output.strip()
    question = json.dumps({"security_profile": "noise_hybrid_ik_v1", "executor_public_key": _public_key()})

    def registered() -> str:
        status, text = ask(f"{url}/cloud/environment/e/register", key, question.encode())
        assert status == 200
        return str(json.loads(text)["url"])

    async def opens(address: str) -> bool:
        async with aiohttp.ClientSession() as session, session.ws_connect(address) as socket:
            return not socket.closed

    with running(tmp_path) as (_, url):
        before = registered()
        done = call("secret", "rotate", "--data", str(tmp_path))
        assert (done.exit_code, done.stdout) == (0, "")
        eventually(lambda: registered() != before, "another signature")
        assert asyncio.run(opens(before))  # for a while
        assert asyncio.run(opens(registered()))
    with (
        running(tmp_path) as (_, again),
        pytest.raises(aiohttp.WSServerHandshakeError, match="401"),
    ):
        asyncio.run(opens(before.replace(url.removeprefix("http"), again.removeprefix("http"))))
    assert call("secret", "rotate", "--data", str(tmp_path / "typo")).exit_code == 1
