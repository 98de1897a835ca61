"""What a server counts. Plain numbers while it runs; Prometheus text when somebody asks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Any, Final

__all__ = ["Metrics"]

LATENCY_BUCKETS: Final = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)
"""Upper bounds, in seconds."""


class Metrics:
    """Counters and gauges of one server."""

    def __init__(self) -> None:
        self.connections = 0
        self.connections_total = 0
        self.sessions = 0
        self.sessions_detached = 0
        self.sessions_expired_total = 0
        self.processes_running = 0
        self.processes_started_total = 0
        self.processes_failed_total = 0
        self.output_bytes_total = 0
        self.dropped_bytes_total = 0
        self.requests_total = 0
        self.request_errors_total = 0
        self.refused_upgrades_total = 0
        self._latency = [0] * (len(LATENCY_BUCKETS) + 1)
        self._latency_sum = 0.0

    def request_done(self, seconds: float, *, failed: bool) -> None:
        """A request was answered."""
        self.requests_total += 1
        self.request_errors_total += failed
        self._latency[bisect_left(LATENCY_BUCKETS, seconds)] += 1
        self._latency_sum += seconds

    def prometheus(self) -> str:
        """Everything, in the text format Prometheus scrapes."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        registry.register(_Collector(self))
        return generate_latest(registry).decode()

    def latency_buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts per upper bound."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip([*LATENCY_BUCKETS, float("inf")], self._latency, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), total))
        return buckets

    @property
    def latency_sum(self) -> float:
        return self._latency_sum


_GAUGES: Final = {
    "connections": "Open connections",
    "sessions": "Sessions, attached or detached",
    "sessions_detached": "Sessions waiting for their client to come back",
    "processes_running": "Processes that have not exited",
}

_COUNTERS: Final = {
    "connections_total": "Connections accepted",
    "sessions_expired_total": "Sessions that were deleted because nobody came back",
    "processes_started_total": "Processes started",
    "processes_failed_total": "Processes that could not be started",
    "output_bytes_total": "Bytes of process output read",
    "dropped_bytes_total": "Bytes of process output no longer retained when their process was forgotten",
    "request_errors_total": "Requests answered with an error",
    "refused_upgrades_total": "WebSocket upgrades refused",
}


class _Collector:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        metrics = self._metrics
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"exec_server_{name}", text, value=getattr(metrics, name))
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"exec_server_{name}", text, value=getattr(metrics, name))
        yield HistogramMetricFamily(
            "exec_server_request_seconds",
            "Time from a request's arrival to its answer",
            buckets=metrics.latency_buckets(),
            sum_value=metrics.latency_sum,
        )
