"""Plans as values: they can be asked, compared and printed."""

from __future__ import annotations

import msgspec
import pytest

from exec_server.local.sandbox.plan import (
    Bind,
    EmptyFile,
    Link,
    MountPoint,
    Plan,
    PrivateDevices,
    ReadOnly,
    Tmpfs,
    covers,
    depth,
)

PLAN = Plan(
    kind="view",
    network="closed",
    steps=(
        Bind(b"/", b"/"),
        PrivateDevices(),
        Bind(b"/w", b"/w", writable=True),
        Tmpfs(b"/w/.codex", 0o555),
        ReadOnly(b"/w/.codex"),
        EmptyFile(b"/w/secret", 0),
        EmptyFile(b"/w/missing"),
        Link(b"/bin", b"usr/bin"),
    ),
    created=(MountPoint(b"/w/.codex", True), MountPoint(b"/w/missing", False)),
    readable=(b"/",),
    writable=(b"/w", b"/w/deny/again"),
    read_only=(b"/w/.codex",),
    denied=(b"/w/deny", b"/w/missing", b"/w/secret"),
    cwd=b"/w",
)


@pytest.mark.parametrize(
    ("path", "access"),
    [
        (b"/", "read"),
        (b"/etc/passwd", "read"),
        (b"/w", "write"),
        (b"/w/x/y", "write"),
        (b"/wx", "read"),
        (b"/w/.codex", "read"),
        (b"/w/.codex/x", "read"),
        (b"/w/.codexx", "write"),
        (b"/w/secret", "none"),
        (b"/w/deny/x", "none"),
        (b"/w/deny/again", "write"),
        (b"/w/deny/again/x", "write"),
    ],
)
def test_access_is_what_the_nearest_rule_says(path: bytes, access: str) -> None:
    assert PLAN.access(path) == access


def test_what_no_rule_is_about_cannot_be_seen() -> None:
    assert Plan(kind="view", network="open", readable=(b"/usr",)).access(b"/etc") == "none"


def test_equal_plans_are_equal_values() -> None:
    again = msgspec.convert(msgspec.to_builtins(PLAN, builtin_types=(bytes,)), Plan)
    assert again == PLAN
    assert hash(again) == hash(PLAN)
    assert msgspec.structs.replace(PLAN, cwd=b"/") != PLAN


def test_for_who_only_reads_nothing_is_writable_and_only_what_is_denied_is_covered() -> None:
    reading = PLAN.for_reading()
    assert reading.created == (MountPoint(b"/w/missing", False),)
    assert reading.steps == (
        Bind(b"/", b"/"),
        PrivateDevices(),
        Bind(b"/w", b"/w"),
        EmptyFile(b"/w/secret", 0),
        EmptyFile(b"/w/missing"),
        Link(b"/bin", b"usr/bin"),
    )
    assert reading.writable == ()
    for path in (b"/", b"/w", b"/w/x", b"/w/.codex", b"/w/deny/again"):
        assert reading.access(path) == "read"
    for path in (b"/w/deny", b"/w/secret/x", b"/w/missing"):
        assert reading.access(path) == "none"
    assert reading.for_reading() is reading


def test_a_plan_can_be_read_by_people() -> None:
    text = str(PLAN)
    assert text.splitlines()[0] == "view, network closed, starts in /w"
    for line in (
        "bind read-only /",
        "private devices /dev",
        "bind /w",
        "empty directory /w/.codex mode 555",
        "seal /w/.codex",
        "empty file /w/secret mode 000",
        "empty file /w/missing",
        "link /bin to usr/bin",
        "comes to be: /w/.codex/",
        "comes to be: /w/missing",
        "read-only: /w/.codex",
        "denied: /w/deny, /w/missing, /w/secret",
    ):
        assert f"  {line}" in text.splitlines()


def test_names_that_are_not_text_are_printed_all_the_same() -> None:
    assert "\\xff" in str(Plan(kind="view", network="open", readable=(b"/\xff",)))


def test_paths() -> None:
    assert covers(b"/", b"/x")
    assert covers(b"/x", b"/x")
    assert covers(b"/x", b"/x/y")
    assert not covers(b"/x", b"/xy")
    assert [depth(path) for path in (b"/", b"/x", b"/x/y")] == [0, 1, 2]
