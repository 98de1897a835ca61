"""`exec-server exec PROMPT`: an agent that works on a machine, and tells what it does."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any, Final

import click

from .exec_input import read_prompt, take_words
from .options import fail, read_token, server_options

if TYPE_CHECKING:
    from ..agent.runner_settings import RunnerSettings
    from ..agent.settings import AgentConfig
    from ..agent.thread import Thread, Threads
    from ..environments.config import Configuration
    from ..environments.handle import Handle
    from ..environments.roots import SelectedRoot

__all__ = ["exec_"]

_CAUSES: Final[dict[int, str]] = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "terminated",
    signal.SIGHUP: "hung up",
}
"""Signals that end a turn, and what its outcome says then."""


@click.command(name="exec")
@server_options(required=False)
@click.option(
    "--env", "environments", multiple=True, metavar="NAME", help="Environment to work in (repeatable)."
)
@click.option("-C", "--cd", "cwd", metavar="DIR", help="Directory to work in, on the first environment.")
@click.option(
    "--json",
    "--experimental-json",
    "as_json",
    is_flag=True,
    help="Write the event stream to stdout (docs/events.md).",
)
@click.option("--ext", is_flag=True, help="With --json: times, durations and more, in a member of their own.")
@click.option(
    "--live-output", is_flag=True, help="With --json: what running commands print, up to four times a second."
)
@click.option("--resume", metavar="ID", help="Go on with this thread.")
@click.option("--last", is_flag=True, help="Go on with the newest thread of this directory.")
@click.option("--fork", metavar="ID", help="Begin a new thread with the history of this one.")
@click.option("--all", "everywhere", is_flag=True, help="With --last: of any directory.")
@click.option("--ephemeral", is_flag=True, help="Keep nothing of the thread.")
@click.option("--output-schema", type=click.Path(dir_okay=False), help="JSON Schema the answer is to follow.")
@click.option(
    "-o", "--output-last-message", type=click.Path(dir_okay=False), help="File to write the answer to."
)
@click.option(
    "-i",
    "--image",
    "images",
    multiple=True,
    metavar="FILE",
    help="Image that belongs to the prompt (repeatable, or separated by commas).",
)
@click.option(
    "-c",
    "--config",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Setting that wins over config.toml: a dotted key, a value in TOML (repeatable).",
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
@click.option(
    "--writable",
    "--add-dir",
    multiple=True,
    metavar="DIR",
    help="Let a sandbox write here, too (repeatable).",
)
@click.option("--network/--no-network", default=None, help="Whether a sandbox has a network (default: no).")
@click.option(
    "--dangerously-bypass-approvals-and-sandbox",
    "unconfined",
    is_flag=True,
    help="The same as -s danger-full-access -a never.",
)
@click.option("--skip-git-repo-check", is_flag=True, hidden=True, help="For callers of the reference.")
@click.option("--thread-source", hidden=True, help="What the thread's record says it comes from.")
@click.option(
    "-a",
    "--approval",
    type=click.Choice(["never", "on-request"]),
    help="Whether you can be asked to allow what the sandbox or a rule does not (default: never).",
)
@click.option("--policy", type=click.Path(dir_okay=False), help="TOML file of rules about what is allowed.")
@click.option(
    "--root", "roots", multiple=True, metavar="ENV:PATH", help="Capability root to select (repeatable)."
)
@click.option("--web-search", is_flag=True, help="Let the provider search the web.")
@click.option(
    "--max-steps", type=click.IntRange(min=1), default=1000, show_default=True, help="Answers per turn."
)
@click.argument("words", nargs=-1, metavar="[resume ID | fork ID] [PROMPT]")
def exec_(words: tuple[str, ...], **options: Any) -> None:
    """Let a model work on PROMPT (`-`: read it from stdin), on this machine or another one.

    What is piped to stdin beside a PROMPT is added to it. `resume ID` and `fork ID` are --resume and --fork,
    for callers of the reference.

    On stdout is the answer, or with --json what happens, as it happens. Exit status 0 if the turn was
    completed, 1 if it failed or was interrupted, 2 for a wrong command line.
    """
    from importlib.util import find_spec

    from ..client.errors import ExecServerError

    if find_spec("openai") is None or find_spec("mcp") is None:
        fail('this needs more packages; install "exec-server[agent,mcp]"')
    prompt = take_words(words, options)
    if options["unconfined"]:
        if options["mode"] not in (None, "danger-full-access") or options["approval"] not in (None, "never"):
            raise click.UsageError("--dangerously-bypass-approvals-and-sandbox leaves no choice of -s and -a")
        options.update(mode="danger-full-access", approval="never")
    if sum(map(bool, (options["resume"], options["last"], options["fork"]))) > 1:
        raise click.UsageError("--resume, --last and --fork each say how the thread begins; give one of them")
    if options["environments"] and _typed("url"):
        raise click.UsageError("--env and --url both say where to work; give one of them")
    # A fork without a prompt is only made, as by the reference.
    text = None if options["fork"] and prompt is None else read_prompt(prompt)
    try:
        code = asyncio.run(_run(text, options))
    except (ExecServerError, OSError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        code = 1
    for number in _CAUSES:
        # Handlers are taken down before the program is gone; what is ignored stays so.
        signal.signal(number, signal.SIG_IGN)
    sys.exit(code)


def _typed(name: str) -> bool:
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.COMMANDLINE


async def _run(prompt: str | None, options: dict[str, Any]) -> int:
    from ..agent.approvals import ask_on_terminal
    from ..agent.images import prompt_image
    from ..agent.mcp_client import McpServers
    from ..agent.outcome import Outcome
    from ..agent.runner import Runner
    from ..agent.settings import load_config
    from ..agent.thread import Threads
    from ..environments.config import find_home
    from ..environments.manager import EnvironmentManager
    from ..events.writer import EventWriter
    from .exec_output import JsonOutput, ShownOutput, write_answer

    home = find_home()
    config = load_config(home, overrides=options["overrides"])
    files = [path for listed in options["images"] for path in listed.split(",") if path]
    images = [part for number, path in enumerate(files, 1) for part in prompt_image(path, number)]
    configuration, names = _environments(options)
    settings = _settings(config, names, home, options)
    async with AsyncExitStack() as stack:
        manager = await stack.enter_async_context(EnvironmentManager(configuration))
        if options["url"] and not options["environments"]:
            handle = _handle(options["url"], read_token(options["token_file"]))
            manager.replace(handle)
            await _check_place(handle, settings.cwd)
        if options["ephemeral"]:
            home = stack.enter_context(tempfile.TemporaryDirectory(prefix="exec-server-thread-"))
        threads = Threads(home)
        thread = stack.enter_context(_thread(threads, settings, config, options))
        servers = await stack.enter_async_context(McpServers(list(config.servers)))
        asks = settings.approvals != "never"
        show: JsonOutput | ShownOutput = JsonOutput() if options["as_json"] else ShownOutput(questions=asks)
        stack.enter_context(show)
        writer = EventWriter(show, ext=options["ext"], live_output=options["live_output"])
        runner = Runner(
            manager, thread, writer, settings, servers=servers, ask=ask_on_terminal, threads=threads
        )
        stack.push_async_callback(runner.close)
        _listen_to_signals(runner)
        runner.start()
        outcome = Outcome(None, None) if prompt is None else await runner.run(prompt, images)
    show.end(outcome)
    if outcome.completed and options["output_last_message"] and prompt is not None:
        _stop_listening()  # whoever reads what it is written to may take their time
        write_answer(options["output_last_message"], outcome.answer)
    return 0 if outcome.completed else 1


def _listen_to_signals(runner: Any) -> None:
    """To the very end: handlers of a loop go with it, and the third Ctrl-C of somebody impatient would kill
    a run that has just said how it ended."""
    loop = asyncio.get_running_loop()

    def heard(number: int, _: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: it is over
            loop.call_soon_threadsafe(runner.interrupt, _CAUSES[number])

    for number in _CAUSES:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, heard)


def _stop_listening() -> None:
    """A signal ends the program again, as it does others."""
    for number in _CAUSES:
        if signal.getsignal(number) is not signal.SIG_IGN:
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)


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


async def _check_place(handle: Handle, cwd: str | None) -> None:
    """Before anybody is asked anything: whether the machine is there, and the directory."""
    machine = await handle.environment()
    if cwd is None:
        return
    try:
        found = await machine.files.metadata(cwd)
    except FileNotFoundError:
        fail(f"{cwd}: no such directory on that machine")
    if not found.is_directory:
        fail(f"{cwd}: not a directory")


def _settings(config: AgentConfig, names: list[str], home: str, options: dict[str, Any]) -> RunnerSettings:
    from ..agent.policy import Policy
    from ..agent.runner_settings import RunnerSettings
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
        home=home,
        mode=options["mode"] or config.mode or "read-only",
        writable=(*options["writable"], *config.writable),
        network=config.network if options["network"] is None else options["network"],
        approvals=options["approval"] or config.approvals or "never",
        policy=Policy.load(options["policy"]) if options["policy"] else None,
        output_schema=schema,
        reasoning_effort=config.reasoning_effort,
        web_search=options["web_search"] or config.web_search,
        max_steps=options["max_steps"],
        max_agents=config.max_agents,
        agent_depth=config.agent_depth,
        compact_tokens=config.compact_tokens,
        context_window=config.context_window,
    )


def _thread(
    threads: Threads, settings: RunnerSettings, config: AgentConfig, options: dict[str, Any]
) -> Thread:
    cwd = settings.cwd or os.getcwd()
    roots = [_root(text) for text in options["roots"]]
    if options["fork"]:
        return threads.fork(options["fork"], cwd=cwd)
    if options["resume"] or options["last"]:
        return threads.resume(
            options["resume"] or _newest(threads, None if options["everywhere"] else cwd), roots=roots or None
        )
    more = {"thread_source": options["thread_source"]} if options["thread_source"] else None
    return threads.start(cwd, roots=roots, model_provider=config.provider, more=more)


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


def _newest(threads: Threads, cwd: str | None) -> str:
    """The newest thread that somebody began, in that directory or in any."""
    from ..agent.exec import without_surrogates

    cwd = None if cwd is None else without_surrogates(cwd)  # as it was written down
    begun = (one for one in threads.list() if one.meta.parent_thread_id is None)
    newest = next((one.id for one in begun if cwd in (None, one.meta.cwd)), None)
    if newest is None:
        where = f"of {cwd} " if cwd is not None else ""
        fail(f"there is no thread {where}to go on with; leave out --last to begin one")
    return newest
