"""local/sandbox/landlock.py: which rules a plan becomes, and which plans become none."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.local.sandbox import landlock
from exec_server.local.sandbox.landlock import Inexpressible
from exec_server.local.sandbox.plan import Plan, covers

pytestmark = pytest.mark.skipif(landlock.abi() < landlock.MINIMUM_ABI, reason="this kernel has no Landlock")


def plan(**more: Any) -> Plan:
    return Plan(kind="view", network=more.pop("network", "closed"), **more)


# Which plans -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "what",
    [
        {"readable": (b"/",)},
        {"readable": (b"/usr", b"/etc")},
        {"readable": (b"/",), "writable": (b"/w",)},
        {"readable": (b"/usr",), "denied": (b"/home",)},
        {"writable": (b"/",)},
        {"readable": (b"/",), "writable": (b"/w",), "network": "open"},
    ],
)
def test_what_only_adds(what: dict[str, Any]) -> None:
    rules = {rule.path: rule.rights for rule in landlock.grants(plan(**what))}
    for path in what.get("readable", ()):
        assert rules[path] == landlock.READ
    for path in what.get("writable", ()):
        assert rules[path] == -1
    assert b"/home" not in rules


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ({"readable": (b"/",), "denied": (b"/home",)}, "/home must be unreadable"),
        (
            {"readable": (b"/",), "writable": (b"/w",), "read_only": (b"/w/.git",)},
            "/w/.git must be read-only",
        ),
        ({"writable": (b"/w",), "denied": (b"/w/x",)}, "/w/x must be unreadable"),
        ({"writable": (b"/w",), "readable": (b"/w/x",)}, "/w/x must be read-only"),
        ({"readable": (b"/",), "network": "proxy"}, "proxies"),
    ],
)
def test_what_takes_away_is_refused(what: dict[str, Any], words: str) -> None:
    with pytest.raises(Inexpressible, match=words):
        landlock.grants(plan(**what))


PATHS = [b"/", b"/a", b"/a/b", b"/a/b/c", b"/a/d", b"/e", b"/e/f"]
STRENGTH = {"none": 0, "read": 1, "write": 2}


@given(st.dictionaries(st.sampled_from(PATHS), st.sampled_from(["readable", "writable", "denied"])))
def test_rules_give_what_the_plan_allows_and_nothing_else(rules: dict[bytes, str]) -> None:
    """Either there are no rules for a plan, or they add up to exactly it, wherever one looks."""
    kinds = ("readable", "writable", "denied")
    what = plan(**{kind: tuple(path for path, found in rules.items() if found == kind) for kind in kinds})
    looked_at = [*PATHS, b"/a/b/x", b"/a/x", b"/x", b"/e/f/x"]

    def added_up(path: bytes) -> int:
        """The most that anything above gives."""
        above = [rules[root] for root in rules if covers(root, path)]
        return max([{"readable": 1, "writable": 2, "denied": 0}[kind] for kind in above], default=0)

    try:
        made = {rule.path: 2 if rule.rights == -1 else 1 for rule in landlock.grants(what)}
    except Inexpressible:
        assert any(added_up(path) > STRENGTH[what.access(path)] for path in looked_at)
        return
    for path in looked_at:
        got = max([strength for root, strength in made.items() if covers(root, path)], default=0)
        assert got == STRENGTH[what.access(path)]
