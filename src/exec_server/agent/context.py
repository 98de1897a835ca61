"""What a model is told besides the conversation: who it is, where it works, and what it finds there."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from datetime import date
from typing import TYPE_CHECKING, Any, Final

from .. import log
from ..client.errors import ExecServerError
from ..wire.uri import ForeignPath, native_path, parse
from .confinement import Mode, shown

if TYPE_CHECKING:
    from ..environments.metadata import RootMetadata
    from ..environments.snapshot import Step
    from ..services import Files

__all__ = ["INSTRUCTIONS", "environment_context", "message", "project_instructions", "skills_context"]

INSTRUCTIONS: Final = """\
You are an agent that works on a machine through tools. Be precise and careful.

Run commands with exec_command; one that goes on running gives a session id for write_stdin. Edit files with
apply_patch. For work of several steps keep a plan with update_plan. Look before you change something, check
what you have changed, and say plainly what you did and what did not work. When you are done, answer in a few
sentences; nobody reads your output before that.
"""

MAX_PROJECT_BYTES: Final = 32 * 1024
"""Most of a project's instructions that are shown; the reference's bound."""

NAMES: Final = ("AGENTS.override.md", "AGENTS.md")
"""Of these the first that is there counts, in every directory from the project's root down."""

MAX_SKILLS: Final = 200


def message(role: str, text: str, *, kind: str | None = None) -> dict[str, Any]:
    """A message of the conversation; `kind` says what it is to whoever counts turns later."""
    part = "output_text" if role == "assistant" else "input_text"
    said: dict[str, Any] = {"type": "message", "role": role, "content": [{"type": part, "text": text}]}
    if kind is not None:
        said["internal_chat_message_metadata_passthrough"] = {"content_item_kinds": [kind]}
    return said


def environment_context(step: Step, cwds: dict[str, str], mode: Mode, today: date) -> str:
    """Where the model works, in this step."""
    lines = ["<environment_context>"]
    several = len(step.ready) > 1
    for entry in step.ready:
        name = entry.selection.environment_id
        where = [f"  <cwd>{shown(cwds[name])}</cwd>"] if name in cwds else []
        where += [f"  <shell>{entry.shell.name}</shell>"] if entry.shell is not None else []
        if several:
            lines += [f'  <environment id="{name}">', *("  " + line for line in where), "  </environment>"]
        else:
            lines += where
    lines += [f"  <sandbox_mode>{mode}</sandbox_mode>", f"  <current_date>{today.isoformat()}</current_date>"]
    return "\n".join([*lines, "</environment_context>"])


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
                parts.append(
                    f"# AGENTS.md instructions for {place}\n\n<INSTRUCTIONS>\n{text}\n</INSTRUCTIONS>"
                )
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


_FIELD: Final = re.compile(r"^(name|description):\s*(.+?)\s*$", re.MULTILINE)


def skills_context(found: Sequence[RootMetadata]) -> str | None:
    """The skills and plugins of the roots that are ready; None if there are none."""
    lines: list[str] = []
    for metadata in found:
        if metadata.found is None:
            continue
        plugin = metadata.found.plugin
        if plugin is not None:
            lines.append(f"- plugin at {shown(metadata.root.path)} ({metadata.root.environment_id})")
        for skill in metadata.found.skills[:MAX_SKILLS]:
            head = skill.instructions.contents.partition("---")[2].partition("---")[0]
            fields = {name: value.strip("\"'") for name, value in _FIELD.findall(head)}
            path = shown(skill.instructions.path)
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
