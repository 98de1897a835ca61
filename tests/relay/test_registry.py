"""The registry as its clients see it: addresses, headers, failures."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from exec_server.relay.credentials import Bearer
from exec_server.relay.keys import Identity
from exec_server.relay.registry import BadRegistryUrl, Registry, RegistryError, checked_base

from .test_environment import Scripted, refused, registered

KEY = Identity.generate().public


def ask(
    *answers: tuple[int, Any], call: Any, environment: str = "env-1", **options: Any
) -> tuple[Scripted, Any]:
    """One call; what was asked, and the answer or the error."""

    async def main() -> tuple[Scripted, Any]:
        async with Scripted(*answers) as scripted:
            registry = Registry(scripted.url, environment, Bearer("key"), **options)
            try:
                return scripted, await call(registry)
            except RegistryError as error:
                return scripted, error
            finally:
                await registry.close()

    return asyncio.run(main())


def validate(stream_id: str) -> Any:
    return lambda registry: registry.validate("reg", stream_id, KEY, "auth")


@pytest.mark.parametrize(
    ("url", "base"),
    [
        (" https://host/path// ", "https://host/path"),
        ("http://localhost:1", "http://localhost:1"),
        ("http://127.1.2.3", "http://127.1.2.3"),
        ("http://[::1]:5/", "http://[::1]:5"),
    ],
)
def test_addresses(url: str, base: str) -> None:
    assert checked_base(url) == base


@pytest.mark.parametrize("url", ["", "host", "ftp://host", "http://host", "http://128.0.0.1", "https://"])
def test_addresses_that_are_refused(url: str) -> None:
    with pytest.raises(BadRegistryUrl):
        Registry(url, "env", Bearer("key"))
    with pytest.raises(BadRegistryUrl):
        Registry("https://host", "  ", Bearer("key"))


def test_what_validate_sends_and_takes_for_yes() -> None:
    uuid = "6b9c2f0e-1d3a-4c55-9a77-2f6f0f4b8c01"
    scripted, answer = ask((200, {"valid": True, "more": 1}), call=validate(uuid))
    assert answer is True
    path, headers, body = scripted.requests[0]
    assert path == "/base/cloud/environment/env-1/validate"
    assert headers["x-codex-noise-stream-id"] == uuid
    assert body == {
        "executor_registration_id": "reg",
        "harness_public_key": KEY.to_object(),
        "harness_key_authorization": "auth",
    }
    scripted, _ = ask((200, {"valid": True}), call=validate("not a uuid"))
    assert "x-codex-noise-stream-id" not in scripted.requests[0][1]
    for no in ({"valid": False}, {"valid": "true"}, {"valid": 1}, {}):
        assert ask((200, no), call=validate(uuid))[1] is False


@pytest.mark.parametrize(
    ("answer", "status", "code", "transient"),
    [
        ((409, refused("environment_offline")), 409, "environment_offline", True),
        ((409, refused("route_unavailable", "detail")), 409, "route_unavailable", False),
        ((429, {}), 429, None, True),
        ((408, "x"), 408, None, True),
        ((503, {"error": "text"}), 503, None, True),
        ((401, {"error": {"code": 7}}), 401, None, False),
        ((302, {}), 302, None, False),
        ((200, "x" * 70_000), 200, None, False),
        ((200, "[" * 50_000), 200, None, False),
        ((403, "[" * 50_000), 403, None, False),
    ],
)
def test_failures(answer: tuple[int, Any], status: int, code: str | None, transient: bool) -> None:
    _, error = ask(answer, call=lambda registry: registry.register(KEY))
    assert isinstance(error, RegistryError)
    assert (error.status, error.code, error.transient) == (status, code, transient)


def test_a_time_that_was_left_is_rounded() -> None:
    async def main() -> None:
        async def never(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await gone.wait()
            writer.close()

        gone = asyncio.Event()
        server = await asyncio.start_server(never, "127.0.0.1", 0)
        registry = Registry(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "env-1", Bearer("key"))
        with pytest.raises(RegistryError, match=r"within 0\.0123 s"):
            await registry.connect(KEY, 0.0123456)
        gone.set()
        await registry.close()
        server.close()
        await server.wait_closed()

    asyncio.run(main())


def test_words_of_a_refusal_are_shown_or_not() -> None:
    _, error = ask((403, "secret words"), call=lambda registry: registry.register(KEY))
    assert "secret words" in str(error)
    _, error = ask(
        (409, refused("registration_conflict")),
        call=lambda registry: registry.register(KEY),
        quote_errors=False,
    )
    assert "because" not in str(error)
    assert error.code == "registration_conflict"
    _, error = ask((409, refused("other")), call=lambda registry: registry.register(KEY), quote_errors=False)
    assert error.code is None


def test_odd_names_are_escaped() -> None:
    scripted, _ = ask(
        (200, registered(environment_id="a/b ?ä")),
        call=lambda registry: registry.register(KEY),
        environment=" a/b ?ä ",
    )
    assert scripted.requests[0][0] == "/base/cloud/environment/a/b ?ä/register"  # as the server decodes it


def test_the_next_node_is_asked_when_one_is_gone() -> None:
    async def main() -> None:
        async with Scripted((200, registered()), (200, registered())) as scripted:
            registry = Registry(f"http://127.0.0.1:9,{scripted.url}", "env-1", Bearer("key"))
            assert registry.nodes == 2
            with pytest.raises(RegistryError) as caught:
                await registry.register(KEY)
            assert caught.value.transient
            for _ in range(2):
                assert (await registry.register(KEY)).id == "reg-1"
            await registry.close()

    asyncio.run(main())
