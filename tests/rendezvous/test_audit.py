"""What an operator finds in the log, in lists and in metrics; and what nobody finds there."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from exec_server import log
from exec_server.rendezvous.audit import BUCKETS, Journal
from relay.stage import KEY, add_key, stage
from support.wait import eventually_async

NAME = "t-any--tests"
"""Of the key of the stage."""


def test_who_was_here(tmp_path: Path, capfd: pytest.CaptureFixture[str], fresh_log: None) -> None:
    log.configure("info", True)
    lines: list[dict[str, Any]] = []
    text = ""

    def said(event: str) -> dict[str, Any] | None:
        nonlocal text
        more = capfd.readouterr().err
        text += more
        lines.extend(json.loads(line) for line in more.splitlines())
        # The environment is in this process, too, and says some of it in the same words.
        return next((line for line in lines if line["event"] == event and "key" in line), None)

    async def main() -> None:
        async with asyncio.timeout(50), stage(tmp_path) as ready, aiohttp.ClientSession() as session:
            await add_key(tmp_path, "admin-secret", "admin", "*")
            ready.start_environment()
            await ready.connected.wait()
            client = await ready.client()
            assert (await client.run(["echo", "secret-output"])).exit_code == 0
            headers = {"Authorization": "Bearer admin-secret"}
            async with session.get(f"{ready.node.url}/admin/environments", headers=headers) as answer:
                ((stream,),) = [found["streams"] for found in (await answer.json())["environments"]]
            assert (stream["key"], stream["address"]) == (NAME, "127.0.0.1")
            assert stream["bytes"] > 2000
            assert stream["since"] > 1e9
            for _ in range(9):
                async with session.get(
                    f"{ready.node.url}/metrics", headers={"Authorization": "Bearer wrong-secret"}
                ) as answer:
                    assert answer.status == 401
            async with session.get(f"{ready.node.url}/metrics", headers=headers) as answer:
                numbers = await answer.text()
            await client.close()
            gone = await eventually_async(lambda: said("a harness is gone"), "the line about the end")
            who = {"environment": "env-1", "tenant": "t", "key": NAME, "address": "127.0.0.1"}
            for event in ("an environment registered", "an environment connected", "a stream was opened"):
                assert who.items() <= (said(event) or {}).items(), event
            assert who.items() <= gone.items()
            assert gone["received"] + gone["sent"] >= stream["bytes"]
            assert 0 <= gone["seconds"] < 60
            assert gone["stream"] == stream["stream"]
            assert sum(line["event"] == "refused: call" for line in lines) == 3  # and not nine
            for line in (
                'refusals_total{reason="unauthorized",what="call"} 9.0',
                "streams_opened_total 1.0",
                "store_errors_total 0.0",
                "keys_revoked_total 0.0",
                'authorization_seconds_bucket{le="+Inf"} 3.0',
                "authorization_seconds_count 3.0",
            ):
                assert f"exec_server_rendezvous_{line}\n" in numbers, numbers

    asyncio.run(main())
    for secret in (KEY, "admin-secret", "wrong-secret", "secret-output", "sig=", "?role"):
        assert secret not in text


def test_how_long_it_took() -> None:
    journal = Journal()
    for seconds in (0.0001, 0.001, 0.002, 9.0, 11.0):
        journal.authorised(seconds)
    assert (journal.latency[0], journal.latency[1], journal.latency[-2:]) == (2, 1, [1, 1])
    assert len(journal.latency) == len(BUCKETS) + 1


def test_knocking_often_fills_no_log(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fresh_log: None
) -> None:
    log.configure("info", True)
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    journal = Journal()

    def said() -> list[dict[str, Any]]:
        return [json.loads(line) for line in capsys.readouterr().err.splitlines()]

    for _ in range(1000):
        journal.refused("call", "unauthorized", "x" * 1000, "192.0.2.1")
    journal.refused("upgrade", "unauthorized", "the URL was used before", "192.0.2.2")
    *often, other = said()
    assert [(line["address"], len(line["reason"])) for line in often] == [("192.0.2.1", 200)] * 3
    assert (other["address"], other["untold_before"]) == ("192.0.2.2", 997)
    now += 5.0
    journal.refused("call", "unauthorized", "again", "192.0.2.1")
    assert [line["reason"] for line in said()] == ["again"]
    for number in range(1000):
        journal.refused("call", "unauthorized", "from everywhere", f"2001:db8::{number}")
    assert len(said()) <= 50
    assert journal.refusals["call", "unauthorized"] == 2001
