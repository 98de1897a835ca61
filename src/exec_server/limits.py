"""Every bound of the server in one place: its name, its unit, and why it is what it is.

Constants are facts of the protocol and never change. `Limits` are settings: the defaults are the
reference server's where it has one, and every one can be changed when a server is made.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

__all__ = ["Limits"]

MIB: Final = 1024 * 1024

# Facts of the protocol ---------------------------------------------------------------------------

MAX_FRAME_BYTES: Final = 16 * MIB
"""Largest incoming WebSocket frame. Both ends of the reference use it."""

MAX_MESSAGE_BYTES: Final = 64 * MIB
"""Largest incoming message: a WebSocket message after reassembly, or a line on stdio."""

MAX_JSON_VALUES: Final = 262_144
"""Most JSON values in one message."""

MAX_JSON_DEPTH: Final = 127
"""Most containers open at once in one message."""

MAX_OUTPUT_CHUNK_BYTES: Final = 64 * 1024
"""Most bytes in one output chunk. The reference stops at 8 KiB; larger chunks are cheaper for everybody."""

MAX_REMEMBERED_WRITES: Final = 4096
"""Accepted write ids remembered per process, oldest forgotten first."""

DEFAULT_ROWS: Final = 24
"""Rows of a new terminal."""

DEFAULT_COLS: Final = 80
"""Columns of a new terminal."""


class Limits(Struct, frozen=True, kw_only=True):
    """What one server allows. Times are seconds, sizes are bytes."""

    detach_ttl: float = 30.0
    """How long a session without a connection is kept."""

    retention: float = 30.0
    """How long a closed process can still be read and its id stays taken. The time does not run while its
    session has no connection."""

    retained_processes: int = 8192
    """Closed processes one session may have in retention; beyond, the oldest is forgotten early."""

    retained_closed_output: int = 256 * MIB
    """Output of closed processes one session may have in retention; beyond, likewise."""

    retained_output: int = MIB
    """Newest output kept per process, for `process/read`."""

    retained_chunks: int = 50_000
    """Most chunks kept per process, so that a million one-byte writes stay cheap too."""

    unacknowledged_output: int = 16 * MIB
    """Output kept for a client that acknowledges what it has received, and has not received this: more than
    fits into the buffers of a connection, so that one that breaks takes nothing with it."""

    retained_head: int = 64 * 1024
    """Oldest output kept next to the newest, for `process/snapshot`."""

    stdin_queue_chunks: int = 128
    """Writes a process may have waiting; the next one is answered when there is room."""

    stdin_queue_bytes: int = 16 * MIB
    """Bytes a process may have waiting on its stdin; the next write is answered when there is room."""

    outgoing_high_water: int = 1 * MIB
    """Unsent bytes of a connection at which its processes are no longer read."""

    outgoing_limit: int = 64 * MIB
    """Unsent bytes at which a client that reads no answers is not read from, either."""

    outgoing_cutoff: int = 512 * MIB
    """Unsent bytes at which such a client, whose earlier requests go on being answered, is disconnected."""

    waiting_requests: int = 1024
    """Requests of one connection that may wait at once (`--concurrent-requests`). `process/wait` is none of
    them, and `process/read` is not where there is but one."""

    long_polls: int = 4096
    """Requests of one connection that may wait for processes without delaying anybody; more are refused."""

    queued_requests: int = 1024
    """Requests that may queue behind those before the connection is no longer read. Half as many, before more
    that wait for processes are refused, so that whoever ends the processes can still be heard."""

    waiting_bytes: int = 64 * MIB
    """Bytes of requests that wait or queue before the connection is no longer read; of long polls, before
    more are refused."""

    max_sessions: int = 16_384
    """Sessions of one server, with or without a connection; as many as there are numbers for their processes'
    tags. At the bound, one that waits for its client and never started anything makes room."""

    max_processes: int | None = None
    """Processes of one session, starting or running; None is no limit."""

    sandbox_helpers: int = 32
    """Helper processes for file calls in sandboxes, at work or warm; a call beyond them waits for one."""

    sandbox_helper_idle: float = 60.0
    """How long a warm helper is kept without a call."""

    shutdown_grace: float = 0.0
    """Between SIGTERM and SIGKILL on shutdown and session expiry; 0 kills at once."""

    handshake_timeout: float = 10.0
    """For a peer to send its HTTP request."""

    ping_interval: float = 30.0
    """Between WebSocket pings."""

    linger: float = 0.0002
    """How long to look for the next request before going to sleep; 0 sleeps at once."""

    allow_direct: bool = True
    """Whether `process/start` with spawn "direct" is allowed."""

    allow_prepared: bool = True
    """Whether `process/start` with spawn "prepared" is allowed."""
