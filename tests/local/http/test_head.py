"""The head of an answer: however it is cut, the same goes on and the same is known of it."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from exec_server.local.http.head import MAX_HEADER_BYTES, Head

FIELDS = st.lists(
    st.sampled_from(
        [
            b"content-length: 2",
            b"Content-Length: 2",
            b"content-length: 3",
            b"content-length: two",
            b"transfer-encoding: chunked",
            b"x-a:  one ",
            b"x-b:",
            b"not a field",
            b" folded",
        ]
    ),
    max_size=6,
)
STATUS = st.sampled_from([b"HTTP/1.1 200 OK", b"HTTP/1.1 204 No Content", b"HTTP/1.0 304", b"HTTP/1.1 101 S"])
PROVISIONAL = st.sampled_from([b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"\r\n"])
REST = st.sampled_from([b"", b"body", b"\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n"])


def taken(pieces: list[bytes], *, body_expected: bool = True) -> tuple[bytes, bytes, Head]:
    """What goes on before the end of the head, what after, and what is known then."""
    head = Head(body_expected=body_expected)
    first, after = b"", b""
    for piece in pieces:
        if head.complete:
            after += piece
        else:
            one, other = head.feed(piece)
            first, after = first + one, after + other
    return first, after, head


@given(STATUS, FIELDS, PROVISIONAL, REST, st.lists(st.integers(0, 300)), st.booleans())
def test_where_it_is_cut_does_not_matter(
    status: bytes, fields: list[bytes], before: bytes, rest: bytes, cuts: list[int], body: bool
) -> None:
    data = before + b"\r\n".join([status, *fields, b"", b""]) + rest
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[start:end] for start, end in pairwise(bounds)]
    whole, whole_rest, whole_head = taken([data], body_expected=body)
    first, after, head = taken([piece for piece in pieces if piece], body_expected=body)
    assert (first, after) == (whole, whole_rest)
    assert head.headers == whole_head.headers
    assert head.complete
    assert head.refused == whole_head.refused == (b" folded" in fields)


@given(STATUS, FIELDS, REST)
def test_all_but_lengths_goes_on_as_it_is(status: bytes, fields: list[bytes], rest: bytes) -> None:
    fields = [field for field in fields if field != b" folded"]
    first, after, head = taken([b"\r\n".join([status, *fields, b"", b""]) + rest])
    plain = [field for field in fields if not field.lower().startswith(b"content-length")]
    lines = first.split(b"\r\n")
    assert [line for line in lines if not line.lower().startswith(b"content-length")] == [
        status,
        *plain,
        b"",
        b"",
    ]
    assert after == rest
    assert [name for name, _ in head.headers] == [field.partition(b":")[0] for field in fields]


def test_a_line_without_an_end_is_not_kept() -> None:
    head = Head()
    passed = head.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx: ")
    assert passed == (b"HTTP/1.1 200 OK\r\n", b"")
    first, rest = head.feed(b"v" * (MAX_HEADER_BYTES + 1))
    assert (first, len(rest), head.complete) == (b"content-length: 2\r\n", MAX_HEADER_BYTES + 4, True)
