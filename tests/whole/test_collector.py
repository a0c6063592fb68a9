"""Spans and metrics on their way: through a real collector, by the standard variables, and as the files say it."""

import importlib.util
import json
import platform
import signal
import socket
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from tools import need_library
from whole.collector import Collector, SpanSeen
from whole.harness import LIMIT_S, ROOT, Program, environment, service, stop

from mtplx import Client
from mtplx import messages as m
from mtplx.cli.spans import read_spans
from mtplx.settings import Settings

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
LOAD_S = 300.0
# Components of the collector's contrib distribution that the configuration may name.
KNOWN = {
    "receivers": {"otlp"},
    "processors": {"batch", "memory_limiter"},
    "exporters": {"debug", "file", "otlp", "otlphttp"},
}


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


@contextmanager
def rotel(upstream: str) -> Iterator[str]:
    """A rotel that hands on to *upstream*; its address."""
    if sys.version_info >= (3, 14) or (platform.machine() != "x86_64" and sys.platform != "darwin"):
        pytest.skip("rotel has no wheel for this machine")
    need_library("rotel")
    agent = Path(importlib.util.find_spec("rotel").origin).with_name("rotel-agent")
    http, grpc = free_port(), free_port()
    command = [
        agent, "start", "--otlp-http-endpoint", f"127.0.0.1:{http}", "--otlp-grpc-endpoint", f"127.0.0.1:{grpc}",
        "--exporter", "otlp", "--otlp-exporter-protocol", "http", "--otlp-exporter-endpoint", upstream,
        "--batch-timeout", "100ms",
    ]  # fmt: skip
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        ends = time.monotonic() + LIMIT_S
        while socket.socket().connect_ex(("127.0.0.1", http)):
            assert process.poll() is None
            assert time.monotonic() < ends, "rotel does not listen"
            time.sleep(0.02)
        yield f"http://127.0.0.1:{http}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(LIMIT_S)


def written(path: Path) -> list[tuple]:
    """The spans of a trace file, in the terms that `told` uses."""
    found = []
    for line in path.read_text().splitlines():
        for resource in json.loads(line)["resourceSpans"]:
            for scope in resource["scopeSpans"]:
                found += [
                    (
                        one["traceId"].lower(),
                        one["spanId"].lower(),
                        one.get("parentSpanId", "").lower(),
                        one["name"],
                        int(one["kind"]),
                        int(one["startTimeUnixNano"]),
                        int(one["endTimeUnixNano"]),
                        sorted(each["key"] for each in one.get("attributes", [])),
                        [each["name"] for each in one.get("events", [])],
                        [each["spanId"].lower() for each in one.get("links", [])],
                    )
                    for one in scope["spans"]
                ]
    return sorted(found)


def told(spans: list[SpanSeen]) -> list[tuple]:
    return sorted(
        (
            one.trace, one.span, one.parent, one.name, one.kind, one.begin, one.end, sorted(one.attributes),
            one.events, one.links,
        )
        for one in spans
    )  # fmt: skip


def test_a_real_collector_hands_on_the_very_spans_of_every_outcome(tmp_path: Path) -> None:
    trace_file = tmp_path / "spans.jsonl"
    with Collector() as upstream, rotel(upstream.url) as url:
        flags = ("--otlp-endpoint", url, "--trace-file", str(trace_file), "--queue-jobs", "2")
        with service(*flags) as broker:
            worker, producer = broker.worker(), broker.producer()
            jobs = {"done": producer.submit(script={"tokens": 3}, h=HEADERS)}
            producer.last_word(jobs["done"])
            jobs["lost"] = producer.submit(script={"tokens": 300, "token_s": 0.01}, h=HEADERS)
            producer.expect(m.Chunk, jobs["lost"])
            jobs["cancelled"] = producer.submit(h=HEADERS)
            producer.say(m.Cancel(jobs["cancelled"]))
            producer.last_word(jobs["cancelled"])
            queued = [producer.submit(script={"tokens": 1}, h=HEADERS) for _ in range(2)]
            jobs["refused"] = producer.submit(h=HEADERS)
            producer.last_word(jobs["refused"])
            worker.send(signal.SIGKILL)
            worker.close()
            broker.worker()
            for job in [jobs["lost"], *queued]:
                producer.last_word(job)
            stop(broker.broker)
        ours = written(trace_file)
        # done and both queued: 3 each; lost: 4, of two attempts; cancelled: 2; refused: 1.
        assert len(ours) == 16
        assert told(upstream.wait_for(len(ours))) == ours
        assert {one.trace for one in upstream.spans} == {TRACE}
        outcomes = {name: upstream.of(job)["process"].attributes["mtplx.outcome"] for name, job in jobs.items()}
        assert outcomes == {"done": "stop", "lost": "stop", "cancelled": "cancelled", "refused": "refused"}
        assert upstream.schemas == {"https://opentelemetry.io/schemas/1.41.1"}


@pytest.mark.prove
def test_a_job_on_smollm2_is_one_trace_from_its_producer_to_the_chat_span_behind_a_real_collector() -> None:
    cache = Settings.load().cache_dir
    if not (cache / "models" / "smollm2-135m").exists():
        pytest.skip("SmolLM2 is not pulled; `mtplx pull smollm2-135m` gets it")
    with Collector() as upstream, rotel(upstream.url) as url, service("--otlp-endpoint", url) as broker:
        worker = Program(
            "worker", "--run-dir", str(broker.run), "--cache-dir", str(cache), "--model", "smollm2-135m"
        )
        broker.programs.append(worker)
        with Client(broker.front) as client:
            asked = [{"role": "user", "content": "Why is the sky blue?"}]
            stream = client.submit(messages=asked, max_tokens=8, headers=HEADERS)
            result = stream.result(timeout=LOAD_S)
        stop(broker.broker)
        upstream.wait_for(3)
        spans = upstream.of(stream.id)
        assert {one.trace for one in spans.values()} == {TRACE}
        assert spans["process"].parent == PARENT
        chat = spans["chat"].attributes
        assert chat["gen_ai.usage.output_tokens"] == result.usage["completion_tokens"] == 8
        assert chat["gen_ai.usage.input_tokens"] == result.usage["prompt_tokens"]
        assert chat["mtplx.seed"] == str(result.seed)
        assert json.loads(chat["mtplx.speculation.widths"])
        assert spans["chat"].events[0] == "mtplx.first_token"
        assert b"sky" not in upstream.raw


def test_metrics_arrive_at_the_collector_with_the_spans() -> None:
    with Collector() as collector, service("--otlp-endpoint", collector.url) as broker:
        broker.worker()
        producer = broker.producer()
        for _ in range(3):
            producer.last_word(producer.submit(script={"tokens": 2}))
        stop(broker.broker)
        (point,) = collector.metrics["gen_ai.server.request.duration"].histogram.data_points
        assert point.count == 3
        assert {
            "messaging.process.duration",
            "mtplx.queue.depth",
            "mtplx.spans.lost",
            "mtplx.request.width",
        } <= set(collector.metrics)


def test_the_standard_variables_are_followed() -> None:
    with Collector() as collector:
        variables = {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{collector.url}/v1/traces",
            "OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=blue",
            "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
            "OTEL_SERVICE_NAME": "kitchen",
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
            "OTEL_BSP_SCHEDULE_DELAY": "50",
        }
        with service(env=environment(**variables)) as broker:
            broker.worker()
            producer = broker.producer()
            job = producer.submit(script={"tokens": 1})
            producer.last_word(job)
            # Sent after 50 ms, and not at the exit alone.
            assert len(collector.wait_for(3)) == 3
            stop(broker.broker)
        assert collector.resource["service.name"] == "kitchen"
        assert collector.resource["deployment.environment.name"] == "test"
        assert {one["x-tenant"] for one in collector.headers} == {"blue"}
        assert {one["Content-Encoding"] for one in collector.headers} == {"gzip"}
        # Only the traces were asked for.
        assert collector.metrics == {}


@pytest.mark.parametrize("variables", [{"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_SAMPLER": "always_off"}])
def test_spans_that_are_switched_off_are_not_sent_and_the_jobs_run(variables: dict[str, str]) -> None:
    with Collector() as collector:
        with service("--otlp-endpoint", collector.url, env=environment(**variables)) as broker:
            broker.worker()
            producer = broker.producer()
            assert producer.last_word(producer.submit(script={"tokens": 1})).outcome == "stop"
            assert "trace_errors" not in producer.health()["counters"]
            stop(broker.broker)
        assert collector.spans == []


@pytest.mark.parametrize(
    ("name", "text"), [("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "-1"), ("OTEL_SPAN_EVENT_COUNT_LIMIT", "many")]
)
def test_a_variable_that_the_sdk_refuses_is_a_wrong_setting(tmp_path: Path, name: str, text: str) -> None:
    broker = Program("broker", "--run-dir", str(tmp_path / "r"), "--trace-file", str(tmp_path / "s"),
                     env=environment(**{name: text}))  # fmt: skip
    try:
        assert broker.ended() == 2
        assert name in broker.said()
    finally:
        broker.close()


def test_the_collectors_configuration_uses_known_components_each_defined_and_in_a_pipeline() -> None:
    """No otelcol can be run here; `otelcol-contrib validate` is for whoever has one."""
    given = yaml.safe_load((ROOT / "deploy" / "otel-collector.yaml").read_text())
    assert set(given) == {*KNOWN, "service"}
    pipelines = given["service"]["pipelines"]
    assert set(pipelines) == {"traces", "metrics"}
    for kind, known in KNOWN.items():
        defined = set(given[kind])
        assert {name.split("/")[0] for name in defined} <= known
        assert {name for one in pipelines.values() for name in one[kind]} == defined, kind
    for one in pipelines.values():
        assert (one["processors"][0], one["processors"][-1]) == ("memory_limiter", "batch")
    places = [one["endpoint"] for one in given["receivers"]["otlp"]["protocols"].values()]
    assert sorted(places) == ["127.0.0.1:4317", "127.0.0.1:4318"]


def test_the_picture_of_a_span_file_has_a_bar_for_each_span(tmp_path: Path) -> None:
    trace_file, svg = tmp_path / "spans.jsonl", tmp_path / "trace.svg"
    with service("--trace-file", str(trace_file)) as broker:
        broker.worker()
        producer = broker.producer()
        for _ in range(2):
            producer.last_word(producer.submit(script={"tokens": 2}))
        stop(broker.broker)
    script = [sys.executable, ROOT / "docs" / "make_trace.py", trace_file, svg]
    subprocess.run(script, env=environment(), check=True)
    for drawn, roots in ((svg, read_spans(trace_file).roots), (ROOT / "docs" / "trace.svg", None)):
        bars = ET.fromstring(drawn.read_text()).findall(".//{http://www.w3.org/2000/svg}rect[@rx]")
        assert len(bars) == (9 if roots is None else sum(1 + len(root.children) for root in roots))
