"""A node that strangers say anything to, on real sockets: it answers, and everybody else is served."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import pytest

from exec_server.relay.credentials import Bearer
from exec_server.relay.frame import NOTHING_RECEIVED, Data, Frame, Handshake, Heartbeat, Resume, encode
from exec_server.relay.keys import Identity
from exec_server.relay.link import UpgradeFailed, WebSocketLink, open_link
from exec_server.relay.noise import Initiator, prologue
from exec_server.relay.registry import Registry
from relay.stage import KEY, Stage, stage
from support.mutation import mutations

STRANGER = Identity.generate()
GROWTH_BYTES = 64 << 20
"""What a test may add to this process: far more than a node should keep, far less than it is sent."""


def play(tmp_path: Path, scenario: Callable[[Stage], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(55), stage(tmp_path) as made:
            made.start_environment()
            await made.connected.wait()
            await scenario(made)

    asyncio.run(main())


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def status_of(url: str, request: bytes) -> int | None:
    """What a node answers to these bytes; None if it waits for more, or cuts the connection."""
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    try:
        writer.write(request)
        line = await asyncio.wait_for(reader.readline(), 1.0)
        return int(line.split(b" ")[1]) if line else None
    except (ConnectionError, TimeoutError):
        return None
    finally:
        writer.close()


def test_requests_to_the_registry(tmp_path: Path) -> None:
    """Real calls, and an upgrade, broken in all their parts."""

    async def scenario(made: Stage) -> None:
        key = STRANGER.public.to_object()
        registry = Registry(made.node.url, "env-1", Bearer(KEY))
        bundle = await registry.connect(STRANGER.public)
        await registry.close()
        calls = {
            "register": {"security_profile": "noise_hybrid_ik_v1", "executor_public_key": key},
            "connect": {"harness_public_key": key},
            "validate": {
                "executor_registration_id": bundle.registration_id,
                "harness_public_key": key,
                "harness_key_authorization": bundle.authorization,
            },
        }
        upgrade = bundle.url.partition("/ws/")[2]
        requests = [
            (
                f"POST /cloud/environment/other/{name} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(json.dumps(body))}\r\n\r\n"
                f"{json.dumps(body)}"
            ).encode()
            for name, body in calls.items()
        ] + [
            f"GET /ws/{upgrade} HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
            "sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n".encode()
        ]
        before = resident()
        answers = await asyncio.gather(
            *(status_of(made.node.url, request) for request in mutations(requests, 240, seed=6))
        )
        statuses = {status for status in answers if status is not None}
        assert {200, 400, 401} <= statuses
        assert not any(status >= 500 for status in statuses)
        assert resident() - before < GROWTH_BYTES
        await still_served(made)

    play(tmp_path, scenario)


async def still_served(made: Stage) -> None:
    """The environment that was there all the time."""
    client = await made.client()
    assert (await client.run(["echo", "hi"])).stdout == b"hi\n"
    await client.close()


class Ears:
    """Whoever owns a link and only wants to know when it ends."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.frames = 0

    def frame_arrived(self, message: bytes | memoryview) -> None:
        self.frames += 1

    def text_arrived(self) -> None:
        """Nothing."""

    def link_drained(self) -> None:
        """Nothing."""

    def link_closed(self, reason: str) -> None:
        self.closed.set()


async def intrude(made: Stage, ears: Ears) -> tuple[WebSocketLink, str, bytes]:
    """A harness with a key that is good, its stream id, and the first message it may send."""
    registry = Registry(made.node.url, "env-1", Bearer(KEY))
    bundle = await registry.connect(STRANGER.public)
    await registry.close()
    stream_id = str(uuid4())
    where = prologue("env-1", bundle.registration_id, stream_id)
    message = Initiator(STRANGER, bundle.executor_key, where).write(bundle.authorization.encode())
    return await open_link(bundle.url, ears), stream_id, message


async def flood(link: WebSocketLink, ears: Ears, frames: list[bytes]) -> None:
    for number, frame in enumerate(frames):
        if ears.closed.is_set():
            return
        link.send(frame)
        if number % 50 == 0:
            await asyncio.sleep(0)


def test_harnesses_that_flood(tmp_path: Path) -> None:
    """Broken frames, unknown streams, new ones without end, the same handshake again: nobody else notices."""

    async def scenario(made: Stage) -> None:
        client = await made.client()
        before = resident()
        for kind in ("broken", "unknown", "new", "again"):
            ears = Ears()
            link, stream_id, message = await intrude(made, ears)
            hello = encode(Frame(stream_id, Handshake(message), NOTHING_RECEIVED))
            link.send(encode(Frame(stream_id, Resume(), NOTHING_RECEIVED)))
            link.send(hello)
            if kind == "broken":
                good = [hello, encode(Frame(stream_id, Data(0, bytes(60_000)), 1)), bytes(200_000)]
                frames = list(mutations(good, 600, seed=7))
            elif kind == "unknown":
                frames = [encode(Frame(str(uuid4()), Data(0, bytes(30_000)))) for _ in range(600)]
            elif kind == "new":
                frames = [encode(Frame(str(uuid4()), Handshake(message))) for _ in range(600)]
            else:
                frames = [hello, encode(Frame(stream_id, Heartbeat()))] * 300
            flooding = asyncio.ensure_future(flood(link, ears, frames))
            for _ in range(3):
                assert (await client.run(["echo", kind])).stdout == kind.encode() + b"\n"
            await flooding
            link.close()
        assert resident() - before < GROWTH_BYTES
        await client.close()

    play(tmp_path, scenario)


def test_an_environment_that_floods(tmp_path: Path) -> None:
    """One with a key that is good, and frames for streams of others and of nobody."""

    async def scenario(made: Stage) -> None:
        client = await made.client()
        before = resident()
        registry = Registry(made.node.url, "rogue", Bearer(KEY))
        registration = await registry.register(STRANGER.public)
        await registry.close()
        ears = Ears()
        link = await open_link(registration.url, ears)
        assert made.node.router is not None
        streams = [str(stream["stream"]) for known in made.node.router.streams().values() for stream in known]
        assert len(streams) == 1
        good = [encode(Frame(name, Data(0, bytes(30_000)), 1)) for name in (*streams, str(uuid4()))]
        await flood(link, ears, [*good * 200, *mutations(good, 400, seed=8)])
        assert (await client.run(["echo", "hi"])).stdout == b"hi\n"
        assert resident() - before < GROWTH_BYTES
        link.close()
        await client.close()

    play(tmp_path, scenario)


def test_a_used_ticket_and_a_made_up_one(tmp_path: Path) -> None:
    async def scenario(made: Stage) -> None:
        registry = Registry(made.node.url, "env-1", Bearer(KEY))
        bundle = await registry.connect(STRANGER.public)
        await registry.close()
        (await open_link(bundle.url, Ears())).close()
        for url in (bundle.url, bundle.url[:-1], bundle.url.replace("role=harness", "role=environment")):
            with pytest.raises(UpgradeFailed) as refused:
                await open_link(url, Ears())
            assert refused.value.status == 401
        await still_served(made)

    play(tmp_path, scenario)
