"""One command: that its end is told once, after everything else, whoever waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from exec_server.agent.exec import DirectExec
from exec_server.agent.unified_events import ExecEvent
from exec_server.agent.unified_process import UnifiedProcess
from exec_server.client.errors import ConnectionLost
from exec_server.services import Failed
from support.scripted import ScriptedProcess, Step, exits, prints
from support.virtual_time import run_virtual

REQUEST = DirectExec(argv=["sh"], cwd="file:///", env={})


def make(steps: Sequence[Step], seen: list[ExecEvent], remote: bool = False) -> UnifiedProcess:
    process = ScriptedProcess("p", steps)
    return UnifiedProcess(1000, "c", process, REQUEST, remote=remote, capacity=100, emit=seen.append)  # type: ignore[arg-type]


def names(seen: list[ExecEvent]) -> list[str]:
    return [type(event).__name__.removeprefix("ExecCommand") for event in seen]


def test_the_end_comes_last_and_once() -> None:
    async def main() -> None:
        seen: list[ExecEvent] = []
        made = make([prints(0.1, "a"), (0.2, 0), prints(0.25, "late"), *exits(0.29)[1:]], seen)
        await made.wait_exit(10)
        assert made.exit_seen
        assert seen == [], "nothing is told before it was announced"
        made.announce()
        await made.finished
        assert names(seen) == ["Begin", "OutputDelta", "OutputDelta", "End"]
        assert seen[-1].aggregated_output == "alate"  # type: ignore[union-attr]
        assert seen[-1].duration == pytest.approx(0.2)  # type: ignore[union-attr]

    run_virtual(main())


@pytest.mark.parametrize("remote", [False, True])
def test_when_the_exit_counts(remote: bool) -> None:
    async def main() -> None:
        made = make([(0.1, 0), *exits(5)[1:]], [], remote)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await made.wait_exit(60)
        assert loop.time() - began == pytest.approx(5 if remote else 0.1)
        assert made.ended
        made.abandon()

    run_virtual(main())


def test_nobody_is_told_while_somebody_talks() -> None:
    async def main() -> None:
        seen: list[ExecEvent] = []
        made = make(exits(0.1), seen)
        made.announce()
        async with made.lock:
            await asyncio.sleep(5)
            assert names(seen) == ["Begin"]
        await made.finished
        assert names(seen) == ["Begin", "End"]

    run_virtual(main())


def test_a_process_that_is_lost() -> None:
    async def main() -> None:
        seen: list[ExecEvent] = []
        made = make([prints(0.1, "so far"), (0.2, Failed("gone"))], seen)
        made.announce()
        await made.finished
        end = seen[-1]
        assert end.exit_code == -1  # type: ignore[union-attr]
        assert end.stderr == "gone"  # type: ignore[union-attr]
        assert end.aggregated_output == "so far\ngone"  # type: ignore[union-attr]
        assert end.status == "failed"  # type: ignore[union-attr]

    run_virtual(main())


def test_a_failed_termination_is_told() -> None:
    class Stubborn(ScriptedProcess):
        async def terminate(self, grace: float | None = None) -> int | None:
            raise ConnectionLost("no way")

    async def main() -> None:
        process = Stubborn("p", [])
        made = UnifiedProcess(1, "c", process, REQUEST, remote=True, capacity=9, emit=lambda event: None)  # type: ignore[arg-type]
        assert not await made.terminate()
        made.give_up()
        assert await made.terminate(), "it is over anyhow"
        made.abandon()

    run_virtual(main())
