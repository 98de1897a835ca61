"""What the nodes of a cluster have between them: in how many places, and what if it is lost."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import nats as nats_client
import pytest

from exec_server.rendezvous import cluster as cluster_module
from exec_server.rendezvous import cluster_bucket, cluster_connection, cluster_store
from exec_server.rendezvous.cluster_address import read_address
from exec_server.rendezvous.cluster_connection import open_cluster_store
from exec_server.rendezvous.node import Node, NodeOptions, StartFailed, open_store
from exec_server.rendezvous.store import Registered
from support.nats import NatsServer, free_port
from support.wait import eventually_async


def play(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(50):
            await scenario()

    asyncio.run(main())


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path / "nats")
    yield server
    server.kill()


def registered(name: str, *, tenant: str = "t", created: float = 1.0, seen: float = 0.0) -> Registered:
    return Registered(f"id-{tenant}-{name}", tenant, name, {"suite": "s"}, "d", created, seen=seen)


async def health(node: Node) -> tuple[int, str]:
    service = node._service
    assert service is not None
    service.forget_health()
    async with aiohttp.ClientSession() as session, session.get(f"{node.url}/healthz") as response:
        return response.status, await response.text()


async def copies(url: str) -> set[int]:
    connection = await nats_client.connect(url)
    found = {(await connection.jetstream().stream_info(f"KV_exec_server_{name}")).config.num_replicas
             for name in ("keys", "registrations", "used", "secrets")}  # fmt: skip
    await connection.close()
    return {number for number in found if number is not None}


def test_pages_counts_and_ages_without_reading_everything(alone: NatsServer) -> None:
    async def scenario() -> None:
        store = await open_cluster_store(read_address(alone.url))
        every = [
            registered("never", created=50.0),
            registered("never-later", created=95.0),
            registered("once", seen=20.0),
            registered("twice", seen=10.0),
            registered("lately", seen=99.0),
            registered("theirs", tenant="u", created=2.0),
        ]
        for one in every:
            assert await store.put_registration(one, None)
        assert (await store.count("t"), await store.count("u"), await store.count("nobody")) == (5, 1, 0)
        names = sorted(one.environment for one in every[:5])
        assert [one.environment for one in await store.page("t", None, 3)] == names[:3]
        assert [one.environment for one in await store.page("t", ("t", names[2]), 3)] == names[3:]
        assert [one.environment for one in await store.page(None, ("t", "twice"), 3)] == ["theirs"]
        away = await store.idle("t", never_since=90.0, since=30.0, limit=10)
        assert [one.environment for one in away] == ["twice", "once", "never"]
        await store.touch(away[:1], 100.0)
        assert await store.remove_registration(away[1])
        assert [one.environment for one in await store.idle("t", 90.0, 30.0, 1)] == ["never"]
        assert await store.current(["id-t-never", "id-t-once", "nobody"]) == {"id-t-never"}
        assert await store.count("t") == 4
        await store.close()

    play(scenario)


def test_marks_that_earlier_versions_left_do_not_count_for_long(alone: NatsServer) -> None:
    async def scenario() -> None:
        store = await open_cluster_store(read_address(alone.url))
        gone = registered("gone")
        assert await store.put_registration(gone, None)
        connection = await nats_client.connect(alone.url)
        bucket = await connection.jetstream().key_value("exec_server_registrations")
        (name,) = [name for name in await bucket.keys() if name.startswith("env.")]
        await bucket.delete(name)
        await connection.close()
        assert await store.count("t") == 1
        assert await store.idle("t", 90.0, 30.0, 1) == []
        assert await store.count("t") == 0
        assert await store.put_registration(gone, None)
        assert await store.registration("t", "gone") == gone
        await store.close()

    play(scenario)


def test_a_store_that_was_lost_is_noticed_and_the_nodes_go_on_together(
    alone: NatsServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], fresh_log: None
) -> None:
    monkeypatch.setattr(cluster_store, "LOST_SECONDS", 0.0)
    monkeypatch.setattr(cluster_module, "LOOK_SECONDS", 0.05)

    async def scenario() -> None:
        async with (
            Node(NodeOptions(cluster=alone.url)) as first,
            Node(NodeOptions(cluster=alone.url)) as other,
        ):
            assert (await health(first))[0] == 200
            secrets = [node._cluster.store._secret for node in (first, other)]
            alone.kill()
            alone.forget()
            alone.start()
            await eventually_async(lambda: first._cluster._nats.is_connected, "NATS again")
            while (await health(first))[0] != 200:  # it has given back what they have between them
                await asyncio.sleep(0.02)
            told = [(await health(node))[1] for node in (first, other)]
            assert any("NATS has lost what it kept" in text for text in told)
            store = await open_store(None, alone.url)
            found = await store.signing_secret()
            await store.close()
            assert [found, found] == secrets, "who comes later has the same as those before"

    async def lasting() -> None:
        """Somebody else was faster, and has another."""
        async with Node(NodeOptions(cluster=alone.url)) as node:
            signer = node._service._signer  # type: ignore[union-attr]
            connection = await nats_client.connect(alone.url)
            bucket = await connection.jetstream().key_value("exec_server_secrets")
            await bucket.put("signing", b"another")
            await connection.close()
            await eventually_async(lambda: signer._secret == b"another", "the other secret")
            assert (await health(node))[0] == 200

    play(scenario)
    play(lasting)
    said = "".join(capfd.readouterr())
    assert "keys and registrations are gone" in said
    assert "takes their signing secret" in said


def test_clocks_that_differ_are_told(
    alone: NatsServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], fresh_log: None
) -> None:
    monkeypatch.setattr(cluster_module, "ALIVE_INTERVAL", 0.05)

    async def scenario() -> None:
        async with Node(NodeOptions(cluster=alone.url)) as node:
            connection = await nats_client.connect(alone.url)
            other = bytes(16)
            await connection.publish("es.alive", other)
            await connection.publish("es.time", struct.pack("!16sd", other, time.time() + 90))
            await connection.flush()
            await eventually_async(lambda: node._cluster.trouble(), "the difference")
            status, text = await health(node)
            assert (status, text.startswith("ok, but the clock of this node")) == (200, True)
            assert "90 s" in text
            await connection.publish("es.time", b"nonsense")
            monkeypatch.setattr(cluster_module, "DEAD_SECONDS", 0.0)
            await eventually_async(lambda: node._cluster.trouble() is None, "the end of that node")
            await connection.close()

    play(scenario)
    assert "clock of another node differs" in "".join(capfd.readouterr())


def test_messages_that_are_too_small(tmp_path: Path) -> None:
    server = NatsServer(tmp_path, more="max_payload: 32768")

    async def scenario() -> None:
        with pytest.raises(StartFailed, match="32768 bytes, and a cluster needs 262241; raise `max_payload`"):
            await Node(NodeOptions(cluster=server.url)).__aenter__()

    try:
        play(scenario)
    finally:
        server.kill()


def test_a_file_opens_nats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = NatsServer(tmp_path / "nats", more='authorization { user: "me", password: "S3CRET" }')
    file = tmp_path / "credentials"
    file.write_text("me:S3CRET\n")
    file.chmod(0o600)

    async def scenario() -> None:
        options = NodeOptions(cluster=server.url, cluster_credentials=str(file))
        async with Node(options) as node:
            assert (await health(node)) == (200, "ok")
        store = await open_store(None, server.url, credentials=str(file))
        assert await store.keys() == []
        await store.close()
        monkeypatch.setattr(cluster_connection, "CONNECT_SECONDS", 0.5)
        with pytest.raises(StartFailed, match=r"(?i)authorization"):
            await open_store(None, server.url.replace("//", "//me:wrong@"))

    try:
        play(scenario)
    finally:
        server.kill()


def test_copies_that_there_are_no_servers_for(alone: NatsServer) -> None:
    async def scenario() -> None:
        with pytest.raises(StartFailed, match="does not keep 3 copies: replicas > 1 not supported"):
            await Node(NodeOptions(cluster=alone.url, cluster_replicas=3)).__aenter__()
        async with Node(NodeOptions(cluster=alone.url)):
            assert await copies(alone.url) == {1}

    play(scenario)


def test_three_servers_keep_three_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then one of them may die. That takes NATS some seconds to get over, so it is not tried here."""
    monkeypatch.setattr(cluster_bucket, "WORK_SECONDS", 0.5)
    ports, routes = [free_port() for _ in range(3)], [free_port() for _ in range(3)]
    joined = ", ".join(f'"nats://127.0.0.1:{port}"' for port in routes)
    servers = [
        NatsServer(
            tmp_path / str(number),
            port=ports[number],
            more=f"server_name: n{number}\n"
            f'cluster {{ name: c, listen: "127.0.0.1:{routes[number]}", routes: [{joined}] }}',
        )
        for number in range(3)
    ]
    urls = ",".join(server.url for server in servers)

    async def scenario() -> None:
        while True:  # until they have found each other
            try:
                store = await open_store(None, urls)
                break
            except StartFailed:
                await asyncio.sleep(0.1)
        await store.close()
        # As an earlier version has made them.
        async with Node(NodeOptions(cluster=urls, cluster_replicas=1)):
            assert await copies(servers[0].url) == {1}
        async with Node(NodeOptions(cluster=urls)):
            assert await copies(servers[0].url) == {3}

    try:
        play(scenario)
    finally:
        for server in servers:
            server.kill()


def test_a_rotated_secret_is_taken_by_every_node(
    alone: NatsServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fresh_log: None
) -> None:
    """Which is not the same as one that was lost: nobody is alarmed."""
    monkeypatch.setattr(cluster_module, "LOOK_SECONDS", 0.05)

    async def scenario() -> None:
        async with Node(NodeOptions(cluster=alone.url)) as one, Node(NodeOptions(cluster=alone.url)) as other:
            signers = [node._service._signer for node in (one, other) if node._service is not None]
            (before,) = {signer.environment_path("e", "r") for signer in signers}
            store = await open_store(None, alone.url)
            await store.rotate_secret()
            await store.close()
            after = await eventually_async(
                lambda: {signer.environment_path("e", "r") for signer in signers} - {before},
                "another signature",
            )
            await eventually_async(
                lambda: after == {signer.environment_path("e", "r") for signer in signers}, "everywhere"
            )
            assert [await health(node) for node in (one, other)] == [(200, "ok")] * 2

    play(scenario)
    assert capsys.readouterr().err == ""
