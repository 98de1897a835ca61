"""The registry: what is configured, added and replaced. C12 to C19, and chapters 1.5 and 1.6."""

from __future__ import annotations

import asyncio
import gc
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from exec_server.client.errors import ExecServerError
from exec_server.environments.config import (
    CommandTransport,
    Configuration,
    ConfigurationError,
    NamedEnvironment,
    RelayTransport,
    Transport,
    WebsocketTransport,
    parse,
)
from exec_server.environments.environment import HeldEnvironment
from exec_server.environments.handle import Handle, ObservedStatus
from exec_server.environments.manager import EnvironmentManager
from exec_server.environments.readiness import Readiness
from support.machine import gone, running, sleep_forever
from support.openers import Gate, settle
from support.server import COMMAND, RunningServer
from support.wait import eventually_async

SERVER_ON_STDIO = CommandTransport(program=COMMAND, args=("--listen", "stdio"))


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(40):
            await scenario()

    asyncio.run(main())


def configured(
    *environments: tuple[str, Transport], default: str | None = None, include_local: bool = False
) -> Configuration:
    entries = tuple(NamedEnvironment(name, transport) for name, transport in environments)
    return Configuration(environments=entries, default=default, include_local=include_local)


def at(url: str, **options: float) -> WebsocketTransport:
    return WebsocketTransport(url=url, **options)


@contextmanager
def listening() -> Iterator[socket.socket]:
    """A port at which somebody listens who never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        yield listener


def url_of(listener: socket.socket) -> str:
    return f"ws://127.0.0.1:{listener.getsockname()[1]}"


# What is there -----------------------------------------------------------------------------------


def test_nothing_configured_is_this_machine() -> None:
    async def scenario() -> None:
        async with EnvironmentManager() as manager:
            assert manager.default_environment_id() == "local"
            assert manager.default_environment() is manager.try_local_environment()
            assert manager.default_environment_ids() == ["local"]
            local = manager.get_environment("local")
            assert local is not None
            assert (await (await local.environment()).run(["echo", "here"])).stdout == b"here\n"

    run(scenario)


def test_the_default_comes_first_and_the_rest_in_order() -> None:
    async def scenario() -> None:
        lazy = SERVER_ON_STDIO
        entries = (("a", lazy), ("b", lazy), ("c", lazy))
        async with EnvironmentManager(configured(*entries, default="b", include_local=True)) as manager:
            assert list(manager.handles) == ["local", "a", "b", "c"]
            assert manager.default_environment_ids() == ["b", "local", "a", "c"]
        async with EnvironmentManager(configured(*entries)) as manager:
            assert manager.default_environment_ids() == []
            assert manager.default_environment_id() is None
            assert manager.default_environment() is None
            assert manager.try_local_environment() is None
            assert manager.get_environment("nobody") is None

    run(scenario)


def test_an_unknown_id() -> None:
    async def scenario() -> None:
        async with EnvironmentManager() as manager:
            status = await manager.get_environment_status("nobody")
            assert status == ObservedStatus("unknown", "unknown environment id `nobody`")
            with pytest.raises(ConfigurationError) as caught:
                await manager.get_environment_info("nobody")
            assert caught.value.reason == "unknown environment id `nobody`"

    run(scenario)


@pytest.mark.parametrize(
    ("configuration", "message"),
    [
        (configured(("", SERVER_ON_STDIO)), "environment id cannot be empty"),
        (
            configured(("local", SERVER_ON_STDIO)),
            "environment id `local` is reserved for EnvironmentManager",
        ),
        (
            configured(("a", SERVER_ON_STDIO), ("a", SERVER_ON_STDIO)),
            "environment id `a` is duplicated",
        ),
        (configured(default="b"), "default environment `b` is not configured"),
        (configured(default="local"), "default environment `local` is not configured"),
    ],
)
def test_a_configuration_that_cannot_be(configuration: Configuration, message: str) -> None:
    async def scenario() -> None:
        with pytest.raises(ConfigurationError) as caught:
            EnvironmentManager(configuration)
        assert str(caught.value) == f"exec-server protocol error: {message}"

    run(scenario)


def test_this_machine_needs_a_program_to_start() -> None:
    async def scenario() -> None:
        with pytest.raises(ConfigurationError) as caught:
            EnvironmentManager(local=lambda: None)
        assert caught.value.reason == "local environment requires configured runtime paths"

    run(scenario)


def test_nothing_is_connected_to_if_anything_is_wrong() -> None:
    async def scenario() -> None:
        with listening() as listener:
            with pytest.raises(ConfigurationError):
                EnvironmentManager(configured(("a", at(url_of(listener))), ("", SERVER_ON_STDIO)))
            gc.collect()
            await settle()
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.accept()

    run(scenario)


# Starting ----------------------------------------------------------------------------------------


def test_c12_a_command_is_not_started_before_it_is_used(tmp_path: Path) -> None:
    async def scenario() -> None:
        mark = tmp_path / "started"
        script = f"touch '{mark}'; exec '{COMMAND}' --listen stdio"
        command = CommandTransport(program="sh", args=("-c", script), env={"GIVEN": "yes"}, cwd="/usr")
        async with EnvironmentManager(configured(("box", command))) as manager:
            assert await manager.get_environment_status("box") == ObservedStatus("pending")
            await settle()
            assert not mark.exists()
            box = manager.handles["box"]
            done = await (await box.environment()).run(["sh", "-c", "pwd; echo $GIVEN"])
            assert done.stdout == b"/usr\nyes\n"
            assert mark.exists()
            assert await manager.get_environment_status("box") == ObservedStatus("ready")
            info = await manager.get_environment_info("box")
            assert info.shell is not None

    run(scenario)


def test_credentials_are_not_inherited_by_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN", "secret")
    monkeypatch.setenv("ORDINARY", "seen")

    async def scenario() -> None:
        # The server removes such variables from its children, so the server itself must be looked at.
        script = f"env > /proc/self/fd/2; exec '{COMMAND}' --listen stdio"
        command = CommandTransport(program="sh", args=("-c", f"exec 2>$OUT; {script}"), env={"OUT": out})
        async with EnvironmentManager(configured(("box", command))) as manager:
            await manager.handles["box"].environment()

    with tempfile.NamedTemporaryFile() as file:
        out = file.name
        run(scenario)
        seen = file.read().decode()
    assert "ORDINARY=seen" in seen
    assert "NOISE_AUTH_TOKEN" not in seen


def test_c13_a_url_is_connected_to_without_any_use() -> None:
    async def scenario() -> None:
        with listening() as listener:
            async with EnvironmentManager(configured(("a", at(url_of(listener))))) as manager:
                connection, _ = await asyncio.to_thread(listener.accept)
                with connection:
                    head = await asyncio.to_thread(connection.recv, 4096)
                    assert head.startswith(b"GET / HTTP/1.1\r\n")
                    assert await manager.get_environment_status("a") == ObservedStatus("pending")

    run(scenario)


def test_c14_what_cannot_be_reached_is_tried_again_when_it_is_used(
    start_server: Callable[..., RunningServer], tmp_path: Path
) -> None:
    url = f"unix://{tmp_path}/sock"  # unlike a port, nobody else can take it meanwhile

    async def scenario() -> None:
        async with EnvironmentManager(configured(("a", at(url)))) as manager:
            handle = manager.handles["a"]
            with pytest.raises(OSError, match="No such file or directory"):
                await handle.environment()
            with pytest.raises(ExecServerError, match="failed to get info for environment `a`: "):
                await manager.get_environment_info("a")
            status = await manager.get_environment_status("a")
            assert status.status == "disconnected"
            assert "No such file or directory" in str(status.error)
            await asyncio.to_thread(start_server, listen=url)
            assert (await (await handle.environment()).run(["echo", "up"])).stdout == b"up\n"
            assert manager.handles["a"] is handle

    run(scenario)


def test_c15_a_program_that_is_not_there_is_the_same_error_for_good() -> None:
    async def scenario() -> None:
        missing = CommandTransport(program="/no/such/program")
        async with EnvironmentManager(configured(("box", missing))) as manager:
            errors = []
            for _ in range(3):
                with pytest.raises(ExecServerError, match="failed to spawn exec-server") as caught:
                    await manager.handles["box"].environment()
                errors.append(caught.value)
            assert errors[0] is errors[1] is errors[2]
            assert manager.handles["box"].state is Readiness.FAILED

    run(scenario)


def test_a_program_that_is_no_server() -> None:
    async def scenario() -> None:
        wrong = CommandTransport(program="sh", args=("-c", "exit 3"))
        async with EnvironmentManager(configured(("box", wrong))) as manager:
            with pytest.raises(
                ExecServerError, match=r"ended before it answered.*ended with status 3"
            ) as caught:
                await manager.handles["box"].environment()
            with pytest.raises(ExecServerError) as again:
                await manager.handles["box"].environment()
            assert again.value is caught.value

    run(scenario)


@pytest.mark.parametrize(
    ("script", "text"),
    [
        (
            "echo oops >&2; echo hello; sleep {}",
            r"does not speak the protocol.* is not a message.*said: oops",
        ),
        ("sleep {}", "timed out waiting for exec-server initialize handshake after 0.5s"),
    ],
)
def test_who_waits_for_a_program_is_told_before_it_has_ended(script: str, text: str) -> None:
    marker = sleep_forever()

    async def scenario() -> None:
        wrong = CommandTransport(
            program="sh", args=("-c", f"{script.format(marker)}; true"), initialize_timeout=0.5
        )
        async with EnvironmentManager(configured(("box", wrong))) as manager:
            with pytest.raises((ExecServerError, TimeoutError), match=text) as caught:
                await manager.handles["box"].environment()
            assert "ended" not in str(caught.value)
            assert running(marker)

    run(scenario)
    gone(marker)


def test_c18_who_accepts_but_does_not_answer_is_given_up_in_time() -> None:
    async def scenario() -> None:
        with listening() as listener:
            transport = at(url_of(listener), connect_timeout=0.3)
            async with EnvironmentManager(configured(("a", transport))) as manager:
                connection, _ = await asyncio.to_thread(listener.accept)
                with connection:
                    with pytest.raises(OSError, match=r"timed out connecting to .* after 0\.3s"):
                        await manager.handles["a"].environment()
                    connection.settimeout(20)
                    while await asyncio.to_thread(connection.recv, 4096):
                        pass  # what it said before it gave up; then the end

    run(scenario)


def test_c19_a_token_is_sent_along() -> None:
    async def scenario() -> None:
        with listening() as listener:
            transport = WebsocketTransport(url=url_of(listener), bearer_token="t0ken")
            async with EnvironmentManager(configured(("a", transport))):
                connection, _ = await asyncio.to_thread(listener.accept)
                with connection:
                    head = (await asyncio.to_thread(connection.recv, 4096)).lower()
                    assert b"\r\nauthorization: bearer t0ken\r\n" in head

    run(scenario)


def test_an_address_never_starts_a_program(tmp_path: Path) -> None:
    """`environment/add` comes from other programs; only an entry of the file may name a command."""

    async def scenario() -> None:
        async with EnvironmentManager(Configuration(default=None, include_local=False)) as manager:
            for url in (f"stdio:touch {tmp_path}/pwned", "in-process:", "http://127.0.0.1:1", "nonsense"):
                handle = manager.upsert_environment("a", url)
                with pytest.raises(ExecServerError, match="cannot connect to"):
                    await handle.environment()
                assert (await manager.get_environment_status("a")).status == "disconnected"
            assert list(tmp_path.iterdir()) == []

    run(scenario)


def test_through_a_relay(tmp_path: Path) -> None:
    """As the CODEX_EXEC_SERVER_NOISE_ variables say it."""
    from relay.stage import KEY, stage

    async def scenario() -> None:
        async with stage(tmp_path) as relay:
            relay.start_environment()
            await relay.connected.wait()
            url = relay.harness_wire.url
            transport = RelayTransport(registry_url=url, environment_id="env-1", auth_token=KEY)
            async with EnvironmentManager(configured(("remote", transport))) as manager:
                machine = await manager.handles["remote"].environment()
                assert (await machine.run(["echo", "far away"])).stdout == b"far away\n"
                assert await manager.get_environment_status("remote") == ObservedStatus("ready")

    run(scenario)


def test_through_a_relay_as_the_file_says_it(tmp_path: Path) -> None:
    from exec_server import Environment
    from relay.stage import KEY, stage

    async def scenario() -> None:
        async with stage(tmp_path) as relay:
            relay.start_environment()
            await relay.connected.wait()
            url = f"relay+{relay.harness_wire.url}/env-1"
            text = f'[[environments]]\nid = "far"\nurl = "{url}"\nauth_bearer_token = "{KEY}"\n'
            async with EnvironmentManager(parse(text)) as manager:
                machine = await manager.handles["far"].environment()
                assert (await machine.run(["echo", "far away"])).stdout == b"far away\n"
            async with Environment.connect(url, token=KEY) as machine:
                assert (await machine.run(["echo", "and again"])).stdout == b"and again\n"
            with pytest.raises(ExecServerError, match="EXEC_SERVER_TOKEN_FILE"):
                await Environment.connect(url)

    run(scenario)


@pytest.mark.parametrize(("url", "token"), [("nonsense", "key"), ("http://127.0.0.1:1", "two\nlines")])
def test_a_relay_that_cannot_be(url: str, token: str) -> None:
    async def scenario() -> None:
        relay = RelayTransport(registry_url=url, environment_id="far", auth_token=token)
        async with EnvironmentManager(configured(("remote", relay))) as manager:
            with pytest.raises(ExecServerError, match="cannot reach far at") as caught:
                await manager.handles["remote"].environment()
            assert token not in str(caught.value)
            assert manager.handles["remote"].state is Readiness.FAILED

    run(scenario)


def test_fifty_at_once_and_one_that_never_answers(server: RunningServer) -> None:
    async def scenario() -> None:
        with listening() as listener:
            entries = [(f"e{number}", at(server.url)) for number in range(50)]
            entries.insert(7, ("mute", at(url_of(listener), connect_timeout=1000.0)))
            async with EnvironmentManager(configured(*entries)) as manager:
                handles = [handle for name, handle in manager.handles.items() if name != "mute"]
                environments = await asyncio.gather(*(handle.environment() for handle in handles))
                assert len({environment.session_id for environment in environments}) == 50
                assert await manager.get_environment_status("mute") == ObservedStatus("pending")

    run(scenario)


# environment/add ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "url", "message"),
    [
        ("", "ws://127.0.0.1:1", "environment id cannot be empty"),
        ("local", "ws://127.0.0.1:1", "environment id `local` is reserved for EnvironmentManager"),
        ("a", " NONE ", "remote environment cannot use disabled exec-server url"),
        ("a", "", "remote environment requires an exec-server url"),
        ("a", "  ", "remote environment requires an exec-server url"),
    ],
)
def test_what_cannot_be_added(name: str, url: str, message: str) -> None:
    async def scenario() -> None:
        async with EnvironmentManager() as manager:
            with pytest.raises(ConfigurationError) as caught:
                manager.upsert_environment(name, url)
            assert caught.value.reason == message
            assert list(manager.handles) == ["local"]

    run(scenario)


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf"), True, "5"])
def test_a_time_that_is_none_is_refused(wrong: object) -> None:
    async def scenario() -> None:
        async with EnvironmentManager(Configuration(default=None, include_local=False)) as manager:
            with pytest.raises((TypeError, ValueError), match="connect_timeout is a number of seconds"):
                manager.upsert_environment("a", "ws://127.0.0.1:1", wrong)  # type: ignore[arg-type]
            assert not manager.handles

    run(scenario)


def test_c16_adding_twice_makes_two_handles(server: RunningServer) -> None:
    async def scenario() -> None:
        async with EnvironmentManager() as manager:
            first = manager.upsert_environment("any id at all!", server.url)
            second = manager.upsert_environment("any id at all!", f" {server.url} ", connect_timeout=5.0)
            assert first is not second
            assert manager.get_environment("any id at all!") is second
            assert manager.default_environment_id() == "local"
            # Whoever has the old one goes on with it.
            assert (await (await first.environment()).run(["echo", "old"])).stdout == b"old\n"
            assert (await (await second.environment()).run(["echo", "new"])).stdout == b"new\n"

    run(scenario)


def test_c17_a_replaced_attempt_that_nobody_wants_is_cancelled() -> None:
    async def scenario() -> None:
        with listening() as listener:
            async with EnvironmentManager(Configuration(default=None, include_local=False)) as manager:
                manager.upsert_environment("a", url_of(listener))
                connection, _ = await asyncio.to_thread(listener.accept)
                with connection:
                    connection.settimeout(20)
                    held = manager.upsert_environment("a", url_of(listener))
                    while await asyncio.to_thread(connection.recv, 4096):
                        pass  # the first attempt hung up
                    # One that is held goes on, replaced or not.
                    manager.upsert_environment("a", url_of(listener))
                    gc.collect()
                    await settle()
                    assert held.state is Readiness.STARTING

    run(scenario)


def test_replaced_handles_leave_nothing_behind(server: RunningServer) -> None:
    async def scenario() -> None:
        async with EnvironmentManager(Configuration(default=None, include_local=False)) as manager:
            handles: list[weakref.ref[Handle]] = []
            machines: list[HeldEnvironment] = []
            for _ in range(50):
                handle = manager.upsert_environment("a", server.url)
                handles.append(weakref.ref(handle))
                machine = await handle.environment()
                assert isinstance(machine, HeldEnvironment)
                machines.append(machine)
                del handle, machine
            gc.collect()
            assert all(handle() is not None for handle in handles), "who holds the machine holds the handle"
            assert all(machine.connected for machine in machines)
            connections = [machine.stands_for for machine in machines[:-1]]
            del machines[:-1]
            gc.collect()
            assert [handle() is not None for handle in handles] == [False] * 49 + [True]
            await eventually_async(lambda: not any(each.connected for each in connections), "their end")
            assert machines[-1].connected

    run(scenario)


def test_closing_closes_what_was_replaced_as_well() -> None:
    async def scenario() -> None:
        old, new = Gate(), Gate()
        manager = EnvironmentManager(Configuration(default=None, include_local=False))
        first = Handle("a", old)
        manager.replace(first)
        manager.replace(Handle("a", new))
        await settle()
        await old.open()
        await manager.close()
        assert first.state is Readiness.CLOSED
        assert not old.opened[0].connected
        assert new.cancelled == 1
        assert manager.default_environment() is None
        assert not manager.handles

    run(scenario)


def test_a_manager_needs_a_loop() -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        EnvironmentManager()


def test_the_manager_is_cheap_to_import() -> None:
    """`exec-server run --env` pays for what it uses: no HTTP library, no cryptography."""
    code = (
        "import sys, exec_server.environments.manager, exec_server.environments.snapshot;"
        "print([name for name in ('aiohttp', 'picows', 'cryptography', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == "[]", done.stderr


def test_nothing_is_added_after_the_end(server: RunningServer) -> None:
    async def main() -> None:
        manager = EnvironmentManager()
        await manager.close()
        with pytest.raises(ConfigurationError, match="the registry of environments is closed"):
            manager.upsert_environment("late", server.url)
        assert not manager.handles

    asyncio.run(main())


def test_a_directory_that_is_not_there_is_named_as_such(tmp_path: Path) -> None:
    async def main() -> None:
        text = f'[[environments]]\nid = "a"\nprogram = "true"\ncwd = "{tmp_path}/none"\n'
        async with EnvironmentManager(parse(text)) as manager:
            with pytest.raises(ExecServerError, match=rf"its directory \(cwd\).*{tmp_path}/none"):
                await manager.handles["a"].environment()

    asyncio.run(main())
