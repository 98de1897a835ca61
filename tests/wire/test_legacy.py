"""wire/legacy.py: the first dialect."""

from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.wire import legacy
from exec_server.wire.errors import RpcError
from exec_server.wire.params import decode_params

EXEC = {"processId": "p", "argv": ["true"], "cwd": "/", "env": {}, "tty": True}


def test_exec() -> None:
    params = decode_params({**EXEC, "outputBytesCap": 4096, "arg0": None}, legacy.LegacyExecParams)
    assert (params.process_id, params.argv, params.cwd, params.tty) == ("p", ["true"], "/", True)
    assert params.output_bytes_cap == 4096
    decode_params(EXEC, legacy.LegacyExecParams)


@pytest.mark.parametrize(
    "change",
    [
        {"processId": 1},
        {"argv": "true"},
        {"cwd": None},
        {"env": {"A": 1}},
        {"tty": "yes"},
        {"outputBytesCap": -1},
        {"outputBytesCap": 2**64},
        {"arg0": 1},
    ],
)
def test_refused(change: dict[str, Any]) -> None:
    with pytest.raises(RpcError) as refusal:
        decode_params({**EXEC, **change}, legacy.LegacyExecParams)
    assert refusal.value.code == -32602


@pytest.mark.parametrize("name", EXEC)
def test_missing(name: str) -> None:
    with pytest.raises(RpcError, match=f"missing field `{name}`"):
        decode_params({key: value for key, value in EXEC.items() if key != name}, legacy.LegacyExecParams)


def test_results() -> None:
    assert json.loads(msgspec.json.encode(legacy.LegacyExecResult("p"))) == {
        "processId": "p",
        "running": True,
        "exitCode": None,
        "stdout": None,
        "stderr": None,
    }
    assert msgspec.json.encode(legacy.LegacyWriteResult()) == b'{"accepted":true}'


@given(st.text(), st.sampled_from([b"stdout", b"stderr", b"pty"]), st.binary(), st.integers(-1, 255))
def test_notifications(process_id: str, stream: bytes, data: bytes, code: int) -> None:
    encoded = msgspec.json.encode(process_id)
    assert json.loads(legacy.output_notification(encoded, stream, data)) == {
        "method": "command/exec/outputDelta",
        "params": {
            "processId": process_id,
            "stream": "stderr" if stream == b"stderr" else "stdout",
            "chunk": base64.b64encode(data).decode(),
        },
    }
    assert json.loads(legacy.exited_notification(encoded, code)) == {
        "method": "command/exec/exited",
        "params": {"processId": process_id, "exitCode": code},
    }
