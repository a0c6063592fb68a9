"""Where spans and metrics go, by the settings and the standard `OTEL_*` variables, and the exporters made of it.

The SDK reads headers, certificates, compression, sampler, resource and limits from their variables by itself. What
a broker needs beyond that is here: room that is counted, a time limit, and a log that says a fault once a minute.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, cast

from opentelemetry.exporter.otlp.json.file.trace_exporter import FileSpanExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from broker import names
from broker.tracefile import LineFile
from mtplx.http_place import is_http_address
from mtplx.settings import Settings

# A collector that does not answer costs an export thread this long, MOST where the variable asks for more.
# Python's SDK reads that variable as seconds and the specification as milliseconds: under this cap both are right.
EXPORT_TIMEOUT_S: Final = 1.0
MOST_TIMEOUT_S: Final = 10.0
# Spans that may wait for an exporter, and how many it gets at once.
MAX_WAITING: Final = 2048
BATCH: Final = 512
DELAY_MS: Final = 5000
# How often a log says that spans or metrics do not arrive.
SAY_AGAIN_S: Final = 60.0

log = logging.getLogger("mtplx.broker")


@dataclass(frozen=True, slots=True)
class Destinations:
    """Where telemetry goes; an empty address: nowhere. wrong: sentences on variables that were not followed."""

    traces: str
    metrics: str
    timeout_s: float
    max_waiting: int
    batch: int
    delay_ms: int
    wrong: tuple[str, ...]

    @classmethod
    def of(cls, settings: Settings, variables: Mapping[str, str]) -> Destinations:
        """What *settings* and the standard *variables* ask for. `--otlp-endpoint` wins over the variables."""
        wrong: list[str] = []
        waiting = _whole(variables, "OTEL_BSP_MAX_QUEUE_SIZE", MAX_WAITING, wrong)
        batch = _whole(variables, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", BATCH, wrong)
        return cls(
            traces=_address("traces", settings, variables, wrong),
            metrics=_address("metrics", settings, variables, wrong),
            timeout_s=_timeout_s(variables, wrong),
            max_waiting=waiting,
            batch=min(batch, waiting),
            delay_ms=_whole(variables, "OTEL_BSP_SCHEDULE_DELAY", DELAY_MS, wrong),
            wrong=tuple(dict.fromkeys(wrong)),
        )


class Complaint:
    """Says that something does not arrive, at most once in SAY_AGAIN_S, and how much that was."""

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._clock = what, clock
        self._lost = 0
        self._next = 0.0

    def lost(self, count: int, why: str) -> None:
        """Count *count* that were lost, and say so where it is time to."""
        self._lost += count
        if self._clock() >= self._next:
            self._next = self._clock() + SAY_AGAIN_S
            log.warning("%d %s; jobs are not affected (%s)", self._lost, self._what, why)
            self._lost = 0


class CountingExporter(SpanExporter):
    """Passes spans on, and counts them. Called by one thread at a time."""

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner
        self._complaint = Complaint("spans could not be exported")
        self.received = 0
        self.failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export *spans*; those that did not arrive are counted in `failed`."""
        self.received += len(spans)
        result, why = SpanExportResult.FAILURE, "the collector did not take them"
        try:
            result = self._inner.export(spans)
        except OSError as error:
            why = str(error)
        finally:
            if result is not SpanExportResult.SUCCESS:
                self.failed += len(spans)
                self._complaint.lost(len(spans), why)
        return result

    def shutdown(self) -> None:
        """Close the exporter."""
        self._inner.shutdown()


class CountingProcessor(BatchSpanProcessor):
    """Batches spans for one exporter. Without room new ones are dropped and counted here, not in the SDK."""

    def __init__(
        self, exporter: SpanExporter, max_waiting: int = MAX_WAITING, batch: int = BATCH, delay_ms: int = DELAY_MS
    ) -> None:
        self.exporter = CountingExporter(exporter)
        self.dropped = 0
        self._taken = 0
        self._max_waiting = max_waiting
        super().__init__(
            self.exporter,
            max_queue_size=max_waiting,
            max_export_batch_size=min(batch, max_waiting),
            schedule_delay_millis=delay_ms,
        )

    @property
    def waiting(self) -> int:
        """Spans the exporter has not been given yet; never fewer than the SDK holds."""
        return self._taken - self.exporter.received

    def on_end(self, span: ReadableSpan) -> None:
        """Take a span that has ended, if it is sampled and there is room."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if self.waiting >= self._max_waiting:
            self.dropped += 1
            return
        self._taken += 1
        super().on_end(span)


def resource(version: str) -> Resource:
    """Who tells: `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES`, and what they leave open."""
    found = Resource.create({"service.version": version})
    if str(found.attributes["service.name"]).startswith("unknown_service"):
        found = found.merge(Resource({"service.name": names.SERVICE}))
    return found


def processors(trace_file: Path | None, to: Destinations) -> list[CountingProcessor]:
    """One for each place that spans go to: a JSON-lines file, an OTLP/HTTP collector, or both.

    Raises:
        OSError: the file cannot be written.
    """
    # What it logs of a collector that is away would fill a disk; `Complaint` says it.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    exporters: list[SpanExporter] = []
    if trace_file is not None:
        exporters.append(FileSpanExporter(stream=cast("IO[str]", LineFile(trace_file))))
    if to.traces:
        exporters.append(OTLPSpanExporter(endpoint=to.traces, timeout=to.timeout_s))
    return [CountingProcessor(one, to.max_waiting, to.batch, to.delay_ms) for one in exporters]


def _address(signal: str, settings: Settings, variables: Mapping[str, str], wrong: list[str]) -> str:
    name = f"OTEL_{signal.upper()}_EXPORTER"
    asked = {one.strip().lower() for one in variables.get(name, "otlp").split(",")}
    unknown = asked - {"otlp", "none", "prometheus"}
    if unknown:
        wrong.append(f"{name}={variables[name]} is not followed: the exporters here are otlp and none.")
    if "otlp" not in asked:
        return ""
    own = variables.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", "").strip()
    general = settings.otlp_endpoint
    # The general variable has become the setting; one that differs was given to us alone.
    if own and not is_http_address(own):
        wrong.append(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT={own} is not followed: it is no HTTP address.")
        own = ""
    if own and general == variables.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").strip():
        address = own
    else:
        path = f"/v1/{signal}"
        base = general.rstrip("/")
        base = next((base.removesuffix(one) for one in ("/v1/traces", "/v1/metrics") if base.endswith(one)), base)
        address = f"{base}{path}" if base else ""
    if address:
        _check_protocol(signal, variables, wrong)
    return address


def _check_protocol(signal: str, variables: Mapping[str, str], wrong: list[str]) -> None:
    for name in (f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if name in variables:
            if variables[name].strip() != "http/protobuf":
                wrong.append(
                    f"{name}={variables[name]} is not followed: the broker speaks http/protobuf, "
                    "which collectors take on port 4318."
                )
            return


def _timeout_s(variables: Mapping[str, str], wrong: list[str]) -> float:
    for name in ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT"):
        if name in variables:
            try:
                asked = float(variables[name])
            except ValueError:
                asked = math.nan
            if not math.isnan(asked):
                return min(max(asked, 0.1), MOST_TIMEOUT_S)
            wrong.append(f"{name}={variables[name]} is not followed: it must be a number.")
    return EXPORT_TIMEOUT_S


def _whole(variables: Mapping[str, str], name: str, default: int, wrong: list[str]) -> int:
    text = variables.get(name, "").strip()
    if not text:
        return default
    if text.isdecimal() and 0 < int(text) <= 1_000_000:
        return int(text)
    wrong.append(f"{name}={text} is not followed: it must be a whole number from 1 to 1000000.")
    return default
