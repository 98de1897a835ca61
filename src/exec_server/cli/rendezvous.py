"""`exec-server rendezvous …`: a registry and router of one's own, the keys to it, and what is in it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import click

from .. import log
from ..local.process.own_credentials import take_credentials
from .options import fail

__all__ = ["rendezvous"]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

MAX_NAME: Final = 128
"""Characters of the name of a key or a tenant."""

LIFETIMES: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
"""Seconds of each unit of --expires."""

_data = click.option(
    "--data", metavar="DIR", envvar="EXEC_SERVER_RENDEZVOUS_DATA", help="Directory of the embedded store."
)
CREDENTIALS: Final = "exec_server.cluster_credentials"
"""Where a context keeps the file that says who we are to NATS: for whichever command has --cluster."""


def _cluster(command: F) -> F:
    """--cluster, and what goes with it on every command that has it."""
    where = click.option(
        "--cluster",
        metavar="URL",
        envvar="EXEC_SERVER_RENDEZVOUS_CLUSTER",
        help="NATS servers of a cluster: nats://HOST:PORT, with commas in between.  "
        "[env: EXEC_SERVER_RENDEZVOUS_CLUSTER]",
    )
    who = click.option(
        "--cluster-credentials",
        metavar="FILE",
        envvar="EXEC_SERVER_RENDEZVOUS_CLUSTER_CREDENTIALS",
        expose_value=False,
        callback=lambda context, _, value: value and context.meta.update({CREDENTIALS: value}),
        help="USER:PASSWORD, a token or NATS credentials for --cluster, out of sight of others.",
    )
    return where(who(command))


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
@click.option(
    "--cluster-replicas",
    type=click.IntRange(1, 5),
    help="Copies that NATS keeps of keys and registrations.  [default: as many as it has servers, up to 3]",
)
@click.option("--tls-cert", metavar="FILE", help="Certificate chain for https://, read again on SIGHUP.")
@click.option("--tls-key", metavar="FILE", help="Its key.")
@click.option(
    "--public-url",
    metavar="URL",
    callback=lambda _, __, value: _public_url(value),
    help="How clients reach this node, where a proxy is in between.",
)
@click.option("--insecure-http", is_flag=True, help="Listen off loopback without TLS; for behind a proxy.")
@click.option("--environments-per-tenant", type=click.IntRange(1), default=10_000, show_default=True)
@click.option(
    "--calls-per-second",
    type=float,
    default=50.0,
    show_default=True,
    callback=lambda _, __, value: _rate(value),
    help="Of one key, on this node.",
)
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
    take_credentials()  # the address of NATS may have a password in it
    options["data"], options["cluster"] = _place(options["data"], options["cluster"])
    if options["data"] is None and options["cluster"] is None:
        fail("where should registrations and keys be kept? --data DIR, or --cluster nats://HOST:PORT", 2)
    credentials = context.meta.get(CREDENTIALS)
    if options["cluster"] is None and (credentials or options["cluster_replicas"]):
        fail("--cluster-credentials and --cluster-replicas go with --cluster", 2)
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
        cluster_credentials=credentials,
        cluster_replicas=options["cluster_replicas"],
        tls_cert=options["tls_cert"],
        tls_key=options["tls_key"],
        public_url=options["public_url"],
        insecure_http=options["insecure_http"],
        settings=settings,
    )
    try:
        _run_loop(node.serve(chosen))
    except node.StartFailed as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename or options['data']}: {error.strerror or error}")


def _public_url(value: str | None) -> str | None:
    if value is None:
        return None
    try:
        parts = urlsplit(value)
        good = parts.scheme in ("http", "https") and parts.hostname and not parts.query and not parts.fragment
        parts.port  # noqa: B018  # it is the looking that finds a bad one
    except ValueError:
        good = False
    if not good:
        raise click.BadParameter(f"{value!r} is not http://HOST[:PORT] or https://HOST[:PORT]")
    return value.rstrip("/")


def _rate(value: float) -> float:
    if not 0.01 <= value <= 1e6:  # false for what is not a number
        raise click.BadParameter(f"{value:g} is not a number of calls from 0.01 to 1000000")
    return value


def _place(data: str | None, cluster: str | None) -> tuple[str | None, str | None]:
    """Where things are kept: in one place. What is typed counts for more than a variable."""
    if data is not None and cluster is not None:
        context = click.get_current_context()
        typed = [
            name
            for name in ("data", "cluster")
            if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        ]
        if len(typed) != 1:
            raise click.UsageError("--data and --cluster both say where things are kept; give one of them")
        return (data, None) if typed == ["data"] else (None, cluster)
    return data, cluster


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
    context: click.Context,
    data: str | None,
    cluster: str | None,
    work: Callable[[Any], Awaitable[T]],
    *,
    must_exist: bool = True,
) -> T:
    """Do something with the store, wherever it is; only where `must_exist` is False it may be a new one."""
    above = context.find_root().obj or (None, None)
    parent = context.parent.parent.obj if context.parent and context.parent.parent else None
    data, cluster = _place(data, cluster)
    if data is None and cluster is None:
        data, cluster = parent or above
    if data is None and cluster is None:
        fail("whose? --data DIR, or --cluster nats://HOST:PORT", 2)
    node = _import_node()
    from ..rendezvous.store import StoreUnavailable

    async def main() -> T:
        store = await node.open_store(
            data, cluster, must_exist=must_exist, credentials=context.meta.get(CREDENTIALS)
        )
        try:
            return await work(store)
        finally:
            await store.close()

    try:
        return asyncio.run(main())
    except (node.StartFailed, StoreUnavailable) as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename or data}: {error.strerror or error}")


def _name(_: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Names are printed in lists and logs: short, and nothing that moves a cursor."""
    if value is not None and (
        not value.strip() or value != value.strip() or len(value) > MAX_NAME or not value.isprintable()
    ):
        raise click.BadParameter(
            f"{value!r} is not 1 to {MAX_NAME} printable characters without blanks around them",
            param=parameter,
        )
    return value


def _environments(value: tuple[str, ...]) -> tuple[str, ...]:
    if not value:
        return ()
    _import_node()
    from ..rendezvous.service import ENVIRONMENT_ID

    for name in value:
        if not ENVIRONMENT_ID.fullmatch(name):
            raise click.BadParameter(f"{name!r} is not 1 to 128 of A-Z a-z 0-9 _ . -")
    return tuple(dict.fromkeys(value))


def _lifetime(value: str | None) -> float | None:
    if value is None:
        return None
    number, unit = value[:-1], value[-1:]
    if unit not in LIFETIMES or not number.isascii() or not number.isdigit() or not 0 < int(number) < 1e6:
        raise click.BadParameter(f"{value!r} is not a time such as 12h, 90d or 2w")
    return int(number) * LIFETIMES[unit]


@key.command()
@click.argument("name", callback=_name)
@_data
@_cluster
@click.option(
    "--tenant",
    callback=_name,
    help="Whose environments it is for; * is all, for admins.  [default: default; for admins *]",
)
@click.option("--role", type=click.Choice(["any", "environment", "harness", "admin"]), default="any",
              show_default=True, help="Serve, use, both, or list and remove environments.")  # fmt: skip
@click.option(
    "--environment",
    "environments",
    multiple=True,
    metavar="ID",
    callback=lambda _, __, value: _environments(value),
    help="The only environment it may register, or connect to (repeatable).  [default: all of the tenant]",
)
@click.option(
    "--expires",
    metavar="TIME",
    callback=lambda _, __, value: _lifetime(value),
    help="How long it is good for: 12h, 90d, 2w.  [default: until it is revoked]",
)
@click.pass_context
def add(
    context: click.Context,
    name: str,
    data: str | None,
    cluster: str | None,
    tenant: str | None,
    role: Any,
    environments: tuple[str, ...],
    expires: float | None,
) -> None:
    """Make a key and print it. It is shown only now; what is kept is its hash."""
    from ..rendezvous.store import ALL_TENANTS, ApiKey, KeyExists, digest_of, new_secret

    if tenant is None:
        tenant = ALL_TENANTS if role == "admin" else "default"
    elif tenant == ALL_TENANTS and role != "admin":
        raise click.BadParameter("only an admin's key is for all tenants", param_hint="--tenant")
    if environments and role == "admin":
        raise click.BadParameter(
            "an admin's key is for all environments of its tenant", param_hint="--environment"
        )
    secret = new_secret()
    now = time.time()
    until = None if expires is None else now + expires

    async def work(store: Any) -> None:
        await store.add_key(ApiKey(name, tenant, role, digest_of(secret), now, None, environments, until))

    try:
        _with_store(context, data, cluster, work, must_exist=False)
    except KeyExists:
        fail(f"there is a key {name!r} already; names are not used again, also not of revoked keys")
    click.echo(secret)


@key.command(name="list")
@_data
@_cluster
@click.pass_context
def list_keys(context: click.Context, data: str | None, cluster: str | None) -> None:
    """List the keys there are, without the keys themselves.

    Name, tenant, role, when it was made, whether it is good, the environments it is for, when it expires.
    """

    async def work(store: Any) -> Any:
        return await store.keys()

    for found in _with_store(context, data, cluster, work):
        made = _moment(found.created)
        good = "active" if found.is_good(time.time()) else "expired"
        state = good if found.revoked is None else "revoked"
        only = ",".join(map(_shown, found.environments)) or "all"
        end = "never" if found.expires is None else _moment(found.expires)
        who = f"{_shown(found.name)}\t{_shown(found.tenant)}\t{found.role}"
        click.echo(f"{who}\t{made}\t{state}\t{only}\t{end}")


def _shown(text: str) -> str:
    """Without what would not be seen as it is."""
    return text if text.isprintable() else repr(text)


@key.command()
@click.argument("name")
@_data
@_cluster
@click.pass_context
def revoke(context: click.Context, name: str, data: str | None, cluster: str | None) -> None:
    """Make a key useless from now on.

    Within a second or so its streams are cut, and what is registered with it is no longer there.
    """

    async def work(store: Any) -> Any:
        return await store.revoke_key(name)

    if not _with_store(context, data, cluster, work):
        fail(f"there is no active key {name!r}")


@rendezvous.group()
def secret() -> None:
    """What a rendezvous signs URLs and authorizations with."""


@secret.command(name="rotate")
@_data
@_cluster
@click.pass_context
def rotate_secret(context: click.Context, data: str | None, cluster: str | None) -> None:
    """Sign with a new secret from now on, because the old one may be known to somebody.

    Nodes that run take it within seconds, and for two minutes still accept what was signed before; one that
    is restarted does not. Streams go on, and environments need do nothing.
    """

    async def work(store: Any) -> None:
        await store.rotate_secret()

    _with_store(context, data, cluster, work)
    click.echo("the signing secret is another one now", err=True)


@rendezvous.group()
def environment() -> None:
    """The environments that have registered, connected or not."""


@environment.command(name="list")
@_data
@_cluster
@click.pass_context
def list_environments(context: click.Context, data: str | None, cluster: str | None) -> None:
    """List the environments: tenant, name, when it registered, when it was last seen to connect.

    Which of them are connected a node knows: GET /admin/environments with an admin's key.
    """

    async def work(store: Any) -> Any:
        return await store.registrations()

    for found in _with_store(context, data, cluster, work):
        seen = _moment(found.seen) if found.seen else "never connected"
        click.echo(f"{_shown(found.tenant)}\t{found.environment}\t{_moment(found.created)}\t{seen}")


@environment.command()
@click.argument("name")
@click.option("--tenant", default="default", show_default=True, help="Whose it is.")
@_data
@_cluster
@click.pass_context
def rm(context: click.Context, name: str, tenant: str, data: str | None, cluster: str | None) -> None:
    """Forget an environment, which makes room for another.

    One that still runs registers again; revoke its key to keep it away.
    """

    async def work(store: Any) -> bool:
        found = await store.registration(tenant, name)
        return found is not None and await store.remove_registration(found)

    if not _with_store(context, data, cluster, work):
        fail(f"there is no environment {name!r} of the tenant {tenant!r}")


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
