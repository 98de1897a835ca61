"""An agent's task: what an agent identity must have before its signatures mean anything to a registry."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, urlsplit

import msgspec

from .credentials import CredentialError

if TYPE_CHECKING:
    from .credentials import AgentIdentity

__all__ = ["register_task"]

SECONDS: Final = 10.0
MAX_ANSWER_BYTES: Final = 64 * 1024


async def register_task(identity: AgentIdentity, base_url: str) -> str:
    """Register a task with the accounts service at this address, and give its id."""
    import aiohttp

    parts = urlsplit(base_url)
    loopback = parts.hostname in ("localhost", "::1") or (parts.hostname or "").startswith("127.")
    if not parts.hostname or (parts.scheme != "https" and not (parts.scheme == "http" and loopback)):
        raise CredentialError(f"`{base_url}` is not the https:// address of an accounts service")
    url = f"{base_url.rstrip('/')}/v1/agent/{quote(identity.runtime_id, safe='')}/task/register"
    try:
        async with (
            asyncio.timeout(SECONDS),
            aiohttp.ClientSession(skip_auto_headers=("User-Agent",)) as session,
            session.post(
                url,
                data=msgspec.json.encode(identity.registration()),
                headers={"Content-Type": "application/json"},
                allow_redirects=False,
            ) as response,
        ):
            status, body = response.status, await response.content.read(MAX_ANSWER_BYTES)
    except TimeoutError:
        raise CredentialError(f"the accounts service did not answer within {SECONDS:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise CredentialError(f"the accounts service cannot be reached: {type(error).__name__}") from None
    if not 200 <= status < 300:
        raise CredentialError(f"the accounts service answered HTTP {status} to the agent's task")
    return _task_id(body)


def _task_id(body: bytes) -> str:
    try:
        answer = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise CredentialError("the accounts service did not answer with a JSON object")
    for name in ("task_id", "taskId"):
        if isinstance(answer.get(name), str) and answer[name].strip():
            return str(answer[name])
    if "encrypted_task_id" in answer or "encryptedTaskId" in answer:
        raise CredentialError(
            "the accounts service sealed the id of the agent's task, which cannot be opened here;"
            " set EXEC_SERVER_AGENT_TASK_ID to it"
        )
    raise CredentialError("the accounts service named no task for the agent")
