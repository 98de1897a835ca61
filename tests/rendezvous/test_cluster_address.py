"""Where NATS is: what is understood, what is refused, and that no password is shown on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from exec_server.cli.rendezvous import rendezvous
from exec_server.rendezvous import cluster_connection
from exec_server.rendezvous.cluster_address import BadAddress, ClusterAddress, read_address

SECRET = "S3CRET"


@pytest.mark.parametrize(
    ("text", "servers"),
    [
        ("nats://a", ("nats://a:4222",)),
        ("a:1", ("nats://a:1",)),
        ("tls://a:1,b", ("tls://a:1", "nats://b:4222")),
        ("nats://a:1, nats://b:2,nats://a:1", ("nats://a:1", "nats://b:2")),
        ("nats://[::1]:5/", ("nats://[::1]:5",)),
        ("wss://a", ("wss://a:443",)),
    ],
)
def test_one_server_or_many(text: str, servers: tuple[str, ...]) -> None:
    assert read_address(text) == ClusterAddress(servers)


def test_who_we_are_is_not_part_of_where_they_are() -> None:
    found = read_address(f"nats://me:{SECRET}%40x@a,nats://me:{SECRET}%40x@b")
    assert (found.user, found.password) == ("me", f"{SECRET}@x")
    assert read_address(f"nats://{SECRET}@a,b").token == SECRET
    assert str(found) == "nats://a:4222,nats://b:4222"
    assert SECRET not in repr(found)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "nats://",
        "nats://a,",
        "http://a:1",
        "nats://a:notaport",
        "nats://a:99999",
        "nats://a/path",
        "nats://a?x=1",
        "nats://[a",
        "a b",
        "ws://a,nats://b",
        f"nats://me:{SECRET}@a:notaport",
        f"nats://me:{SECRET}@",
        f"nats://me:{SECRET}@a,nats://you:{SECRET}@b",
        f"me:{SECRET}@a:x",
        f"nats://me:{SECRET},x@a",
        f"nats://me:{SECRET}://x@a",
    ],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(BadAddress) as refused:
        read_address(text)
    assert SECRET not in str(refused.value)
    done = CliRunner().invoke(rendezvous, ("key", "list", "--cluster", text or ","))
    assert (done.exit_code, SECRET in done.output) == (1, False)
    assert done.output.startswith("Error: "), "no traceback"


def secret_file(folder: Path, content: str) -> str:
    file = folder / "credentials"
    file.write_text(content)
    file.chmod(0o600)
    return str(file)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("me:pass:word\n", {"user": "me", "password": "pass:word"}),
        ("token\n", {"token": "token"}),
        ("-----BEGIN NATS USER JWT-----\nx\n", {"credentials": "FILE"}),
    ],
)
def test_a_file_says_who_we_are(tmp_path: Path, content: str, expected: dict[str, str]) -> None:
    path = secret_file(tmp_path, content)
    expected = {name: path if value == "FILE" else value for name, value in expected.items()}
    assert read_address("nats://a", path) == ClusterAddress(("nats://a:4222",), **expected)


def test_files_that_do_not(tmp_path: Path) -> None:
    for content in ("", "two words\n", "x" * 70_000):
        with pytest.raises(BadAddress, match="neither"):
            read_address("nats://a", secret_file(tmp_path, content))
    path = secret_file(tmp_path, "me:x")
    with pytest.raises(BadAddress, match="said twice"):
        read_address("nats://me:x@a", path)
    Path(path).chmod(0o644)
    with pytest.raises(BadAddress, match="others can read"):
        read_address("nats://a", path)
    with pytest.raises(BadAddress, match="there is no"):
        read_address("nats://a", str(tmp_path / "nothing"))


def test_a_password_is_not_in_what_is_said_about_a_server_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_connection, "CONNECT_SECONDS", 0.3)
    address = "nats://127.0.0.1:9"
    for words in (
        ("--cluster", address.replace("//", f"//me:{SECRET}@")),
        ("--cluster", address, "--cluster-credentials", secret_file(tmp_path, f"me:{SECRET}")),
    ):
        for command in (("key", "list", *words), (*words, "key", "list")):
            done = CliRunner().invoke(rendezvous, command)
            assert (done.exit_code, f"cannot reach NATS at {address}" in done.output) == (1, True), (
                done.output
            )
            assert SECRET not in done.output
    done = CliRunner().invoke(rendezvous, ("--data", str(tmp_path), "--cluster-credentials", "x"))
    assert (done.exit_code, "--cluster" in done.output) == (2, True)
