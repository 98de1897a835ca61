"""wire/envelope.py: which messages may be read, and as what."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exec_server.wire import base64, envelope
from exec_server.wire.envelope import (
    Encoded,
    Failure,
    Malformed,
    Notification,
    Request,
    Success,
    encode_error,
    encode_notification,
    encode_request,
    encode_result,
    malformed_error,
    parse,
)
from exec_server.wire.errors import RpcError

MAX_VALUES = 262_144
MAX_DEPTH = 127

request_ids = st.integers(-(2**63), 2**63 - 1) | st.text()
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.sampled_from(['":', '","', "{[", "]}", "\\", '\\"', ' :"', "a:b", "\u2028"])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | scalars.map(str), inner),
    max_leaves=20,
)


# Reading back what was written -------------------------------------------------------------------


@given(request_ids, st.text(), values)
def test_requests_survive(request_id: Any, method: str, params: Any) -> None:
    assert parse(encode_request(request_id, method, params)) == Request(request_id, method, params)


@given(st.text(), values)
def test_notifications_survive(method: str, params: Any) -> None:
    assert parse(encode_notification(method, params)) == Notification(method, params)


@given(request_ids, values)
def test_results_survive(request_id: Any, result: Any) -> None:
    assert parse(encode_result(request_id, result)) == Success(request_id, result)


@given(request_ids, st.integers(-(2**63), 2**63 - 1), st.text(), values)
def test_errors_survive(request_id: Any, code: int, message: str, data: Any) -> None:
    failure = parse(encode_error(request_id, RpcError(code, message, data)))
    assert isinstance(failure, Failure)
    error = failure.error
    assert (failure.id, error.code, error.message, error.data) == (request_id, code, message, data)


def test_what_is_written_is_compact_json_in_the_order_of_the_reference() -> None:
    assert encode_request(1, "m", None) == b'{"id":1,"method":"m","params":null}'
    assert encode_notification("m", {"a": "ü"}) == '{"method":"m","params":{"a":"ü"}}'.encode()
    assert encode_result("x", {}) == b'{"id":"x","result":{}}'
    assert encode_error(-1, RpcError(-32600, "no")) == b'{"error":{"code":-32600,"message":"no"},"id":-1}'


# Agreement with another decoder ------------------------------------------------------------------


class Pairs(list[tuple[str, Any]]):
    """An object whose keys may repeat."""


@st.composite
def spelled(draw: st.DrawFn, value: Any) -> str:
    """JSON text of a value, in one of its many spellings."""
    blank = st.sampled_from(["", "", " ", "\n", "\t\r "])

    def string(text: str) -> str:
        out = []
        for char in text:
            how = draw(st.integers(0, 3))
            if how == 0:
                units = char.encode("utf-16-be")
                out.extend(f"\\u{units[i]:02x}{units[i + 1]:02X}" for i in range(0, len(units), 2))
            else:
                out.append(json.dumps(char, ensure_ascii=how == 1)[1:-1])
        return '"' + "".join(out) + '"'

    def spell(value: Any) -> str:
        before, after = draw(blank), draw(blank)
        if isinstance(value, Pairs):
            members = (f"{draw(blank)}{string(k)}{draw(blank)}:{spell(v)}" for k, v in value)
            text = "{" + ",".join(members) + draw(blank) + "}"
        elif isinstance(value, list):
            text = "[" + ",".join(map(spell, value)) + draw(blank) + "]"
        elif isinstance(value, str):
            text = string(value)
        else:
            text = json.dumps(value)
        return before + text + after

    return spell(value)


keys = st.text(max_size=4) | st.sampled_from(["a", "b", 'x":', "{", "\U0001f600", "ü"])
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(lambda members: Pairs(members.items()))
    ),
    max_leaves=12,
)


def plain(value: Any) -> Any:
    if isinstance(value, Pairs):
        return {key: plain(member) for key, member in value}
    return [plain(entry) for entry in value] if isinstance(value, list) else value


@given(st.data(), trees)
def test_agrees_with_json_on_every_spelling(data: st.DataObject, params: Any) -> None:
    text = data.draw(spelled(Pairs([("id", 1), ("method", "m"), ("params", params)])))
    assert json.loads(text)["params"] == plain(params)
    assert parse(text.encode()) == Request(1, "m", plain(params))
    assert parse(text) == Request(1, "m", plain(params))


def objects(value: Any) -> list[Pairs]:
    if isinstance(value, Pairs):
        return [value, *(found for _, member in value for found in objects(member))]
    return [found for entry in value for found in objects(entry)] if isinstance(value, list) else []


@given(st.data(), trees)
def test_duplicate_keys_are_found_at_any_depth_in_any_spelling(data: st.DataObject, params: Any) -> None:
    message = Pairs([("id", 1), ("method", "m"), ("params", params)])
    chosen = data.draw(st.sampled_from([found for found in objects(message) if found]))
    key = data.draw(st.sampled_from([key for key, _ in chosen]))
    chosen.insert(data.draw(st.integers(0, len(chosen))), (key, data.draw(scalars)))
    with pytest.raises(Malformed, match="duplicate JSON object key"):
        parse(data.draw(spelled(message)).encode())


SAMPLES = [
    b'{"id":1,"method":"process/read","params":{"processId":"p","afterSeq":0,"maxBytes":null}}',
    b'{"method":"initialized","params":{}}',
    b'{"id":"x","result":[1,2.5e3,{"a":"\\u00fc\\ud83d\\ude00"}]}',
    b'{"error":{"code":-32600,"message":"no"},"id":-1}',
]


def agrees(raw: bytes) -> None:
    """Either both decoders read the same, or ours refuses."""
    try:
        message = parse(raw)
    except Malformed:
        return
    value = json.loads(raw.decode(), parse_constant=lambda name: pytest.fail(f"{name} was accepted"))
    assert isinstance(value, dict)
    if isinstance(message, Request | Notification):
        assert message.params == value.get("params")
        assert message.method == value["method"]
    elif isinstance(message, Success):
        assert message.result == value["result"]
    if not isinstance(message, Notification):
        assert message.id == value["id"]


@given(st.binary())
@example(b"\xef\xbb\xbf{}")
@example(b"[" * 100_000)
@example(b'{"a":' * 100_000)
@example(b'"\\ud800"')
def test_arbitrary_bytes_are_refused_and_nothing_else(raw: bytes) -> None:
    agrees(raw)


@given(st.sampled_from(SAMPLES), st.data())
def test_damaged_messages_are_refused_or_mean_what_they_say(sample: bytes, data: st.DataObject) -> None:
    raw = bytearray(sample)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw)))
        match data.draw(st.sampled_from(["insert", "delete", "replace"])):
            case "insert":
                raw[at:at] = data.draw(st.binary(min_size=1, max_size=3))
            case "delete":
                del raw[at : at + data.draw(st.integers(1, 4))]
            case "replace":
                raw[at : at + 1] = data.draw(
                    st.sampled_from(list(b'{}[]",:\\u0e.- \n')).map(lambda b: bytes([b]))
                )
    agrees(bytes(raw))


# Limits, exactly ---------------------------------------------------------------------------------


def in_array(count: int) -> str:
    return "[" + ",".join(["0"] * count) + "]"


def in_object(count: int) -> str:
    return "{" + ",".join(f'"{number}":0' for number in range(count)) + "}"


def in_empty_arrays(count: int) -> str:
    return "[" + ",".join(["[]"] * count) + "]"


def in_strings_full_of_marks(count: int) -> str:
    return "[" + ",".join(['"[,{,:\\""'] * count) + "]"


@pytest.mark.parametrize("fill", [in_array, in_object, in_empty_arrays, in_strings_full_of_marks])
def test_the_number_of_values_is_bounded_exactly(fill: Any) -> None:
    # The root, the id, the method and the container itself are values too.
    message = '{"id":1,"method":"m","params":%s}'
    parse(message % fill(MAX_VALUES - 4))
    with pytest.raises(Malformed, match="exceeds the limit of 262144 JSON values"):
        parse(message % fill(MAX_VALUES - 3))


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('[{"b":', "}]")])
def test_depth_is_bounded_exactly(opening: str, closing: str) -> None:
    each = opening.count("[") + opening.count("{")
    allowed = (MAX_DEPTH - 1) // each
    message = '{"id":1,"method":"m","params":%s}'
    parse(message % (opening * allowed + "0" + closing * allowed))
    with pytest.raises(Malformed, match="recursion limit exceeded"):
        parse(message % (opening * (allowed + 1) + "0" + closing * (allowed + 1)))


def test_brackets_in_strings_are_not_depth() -> None:
    assert parse(json.dumps({"method": "m", "params": "[{" * 1000})) == Notification("m", "[{" * 1000)


def test_many_shallow_containers_are_not_depth() -> None:
    assert parse(json.dumps({"method": "m", "params": [[]] * 1000})) == Notification("m", [[]] * 1000)


# Kinds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"id":1,"method":"m"}', Request(1, "m", None)),
        ('{"id":1,"method":"m","params":[],"jsonrpc":7,"extra":{}}', Request(1, "m", [])),
        ('{"id":"","method":""}', Request("", "")),
        ('{"id":-9223372036854775808,"method":"m"}', Request(-(2**63), "m")),
        ('{"id":1,"method":"m","result":1,"error":2}', Request(1, "m")),
        ('{"id":1,"method":"m","trace":null}', Request(1, "m")),
        ('{"id":1,"method":"m","trace":{}}', Request(1, "m")),
        ('{"id":1,"method":"m","trace":{"traceparent":"x","tracestate":null,"more":1}}', Request(1, "m")),
        ('{"method":"m","trace":[]}', Notification("m")),
        ('{"method":"m","result":1}', Notification("m")),
        ('{"id":1,"result":null}', Success(1, None)),
        ('{"id":1,"result":1,"error":5}', Success(1, 1)),
        (' \n{"method":"m"}\t\r', Notification("m")),
    ],
)
def test_what_a_message_is(text: str, expected: Any) -> None:
    assert parse(text.encode()) == expected
    assert parse(memoryview(text.encode())) == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", ""),
        ("   ", ""),
        ("nonsense", ""),
        ('{"id":1,"method":"m"', ""),
        ('{"id":1,"method":"m"}{}', ""),
        ('{"id":1,"method":"m",}', ""),
        ("[]", "expected a JSON-RPC object"),
        ('[{"id":1,"method":"m"}]', "expected a JSON-RPC object"),
        ("1", "expected a JSON-RPC object"),
        ("null", "expected a JSON-RPC object"),
        ('"text"', "expected a JSON-RPC object"),
        ("{}", "missing field `error`"),
        ('{"id":1}', "missing field `error`"),
        ('{"result":1}', "missing field `id`"),
        ('{"error":{"code":1,"message":"m"}}', "missing field `id`"),
        ('{"id":1,"error":{}}', "missing field `code`"),
        ('{"id":1,"error":{"code":1}}', "missing field `message`"),
        ('{"id":1,"error":{"code":1.0,"message":"m"}}', "code"),
        ('{"id":1,"error":{"code":"1","message":"m"}}', "code"),
        ('{"id":1,"error":{"code":9223372036854775808,"message":"m"}}', "code"),
        ('{"id":1,"error":null}', "error"),
        ('{"id":null,"method":"m"}', "RequestId"),
        ('{"id":true,"method":"m"}', "RequestId"),
        ('{"id":[],"method":"m"}', "RequestId"),
        ('{"id":{},"method":"m"}', "RequestId"),
        ('{"id":1.0,"method":"m"}', "RequestId"),
        ('{"id":1e0,"method":"m"}', "RequestId"),
        ('{"id":9223372036854775808,"method":"m"}', "RequestId"),
        ('{"id":-9223372036854775809,"method":"m"}', "RequestId"),
        ('{"id":null,"result":1}', "RequestId"),
        ('{"id":1,"method":5}', "method"),
        ('{"id":1,"method":null,"result":1}', "method"),
        ('{"id":1,"method":"m","trace":[]}', "W3cTraceContext"),
        ('{"id":1,"method":"m","trace":"t"}', "W3cTraceContext"),
        ('{"id":1,"method":"m","trace":{"traceparent":5}}', "W3cTraceContext"),
        ('{"id":1,"method":"m","params":NaN}', ""),
        ('{"id":1,"method":"m","params":Infinity}', ""),
        ('{"id":1,"method":"m","params":01}', ""),
        ('{"id":1,"method":"m","params":.5}', ""),
        ('{"id":1,"method":"m","params":"\\ud800"}', ""),
        ('{"id":1,"method":"m","params":"\\ude00\\ud83d"}', ""),
        ('{"id":1,"method":"m","params":"\\x41"}', ""),
        ('{"id":1,"method":"m","params":"\x01"}', ""),
        ("\ufeff{}", ""),
    ],
)
def test_what_is_no_message(text: str, why: str) -> None:
    with pytest.raises(Malformed) as refusal:
        parse(text.encode())
    assert why in str(refusal.value)


@pytest.mark.parametrize(
    "raw", [b'{"method":"\xff"}', b'{"\xc3":1,"method":"m"}', b'{"method":"\xed\xa0\x80"}']
)
def test_what_is_not_utf8_is_no_message(raw: bytes) -> None:
    with pytest.raises(Malformed):
        parse(raw)


def test_the_peer_is_told_where_the_message_came_from() -> None:
    error = malformed_error("failed to parse", Malformed("expected value"))
    assert (error.code, error.message) == (-32600, "failed to parse: expected value")


# Large contents ----------------------------------------------------------------------------------


def outcome(parser: Callable[[bytes], Any], data: bytes) -> Any:
    """The message, or what is wrong with it."""
    try:
        return parser(data)
    except Malformed as error:
        return str(error)


def same(data: bytes) -> bool:
    """A message is read as it would be without a special way for contents; whether it went that way."""
    expected, found = outcome(envelope._parse, data), outcome(parse, data)
    if not isinstance(found, Request) or not isinstance(found.params, dict):
        assert found == expected
        return False
    decoded = {key: value for key, value in found.params.items() if type(value) is bytes}
    texts = {key: base64.encode(value) for key, value in decoded.items()}
    assert Request(found.id, found.method, {**found.params, **texts}) == expected
    assert list(found.params) == list(expected.params)  # the first bad one is the one that is reported
    return bool(decoded)


LARGE = base64.encode(bytes(range(256)) * 100)

contents = st.binary(max_size=8).map(lambda seed: base64.encode(seed * 4096)) | st.sampled_from(
    [LARGE, LARGE[:-1], LARGE + "=", LARGE + "\n", LARGE + "é", "(content)", "", LARGE.lower()]
)
names = st.sampled_from(["chunk", "dataBase64", "path", "offset", 'a"chunk', "\u0063hunk", "trace"])
members = st.dictionaries(
    names, contents | st.sampled_from(["file:///x", "(content)", "\\", 7, None]), max_size=4
)
methods = st.sampled_from(["fs/writeFile", "fs/writeBlock", "process/write", "fs/write\u0042lock"])


@given(st.data(), methods, members, members | st.none())
def test_contents_are_read_as_they_would_be(data: Any, method: str, params: Any, trace: Any) -> None:
    message: dict[str, Any] = {"id": 1, "method": method, "params": params}
    if trace is not None:
        message["trace"] = trace
    order = data.draw(st.permutations(list(message)))
    escape, separators = data.draw(st.booleans()), data.draw(st.sampled_from([(",", ":"), (", ", ": ")]))
    text = json.dumps({key: message[key] for key in order}, ensure_ascii=escape, separators=separators)
    same(text.encode())


@given(st.data(), st.sampled_from(["fs/writeFile", "fs/writeBlock"]))
def test_damaged_contents_are_read_as_they_would_be(data: Any, method: str) -> None:
    name = "dataBase64" if method == "fs/writeFile" else "chunk"
    message = bytearray(encode_request(5, method, {"path": "file:///x", name: LARGE, "offset": 0}))
    around = [at for at in range(len(message)) if at < 100 or at > len(message) - 60] + [len(message) // 2]
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.sampled_from(around))
        piece = data.draw(
            st.binary(max_size=2)
            | st.sampled_from(
                [b'"', b"\\", b",", b"{", b"}", b'"chunk":"', b'","chunk":"A', b"(content)", b"="]
            )
        )
        message[at : at + data.draw(st.integers(0, 2))] = piece
    same(bytes(message))


@pytest.mark.parametrize(("method", "name"), [("fs/writeFile", "dataBase64"), ("fs/writeBlock", "chunk")])
def test_large_contents_are_decoded(method: str, name: str) -> None:
    assert same(encode_request(5, method, {"path": "file:///x", name: LARGE}))
    assert same(encode_request("(content", method, {name: LARGE, "path": "file:///x"}))


@pytest.mark.parametrize(
    "text",
    [
        f'{{"id":1,"method":"process/write","params":{{"chunk":"{LARGE}"}}}}',
        f'{{"id":1,"method":"fs/writeFile","params":{{"chunk":"{LARGE}"}}}}',
        f'{{"id":1,"method":"fs/writeBlock","params":{{"chunk":""}},"trace":{{"chunk":"{LARGE}"}}}}',
        f'{{"id":1,"method":"fs/writeBlock","params":{{"chunk":"(content)"}},"x":{{"chunk":"{LARGE}"}}}}',
        f'{{"id":1,"method":"fs/writeBlock","params":{{"chunk":"{LARGE}","chunk":"QQ=="}}}}',
        f'{{"id":1,"method":"fs/writeBlock","params":{{"chunk":"{LARGE}","a":{{"b":1,"b":2}}}}}}',
        f'{{"id":1,"method":"fs/writeBlock","params":{{"a\\"chunk":"{LARGE}"}}}}',
        f'{{"id":1,"method":"fs/writeBlock","params":["chunk","{LARGE}"]}}',
        f'{{"method":"fs/writeBlock","params":{{"chunk":"{LARGE}"}}}}',
        f'{{"id":1,"method":"fs/writeBlock","params":{{"chunk":"{LARGE}"}}',
        f'{{"id":1,"method":"fs/writeBlock","params":{{"chunk":"{LARGE}"}}}}x',
        f'{{"id":1,"method":"fs/writeBlock","params":{{"chunk":"{LARGE}\t"}}}}',
        f'{{"id":1,"method":"fs/writeBlock","params":{{"chunk":"{LARGE}',
    ],
)
def test_what_is_no_large_content_is_read_the_general_way(text: str) -> None:
    assert not same(text.encode())


def test_encoded_results() -> None:
    assert bytes(Encoded(b"[", b"1", b"]")) == b"[1]"
