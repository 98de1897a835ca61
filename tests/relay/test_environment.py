"""The environment's end against a real rendezvous, and against registries that misbehave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from exec_server.client.client import State
from exec_server.relay import environment as module
from exec_server.relay import registry as registry_module
from exec_server.relay import retiring
from exec_server.relay.credentials import Bearer
from exec_server.relay.environment import RegistrationFailed, RemoteEnvironment
from exec_server.relay.keys import Identity, PublicKey
from exec_server.relay.registry import Registry
from exec_server.rendezvous.store import EmbeddedStore
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
    """Waiting between attempts takes no time."""
    monkeypatch.setattr(module, "FIRST_DELAY", 0.02)
    monkeypatch.setattr(module, "MAX_DELAY", 0.05)
    monkeypatch.setattr(module, "retry_delay", lambda attempt: 0.01)


@pytest.mark.parametrize("acks", [True, False])
def test_commands_through_the_relay(tmp_path: Path, acks: bool) -> None:
    async def scenario(stage: Stage) -> None:
        stage.start_environment()
        await stage.connected.wait()
        client = await stage.client(acks=acks)
        done = await client.run(["/bin/sh", "-c", "pwd; echo err >&2; exit 3"], cwd="/usr")
        assert (done.stdout, done.stderr, done.exit_code) == (b"/usr\n", b"err\n", 3)
        process = await client.start(["seq", "0", "299999"])
        text = b"".join([chunk.data async for chunk in process.output()])
        assert text.split() == [b"%d" % number for number in range(300000)]
        assert (await client.run(["cat"], data=bytes(3_000_000))).stdout == bytes(3_000_000)
        path = tmp_path / "file"
        await client.files.write(str(path), bytes(range(256)) * 20_000)
        assert path.read_bytes() == bytes(range(256)) * 20_000
        await client.close()

    play(tmp_path, scenario)


@pytest.mark.usefixtures("impatient")
def test_the_connection_is_cut_again_and_again(tmp_path: Path) -> None:
    """With two ends of ours nobody above the relay notices."""

    async def scenario(stage: Stage) -> None:
        stage.start_environment()
        await stage.connected.wait()
        client = await stage.client()
        process = await client.start(
            ["/bin/sh", "-c", "i=0; while [ $i -lt 60 ]; do echo line $i; i=$((i+1)); sleep 0.02; done"]
        )
        seen = 0
        text = b""
        async for chunk in process.output():
            text += chunk.data
            seen += 1
            if seen % 10 == 5:
                wire = stage.environment_wire if seen % 20 == 5 else stage.harness_wire
                assert wire.cut()
        assert text.splitlines() == [b"line %d" % number for number in range(60)]
        assert (await process.wait()).exit_code == 0
        await client.close()

    play(tmp_path, scenario)


@pytest.mark.usefixtures("impatient")
def test_the_rendezvous_restarts_in_the_middle(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        stage.start_environment()
        await stage.connected.wait()
        client = await stage.client()
        process = await client.start(["/bin/sh", "-c", "seq 0 9999; read go; seq 10000 19999"], stdin=True)
        output = process.output()
        text = (await anext(output)).data
        await stage.restart_node()
        await process.write(b"go\n")
        async for chunk in output:
            text += chunk.data
        assert text.split() == [b"%d" % number for number in range(20000)]
        await client.close()

    play(tmp_path, scenario)


@pytest.mark.usefixtures("impatient")
def test_plain_streams_end_with_either_connection(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        served: list[Remembering] = []

        def accept(channel: Any) -> Remembering:
            served.append(Remembering(channel, echo=True))
            return served[-1]

        stage.start_environment(accept)
        await stage.connected.wait()
        for wire in (stage.harness_wire, stage.environment_wire):
            receiver = Remembering()
            channel = await stage.harness(acks=False).connect(receiver)
            channel.send(b"{}")
            await eventually_async(lambda heard=receiver.messages: heard == [b"{}"])  # type: ignore[misc]
            wire.cut()
            await eventually_async(lambda ended=receiver: ended.closed)  # type: ignore[misc]
            await eventually_async(lambda: served[-1].closed)

    play(tmp_path, scenario)


@pytest.mark.usefixtures("impatient")
def test_a_newer_machine_takes_the_place_and_the_older_gives_it_up(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        first = stage.start_environment(Remembering)
        await stage.connected.wait()
        stage.identity = Identity.generate()
        second = stage.start_environment(Remembering)
        await stage.connected.wait()
        with pytest.raises(RegistrationFailed, match="registration_conflict"):
            await first
        assert not second.done()

    play(tmp_path, scenario)


@pytest.mark.usefixtures("impatient")
def test_of_two_with_the_same_key_one_gives_up_and_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], fresh_log: None
) -> None:
    """On two machines, say, where no lock keeps them apart."""

    async def scenario(stage: Stage) -> None:
        first = stage.start_environment(Remembering)
        await stage.connected.wait()
        second = stage.start_environment(Remembering)
        done, _ = await asyncio.wait((first, second), return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(RegistrationFailed, match=r"with the same key file.*key of its own"):
            await done.pop()
        assert not (first.done() and second.done())
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)

    play(tmp_path, scenario)
    assert "another process has connected as this environment" in capfd.readouterr().err


def test_while_streams_wait_the_next_attempt_is_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are kept for 30 s, which one wait of 30 s would use up."""
    monkeypatch.setattr(module, "FIRST_DELAY", 0.02)
    monkeypatch.setattr(module, "KEPT_DELAY", 0.05)
    monkeypatch.setattr(module, "MAX_DELAY", 1000.0)

    async def scenario(stage: Stage) -> None:
        stage.start_environment()
        await stage.connected.wait()
        client = await stage.client()
        wire = stage.environment_wire
        wire.refusing = True
        before = wire.connections
        wire.cut()
        # Doubling without end, the fifteenth would come after minutes.
        await eventually_async(lambda: wire.connections >= before + 15, "many attempts")
        wire.refusing = False
        assert (await client.run(["echo", "hi"])).stdout == b"hi\n"
        await client.close()

    play(tmp_path, scenario)


@pytest.mark.usefixtures("impatient")
def test_a_registration_outlives_the_rendezvous(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        stage.start_environment(Remembering)
        await stage.connected.wait()
        registered = await stage.node.registrations()
        stage.connected.clear()
        await stage.restart_node()
        await stage.connected.wait()
        assert await stage.node.registrations() == registered

    play(tmp_path, scenario)


def test_a_key_the_registry_does_not_know(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        registry = Registry(stage.environment_wire.url, "env-1", Bearer("wrong"))
        environment = RemoteEnvironment(registry, Identity.generate, Remembering)
        with pytest.raises(RegistrationFailed, match="401 unauthorized"):
            await environment.run()

    play(tmp_path, scenario)


# Another key -------------------------------------------------------------------------------------


@pytest.mark.parametrize("acks", [True, False])
def test_another_key_while_streams_go_on(tmp_path: Path, acks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is here stays, who comes is shown the new key, and the old connection ends with its last stream."""
    monkeypatch.setattr(retiring, "LOOK_SECONDS", 0.02)

    async def scenario(stage: Stage) -> None:
        stage.start_environment()
        await stage.connected.wait()
        environment, router = stage.environment, stage.node.router
        assert environment is not None
        assert router is not None
        here = await stage.client(acks=acks)
        process = await here.start(["cat"], stdin=True)
        states: list[State] = []
        here.on_state(states.append)
        environment.renew()  # nothing is new
        await environment._renewing  # type: ignore[misc]  # it is there
        assert environment._next is None
        new = Identity.generate()
        environment._load_identity = lambda: new
        stage.connected.clear()
        environment.renew()
        await stage.connected.wait()
        registry = Registry(stage.node.url, "env-1", Bearer(KEY))
        assert (await registry.connect(stage.harness_identity.public)).executor_key == new.public
        await registry.close()
        assert len(router.registrations()) == 2
        await add_key(tmp_path, "somebody-elses", "harness")  # which has nodes look at what is registered
        there = await stage.client(acks=acks)
        for text in (b"one\n", b"two\n"):
            assert (await there.run(["cat"], data=text)).stdout == text
            await process.write(text)
        await process.close_stdin()
        assert b"".join([chunk.data async for chunk in process.output()]) == b"one\ntwo\n"
        assert states == []
        await here.close()
        await eventually_async(lambda: len(router.registrations()) == 1, "the end of the old connection")
        assert environment._retiring == set()
        assert (await there.run(["echo", "still"])).stdout == b"still\n"
        await there.close()

    play(tmp_path, scenario)


def test_a_key_that_the_registry_does_not_want(tmp_path: Path) -> None:
    """All goes on as it was."""

    async def scenario(stage: Stage) -> None:
        stage.start_environment()
        await stage.connected.wait()
        environment = stage.environment
        assert environment is not None
        client = await stage.client()
        good = environment._registry._credentials
        environment._registry._credentials = Bearer("esk_wrong")
        undone = asyncio.Event()

        def undo() -> None:
            environment._registry._credentials = good
            undone.set()

        environment.renew(reconnect=True, undo=undo)
        await undone.wait()
        assert (await client.run(["echo", "there"])).stdout == b"there\n"
        again = await stage.client()
        assert (await again.run(["echo", "too"])).stdout == b"too\n"
        for one in (client, again):
            await one.close()

    play(tmp_path, scenario)


@pytest.mark.usefixtures("impatient")
def test_another_api_key(tmp_path: Path) -> None:
    """It is shown from now on, also for the connection; the old one may be revoked and nothing ends."""

    async def scenario(stage: Stage) -> None:
        await add_key(tmp_path, "esk_second", "environment")
        await add_key(tmp_path, "esk_harness", "harness")
        stage.start_environment()
        await stage.connected.wait()
        environment = stage.environment
        assert environment is not None
        client = await stage.client(key="esk_harness")
        process = await client.start(["cat"], stdin=True)
        environment._registry._credentials = Bearer("esk_second")
        stage.connected.clear()
        environment.renew(reconnect=True)
        await stage.connected.wait()
        store = EmbeddedStore(str(tmp_path))
        assert await store.revoke_key("t-any--tests")
        await store.close()
        assert stage.node._service is not None
        service = stage.node._service
        await eventually_async(lambda: service.keys_revoked == 1, "the revocation")
        await process.write(b"on\n")
        await process.close_stdin()
        assert b"".join([chunk.data async for chunk in process.output()]) == b"on\n"
        assert service.cut == 0
        await client.close()

    play(tmp_path, scenario)


# Registries that misbehave -----------------------------------------------------------------------


class Scripted:
    """A registry that answers as told, one answer per call."""

    def __init__(self, *answers: tuple[Any, ...], port: int = 0) -> None:
        """Of each answer: its status, its body, and its headers, if there are any."""
        self.answers = list(answers)
        self._port = port
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.url = ""

    async def __aenter__(self) -> Scripted:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/base/"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.text()
        self.requests.append((request.path, dict(request.headers), json.loads(body) if body else None))
        status, answer, *headers = self.answers.pop(0)
        if callable(answer):
            answer = answer(self)
        text = answer if isinstance(answer, str) else json.dumps(answer)
        return web.Response(
            status=status, text=text, content_type="application/json", headers=headers[0] if headers else None
        )


def registered(**changes: Any) -> dict[str, Any]:
    return {
        "environment_id": "env-1",
        "url": "ws://127.0.0.1:9/",
        "security_profile": "noise_hybrid_ik_v1",
        "executor_registration_id": "reg-1",
        "unknown": True,
        **changes,
    }


def refused(code: str, name: str = "error") -> dict[str, Any]:
    return {name: {"code": code, "message": "because"}}


def run_against(*answers: tuple[Any, ...], goes_on: bool = False) -> tuple[Scripted, BaseException | None]:
    """Run an environment until it fails or, if it goes on, until the answers are used up."""

    async def main() -> tuple[Scripted, BaseException | None]:
        async with Scripted(*answers) as scripted:
            registry = Registry(scripted.url, "env-1", Bearer(KEY))
            environment = RemoteEnvironment(registry, Identity.generate, Remembering)
            task = asyncio.ensure_future(environment.run())
            await eventually_async(lambda: task.done() or (goes_on and not scripted.answers))
            task.cancel()
            (outcome,) = await asyncio.gather(task, return_exceptions=True)
            return scripted, outcome

    return asyncio.run(main())


@pytest.mark.parametrize(
    "answer",
    [
        (400, {}),
        (401, {}),
        (403, refused("x")),
        (404, {}),
        (409, refused("registration_conflict", "detail")),
        (307, {}),
        (200, "not json"),
        (200, []),
        (200, registered(environment_id="env-2")),
        (200, registered(security_profile="none")),
        (200, registered(executor_registration_id="")),
        (200, registered(url=7)),
    ],
)
@pytest.mark.usefixtures("impatient")
def test_a_first_registration_that_fails_is_the_end(answer: tuple[int, Any]) -> None:
    scripted, outcome = run_against(answer, answer)
    assert isinstance(outcome, RegistrationFailed)
    assert len(scripted.requests) == 1


@pytest.mark.usefixtures("impatient")
def test_a_registry_that_cannot_answer_yet_is_asked_again(
    capsys: pytest.CaptureFixture[str], fresh_log: None
) -> None:
    """From the first time on; that it is so is said once, whatever is logged."""
    answers = [(429, {}), (500, "oops"), (502, {}), (503, {}), (408, {}), (200, registered())]
    scripted, outcome = run_against(*answers, goes_on=True)
    assert isinstance(outcome, asyncio.CancelledError)
    assert len(scripted.requests) == len(answers)
    said = capsys.readouterr().err
    assert (said.count("cannot register yet"), "HTTP 429" in said) == (1, True), said


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("said", "waited"),
    [("7", 7.0), ("0", 0.01), ("soon", 0.01), ("-3", 0.01), ("999999", 300.0), ("", 0.01), ("\xb2", 0.01)],
)
def test_how_long_to_wait_is_the_registrys_to_say(
    monkeypatch: pytest.MonkeyPatch, said: str, waited: float
) -> None:
    waits: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr(module, "sleep", note)
    slow_down = (429, {}, {"Retry-After": said})
    _, outcome = run_against(slow_down, (403, {}))
    assert isinstance(outcome, RegistrationFailed)
    assert waits == [waited]


@pytest.mark.usefixtures("impatient")
def test_a_registry_that_is_not_there_yet() -> None:
    async def main() -> None:
        async with Scripted() as gone:
            url = gone.url
        registry = Registry(url, "env-1", Bearer(KEY))
        task = asyncio.ensure_future(RemoteEnvironment(registry, Identity.generate, Remembering).run())
        port = int(urlsplit(url).port or 0)
        async with Scripted((403, {}), port=port) as there:
            with pytest.raises(RegistrationFailed, match="403"):
                await task
            assert len(there.requests) == 1

    asyncio.run(main())


@pytest.mark.usefixtures("impatient")
def test_what_is_sent_to_register() -> None:
    scripted, _ = run_against((201, registered()), goes_on=True)
    path, headers, body = scripted.requests[0]
    assert path == "/base/cloud/environment/env-1/register"
    assert headers["Authorization"] == f"Bearer {KEY}"
    assert headers["Content-Type"] == "application/json"
    assert "User-Agent" not in headers
    assert set(body) == {"security_profile", "executor_public_key"}
    assert body["security_profile"] == "noise_hybrid_ik_v1"
    PublicKey.from_object(body["executor_public_key"])


@pytest.mark.usefixtures("impatient")
def test_a_registry_whose_authentication_is_down_is_asked_again() -> None:
    down = (502, refused("authentication_service_unavailable"))
    scripted, outcome = run_against(down, down, down, (200, registered()), goes_on=True)
    assert isinstance(outcome, asyncio.CancelledError)
    assert len(scripted.requests) == 4


@pytest.mark.usefixtures("impatient")
def test_a_refused_upgrade_leads_to_a_new_registration_with_patience() -> None:
    """The second registration survives what would have ended the first."""

    def here(scripted: Scripted) -> dict[str, Any]:
        return registered(url=scripted.url.replace("http", "ws") + "socket")

    scripted, outcome = run_against(
        (200, here),
        (409, {}),  # the upgrade
        (503, {}),
        (429, {}),
        (500, "oops"),
        (200, here),
        (500, {}),  # the upgrade: the registration stays
        (401, {}),  # the upgrade
        (403, {}),  # and that is the end
    )
    paths = [path.rpartition("/")[2] for path, _, _ in scripted.requests]
    assert paths == ["register", "socket", *["register"] * 4, "socket", "socket", "register"]
    assert isinstance(outcome, RegistrationFailed)
    ids = [headers["X-Request-ID"] for path, headers, _ in scripted.requests if path.endswith("socket")]
    assert len(set(ids)) == 3
    assert all(len(found) == 36 and found.startswith("req_") for found in ids)


def test_delays() -> None:
    for attempt in range(10):
        plain = min(0.5 * 2**attempt, 5)
        assert plain <= registry_module.retry_delay(attempt) <= plain * 1.5
