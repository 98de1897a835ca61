"""What a node has counted, in the words of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from .audit import BUCKETS
from .service import Rendezvous

__all__ = ["metrics_text"]

PREFIX = "exec_server_rendezvous_"


def metrics_text(service: Rendezvous) -> str:
    """Everything, for one node and all of its tenants."""
    from prometheus_client import CollectorRegistry, generate_latest

    class Collector:
        def collect(self) -> Iterator[Any]:
            return _families(service)

    registry = CollectorRegistry()
    registry.register(Collector())
    return generate_latest(registry).decode()


def _families(service: Rendezvous) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    router, journal = service.router, service.journal
    for name, text, value in (
        ("environments_online", "Environments connected to this node", router.online),
        ("streams", "Streams of environments on this node", router.stream_count),
    ):
        yield GaugeMetricFamily(PREFIX + name, text, value=value)
    for name, text, value in (
        ("frames", "Frames forwarded", router.frames),
        ("bytes", "Bytes forwarded", router.bytes),
        ("dropped_frames", "Frames dropped", router.dropped),
        ("resets", "Streams told that they are over", router.resets),
        ("streams_opened", "Streams that harnesses on this node have opened", journal.streams),
        ("store_errors", "Answers that had to do without the store", journal.store_errors),
        ("keys_revoked", "Keys seen to be revoked while this node runs", service.keys_revoked),
        ("connections_cut", "Connections cut because their key was revoked or has expired", service.cut),
    ):
        yield CounterMetricFamily(PREFIX + name, text, value=value)
    calls = CounterMetricFamily(f"{PREFIX}calls", "Calls answered", labels=("call", "status"))
    for (call, status), count in service.calls.items():
        calls.add_metric((call, str(status)), count)
    yield calls
    refusals = CounterMetricFamily(
        f"{PREFIX}refusals", "Calls, upgrades and streams refused", labels=("what", "reason")
    )
    for (what, reason), count in journal.refusals.items():
        refusals.add_metric((what, reason), count)
    yield refusals
    counted = list(accumulate(journal.latency))
    yield HistogramMetricFamily(
        f"{PREFIX}authorization_seconds",
        "From a call to the decision about it",
        buckets=list(zip([*map(str, BUCKETS), "+Inf"], counted, strict=True)),
        sum_value=journal.latency_sum,
    )
