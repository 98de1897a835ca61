"""`exec-server exec PROMPT`: an agent that works on a machine, and tells what it does."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from contextlib import AsyncExitStack, suppress
from typing import IO, TYPE_CHECKING, Any, cast

import click

from .options import fail, read_token, server_options

if TYPE_CHECKING:
    from ..agent.runner import Outcome, RunnerSettings
    from ..agent.settings import AgentConfig
    from ..agent.thread import Thread, Threads
    from ..environments.config import Configuration
    from ..environments.roots import SelectedRoot

__all__ = ["exec_"]


@click.command(name="exec")
@server_options(required=False)
@click.option(
    "--env", "environments", multiple=True, metavar="NAME", help="Environment to work in (repeatable)."
)
@click.option("-C", "--cd", "cwd", metavar="DIR", help="Directory to work in, on the first environment.")
@click.option("--json", "as_json", is_flag=True, help="Write the event stream to stdout (docs/events.md).")
@click.option("--ext", is_flag=True, help="With --json: times, durations and more, in a member of their own.")
@click.option("--resume", metavar="ID", help="Go on with this thread.")
@click.option("--last", is_flag=True, help="Go on with the newest thread of this directory.")
@click.option("--fork", metavar="ID", help="Begin a new thread with the history of this one.")
@click.option("--ephemeral", is_flag=True, help="Keep nothing of the thread.")
@click.option("--output-schema", type=click.Path(dir_okay=False), help="JSON Schema the answer is to follow.")
@click.option(
    "-o", "--output-last-message", type=click.Path(dir_okay=False), help="File to write the answer to."
)
@click.option("-m", "--model", envvar="EXEC_SERVER_MODEL", help="Model to ask.")
@click.option("--base-url", metavar="URL", help="Endpoint of the Responses API (default: OPENAI_BASE_URL).")
@click.option("--api-key-file", type=click.Path(exists=True, dir_okay=False), help="Default: OPENAI_API_KEY.")
@click.option(
    "-s",
    "--sandbox",
    "mode",
    type=click.Choice(["read-only", "workspace-write", "danger-full-access"]),
    help="What commands and edits may touch; the machine enforces it (default: read-only).",
)
@click.option("--writable", multiple=True, metavar="DIR", help="Let a sandbox write here, too (repeatable).")
@click.option("--network/--no-network", default=False, help="Whether a sandbox has a network (default: no).")
@click.option(
    "-a",
    "--approval",
    type=click.Choice(["never", "on-request"]),
    help="Whether you can be asked to let a command out of its sandbox (default: never).",
)
@click.option("--policy", type=click.Path(dir_okay=False), help="TOML file of rules about commands.")
@click.option(
    "--root", "roots", multiple=True, metavar="ENV:PATH", help="Capability root to select (repeatable)."
)
@click.option("--web-search", is_flag=True, help="Let the provider search the web.")
@click.option(
    "--max-steps", type=click.IntRange(min=1), default=1000, show_default=True, help="Answers per turn."
)
@click.argument("prompt", required=False)
def exec_(prompt: str | None, **options: Any) -> None:
    """Let a model work on PROMPT (`-`: read it from stdin), on this machine or another one.

    On stdout is the answer, or with --json what happens, as it happens. Exit status 0 if the turn was
    completed, 1 if it failed or was interrupted, 2 for a wrong command line.
    """
    from importlib.util import find_spec

    from ..client.errors import ExecServerError

    if find_spec("openai") is None or find_spec("mcp") is None:
        fail('this needs more packages; install "exec-server[agent,mcp]"')
    if sum(map(bool, (options["resume"], options["last"], options["fork"]))) > 1:
        raise click.UsageError("--resume, --last and --fork each say how the thread begins; give one of them")
    if options["environments"] and _typed("url"):
        raise click.UsageError("--env and --url both say where to work; give one of them")
    text = _read_prompt(prompt)
    try:
        code = asyncio.run(_run(text, options))
    except (ExecServerError, OSError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(1)
    sys.exit(code)


def _typed(name: str) -> bool:
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.COMMANDLINE


def _read_prompt(prompt: str | None) -> str:
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise click.UsageError("what is to be done? give a PROMPT, or `-` and write it to stdin")
    text = sys.stdin.buffer.read().decode("utf-8", "replace")
    if not text.strip():
        fail("there is no prompt: stdin was empty")
    return text


async def _run(prompt: str, options: dict[str, Any]) -> int:
    from ..agent.approvals import ask_on_terminal
    from ..agent.mcp_client import McpServers
    from ..agent.runner import Runner
    from ..agent.settings import load_config
    from ..environments.config import find_home
    from ..environments.manager import EnvironmentManager
    from ..events.writer import EventWriter

    home = find_home()
    config = load_config(home)
    configuration, names = _environments(options)
    settings = _settings(config, names, options)
    async with AsyncExitStack() as stack:
        manager = await stack.enter_async_context(EnvironmentManager(configuration))
        if options["url"] and not options["environments"]:
            manager.replace(_handle(options["url"], read_token(options["token_file"])))
        if options["ephemeral"]:
            home = stack.enter_context(tempfile.TemporaryDirectory(prefix="exec-server-thread-"))
        thread = stack.enter_context(_thread(home, settings, config, options))
        servers = await stack.enter_async_context(McpServers(list(config.servers)))
        show = _Json() if options["as_json"] else _Shown()
        writer = EventWriter(cast("IO[bytes]", show), ext=options["ext"])
        runner = Runner(manager, thread, writer, settings, servers=servers, ask=ask_on_terminal)
        stack.push_async_callback(runner.close)
        _listen_to_signals(runner)
        runner.start()
        outcome = await runner.run(prompt)
    show.end(outcome)
    if outcome.completed and options["output_last_message"]:
        _write_answer(options["output_last_message"], outcome.answer)
    return 0 if outcome.completed else 1


def _listen_to_signals(runner: Any) -> None:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, runner.interrupt, "interrupted")
    loop.add_signal_handler(signal.SIGTERM, runner.interrupt, "terminated")


# What to work with -------------------------------------------------------------------------------


def _environments(options: dict[str, Any]) -> tuple[Configuration, list[str]]:
    """What to connect to, and what the thread may use of it, the first first."""
    from ..environments.config import REMOTE_ID, Configuration
    from .starting import load_configuration, unknown_environment

    if options["url"] and not options["environments"]:
        return Configuration(default=None, include_local=False, source="--url"), [REMOTE_ID]
    configuration = load_configuration()
    for name in options["environments"]:
        if name not in configuration.ids():
            fail(unknown_environment(configuration, name))
    if options["environments"]:
        names = list(dict.fromkeys(options["environments"]))
        return _only(configuration, names), names
    if configuration.default is None:
        return configuration, []
    return configuration, [
        configuration.default,
        *(name for name in configuration.ids() if name != configuration.default),
    ]


def _only(configuration: Configuration, names: list[str]) -> Configuration:
    """The others are not to be connected to."""
    from msgspec.structs import replace

    from ..environments.config import LOCAL_ID

    chosen = tuple(entry for entry in configuration.environments if entry.id in names)
    return replace(configuration, environments=chosen, include_local=LOCAL_ID in names, default=None)


def _handle(url: str, token: str | None) -> Any:
    from ..environments.config import REMOTE_ID
    from ..environments.environment import Environment
    from ..environments.handle import Handle

    async def opened() -> Environment:
        from ..environments.connect import connect

        return await connect(url, token=token, client_name="exec-server-exec")

    return Handle(REMOTE_ID, opened)


def _settings(config: AgentConfig, names: list[str], options: dict[str, Any]) -> RunnerSettings:
    from ..agent.approvals import Policy
    from ..agent.runner import RunnerSettings
    from ..environments.config import LOCAL_ID

    schema = None
    if options["output_schema"]:
        try:
            with open(options["output_schema"], encoding="utf-8") as file:
                schema = json.load(file)
        except (OSError, ValueError) as error:
            fail(f"cannot use {options['output_schema']} as the output schema: {error}")
    cwd = options["cwd"]
    if names[:1] == [LOCAL_ID]:
        cwd = os.path.abspath(cwd or ".")
        if not os.path.isdir(cwd):
            fail(f"{cwd}: no such directory")
    elif cwd is not None and not cwd.startswith(("/", "file:")):
        fail(f"{cwd}: on another machine the directory must be an absolute path")
    return RunnerSettings(
        model=config.model_settings(
            options["model"], options["base_url"], read_token(options["api_key_file"])
        ),
        environment_ids=tuple(names),
        cwd=cwd,
        mode=options["mode"] or config.mode or "read-only",
        writable=options["writable"],
        network=options["network"],
        approvals=options["approval"] or config.approvals or "never",
        policy=Policy.load(options["policy"]) if options["policy"] else None,
        output_schema=schema,
        reasoning_effort=config.reasoning_effort,
        web_search=options["web_search"] or config.web_search,
        max_steps=options["max_steps"],
    )


def _thread(home: str, settings: RunnerSettings, config: AgentConfig, options: dict[str, Any]) -> Thread:
    from ..agent.thread import Threads

    threads = Threads(home)
    cwd = settings.cwd or os.getcwd()
    roots = [_root(text) for text in options["roots"]]
    if options["fork"]:
        return threads.fork(options["fork"], cwd=cwd)
    if options["resume"] or options["last"]:
        return threads.resume(options["resume"] or _newest(threads, cwd), roots=roots or None)
    return threads.start(cwd, roots=roots, model_provider=config.provider)


def _root(text: str) -> SelectedRoot:
    from ..environments.roots import BadRoot, SelectedRoot

    environment, colon, path = text.partition(":")
    if not colon or not environment:
        raise click.UsageError(f"--root {text!r} is not ENV:PATH")
    try:
        return SelectedRoot.select(
            f"{os.path.basename(path.rstrip('/')) or 'root'}@{environment}", environment, path
        )
    except BadRoot as error:
        raise click.UsageError(f"--root {text!r}: {error}") from None


def _newest(threads: Threads, cwd: str) -> str:
    newest = next((summary.id for summary in threads.list() if summary.meta.cwd == cwd), None)
    if newest is None:
        fail(f"there is no thread of {cwd} to go on with; leave out --last to begin one")
    return newest


# What to show ------------------------------------------------------------------------------------


class _Json:
    """The stream itself, on stdout."""

    def write(self, line: bytes) -> int:
        return sys.stdout.buffer.write(line)

    def flush(self) -> None:
        sys.stdout.buffer.flush()

    def end(self, outcome: Outcome) -> None:
        """It is all said; only what cannot be written any more must not be tried again at exit."""
        del outcome
        with suppress(BrokenPipeError, ValueError):
            sys.stdout.flush()
            return
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


class _Shown:
    """What happens, for people, on stderr; and the answer on stdout."""

    def __init__(self) -> None:
        from ..events.full import Full
        from ..events.render import Sink

        self._sink = Sink(sys.stderr, sys.stderr.isatty() and "NO_COLOR" not in os.environ)
        self._renderer = Full()

    def write(self, line: bytes) -> int:
        from ..events.reader import parse_line

        self._sink.put(self._renderer.feed(parse_line(line)))
        return len(line)

    def flush(self) -> None:
        """Every event is shown at once."""

    def end(self, outcome: Outcome) -> None:
        from ..events.printable import safe_to_encode
        from ..events.render import Sink

        self._sink.put(self._renderer.end())
        if outcome.answer is None or (sys.stdout.isatty() and sys.stderr.isatty()):
            return  # on a terminal it has just been shown
        answer = safe_to_encode(outcome.answer)
        Sink(sys.stdout, False).write(answer if answer.endswith("\n") else answer + "\n")


def _write_answer(path: str, answer: str | None) -> None:
    """Whole or not at all; that it did not work is said and changes nothing else."""
    if answer is None:
        click.echo(f"exec-server: there was no answer; {path} is empty", err=True)
    directory = os.path.dirname(os.path.abspath(path))
    try:
        fd, draft = tempfile.mkstemp(dir=directory, prefix=".answer-")
        try:
            with open(fd, "wb") as file:
                file.write((answer or "").encode("utf-8", "replace"))
            os.chmod(draft, 0o644)
            os.replace(draft, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(draft)
            raise
    except OSError as error:
        click.echo(f"exec-server: the answer could not be written to {path}: {error}", err=True)
