"""How an agent goes about its work."""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct

from .approvals import ApprovalMode
from .confinement import Mode
from .context import INSTRUCTIONS
from .model import ModelSettings
from .policy import Policy
from .subagents import MAX_AGENTS

__all__ = ["MAX_STEPS", "RunnerSettings"]

MAX_STEPS: Final = 1000
"""Most answers of a model in one turn: one that calls tools without end is stopped some time."""


class RunnerSettings(Struct, frozen=True, kw_only=True):
    """How a run goes about it."""

    model: ModelSettings
    environment_ids: tuple[str, ...]
    """The environments it may use; the first is where everything happens that names no other."""
    cwd: str | None = None
    """Directory on the first environment; None is that machine's own."""
    home: str | None = None
    """Directory here with what the user has for every agent: AGENTS.md and skills."""
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
    max_agents: int = MAX_AGENTS
    """Most agents that work for this one at a time; with 0 the model is offered none."""
    agent_depth: int = 1
    """How deep agents may have agents: 1 is that those of this one have none."""
    compact_tokens: int | None = None
    """How long a request may get before the history is summed up; None is nine tenths of the window."""
    context_window: int | None = None
    """Tokens the model has room for, if that is known."""
