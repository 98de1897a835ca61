"""The harness's end: addresses, bundles, and environments that do not answer as they should."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from exec_server.relay import harness as module
from exec_server.relay import streams as streams_module
from exec_server.relay.frame import Data, Frame, Handshake, Reset, decode, encode
from exec_server.relay.harness import dialer, parse_url
from exec_server.relay.keys import Identity
from exec_server.relay.registry import Bundle, Registry
from exec_server.transport.websocket import ConnectFailed
from support.wait import eventually_async

from .stage import KEY, Stage, add_key, stage
from .support import Remembering

Scenario = Callable[[Stage], Awaitable[None]]


def play(tmp_path: Path, scenario: Scenario) -> None:
    async def main() -> None:
        async with asyncio.timeout(50), stage(tmp_path) as ready:
            await scenario(ready)

    asyncio.run(main())


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "retry_delay", lambda attempt: 0.02)


def test_addresses() -> None:
    assert parse_url("relay+https://host/env") == ("https://host", "env", True, None)
    assert parse_url("relay+https://a:1,b/x/env") == ("https://a:1/x,https://b/x", "env", True, None)
    assert parse_url(f"relay+https://host/env?executor={'ab' * 32}")[3] == "ab" * 32
    assert parse_url("relay+http://127.0.0.1:1/a/b/env%2F1?acks=off") == (
        "http://127.0.0.1:1/a/b",
        "env/1",
        False,
        None,
    )
    for wrong in (
        "https://host/env",
        "relay+https://host",
        "relay+https://host/",
        "relay+https:///env",
        "relay+https://host/env?acks=maybe",
        "relay+https://host/env?other=1",
        "relay+https://host/env?executor=abc",
    ):
        with pytest.raises(ConnectFailed):
            parse_url(wrong)


def test_what_a_dialer_refuses_to_do() -> None:
    with pytest.raises(ConnectFailed, match="token"):
        dialer("relay+https://host/env")
    with pytest.raises(ConnectFailed, match="in the clear"):
        dialer("relay+http://example.com/env", token="x")
    with pytest.raises(ConnectFailed, match="key"):
        dialer("relay+https://host/env", token=" ")


def test_a_dialer_opens_channels_one_after_another(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        stage.start_environment(lambda channel: Remembering(channel, echo=True))
        await stage.connected.wait()
        dial = dialer(f"relay+{stage.node.url}/env-1", token=KEY)
        for _ in range(2):
            receiver = Remembering()
            channel = await dial(receiver)
            channel.send(b"[1]")
            await eventually_async(lambda receiver=receiver: receiver.messages == [b"[1]"])  # type: ignore[misc]
            channel.close()
            await eventually_async(lambda receiver=receiver: receiver.closed)  # type: ignore[misc]

    play(tmp_path, scenario)


@pytest.mark.usefixtures("impatient")
def test_an_environment_that_comes_a_little_later(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        # Known, but not connected.
        stage.start_environment(Remembering)
        await stage.connected.wait()
        assert stage.task is not None
        stage.task.cancel()
        await asyncio.wait([stage.task])
        opening = asyncio.ensure_future(stage.harness().connect(Remembering()))
        await eventually_async(lambda: stage.harness_wire.connections)
        stage.start_environment(Remembering)
        channel = await opening
        channel.abort()

    play(tmp_path, scenario)


@pytest.mark.usefixtures("impatient")
def test_environments_that_are_not_there(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        with pytest.raises(ConnectFailed, match="environment_not_found") as caught:
            await stage.harness().connect(Remembering())
        assert caught.value.status == 404
        with pytest.raises(ConnectFailed) as caught:
            await stage.harness(key="nobody's").connect(Remembering())
        assert caught.value.status == 401
        stage.start_environment(Remembering)
        await stage.connected.wait()
        assert stage.task is not None
        stage.task.cancel()
        await asyncio.wait([stage.task])
        before = stage.harness_wire.connections
        with pytest.raises(ConnectFailed, match="environment_offline"):
            await stage.harness().connect(Remembering())
        assert stage.harness_wire.connections > before

    play(tmp_path, scenario)


class Changing(Registry):
    """A registry whose bundles are changed before they are used."""

    change: Callable[[Bundle], Bundle]
    bundles = 0

    async def connect(self, *arguments: Any, **options: Any) -> Bundle:
        self.bundles += 1
        return self.change(await super().connect(*arguments, **options))


def changed(stage: Stage, change: Callable[[Bundle], Bundle]) -> tuple[module.Harness, Changing]:
    from exec_server.relay.credentials import Bearer

    registry = Changing(stage.harness_wire.url, "env-1", Bearer(KEY))
    registry.change = change
    return module.Harness(registry, stage.harness_identity), registry


def with_parts(bundle: Bundle, **parts: Any) -> Bundle:
    return Bundle(
        **{name: parts.get(name, getattr(bundle, name)) for name in bundle.__struct_fields__}  # type: ignore[attr-defined]
    )


def test_a_url_that_is_not_taken_gets_one_more_try(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        stage.start_environment(Remembering)
        await stage.connected.wait()
        harness, registry = changed(
            stage,
            lambda bundle: with_parts(bundle, url=bundle.url + "x") if registry.bundles == 1 else bundle,
        )
        channel = await harness.connect(Remembering())
        assert registry.bundles == 2
        channel.abort()
        harness, registry = changed(stage, lambda bundle: with_parts(bundle, url=bundle.url + "x"))
        with pytest.raises(ConnectFailed) as caught:
            await harness.connect(Remembering())
        assert (caught.value.status, registry.bundles) == (401, 2)

    play(tmp_path, scenario)


@pytest.mark.parametrize(
    "change",
    [
        {"authorization": "forged"},
        {"authorization": "9999999999.nonce.forged"},
        {"executor_key": Identity.generate().public},
        {"registration_id": "another"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_bundles_that_do_not_fit(tmp_path: Path, change: dict[str, Any]) -> None:
    async def scenario(stage: Stage) -> None:
        stage.start_environment(Remembering)
        await stage.connected.wait()
        harness, _ = changed(stage, lambda bundle: with_parts(bundle, **change))
        with pytest.raises(ConnectFailed, match="refused the stream"):
            await harness.connect(Remembering())

    play(tmp_path, scenario)


def test_an_authorization_opens_one_stream(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        stage.start_environment(Remembering)
        await stage.connected.wait()
        first: list[Bundle] = []

        def reuse(bundle: Bundle) -> Bundle:
            first.append(bundle)
            return with_parts(bundle, authorization=first[0].authorization)

        harness, _ = changed(stage, reuse)
        channel = await harness.connect(Remembering())
        with pytest.raises(ConnectFailed, match="refused the stream"):
            await harness.connect(Remembering())
        channel.abort()

    play(tmp_path, scenario)


class Middle:
    """A rendezvous's WebSocket that the test plays by hand."""

    def __init__(self, play: Callable[[Any, Frame], Awaitable[None]]) -> None:
        self._play = play

    async def __aenter__(self) -> str:
        from websockets.asyncio.server import serve

        async def handle(socket: Any) -> None:
            decode(await socket.recv())
            await self._play(socket, decode(await socket.recv()))
            await socket.wait_closed()

        self._server = await serve(handle, "127.0.0.1", 0)
        return f"ws://127.0.0.1:{next(iter(self._server.sockets)).getsockname()[1]}/"

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda own: encode(Frame(own, Reset("x"))), "refused"),
        (lambda own: encode(Frame(own, Data(0, b"x"))), "before its handshake"),
        (lambda own: encode(Frame(own, Handshake(b"x" * 3424))), "handshake with the environment failed"),
        (lambda own: encode(Frame(own, Handshake(b"x"))), "handshake with the environment failed"),
        (lambda own: b"\xff garbage", "bad frame"),
        (lambda own: encode(Frame(own, Reset(""))), "bad frame"),
        (lambda own: "text", "text"),
        (lambda own: None, "closed the connection"),
    ],
    ids=["reset", "data", "wrong key", "short", "garbage", "invalid", "text", "close"],
)
def test_what_is_no_answer_to_a_handshake(tmp_path: Path, answer: Callable[[str], Any], message: str) -> None:
    async def play_middle(socket: Any, hello: Frame) -> None:
        await socket.send(encode(Frame("somebody else's", Reset("x"))))
        said = answer(hello.stream_id)
        await (socket.close() if said is None else socket.send(said))

    async def scenario(stage: Stage) -> None:
        stage.start_environment(Remembering)
        await stage.connected.wait()
        async with Middle(play_middle) as url:
            harness, _ = changed(stage, lambda bundle: with_parts(bundle, url=url))
            with pytest.raises(ConnectFailed, match=message):
                await harness.connect(Remembering())

    play(tmp_path, scenario)


def test_an_answer_that_never_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_HANDSHAKE_SECONDS", 0.1)
    monkeypatch.setattr(module, "HANDSHAKE_SECONDS", 0.2)
    seen: list[Frame] = []

    async def play_middle(socket: Any, hello: Frame) -> None:
        seen.append(decode(await socket.recv()))

    async def scenario(stage: Stage) -> None:
        stage.start_environment(Remembering)
        await stage.connected.wait()
        async with Middle(play_middle) as url:
            harness, _ = changed(stage, lambda bundle: with_parts(bundle, url=url))
            with pytest.raises(ConnectFailed, match=r"within 0\.2 s"):
                await harness.connect(Remembering())
            await eventually_async(lambda: len(seen) == 2)
        assert [frame.body for frame in seen] == [Reset("closed")] * 2

    play(tmp_path, scenario)


def test_a_handshake_that_got_lost_is_tried_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another bundle and another stream; the second has the whole time."""
    monkeypatch.setattr(module, "FIRST_HANDSHAKE_SECONDS", 0.05)

    async def play_middle(socket: Any, hello: Frame) -> None:
        await socket.recv()

    async def scenario(stage: Stage) -> None:
        stage.start_environment(lambda channel: Remembering(channel, echo=True))
        await stage.connected.wait()
        async with Middle(play_middle) as url:
            harness, registry = changed(
                stage, lambda bundle: with_parts(bundle, url=url) if registry.bundles == 1 else bundle
            )
            receiver = Remembering()
            channel = await harness.connect(receiver)
            channel.send(b"[1]")
            await eventually_async(lambda: receiver.messages == [b"[1]"])
            assert registry.bundles == 2
            channel.abort()

    play(tmp_path, scenario)


@pytest.mark.usefixtures("impatient")
def test_an_environment_that_registered_anew_ends_the_stream(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        stage.start_environment(Remembering)
        await stage.connected.wait()
        receiver = Remembering()
        await stage.harness().connect(receiver)
        stage.harness_wire.refusing = True
        stage.harness_wire.cut()
        stage.identity = Identity.generate()
        stage.start_environment(Remembering)
        await stage.connected.wait()
        stage.harness_wire.refusing = False
        await eventually_async(lambda: receiver.closed)

    play(tmp_path, scenario)


def test_a_pinned_environment_and_trusted_harnesses(tmp_path: Path) -> None:
    """What a registry that is not to be trusted cannot do: send us elsewhere, or let others in."""

    async def scenario(stage: Stage) -> None:
        trusted: set[str] = set()
        stage.start_environment(Remembering, trusted=lambda: frozenset(trusted))
        await stage.connected.wait()
        registry = stage.harness().registry
        with pytest.raises(ConnectFailed, match="not among its --trusted-harnesses"):
            await module.Harness(registry, stage.harness_identity).connect(Remembering())
        trusted.add(stage.harness_identity.public.fingerprint)
        right = stage.identity.public.fingerprint
        channel = await module.Harness(registry, stage.harness_identity, pin=right).connect(Remembering())
        channel.abort()
        with pytest.raises(ConnectFailed, match="another key"):
            await module.Harness(registry, stage.harness_identity, pin="0" * 64).connect(Remembering())

    play(tmp_path, scenario)


def test_a_pause_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else's handshakes have failed, and the environment takes none for a while."""
    monkeypatch.setattr(streams_module, "PAUSE_SECONDS", 3600.0)

    async def scenario(stage: Stage) -> None:
        waits: list[int] = []

        def end_the_pause(attempt: int) -> float:
            waits.append(attempt)
            if attempt == 1:
                assert stage.environment is not None
                assert stage.environment._streams is not None
                stage.environment._streams._paused_until = 0.0
            return 0.01

        monkeypatch.setattr(module, "retry_delay", end_the_pause)
        stage.start_environment(Remembering)
        await stage.connected.wait()
        for name in "ab":
            await add_key(tmp_path, f"esk_other-{name}", tenant="t")
            registry = stage.harness(key=f"esk_other-{name}").registry
            bad = Bad(registry, Identity.generate())
            for _ in range(4):
                with pytest.raises(ConnectFailed, match="no reason was given"):
                    await bad.connect(Remembering())
        channel = await stage.harness().connect(Remembering())
        assert waits == [0, 1]
        channel.abort()
        # Whoever caused it is kept out for longer, and hears why.
        monkeypatch.setattr(module, "RETRY_SECONDS", 0.5)
        with pytest.raises(ConnectFailed, match="too many handshakes"):
            await bad.connect(Remembering())

    play(tmp_path, scenario)


class Bad(module.Harness):
    """One whose authorizations nobody vouches for."""

    async def ask(self, timeout: float) -> Bundle:
        return with_parts(await super().ask(timeout), authorization="made up")


def test_a_harness_with_a_key_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXEC_SERVER_RELAY_KEY_FILE", str(tmp_path / "harness.key"))
    dialer("relay+https://host/env", token="x")
    assert (tmp_path / "harness.key").exists()
    (tmp_path / "harness.key").chmod(0o644)
    with pytest.raises(ConnectFailed, match="chmod"):
        dialer("relay+https://host/env", token="x")


def test_many_channels_of_one_harness_at_once(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        stage.start_environment(lambda channel: Remembering(channel, echo=True))
        await stage.connected.wait()
        harness = stage.harness()
        receivers = [Remembering() for _ in range(20)]
        channels = await asyncio.gather(*(harness.connect(receiver) for receiver in receivers))
        for number, channel in enumerate(channels):
            channel.send(b"[%d]" % number)
        for number, receiver in enumerate(receivers):
            await eventually_async(lambda heard=receiver.messages: heard)  # type: ignore[misc]
            assert receiver.messages == [b"[%d]" % number]
            channels[number].abort()

    play(tmp_path, scenario)
