"""Where a path of a call is, on which machine, and what may be touched there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from exec_server.agent.exec import ToolError
from exec_server.agent.machines import Machines
from exec_server.environments.connect import IN_PROCESS, connect
from exec_server.environments.manager import DISABLED_TEXT


def test_places(tmp_path: Path) -> None:
    async def main() -> None:
        async with connect(IN_PROCESS) as machine:
            machines = Machines({"here": machine}, {"here": f"file://{tmp_path}"}, mode="workspace-write")
            assert machines.primary == "here"
            assert machines.place(None, "here") == f"file://{tmp_path}"
            assert machines.place("a b/../c", "here") == f"file://{tmp_path}/c"
            assert machines.place("c", "here", f"file://{tmp_path}/sub") == f"file://{tmp_path}/sub/c"
            assert machines.place("/etc", "here") == "file:///etc"
            assert machines.confinement("here").sandbox is not None
            with pytest.raises(ToolError, match="unknown turn environment id `moon`"):
                machines.place("c", "moon")
            with pytest.raises(ToolError, match="workdir 'file://%'"):
                machines.place("file://%", "here")
            elsewhere = Machines({"here": machine}, {}, mode="danger-full-access")
            assert elsewhere.cwd("here") == machine.info.cwd
            assert elsewhere.confinement("here").sandbox is None

    asyncio.run(main())


def test_no_machine() -> None:
    machines = Machines({}, {})
    assert machines.primary == ""
    with pytest.raises(ToolError) as caught:
        machines.find("")
    assert str(caught.value) == DISABLED_TEXT
