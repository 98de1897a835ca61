"""The environment's end against a real rendezvous, and against registries that misbehave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from exec_server.relay import environment as module
from exec_server.relay import registry as registry_module
from exec_server.relay.credentials import Bearer
from exec_server.relay.environment import RegistrationFailed, RemoteEnvironment
from exec_server.relay.keys import Identity, PublicKey
from exec_server.relay.registry import Registry
from support.wait import eventually_async

from .stage import KEY, Stage, stage
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


# Registries that misbehave -----------------------------------------------------------------------


class Scripted:
    """A registry that answers as told, one answer per call."""

    def __init__(self, *answers: tuple[int, Any]) -> None:
        self.answers = list(answers)
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.url = ""

    async def __aenter__(self) -> Scripted:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/base/"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.text()
        self.requests.append((request.path, dict(request.headers), json.loads(body) if body else None))
        status, answer = self.answers.pop(0)
        if callable(answer):
            answer = answer(self)
        text = answer if isinstance(answer, str) else json.dumps(answer)
        return web.Response(status=status, text=text, content_type="application/json")


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


def run_against(*answers: tuple[int, Any], goes_on: bool = False) -> tuple[Scripted, BaseException | None]:
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
        (429, {}),
        (500, "oops"),
        (502, {}),
        (503, {}),
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
