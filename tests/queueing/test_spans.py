"""Spans made from the gate's moments: what they tell, that they all end, and that a lost one is counted."""

import json
import re
import threading
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from queueing.rig import WORKER, Rig, body, job_id

from broker import names
from broker.admission import PROMPT_CHARS
from broker.export import BATCH, CountingProcessor
from broker.tracing import SpanTracer
from mtplx import messages as m

ROOT = Path(__file__).parents[2]


class Traced(Rig):
    """A rig whose moments become spans in memory."""

    def __init__(self, *, link_only: bool = False, **given) -> None:
        super().__init__(keep_moments=True, **given)
        self.memory = InMemorySpanExporter()
        processors = [CountingProcessor(self.memory)]
        self.tracer = SpanTracer(processors, version="1", boot_id=b"B" * 16, link_only=link_only)

    def spans(self) -> dict[str, list]:
        """What was exported, by the first word of the name."""
        self.tracer.record(self.gate.take_moments())
        self.tracer.close()
        found: dict[str, list] = {}
        for span in self.memory.get_finished_spans():
            found.setdefault(span.name.split()[0], []).append(span)
        return found


def test_the_chat_span_tells_how_long_prefill_and_decode_took_by_the_workers_clock():
    rig = Traced()
    rig.ready()
    rig.submit(1)
    rig.clock.advance(2.0)
    rig.chunk(1, 2)
    rig.final(prefill_s=0.5, decode_s=1.5)
    spans = rig.spans()
    chat, process = spans["text_completion"][0].attributes, spans["process"][0].attributes
    assert (chat["mtplx.prefill_s"], chat["mtplx.decode_s"]) == (0.5, 1.5)
    assert process["mtplx.time_to_first_token_s"] == pytest.approx(2.0)


def test_without_the_workers_word_they_are_told_by_the_brokers_clock():
    rig = Traced()
    rig.ready()
    rig.submit(1)
    rig.clock.advance(2.0)
    rig.chunk(1)
    rig.clock.advance(3.0)
    rig.gone.add(WORKER)
    rig.back.beat()
    rig.turn()
    chat = rig.spans()["text_completion"][0].attributes
    assert chat["error.type"] == "E_WORKER_LOST"
    assert (chat["mtplx.prefill_s"], chat["mtplx.decode_s"]) == (pytest.approx(2.0), pytest.approx(3.0))


def test_an_attempt_that_ended_before_its_first_token_tells_no_decode_time():
    rig = Traced()
    rig.ready()
    rig.submit(1)
    rig.gone.add(WORKER)
    rig.back.beat()
    rig.turn()
    chat = rig.spans()["text_completion"][0].attributes
    assert chat["error.type"] == "E_WORKER_LOST"
    assert not {"mtplx.prefill_s", "mtplx.decode_s"} & set(chat)


def test_chunks_are_those_of_the_answer_and_not_of_whoever_read_it():
    rig = Traced()
    rig.ready()
    rig.submit(1, credit=0)
    for token in range(5):
        rig.chunk(token)
    rig.final()
    assert rig.spans()["process"][0].attributes["mtplx.chunks"] == 5


def test_every_orphan_ends_with_one_cancelled_span_whether_it_waited_or_ran():
    rig = Traced(orphan_s=1.0)
    rig.ready()
    for number in range(1, 5):
        rig.submit(number)
    rig.submit(9, b"stays")
    rig.gone.add(b"a")
    rig.wait(5)
    rig.final("cancelled")
    rig.final()
    ended = [
        (one.attributes["messaging.message.id"], one.attributes["mtplx.outcome"]) for one in rig.spans()["process"]
    ]
    orphans = [(job_id(number).hex(), "cancelled") for number in range(1, 5)]
    assert sorted(ended) == sorted([*orphans, (job_id(9).hex(), "stop")])


def test_closing_ends_every_span_that_is_open():
    rig = Traced()
    rig.ready()
    rig.submit(1)
    rig.submit(2)
    spans = rig.spans()
    assert {name: len(some) for name, some in spans.items()} == {"process": 2, "queue": 2, "text_completion": 1}
    unfinished = [*spans["process"], *spans["text_completion"]]
    assert {one.attributes["mtplx.outcome"] for one in unfinished} == {"unfinished"}
    assert all(not one.status.is_ok for one in unfinished)


FIGURES = {
    "drafted": 9,
    "accepted_by_depth": [4, 2],
    "verify_forwards": 7,
    "widths": {"1": 5, "4": 2},
    "fork_attempts": 3,
    "fork_wins": 1,
}


def test_the_chat_span_tells_how_speculation_went_and_marks_won_forks():
    rig = Traced()
    rig.ready(stage="h2")
    rig.submit(1)
    rig.chunk(1, 2)
    rig.final(speculation=FIGURES, cached_tokens=2)
    chat = rig.spans()["text_completion"][0]
    told = chat.attributes
    assert (told[names.DRAFTED], told[names.ACCEPTED], told[names.ACCEPTED_BY_DEPTH]) == (9, 6, (4, 2))
    assert (told[names.FORK_ATTEMPTS], told[names.FORK_WINS], told[names.VERIFY_FORWARDS]) == (3, 1, 7)
    assert json.loads(told[names.WIDTHS]) == {"1": 5, "4": 2}
    assert (told[names.ROUTE], told[names.STAGE], told[names.GEN_AI_CACHED_TOKENS]) == ("serial_b1", "h2", 2)
    assert [event.name for event in chat.events] == [names.EVENT_FIRST_TOKEN, names.EVENT_FORK_WIN]


@pytest.mark.parametrize(
    "strange",
    [
        {},
        {
            "drafted": -1,
            "accepted_by_depth": ["x"],
            "widths": {"1": None, "red": 3, "99999": 1},
            "fork_wins": "two",
        },
        {"drafted": 2**63, "accepted_by_depth": [2**62] * 4, "widths": [1, 2], "fork_wins": 2**63},
        {"drafted": True, "accepted_by_depth": 3, "widths": {"1": 2**64 - 1}, "verify_forwards": 1.5},
    ],
)
def test_strange_figures_of_a_worker_are_left_out_and_cost_nothing(strange):
    rig = Traced()
    rig.ready()
    rig.submit(1)
    rig.final(speculation=strange)
    told = rig.spans()["text_completion"][0].attributes
    whole = [value for value in told.values() if type(value) is int]
    assert all(abs(value) < 2**63 for value in whole)
    assert not {names.DRAFTED, names.FORK_WINS, names.WIDTHS} & set(told)


@pytest.mark.parametrize(("seed", "told"), [(5, 5), (2**63 - 1, 2**63 - 1), (2**63, None), (2**64 - 1, None)])
def test_a_seed_that_otlp_cannot_hold_as_a_number_is_told_as_text_alone(seed, told):
    rig = Traced()
    rig.ready()
    rig.submit(1, job=body(prompt="x", seed=seed))
    rig.final()
    attributes = rig.spans()["text_completion"][0].attributes
    assert (attributes.get(names.GEN_AI_REQUEST_SEED), attributes[names.SEED]) == (told, str(seed))


def test_a_job_that_goes_on_tells_from_where_and_each_attempt_has_a_chat_span():
    rig = Traced()
    rig.ready()
    rig.submit(1)
    rig.chunk(1, 2, 3)
    rig.gone.add(WORKER)
    rig.back.beat()
    rig.turn()
    rig.ready(b"w2", b"2" * 16)
    rig.chunk(4, route=b"w2")
    rig.final(route=b"w2")
    spans = rig.spans()
    process = spans["process"][0]
    events = {event.name: dict(event.attributes) for event in process.events}
    assert events[names.EVENT_RESUMED] == {names.ATTEMPT: 2, names.RESUMED_TOKENS: 3}
    assert names.REASON in events[names.EVENT_WORKER_LOST]
    attempts = [(one.attributes[names.ATTEMPT], one.status.is_ok) for one in spans["text_completion"]]
    assert attempts == [(1, False), (2, True)]
    assert {one.parent.span_id for one in spans["text_completion"]} == {process.context.span_id}


def test_a_cancel_is_marked_when_it_is_asked_for_and_when_it_is_done():
    rig = Traced()
    rig.ready()
    rig.submit(1)
    rig.submit(2)
    rig.say(b"a", m.Cancel(job_id(2)))
    rig.say(b"a", m.Cancel(job_id(1)))
    rig.final("cancelled")
    ended = {one.attributes[names.MESSAGING_MESSAGE_ID]: one for one in rig.spans()["process"]}
    running, waiting = ended[job_id(1).hex()], ended[job_id(2).hex()]
    assert [one.name for one in running.events] == [names.EVENT_CANCELLING, names.EVENT_CANCELLED]
    assert [one.name for one in waiting.events] == [names.EVENT_CANCELLED]


HEADERS = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


@pytest.mark.parametrize("link_only", [False, True])
def test_a_job_joins_its_producers_trace_or_only_links_to_it(link_only):
    rig = Traced(link_only=link_only)
    rig.ready()
    rig.submit(1, h=HEADERS)
    rig.final()
    process = rig.spans()["process"][0]
    theirs = 0x0AF7651916CD43DD8448EB211C80319C
    assert [link.context.trace_id for link in process.links] == [theirs]
    assert (process.context.trace_id == theirs) is not link_only
    assert (process.parent is None) is link_only


def test_all_of_the_trace_context_reaches_spans_and_every_worker():
    headers = {**HEADERS, "tracestate": "a=b,c=d", "x-team": "blue"}
    rig = Traced()
    rig.ready()
    rig.submit(1, h=headers)
    rig.gone.add(WORKER)
    rig.back.beat()
    rig.turn()
    rig.ready(b"w2", b"2" * 16)
    assert [run.h for run in (*rig.runs(), *rig.runs(b"w2"))] == [headers, headers]
    rig.final(route=b"w2")
    spans = [one for some in rig.spans().values() for one in some]
    assert len(spans) == 4
    assert {one.context.trace_state.to_header() for one in spans} == {"a=b,c=d"}
    assert {one.context.trace_id for one in spans} == {0x0AF7651916CD43DD8448EB211C80319C}


SECRET, ANSWER = "the secret question", "7 8 "


@pytest.mark.parametrize("asked", [{"prompt": SECRET}, {"messages": [{"role": "user", "content": SECRET}]}])
def test_prompts_and_answers_are_in_spans_only_where_they_are_asked_for(asked):
    for wanted in (False, True):
        rig = Traced(trace_prompts=wanted)
        rig.ready()
        rig.submit(1, job=body(**asked))
        rig.chunk(7, 8)
        rig.final()
        spans = rig.spans()
        text = "".join(one.to_json() for some in spans.values() for one in some)
        assert (SECRET in text) is wanted
        assert (ANSWER in text) is wanted
        if wanted:
            told = next(
                one.attributes
                for name, some in spans.items()
                if name != "process"
                for one in some
                if names.GEN_AI_INPUT_MESSAGES in one.attributes
            )
            assert json.loads(told[names.GEN_AI_INPUT_MESSAGES]) == [
                {"role": "user", "parts": [{"type": "text", "content": SECRET}]}
            ]
            (answer,) = json.loads(told[names.GEN_AI_OUTPUT_MESSAGES])
            assert (answer["role"], answer["finish_reason"]) == ("assistant", "stop")


def test_a_long_prompt_is_cut_and_the_span_stays_small():
    rig = Traced(trace_prompts=True)
    rig.ready()
    rig.submit(1, job=body(messages=[{"role": "user", "content": "é" * 100_000}] * 3))
    rig.final()
    told = rig.spans()["chat"][0].attributes[names.GEN_AI_INPUT_MESSAGES]
    assert sum(len(one["parts"][0]["content"]) for one in json.loads(told)) == PROMPT_CHARS


def test_the_page_on_tracing_names_all_that_is_emitted_and_nothing_else():
    """Emitted here by jobs with every outcome; whatever is in names.py is emitted or in the page's other tables."""
    rig = Traced(trace_prompts=True, queue_jobs=2)
    rig.ready(stage="h2")
    rig.submit(1, job=body(prompt="x", stop=["."], seed=3), h=HEADERS)
    rig.chunk(1)
    for number in (2, 3, 4):
        rig.submit(number, job=body(messages=[{"role": "user", "content": "x"}]))
    rig.say(b"a", m.Cancel(job_id(3)))
    rig.gone.add(WORKER)
    rig.back.beat()
    rig.turn()
    rig.ready(b"w2", b"2" * 16)
    rig.chunk(2, route=b"w2")
    rig.final(route=b"w2", speculation=FIGURES)
    rig.say(b"a", m.Cancel(job_id(2)))
    rig.final("cancelled", route=b"w2")
    emitted = set()
    for span in (one for some in rig.spans().values() for one in some):
        emitted |= set(span.attributes) | {event.name for event in span.events}
        emitted |= {key for event in span.events for key in event.attributes}
    page = (ROOT / "docs" / "tracing.md").read_text()
    named = set(re.findall(r"^\| `([a-z_]+\.[a-z_.]+)` \|", page, re.MULTILINE))
    metrics = {value for key, value in vars(names).items() if key.startswith("METRIC_")}
    elsewhere = (metrics - {names.QUEUE_DEPTH}) | {names.EVENT_RESTORED, names.WIDTH}
    assert named - elsewhere == emitted


class Stuck(SpanExporter):
    """An exporter that takes nothing until it is told to, and then answers *result*."""

    def __init__(self, result: SpanExportResult) -> None:
        self.result, self.go, self.got = result, threading.Event(), 0

    def export(self, spans):
        self.go.wait(20)
        self.got += len(spans)
        return self.result

    def shutdown(self):
        pass


@pytest.mark.parametrize("result", list(SpanExportResult))
def test_each_span_is_exported_or_counted_as_dropped_or_failed(result):
    rig, stuck = Rig(keep_moments=True), Stuck(result)
    tracer = SpanTracer([CountingProcessor(stuck, 100)], version="1", boot_id=b"B" * 16)
    rig.ready()
    for number in range(1, 201):
        rig.submit(number)
        rig.final()
        tracer.record(rig.gate.take_moments())
    assert tracer.lost()["spans_dropped"] >= 600 - 100 - BATCH
    stuck.go.set()
    tracer.close()
    lost = tracer.lost()
    arrived = stuck.got if result is SpanExportResult.SUCCESS else lost["spans_failed"]
    assert arrived + lost["spans_dropped"] == 600
    assert ("spans_failed" in lost) == (result is SpanExportResult.FAILURE)
