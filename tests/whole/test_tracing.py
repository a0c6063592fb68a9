"""Spans as a collector gets them: one trace from the producer on, ended on every outcome, and never in the way."""

import json
import signal
import statistics
import time

import pytest
from whole.collector import FAULTS, Collector
from whole.harness import service, stop

from broker.export import BATCH, MAX_WAITING
from mtplx import messages as m

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SLOW = {"tokens": 100_000, "token_s": 0.01}
PROMPT = "a-very-secret-prompt"
# What a collector may cost an exit; the exporter by itself would take seven to ten seconds.
EXIT_S = 2.0
# So many that their spans fill a batch, and an export is under way at the exit.
JOBS = 200


def test_every_outcome_ends_its_spans_in_the_producers_trace_without_the_prompt():
    with Collector() as collector, service("--otlp-endpoint", collector.url, "--queue-jobs", "2") as broker:
        worker, producer = broker.worker(), broker.producer()
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=b"}
        done = producer.submit(script={"tokens": 3}, prompt=PROMPT, h=headers)
        producer.last_word(done)
        killed = producer.submit(script={"tokens": 300, "token_s": 0.01}, prompt=PROMPT, h=headers)
        producer.expect(m.Chunk, killed)
        waiting = producer.submit(script=SLOW, prompt=PROMPT, h=headers)
        producer.say(m.Cancel(waiting))
        producer.last_word(waiting)
        queued = [producer.submit(script={"tokens": 2}, prompt=PROMPT, h=headers) for _ in range(2)]
        refused = producer.submit(prompt=PROMPT, h=headers)
        producer.last_word(refused)
        worker.send(signal.SIGKILL)
        worker.close()
        broker.worker()
        assert producer.last_word(killed).run["attempt"] == 2
        for job in queued:
            producer.last_word(job)
        stop(broker.broker)
        assert {one.trace for one in collector.spans} == {TRACE}
        assert all(one.end >= one.begin > 1e18 for one in collector.spans)
        _check_done(collector.of(done))
        cancelled = collector.of(waiting)
        assert set(cancelled) == {"process", "queue"}
        assert cancelled["process"].attributes["mtplx.outcome"] == "cancelled"
        lost = collector.of(killed)
        assert set(lost) == {"process", "queue", "text_completion"}
        assert lost["process"].events == ["mtplx.worker_lost", "mtplx.resumed"]
        assert lost["process"].attributes["mtplx.outcome"] == "stop"
        assert not lost["process"].failed
        chats = [one for one in collector.spans if one.attributes.get("error.type") == "E_WORKER_LOST"]
        assert [(one.name, one.failed, one.attributes["mtplx.attempt"]) for one in chats] == [
            ("text_completion scripted", True, 1)
        ]
        full = collector.of(refused)
        assert set(full) == {"process"}
        assert (full["process"].begin, full["process"].attributes["error.type"]) == (
            full["process"].end,
            "E_QUEUE_FULL",
        )
        assert PROMPT.encode() not in collector.raw
        assert b"0 1 2" not in collector.raw


def _check_done(spans):
    process, queue, chat = spans["process"], spans["queue"], spans["text_completion"]
    assert (process.name, process.kind, process.parent, process.links) == (
        "process mtplx.jobs",
        5,
        PARENT,
        [PARENT],
    )
    assert (queue.name, queue.kind, queue.begin) == ("queue mtplx.jobs", 1, process.begin)
    assert (chat.name, chat.kind, chat.events) == ("text_completion scripted", 3, ["mtplx.first_token"])
    assert queue.end == chat.begin
    assert chat.end == process.end
    assert chat.attributes["gen_ai.usage.output_tokens"] == 3
    assert chat.attributes["mtplx.outcome"] == "stop"
    assert 0 <= chat.attributes["mtplx.prefill_s"] < 20
    assert 0 <= chat.attributes["mtplx.decode_s"] < 20
    assert process.attributes["mtplx.chunks"] == 3
    assert not process.failed


@pytest.mark.parametrize(
    "headers",
    [
        None,
        {},
        {"traceparent": "nonsense"},
        {"traceparent": "00-" + "0" * 32 + "-" + "0" * 16 + "-01"},
        {"traceparent": f"ff-{TRACE}-{PARENT}-01"},
        {"traceparent": f"00-{TRACE.upper()}-{PARENT}-01", "tracestate": "\x00,=,=" * 500},
    ],
)
def test_an_absent_or_malformed_header_begins_a_trace_of_its_own(headers):
    with Collector() as collector, service("--otlp-endpoint", collector.url) as broker:
        broker.worker()
        producer = broker.producer()
        job = producer.submit(script={"tokens": 1}, h=headers)
        assert producer.last_word(job).outcome == "stop"
        assert "trace_errors" not in producer.health()["counters"]
        stop(broker.broker)
        spans = collector.of(job)
        assert {one.trace for one in spans.values()} != {TRACE}
        assert len({one.trace for one in spans.values()}) == 1
        assert spans["process"].parent == ""


def test_a_header_that_is_not_sampled_exports_nothing_and_the_job_runs():
    with Collector() as collector, service("--otlp-endpoint", collector.url) as broker:
        broker.worker()
        producer = broker.producer()
        job = producer.submit(script={"tokens": 1}, h={"traceparent": f"00-{TRACE}-{PARENT}-00"})
        assert producer.last_word(job).outcome == "stop"
        stop(broker.broker)
        assert collector.spans == []


def test_the_endpoint_may_come_from_the_usual_variable_and_spans_from_a_file(tmp_path):
    trace_file = tmp_path / "spans.jsonl"
    with service("--trace-file", str(trace_file)) as broker:
        broker.worker()
        producer = broker.producer()
        producer.last_word(producer.submit(script={"tokens": 1}, prompt=PROMPT))
        stop(broker.broker)
    text = trace_file.read_text()
    assert [json.loads(line) for line in text.splitlines()]
    assert "process mtplx.jobs" in text
    assert PROMPT not in text


def test_a_trace_file_that_cannot_be_written_is_refused_at_start(tmp_path):
    with service() as broker:
        refused = broker.start_broker(
            "--trace-file", str(tmp_path / "no" / "such" / "file"), "--run-dir", str(tmp_path / "r")
        )
        assert refused.ended() == 2
        assert "Spans cannot be written to --trace-file" in refused.said()


def test_each_orphan_running_or_waiting_ends_with_one_cancelled_span():
    flags = ("--beat-s", "0.2", "--dead-s", "20", "--orphan-s", "0.2")
    with Collector() as collector, service("--otlp-endpoint", collector.url, *flags) as broker:
        worker, leaver, stayer = broker.worker(), broker.producer(), broker.producer()
        orphans = [leaver.submit(script=SLOW)]
        leaver.expect(m.Chunk)
        for _ in range(3):
            orphans.append(leaver.submit(script={"tokens": 1}))
            leaver.expect(m.Admitted, orphans[-1])
        leaver.socket.close()
        worker.wait_for("cancel")
        assert stayer.last_word(stayer.submit(script={"tokens": 1})).outcome == "stop"
        stop(broker.broker)
        for job in orphans:
            # One process span for each, or `of` fails.
            assert collector.of(job)["process"].attributes["mtplx.outcome"] == "cancelled"
        assert set(collector.of(orphans[0])) == {"process", "queue", "text_completion"}
        assert set(collector.of(orphans[1])) == {"process", "queue"}


@pytest.mark.parametrize("jobs", [1500, pytest.param(5000, marks=pytest.mark.prove)])
def test_a_slow_collector_costs_spans_and_each_is_counted_while_thousands_of_jobs_go_by(bare, jobs):
    with Collector("slow") as collector, service("--otlp-endpoint", collector.url) as broker:
        broker.worker()
        producer = broker.producer()
        for _ in range(jobs // 100):
            some = [producer.submit(script={"tokens": 1}) for _ in range(100)]
            for job in some:
                assert producer.last_word(job).outcome == "stop"
            producer.log.clear()
        counters = producer.health()["counters"]
        assert "trace_errors" not in counters
        assert stop(broker.broker) < bare[1] + EXIT_S
    dropped, failed = counters.get("spans_dropped", 0), counters.get("spans_failed", 0)
    # What was neither lost nor taken waited or was on its way when the broker stopped.
    assert dropped + failed + len(collector.spans) >= 3 * jobs - MAX_WAITING - BATCH
    # A span that failed for being late may have been taken all the same.
    assert failed or dropped + len(collector.spans) <= 3 * jobs


@pytest.fixture(scope="module")
def bare():
    """Median seconds of a job, and of the exit, without a collector."""
    with service() as plain:
        return _median_dispatch(plain, JOBS), stop(plain.broker)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_dead_collector_delays_neither_jobs_nor_the_exit(fault, bare):
    with Collector(fault) as collector, service("--otlp-endpoint", collector.url) as broker:
        traced = _median_dispatch(broker, JOBS)
        assert stop(broker.broker) < bare[1] + EXIT_S
    # Building three spans costs well under a millisecond a job; waiting for a collector would cost a second each.
    assert traced < bare[0] + 0.25


def _median_dispatch(broker, jobs: int) -> float:
    broker.worker()
    producer = broker.producer()
    times = []
    for _ in range(jobs):
        began = time.monotonic()
        producer.last_word(producer.submit(script={"tokens": 1}))
        times.append(time.monotonic() - began)
    return statistics.median(times)
