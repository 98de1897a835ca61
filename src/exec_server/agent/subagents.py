"""Agents that work for an agent: each a thread of its own, with the same machines and the same selection.

A model starts them, talks to them and waits for them with five tools, the reference's; what they do is not
part of the stream of whoever started them, only the calls are. They end with their parent's run.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
from msgspec import Struct

from .. import log
from ..client.errors import ExecServerError
from ..events.model import AgentState, CollabToolCall
from .exec import ToolError, arguments
from .subagent_tools import TOOLS, CloseAgent, ResumeAgent, SendInput, SpawnAgent, WaitAgent

if TYPE_CHECKING:
    from ..environments.roots import SelectedRoot
    from ..events.writer import EventWriter
    from .outcome import Outcome
    from .record import Record
    from .thread import Thread, Threads

__all__ = ["Subagents", "Worker"]

MAX_AGENTS: Final = 6
"""Most agents of one thread at a time; the reference's value."""

WAIT_DEFAULT_MS: Final = 30_000
WAIT_LEAST_MS: Final = 10_000
WAIT_MOST_MS: Final = 3_600_000
"""Times of a wait, the reference's: shorter ones would only make a model ask again and again."""

FINAL: Final = frozenset({"completed", "errored", "interrupted", "shutdown", "not_found"})
"""How an agent is when there is nothing to wait for."""

NOT_FOUND: Final = AgentState(status="not_found")


class Worker(Protocol):
    """What works on a thread: a Runner."""

    async def run(self, prompt: str) -> Outcome: ...

    def interrupt(self) -> None: ...

    async def close(self) -> None: ...


Employ = Callable[["Thread", str | None, str | None], Worker]
"""Makes a worker for a thread; with another model or reasoning effort, if they are given."""


class _Agent:
    """One agent, and what is still to be said to it."""

    def __init__(self, thread: Thread, worker: Worker) -> None:
        self.thread = thread
        self.worker = worker
        self.state = AgentState(status="pending_init")
        self.prompts: list[str] = []
        self.task: asyncio.Task[None] | None = None


class Subagents:
    """The agents of one thread. `close` ends them all."""

    def __init__(
        self, writer: EventWriter, parent: Thread, threads: Threads, employ: Employ, *, most: int = MAX_AGENTS
    ) -> None:
        self._writer = writer
        self._parent = parent
        self._threads = threads
        self._employ = employ
        self._most = most
        self._agents: dict[str, _Agent] = {}
        self._closed: set[str] = set()
        self._changed = asyncio.Event()
        self._news: list[str] = []

    def definitions(self) -> list[dict[str, Any]]:
        """The tools as a model is told of them."""
        return list(TOOLS.values())

    def __contains__(self, name: str) -> bool:
        return name in TOOLS

    def news(self) -> list[str]:
        """What became of agents since somebody last asked, for the model."""
        news, self._news = self._news, []
        return news

    async def close(self) -> None:
        """End them all, and wait for that."""
        agents = list(self._agents.values())
        self._agents.clear()
        await asyncio.gather(*(self._dismiss(agent) for agent in agents))

    async def call(self, name: str, text: str) -> str:
        """Do what a call asks for; what the model is told."""
        if name == "spawn_agent":
            return await self._spawn(arguments(text, SpawnAgent))
        if name == "send_input":
            return await self._send(arguments(text, SendInput))
        if name == "wait_agent":
            return await self._wait(arguments(text, WaitAgent))
        if name == "close_agent":
            return await self._close(arguments(text, CloseAgent))
        return await self._resume(arguments(text, ResumeAgent))

    # The tools -------------------------------------------------------------------------------------

    async def _spawn(self, call: SpawnAgent) -> str:
        prompt = call.prompt()
        item = self._began("spawn_agent", (), prompt)
        if len(self._agents) >= self._most:
            self._ended(item, {}, failed=True)
            raise ToolError(
                f"spawn_agent failed: there are {self._most} agents, as many as there may be; close one first"
            )
        try:
            # The whole of what was said, or nothing of it; calls are this thread's own.
            thread = self._threads.fork(
                self._parent,
                turns=None if call.fork_context else 0,
                subagent=True,
                keep=_is_said,
                roots=_roots(self._parent),
            )
            agent = _Agent(thread, self._employ(thread, call.model, call.reasoning_effort))
        except (ExecServerError, OSError) as error:
            self._ended(item, {}, failed=True)
            raise ToolError(f"spawn_agent failed: {error}") from None
        self._agents[thread.id] = agent
        self._ended(item, {thread.id: agent.state})
        self._give(agent, prompt)
        return _json({"agent_id": thread.id})

    async def _send(self, call: SendInput) -> str:
        prompt = call.prompt()
        target = _agent_id(call.target)
        agent = self._agents.get(target)
        item = self._began("send_input", (target,), prompt)
        before = self._state(target)
        if agent is None:
            self._ended(item, {target: before}, failed=True)
            raise ToolError(f"agent with id {target} not found")
        if call.interrupt and agent.task is not None and not agent.task.done():
            agent.prompts.clear()
            agent.worker.interrupt()
        self._ended(item, {target: before})
        self._give(agent, prompt)
        return _json({"submission_id": str(uuid.uuid4())})

    async def _wait(self, call: WaitAgent) -> str:
        targets = tuple(_agent_id(target) for target in call.targets)
        if not targets:
            raise ToolError("agent ids must be non-empty")
        item = self._began("wait", targets, None)
        asked = WAIT_DEFAULT_MS if call.timeout_ms is None else call.timeout_ms
        over = await self._any_final(targets, min(max(asked, WAIT_LEAST_MS), WAIT_MOST_MS) / 1000)
        failed = any(state.status in ("errored", "not_found") for state in over.values())
        self._ended(item, over, failed=failed)
        told = {target: _told(state) for target, state in over.items()}
        return _json({"status": told, "timed_out": not over})

    async def _close(self, call: CloseAgent) -> str:
        target = _agent_id(call.target)
        item = self._began("close_agent", (target,), None)
        before = self._state(target)
        agent = self._agents.pop(target, None)
        if agent is not None:
            self._closed.add(target)
            await self._dismiss(agent)
            self._change(agent, AgentState(status="shutdown"))
        elif before == NOT_FOUND:
            self._ended(item, {target: before}, failed=True)
            raise ToolError(f"agent with id {target} not found")
        self._ended(item, {target: before})
        return _json({"previous_status": _told(before)})

    async def _resume(self, call: ResumeAgent) -> str:
        target = _agent_id(call.id)
        item = self._began("wait", (target,), None)  # the reference tells it as that
        if target not in self._agents:
            try:
                self._agents[target] = self._from_disk(target)
            except (ExecServerError, OSError) as error:
                self._ended(item, {target: NOT_FOUND}, failed=True)
                raise ToolError(f"agent with id {target} not found: {error}") from None
            self._closed.discard(target)
        state = self._state(target)
        self._ended(item, {target: state})
        return _json({"status": _told(state)})

    def _from_disk(self, target: str) -> _Agent:
        thread = self._threads.resume(target)
        if thread.meta.parent_thread_id != self._parent.id:
            thread.close()
            raise ToolError("it does not work for this thread")
        return _Agent(thread, self._employ(thread, None, None))

    # Working ---------------------------------------------------------------------------------------

    def _give(self, agent: _Agent, prompt: str) -> None:
        """Something to do, after what it is doing."""
        agent.prompts.append(prompt)
        self._change(agent, AgentState(status="running"))
        if agent.task is None or agent.task.done():
            agent.task = asyncio.create_task(self._work(agent))

    async def _work(self, agent: _Agent) -> None:
        while agent.prompts:
            outcome = await agent.worker.run(agent.prompts.pop(0))
            if agent.prompts:
                continue
            if outcome.completed:
                state = AgentState(status="completed", message=outcome.answer)
            elif outcome.error == "interrupted":
                state = AgentState(status="interrupted")
            else:
                state = AgentState(status="errored", message=outcome.error)
            log.debug("subagent is done", thread=agent.thread.id, status=state.status)
            if agent.thread.id in self._agents:
                about = _json({"agent_path": agent.thread.id, "status": _told(state)})
                self._news.append(f"<subagent_notification>\n{about}\n</subagent_notification>")
            self._change(agent, state)

    async def _dismiss(self, agent: _Agent) -> None:
        agent.prompts.clear()
        if agent.task is not None and not agent.task.done():
            agent.worker.interrupt()
            await asyncio.wait([agent.task])
        await agent.worker.close()
        agent.thread.close()

    def _change(self, agent: _Agent, state: AgentState) -> None:
        agent.state = state
        self._changed.set()
        self._changed = asyncio.Event()

    async def _any_final(self, targets: tuple[str, ...], seconds: float) -> dict[str, AgentState]:
        """Those of the targets that are done, as soon as there is one; none when the time is over."""
        try:
            async with asyncio.timeout(seconds):
                while True:
                    states = {target: self._state(target) for target in targets}
                    over = {target: state for target, state in states.items() if state.status in FINAL}
                    if over:
                        return over
                    await self._changed.wait()
        except TimeoutError:
            return {}

    def _state(self, target: str) -> AgentState:
        agent = self._agents.get(target)
        if agent is not None:
            return agent.state
        return AgentState(status="shutdown") if target in self._closed else NOT_FOUND

    # Telling ---------------------------------------------------------------------------------------

    def _began(self, tool: str, receivers: tuple[str, ...], prompt: str | None) -> _Told:
        item = CollabToolCall(
            tool=tool,
            sender_thread_id=self._parent.id,
            receiver_thread_ids=receivers,
            prompt=prompt,
            agents_states={},
            status="in_progress",
        )
        return _Told(self._writer.started(item), item)

    def _ended(self, told: _Told, states: dict[str, AgentState], *, failed: bool = False) -> None:
        item = msgspec.structs.replace(
            told.item,
            receiver_thread_ids=tuple(states),
            agents_states=states,
            status="failed" if failed else "completed",
        )
        self._writer.completed(item, told.item_id)


class _Told(Struct, frozen=True):
    """A call that has been told as begun."""

    item_id: str
    item: CollabToolCall


def _roots(parent: Thread) -> Sequence[SelectedRoot] | None:
    """What the parent works with, if that is not what its record says; that one is inherited as it is."""
    return None if list(parent.roots) == parent.meta.selected_capability_roots else parent.roots


def _is_said(record: Record) -> bool:
    """What an agent gets to know of its parent's thread: what was said, not what was done for it."""
    return record.type == "compacted" or (
        record.type == "response_item" and record.payload.get("type") == "message"
    )


def _agent_id(text: str) -> str:
    try:
        return str(uuid.UUID(text))
    except ValueError:
        raise ToolError(f"invalid agent id {text!r}: it is none that spawn_agent returned") from None


def _told(state: AgentState) -> Any:
    """A state as the model is told of it."""
    if state.status in ("completed", "errored"):
        return {state.status: state.message}
    return state.status


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
