"""An agent: a thread, its turns, and the steps of a model in each of them, told as the event stream tells it.

A step is one answer of the model and everything it calls for. Each begins with a look at which environments
are ready, and uses exactly those.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict, replace

from .. import log
from ..client.errors import ExecServerError
from ..events.model import AgentMessage, ErrorItem, Reasoning, Usage
from ..events.notice import Notice
from .answer import Answer
from .approvals import Approver
from .compaction import COMPACTED, Summarizer, compacted, limit_of, shortened, worth_it
from .context import message, server_instructions
from .conversation import (
    answer_type,
    conversation,
    kept_items,
    last_request_tokens,
    sendable,
    total_usage,
    usage_record,
)
from .exec import without_surrogates
from .items import texts_of
from .machines import Machines
from .model import ModelClient, ModelFailed
from .outcome import Outcome
from .record import BadRecord
from .runner_settings import RunnerSettings
from .searching import Searches
from .steps import Steps
from .subagents import Subagents
from .tools import Toolbox, ToolOutput

if TYPE_CHECKING:
    from ..environments.manager import EnvironmentManager
    from ..events.writer import EventWriter
    from .approvals import Ask
    from .mcp_client import McpServers
    from .thread import Thread, Threads

__all__ = ["Outcome", "Runner", "RunnerSettings"]


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
        threads: Threads | None = None,
        approver: Approver | None = None,
    ) -> None:
        """`threads` is where agents get their threads, if there are to be any."""
        self._manager = manager
        self._thread = thread
        self._threads = threads
        self._writer = writer
        self._settings = settings
        self._servers = servers
        self._approver = approver or Approver(settings.approvals, settings.policy, ask)
        self._client = ModelClient(settings.model)
        self._steps = Steps(
            manager,
            thread,
            settings.environment_ids,
            settings.cwd,
            settings.mode,
            connection_changed=self._connection_changed,
            home=settings.home,
        )
        history = thread.history()
        self._usage = total_usage(history)
        self._usage_before = self._usage
        self._length = last_request_tokens(history)
        """About how many tokens the next request has."""
        self._call_ids = {str(item.get("call_id")) for item in conversation(history)}
        self._context: Sequence[dict[str, Any]] = ()
        self._subagents: Subagents | None = None
        if threads is not None and settings.max_agents > 0 and settings.agent_depth > 0:
            self._subagents = Subagents(writer, thread, threads, self._employ, most=settings.max_agents)
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

    async def run(self, prompt: str, images: Sequence[dict[str, Any]] = ()) -> Outcome:
        """One turn, to its outcome: there is exactly one, whatever happens.

        `images` are parts of the prompt that come before its text (`images.prompt_image`).
        """
        turn_id = str(uuid.uuid4())
        self._answer = None
        self._usage_before = self._usage
        self._writer.turn_started()
        self._turn = asyncio.create_task(self._work(prompt, images, turn_id))
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
        except BadRecord as failure:
            error = f"the thread cannot be written down: {failure}"
        except (ExecServerError, OSError) as failure:
            error = str(failure)
        except Exception as failure:
            log.error("a turn failed for no reason of its own", error=repr(failure))
            error = f"internal error: {failure!r}"
        finally:
            self._turn = None
            self._cause = None
        await self._toolbox.close()
        self._toolbox = self._new_toolbox()
        return self._end(turn_id, error, told=shown)

    def _end(self, turn_id: str, error: str | None, *, told: bool) -> Outcome:
        try:
            if error is None:
                self._keep_event("task_complete", turn_id=turn_id, last_agent_message=self._answer)
            else:
                self._keep_event("turn_aborted", turn_id=turn_id, reason=error if told else "error")
            self._thread.sync()
        except (OSError, BadRecord) as failure:
            if error is None:
                error = f"the thread cannot be written down: {failure}"
        ext: dict[str, Any] = {"turn_usage": asdict(self._usage.since(self._usage_before))}
        if error is None:
            self._writer.turn_completed(self._usage, ext=ext)
            return Outcome(self._answer, None)
        if told:
            self._writer.turn_failed(error, ext={**ext, "cause": error})
        else:
            self._writer.fail(error, ext=ext)
        return Outcome(None, error)

    def interrupt(self, cause: str = "interrupted") -> None:
        """End the turn that is under way, or the one that is about to begin; its outcome says why."""
        self._cause = cause
        if self._turn is not None:
            self._turn.cancel()

    async def close(self) -> None:
        """Let go of everything, also of the agents that work for this one. Commands ended with their turn."""
        if self._subagents is not None:
            await self._subagents.close()
        await self._toolbox.close()
        self._steps.close()
        await self._client.close()

    # Steps -----------------------------------------------------------------------------------------

    async def _work(self, prompt: str, images: Sequence[dict[str, Any]], turn_id: str) -> None:
        settings = self._settings
        self._keep_event("task_started", turn_id=turn_id)
        said = message("user", without_surrogates(prompt), kind="user.text")
        self._keep({**said, "content": [*images, *said["content"]]})
        await self._steps.begin_turn(self._warn)
        for _ in range(settings.max_steps):
            self._context = [*await self._steps.next(), *await self._from_servers()]
            if not await self._step():
                return
        raise ModelFailed(f"gave up after {settings.max_steps} answers of the model in one turn")

    async def _from_servers(self) -> list[dict[str, Any]]:
        """What tool servers have to say before a step: which tools they have now, and how to use them."""
        if self._servers is None:
            return []
        for warning in await self._servers.refresh():
            self._warn(warning)
        told = server_instructions(self._servers.instructions)
        return [message("developer", told)] if told is not None else []

    async def _step(self) -> bool:
        """One answer; whether there were calls in it, so that the model wants to be asked again."""
        for news in self._subagents.news() if self._subagents is not None else ():
            self._keep(message("user", news))
        if self._length >= limit_of(self._settings.compact_tokens, self._settings.context_window):
            await self._compact()
        try:
            return await Answer(self).hear()
        except ModelFailed as failure:
            # Nobody said how much room there is; now the endpoint has.
            if not failure.context_full or not await self._compact():
                raise
        return await Answer(self).hear()

    async def _compact(self) -> bool:
        """Let the model sum up the history, and go on with that; False if there is nothing to sum up."""
        kept = kept_items(self._thread.history())
        if not worth_it(kept):
            return False
        items = sendable(kept)
        while True:
            summary = Summarizer(
                self._client, self._settings.instructions, items, notice=self.notice, counted=self.counted
            )
            try:
                await Answer(summary).hear()
                break
            except ModelFailed as failure:
                if not failure.context_full or len(items) < 2:
                    raise
                items = shortened(items)
        self._thread.append(COMPACTED, compacted(kept, summary.text))
        self._length = 0
        return True

    # What an answer brings, for Answer -------------------------------------------------------------

    @property
    def client(self) -> ModelClient:
        return self._client

    def request(self) -> dict[str, Any]:
        """What is asked of the model: everything it has to know, every time."""
        settings = self._settings
        reasoning = {"summary": "auto"}
        if settings.reasoning_effort:
            reasoning["effort"] = settings.reasoning_effort
        request: dict[str, Any] = {
            "instructions": settings.instructions,
            "input": [*self._context, *conversation(self._thread.history())],
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

    def notice(self, notice: Notice) -> None:
        """Something is tried again."""
        self._writer.notice(notice)

    def began(self, item: dict[str, Any]) -> None:
        """The model has begun something."""
        self._searches.began(item)

    def said(self, item: dict[str, Any]) -> None:
        """The model has said something: keep it, and show what is for people."""
        if answer_type(item) is not None:
            self._name(item)
        self._keep(item)
        if item.get("type") == "message" and item.get("role", "assistant") == "assistant":
            self._answer = texts_of(item.get("content"), "text", "refusal", between="")
            phase = item.get("phase")
            ext = {"phase": phase} if isinstance(phase, str) else None
            self._writer.completed(AgentMessage(text=self._answer), ext=ext)
        elif item.get("type") == "reasoning":
            text = texts_of(item.get("summary"), "text", between="\n")
            if text.strip():
                self._writer.completed(Reasoning(text=text))
        self._searches.ended(item)

    def _name(self, item: dict[str, Any]) -> None:
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
        self._length = usage.input_tokens + usage.output_tokens
        self._thread.append("event_msg", usage_record(self._usage, usage))

    # The rest --------------------------------------------------------------------------------------

    def _keep(self, item: Mapping[str, Any]) -> None:
        self._thread.append("response_item", item)

    def _keep_event(self, kind: str, **more: Any) -> None:
        self._thread.append("event_msg", {"type": kind, **more})

    def _warn(self, text: str) -> None:
        self._writer.completed(ErrorItem(message=text))

    def _new_toolbox(self) -> Toolbox:
        settings = self._settings
        machines = Machines(
            self._steps.ready,
            self._steps.cwds,
            mode=settings.mode,
            writable=settings.writable,
            network=settings.network,
        )
        return Toolbox(
            self._writer,
            machines,
            self._approver,
            thread_id=self._thread.id,
            servers=self._servers,
            subagents=self._subagents,
        )

    def _employ(self, thread: Thread, model: str | None, effort: str | None) -> Runner:
        """A runner for an agent of this one: the same in everything, but nobody sees its stream."""
        from ..events.writer import EventWriter

        settings = self._settings
        chosen = replace(
            settings,
            model=replace(settings.model, model=model or settings.model.model),
            reasoning_effort=effort or settings.reasoning_effort,
            output_schema=None,
            agent_depth=settings.agent_depth - 1,
        )
        runner = Runner(
            self._manager,
            thread,
            EventWriter(_Nowhere()),
            chosen,
            servers=self._servers,
            threads=self._threads,
            approver=self._approver,
        )
        runner.start()
        return runner

    def _connection_changed(self, name: str, connected: bool) -> None:
        if not connected and self._turn is not None and name in self._steps.ready:
            self._writer.notice(Notice(1, 1, f"the connection to environment `{name}` was lost"))


class _Nowhere:
    """A stream that nobody reads."""

    def write(self, line: bytes) -> int:
        return len(line)

    def flush(self) -> None:
        """There is nothing to flush."""
