"""Every kind of bad input, by name: a clear error with the right code, the connection lives, nothing is lost.

A witness (a `cat` that echoes what it is given) runs all the while; after each row it must still hear and
be heard, and its numbers must have no gap. The few rows that end a connection say so.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from typing import Any, NamedTuple

import pytest

from support.frames import BINARY, TEXT, RawSocket, frame
from support.machine import sleep_forever
from support.params import BAD, GOOD, SANDBOX, START
from support.rpc import Peer, StdioPeer, WebSocketPeer, b64, unb64
from support.server import RunningServer
from support.wait import eventually

MIB = 1024 * 1024
INVALID_REQUEST, NO_METHOD, INVALID_PARAMS, INTERNAL = -32600, -32601, -32602, -32603


class Row(NamedTuple):
    """One kind of bad input."""

    name: str
    send: Any
    """Text or bytes: sent as they are. A pair: a method and its params."""
    code: int
    text: str = ""
    """What the message says, or begins with."""


def nested(depth: int) -> str:
    return '{"id":1,"method":"m","params":' + "[" * depth + "]" * depth + "}"


# Messages that are none: answered with id -1 ------------------------------------------------------

MALFORMED = [
    Row(name, text, INVALID_REQUEST)
    for name, text in {
        "no JSON": "nonsense",
        "half an object": '{"id":1,"method":"process/read"',
        "two objects": '{"id":1,"method":"m"}{"id":2,"method":"m"}',
        "a trailing comma": '{"id":1,"method":"m",}',
        "a comment": '{"id":1,/* */"method":"m"}',
        "single quotes": "{'id':1}",
        "a byte order mark": '\ufeff{"id":1,"method":"m"}',
        "NaN": '{"id":1,"method":"m","params":NaN}',
        "Infinity": '{"id":1,"method":"m","params":-Infinity}',
        "a leading zero": '{"id":01,"method":"m"}',
        "a lone surrogate": '{"id":1,"method":"m","params":"\\ud800"}',
        "a raw control character": '{"id":1,"method":"m","params":"\x01"}',
        "a NUL": '{"id":1,"method":"m"}\0',
        "a batch": '[{"id":1,"method":"m"}]',
        "null": "null",
        "a number": "5",
        "a text": '"text"',
        "an empty object": "{}",
        "an id and nothing else": '{"id":1}',
        "an error without a code": '{"id":1,"error":{"message":"x"}}',
        "an error with a huge code": '{"id":1,"error":{"code":99999999999999999999,"message":"x"}}',
        "a result without an id": '{"result":1}',
        "a null id": '{"id":null,"method":"m"}',
        "a boolean id": '{"id":true,"method":"m"}',
        "a fractional id": '{"id":1.5,"method":"m"}',
        "an id with an exponent": '{"id":1e3,"method":"m"}',
        "an id of more than 64 bits": '{"id":9223372036854775808,"method":"m"}',
        "an array as id": '{"id":[1],"method":"m"}',
        "a method that is a number": '{"id":1,"method":5}',
        "a method that is null": '{"id":1,"method":null}',
        "a trace that is a list": '{"id":1,"method":"m","trace":[]}',
        "a duplicate key": '{"id":1,"method":"m","id":1}',
        "a duplicate key, spelled differently": '{"id":1,"method":"m","\\u0069d":1}',
        "a duplicate key deep inside": '{"id":1,"method":"m","params":[{"a":{"b":1,"b":1}}]}',
        "128 levels": nested(127),
        "100000 levels": nested(100_000),
        "262145 values": '{"id":1,"method":"m","params":[' + "0," * 262_140 + "0]}",
    }.items()
]

# Requests that cannot be: answered with their own id ----------------------------------------------

UNKNOWN_METHODS = [
    Row(
        f"unknown method {name!r}", (name, {}), NO_METHOD, f"exec-server stub does not implement `{name}` yet"
    )
    for name in (
        "",
        "no/such",
        "process/kill",
        "PROCESS/START",
        "process/start ",
        "initialized",
        "rpc.discover",
    )
]

WRONG_TYPES = [
    Row(f"{method}: {field} = {json.dumps(value)}", (method, {**GOOD[method], field: value}), INVALID_PARAMS)
    for method, fields in BAD.items()
    for field, values in fields.items()
    for value in values
]

MISSING_FIELDS = [
    Row(
        f"{method} without {field}",
        (method, {name: value for name, value in good.items() if name != field}),
        INVALID_PARAMS,
        f"missing field `{field}`",
    )
    for method, good in GOOD.items()
    for field in good
]

NO_OBJECTS = [
    Row(f"{method} with {json.dumps(params)}", (method, params), INVALID_PARAMS)
    for method in GOOD
    for params in ("text", 5, True, [[]])
]


def start(name: str, code: int, text: str = "", **change: Any) -> Row:
    return Row(name, ("process/start", {**START, "processId": "bad", **change}), code, text)


ENOENT, EACCES, ENOTDIR, E2BIG = (
    "No such file or directory (os error 2)",
    "Permission denied (os error 13)",
    "Not a directory (os error 20)",
    "Argument list too long (os error 7)",
)
NUL_ARGUMENT, NUL_VARIABLE = "nul byte found in provided data", "data provided contains a nul byte"

STARTS = [
    start("no argv", INVALID_PARAMS, "argv must not be empty", argv=[]),
    start("no program", INTERNAL, "missing program for pipe spawn", argv=[""]),
    start("no program for a terminal", INTERNAL, "missing program for PTY spawn", argv=[""], tty=True),
    start("a program that does not exist", INTERNAL, ENOENT, argv=["/no/such"]),
    start("a name that is nowhere", INTERNAL, ENOENT, argv=["no-such-name"], env={"PATH": "/bin"}),
    start("a name without a path", INTERNAL, ENOENT, argv=["true"], env={"PATH": ""}),
    start("a directory as program", INTERNAL, EACCES, argv=["/tmp"]),
    start("a file that is no program", INTERNAL, EACCES, argv=["/etc/passwd"]),
    start("a terminal for nobody", INTERNAL, "Unable to spawn xyz because:", argv=["xyz"], tty=True),
    start("NUL in the program", INTERNAL, NUL_ARGUMENT, argv=["/bin/tr\0ue"]),
    start("NUL in an argument", INTERNAL, NUL_ARGUMENT, argv=["/bin/true", "a\0"]),
    start("NUL in arg0", INTERNAL, NUL_ARGUMENT, arg0="a\0"),
    start("NUL in a variable", INTERNAL, NUL_VARIABLE, env={"A": "\0"}),
    start("NUL in a variable's name", INTERNAL, NUL_VARIABLE, env={"\0": "A"}),
    start("NUL for a terminal", INTERNAL, NUL_ARGUMENT, env={"A": "\0"}, tty=True),
    start(
        "NUL in the directory", INVALID_PARAMS, "'file:///a%00b' is invalid on 'linux'", cwd="file:///a%00b"
    ),
    start("a huge argument", INTERNAL, E2BIG, argv=["/bin/true", "x" * 131_072]),
    start("a huge argument for a terminal", INTERNAL, E2BIG, argv=["/bin/true", "x" * 131_072], tty=True),
    start("many arguments", INTERNAL, E2BIG, argv=["/bin/true", *["y" * 100] * 100_000]),
    start("a huge variable", INTERNAL, E2BIG, argv=["/bin/true"], env={"A": "x" * 131_072}),
    start("a path as directory", INVALID_PARAMS, "invalid URI: relative URL without a base", cwd="/tmp"),
    start("no directory", INVALID_PARAMS, "invalid URI: relative URL without a base", cwd=""),
    start("a web page as directory", INVALID_PARAMS, "unsupported path URI scheme `http`", cwd="http://x/"),
    start("a query", INVALID_PARAMS, "query parameters are not allowed in path URIs", cwd="file:///a?b"),
    start("a fragment", INVALID_PARAMS, "fragments are not allowed in path URIs", cwd="file:///a#b"),
    start("a drive", INVALID_PARAMS, "cwd URI `file:///C:/x` is not valid", cwd="file:///c:/x"),
    start("a share", INVALID_PARAMS, "cwd URI `file://srv/x` is not valid", cwd="file://srv/x"),
    start("a directory that does not exist", INTERNAL, ENOENT, argv=["/bin/true"], cwd="file:///no/such"),
    start("a file as directory", INTERNAL, ENOTDIR, argv=["/bin/true"], cwd="file:///etc/passwd"),
    start(
        "the same for a terminal", INTERNAL, ENOTDIR, argv=["/bin/true"], cwd="file:///etc/passwd", tty=True
    ),
    start("a terminal of no size", INVALID_PARAMS, "rows and cols", tty=True, ptySize={"rows": 0, "cols": 1}),
    start(
        "a sandbox without its half",
        INVALID_PARAMS,
        "missing field `file_system`",
        sandbox={**SANDBOX, "permissions": {"type": "managed"}},
    ),
    start("a proxy we do not have", INVALID_PARAMS, "missing field `proxy`", networkProxy={}),
    start("an id that is taken", INVALID_REQUEST, "process witness already exists", processId="witness"),
]


def of(name: str, method: str, code: int, text: str = "", **params: Any) -> Row:
    return Row(name, (method, {"processId": "witness", **params}), code, text)


NO_TERMINAL = "process witness is not attached to a terminal"
OTHERS = [
    *(
        of(f"bad base64 {text!r}", "process/write", INVALID_PARAMS, chunk=text)
        for text in ("!", "QQ", "QQ=", "QQ===", "QR==", "Q Q=", "QQ==\n", "-_-_", "====", "QÜ==", "\0")
    ),
    *(
        of(f"bad base64 {text!r}, first dialect", "command/exec/write", INVALID_PARAMS, chunk=text)
        for text in ("!", "QQ", "QR==")
    ),
    of(
        "an empty write id",
        "process/write",
        INVALID_PARAMS,
        "writeId must not be empty",
        chunk="",
        writeId="",
    ),
    of("an empty write id to close", "process/closeStdin", INVALID_PARAMS, "writeId must not", writeId=""),
    *(
        of(f"signal {name!r}", "process/signal", INVALID_PARAMS, f"unknown variant `{name}`", signal=name)
        for name in ("", "kill", "9", "SIGNONE", "SIG_DFL", "sigint")
    ),
    *(
        of(
            f"size {rows}x{cols}",
            "process/resize",
            INVALID_PARAMS,
            "rows and cols must be",
            rows=rows,
            cols=cols,
        )
        for rows, cols in ((0, 1), (1, 0), (65536, 1), (1, 2**63))
    ),
    of("a size for pipes", "process/resize", INVALID_REQUEST, NO_TERMINAL, rows=1, cols=1),
    *(
        of(
            f"{method} of nobody",
            method,
            INVALID_REQUEST,
            "unknown process id nobody",
            processId="nobody",
            **more,
        )
        for method, more in {
            "process/read": {},
            "process/wait": {},
            "process/snapshot": {},
            "process/resize": {"rows": 1, "cols": 1},
            "command/exec/write": {"chunk": ""},
        }.items()
    ),
    Row(
        "a second initialize",
        ("initialize", {"clientName": "x"}),
        INVALID_REQUEST,
        "initialize may only be sent",
    ),
    Row("no/params wanted", ("environment/status", {"x": 1}), INVALID_PARAMS),
    Row(
        "a first-dialect path that is relative",
        ("command/exec", {**GOOD["command/exec"], "cwd": "tmp"}),
        INVALID_PARAMS,
        "cwd must be an absolute path",
    ),
    Row(
        "a first-dialect id that is taken",
        ("command/exec", {**GOOD["command/exec"], "processId": "witness"}),
        INVALID_REQUEST,
        "process witness already exists",
    ),
]

ANSWERED = [*UNKNOWN_METHODS, *WRONG_TYPES, *MISSING_FIELDS, *NO_OBJECTS, *STARTS, *OTHERS]


class Witnessed:
    """A connection with a process on it that must not notice anything."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.numbers = count()
        peer.initialize()
        peer.start("cat", pipeStdin=True, processId="witness")
        self.said = b""
        self.unharmed()

    def unharmed(self) -> None:
        word = b"%d," % next(self.numbers)
        assert self.peer.write("witness", word) == "accepted"
        self.said += word
        record = self.peer.saw("witness", self.said)
        assert record.output == self.said
        assert record.seqs == list(range(1, len(record.seqs) + 1))


@pytest.fixture(scope="module")
def standing(server: RunningServer) -> Iterator[Callable[[str], Witnessed]]:
    """One connection per transport for all rows: each row must leave it as it was."""
    with ExitStack() as stack:
        made: dict[str, Witnessed] = {}

        def get(kind: str) -> Witnessed:
            if kind not in made:
                peer: Peer = WebSocketPeer(server.url) if kind == "websocket" else StdioPeer()
                made[kind] = Witnessed(stack.enter_context(peer))
            return made[kind]

        yield get


@pytest.mark.parametrize("transport", ["websocket", "stdio"])
@pytest.mark.parametrize("row", MALFORMED, ids=lambda row: row.name)
def test_malformed(standing: Callable[[str], Witnessed], transport: str, row: Row) -> None:
    witnessed = standing(transport)
    witnessed.peer.send_raw(row.send)
    error = witnessed.peer.answer(-1)["error"]
    assert error["code"] == row.code
    assert error["message"].startswith("failed to parse ")
    assert len(error["message"]) < 1000
    witnessed.unharmed()


@pytest.mark.parametrize("transport", ["websocket", "stdio"])
@pytest.mark.parametrize("row", ANSWERED, ids=lambda row: row.name)
def test_answered(standing: Callable[[str], Witnessed], transport: str, row: Row) -> None:
    witnessed = standing(transport)
    method, params = row.send
    told_before = len(witnessed.peer.notifications)
    code, text = witnessed.peer.refused(method, params)
    assert code == row.code, text
    assert text.startswith(row.text)
    assert "internal error" not in text
    assert "Traceback" not in text
    witnessed.unharmed()
    # Nothing was started by it, and nothing told of it.
    news = witnessed.peer.notifications[told_before:]
    assert {message["params"]["processId"] for message in news} == {"witness"}
    # Whatever a first-dialect row made of the connection, it speaks the current one again.
    witnessed.peer.call("environment/status")


# Dead pipes and ids in flight: not wrong, but not to be taken badly either -------------------------


@pytest.mark.parametrize("transport", ["websocket", "stdio"])
def test_dead_pipes(standing: Callable[[str], Witnessed], transport: str) -> None:
    witnessed = standing(transport)
    peer = witnessed.peer
    deaf = peer.shell("exec <&-; echo closed; sleep 60", pipeStdin=True)
    peer.saw(deaf, b"closed")
    for _ in range(3):
        assert peer.write(deaf, bytes(100_000)) == "accepted"
    peer.terminate(deaf)
    late = {"processId": deaf, "chunk": "", "writeId": "late"}
    assert peer.refused("process/write", late) == (INTERNAL, "failed to write to process stdin")
    peer.finished(deaf)
    gone = peer.start("true", pipeStdin=True)
    peer.finished(gone)
    assert peer.write(gone, bytes(1_000_000)) == "accepted"
    assert peer.close_stdin(gone) == "stdinClosed"
    assert peer.write("nobody", b"x") == "unknownProcess"
    no_stdin = peer.start("sleep", sleep_forever())
    assert peer.write(no_stdin, b"x") == "stdinClosed"
    # It does not read, its pipe is full, and then it is killed.
    stuck = peer.start("sleep", sleep_forever(), pipeStdin=True)
    waiting = [
        peer.request("process/write", {"processId": stuck, "chunk": b64(bytes(100_000))}) for _ in range(150)
    ]
    peer.terminate(stuck)
    answers = [peer.answer(one) for one in waiting]
    told = [
        answer["result"]["status"] if "result" in answer else answer["error"]["message"] for answer in answers
    ]
    refused = told.count("failed to write to process stdin")  # what there was no room for
    assert refused
    assert told == ["accepted"] * (len(told) - refused) + ["failed to write to process stdin"] * refused
    peer.terminate(no_stdin)
    witnessed.unharmed()


@pytest.mark.parametrize("transport", ["websocket", "stdio"])
def test_ids_in_flight_twice(standing: Callable[[str], Witnessed], transport: str) -> None:
    witnessed = standing(transport)
    peer = witnessed.peer
    quiet = peer.start("cat", pipeStdin=True)
    for _ in range(3):
        peer.request("process/wait", {"processId": quiet}, request_id="twice")
    peer.request("no/such", None, request_id="twice")
    assert peer.answer("twice")["error"]["code"] == NO_METHOD
    peer.close_stdin(quiet)
    assert [peer.result("twice")["exited"] for _ in range(3)] == [True] * 3
    witnessed.unharmed()


@pytest.mark.parametrize("transport", ["websocket", "stdio"])
def test_an_unknown_notification(standing: Callable[[str], Witnessed], transport: str) -> None:
    witnessed = standing(transport)
    witnessed.peer.notify("no/such", {"x": 1})
    error = witnessed.peer.answer(-1)["error"]
    assert (error["code"], error["message"]) == (INVALID_REQUEST, "unexpected notification method: no/such")
    witnessed.unharmed()


@pytest.mark.parametrize("transport", ["websocket", "stdio"])
def test_a_flood_of_nonsense(standing: Callable[[str], Witnessed], transport: str) -> None:
    witnessed = standing(transport)
    for _ in range(500):
        witnessed.peer.send_raw("{")
        witnessed.peer.send_raw('{"id":1,"method":"no/such"}')
    for _ in range(500):
        assert witnessed.peer.answer(-1)["error"]["code"] == INVALID_REQUEST
        assert witnessed.peer.answer(1)["error"]["code"] == NO_METHOD
    witnessed.unharmed()


# What ends a connection: silently, and without losing the session ----------------------------------

ENDING = {
    "a frame of 100 MB": frame(TEXT, b"x" * 1000, length=100 * MIB),
    "a frame of a byte too many": frame(TEXT, b"x", length=16 * MIB + 1),
    "text that is not UTF-8": frame(TEXT, b'{"id":1,"method":"\xff"}'),
    "a frame that is not masked": frame(TEXT, b'{"id":1,"method":"m"}', masked=False),
    "reserved bits": frame(TEXT, b'{"id":1,"method":"m"}', rsv=4),
    "a reserved opcode": frame(5, b"x"),
    "a continuation of nothing": frame(0, b"x"),
    "an answer nobody asked for": frame(TEXT, b'{"id":1,"result":{}}'),
    "an error nobody asked for": frame(TEXT, b'{"id":1,"error":{"code":1,"message":"x"}}'),
}


@pytest.mark.parametrize("name", ENDING)
def test_a_websocket_that_ends(
    server: RunningServer, connect: Callable[..., WebSocketPeer], name: str, tmp_path: Any
) -> None:
    def ask(raw: RawSocket, request_id: int, method: str, params: Any) -> Any:
        raw.send(frame(TEXT, json.dumps({"id": request_id, "method": method, "params": params}).encode()))
        while (message := raw.message()).get("id") != request_id:
            pass
        return message["result"]

    with RawSocket(server.url) as raw:
        raw.upgrade()
        session = ask(raw, 1, "initialize", {"clientName": "x"})["sessionId"]
        raw.send(frame(TEXT, b'{"method":"initialized"}'))
        start = {**START, "argv": ["/bin/cat"], "pipeStdin": True, "processId": "witness"}
        ask(raw, 2, "process/start", start)
        ask(raw, 3, "process/write", {"processId": "witness", "chunk": b64(b"before"), "writeId": "w"})
        touch = {**START, "argv": ["/bin/touch", str(tmp_path / "file")], "processId": "touch"}
        follows = json.dumps({"id": 9, "method": "process/start", "params": touch}).encode()
        raw.send(ENDING[name] + frame(TEXT, follows))
        while (got := raw.receive()) is not None:
            assert got.opcode != BINARY
            assert b'"id":9' not in got.payload
            assert b'"error"' not in got.payload
    peer = connect()

    def resumed() -> bool:
        params = {"clientName": "x", "resumeSessionId": session}
        return "result" in peer.answer(peer.request("initialize", params))

    eventually(resumed, "the session being free")
    peer.notify("initialized")
    assert peer.write("witness", b"before", writeId="w") == "accepted"  # applied already
    assert peer.write("witness", b" and after", writeId="x") == "accepted"
    assert peer.close_stdin("witness") == "accepted"
    peer.call("process/wait", {"processId": "witness", "waitMs": 20_000})
    chunks = peer.read("witness")["chunks"]
    assert b"".join(unb64(chunk["chunk"]) for chunk in chunks) == b"before and after"
    assert not os.path.exists(tmp_path / "file")


LAST_LINES = {
    "a line of 100 MB": b'{"id":1,"method":"' + b"x" * (100 * MIB) + b'"}',
    "a line that is not UTF-8": b'{"id":1,"method":"\xff"}',
    "an answer nobody asked for": b'{"id":1,"result":{}}',
}


@pytest.mark.parametrize("name", LAST_LINES)
def test_a_stdio_server_that_ends(start_stdio: Callable[..., StdioPeer], name: str, tmp_path: Any) -> None:
    peer = start_stdio()
    peer.initialize()
    peer.start("sleep", sleep_forever())
    touch = {**START, "argv": ["/bin/touch", str(tmp_path / "file")], "processId": "touch"}
    follows = json.dumps({"id": 9, "method": "process/start", "params": touch}).encode()
    try:
        peer.send_bytes(LAST_LINES[name] + b"\n" + follows + b"\n")
    except BrokenPipeError:
        pass  # it did not wait for the end of it
    assert peer.ended()
    assert peer.process.wait(20) == 0
    assert not peer.answers[9]
    assert not os.path.exists(tmp_path / "file")
