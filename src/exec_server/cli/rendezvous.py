"""`exec-server rendezvous …`: a registry and router of one's own, and the keys to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import click

from .. import log
from .options import fail

__all__ = ["rendezvous"]

T = TypeVar("T")

_data = click.option(
    "--data", metavar="DIR", envvar="EXEC_SERVER_RENDEZVOUS_DATA", help="Directory of the embedded store."
)
_cluster = click.option(
    "--cluster", metavar="URL", envvar="EXEC_SERVER_RENDEZVOUS_CLUSTER", help="NATS server of a cluster."
)


@click.group(invoke_without_command=True)
@click.option(
    "--listen",
    default="http://127.0.0.1:0",
    show_default=True,
    metavar="URL",
    help="http://IP:PORT or https://IP:PORT. The bound address is the first line of stdout.",
)
@_data
@_cluster
@click.option("--tls-cert", metavar="FILE", help="Certificate chain for https://.")
@click.option("--tls-key", metavar="FILE", help="Its key.")
@click.option("--public-url", metavar="URL", help="How clients reach this node, where a proxy is in between.")
@click.option("--insecure-http", is_flag=True, help="Listen off loopback without TLS; for behind a proxy.")
@click.option("--environments-per-tenant", type=click.IntRange(1), default=10_000, show_default=True)
@click.option("--calls-per-second", type=float, default=50.0, show_default=True, help="Of one key.")
@click.option("--log-level", type=click.Choice([*log.LEVELS]), default="error", show_default=True)
@click.option("--log-json", is_flag=True, help="Log lines for machines.")
@click.pass_context
def rendezvous(context: click.Context, /, **options: Any) -> None:
    """Run a rendezvous: environments register here, harnesses find them here, and it carries what they
    say to each other without being able to read it."""
    if context.invoked_subcommand is not None:
        context.obj = (options["data"], options["cluster"])
        return
    log.configure(options["log_level"], options["log_json"])
    if options["data"] is None and options["cluster"] is None:
        fail("where should registrations and keys be kept? --data DIR, or --cluster nats://HOST:PORT", 2)
    node = _import_node()
    settings = node.Settings(
        environments_per_tenant=options["environments_per_tenant"],
        calls_per_second=options["calls_per_second"],
        calls_at_once=4 * options["calls_per_second"],
    )
    chosen = node.NodeOptions(
        listen=options["listen"],
        data=options["data"],
        cluster=options["cluster"],
        tls_cert=options["tls_cert"],
        tls_key=options["tls_key"],
        public_url=None if options["public_url"] is None else options["public_url"].rstrip("/"),
        insecure_http=options["insecure_http"],
        settings=settings,
    )
    try:
        _run_loop(node.serve(chosen))
    except node.StartFailed as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename or options['data']}: {error.strerror or error}")


def _import_node() -> Any:
    try:
        from ..rendezvous import node
    except ImportError as error:
        fail(f"a rendezvous needs more than is installed ({error}); install `exec-server[relay]`")
    return node


def _run_loop(work: Any) -> None:
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)
    else:
        uvloop.run(work)


@rendezvous.group()
def key() -> None:
    """The keys that environments and harnesses show."""


def _with_store(
    context: click.Context, data: str | None, cluster: str | None, work: Callable[[Any], Awaitable[T]]
) -> T:
    """Do something with the store, wherever it is."""
    above = context.find_root().obj or (None, None)
    parent = context.parent.parent.obj if context.parent and context.parent.parent else None
    data, cluster = data or (parent or above)[0], cluster or (parent or above)[1]
    if data is None and cluster is None:
        fail("whose keys? --data DIR, or --cluster nats://HOST:PORT", 2)
    node = _import_node()

    async def main() -> T:
        store = await node.open_store(data, cluster)
        try:
            return await work(store)
        finally:
            await store.close()

    try:
        return asyncio.run(main())
    except node.StartFailed as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename or data}: {error.strerror or error}")


@key.command()
@click.argument("name")
@_data
@_cluster
@click.option("--tenant", default="default", show_default=True, help="Whose environments it opens.")
@click.option("--role", type=click.Choice(["any", "environment", "harness", "admin"]), default="any",
              show_default=True, help="Serve, use, both, or look at everything.")  # fmt: skip
@click.pass_context
def add(
    context: click.Context, name: str, data: str | None, cluster: str | None, tenant: str, role: Any
) -> None:
    """Make a key and print it. It is shown only now; what is kept is its hash."""
    from ..rendezvous.store import ApiKey, KeyExists, digest_of, new_secret

    secret = new_secret()

    async def work(store: Any) -> None:
        await store.add_key(ApiKey(name, tenant, role, digest_of(secret), time.time()))

    try:
        _with_store(context, data, cluster, work)
    except KeyExists:
        fail(f"there is a key {name!r} already; names are not used again, also not of revoked keys")
    click.echo(secret)


@key.command(name="list")
@_data
@_cluster
@click.pass_context
def list_keys(context: click.Context, data: str | None, cluster: str | None) -> None:
    """List the keys there are, without the keys themselves."""

    async def work(store: Any) -> Any:
        return await store.keys()

    for found in _with_store(context, data, cluster, work):
        made = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(found.created))
        state = "active" if found.revoked is None else "revoked"
        click.echo(f"{found.name}\t{found.tenant}\t{found.role}\t{made}\t{state}")


@key.command()
@click.argument("name")
@_data
@_cluster
@click.pass_context
def revoke(context: click.Context, name: str, data: str | None, cluster: str | None) -> None:
    """Make a key useless from now on. Streams that are open stay open."""

    async def work(store: Any) -> Any:
        return await store.revoke_key(name)

    if not _with_store(context, data, cluster, work):
        fail(f"there is no active key {name!r}")
