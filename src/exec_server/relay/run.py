"""An environment as a process: its credential, its identity, and how it ends."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Protocol

from msgspec import Struct

from .. import log
from ..local.process.terminal import StartedFrom
from ..local.sandbox import probe
from ..local.sandbox.look import keep_secret
from ..loop import Loop
from .credentials import (
    FIRST_LINE_SECONDS,
    AgentIdentity,
    Bearer,
    BearerFile,
    CredentialError,
    Credentials,
    RotatingCredential,
)
from .direct import DirectEnvironment, DirectOptions
from .environment import RegistrationFailed, RemoteEnvironment
from .forward import BadDestination, forward_to
from .keys import Identity, KeyFileError, load_or_create, lock
from .registry import BadRegistryUrl, Registry
from .sigv4 import NoAwsCredentials, find_credentials, find_region
from .streams import Accept

__all__ = ["RunFailed", "RunOptions", "run_environment"]

KEY_VARIABLES: Final = ("EXEC_SERVER_API_KEY", "CODEX_API_KEY")


class RunFailed(Exception):
    """The environment cannot be offered, or not any more; the text says why."""


class RunOptions(Struct, frozen=True, kw_only=True):
    """What to offer, where, and as whom."""

    registry_url: str
    environment_id: str
    key_file: str | None = None
    forward: str | None = None
    acks: bool = True
    secrets: Mapping[str, str] = {}
    """Keys and tokens by the names of the variables they came in."""
    api_key_file: str | None = None
    credential_stdin: bool = False
    agent_identity: bool = False
    exit_on_stdin_close: bool = False
    ca_file: str | None = None
    trusted_harnesses: str | None = None
    """A file of fingerprints, one per line; only these get in."""
    direct: bool = False
    """Without a relay: a WebSocket, signed for AWS."""
    aws_profile: str | None = None
    aws_region: str | None = None
    aws_service: str = "execute-api"


class BadTrust(Exception):
    """The file of trusted harnesses cannot be used; the text says why."""


class Served(Protocol):
    """The server behind the streams, as far as its end is concerned."""

    accept: Accept

    def end(self, then: Callable[[], object]) -> None:
        """End every session, and go on when its processes are gone."""

    def close(self) -> None: ...


def run_environment(options: RunOptions, make_server: Callable[[Loop], Served]) -> None:
    """Offer this machine until told to stop. Returns when it was, raises RunFailed when it cannot go on."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(_run(options, make_server))
    else:
        uvloop.run(_run(options, make_server))


def default_key_file(environment_id: str) -> str:
    """Where the identity of an environment is kept, unless told otherwise."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", environment_id)[:128]
    if name != environment_id:
        # Others may look the same now.
        name = f"{name[:96]}-{hashlib.sha256(environment_id.encode()).hexdigest()[:16]}"
    return os.path.join(state, "exec-server", "relay", f"{name}.key")


async def _run(options: RunOptions, make_server: Callable[[Loop], Served]) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    terminal = StartedFrom()
    renewable: list[Callable[[], object]] = []
    loop.add_signal_handler(
        signal.SIGHUP, lambda: stop.set() if terminal.is_gone() else [renew() for renew in renewable]
    )
    stdin = _Stdin(options, stop)
    credentials = None if options.direct else await _credentials(options, stdin, stop)
    if credentials is None and not options.direct:
        return
    server: Served | None = None
    try:
        if options.forward is not None:
            accept = forward_to(options.forward)
        else:
            server = make_server(loop)
            accept = server.accept
        if credentials is None:
            environment: RemoteEnvironment | DirectEnvironment = _direct(options, accept)
        else:
            environment = _relayed(options, credentials, accept)
    except (KeyFileError, BadTrust, BadRegistryUrl, BadDestination, NoAwsCredentials, OSError) as error:
        if server is not None:
            server.close()
        raise RunFailed(str(error)) from None
    environment.on_connected = _Announcement(options)
    if isinstance(environment, RemoteEnvironment):
        renewable.append(partial(_renew, environment, credentials))
    task = asyncio.ensure_future(environment.run())
    ended = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((task, ended), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    except (RegistrationFailed, KeyFileError) as error:
        raise RunFailed(str(error)) from None
    finally:
        for unfinished in (task, ended):
            unfinished.cancel()
        await asyncio.gather(task, ended, return_exceptions=True)
        stdin.close()
        if server is not None:
            gone = asyncio.Event()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, gone.set)  # a second signal does not wait for the first
            server.end(gone.set)
            await gone.wait()
            server.close()
    if stdin.error is not None:
        raise RunFailed(stdin.error)


def _renew(environment: RemoteEnvironment, credentials: Credentials | None) -> None:
    """SIGHUP: take the keys that are in the files now."""
    if not isinstance(credentials, BearerFile):
        environment.renew()
        return
    try:
        changed = credentials.reload()
    except CredentialError as error:
        log.error("this environment goes on with the API key it has", reason=str(error))
        changed = False
    environment.renew(reconnect=changed, undo=credentials.undo)


def _relayed(options: RunOptions, credentials: Credentials, accept: Accept) -> RemoteEnvironment:
    key_path = options.key_file or default_key_file(options.environment_id)
    key_file = _KeyFile(key_path)
    if options.forward is None:
        for path in filter(None, (key_path, options.api_key_file)):
            keep_secret(os.fsencode(os.path.abspath(path)))  # whoever reads them can be us
        probe.backend()  # how they are hidden is asked for where nobody may wait
    ssl = _ssl(options)
    registry = Registry(
        options.registry_url,
        options.environment_id,
        credentials,
        ssl=ssl,
        quote_errors=not options.credential_stdin,
    )
    return RemoteEnvironment(
        registry,
        key_file.load,
        accept,
        acks=options.acks,
        ssl=ssl,
        trusted=None if options.trusted_harnesses is None else _Trusted(options.trusted_harnesses),
    )


def _direct(options: RunOptions, accept: Accept) -> DirectEnvironment:
    signing = DirectOptions(
        credentials=find_credentials(options.aws_profile, os.environ),
        region=find_region(options.aws_region, options.aws_profile, os.environ),
        service=options.aws_service,
    )
    return DirectEnvironment(options.registry_url, options.environment_id, signing, accept, ssl=_ssl(options))


class _KeyFile:
    """The key that we serve with, and nobody else meanwhile."""

    def __init__(self, path: str) -> None:
        self._path = path
        load_or_create(path)
        self._lock = lock(path)

    def load(self) -> Identity:
        """The key in the file, which may be another one by now."""
        identity = load_or_create(self._path)
        if not os.path.samestat(os.fstat(self._lock), os.stat(self._path)):
            before, self._lock = self._lock, lock(self._path)
            os.close(before)
        return identity


class _Trusted:
    """Fingerprints in a file, read whenever somebody comes, so that an edit counts at once."""

    def __init__(self, path: str) -> None:
        """BadTrust where the file is not there, or not what it should be: now, while somebody looks."""
        self._path = path
        self._read()

    def __call__(self) -> frozenset[str]:
        try:
            return self._read()
        except BadTrust as error:
            log.error("the trusted harnesses cannot be read, so nobody gets in", reason=str(error))
            return frozenset()

    def _read(self) -> frozenset[str]:
        found = set()
        try:
            with open(self._path, encoding="utf-8") as file:
                for number, line in enumerate(file, 1):
                    word = line.partition("#")[0].strip().lower()
                    if word and not re.fullmatch("[0-9a-f]{64}", word):
                        raise BadTrust(
                            f"line {number} of {self._path} is not a fingerprint: 64 hexadecimal digits, as"
                            " `exec-server relay key show` prints them"
                        )
                    found.update([word] if word else [])
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise BadTrust(f"the trusted harnesses cannot be read from {self._path}: {reason}") from None
        return frozenset(found)


class _Announcement:
    """Says once, for people, that it works."""

    def __init__(self, options: RunOptions) -> None:
        self._options = options
        self._said = False

    def __call__(self) -> None:
        if not self._said:
            self._said = True
            options = self._options
            address = f"relay+{options.registry_url.partition(',')[0].rstrip('/')}/{options.environment_id}"
            way = "" if options.direct else f"; others reach it as {address}"
            sys.stderr.write(f"exec-server: environment {options.environment_id} is connected{way}\n")


class _Stdin:
    """What comes on stdin: credentials, or only its end, or nothing anybody looks at."""

    def __init__(self, options: RunOptions, stop: asyncio.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = stop
        self._watching = False
        self.error: str | None = None
        self.first = asyncio.Event()
        self.credential = RotatingCredential(options.environment_id) if options.credential_stdin else None
        if options.credential_stdin or options.exit_on_stdin_close:
            try:
                self._loop.add_reader(0, self._readable)
                self._watching = True
            except (OSError, ValueError):
                # A file cannot be watched, only read: it is all there, and then it is at its end.
                self._readable_file()

    def _readable(self) -> None:
        try:
            data = os.read(0, 65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._take(data)

    def _readable_file(self) -> None:
        while data := os.read(0, 65536):
            self._take(data)
        self._take(b"")

    def _take(self, data: bytes) -> None:
        if not data:
            self._end()
        elif self.credential is not None:
            try:
                self.credential.feed(data)
            except CredentialError as error:
                self.error = str(error)
                self._end()
            else:
                if self.credential.present:
                    self.first.set()

    def _end(self) -> None:
        self.close()
        self.first.set()
        self._stop.set()

    def close(self) -> None:
        if self._watching:
            self._watching = False
            self._loop.remove_reader(0)


async def _credentials(options: RunOptions, stdin: _Stdin, stop: asyncio.Event) -> Credentials | None:
    """How to show who we are; None when there is nothing more to do."""
    if stdin.credential is not None:
        try:
            async with asyncio.timeout(FIRST_LINE_SECONDS):
                await stdin.first.wait()
        except TimeoutError:
            raise RunFailed(f"no credential came on stdin within {FIRST_LINE_SECONDS:g} s") from None
        if stdin.error is not None:
            raise RunFailed(stdin.error)
        return stdin.credential if stdin.credential.present and not stop.is_set() else None
    try:
        if options.agent_identity:
            return await _agent_identity(options.secrets)
        if options.api_key_file is not None:
            return BearerFile(options.api_key_file)
        key = next((options.secrets[name] for name in KEY_VARIABLES if options.secrets.get(name)), None)
        if key is None:
            raise RunFailed(
                "no key for the registry: name a file that holds it (--api-key-file), or set"
                f" {KEY_VARIABLES[0]} (made with `exec-server rendezvous key add NAME`)"
            )
        return Bearer(key)
    except CredentialError as error:
        raise RunFailed(str(error)) from None


async def _agent_identity(secrets: Mapping[str, str]) -> AgentIdentity:
    """From the reference's variables. There is no service that is asked by default: it has to be named."""
    token = secrets.get("CODEX_ACCESS_TOKEN", "")
    if not token:
        raise RunFailed("CODEX_ACCESS_TOKEN is not set; it holds the agent's access token")
    identity = AgentIdentity(token)
    if task := os.environ.get("EXEC_SERVER_AGENT_TASK_ID", ""):
        identity.task_id = task
    elif service := os.environ.get("CODEX_AGENT_IDENTITY_AUTHAPI_BASE_URL", ""):
        from .agent_task import register_task

        identity.task_id = await register_task(identity, service)
    else:
        raise RunFailed(
            "an agent needs a task: set CODEX_AGENT_IDENTITY_AUTHAPI_BASE_URL to the accounts service that"
            " registers one, or EXEC_SERVER_AGENT_TASK_ID to one that is registered"
        )
    return identity


def _ssl(options: RunOptions) -> Any:
    if options.ca_file is None:
        return None
    import ssl

    log.debug("trusting a certificate authority of our own", file=options.ca_file)
    return ssl.create_default_context(cafile=options.ca_file)
