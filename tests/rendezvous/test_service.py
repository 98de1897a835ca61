"""The registry over HTTP, as its clients see it: every answer of the table."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from exec_server.relay.keys import Identity
from exec_server.rendezvous import api, revocation, service, sockets
from exec_server.rendezvous.node import Node, NodeOptions
from exec_server.rendezvous.service import Settings
from exec_server.rendezvous.store import ApiKey, EmbeddedStore, Role, digest_of
from support.wait import eventually_async

ONE, OTHER = Identity.generate().public.to_object(), Identity.generate().public.to_object()
HARNESS = Identity.generate().public.to_object()
REGISTER = {"security_profile": "noise_hybrid_ik_v1", "executor_public_key": ONE}


class Registry:
    """A node, and calls to it with any key."""

    def __init__(self, node: Node, session: aiohttp.ClientSession, data: Path) -> None:
        self.node = node
        self.session = session
        self._data = data

    async def add_key(self, secret: str, role: Role = "any", tenant: str = "t", **more: Any) -> None:
        store = EmbeddedStore(str(self._data))
        await store.add_key(ApiKey(secret, tenant, role, digest_of(secret), 0.0, **more))
        await store.close()

    async def revoke(self, secret: str) -> None:
        store = EmbeddedStore(str(self._data))
        assert await store.revoke_key(secret)
        await store.close()

    async def call(
        self, operation: str, body: Any, key: str | None = "key", environment: str = "env-1"
    ) -> tuple[int, Any]:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        url = f"{self.node.url}/cloud/environment/{environment}/{operation}"
        options: dict[str, Any] = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.session.post(url, headers=headers, **options) as response:
            return response.status, await response.json()

    async def get(self, path: str, key: str | None = None) -> tuple[int, str]:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        async with self.session.get(self.node.url + path, headers=headers) as response:
            return response.status, await response.text()

    async def upgrade(self, url: str) -> aiohttp.ClientWebSocketResponse:
        return await self.session.ws_connect(url)

    async def refused_upgrade(self, url: str) -> int:
        try:
            socket = await self.upgrade(url)
        except aiohttp.WSServerHandshakeError as error:
            return error.status
        await socket.close()
        return 101


def play(tmp_path: Path, scenario: Callable[[Registry], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        options = NodeOptions(data=str(tmp_path), settings=Settings(**settings))
        async with asyncio.timeout(40), Node(options) as node, aiohttp.ClientSession() as session:
            registry = Registry(node, session, tmp_path)
            await registry.add_key("key")
            await scenario(registry)

    asyncio.run(main())


def code(answer: tuple[int, Any]) -> tuple[int, str]:
    return answer[0], answer[1]["error"]["code"]


def test_who_may_call(tmp_path: Path) -> None:
    async def scenario(registry: Registry) -> None:
        await registry.add_key("serves", "environment")
        await registry.add_key("uses", "harness")
        await registry.add_key("looks", "admin")
        for key in (None, "", "wrong"):
            assert code(await registry.call("register", REGISTER, key)) == (401, "unauthorized")
        for operation, key in (
            ("register", "uses"),
            ("validate", "uses"),
            ("connect", "serves"),
            ("register", "looks"),
            ("connect", "looks"),
        ):
            assert code(await registry.call(operation, {}, key)) == (403, "forbidden")
        assert (await registry.call("register", REGISTER, "serves"))[0] == 200
        await registry.revoke("serves")
        assert code(await registry.call("register", REGISTER, "serves")) == (401, "unauthorized")

    play(tmp_path, scenario)


@pytest.mark.parametrize(
    "body",
    [
        b"not json",
        b"[" * 50_000,
        b"[]",
        b"null",
        {},
        {**REGISTER, "security_profile": "none"},
        {**REGISTER, "executor_public_key": {**ONE, "more": 1}},
        {**REGISTER, "executor_public_key": {**ONE, "suite": "other"}},
        {**REGISTER, "executor_public_key": {**ONE, "x25519_public_key": "AAAA"}},
    ],
)
def test_malformed_registrations(tmp_path: Path, body: Any) -> None:
    async def scenario(registry: Registry) -> None:
        assert code(await registry.call("register", body)) == (400, "invalid_request")

    play(tmp_path, scenario)


def test_sizes_names_and_paths(tmp_path: Path) -> None:
    async def scenario(registry: Registry) -> None:
        assert code(await registry.call("register", b" " * 70_000)) == (413, "too_large")
        for name in ("a" * 129, "%C3%A4", "a%2Fb", "a b"):
            assert code(await registry.call("register", REGISTER, environment=name)) == (
                400,
                "invalid_request",
            )
        assert code(await registry.call("other", {})) == (404, "not_found")
        assert (await registry.get("/nothing"))[0] == 404
        assert (await registry.get("/healthz")) == (200, "ok")

    play(tmp_path, scenario)


def test_the_same_key_keeps_its_registration_and_a_newer_one_wins(tmp_path: Path) -> None:
    async def scenario(registry: Registry) -> None:
        _, first = await registry.call("register", REGISTER)
        assert set(first) == {"environment_id", "url", "security_profile", "executor_registration_id"}
        assert first["environment_id"] == "env-1"
        assert first["url"].startswith(registry.node.url.replace("http", "ws") + "/ws/environment/env-1?")
        _, again = await registry.call("register", REGISTER)
        assert again == first
        old_socket = await registry.upgrade(first["url"])

        _, second = await registry.call("register", {**REGISTER, "executor_public_key": OTHER})
        assert second["executor_registration_id"] != first["executor_registration_id"]
        assert (await old_socket.receive()).data == 1000
        assert await registry.refused_upgrade(first["url"]) == 409
        # The old one may come back while the new one is not there, and not when it is.
        socket = await registry.upgrade(second["url"])
        await eventually_async(lambda: registry.node.router and registry.node.router.online)
        assert code(await registry.call("register", REGISTER)) == (409, "registration_conflict")
        await socket.close()
        await eventually_async(lambda: registry.node.router and not registry.node.router.online)
        assert (await registry.call("register", REGISTER))[0] == 200
        assert await registry.refused_upgrade(second["url"]) == 409

    play(tmp_path, scenario)


def test_tenants_do_not_see_each_other(tmp_path: Path) -> None:
    async def scenario(registry: Registry) -> None:
        await registry.add_key("theirs", tenant="other")
        _, ours = await registry.call("register", REGISTER)
        assert code(await registry.call("connect", {"harness_public_key": HARNESS}, "theirs")) == (
            404,
            "environment_not_found",
        )
        _, theirs = await registry.call("register", {**REGISTER, "executor_public_key": OTHER}, "theirs")
        assert theirs["executor_registration_id"] != ours["executor_registration_id"]
        assert (await registry.call("register", REGISTER))[1] == ours

    play(tmp_path, scenario)


def test_a_bundle_and_its_authorization(tmp_path: Path) -> None:
    async def scenario(registry: Registry) -> None:
        ask = {"harness_public_key": HARNESS}
        assert code(await registry.call("connect", ask)) == (404, "environment_not_found")
        _, registered = await registry.call("register", REGISTER)
        assert code(await registry.call("connect", ask)) == (409, "environment_offline")
        assert code(await registry.call("connect", {"harness_public_key": {}})) == (400, "invalid_request")
        socket = await registry.upgrade(registered["url"])
        status, bundle = await registry.call("connect", ask)
        assert status == 200
        assert bundle["executor_public_key"] == ONE
        assert bundle["executor_registration_id"] == registered["executor_registration_id"]
        question = {
            "executor_registration_id": bundle["executor_registration_id"],
            "harness_public_key": HARNESS,
            "harness_key_authorization": bundle["harness_key_authorization"],
        }
        for wrong in (
            {"harness_public_key": OTHER},
            {"harness_key_authorization": ""},
            {"harness_key_authorization": "x" * 5000},
            {"executor_registration_id": "other"},
        ):
            assert await registry.call("validate", question | wrong) == (200, {"valid": False})
        assert code(await registry.call("validate", question | {"harness_key_authorization": 7})) == (
            400,
            "invalid_request",
        )
        await registry.add_key("theirs", tenant="other")
        assert await registry.call("validate", question, "theirs") == (200, {"valid": False})
        assert await registry.call("validate", question) == (200, {"valid": True})
        assert await registry.call("validate", question) == (200, {"valid": False})

        assert await registry.refused_upgrade(bundle["url"] + "x") == 401
        assert await registry.refused_upgrade(bundle["url"].replace("env-1", "env-2")) == 401
        harness = await registry.upgrade(bundle["url"])
        assert await registry.refused_upgrade(bundle["url"]) == 401
        await harness.close()
        await socket.close()

    play(tmp_path, scenario)


def test_too_many_calls_and_too_many_environments(tmp_path: Path) -> None:
    async def scenario(registry: Registry) -> None:
        assert (await registry.call("register", REGISTER, environment="a"))[0] == 200
        assert (await registry.call("register", REGISTER, environment="b"))[0] == 200
        assert code(await registry.call("register", REGISTER, environment="c")) == (403, "quota_exceeded")
        assert (await registry.call("register", REGISTER, environment="a"))[0] == 200
        answers = [code(await registry.call("connect", {})) for _ in range(3)]
        assert answers[-1] == (429, "rate_limited")
        url = f"{registry.node.url}/cloud/environment/a/connect"
        async with registry.session.post(url, headers={"Authorization": "Bearer key"}) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "1000")
        await registry.add_key("fresh")
        assert code(await registry.call("connect", {}, "fresh"))[0] == 400

    play(tmp_path, scenario, environments_per_tenant=2, calls_per_second=0.001, calls_at_once=6.0)


def test_what_an_operator_sees(tmp_path: Path) -> None:
    async def scenario(registry: Registry) -> None:
        await registry.add_key("looks", "admin", "*")
        await registry.add_key("sees", "admin", "t")
        await registry.add_key("elsewhere", "admin", "other")
        _, registered = await registry.call("register", REGISTER)
        socket = await registry.upgrade(registered["url"])
        for path in ("/metrics", "/admin/environments"):
            assert (await registry.get(path))[0] == 401
            assert (await registry.get(path, "key"))[0] == 403
        status, metrics = await registry.get("/metrics", "looks")
        assert status == 200
        assert "exec_server_rendezvous_environments_online 1.0" in metrics
        assert 'exec_server_rendezvous_calls_total{call="register",status="200"} 1.0' in metrics
        status, listing = await registry.get("/admin/environments", "looks")
        assert status == 200
        assert '"environment":"env-1"' in listing
        assert '"online":true' in listing
        assert ONE["x25519_public_key"] not in listing
        await socket.close()
        # Whose key is for one tenant sees that one, and numbers about all are not for it.
        for key, sees in (("sees", True), ("elsewhere", False)):
            assert ("env-1" in (await registry.get("/admin/environments", key))[1]) is sees
            assert (await registry.get("/metrics", key))[0] == 403

    play(tmp_path, scenario)


def test_text_garbage_and_giants_on_the_sockets(tmp_path: Path) -> None:
    async def scenario(registry: Registry) -> None:
        _, registered = await registry.call("register", REGISTER)
        environment = await registry.upgrade(registered["url"])
        await environment.send_str("hello")
        await environment.send_bytes(b"\xff\xff")
        _, bundle = await registry.call("connect", {"harness_public_key": HARNESS})
        harness = await registry.upgrade(bundle["url"])
        await harness.send_bytes(b"\xff\xff")
        await harness.send_str("hello")
        assert (await harness.receive()).data == 1003
        assert not environment.closed
        await environment.send_bytes(bytes(262_145))
        assert (await environment.receive()).type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)

    play(tmp_path, scenario)


def test_requests_that_are_not_whole(tmp_path: Path) -> None:
    """The front door reads heads of any kind, and what is no upgrade is aiohttp's."""

    async def scenario(registry: Registry) -> None:
        where = urlsplit(registry.node.url)

        async def say(text: bytes) -> bytes:
            reader, writer = await asyncio.open_connection(where.hostname, where.port)
            writer.write(text)
            answer = await reader.read(300)
            writer.close()
            return answer

        assert (await say(b"nonsense\r\n\r\n")).startswith(b"HTTP/1.0 400")
        assert (await say(b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.0 400")
        assert (await say(b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")).endswith(b"ok")
        upgrade = b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
        bad = b"GET /ws/environment/e?role=harness HTTP/1.1\r\nhost: x\r\n" + upgrade
        assert b" 404 " in await say(bad + b"sec-websocket-key: short\r\n\r\n")
        assert b" 401 " in await say(bad + b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n")
        # One byte at a time.
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        for byte in b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n":
            writer.write(bytes((byte,)))
            await writer.drain()
        assert (await reader.read()).endswith(b"ok")
        writer.close()

    play(tmp_path, scenario)


def test_a_node_that_goes_away(tmp_path: Path) -> None:
    async def scenario(registry: Registry) -> None:
        _, registered = await registry.call("register", REGISTER)
        socket = await registry.upgrade(registered["url"])
        await registry.node.__aexit__()
        assert (await socket.receive()).data == 1001

    play(tmp_path, scenario)


def test_a_harness_without_a_stream_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "IDLE_SECONDS", 0.1)

    async def scenario(registry: Registry) -> None:
        _, registered = await registry.call("register", REGISTER)
        environment = await registry.upgrade(registered["url"])
        _, bundle = await registry.call("connect", {"harness_public_key": HARNESS})
        harness = await registry.upgrade(bundle["url"])
        assert (await harness.receive()).data == 1008
        assert not environment.closed
        await environment.close()

    play(tmp_path, scenario)


def test_a_body_that_does_not_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "BODY_SECONDS", 0.1)

    async def scenario(registry: Registry) -> None:
        where = urlsplit(registry.node.url)
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        writer.write(
            b"POST /cloud/environment/e/register HTTP/1.1\r\nhost: x\r\nauthorization: Bearer key\r\n"
            b"content-length: 100\r\n\r\n{"
        )
        assert b" 408 " in await reader.readline()
        writer.close()

    play(tmp_path, scenario)


def test_what_cannot_be_read_is_refused_and_not_quoted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Heads and bodies that are broken may still have a key in them."""

    async def scenario(registry: Registry) -> None:
        assert (await registry.call("register", b'{"a": "\xff"}'))[0] == 400
        where = urlsplit(registry.node.url)
        for head in (b"auth{rization: Bearer key-of-somebody", b"a: b\r\nc\0: key-of-somebody"):
            reader, writer = await asyncio.open_connection(where.hostname, where.port)
            writer.write(b"POST / HTTP/1.1\r\n" + head + b"\r\n\r\n")
            assert b" 400 " in await reader.readline()
            writer.close()
        head = (
            b"POST /cloud/environment/e/register HTTP/1.1\r\nauthorization: Bearer key\r\ncontent-length: 99"
        )
        _, writer = await asyncio.open_connection(where.hostname, where.port)
        writer.write(head + b"\r\n\r\nkey-of-somebody")
        assert (await registry.get("/healthz"))[0] == 200
        writer.close()
        assert (await registry.get("/healthz"))[0] == 200

    play(tmp_path, scenario)
    assert "key-of-somebody" not in caplog.text + "".join(capfd.readouterr())
    assert "unforeseen" not in caplog.text


def test_wrong_tokens_are_taken_only_so_often_from_one_address(tmp_path: Path) -> None:
    async def scenario(registry: Registry) -> None:
        await registry.add_key("not used yet")
        assert (await registry.call("register", REGISTER))[0] == 200
        answers = [(await registry.call("register", REGISTER, f"guess-{number}"))[0] for number in range(40)]
        assert answers.count(401) >= 20
        assert answers[-1] == 429
        # Not even a right one is looked up then, but one that was right before is.
        assert (await registry.call("register", REGISTER, "not used yet"))[0] == 429
        assert (await registry.call("register", REGISTER))[0] == 200

    play(tmp_path, scenario)


def test_environments_that_have_long_been_away_make_room(tmp_path: Path) -> None:
    async def scenario(registry: Registry) -> None:
        service = registry.node._service
        assert service is not None
        start = service._clock()
        now = start
        service._clock = lambda: now
        sockets = {}
        for name in ("away", "there"):
            _, registered = await registry.call("register", REGISTER, environment=name)
            sockets[name] = await registry.upgrade(registered["url"])
        await registry.call("register", REGISTER, environment="never")
        await sockets["away"].close()
        router = registry.node.router
        assert router is not None
        await eventually_async(lambda: router.online == 1, "one that is away")

        async def left() -> set[str]:
            return {found.environment for found in await registry.node.registrations()}

        answer = await registry.call("register", REGISTER, environment="new")
        assert code(answer) == (403, "quota_exceeded")
        assert "environment rm" in answer[1]["error"]["message"]
        now = start + 61
        assert (await registry.call("register", REGISTER, environment="new"))[0] == 200
        assert await left() == {"away", "there", "new"}
        now = start + 62
        assert (await registry.call("register", REGISTER, environment="newer"))[0] == 403
        now = start + 25 * 3600  # the one that is there has not been seen to connect since, either
        for name in ("newer", "newest"):
            assert (await registry.call("register", REGISTER, environment=name))[0] == 200
        assert await left() == {"there", "newer", "newest"}
        await sockets["there"].close()

    play(tmp_path, scenario, environments_per_tenant=3)


def test_an_admin_removes_an_environment(tmp_path: Path) -> None:
    async def scenario(registry: Registry) -> None:
        await registry.add_key("rules", "admin", "*")
        await registry.add_key("elsewhere", "admin", "other")
        _, registered = await registry.call("register", REGISTER)
        socket = await registry.upgrade(registered["url"])
        url = f"{registry.node.url}/admin/environments/t/env-1"

        async def remove(key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            async with registry.session.delete(url, headers=headers) as response:
                return response.status

        assert [await remove(key) for key in ("key", "elsewhere", "rules", "rules")] == [403, 403, 200, 404]
        assert (await socket.receive(timeout=20)).type is aiohttp.WSMsgType.CLOSE
        assert await registry.refused_upgrade(registered["url"]) == 409

    play(tmp_path, scenario)


def test_a_key_for_some_environments_only(tmp_path: Path) -> None:
    async def scenario(registry: Registry) -> None:
        await registry.add_key("scoped", "environment", environments=("env-1", "env-3"))
        await registry.add_key("seer", "harness", environments=("env-1",))
        assert (await registry.call("register", REGISTER, "scoped"))[0] == 200
        assert (await registry.call("register", REGISTER, "scoped", "env-3"))[0] == 200
        for operation in ("register", "validate"):
            status, answer = await registry.call(operation, REGISTER, "scoped", "env-2")
            assert (status, answer["error"]["code"]) == (403, "forbidden"), operation
        assert (await registry.call("register", REGISTER, environment="env-2"))[0] == 200
        connect = {"harness_public_key": HARNESS}
        assert (await registry.call("connect", connect, "seer"))[0] == 409  # it is not connected
        for name in ("env-2", "nowhere"):  # and is not told which of them there are
            status, answer = await registry.call("connect", connect, "seer", name)
            assert (status, answer["error"]["code"]) == (403, "forbidden")

    play(tmp_path, scenario)


def test_a_key_that_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From then on it is like one that was revoked: what it has opened is cut."""
    monkeypatch.setattr(revocation, "LOOK_SECONDS", 0.02)
    times = [1000.0]
    monkeypatch.setattr(service.Rendezvous.__init__, "__defaults__", (lambda: times[0], None))
    monkeypatch.setattr(revocation.Revocations.__init__, "__defaults__", (lambda: times[0],))

    async def scenario(registry: Registry) -> None:
        router = registry.node.router
        assert router is not None
        await registry.add_key("short", "environment", expires=1100.0)
        status, answer = await registry.call("register", REGISTER, "short")
        assert status == 200
        await registry.upgrade(answer["url"])
        await eventually_async(lambda: router.online == 1, "the environment is there")
        times[0] = 1100.0
        await eventually_async(lambda: router.online == 0, "the environment is cut")
        assert await registry.refused_upgrade(answer["url"]) == 401
        status, answer = await registry.call("register", REGISTER, "short")
        assert (status, "has expired" in answer["error"]["message"]) == (401, True)
        assert (await registry.call("connect", {"harness_public_key": HARNESS}))[0] == 409

    play(tmp_path, scenario)
