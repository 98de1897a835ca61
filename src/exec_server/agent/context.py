"""What a model is told besides the conversation: who it is, where it works, and what it finds there."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from datetime import date
from typing import TYPE_CHECKING, Any, Final

from .. import log
from ..client.errors import ExecServerError
from ..wire.uri import ForeignPath, native_path, parse
from .confinement import Mode, shown
from .exec import without_surrogates
from .home import NAMES, OwnSkill, fields_of

if TYPE_CHECKING:
    from ..environments.metadata import RootMetadata
    from ..environments.snapshot import Step
    from ..services import Files

__all__ = [
    "INSTRUCTIONS",
    "environment_context",
    "instructions",
    "message",
    "project_instructions",
    "server_instructions",
    "skills_context",
]

INSTRUCTIONS: Final = """\
You are an agent that works on a machine through tools. Be precise and careful.

Run commands with exec_command; one that goes on running gives a session id for write_stdin. Edit files with
apply_patch. For work of several steps keep a plan with update_plan. Look before you change something, check
what you have changed, and say plainly what you did and what did not work. When you are done, answer in a few
sentences; nobody reads your output before that.
"""

MAX_PROJECT_BYTES: Final = 32 * 1024
"""Most of a project's instructions that are shown; the reference's bound."""

MAX_SKILLS: Final = 200


def message(role: str, text: str, *, kind: str | None = None) -> dict[str, Any]:
    """A message of the conversation; `kind` says what it is to whoever counts turns later."""
    part = "output_text" if role == "assistant" else "input_text"
    said: dict[str, Any] = {"type": "message", "role": role, "content": [{"type": part, "text": text}]}
    if kind is not None:
        said["internal_chat_message_metadata_passthrough"] = {"content_item_kinds": [kind]}
    return said


def _said(uri: str) -> str:
    """A path in words. One that is not UTF-8 cannot be said as it is."""
    return str(without_surrogates(shown(uri)))


def environment_context(step: Step, cwds: dict[str, str], mode: Mode, today: date) -> str:
    """Where the model works, in this step."""
    lines = ["<environment_context>"]
    several = len(step.ready) > 1
    for entry in step.ready:
        name = entry.selection.environment_id
        where = [f"  <cwd>{_said(cwds[name])}</cwd>"] if name in cwds else []
        where += [f"  <shell>{entry.shell.name}</shell>"] if entry.shell is not None else []
        if several:
            lines += [f'  <environment id="{name}">', *("  " + line for line in where), "  </environment>"]
        else:
            lines += where
    lines += [f"  <sandbox_mode>{mode}</sandbox_mode>", f"  <current_date>{today.isoformat()}</current_date>"]
    return "\n".join([*lines, "</environment_context>"])


def instructions(text: str, place: str | None = None) -> str:
    """What agents are told in a directory, or everywhere."""
    where = f" for {place}" if place is not None else ""
    return f"# AGENTS.md instructions{where}\n\n<INSTRUCTIONS>\n{text}\n</INSTRUCTIONS>"


async def project_instructions(files: Files, cwd: str) -> str | None:
    """What the project says to agents: its AGENTS.md files, from its root down to the directory.

    What cannot be read is not there: a machine in trouble shows that soon enough.
    """
    try:
        path = native_path(parse(cwd))
    except ForeignPath:
        return None
    parts: list[str] = []
    room = MAX_PROJECT_BYTES
    for place in await _down_from_root(files, path):
        for name in NAMES:
            try:
                data = await files.read(posixpath.join(place, name))
            except (ExecServerError, OSError):
                continue
            if room <= 0:
                log.warning("project instructions are left out: too long", path=posixpath.join(place, name))
                break
            text = data[:room].decode("utf-8", "replace").strip()
            room -= len(data)
            if text:
                parts.append(instructions(text, without_surrogates(place)))
            break
    return "\n\n".join(parts) or None


async def _down_from_root(files: Files, path: str) -> list[str]:
    """The directories from the project's root to the path; only the path where there is no project."""
    places = [path]
    while places[0] != "/":
        try:
            if await files.exists(posixpath.join(places[0], ".git")):
                return places
        except (ExecServerError, OSError):
            break
        places.insert(0, posixpath.dirname(places[0]))
    return [path]


def server_instructions(said: Mapping[str, str]) -> str | None:
    """What tool servers say of how to use them, by their names; None if they say nothing."""
    if not said:
        return None
    parts = [f"## Tools mcp__{name}__*\n{text}" for name, text in said.items()]
    return "\n\n".join(["<mcp_instructions>", *parts, "</mcp_instructions>"])


def skills_context(found: Sequence[RootMetadata], own: Sequence[OwnSkill] = ()) -> str | None:
    """The user's own skills, and skills and plugins of the roots that are ready; None if there are none."""
    lines = [f"- {skill.name}: {skill.description} (file: {without_surrogates(skill.path)})" for skill in own]
    for metadata in found:
        if metadata.found is None:
            continue
        plugin = metadata.found.plugin
        if plugin is not None:
            lines.append(f"- plugin at {_said(metadata.root.path)} ({metadata.root.environment_id})")
        for skill in metadata.found.skills[:MAX_SKILLS]:
            fields = fields_of(skill.instructions.contents)
            path = _said(skill.instructions.path)
            name = fields.get("name") or posixpath.basename(posixpath.dirname(path))
            lines.append(
                f"- {name}: {fields.get('description', '')} (file: {path}, environment:"
                f" {metadata.root.environment_id})"
            )
    if not lines:
        return None
    head = (
        "<skills_instructions>\nA skill is a set of instructions in a file."
        " When a task fits one, read its file first.\n"
    )
    return head + "\n".join(lines) + "\n</skills_instructions>"
