"""An agent: a thread, its turns, and the steps of a model in each of them, told as the event stream tells it.

A step is one answer of the model and everything it calls for. Each begins with a look at which environments
are ready, and uses exactly those. An answer that breaks off is asked for again, with what was heard of it in
the history: a call that was made is never made twice.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Mapping, Sequence
from datetime import date
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from .. import log
from ..client.errors import ExecServerError
from ..environments.metadata import MetadataCache
from ..environments.snapshot import Selection, Step, ThreadEnvironments, Turn
from ..events.model import AgentMessage, ErrorItem, Reasoning, Usage
from ..events.notice import Notice
from ..wire.uri import path_to_uri
from .confinement import Mode
from .context import INSTRUCTIONS, environment_context, message, project_instructions, skills_context
from .conversation import ABORTED, answer_type, conversation, total_usage, usage_record
from .model import Completed, ItemAdded, ItemDone, ModelClient, ModelFailed, ModelSettings
from .searching import Searches
from .tools import Toolbox, ToolOutput

if TYPE_CHECKING:
    from ..environments.environment import Environment
    from ..environments.manager import EnvironmentManager
    from ..events.writer import EventWriter
    from .approvals import ApprovalMode, Ask, Policy
    from .mcp_client import McpServers
    from .thread import Thread

__all__ = ["Outcome", "Runner", "RunnerSettings"]

MAX_STEPS: Final = 1000
"""Most answers of a model in one turn: one that calls tools without end is stopped some time."""

NETWORK_WAIT_MOST: Final = 60.0
"""Longest pause while nobody can be reached, in seconds."""


class RunnerSettings(Struct, frozen=True, kw_only=True):
    """How a run goes about it."""

    model: ModelSettings
    environment_ids: tuple[str, ...]
    """The environments it may use; the first is where everything happens that names no other."""
    cwd: str | None = None
    """Directory on the first environment; None is that machine's own."""
    mode: Mode = "read-only"
    writable: tuple[str, ...] = ()
    network: bool = False
    approvals: ApprovalMode = "never"
    policy: Policy | None = None
    output_schema: Any = None
    reasoning_effort: str | None = None
    web_search: bool = False
    instructions: str = INSTRUCTIONS
    max_steps: int = MAX_STEPS


class Outcome(Struct, frozen=True):
    """How a turn ended: with an answer, perhaps, or with what went wrong."""

    answer: str | None
    error: str | None

    @property
    def completed(self) -> bool:
        return self.error is None


class Runner:
    """One thread at work. `run` it once per turn, `interrupt` it from outside, `close` it at the end."""

    def __init__(
        self,
        manager: EnvironmentManager,
        thread: Thread,
        writer: EventWriter,
        settings: RunnerSettings,
        *,
        servers: McpServers | None = None,
        ask: Ask | None = None,
    ) -> None:
        self._manager = manager
        self._thread = thread
        self._writer = writer
        self._settings = settings
        self._servers = servers
        self._ask = ask
        self._client = ModelClient(settings.model)
        self._environments = ThreadEnvironments(manager, self._connection_changed)
        self._metadata = MetadataCache()
        self._machines: dict[str, Environment] = {}
        self._cwds: dict[str, str] = {}
        self._project: str | None = None
        self._project_read = False
        self._usage = total_usage(thread.history())
        self._call_ids = {str(item.get("call_id")) for item in conversation(thread.history())}
        self._toolbox = self._new_toolbox()
        self._turn: asyncio.Task[None] | None = None
        self._cause: str | None = None
        """Why the turn is to end before its time."""
        self._answer: str | None = None
        self._searches = Searches(writer)

    def start(self) -> None:
        """Say which thread it is, and what was wrong with its tool servers."""
        self._writer.thread_started(self._thread.id)
        for warning in self._servers.warnings if self._servers is not None else ():
            self._writer.completed(ErrorItem(message=warning))

    async def run(self, prompt: str) -> Outcome:
        """One turn, to its outcome: there is exactly one, whatever happens."""
        turn_id = str(uuid.uuid4())
        self._answer = None
        self._writer.turn_started()
        self._turn = asyncio.create_task(self._steps(prompt, turn_id))
        if self._cause is not None:
            self._turn.cancel()  # it was interrupted before it began
        error: str | None = None
        shown = False
        try:
            await asyncio.shield(self._turn)
        except ModelFailed as failure:
            error = str(failure)
        except asyncio.CancelledError:
            self._turn.cancel()
            await asyncio.wait([self._turn])
            error, shown = self._cause or "interrupted", True
        except (ExecServerError, OSError) as failure:
            error = str(failure)
        except Exception as failure:
            log.error("a turn failed for no reason of its own", error=repr(failure))
            error = f"internal error: {failure!r}"
        finally:
            self._turn = None
            self._cause = None
        await self._toolbox.unified.close()
        self._toolbox = self._new_toolbox()
        return self._end(turn_id, error, told=shown)

    def _end(self, turn_id: str, error: str | None, *, told: bool) -> Outcome:
        try:
            if error is None:
                self._keep_event("task_complete", turn_id=turn_id, last_agent_message=self._answer)
            else:
                self._keep_event("turn_aborted", turn_id=turn_id, reason=error if told else "error")
            self._thread.sync()
        except OSError as failure:
            if error is None:
                error = f"the thread cannot be written down: {failure}"
        if error is None:
            self._writer.turn_completed(self._usage)
            return Outcome(self._answer, None)
        if told:
            self._writer.turn_failed(error, ext={"cause": error})
        else:
            self._writer.fail(error)
        return Outcome(None, error)

    def interrupt(self, cause: str = "interrupted") -> None:
        """End the turn that is under way, or the one that is about to begin; its outcome says why."""
        self._cause = cause
        if self._turn is not None:
            self._turn.cancel()

    async def close(self) -> None:
        """Let go of everything. Commands have ended with their turn."""
        await self._toolbox.unified.close()
        self._environments.close()
        await self._client.close()

    # Steps -----------------------------------------------------------------------------------------

    async def _steps(self, prompt: str, turn_id: str) -> None:
        settings = self._settings
        self._keep_event("task_started", turn_id=turn_id)
        self._keep(message("user", prompt, kind="user.text"))
        turn = self._environments.begin_turn(self._selections())
        await self._wait_for_first()
        for _ in range(settings.max_steps):
            step = await self._capture(turn)
            context = await self._context(step)
            if not await _Answer(self, context).hear():
                return
        raise ModelFailed(f"gave up after {settings.max_steps} answers of the model in one turn")

    def _selections(self) -> list[Selection]:
        return [Selection(name) for name in self._settings.environment_ids]

    async def _wait_for_first(self) -> None:
        """The first environment gets the time it needs; the others come when they are ready."""
        for name in self._settings.environment_ids[:1]:
            handle = self._manager.get_environment(name)
            if handle is None:
                continue
            try:
                await handle.environment()
            except (ExecServerError, OSError) as error:
                log.info("environment cannot be used", environment=name, error=str(error))
                warning = f"environment `{name}` cannot be used: {error}"
                self._writer.completed(ErrorItem(message=warning))

    async def _capture(self, turn: Turn) -> Step:
        """What this step works with; the tools find the same machines until the next."""
        step = await turn.capture(wait=False)
        machines: dict[str, Environment] = {}
        for entry in step.ready:
            name = entry.selection.environment_id
            try:
                machines[name] = await entry.handle.environment()
            except (ExecServerError, OSError) as error:
                log.info("environment left out of a step", environment=name, error=str(error))
                continue
            self._cwds.setdefault(name, self._cwd_of(name, machines[name]))
        self._machines.clear()
        self._machines.update(machines)
        return step

    def _cwd_of(self, name: str, machine: Environment) -> str:
        chosen = self._settings.cwd
        if chosen is not None and name == self._settings.environment_ids[0]:
            return chosen if chosen.startswith("file:") else path_to_uri(chosen)
        return machine.info.cwd or "file:///"

    async def _context(self, step: Step) -> list[dict[str, Any]]:
        """What the model is told in this step before the conversation."""
        said: list[dict[str, Any]] = []
        primary = next(iter(self._machines), None)
        if primary is not None and not self._project_read:
            self._project_read = True
            machine = self._machines[primary]
            self._project = await project_instructions(machine.files, self._cwds[primary])
        if self._project is not None:
            said.append(message("user", self._project))
        if self._machines:
            now = environment_context(step, self._cwds, self._settings.mode, date.today())  # noqa: DTZ011  # theirs
            said.append(message("user", now))
        resolved = await step.resolve_roots(self._manager, self._thread.roots)
        if resolved:
            handles = {root.root.environment_id: root.handle for root in resolved}
            found = await self._metadata.get([root.root for root in resolved], handles.get)
            skills = skills_context(found)
            if skills is not None:
                said.append(message("developer", skills))
        return said

    def request(self, context: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """What is asked of the model: everything it has to know, every time."""
        settings = self._settings
        reasoning = {"summary": "auto"}
        if settings.reasoning_effort:
            reasoning["effort"] = settings.reasoning_effort
        request: dict[str, Any] = {
            "instructions": settings.instructions,
            "input": [*context, *conversation(self._thread.history())],
            "tools": [
                *self._toolbox.definitions(),
                *([{"type": "web_search"}] if settings.web_search else []),
            ],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": self._thread.id,
            "reasoning": reasoning,
        }
        if settings.output_schema is not None:
            schema = {
                "type": "json_schema",
                "name": "output",
                "schema": settings.output_schema,
                "strict": True,
            }
            request["text"] = {"format": schema}
        return request

    # What an answer brings -------------------------------------------------------------------------

    @property
    def client(self) -> ModelClient:
        return self._client

    @property
    def searches(self) -> Searches:
        return self._searches

    def notice(self, notice: Notice) -> None:
        """Something is tried again."""
        self._writer.notice(notice)

    def said(self, item: dict[str, Any]) -> None:
        """The model has said something: keep it, and show what is for people."""
        self._keep(item)
        if item.get("type") == "message" and item.get("role", "assistant") == "assistant":
            self._answer = _texts(item.get("content"), "text", "refusal", between="")
            self._writer.completed(AgentMessage(text=self._answer))
        elif item.get("type") == "reasoning":
            text = _texts(item.get("summary"), "text", between="\n")
            if text.strip():
                self._writer.completed(Reasoning(text=text))

    def name(self, item: dict[str, Any]) -> None:
        """Give a call an id of its own, if the model did not: or nobody could tell its answer from others."""
        call_id = item.get("call_id")
        if not isinstance(call_id, str) or not call_id or call_id in self._call_ids:
            item["call_id"] = call_id = f"call_{uuid.uuid4().hex}"
        self._call_ids.add(call_id)

    async def called(self, item: dict[str, Any]) -> ToolOutput:
        """Do what a call asks for."""
        name = str(item.get("name"))
        if item.get("type") == "custom_tool_call":
            if name != "apply_patch":
                return f"unsupported custom tool call: {name}"
            return await self._toolbox.patch(str(item.get("input", "")))
        if item.get("type") != "function_call":
            return f"unsupported call: {item.get('type')}"
        arguments = item.get("arguments")
        return await self._toolbox.call(
            name, arguments if isinstance(arguments, str) else "", item["call_id"]
        )

    def answered(self, item: dict[str, Any], output: ToolOutput) -> None:
        """Keep what a call was answered."""
        self._keep({"type": answer_type(item), "call_id": item["call_id"], "output": output})

    def counted(self, usage: Usage) -> None:
        """Keep what an answer has cost."""
        names = usage.__struct_fields__
        self._usage = Usage(**{name: getattr(self._usage, name) + getattr(usage, name) for name in names})
        self._thread.append("event_msg", usage_record(self._usage, usage))

    # The rest --------------------------------------------------------------------------------------

    def _keep(self, item: Mapping[str, Any]) -> None:
        self._thread.append("response_item", item)

    def _keep_event(self, kind: str, **more: Any) -> None:
        self._thread.append("event_msg", {"type": kind, **more})

    def _new_toolbox(self) -> Toolbox:
        settings = self._settings
        return Toolbox(
            self._writer,
            self._machines,
            self._cwds,
            thread_id=self._thread.id,
            mode=settings.mode,
            writable=settings.writable,
            network=settings.network,
            approvals=settings.approvals,
            policy=settings.policy,
            ask=self._ask,
            servers=self._servers,
        )

    def _connection_changed(self, name: str, connected: bool) -> None:
        if not connected and self._turn is not None and name in self._machines:
            self._writer.notice(Notice(1, 1, f"the connection to environment `{name}` was lost"))


class _Answer:
    """One answer of the model: asked for until it is whole, and every call in it answered."""

    def __init__(self, runner: Runner, context: Sequence[dict[str, Any]]) -> None:
        self._runner = runner
        self._context = context
        self._calls: list[tuple[dict[str, Any], asyncio.Task[ToolOutput]]] = []
        self._alone: asyncio.Task[ToolOutput] | None = None

    async def hear(self) -> bool:
        """Whether there were calls, so that the model wants to be asked again."""
        settings = self._runner.client.settings
        attempt = 0
        wait = settings.network_wait_seconds
        waited = 0.0
        try:
            while True:
                try:
                    await self._hear_once()
                except ModelFailed as failure:
                    # What it called for before it broke off has been done or is being done: once.
                    await self._answer_calls()
                    if failure.fatal:
                        raise
                    if failure.network:
                        limit = settings.network_give_up_seconds
                        if limit is not None and waited >= limit:
                            raise
                        self._runner.notice(Notice(None, None, str(failure)))
                        await asyncio.sleep(wait)
                        waited += wait
                        wait = min(wait * 2, NETWORK_WAIT_MOST)
                        continue
                    attempt += 1
                    if attempt > settings.max_retries:
                        raise
                    self._runner.notice(Notice(attempt, settings.max_retries, str(failure)))
                    pause = settings.retry_seconds * 2 ** (attempt - 1)
                    await asyncio.sleep(pause * random.uniform(0.9, 1.1))  # noqa: S311  # no secret
                else:
                    return await self._answer_calls()
        except asyncio.CancelledError:
            await self._abort_calls()
            raise

    async def _hear_once(self) -> None:
        runner = self._runner
        async for happened in runner.client.ask(runner.request(self._context)):
            if isinstance(happened, ItemAdded):
                runner.searches.began(happened.item)
            elif isinstance(happened, ItemDone):
                self._take(dict(happened.item))
            elif isinstance(happened, Completed):
                runner.counted(happened.usage)

    def _take(self, item: dict[str, Any]) -> None:
        if answer_type(item) is None:
            self._runner.said(item)
            self._runner.searches.ended(item)
            return
        self._runner.name(item)
        self._runner.said(item)
        before = [task for _, task in self._calls]
        if not _is_edit(item):
            # Commands run side by side; what edits files waits for those before it, and they for it.
            before = [self._alone] if self._alone is not None else []
        task = asyncio.create_task(self._do(item, before))
        if _is_edit(item):
            self._alone = task
        self._calls.append((item, task))

    async def _do(self, item: dict[str, Any], before: Sequence[asyncio.Task[ToolOutput]]) -> ToolOutput:
        if before:
            await asyncio.wait(before)
        try:
            return await self._runner.called(item)
        except Exception as error:
            log.error("a tool failed for no reason of its own", tool=item.get("name"), error=repr(error))
            return f"internal error: {error!r}"

    async def _answer_calls(self) -> bool:
        """Wait for every call and keep the answers, in the order of the calls."""
        calls = self._calls
        if not calls:
            return False
        await asyncio.wait([task for _, task in calls])
        for item, task in calls:
            self._runner.answered(item, task.result())
        self._calls = []
        self._alone = None
        return True

    async def _abort_calls(self) -> None:
        """Stop what is being done, and wait until it has stopped: a patch goes on to its end."""
        for _, task in self._calls:
            task.cancel()
        if self._calls:
            await asyncio.wait([task for _, task in self._calls])
        for item, task in self._calls:
            self._runner.answered(item, ABORTED if task.cancelled() else task.result())
        self._calls = []


def _is_edit(item: dict[str, Any]) -> bool:
    if item.get("name") == "apply_patch":
        return True
    arguments = item.get("arguments")
    return item.get("name") == "exec_command" and isinstance(arguments, str) and "apply_patch" in arguments


def _texts(parts: Any, *names: str, between: str) -> str:
    """The texts of a message's parts, or of a thought's."""
    found: list[str] = []
    for part in parts if isinstance(parts, list) else []:
        for name in names:
            if isinstance(part, dict) and isinstance(part.get(name), str):
                found.append(part[name])
                break
    return between.join(found)
