"""Prometheus metrics of the gateway, named after the stages. `docs/metrics.md` documents each; `GET /metrics` shows them.

One registry of our own. Counted a step or a stream, not a token, so the delivery path doesn't pay for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

disable_created_metrics()  # a second series for each counter, which says only when the gateway started
registry = CollectorRegistry()

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_GAP_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2.5, 5, 10, 30, 60)


def _counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
    return Counter(name, text, labels, namespace="concordia", registry=registry)


def _gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
    return Gauge(name, text, labels, namespace="concordia", registry=registry)


def _histogram(name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> Histogram:
    return Histogram(name, text, labels, namespace="concordia", buckets=buckets, registry=registry)


requests = _counter("requests", "HTTP requests", ("path", "status"))
admit_refused = _counter("admit_refused", "Requests that were refused: for an answer, or unreadable", ("code",))
streams_opened = _counter("streams_opened", "Streams admitted", ("kind",))
streams_ended = _counter("streams_ended", "Streams that ended", ("cause",))
streams_live = _gauge("streams_live", "Streams that have not ended")
streams_waiting = _gauge("streams_waiting", "Live streams that no engine has started yet")
prompt_tokens = _counter("prompt_tokens", "Prompt tokens of admitted streams")
cached_tokens = _counter(
    "cached_tokens", "Tokens put back instead of computed, at the first start of a stream", ("tier",)
)
delivered_tokens = _counter("delivered_tokens", "Tokens delivered")
duplicate_tokens = _counter("duplicate_tokens", "Tokens of an old epoch or a known position, dropped")
gaps_refused = _counter("position_gaps", "Tokens that came too early; the stream was submitted again")
verdicts = _counter("restore_verdicts", "First starts of streams by verdict", ("verdict",))
first_token_s = _histogram("first_token_seconds", "Admission to first token", _LATENCY_S)
step_deliver_s = _histogram(
    "deliver_step_seconds",
    "Time to journal and send all tokens of one engine step",
    (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1),
)
recoveries = _counter("recoveries", "Streams that went on after losing their engine", ("reason",))
recovery_gap_s = _histogram(
    "recovery_gap_seconds", "Last sign of life of the lost engine to the next delivered token", _GAP_S
)
resumed_readers = _counter("resumed_readers", "Reads of a stream by cursor", ("state",))
stalled_readers = _counter("stalled_readers", "Times that a client was too slow and its delivery paused")
journal_write_failures = _counter("journal_write_failures", "Journal writes that the disk refused; tried again later")
journal_sync_failures = _counter("journal_sync_failures", "Syncs of journals that the disk refused; tried again")
journal_unsynced_ms = _gauge(
    "journal_unsynced_milliseconds", "How long the oldest unsynced journal has waited for its sync"
)
turns_unsynced = _counter("turns_unsynced", "Answers that ended before they were on the disk, against durability turn")
journal_backlog = _gauge("journal_backlog_bytes", "Journal bytes that wait for the disk")
files_deleted = _counter(
    "files_deleted",
    "Files of the gateway that were deleted or moved under it, and written anew if that could be",
    ("what",),
)
sessions_forked = _counter("sessions_forked", "Forks of sessions")
sessions_known = _gauge("sessions", "Named sessions on record")
keeper_up = _gauge("keeper_up", "1 while the keeper answers")
capture_lag = _gauge("capture_lag_tokens", "Tokens of live streams whose state is not in a lane yet")
durable_lag = _gauge("durable_lag_tokens", "Tokens whose state is captured, but not on disk yet")
degraded = _gauge(
    "degraded", "1 while state is kept from a lane or from the disk, or nobody would be started again", ("state",)
)
store_bytes = _gauge("store_bytes", "Size of the store's file")
snapshot_oldest_s = _gauge("snapshot_oldest_seconds", "How long the oldest open snapshot of the store has been held")
snapshot_oldest_commits = _gauge("snapshot_oldest_commits", "How many commits the oldest open snapshot is behind")
stores_deleted = _gauge(
    "store_deleted", "Times that the store's file was deleted under the keeper, by what became of it", ("outcome",)
)
unsynced_ms = _gauge("store_unsynced_milliseconds", "How long committed state has waited for its sync")
tenant_bytes = _gauge(
    "tenant_bytes", "What a tenant takes of the disk, of the lanes and of the engines' memory", ("tenant", "kind")
)
tenant_limit = _gauge(
    "tenant_limit_bytes", "Its budget: of the disk, of each lane, of each engine's memory; 0: none", ("tenant", "kind")
)
tenant_lag = _gauge(
    "tenant_capture_lag_tokens", "Tokens of a tenant's resident state that no lane has yet", ("tenant",)
)
tenant_refused = _gauge(
    "tenant_lane_refused", "Captures that a tenant's share of a lane had no room for, by live engines", ("tenant",)
)
tenant_evicted = _gauge(
    "tenant_memory_evicted", "Idle state that left a device because of a tenant's budget, by live engines", ("tenant",)
)
lane_waiting = _gauge("lane_waiting_records", "Records of a lane that are not in the store yet", ("lane",))
host_link_up = _gauge("host_link_up", "1 while the gateway is connected to the host agent")
engine_losses = _counter("engine_losses", "Engines lost", ("reason",))
streams_unprotected = _gauge("streams_unprotected", "Live streams that no hot standby follows (policy hot)")
sessions_protected = _gauge(
    "sessions_protected", "Idle sessions all of whose state a hot standby has as well (policy hot)"
)
migrations = _counter("migrations", "Moves of streams to other engines, by how they ended", ("outcome",))
migration_downtime_s = _histogram(
    "migration_downtime_seconds", "The source's last token to the target's first one", _GAP_S
)
poison_requests = _counter("poison_requests", "Requests ended because engines died of them")
engine_hangs = _counter("engine_hangs", "Engines that were hung, by how", ("cause",))
engine_slow = _counter("engine_slow", "Silences over the bound that were no hang", ("cause",))


class EngineCollector(Collector):
    """Turns the engines' own last `Stats` into gauges when somebody looks."""

    def __init__(self, rows: Callable[[], Iterable[tuple[str, bool, dict[str, float | str]]]]) -> None:
        self._rows = rows

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily("concordia_engine_up", "1 if the engine can serve", labels=["engine"])
        families: dict[str, GaugeMetricFamily] = {}
        for engine, ready, stats in self._rows():
            up.add_metric([engine], float(ready))
            for name, value in stats.items():
                if isinstance(value, str):
                    continue  # said in words: `concordia status` shows them
                metric = f"concordia_engine_{name}"
                family = families.setdefault(name, GaugeMetricFamily(metric, f"Engine's {name}", labels=["engine"]))
                family.add_metric([engine], float(value))
        return [up, *families.values()]


def text() -> bytes:
    """The exposition format."""
    return generate_latest(registry)
