"""`exec-server mcp`: an environment as an MCP server, on stdio or over HTTP."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from .options import fail, read_token, server_options

if TYPE_CHECKING:
    from ..agent.mcp_server import McpTools, Opener
    from ..environments.environment import Environment

__all__ = ["mcp"]


@click.command()
@server_options(required=False)
@click.option(
    "--env", "environment", metavar="NAME", help="Environment to offer (see `exec-server env list`)."
)
@click.option(
    "--listen",
    metavar="URL",
    help="Serve HTTP here instead of stdio: http://IP:PORT. The bound address is the first line of stdout.",
)
@click.option(
    "--listen-token-file",
    type=click.Path(exists=True, dir_okay=False),
    help="File that holds a token; clients must send it as a bearer token. Needed off loopback.",
)
@click.option(
    "--sandbox",
    "mode",
    type=click.Choice(["read-only", "workspace-write", "danger-full-access"]),
    default="danger-full-access",
    show_default=True,
    help="What commands and edits may touch; the machine enforces it.",
)
@click.option("--network/--no-network", default=False, help="Whether a sandbox has a network (default: no).")
def mcp(
    url: str | None,
    token_file: str | None,
    environment: str | None,
    listen: str | None,
    listen_token_file: str | None,
    mode: Any,
    network: bool,
) -> None:
    """Offer a machine (this one, a server's, or an environment's) to any MCP client.

    Tools: exec_command, write_stdin, screen, list_commands, terminate, apply_patch, read_file, write_file,
    list_directory, find_files and search_files. Every client of one such server shares its commands.
    """
    from ..client.errors import ExecServerError

    opener, name = _opener(url, read_token(token_file), environment)
    token = read_token(listen_token_file)
    if token == "":
        fail(f"{listen_token_file}: the token is empty")
    host, port = _address(listen, token) if listen is not None else ("", 0)
    try:
        from ..agent.mcp_server import McpTools, serve_stdio

        tools = McpTools(opener, mode, network=network)
        if listen is None:
            asyncio.run(serve_stdio(tools, name))
        else:
            asyncio.run(_serve_http(tools, name, host, port, token))
    except ImportError as error:
        fail(f'this needs more packages ({error}); install "exec-server[mcp]"')
    except (ExecServerError, OSError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def _opener(url: str | None, token: str | None, environment: str | None) -> tuple[Opener, str]:
    if environment is not None:
        source = click.get_current_context().get_parameter_source("url")
        if source is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError("--env and --url both say which machine; give one of them")
        return _named(environment), environment

    async def opened() -> Environment:
        from ..environments.connect import connect

        return await connect(url, token=token, client_name="exec-server-mcp")

    return opened, url or "this machine"


def _named(name: str) -> Opener:
    from ..environments.opening import local_opener, opener_for
    from .starting import load_configuration, unknown_environment

    configuration = load_configuration()
    if name not in configuration.ids():
        fail(unknown_environment(configuration, name))
    entry = configuration.find(name)
    opener = local_opener() if entry is None else opener_for(entry.transport)
    if opener is None:
        fail("there is no program here that could serve this machine")
    return opener


def _address(listen: str, token: str | None) -> tuple[str, int]:
    from ipaddress import ip_address

    parts = urlsplit(listen)
    try:
        port = parts.port
        host = parts.hostname or ""
        loopback = ip_address(host).is_loopback
    except ValueError:
        port, host, loopback = None, "", False
    if parts.scheme != "http" or not host or port is None or parts.path not in ("", "/"):
        fail(f"cannot listen on {listen!r}; expected http://IP:PORT", 2)
    if not loopback and token is None:
        fail(
            f"refusing to listen on {host}:{port} without authentication: anybody who can reach the port"
            " could run commands as you; give a --listen-token-file (`exec-server token` makes tokens)"
        )
    return host, port


async def _serve_http(tools: McpTools, name: str, host: str, port: int, token: str | None) -> None:
    import socket

    import uvicorn

    from ..agent.mcp_server import http_app

    shown = f"[{host}]" if ":" in host else host
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
        address = f"http://{shown}:{listener.getsockname()[1]}/mcp"
        await tools.open()  # what is wrong with the machine is said in our words
        app = http_app(tools, name, host, token, ready=lambda: click.echo(address))
        config = uvicorn.Config(app, log_level="error", lifespan="on", timeout_graceful_shutdown=2)
        await uvicorn.Server(config).serve(sockets=[listener])
