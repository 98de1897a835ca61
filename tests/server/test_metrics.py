"""server/metrics.py: what a server counts, as Prometheus sees it."""

from __future__ import annotations

import re
from collections.abc import Callable

from exec_server.server.metrics import LATENCY_BUCKETS, Metrics
from support.frames import RawSocket
from support.machine import sleep_forever
from support.rpc import WebSocketPeer
from support.server import RunningServer
from support.wait import eventually


def scrape(server: RunningServer) -> dict[str, float]:
    with RawSocket(server.url) as raw:
        answer = raw.ask(path="/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = re.findall(r"^exec_server_(\S+) (\S+)$", answer.body, re.MULTILINE)
    return {name: float(value) for name, value in found}


def test_everything_is_counted(
    start_server: Callable[..., RunningServer], connect: Callable[..., WebSocketPeer]
) -> None:
    server = start_server("--detach-ttl", "0.1", "--retain-output", "1000", "--retention", "0")
    before = scrape(server)
    assert all(value == 0 for name, value in before.items() if "bucket" not in name)
    peer = connect(server)
    peer.initialize()
    peer.run("head", "-c", "200000", "/dev/zero")
    running = peer.start("sleep", sleep_forever())
    peer.refused("process/start", peer.start_params(["/no/such"]))
    now = scrape(server)
    assert now["connections"] == 1
    assert now["connections_total"] == 1
    assert (now["sessions"], now["sessions_detached"]) == (1, 0)
    assert (now["processes_running"], now["processes_started_total"]) == (1, 2)
    assert now["processes_failed_total"] == 1
    assert now["output_bytes_total"] == 200_000
    assert now["dropped_bytes_total"] > 100_000
    assert now["request_errors_total"] == 1
    assert now["request_seconds_count"] == 4
    assert now['request_seconds_bucket{le="+Inf"}'] == 4
    peer.terminate(running)
    peer.finished(running)
    assert scrape(server)["processes_running"] == 0
    peer.drop()
    eventually(lambda: scrape(server)["sessions"] == 0, "the session expiring")
    after = scrape(server)
    assert (after["connections"], after["sessions_expired_total"]) == (0, 1)


def test_both_dialects_count_and_those_killed_with_their_session_too(
    start_server: Callable[..., RunningServer], connect: Callable[..., WebSocketPeer]
) -> None:
    server = start_server("--detach-ttl", "0")
    peer = connect(server)
    peer.initialize()
    params = {"processId": "old", "argv": ["sleep", "60"], "cwd": "/", "env": {"PATH": "/bin"}, "tty": True}
    peer.call("command/exec", params)
    peer.start("sleep", "60")
    assert scrape(server)["processes_running"] == 2
    peer.drop()
    eventually(lambda: scrape(server)["processes_running"] == 0, "the end of both")
    assert scrape(server)["processes_started_total"] == 2


def test_latency_is_cumulative() -> None:
    metrics = Metrics()
    for seconds in (0.00001, LATENCY_BUCKETS[0], 0.02, 100.0):
        metrics.request_done(seconds, failed=False)
    buckets = dict(metrics.latency_buckets())
    assert buckets["0.0001"] == 2
    assert buckets["0.01"] == 2
    assert buckets["0.05"] == 3
    assert buckets["30.0"] == 3
    assert buckets["+Inf"] == 4
    assert metrics.latency_sum == sum((0.00001, LATENCY_BUCKETS[0], 0.02, 100.0))
