"""The model's markdown without HTML and images, judged by a real parser of markdown."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from exec_server.events.markdown_text import tamed

PIECES = [
    *(
        "<img src=x>",
        "<b>",
        "<!-- ",
        "-->",
        "![p](http://x/y.png)",
        "![p][r]",
        "<script>",
        "</script>",
        "<x@y.z>",
    ),
    *(
        "`",
        "``",
        "```",
        "````",
        "~~~",
        "\\",
        "|",
        "|-|-|",
        "- ",
        "1. ",
        "> ",
        "# ",
        "[r]: http://x",
        "=",
        "---",
    ),
    *("\n", "\n\n", "\n    ", "\n  ", "\n\t", "\n   ", " ", "a", "\u00a0", "[l](http://x)", "*", "&lt;"),
]


def kinds(text: str) -> set[str]:
    """Every kind of token a parser finds, in the text as a quotation as well as by itself."""
    parser = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    found: set[str] = set()
    for shown in (text, "\n".join(f"> {line}" for line in text.split("\n"))):
        for token in parser.parse(shown):
            found.add(token.type)
            found.update(child.type for child in token.children or ())
    return found


@settings(max_examples=400)
@given(st.lists(st.sampled_from(PIECES), max_size=25).map("".join))
@example("`\n\u00a0\n` <img src=x> `")
@example("- ```\n  a\n  ```\n<img src=x>\n```\n")
@example("- a\n  ```\n<img src=x>\n")
@example("| a | b |\n|-|-|\n| ` | <img src=x> ` |")
@example("\\<img src=x>")
def test_nobody_finds_html_or_an_image(text: str) -> None:
    assert not kinds(tamed(text)) & {"html_block", "html_inline", "image"}
    assert tamed(text).count("\n") == text.count("\n")


@pytest.mark.parametrize(
    "text",
    [
        "# Done\n\n- `Vec<u8>` is **used**, see [the docs](https://example.com)\n",
        "```cpp\n#include <vector>\n![not an image](x)\n```\n\n1 > 0",
        "1. first\n   ```html\n   <b>bold</b>\n   ```\n2. `<i>`",
        "~~~\n<a>\n```\n<b>\n~~~",
    ],
)
def test_code_and_everything_else_stays(text: str) -> None:
    assert tamed(text) == text


def test_what_is_shown_in_its_place() -> None:
    assert tamed("<img src=x> ![p](http://evil/x.png) `<ok>`") == (
        "&lt;img src=x> !\\[p](http://evil/x.png) `<ok>`"
    )
