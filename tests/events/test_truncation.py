"""How output is cut, to the byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.events.truncation import PREFIX_BYTES, Truncation
from exec_server.events.wording import truncated

MARKER = "\n...(truncated)"


@pytest.mark.parametrize("char", ["x", "é", "€", "🎉"])
@pytest.mark.parametrize("size", [65_535, 65_536, 65_537, 65_538, 65_539, 200_000])
def test_the_documented_limit(char: str, size: int) -> None:
    width = len(char.encode())
    text = char * (size // width) + "y" * (size % width)
    cut = Truncation().cut(text)
    if size <= PREFIX_BYTES:
        assert cut == text
    else:
        assert cut.endswith(MARKER)
        assert len(cut.encode()) <= PREFIX_BYTES
        assert len(cut.encode()) > PREFIX_BYTES - width, "the longest beginning that fits"
        assert text.startswith(cut.removesuffix(MARKER))
        assert truncated(cut)
    assert not truncated(text)


def test_head_and_tail_as_the_reference_keeps_them() -> None:
    text = "a" * 600_000 + "b" * 600_000
    cut = Truncation("head-tail").cut(text)
    assert cut == "a" * 524_288 + f"\n... {1_200_000 - 1_048_576} bytes omitted ...\n" + "b" * 524_288
    assert truncated(cut)
    assert Truncation("head-tail").cut("a" * 1_048_576) == "a" * 1_048_576


@given(st.text(), st.integers(0, 60), st.sampled_from(["prefix", "head-tail"]))
def test_any_text_and_limit(text: str, limit: int, mode: str) -> None:
    cut = Truncation(mode, limit).cut(text)  # type: ignore[arg-type]
    size = len(text.encode("utf-8", "surrogatepass"))
    if size <= limit:
        assert cut == text
    elif mode == "prefix":
        assert len(cut.encode("utf-8", "surrogatepass")) <= limit
    else:
        head, _, rest = cut.partition("\n... ")
        if head and not head.isspace():
            assert text.startswith(head)
        assert "bytes omitted ...\n" in rest
