"""wire/process.py: params decoded, results and notifications written."""

from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.wire import process as wire
from exec_server.wire.errors import RpcError
from exec_server.wire.params import decode_params

START = {"processId": "p", "argv": ["true"], "cwd": "file:///", "env": {}, "tty": False}
POLICY = {"inherit": "all", "ignoreDefaultExcludes": True, "exclude": [], "set": {}, "includeOnly": []}
SANDBOX = {"permissions": {"type": "disabled"}, "windowsSandboxLevel": "disabled"}


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
            "managedNetwork": {"x": 1},
            "networkProxy": {"y": 2},
            "ptySize": {"rows": 1, "cols": 65535},
            "spawn": "prepared",
        },
        wire.StartParams,
    )
    assert params.arg0 == ""
    assert params.env_policy is not None
    assert params.pty_size == wire.PtySize(1, 65535)


NOT_TEXT: list[Any] = [None, 1, True, [], {}]
BAD_FIELDS: dict[type, tuple[dict[str, Any], dict[str, list[Any]]]] = {
    wire.StartParams: (
        START,
        {
            "processId": NOT_TEXT,
            "argv": [None, "true", {}, [1], ["a", None]],
            "cwd": NOT_TEXT,
            "env": [None, [], "x", {"A": 1}, {"A": None}],
            "tty": [None, 0, "false", []],
            "pipeStdin": [None, 1, "true"],
            "arg0": [1, [], {}],
            "envPolicy": [
                1,
                [],
                {},
                *({name: value for name, value in POLICY.items() if name != missing} for missing in POLICY),
                {**POLICY, "inherit": "some"},
                {**POLICY, "inherit": None},
                {**POLICY, "ignoreDefaultExcludes": None},
                {**POLICY, "exclude": [1]},
                {**POLICY, "set": {"A": 1}},
                {**POLICY, "includeOnly": None},
            ],
            "metadata": [1, [], {"threadId": 1}, {"threadId": "no uuid"}, {"toolCallId": 1}],
            "shellSnapshot": [1, {}, {"scopeId": "s"}, {"scopeId": "s", "shell": {"name": "bash"}}],
            "sandbox": [1, {}, {"permissions": {}}, {**SANDBOX, "windowsSandboxLevel": "high"}],
            "enforceManagedNetwork": [None, "no"],
            "managedNetwork": [1, []],
            "networkProxy": [1, []],
            "ptySize": [1, {}, {"rows": 1}, {"rows": -1, "cols": 1}, {"rows": 65536, "cols": 1}],
            "spawn": [1, "other", "Direct"],
        },
    ),
    wire.ReadParams: (
        {"processId": "p"},
        {
            "processId": NOT_TEXT,
            **{name: [-1, 0.5, 1.0, "1", True, [], 2**64] for name in ("afterSeq", "maxBytes", "waitMs")},
        },
    ),
    wire.WriteParams: (
        {"processId": "p", "chunk": ""},
        {"processId": NOT_TEXT, "chunk": NOT_TEXT, "writeId": [1, [], True]},
    ),
    wire.SignalParams: (
        {"processId": "p", "signal": "interrupt"},
        {"processId": NOT_TEXT, "signal": NOT_TEXT},
    ),
    wire.TerminateParams: (
        {"processId": "p"},
        {
            "processId": NOT_TEXT,
            "mode": [
                "force",
                1,
                {},
                {"type": "kind"},
                {"type": None},
                {"type": "graceful"},
                {"type": "graceful", "timeoutMs": None},
                {"type": "graceful", "timeoutMs": -1},
                {"type": "graceful", "timeoutMs": "1"},
                {"type": "graceful", "timeoutMs": 2**64},
            ],
        },
    ),
    wire.CloseStdinParams: ({"processId": "p"}, {"processId": NOT_TEXT, "writeId": [1, []]}),
    wire.ResizeParams: (
        {"processId": "p", "rows": 1, "cols": 1},
        {"processId": NOT_TEXT, "rows": [None, -1, "1", 1.5], "cols": [None, -1, "1", 1.5]},
    ),
    wire.WaitParams: (
        {"processId": "p"},
        {"processId": NOT_TEXT, "waitMs": [-1, "1", 0.5, 2**64], "until": ["started", 1, []]},
    ),
    wire.ProcessParams: ({"processId": "p"}, {"processId": NOT_TEXT}),
}


@pytest.mark.parametrize("kind", BAD_FIELDS, ids=lambda kind: kind.__name__)
def test_every_field_is_checked(kind: type) -> None:
    good, fields = BAD_FIELDS[kind]
    decode_params(good, kind)
    decode_params({**good, "unknown": {"x": [1]}}, kind)
    for name in good:
        with (
            pytest.raises(RpcError, match=rf"missing field `{name}`")
            if name != "writeId"
            else pytest.raises(RpcError)
        ):
            decode_params({key: value for key, value in good.items() if key != name}, kind)
    for name, bad_values in fields.items():
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
