"""The reference's client edits files through the server under test: `apply_patch` is all `fs/*` calls."""

from __future__ import annotations

from pathlib import Path

from compliance.harness import Codex
from compliance.model import apply_patch
from compliance.proxy import Proxy
from compliance.server import Server

METHOD_NOT_FOUND = -32601
"""JSON-RPC's code for a method the server does not have."""

PATCH = """\
*** Begin Patch
*** Add File: added.txt
+new
*** Update File: changed.txt
@@
 one
-two
+TWO
 three
*** Delete File: deleted.txt
*** End Patch"""


def test_apply_patch(codex: Codex, server: Server, workspace: Path) -> None:
    (workspace / "changed.txt").write_text("one\ntwo\nthree\n")
    (workspace / "deleted.txt").write_text("old\n")
    with Proxy(server.url) as proxy:
        run = codex.run([apply_patch(PATCH), "done"], url=proxy.url)

    replies = [proxy.reply_to(m) or {} for m in proxy.messages if str(m.method).startswith("fs/")]
    assert replies, "the patch went through the server's file methods"
    assert not [reply for reply in replies if reply.get("error", {}).get("code") == METHOD_NOT_FOUND]
    assert "Success. Updated the following files:" in run.results[0].text
    assert sorted(path.name for path in workspace.iterdir()) == ["added.txt", "changed.txt"]
    assert (workspace / "added.txt").read_text() == "new\n"
    assert (workspace / "changed.txt").read_text() == "one\nTWO\nthree\n"
    assert not proxy.sent("process/start")
