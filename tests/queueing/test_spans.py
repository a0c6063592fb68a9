"""Spans made from the gate's moments: what they tell, that they all end, and that a lost one is counted."""

import threading

import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from queueing.rig import WORKER, Rig, job_id

from broker.export import BATCH, CountingProcessor
from broker.tracing import SpanTracer


class Traced(Rig):
    """A rig whose moments become spans in memory."""

    def __init__(self, **given) -> None:
        super().__init__(keep_moments=True, **given)
        self.memory = InMemorySpanExporter()
        self.tracer = SpanTracer([CountingProcessor(self.memory)], version="1", boot_id=b"B" * 16)

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
