"""A way to a model: what is sent, and what is made of the answers. Retries are in test_runner.py."""

from __future__ import annotations

import asyncio
import time
from email.utils import formatdate
from typing import Any

import pytest

from exec_server.agent.model import Completed, ItemAdded, ItemDone, ModelClient, ModelFailed, ModelSettings
from exec_server.events.model import Usage
from support.model_server import ModelServer, Play, Say, Status, message


def ask(play: Play, **settings: Any) -> tuple[list[Any], ModelServer]:
    async def main() -> list[Any]:
        client = ModelClient(ModelSettings(model="m", base_url=model.url, **settings))
        try:
            return [happened async for happened in client.ask({"input": [], "store": False})]
        finally:
            await client.close()

    with ModelServer(play) as model:
        return asyncio.run(main()), model


def test_an_answer_as_it_comes() -> None:
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
    happened, model = ask(Say([search, message("hi")]), api_key="secret", headers={"x-house": "yes"})
    added, searched, said, completed = happened
    assert isinstance(added, ItemAdded)
    assert isinstance(searched, ItemDone)
    assert searched.item == search
    assert isinstance(said, ItemDone)
    assert said.item == message("hi"), "as it was sent, whatever the package makes of it"
    assert completed == Completed(
        Usage(input_tokens=1200, cached_input_tokens=300, output_tokens=40, reasoning_output_tokens=8),
        "resp_1",
    )
    assert model.requests == [{"model": "m", "stream": True, "input": [], "store": False}]
    assert model.headers[0]["authorization"] == "Bearer secret"
    assert model.headers[0]["x-house"] == "yes"


def test_an_endpoint_that_wants_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    for settings in ({}, {"api_key": ""}):
        _, model = ask("hi", **settings)
        assert "authorization" not in model.headers[0]
    monkeypatch.setenv("OPENAI_API_KEY", "from the environment")
    _, model = ask("hi")
    assert model.headers[0]["authorization"] == "Bearer from the environment"


def test_items_of_kinds_that_nobody_knows() -> None:
    odd = {"type": "teleport_call", "where": {"x": [1, None]}, "id": 7}
    happened, _ = ask(Say([odd], usage=None))
    assert happened == [ItemDone(odd), Completed(Usage(), "resp_1")]


@pytest.mark.parametrize(
    ("status", "body", "said", "fatal"),
    [
        (400, '{"error": 5}', '{"error": 5}', True),
        (404, "", "unexpected status 404 Not Found: Unknown error, url: http://127.0.0.1:", False),
        (503, '{"error": {"code": "server_is_overloaded", "message": "Later"}}', "Later", True),
        (599, "[]", "unexpected status 599: Unknown error, url: ", False),
    ],
)
def test_a_status(status: int, body: str, said: str, fatal: bool) -> None:
    with pytest.raises(ModelFailed) as caught:
        ask(Status(status, body))
    assert str(caught.value).startswith(said)
    assert (caught.value.fatal, caught.value.network) == (fatal, False)


@pytest.mark.parametrize(
    ("headers", "low", "high"),
    [
        ({"Retry-After": "3"}, 3, 3),
        ({"Retry-After": "0.25"}, 0.25, 0.25),
        ({"retry-after-ms": "1500", "Retry-After": "9"}, 1.5, 1.5),
        ({"Retry-After": "100000"}, 300, 300),
        ({"Retry-After": "-5"}, 0, 0),
    ],
)
def test_when_to_ask_again(headers: dict[str, str], low: float, high: float) -> None:
    with pytest.raises(ModelFailed) as caught:
        ask(Status(429, "", tuple(headers.items())))
    assert caught.value.retry_after is not None
    assert low <= caught.value.retry_after <= high


def test_when_to_ask_again_by_the_clock() -> None:
    with pytest.raises(ModelFailed) as caught:
        ask(Status(429, "", (("Retry-After", formatdate(time.time() + 200, usegmt=True)),)))
    assert caught.value.retry_after is not None
    assert 100 <= caught.value.retry_after <= 201


@pytest.mark.parametrize("value", ["soon", "nan", "", "Mon, 99 Foo"])
def test_when_nobody_says_when(value: str) -> None:
    with pytest.raises(ModelFailed) as caught:
        ask(Status(429, "", (("Retry-After", value),)))
    assert caught.value.retry_after is None


def test_an_error_of_many_words_is_cut() -> None:
    with pytest.raises(ModelFailed) as caught:
        ask(Status(400, "x" * 5_000_000))
    assert str(caught.value) == "x" * 64 * 1024


def test_an_address_that_is_none() -> None:
    async def main() -> None:
        client = ModelClient(ModelSettings(model="m", base_url="nonsense", api_key="k"))
        async for _ in client.ask({"input": []}):
            pass

    with pytest.raises(ModelFailed):
        asyncio.run(main())
