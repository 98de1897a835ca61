"""wire/handshake.py: how a connection begins."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from exec_server.wire.errors import RpcError
from exec_server.wire.handshake import InitializeParams, InitializeResult
from exec_server.wire.params import decode_params


def test_all_a_client_may_say() -> None:
    params = decode_params(
        {
            "clientName": "",
            "resumeSessionId": "",
            "lifecycleEvents": True,
            "extensions": True,
            "binaryOutput": False,
            "unknown": 1,
        },
        InitializeParams,
    )
    assert params == InitializeParams("", "", True, True, False)
    assert decode_params({"clientName": "x", "resumeSessionId": None}, InitializeParams) == InitializeParams(
        "x"
    )


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"clientName": None},
        {"clientName": 1},
        {"clientName": "x", "resumeSessionId": 1},
        {"clientName": "x", "lifecycleEvents": "yes"},
    ],
)
def test_refused(params: Any) -> None:
    with pytest.raises(RpcError) as refusal:
        decode_params(params, InitializeParams)
    assert refusal.value.code == -32602


def test_one_answer_for_every_generation() -> None:
    assert json.loads(msgspec.json.encode(InitializeResult("s", {"shell": 1}))) == {
        "sessionId": "s",
        "environmentInfo": {"shell": 1},
        "protocolVersion": "exec-server.v0",
    }
    result = InitializeResult("s", None, binary_output=True)
    assert json.loads(msgspec.json.encode(result))["binaryOutput"] is True
