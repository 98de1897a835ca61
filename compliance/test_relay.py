"""The reference and we, at either end of a relay whose rendezvous is ours."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import exec_server
from compliance.agent_identity import ACCOUNT, AGENT, SEED, TASK
from compliance.cable import Cable
from compliance.harness import Codex
from compliance.model import Turn, exec_command
from compliance.programs import Program, wait_until
from compliance.relay import (
    ENVIRONMENT,
    RelayCodex,
    Rendezvous,
    our_environment,
    reference_environment,
)
from compliance.server import command_under_test
from exec_server.testing import check_server

SLOW_LINES = 40


@pytest.fixture
def rendezvous(tmp_path: Path) -> Iterator[Rendezvous]:
    """A rendezvous of this test's own, which must be alive at its end."""
    program = Rendezvous(tmp_path)
    try:
        yield program
        assert program.exit_code is None, program.report()
    finally:
        program.stop()


@pytest.fixture(params=["reference", "ours"])
def environment(
    request: pytest.FixtureRequest, rendezvous: Rendezvous, reference: Path, tmp_path: Path
) -> Iterator[Program]:
    """The reference's executor, and ours."""
    if request.param == "reference":
        program = reference_environment(reference, rendezvous, tmp_path)
    else:
        program = our_environment(rendezvous, tmp_path)
    try:
        yield program
        assert program.exit_code is None, program.report()
    finally:
        program.stop()


def drive(rendezvous: Rendezvous, scenario: Callable[[Any], Awaitable[None]], url: str | None = None) -> None:
    """Run a scenario with a client of ours, through the relay."""

    async def main() -> None:
        target = f"relay+{url or rendezvous.url}/{ENVIRONMENT}"
        async with asyncio.timeout(50), exec_server.connect(target, token=rendezvous.key) as client:
            await scenario(client)

    asyncio.run(main())


@pytest.mark.usefixtures("environment")
def test_our_harness_runs_commands(rendezvous: Rendezvous) -> None:
    async def scenario(client: Any) -> None:
        done = await client.run(["/bin/sh", "-c", "pwd; echo err >&2; exit 3"], cwd="/usr")
        assert (done.stdout, done.stderr, done.exit_code) == (b"/usr\n", b"err\n", 3)
        process = await client.start(["seq", "0", "199999"])
        text = b"".join([chunk.data async for chunk in process.output()])
        assert text.split() == [b"%d" % number for number in range(200000)]

    drive(rendezvous, scenario)


@pytest.mark.parametrize("environment", ["ours"], indirect=True)
@pytest.mark.usefixtures("environment")
def test_the_conformance_kit_passes_through_the_relay(rendezvous: Rendezvous) -> None:
    """The reference resets a stream for what it would answer on a socket, so this is for ours alone."""
    report = asyncio.run(check_server(f"relay+{rendezvous.url}/{ENVIRONMENT}", token=rendezvous.key))
    report.raise_for_failures()


@pytest.mark.usefixtures("environment")
def test_the_reference_as_harness(codex: Codex, rendezvous: Rendezvous, workspace: Path) -> None:
    turns: list[Turn] = [exec_command("pwd; echo to-stderr >&2"), exec_command("seq 1 20000; exit 7"), "done"]
    run = RelayCodex(codex, rendezvous.url, rendezvous.key).run(turns)
    first, second = run.results
    assert (first.exit_code, sorted(first.output.splitlines())) == (0, sorted([str(workspace), "to-stderr"]))
    assert second.exit_code == 7


def slow_command() -> str:
    """Prints a line now and then, and says in a file that it has begun."""
    return f"touch begun; for i in $(seq 0 {SLOW_LINES - 1}); do echo line $i; sleep 0.1; done"


def pulling(cable: Cable, workspace: Path) -> Turn:
    """A turn during which the cable is pulled as soon as the command of the turn is under way."""
    import threading

    def watch() -> None:
        wait_until((workspace / "begun").exists, "the command to begin")
        cable.pull()

    threading.Thread(target=watch, daemon=True).start()
    return exec_command(slow_command(), yield_time_ms=30_000)


@pytest.mark.parametrize("whose", ["harness", "environment"])
@pytest.mark.parametrize("executor", ["reference", "ours"])
def test_a_socket_of_the_reference_is_cut_in_the_middle_of_a_command(
    codex: Codex,
    rendezvous: Rendezvous,
    reference: Path,
    workspace: Path,
    tmp_path: Path,
    executor: str,
    whose: str,
) -> None:
    """`codex exec` as harness, our router in between: nothing is lost, whoever the executor is."""
    with Cable(rendezvous.url) as cable:
        theirs, ours = (cable.url, None) if whose == "harness" else (rendezvous.url, cable.url)
        if executor == "reference":
            environment = reference_environment(reference, rendezvous, tmp_path, ours)
        else:
            environment = our_environment(rendezvous, tmp_path, ours)
        try:
            turns: list[Turn] = [lambda _: pulling(cable, workspace), "done"]
            run = RelayCodex(codex, theirs, rendezvous.key).run(turns)
        finally:
            environment.stop()
        (result,) = run.results
        assert result.exit_code == 0
        assert result.output.splitlines() == [f"line {number}" for number in range(SLOW_LINES)]
        assert cable.pulled


@pytest.mark.parametrize("whose", ["harness", "environment"])
def test_our_harness_survives_cuts_to_the_reference(
    rendezvous: Rendezvous, reference: Path, tmp_path: Path, whose: str
) -> None:
    with Cable(rendezvous.url) as cable:
        theirs, ours = (cable.url, None) if whose == "environment" else (None, cable.url)
        environment = reference_environment(reference, rendezvous, tmp_path, theirs)

        async def scenario(client: Any) -> None:
            process = await client.start(
                [
                    "/bin/sh",
                    "-c",
                    f"i=0; while [ $i -lt {SLOW_LINES} ]; do echo $i; i=$((i+1)); sleep 0.1; done",
                ]
            )
            text = b""
            async for chunk in process.output():
                text += chunk.data
                if not cable.pulled:
                    await asyncio.to_thread(cable.pull)
            assert text.split() == [b"%d" % number for number in range(SLOW_LINES)]
            assert (await process.wait()).exit_code == 0

        try:
            drive(rendezvous, scenario, ours)
        finally:
            environment.stop()
        assert cable.pulled


@pytest.mark.parametrize("whose", ["reference", "ours"])
def test_an_agent_identity_registers_a_task_and_signs_for_it(whose: str, reference: Path) -> None:
    """Both say the same to the accounts service and to the registry; neither can reach anybody else."""
    command = [str(reference), "exec-server"] if whose == "reference" else command_under_test()[:1]
    alone = ["unshare", "--map-root-user", "--net", sys.executable, "-m", "compliance.agent_identity"]
    # Not below /tmp, where the reference skips a part of its start.
    home = Path("~/.cache/exec-server").expanduser()
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home) as folder:
        done = subprocess.run(
            [*alone, folder, *command],
            cwd=Path(__file__).parent.parent,
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    asked = [request for request in json.loads(done.stdout) if not request["path"].endswith("/jwks")]
    task, registration = asked
    assert (task["method"], task["path"]) == ("POST", f"/accounts/v1/agent/{AGENT}/task/register")
    body = json.loads(task["body"])
    assert list(body) == ["timestamp", "signature"]
    key = Ed25519PrivateKey.from_private_bytes(SEED).public_key()
    key.verify(base64.b64decode(body["signature"]), f"{AGENT}:{body['timestamp']}".encode())
    assert registration["path"] == "/cloud/environment/env-1/register"
    assert registration["headers"]["chatgpt-account-id"] == ACCOUNT
    assert "x-openai-fedramp" not in registration["headers"]
    scheme, _, text = registration["headers"]["authorization"].partition(" ")
    assertion = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    assert (scheme, "=" in text) == ("AgentAssertion", False)
    assert list(assertion) == ["agent_runtime_id", "signature", "task_id", "timestamp"]
    signed = f"{AGENT}:{TASK}:{assertion['timestamp']}".encode()
    key.verify(base64.b64decode(assertion["signature"]), signed)
