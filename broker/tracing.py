"""Spans from the gate's moments, by the OpenTelemetry SDK. Needs the extra `otlp`.

    process mtplx.jobs   CONSUMER  admitted to last word; child of the producer's context, and linked to it
        queue mtplx.jobs INTERNAL  admitted to dispatch (or to the end of a job that never ran)
        chat <model>     CLIENT    dispatch to last word, one for each attempt

Prefill and decode are attributes of the chat span, and an event marks the first token between them. A refusal is a
process span of length zero with `error.type`. Prompts and answers are put in only with `--trace-prompts`.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
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
from broker.admission import PROMPT_CHARS, WIDTHS, Key, Moment
from broker.export import CountingProcessor, resource

# How long the exit waits for a collector.
CLOSE_S: Final = 1.0
# What OTLP and frames hold as a whole number.
MAX_INT: Final = 2**63
MAX_FIGURES: Final = 64

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


class SpanTracer:
    """Turns moments into spans. Never blocks; a dead collector costs nothing but its spans, which are counted."""

    def __init__(
        self, processors: Sequence[CountingProcessor], *, version: str, boot_id: bytes, link_only: bool = False
    ) -> None:
        self._provider = TracerProvider(resource=resource(version), shutdown_on_exit=False)
        self._processors = list(processors)
        for processor in self._processors:
            self._provider.add_span_processor(processor)
        self._tracer: Tracer = self._provider.get_tracer("mtplx", version, schema_url=names.SCHEMA_URL)
        self._boot_id = boot_id.hex()
        self._link_only = link_only
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
        producer = _remote_context(moment.attributes.get("headers"))
        remote = get_current_span(producer).get_span_context()
        return self._tracer.start_span(
            f"process {names.DESTINATION}",
            context=Context() if self._link_only else producer,
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
            span.add_event(names.EVENT_RESTORED, timestamp=time.time_ns())
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
            if moment.attributes["behind"] or moment.attributes["attempt"] > 1:
                told = {
                    names.ATTEMPT: moment.attributes["attempt"],
                    names.RESUMED_TOKENS: moment.attributes["behind"],
                }
                job.process.add_event(names.EVENT_RESUMED, told, moment.wall_ns)
            job.chat = self._chat_span(moment, job)
        elif moment.what == "first_token" and job.chat is not None:
            job.chat.add_event(names.EVENT_FIRST_TOKEN, timestamp=moment.wall_ns)
        elif moment.what == "worker_lost":
            why = {names.REASON: moment.attributes["reason"]}
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
                names.GEN_AI_RESPONSE_ID: moment.job[1].hex(),
                names.GEN_AI_RESPONSE_MODEL: model,
                names.ATTEMPT: moment.attributes["attempt"],
                names.STAGE: moment.attributes["stage"],
                names.SEED: str(job.asked["seed"]),
            },
        )
        # A seed may have 64 bits, of which OTLP holds 63; one it cannot hold would cost the whole batch.
        if job.asked["seed"] < MAX_INT:
            span.set_attribute(names.GEN_AI_REQUEST_SEED, job.asked["seed"])
        if "messages" in job.asked:
            span.set_attribute(names.GEN_AI_INPUT_MESSAGES, _messages(job.asked["messages"]))
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
        if told["outcome"] == "cancelled":
            job.process.add_event(names.EVENT_CANCELLED, timestamp=moment.wall_ns)
        timings = told["timings"]
        job.process.set_attribute(names.CHUNKS, told["chunks"])
        if "time_to_first_token_s" in timings:
            job.process.set_attribute(names.TIME_TO_FIRST_TOKEN, timings["time_to_first_token_s"])
        if job.chat is not None:
            _describe_answer(job.chat, told)
            _describe_speculation(job.chat, told, moment.wall_ns)
            if "text" in told:
                answer = [{"role": "assistant", "content": told["text"]}]
                job.chat.set_attribute(names.GEN_AI_OUTPUT_MESSAGES, _messages(answer, told["outcome"]))
        for span in spans:
            span.end(moment.wall_ns)


def _describe_answer(span: Span, told: dict[str, Any]) -> None:
    span.set_attribute(names.GEN_AI_OUTPUT_TOKENS, told["tokens"])
    usage, run = told.get("usage", {}), told.get("run", {})
    if usage.get("prompt_tokens") is not None:
        span.set_attribute(names.GEN_AI_INPUT_TOKENS, usage["prompt_tokens"])
        span.set_attribute(names.GEN_AI_CACHED_TOKENS, usage["cached_tokens"])
    timings = told["timings"]
    for key, name in (("prefill_s", names.PREFILL), ("decode_s", names.DECODE)):
        if key in timings:
            span.set_attribute(name, timings[key])
    if "run_first_token_s" in timings:
        span.set_attribute(names.GEN_AI_FIRST_CHUNK, timings["run_first_token_s"])
    if "route" in run:
        span.set_attribute(names.ROUTE, run["route"])
    if "error" not in told:
        span.set_attribute(names.GEN_AI_RESPONSE_FINISH_REASONS, [told["outcome"]])


def _describe_speculation(span: Span, told: dict[str, Any], wall_ns: int) -> None:
    """The worker's figures, as far as they are what they should be: strange ones are left out."""
    figures = told.get("run", {}).get("speculation") or {}
    counts = {
        names.DRAFTED: figures.get("drafted"),
        names.VERIFY_FORWARDS: figures.get("verify_forwards"),
        names.FORK_ATTEMPTS: figures.get("fork_attempts"),
        names.FORK_WINS: figures.get("fork_wins"),
    }
    span.set_attributes({name: count for name, count in counts.items() if _is_count(count)})
    depths = figures.get("accepted_by_depth")
    if isinstance(depths, list | tuple) and all(map(_is_count, depths)):
        span.set_attribute(names.ACCEPTED, min(sum(depths), MAX_INT - 1))
        span.set_attribute(names.ACCEPTED_BY_DEPTH, list(depths[:MAX_FIGURES]))
    widths = forwards_by_width(figures)
    if widths:
        # Attributes hold no maps: one JSON text, width to forwards.
        span.set_attribute(names.WIDTHS, json.dumps(widths))
    wins = counts[names.FORK_WINS]
    if _is_count(wins) and wins:
        # The worker tells them with its last word, so that is the time of the event.
        span.add_event(names.EVENT_FORK_WIN, {names.FORK_WINS: wins}, wall_ns)


def forwards_by_width(figures: Mapping[str, Any]) -> dict[str, int]:
    """How many forwards of each width the worker tells of; strange figures are left out."""
    told = figures.get("widths")
    if not isinstance(told, dict):
        return {}
    found = {width: count for width, count in told.items() if width in WIDTHS and _is_count(count)}
    return dict(list(found.items())[:MAX_FIGURES])


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < MAX_INT


def _messages(messages: Sequence[Mapping[str, str]], finish_reason: str = "") -> str:
    """Messages as the conventions spell them, in JSON; PROMPT_CHARS of their text at most."""
    left, found = PROMPT_CHARS, []
    for one in messages:
        part = {"type": "text", "content": one["content"][:left]}
        left -= len(part["content"])
        told: dict[str, Any] = {"role": one["role"], "parts": [part]}
        found.append({**told, "finish_reason": finish_reason} if finish_reason else told)
    return json.dumps(found, ensure_ascii=False)


def _remote_context(headers: dict[str, str] | None) -> Context:
    """The producer's context; an empty one where the header is absent or malformed."""
    return TraceContextTextMapPropagator().extract(headers or {}, Context())
