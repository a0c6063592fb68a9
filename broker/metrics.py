"""Metrics from the gate's moments, by the OpenTelemetry SDK: to a collector, and as text for Prometheus.

Needs the extra `otlp`. The same instruments feed both, so that they cannot disagree.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, Final

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Meter, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    MetricExportResult,
    MetricReader,
    MetricsData,
    PeriodicExportingMetricReader,
)
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from broker import names
from broker.admission import Key, Moment
from broker.export import Complaint, Destinations, resource
from broker.tracing import CLOSE_S, forwards_by_width

# Seconds: three of the GenAI conventions, and that of messaging, with room for long jobs.
REQUEST_BOUNDS: Final = [0.01 * 2**power for power in range(14)]
FIRST_TOKEN_BOUNDS: Final = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
]  # fmt: skip
TOKEN_BOUNDS: Final = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5]
PROCESS_BOUNDS: Final = [
    0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0, 300.0,
]  # fmt: skip
WIDTH_BOUNDS: Final = [1.0, 2.0, 4.0, 8.0, 16.0]
# What the gate counts and nobody keeps for a label: the line is long for as long as it is.
Depth = Callable[[], int]
Lost = Callable[[], dict[str, int]]


class PushExporter(OTLPMetricExporter):
    """To a collector; that it does not take them is said in the log, once a minute."""

    def __init__(self, endpoint: str, timeout_s: float) -> None:
        super().__init__(endpoint=endpoint, timeout=timeout_s)
        self._complaint = Complaint("exports of metrics failed")

    def export(
        self, metrics_data: MetricsData, timeout_millis: float | None = 10_000, **more: Any
    ) -> MetricExportResult:
        """Export one round."""
        result = super().export(metrics_data, timeout_millis, **more)
        if result is not MetricExportResult.SUCCESS:
            self._complaint.lost(1, "the collector did not take them")
        return result


class Metrics:
    """Counts what the moments tell. `record` never blocks; `exposition` may be called in any thread."""

    def __init__(self, to: Destinations, *, version: str, depth: Depth, lost: Lost) -> None:
        self._registry = CollectorRegistry()
        self._depth, self._lost = depth, lost
        readers: list[MetricReader] = [PrometheusMetricReader(scope_info_enabled=False, registry=self._registry)]
        if to.metrics:
            readers.append(PeriodicExportingMetricReader(PushExporter(to.metrics, to.timeout_s)))
        self._provider = MeterProvider(readers, resource=resource(version), shutdown_on_exit=False)
        meter = self._provider.get_meter("mtplx", version, schema_url=names.SCHEMA_URL)
        self._make(meter)
        # Of jobs that have not ended: the labels of their model, once it is known.
        self._open: dict[Key, dict[str, str]] = {}
        self._asked: dict[Key, str] = {}

    def _make(self, meter: Meter) -> None:
        def seconds(name: str, what: str, bounds: list[float]) -> Any:
            return meter.create_histogram(name, "s", what, explicit_bucket_boundaries_advisory=bounds)

        self._request = seconds(names.METRIC_REQUEST, "Admission to last word of jobs that ran.", REQUEST_BOUNDS)
        self._first = seconds(
            names.METRIC_FIRST_TOKEN, "Admission to first token: queue and prefill.", FIRST_TOKEN_BOUNDS
        )
        self._token = seconds(names.METRIC_TOKEN, "Time of each token after the first.", TOKEN_BOUNDS)
        self._process = seconds(names.METRIC_PROCESS, "Admission to last word of all jobs.", PROCESS_BOUNDS)
        self._width = meter.create_histogram(
            names.METRIC_WIDTH,
            "{row}",
            "Widest forward of a job, in rows.",
            explicit_bucket_boundaries_advisory=WIDTH_BOUNDS,
        )
        self._forwards = meter.create_counter(names.METRIC_FORWARDS, "{forward}", "Forwards by their width.")
        meter.create_observable_gauge(names.METRIC_DEPTH, [self._see_depth], "{job}", "Jobs that wait.")
        meter.create_observable_counter(
            names.METRIC_SPANS_LOST, [self._see_lost], "{span}", "Spans that did not arrive, by reason."
        )

    def record(self, moments: list[Moment]) -> None:
        """Count what *moments* tell."""
        for moment in moments:
            told = moment.attributes
            if moment.what == "admitted":
                self._asked[moment.job] = "chat" if told["chat"] else "text_completion"
            elif moment.what == "dispatched":
                self._open[moment.job] = {
                    names.GEN_AI_OPERATION: self._asked.get(moment.job, "text_completion"),
                    names.GEN_AI_PROVIDER: names.PROVIDER,
                    names.GEN_AI_REQUEST_MODEL: told["model"],
                    names.GEN_AI_RESPONSE_MODEL: told["model"],
                }
            elif moment.what == "refused":
                self._process.record(0.0, {**_PROCESS, names.ERROR_TYPE: told["code"]})
            elif moment.what == "ended":
                self._ended(moment.job, told)

    def exposition(self) -> tuple[bytes, str]:
        """All metrics as text for Prometheus, and the content type of that text."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def close(self) -> None:
        """Send what is left, and give up after CLOSE_S."""
        closer = threading.Thread(target=self._provider.shutdown, daemon=True)
        closer.start()
        closer.join(CLOSE_S)

    def _ended(self, job: Key, told: dict[str, Any]) -> None:
        failed = {names.ERROR_TYPE: told["error"]} if "error" in told else {}
        self._process.record(told["took_s"], {**_PROCESS, **failed})
        self._asked.pop(job, None)
        labels = self._open.pop(job, None)
        if labels is None:
            return
        self._request.record(told["took_s"], {**labels, **failed})
        to_first = told["timings"].get("time_to_first_token_s")
        if failed or to_first is None:
            return
        self._first.record(to_first, labels)
        if told["tokens"] > 1:
            self._token.record(max(0.0, told["took_s"] - to_first) / (told["tokens"] - 1), labels)
        self._count_widths(told, {names.GEN_AI_REQUEST_MODEL: labels[names.GEN_AI_REQUEST_MODEL]})

    def _count_widths(self, told: dict[str, Any], labels: dict[str, str]) -> None:
        widths = forwards_by_width(told["run"].get("speculation") or {})
        self._width.record(max(map(int, widths), default=1), labels)
        for width, count in widths.items():
            self._forwards.add(count, {**labels, names.WIDTH: int(width)})

    def _see_depth(self, _: CallbackOptions) -> Iterable[Observation]:
        return [Observation(self._depth())]

    def _see_lost(self, _: CallbackOptions) -> Iterable[Observation]:
        lost = self._lost()
        return [
            Observation(lost.get(key, 0), {names.REASON: reason})
            for key, reason in (("spans_dropped", "no_room"), ("spans_failed", "not_exported"))
        ]


_PROCESS: Final = {
    names.MESSAGING_SYSTEM: names.SYSTEM,
    names.MESSAGING_OPERATION_NAME: "process",
    names.MESSAGING_DESTINATION: names.DESTINATION,
}
