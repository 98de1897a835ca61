"""`exec-server exec`: the command itself, as people and programs use it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from exec_server.events.check import check
from exec_server.events.lines import split_lines
from exec_server.events.reader import parse_line
from support.model_server import Cut, ModelServer, Say, Silent, Status, call, message
from support.server import RunningServer
from support.wait import eventually


class Agent:
    """The command with a home and a directory of its own."""

    def __init__(self, folder: Path, model: ModelServer) -> None:
        self.home = folder / "home"
        self.work = folder / "work"
        self.home.mkdir(exist_ok=True)
        self.work.mkdir(exist_ok=True)
        self.model = model

    def command(self, *words: str) -> list[str]:
        options = ["--model", "scripted", "--base-url", self.model.url, "-s", "danger-full-access"]
        return [sys.executable, "-m", "exec_server", "exec", *options, *words]

    @property
    def env(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("CODEX_", "EXEC_"))}
        own = {"HOME": str(self.home), "CODEX_HOME": str(self.home), "OPENAI_API_KEY": "key"}
        return {**kept, **own}

    def run(self, *words: str, stdin: str = "", code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.command(*words),
            cwd=self.work,
            env=self.env,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        return done

    def events(self, *words: str, code: int = 0) -> list[dict[str, Any]]:
        """The stream of a run, which keeps what we promise of streams."""
        done = self.run("--json", *words, code=code, stdin="from stdin" if "-" in words else "")
        records = map(parse_line, split_lines([done.stdout.encode()]))
        assert [str(one) for one in check(records, ours=True)] == []
        return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_answer_alone_is_on_stdout(tmp_path: Path) -> None:
    with ModelServer(Say([call("exec_command", {"cmd": "echo hi"})]), "All is well.") as model:
        agent = Agent(tmp_path, model)
        done = agent.run("-o", "answer.txt", "-", stdin="look around")
        assert done.stdout == "All is well.\n"
        assert "$ echo hi" in done.stderr
        assert (agent.work / "answer.txt").read_text() == "All is well."
        assert "look around" in model.said_to(0)
        assert model.requests[0]["model"] == "scripted"


def test_threads(tmp_path: Path) -> None:
    with ModelServer("One.", "Two.", "Three.", "Four.") as model:
        agent = Agent(tmp_path, model)
        first = agent.events("begin")
        assert [event["type"] for event in first] == [
            "thread.started",
            "turn.started",
            "item.completed",
            "turn.completed",
        ]
        thread_id = first[0]["thread_id"]
        second = agent.events("--resume", thread_id, "go on")
        assert second[0]["thread_id"] == thread_id
        assert second[-1]["usage"]["input_tokens"] == 2400
        assert agent.events("--last", "and on")[0]["thread_id"] == thread_id
        assert agent.events("--fork", thread_id, "--ext", "another way")[0]["thread_id"] != thread_id
        assert "Three." in model.said_to(3)


def test_a_fork_without_a_prompt_is_only_made(tmp_path: Path) -> None:
    with ModelServer("One.") as model:
        agent = Agent(tmp_path, model)
        thread_id = agent.events("begin")[0]["thread_id"]
        (only,) = agent.events("fork", thread_id)
        assert only["type"] == "thread.started"
        assert only["thread_id"] != thread_id
        assert list(agent.home.glob(f"sessions/**/*{only['thread_id']}.jsonl"))
        assert len(model.requests) == 1


def test_what_is_not_kept(tmp_path: Path) -> None:
    with ModelServer("One.") as model:
        agent = Agent(tmp_path, model)
        agent.run("--ephemeral", "begin")
        assert not (agent.home / "sessions").exists()
        done = agent.run("--json", "--last", "go on", code=1)
        assert done.stdout == ""
        assert "there is no thread of" in done.stderr
        unknown = agent.run("--json", "--resume", "01a1e071-227a-7741-a702-1f275b07e314", "x", code=1)
        assert (unknown.stdout, len(model.requests)) == ("", 1)


def test_a_turn_that_fails(tmp_path: Path) -> None:
    with ModelServer(Status(400, "no")) as model:
        agent = Agent(tmp_path, model)
        (agent.work / "answer.txt").write_text("old")
        events = agent.events("-o", "answer.txt", "x", code=1)
        assert [event["type"] for event in events[-2:]] == ["error", "turn.failed"]
        assert (agent.work / "answer.txt").read_text() == "old"


def test_an_output_schema(tmp_path: Path) -> None:
    with ModelServer('{"ok":true}') as model:
        agent = Agent(tmp_path, model)
        (agent.work / "schema.json").write_text('{"type": "object"}')
        assert agent.run("--output-schema", "schema.json", "x").stdout == '{"ok":true}\n'
        assert model.requests[0]["text"]["format"]["schema"] == {"type": "object"}
        (agent.work / "schema.json").write_text("{")
        bad = agent.run("--json", "--output-schema", "schema.json", "x", code=1)
        assert bad.stdout == ""
        assert "cannot use schema.json as the output schema" in bad.stderr


@pytest.mark.parametrize(
    ("number", "cause"),
    [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated"), (signal.SIGHUP, "hung up")],
)
def test_signals(tmp_path: Path, number: signal.Signals, cause: str) -> None:
    sleep = {"cmd": "sleep 0.5; echo $$ > pid; exec sleep 1000", "login": False}
    with ModelServer(Say([call("exec_command", sleep)])) as model:
        agent = Agent(tmp_path, model)
        process = subprocess.Popen(
            agent.command("--json", "x"),
            cwd=agent.work,
            env=agent.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        pid_file = agent.work / "pid"
        pid = int(eventually(lambda: pid_file.exists() and pid_file.read_text().strip(), "the command"))
        process.send_signal(number)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 1
        events = [json.loads(line) for line in out.splitlines()]
        assert events[-1] == {"type": "turn.failed", "error": {"message": cause}}
        assert events[-2]["item"]["exit_code"] == 137
        assert not Path(f"/proc/{pid}/exe").exists(), "nothing outlives its owner"


def test_signals_until_it_ends(tmp_path: Path) -> None:
    """Whoever is impatient gets the same outcome, and no other exit status."""
    with ModelServer(Silent()) as model:
        agent = Agent(tmp_path, model)
        with subprocess.Popen(
            agent.command("--json", "x"),
            cwd=agent.work,
            env=agent.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            eventually(lambda: model.requests, "the question")
            while process.poll() is None:
                process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.001)
            assert process.stdout is not None
            assert process.stderr is not None
            events = [json.loads(line) for line in process.stdout]
            assert events[-1] == {"type": "turn.failed", "error": {"message": "interrupted"}}
            assert process.stderr.read() == b""
        assert process.returncode == 1


def test_a_hangup_that_is_to_be_ignored(tmp_path: Path) -> None:
    """As under nohup."""

    def hang_up(_: ModelServer) -> str:
        process.send_signal(signal.SIGHUP)
        return "ok"

    with ModelServer(hang_up) as model:
        agent = Agent(tmp_path, model)
        process = subprocess.Popen(
            ["/bin/sh", "-c", 'trap "" HUP; exec "$@"', "sh", *agent.command("x")],
            cwd=agent.work,
            env=agent.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        out, _ = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, b"ok\n")


def test_a_reader_that_goes_away(tmp_path: Path) -> None:
    calls = Say([call("exec_command", {"cmd": "touch done", "login": False})])

    def hang_up(_: ModelServer) -> Say:
        assert process.stdout is not None
        process.stdout.close()
        return calls

    with ModelServer(hang_up, "ok") as model:
        agent = Agent(tmp_path, model)
        process = subprocess.Popen(
            agent.command("--json", "x"),
            cwd=agent.work,
            env=agent.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stderr is not None
        assert process.wait(60) == 0
        assert process.stderr.read() == b""
        process.stderr.close()
        assert (agent.work / "done").exists(), "the work goes on to its end"


def test_another_machine(tmp_path: Path, server: RunningServer) -> None:
    cmd = "pwd; tr '\\0' ' ' < /proc/$PPID/cmdline"
    with ModelServer(Say([call("exec_command", {"cmd": cmd})]), "ok") as model:
        agent = Agent(tmp_path, model)
        events = agent.events("--url", server.url, "-C", str(tmp_path), "x")
        output = events[3]["item"]["aggregated_output"]
        assert output.startswith(f"{tmp_path}\n")
        assert "--listen" in output


def test_a_directory_that_is_not_there_on_another_machine(tmp_path: Path, server: RunningServer) -> None:
    (tmp_path / "file").touch()
    with ModelServer("never asked") as model:
        agent = Agent(tmp_path, model)
        for place, said in (("/nope", "/nope: no such directory"), (f"{tmp_path}/file", "not a directory")):
            done = agent.run("--json", "--url", server.url, "-C", place, "x", code=1)
            assert done.stdout == ""
            assert said in done.stderr
        assert model.requests == []


def test_an_environment_by_its_name(tmp_path: Path, server: RunningServer) -> None:
    with ModelServer(Say([call("exec_command", {"cmd": "echo there"})]), "ok") as model:
        agent = Agent(tmp_path, model)
        entry = f'[[environments]]\nid = "build"\nurl = "{server.url}"\n'
        (agent.home / "environments.toml").write_text(entry)
        events = agent.events("--env", "build", "x")
        assert events[3]["item"]["aggregated_output"] == "there\n"
        wrong = agent.run("--env", "moon", "x", code=1)
        assert "unknown environment id `moon`; there are: local, build" in wrong.stderr


def test_config_toml(tmp_path: Path) -> None:
    with ModelServer(Cut(), "ok") as model:
        agent = Agent(tmp_path, model)
        (agent.home / "config.toml").write_text(
            f'model = "from-config"\nmodel_provider = "mine"\nsandbox_mode = "danger-full-access"\n'
            f'[model_providers.mine]\nbase_url = "{model.url}"\nstream_max_retries = 2\n'
            '[model_providers.mine.http_headers]\nx-house = "yes"\n'
        )
        words = [sys.executable, "-m", "exec_server", "exec", "--json", "x"]
        done = subprocess.run(
            words,
            cwd=agent.work,
            env=agent.env,
            input="",
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert '"Reconnecting... 1/2 (' in done.stdout
        assert model.requests[0]["model"] == "from-config"


def test_what_is_not_unicode(tmp_path: Path) -> None:
    """A directory that cannot be said is worked in all the same; so is a prompt answered."""
    with ModelServer(Say([call("exec_command", {"cmd": "echo hi > f", "login": False})]), "done") as model:
        agent = Agent(tmp_path, model)
        agent.work = Path(os.fsdecode(os.fsencode(agent.work) + b"/d\xff"))
        agent.work.mkdir()
        (agent.work / "AGENTS.md").write_text("Be kind.")
        (agent.home / "AGENTS.md").write_text("Be polite.")
        events = agent.events(os.fsdecode(b"go \xff"))
        assert events[-1]["type"] == "turn.completed"
        assert (agent.work / "f").read_text() == "hi\n"
        assert "go \ufffd" in model.said_to(0)
        assert "/d\ufffd</cwd>" in model.said_to(0)
        assert model.said_to(0).index("Be polite.") < model.said_to(0).index("Be kind.")
        agent.events("--last", "again")
        assert "go \ufffd" in model.said_to(-1)


def test_a_required_tool_server_that_is_down(tmp_path: Path) -> None:
    with ModelServer("never asked") as model:
        agent = Agent(tmp_path, model)
        (agent.home / "config.toml").write_text(
            '[mcp_servers.docs]\ncommand = "/nonexistent"\nrequired = true\n'
        )
        done = agent.run("--json", "x", code=1)
        assert done.stdout == ""
        assert "required MCP server `docs` failed to start" in done.stderr
        assert model.requests == []


def test_on_a_terminal(tmp_path: Path) -> None:
    """A live view while it works, and plain lines where somebody may be asked."""
    plan = {"plan": [{"step": "look around", "status": "in_progress"}]}
    calls = [call("update_plan", plan), call("exec_command", {"cmd": "sleep 0.5; echo hi"}, "call_2")]
    for approval, live in (("never", True), ("on-request", False)):
        with ModelServer(Say(calls), "All is well.") as model:
            agent = Agent(tmp_path, model)
            ours, theirs = os.openpty()
            process = subprocess.Popen(
                agent.command("-a", approval, "x"),
                cwd=agent.work,
                env={**agent.env, "TERM": "xterm"},
                stdin=subprocess.DEVNULL,
                stdout=theirs,
                stderr=theirs,
            )
            os.close(theirs)
            drawn = b""
            with suppress(OSError):  # a terminal that nobody holds any more
                while more := os.read(ours, 65536):
                    drawn += more
            os.close(ours)
            assert process.wait(60) == 0
        assert b"[ ] look around" in drawn
        assert drawn.count(b"All is well.") == 1
        assert (b"\x1b[?25l" in drawn) == live, "a live view hides the cursor"
        assert (b"\x1b[?25h" in drawn) == live, "and gives it back"
        assert (b"working" in drawn) == live


# As callers of the reference call it ----------------------------------------------------------------------


def test_a_prompt_with_images_and_a_pipe(tmp_path: Path) -> None:
    with ModelServer("ok") as model:
        agent = Agent(tmp_path, model)
        for name in ("a.png", "b.png"):
            (agent.work / name).write_bytes(b"\x89PNG\r\n\x1a\n")
        done = agent.run("-i", "a.png,b.png", "--image", "a.png", "what is it?", stdin="one\ntwo\n")
        parts = model.requests[0]["input"][-1]["content"]
        assert [part["type"] for part in parts].count("input_image") == 3
        assert parts[3]["text"] == f'<image name=[Image #2] path="{agent.work}/b.png">'
        assert parts[-1]["text"] == "what is it?\n\n<stdin>\none\ntwo\n</stdin>"
        assert "Reading additional input from stdin..." in done.stderr
        bad = agent.run("--json", "-i", "none.png", "x", code=1)
        assert bad.stdout == ""
        assert "the image none.png cannot be read: No such file or directory" in bad.stderr


def test_subcommands_of_the_reference(tmp_path: Path) -> None:
    with ModelServer("One.", "Two.") as model:
        agent = Agent(tmp_path, model)
        words = ["--experimental-json", "--skip-git-repo-check", "--add-dir", str(tmp_path)]
        done = agent.run(*words, "--thread-source", "ci", "x")
        thread_id = json.loads(done.stdout.splitlines()[0])["thread_id"]
        elsewhere = agent.events("-C", str(tmp_path), "resume", "--last", "--all", "-")
        assert elsewhere[0]["thread_id"] == thread_id
        assert "from stdin" in model.said_to(1)
        (path,) = agent.home.glob(f"sessions/**/*{thread_id}.jsonl")
        assert json.loads(path.read_text().partition("\n")[0])["payload"]["thread_source"] == "ci"


def test_settings_that_win_over_the_file(tmp_path: Path) -> None:
    with ModelServer("ok") as model:
        agent = Agent(tmp_path, model)
        (agent.home / "config.toml").write_text(
            'model = "from-config"\nopenai_base_url = "http://127.0.0.1:9"\n'
        )
        words = [sys.executable, "-m", "exec_server", "exec", "--dangerously-bypass-approvals-and-sandbox"]
        settings = [f'openai_base_url="{model.url}"', "model=plain-text", 'model_reasoning_effort="high"']
        given = [word for setting in settings for word in ("-c", setting)]
        env = {**agent.env, "OPENAI_API_KEY": "not this", "CODEX_API_KEY": "this"}
        subprocess.run(
            [*words, *given, "x"], cwd=agent.work, env=env, input="", text=True, timeout=60, check=True
        )
        assert model.requests[0]["model"] == "plain-text"
        assert model.requests[0]["reasoning"]["effort"] == "high"
        assert model.headers[0]["authorization"] == "Bearer this"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["-c", "nonsense", "p"], 1, "is not KEY=VALUE"),
        (["-a", "on-request", "--dangerously-bypass-approvals-and-sandbox", "p"], 2, "leaves no choice"),
        (["--resume", "x", "--last", "p"], 2, "give one of them"),
        (["--env", "a", "--url", "ws://127.0.0.1:1", "p"], 2, "give one of them"),
        (["--root", "nonsense", "p"], 2, "is not ENV:PATH"),
        (["--policy", "/nonexistent", "p"], 1, "the policy file /nonexistent cannot be read"),
        (["-C", "/nonexistent", "p"], 1, "/nonexistent: no such directory"),
        (["-"], 1, "there is no prompt"),
        (["-c", "model_provider=zz", "p"], 1, "there is no [model_providers.zz]"),
        (["--url", "ws://127.0.0.1:1", "p"], 1, "ws://127.0.0.1:1"),
    ],
)
def test_a_wrong_command_line(tmp_path: Path, words: list[str], code: int, said: str) -> None:
    with ModelServer("never asked") as model:
        done = Agent(tmp_path, model).run("--json", *words, code=code)
        assert done.stdout == ""
        assert said in done.stderr
        assert model.requests == []


INTERRUPTED = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "click":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
sys.argv = ["exec-server", "exec", "--base-url", "http://127.0.0.1:1", "x"]
from exec_server.cli import main
main()
"""


def test_an_interrupt_before_anything_has_begun_is_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_no_model(tmp_path: Path) -> None:
    with ModelServer("never asked") as model:
        agent = Agent(tmp_path, model)
        words = [sys.executable, "-m", "exec_server", "exec", "x"]
        done = subprocess.run(
            words,
            cwd=agent.work,
            env=agent.env,
            input="",
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 1
        assert "which model? give --model" in done.stderr


def test_an_answer_that_cannot_be_written(tmp_path: Path) -> None:
    with ModelServer(Say([message("Answer.")]), Say([])) as model:
        agent = Agent(tmp_path, model)
        done = agent.run("-o", "no/where", "x")
        assert done.stdout == "Answer.\n"
        assert "could not be written to no/where" in done.stderr
        (agent.work / "answer").write_text("old")
        silent = agent.run("-o", "answer", "x")
        assert "there was no answer" in silent.stderr
        assert (agent.work / "answer").read_text() == ""
