"""wire/process.py: params decoded, results and notifications written."""

from __future__ import annotations

import base64
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.wire import process as wire
from exec_server.wire.errors import RpcError
from exec_server.wire.params import decode_params
from support.params import BAD, GOOD, POLICY, SANDBOX, START


def test_the_smallest_start() -> None:
    params = decode_params(START, wire.StartParams)
    assert (params.process_id, params.argv, params.cwd, params.env, params.tty) == (
        "p",
        ["true"],
        "file:///",
        {},
        False,
    )
    assert not params.pipe_stdin
    assert not params.enforce_managed_network
    for name in ("arg0", "env_policy", "metadata", "shell_snapshot", "sandbox", "pty_size", "spawn"):
        assert getattr(params, name) is None


def test_the_largest_start() -> None:
    params = decode_params(
        {
            **START,
            "pipeStdin": True,
            "arg0": "",
            "envPolicy": POLICY,
            "metadata": {"threadId": "A1A2A3A4-B1B2-C1C2-D1D2-D3D4D5D6D7D8", "toolCallId": ""},
            "shellSnapshot": {"scopeId": "s", "shell": {"name": "bash", "path": "/bin/bash"}},
            "sandbox": SANDBOX,
            "enforceManagedNetwork": True,
            "managedNetwork": {"loopbackPorts": [0, 65535], "allowLocalBinding": True, "x": 1},
            "networkProxy": {"y": 2},
            "ptySize": {"rows": 1, "cols": 65535},
            "spawn": "prepared",
        },
        wire.StartParams,
    )
    assert params.arg0 == ""
    assert params.env_policy is not None
    assert params.pty_size == wire.PtySize(1, 65535)


KINDS = {
    "process/start": wire.StartParams,
    "process/read": wire.ReadParams,
    "process/write": wire.WriteParams,
    "process/signal": wire.SignalParams,
    "process/terminate": wire.TerminateParams,
    "process/closeStdin": wire.CloseStdinParams,
    "process/resize": wire.ResizeParams,
    "process/wait": wire.WaitParams,
    "process/snapshot": wire.ProcessParams,
}


@pytest.mark.parametrize("method", KINDS)
def test_every_field_is_checked(method: str) -> None:
    kind, good = KINDS[method], GOOD[method]
    decode_params(good, kind)
    decode_params({**good, "unknown": {"x": [1]}}, kind)
    for name in good:
        with pytest.raises(RpcError, match=rf"missing field `{name}`"):
            decode_params({key: value for key, value in good.items() if key != name}, kind)
    for name, bad_values in BAD[method].items():
        for bad in bad_values:
            with pytest.raises(RpcError) as refusal:
                decode_params({**good, name: bad}, kind)
            assert refusal.value.code == -32602, (name, bad)


@pytest.mark.parametrize(
    "text",
    [
        "67e55044-10b1-426f-9247-bb680e5fe0c8",
        "67E55044-10B1-426F-9247-BB680E5FE0C8",
        "67e5504410b1426f9247bb680e5fe0c8",
        "urn:uuid:67e55044-10b1-426f-9247-bb680e5fe0c8",
        "{67e55044-10b1-426f-9247-bb680e5fe0c8}",
    ],
)
def test_spellings_of_a_thread(text: str) -> None:
    assert decode_params({"threadId": text}, wire.Metadata).thread_id == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "67e55044",
        "67e55044-10b1-426f-9247-bb680e5fe0c",
        "67e5-504410b1426f9247bb680e5fe0c8",
        "urn:uuid:",
        "URN:UUID:67e55044-10b1-426f-9247-bb680e5fe0c8",
        "{67e5504410b1426f9247bb680e5fe0c8}",
        "67e55044-10b1-426f-9247-bb680e5fe0cg",
        " 67e55044-10b1-426f-9247-bb680e5fe0c8",
        "67e55044-10b1-426f-9247-bb680e5fe0c8\n",
        "67e55044_10b1_426f_9247_bb680e5fe0c8",
        "\uff16\uff17e55044-10b1-426f-9247-bb680e5fe0c8",
    ],
)
def test_what_is_no_thread(text: str) -> None:
    with pytest.raises(RpcError):
        decode_params({"threadId": text}, wire.Metadata)


def test_results_have_every_member() -> None:
    read = wire.ReadResult(chunks=[], next_seq=1, exited=False, exit_code=None, closed=False)
    assert json.loads(msgspec.json.encode(read)) == {
        "chunks": [],
        "nextSeq": 1,
        "exited": False,
        "exitCode": None,
        "closed": False,
        "failure": None,
        "sandboxDenied": False,
    }
    assert json.loads(msgspec.json.encode(wire.StartResult("p"))) == {"processId": "p", "sandboxType": "none"}


def test_the_count_is_only_there_when_it_is_known() -> None:
    assert msgspec.json.encode(wire.TerminateResult(True)) == b'{"running":true}'
    assert msgspec.json.encode(wire.TerminateResult(True, 3)) == b'{"running":true,"killed":3}'
    assert msgspec.json.encode(wire.TerminateResult(False)) == b'{"running":false}'


# Notifications are put together without an encoder, so they are compared with one. -----------------


@given(st.text(), st.integers(1, 2**63), st.sampled_from([b"stdout", b"stderr", b"pty"]), st.binary())
def test_output(process_id: str, seq: int, stream: bytes, data: bytes) -> None:
    prefix = wire.output_prefix(msgspec.json.encode(process_id))
    assert json.loads(b"".join(wire.output_notification(prefix, seq, stream, data))) == {
        "method": "process/output",
        "params": {
            "processId": process_id,
            "seq": seq,
            "stream": stream.decode(),
            "chunk": base64.b64encode(data).decode(),
        },
    }


@given(st.text(), st.integers(1, 2**63), st.integers(-1, 255), st.booleans())
def test_exited_and_closed(process_id: str, seq: int, code: int, denied: bool) -> None:
    encoded = msgspec.json.encode(process_id)
    assert json.loads(wire.exited_notification(encoded, seq, code, denied)) == {
        "method": "process/exited",
        "params": {"processId": process_id, "seq": seq, "exitCode": code, "sandboxDenied": denied},
    }
    assert json.loads(wire.closed_notification(encoded, seq)) == {
        "method": "process/closed",
        "params": {"processId": process_id, "seq": seq},
    }
