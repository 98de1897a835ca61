"""Patterns to deny, as the reference understands them (observed on it)."""

from __future__ import annotations

import pytest

from exec_server.local.sandbox.globs import MAX_MATCHES, expand
from exec_server.local.sandbox.plan import PlanError
from support.tree import Tree

FILES = (
    "priv1/f",
    "priv1/d/f2",
    "x/a.env",
    "x/b.env",
    "x/é",
    ".hid/c.env",
    "aa",
    "[x",
    ".gitignore",
    "{odd,name}",
)
TREE = Tree({f"/g/{name}": b"x" for name in FILES} | {"/g/link.env": "x/a.env", "/g/away": "/elsewhere"})
ALL = sorted([*FILES, "link.env", "away"])


def matches(pattern: str, depth: int | None = None) -> list[str]:
    return sorted(path.decode().removeprefix("/g/") for path in expand((pattern.encode(),), depth, TREE))


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("/g/**", ALL),
        ("/g/**/*", ALL),
        ("/g/*", [".gitignore", "[x", "aa", "away", "link.env", "{odd,name}"]),
        ("/g/pri*", []),  # directories are not files
        ("/g/pri*/*", ["priv1/f"]),
        ("/g/**/*.env", [".hid/c.env", "link.env", "x/a.env", "x/b.env"]),
        ("/g/**/x/**/*.env", ["x/a.env", "x/b.env"]),
        ("/g/x/**/a.env", ["x/a.env"]),
        ("/g/[x", ["[x"]),
        ("/g/[a]*", ["aa", "away"]),
        ("/g/[!a]*", [".gitignore", "[x", "link.env", "{odd,name}"]),
        ("/g/[^a]*", [".gitignore", "[x", "link.env", "{odd,name}"]),
        ("/g/x/?.env", ["x/a.env", "x/b.env"]),
        ("/g/x/[a-b].env", ["x/a.env", "x/b.env"]),
        ("/g/x/[a-", []),
        ("/g/x/?", ["x/é"]),
        ("/g/x/*.ENV", []),
        ("/g/**f", []),  # two stars inside of a name are one
        ("/g/a**", ["aa", "away"]),
        ("/missing/*", []),
        ("/g/x/{a,b}.env", ["x/a.env", "x/b.env"]),
        ("/g/**/*.{env,pem}", [".hid/c.env", "link.env", "x/a.env", "x/b.env"]),
        ("/g/{x,.hid}/{a,c}.env", [".hid/c.env", "x/a.env"]),
        ("/g/{x/{a,b},.hid/c}.env", [".hid/c.env", "x/a.env", "x/b.env"]),
        ("/g/{a,b", []),
        ("/g/{odd,name}", ["{odd,name}"]),
    ],
)
def test_matches(pattern: str, found: list[str]) -> None:
    assert matches(pattern) == found


def test_depth() -> None:
    assert matches("/g/**/*.env", 1) == ["link.env"]
    assert matches("/g/**/*.env", 2) == [".hid/c.env", "link.env", "x/a.env", "x/b.env"]
    assert "priv1/d/f2" not in matches("/g/**", 2)


@pytest.mark.parametrize("pattern", ["/**/*.env", "/*", "/n*/x", "/g/x/a.env", "/"])
def test_what_cannot_be_looked_up(pattern: str) -> None:
    advice = "use a pattern with a non-root directory prefix"
    with pytest.raises(PlanError) as caught:
        matches(pattern)
    assert str(caught.value) == f"unreadable glob `{pattern}` cannot be safely expanded; {advice}"


def test_too_many_alternatives() -> None:
    with pytest.raises(PlanError, match="more than 256 alternatives"):
        matches("/g/" + "{a,b}" * 9)


def test_too_many() -> None:
    some = Tree({f"/d/{number}": b"" for number in range(MAX_MATCHES + 1)})
    with pytest.raises(PlanError, match=str(MAX_MATCHES)):
        expand((b"/d/*",), None, some)
    del some.nodes[b"/d/0"]
    assert len(expand((b"/d/*",), None, some)) == MAX_MATCHES


def test_names_that_are_not_text() -> None:
    tree = Tree({})
    tree.nodes |= {b"/d": None, b"/d/\xff.env": b"", b"/d/\xff": b""}
    assert expand((b"/d/*.env",), None, tree) == [b"/d/\xff.env"]
    assert expand((b"/d/?",), None, tree) == [b"/d/\xff"]
