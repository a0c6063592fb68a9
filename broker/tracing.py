"""Spans from the gate's moments, by the OpenTelemetry SDK. Needs the extra `otlp`.

    process mtplx.jobs   CONSUMER  admitted to last word; child of the producer's context, and linked to it
        queue mtplx.jobs INTERNAL  admitted to dispatch (or to the end of a job that never ran)
        chat <model>     CLIENT    dispatch to last word, one for each attempt

Prefill and decode are attributes of the chat span, and an event marks the first token between them. A refusal is a
process span of length zero with `error.type`. Prompts and answers are never put in.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, cast

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.json.file.trace_exporter import FileSpanExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import (
    Link,
    Span,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from broker import names
from broker.admission import Key, Moment
from broker.tracefile import LineFile

# A collector that does not answer costs an export thread this long, and the exit CLOSE_S.
EXPORT_TIMEOUT_S: Final = 1.0
CLOSE_S: Final = 1.0
# Spans that may wait for an exporter, and how many it gets at once.
MAX_WAITING: Final = 2048
BATCH: Final = 512

log = logging.getLogger("mtplx.broker")


@dataclass(slots=True)
class OpenJob:
    """The spans of a job that has not ended."""

    process: Span
    context: Context
    admitted_ns: int
    asked: dict[str, Any]
    queued: bool = True
    chat: Span | None = None


class CountingExporter(SpanExporter):
    """Passes spans on, and counts them. Called by one thread at a time."""

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner
        self.received = 0
        self.failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export *spans*; those that did not arrive are counted in `failed`."""
        self.received += len(spans)
        result = SpanExportResult.FAILURE
        try:
            result = self._inner.export(spans)
        finally:
            if result is not SpanExportResult.SUCCESS:
                self.failed += len(spans)
        return result

    def shutdown(self) -> None:
        """Close the exporter."""
        self._inner.shutdown()


class CountingProcessor(BatchSpanProcessor):
    """Batches spans for one exporter. Beyond MAX_WAITING new ones are dropped and counted here, not in the SDK."""

    def __init__(self, exporter: SpanExporter) -> None:
        self.exporter = CountingExporter(exporter)
        self.dropped = 0
        self._taken = 0
        super().__init__(self.exporter, max_queue_size=MAX_WAITING, max_export_batch_size=min(BATCH, MAX_WAITING))

    @property
    def waiting(self) -> int:
        """Spans the exporter has not been given yet; never fewer than the SDK holds."""
        return self._taken - self.exporter.received

    def on_end(self, span: ReadableSpan) -> None:
        """Take a span that has ended, if it is sampled and there is room."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if self.waiting >= MAX_WAITING:
            self.dropped += 1
            return
        self._taken += 1
        super().on_end(span)


class SpanTracer:
    """Turns moments into spans. Never blocks; a dead collector costs nothing but its spans, which are counted."""

    def __init__(self, exporters: list[SpanExporter], *, version: str, boot_id: bytes) -> None:
        resource = Resource.create({"service.name": names.SERVICE, "service.version": version})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._processors = [CountingProcessor(exporter) for exporter in exporters]
        for processor in self._processors:
            self._provider.add_span_processor(processor)
        self._tracer: Tracer = self._provider.get_tracer("mtplx", version, schema_url=names.SCHEMA_URL)
        self._boot_id = boot_id.hex()
        self._open: dict[Key, OpenJob] = {}

    def record(self, moments: list[Moment]) -> None:
        """Build the spans that *moments* begin, mark or end."""
        for moment in moments:
            if moment.what == "admitted":
                self._admitted(moment)
            elif moment.what == "refused":
                self._refused(moment)
            elif moment.job in self._open:
                self._of_open_job(moment, self._open[moment.job])

    def close(self) -> None:
        """End all spans of open jobs as `unfinished`, flush, and give up after CLOSE_S."""
        at = time.time_ns()
        for job in self._open.values():
            self._end_queue(job, at)
            for span in (job.chat, job.process):
                if span is not None:
                    span.set_attribute(names.OUTCOME, "unfinished")
                    span.set_status(Status(StatusCode.ERROR))
                    span.end(at)
        self._open.clear()
        closer = threading.Thread(target=self._provider.shutdown, daemon=True)
        closer.start()
        closer.join(CLOSE_S)
        lost = sum(self.lost().values()) + sum(one.waiting for one in self._processors)
        if lost:
            log.warning("%d spans were not exported", lost)

    def lost(self) -> dict[str, int]:
        """Spans that did not arrive: `spans_dropped` for want of room, `spans_failed` at the exporter."""
        found = {
            "spans_dropped": sum(one.dropped for one in self._processors),
            "spans_failed": sum(one.exporter.failed for one in self._processors),
        }
        return {name: count for name, count in found.items() if count}

    def _process_span(self, moment: Moment) -> Span:
        parent = _remote_context(moment.attributes.get("headers"))
        remote = get_current_span(parent).get_span_context()
        return self._tracer.start_span(
            f"process {names.DESTINATION}",
            context=parent,
            kind=SpanKind.CONSUMER,
            links=[Link(remote)] if remote.is_valid else [],
            start_time=moment.wall_ns,
            attributes={
                names.MESSAGING_SYSTEM: names.SYSTEM,
                names.MESSAGING_OPERATION_NAME: "process",
                names.MESSAGING_OPERATION_TYPE: "process",
                names.MESSAGING_DESTINATION: names.DESTINATION,
                names.MESSAGING_MESSAGE_ID: moment.job[1].hex(),
                names.BOOT_ID: self._boot_id,
            },
        )

    def _admitted(self, moment: Moment) -> None:
        span = self._process_span(moment)
        span.set_attribute(names.ADMIT_SEQ, moment.attributes["seq"])
        span.set_attribute(names.QUEUE_DEPTH, moment.attributes["depth"])
        if moment.attributes["restored"]:
            span.add_event(names.EVENT_RESTORED)
        context = set_span_in_context(span, Context())
        self._open[moment.job] = OpenJob(span, context, moment.wall_ns, moment.attributes)

    def _refused(self, moment: Moment) -> None:
        span = self._process_span(moment)
        span.set_attribute(names.OUTCOME, "refused")
        span.set_attribute(names.ERROR_TYPE, moment.attributes["code"])
        span.set_status(Status(StatusCode.ERROR))
        span.end(moment.wall_ns)

    def _of_open_job(self, moment: Moment, job: OpenJob) -> None:
        if moment.what == "dispatched":
            self._end_queue(job, moment.wall_ns)
            job.chat = self._chat_span(moment, job)
        elif moment.what == "first_token" and job.chat is not None:
            job.chat.add_event(names.EVENT_FIRST_TOKEN, timestamp=moment.wall_ns)
        elif moment.what == "worker_lost":
            why = {names.EVENT_REASON: moment.attributes["reason"]}
            job.process.add_event(names.EVENT_WORKER_LOST, why, moment.wall_ns)
        elif moment.what == "requeued" and job.chat is not None:
            self._attempt_ended(moment, job.chat)
            job.chat = None
        elif moment.what == "cancelling":
            job.process.add_event(names.EVENT_CANCELLING, timestamp=moment.wall_ns)
        elif moment.what == "ended":
            self._ended(moment, job)

    def _end_queue(self, job: OpenJob, wall_ns: int) -> None:
        if job.queued:
            job.queued = False
            span = self._tracer.start_span(
                f"queue {names.DESTINATION}", context=job.context, start_time=job.admitted_ns
            )
            span.end(wall_ns)

    def _chat_span(self, moment: Moment, job: OpenJob) -> Span:
        operation = "chat" if job.asked["chat"] else "text_completion"
        model = moment.attributes["model"]
        span = self._tracer.start_span(
            f"{operation} {model}",
            context=job.context,
            kind=SpanKind.CLIENT,
            start_time=moment.wall_ns,
            attributes={
                names.GEN_AI_OPERATION: operation,
                names.GEN_AI_PROVIDER: names.PROVIDER,
                names.GEN_AI_REQUEST_MODEL: model,
                names.GEN_AI_REQUEST_MAX_TOKENS: job.asked["max_tokens"],
                names.GEN_AI_REQUEST_TEMPERATURE: job.asked["temperature"],
                names.GEN_AI_REQUEST_TOP_P: job.asked["top_p"],
                names.GEN_AI_REQUEST_TOP_K: job.asked["top_k"],
                names.ATTEMPT: moment.attributes["attempt"],
            },
        )
        if job.asked["stop"]:
            span.set_attribute(names.GEN_AI_REQUEST_STOP, list(job.asked["stop"]))
        return span

    def _attempt_ended(self, moment: Moment, chat: Span) -> None:
        outcome = moment.attributes["outcome"]
        chat.set_attribute(names.OUTCOME, outcome)
        if outcome != names.HANDED_BACK:
            chat.set_attribute(names.ERROR_TYPE, "E_WORKER_LOST")
            chat.set_status(Status(StatusCode.ERROR))
        _describe_answer(chat, {**moment.attributes, "error": outcome})
        chat.end(moment.wall_ns)

    def _ended(self, moment: Moment, job: OpenJob) -> None:
        del self._open[moment.job]
        self._end_queue(job, moment.wall_ns)
        told = moment.attributes
        spans = [span for span in (job.chat, job.process) if span is not None]
        for span in spans:
            span.set_attribute(names.OUTCOME, told["outcome"])
            if "error" in told:
                span.set_attribute(names.ERROR_TYPE, told["error"])
                span.set_status(Status(StatusCode.ERROR))
        timings = told["timings"]
        job.process.set_attribute(names.CHUNKS, told["chunks"])
        if "time_to_first_token_s" in timings:
            job.process.set_attribute(names.TIME_TO_FIRST_TOKEN, timings["time_to_first_token_s"])
        if job.chat is not None:
            _describe_answer(job.chat, told)
        for span in spans:
            span.end(moment.wall_ns)


def _describe_answer(span: Span, told: dict[str, Any]) -> None:
    span.set_attribute(names.GEN_AI_OUTPUT_TOKENS, told["tokens"])
    usage, run = told.get("usage", {}), told.get("run", {})
    if usage.get("prompt_tokens") is not None:
        span.set_attribute(names.GEN_AI_INPUT_TOKENS, usage["prompt_tokens"])
        span.set_attribute(names.GEN_AI_CACHED_TOKENS, usage["cached_tokens"])
    for key, name in (("prefill_s", names.PREFILL), ("decode_s", names.DECODE)):
        if key in told["timings"]:
            span.set_attribute(name, told["timings"][key])
    if "route" in run:
        span.set_attribute(names.ROUTE, run["route"])
    if "error" not in told:
        span.set_attribute(names.GEN_AI_RESPONSE_FINISH_REASONS, [told["outcome"]])


def _remote_context(headers: dict[str, str] | None) -> Context:
    """The producer's context; an empty one where the header is absent or malformed."""
    return TraceContextTextMapPropagator().extract(headers or {}, Context())


def exporters(trace_file: Path | None, endpoint: str) -> list[SpanExporter]:
    """The exporters asked for: a JSON-lines file, an OTLP/HTTP collector, or both."""
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)
    found: list[SpanExporter] = []
    if trace_file is not None:
        found.append(FileSpanExporter(stream=cast("IO[str]", LineFile(trace_file))))
    if endpoint:
        url = endpoint.rstrip("/")
        url = url if url.endswith("/v1/traces") else f"{url}/v1/traces"
        found.append(OTLPSpanExporter(endpoint=url, timeout=EXPORT_TIMEOUT_S))
    return found
