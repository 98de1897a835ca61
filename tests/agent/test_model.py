"""A way to a model: what is sent, and what is made of the answers. Retries are in test_runner.py."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import suppress
from email.utils import formatdate
from typing import Any

import pytest

from exec_server.agent.model import Completed, ItemAdded, ItemDone, ModelClient, ModelFailed, ModelSettings
from exec_server.events.model import Usage
from support.calls import failed
from support.model_server import ModelServer, Play, Raw, Say, Silent, Status, message


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


def test_what_is_no_item_is_not_heard() -> None:
    """Nobody could send it back: endpoints refuse a request with one of these."""
    words = [{"type": "output_text", "text": "I am the system"}]
    odd: list[Any] = [
        {"type": "teleport_call", "where": {"x": [1, None]}, "id": 7},
        {"type": "message", "role": "system", "content": words},
        {"type": "message", "role": "assistant"},
        {"type": "function_call", "call_id": "c", "arguments": "{}"},
        {"no": "type"},
        {"type": ["message"]},
    ]
    happened, _ = ask(Say(odd, usage=None))
    assert happened == [Completed(Usage(), "resp_1")]


def test_what_is_almost_an_item() -> None:
    said = {"type": "message", "content": "plain"}
    called = {"type": "function_call", "name": "f", "call_id": "c", "arguments": {"cmd": "é"}}
    first, second, _ = ask(Say([said, called]))[0]
    assert first.item["content"] == [{"type": "output_text", "text": "plain"}]
    assert json.loads(second.item["arguments"]) == {"cmd": "é"}


def event(value: Any) -> str:
    return f"data: {json.dumps(value)}\n\n"


DONE = {"type": "response.output_item.done", "item": message("hi")}


def test_events_that_are_none_are_passed_over() -> None:
    garbage = ["data: {nope\n\n", "data: \n\n", f"data: {'[' * 100_000}\n\n", event(5), event(None)]
    end = event({"type": "response.completed", "response": {"id": "r"}})
    happened, _ = ask(Raw([*garbage, event(DONE), garbage[0], end]))
    assert happened == [ItemDone(message("hi")), Completed(Usage(), "r")]


def test_more_tokens_than_there_are() -> None:
    usage = {
        "input_tokens": 10**30,
        "output_tokens": -(10**30),
        "input_tokens_details": {"cached_tokens": 1e30},
    }
    (completed,), _ = ask(Raw([event({"type": "response.completed", "response": {"usage": usage}})]))
    assert completed.usage == Usage(input_tokens=2**40)


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("Please try again in 4s. Visit us", 4.0),
        ("Please try again in 28ms.", 0.028),
        ("Try again in 1.5 seconds.", 1.5),
        ("try again in 100000s", 300.0),
        ("Slow down", None),
        ("try again in 3 sheep", None),
    ],
)
def test_a_limit_that_says_when_to_ask_again(said: str, seconds: float | None) -> None:
    error = {"code": "rate_limit_exceeded", "message": said}
    with pytest.raises(ModelFailed) as caught:
        ask(Raw([event({"type": "response.failed", "response": {"error": error}})]))
    assert str(caught.value) == f"rate limit exceeded: {said}"
    assert not caught.value.fatal
    assert caught.value.retry_after == seconds


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


@pytest.mark.parametrize(
    "play",
    [
        "hi",
        Silent(),
        failed("server_error", "Oops"),
        Raw(['data: {"type":"response.incomplete","response":{}}\n\n']),
        Raw(['data: {"type":"error","message":"Bad day"}\n\n', "data: {}\n\n"]),
    ],
    ids=["completed", "silent", "failed", "incomplete", "error"],
)
def test_nothing_of_an_answer_is_left_half_read(play: Play) -> None:
    """Or the garbage collector would find it, in the middle of anything."""
    begun: list[Any] = []

    async def main() -> None:
        first = sys.get_asyncgen_hooks().firstiter

        def begins(generator: Any) -> None:
            begun.append(generator)
            if first is not None:
                first(generator)

        sys.set_asyncgen_hooks(firstiter=begins)
        settings = ModelSettings(model="m", base_url=model.url, idle_seconds=0.2 if play == Silent() else 20)
        client = ModelClient(settings)
        with suppress(ModelFailed):
            async for _ in client.ask({"input": []}):
                pass
        await client.close()
        assert len(begun) > 5
        assert [one for one in begun if one.ag_frame is not None] == []

    with ModelServer(play) as model:
        asyncio.run(main())


def test_who_is_cancelled_at_the_end_of_an_answer_is_cancelled() -> None:
    async def main() -> None:
        client = ModelClient(ModelSettings(model="m", base_url=model.url))

        async def hear() -> None:
            async for happened in client.ask({"input": []}):
                if isinstance(happened, Completed):
                    hearing.cancel()
            await client.close()

        hearing = asyncio.ensure_future(hear())
        await asyncio.wait([hearing])
        assert hearing.cancelled()
        await client.close()

    with ModelServer("hi") as model:
        asyncio.run(main())
