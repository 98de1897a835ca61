"""Patches that are typed as a command, and commands that are more than that."""

from __future__ import annotations

import pytest

from exec_server.agent.patch import PatchError
from exec_server.agent.typed import typed_patch


def body(*lines: str) -> str:
    return "\n".join(["*** Begin Patch", *lines, "*** End Patch"])


@pytest.mark.parametrize(
    ("cmd", "directory"),
    [
        ("apply_patch <<'EOF'\nPATCH\nEOF", None),
        ('  applypatch << "E"\nPATCH\nE\n', None),
        ("apply_patch <<EOF\nPATCH\nEOF\n\n", None),
        ("cd sub/dir && apply_patch <<'EOF'\nPATCH\nEOF", "sub/dir"),
        ("cd 'sub' && apply_patch <<'EOF'\nPATCH\nEOF", "sub"),
        ("cd 's u$b' && apply_patch <<'EOF'\nPATCH\nEOF", "s u$b"),
        ('cd "it\'s here" && apply_patch <<EOF\nPATCH\nEOF', "it's here"),
        ("apply_patch <<-'EOF'\nPATCH\nEOF", None),
        ("apply_patch <<-'EOF'\n\tPATCH\n\t\tEOF", None),
        ("apply_patch <<'EOF'\nPATCH\nEOF 2>&1", None),
        ("apply_patch <<'EOF'\nPATCH\n EOF\n", None),
    ],
)
def test_a_typed_patch(cmd: str, directory: str | None) -> None:
    found = typed_patch(cmd)
    assert found is not None
    assert (found.text, found.directory) == ("PATCH", directory)


@pytest.mark.parametrize(
    "cmd",
    [
        "apply_patch",
        "apply_patch '*** Begin Patch'",
        "apply_patch <<'EOF'\nPATCH\nEOF\necho after",
        "apply_patch <<'EOF'\nPATCH\nEOF\nrm x\nEOF",
        "echo; apply_patch <<'EOF'\nPATCH\nEOF",
        "cd $(pwd) && apply_patch <<'EOF'\nPATCH\nEOF",
        "cd \"$HOME\" && apply_patch <<'EOF'\nPATCH\nEOF",
        "cd '' && apply_patch <<'EOF'\nPATCH\nEOF",
        "apply_patch <<-'EOF'\nPATCH\n\tEOF\nrm x\nEOF",
        "apply_patch <<'EOF'\nPATCH\nEOF 2>&1\nrm x",
        "apply_patch <<'EOF'\nPATCH\nEOF foo",
        "cat <<'EOF'\nPATCH\nEOF",
    ],
)
def test_a_command_that_does_more_is_a_command(cmd: str) -> None:
    assert typed_patch(cmd) is None


def test_a_typed_patch_may_be_about_such_a_command() -> None:
    text = body("*** Update File: install.sh", "@@", " cat <<EOF", "-old", "+new", " EOF")
    found = typed_patch(f"apply_patch <<'EOF'\n{text}\nEOF")
    assert found is not None
    assert found.text == text


def test_a_patch_that_is_not_called() -> None:
    with pytest.raises(PatchError, match="patch detected without explicit call to apply_patch"):
        typed_patch(body("*** Add File: x", "+x"))
