"""Metrics made from the gate's moments, as Prometheus reads them, and where telemetry goes."""

import math

import pytest
from prometheus_client.parser import text_string_to_metric_families
from queueing.rig import WORKER, Rig, body, job_id, settings
from queueing.test_spans import FIGURES

from broker.admission import Moment
from broker.export import Complaint, Destinations
from broker.metrics import Metrics
from broker.telemetry import MAX_MOMENTS, SLICE, NoMetrics, Telemetry, open_telemetry
from mtplx import messages as m
from mtplx.testing import ManualClock

NOWHERE = Destinations.of(settings(), {})


class Counted(Rig):
    """A rig whose moments are counted."""

    def __init__(self, **given) -> None:
        super().__init__(keep_moments=True, **given)
        self.lost: dict[str, int] = {}
        self.metrics = Metrics(NOWHERE, version="1", depth=lambda: len(self.gate.line), lost=lambda: self.lost)

    def samples(self) -> dict[str, list[tuple[dict[str, str], float]]]:
        """What Prometheus would read, by the name of the sample."""
        self.metrics.record(self.gate.take_moments())
        text, kind = self.metrics.exposition()
        assert kind.startswith("text/plain; version=")
        found: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in text_string_to_metric_families(text.decode()):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
        return found


def value_of(samples, name, **labels) -> float:
    (found,) = [value for told, value in samples[name] if labels.items() <= told.items()]
    return found


def test_a_job_is_counted_with_its_duration_first_token_and_time_of_each_token():
    rig = Counted()
    rig.ready()
    rig.submit(1)
    rig.clock.advance(2.0)
    rig.chunk(1)
    rig.clock.advance(3.0)
    rig.chunk(2, 3, 4)
    rig.final()
    samples = rig.samples()
    assert value_of(samples, "gen_ai_server_request_duration_seconds_sum") == pytest.approx(5.0)
    assert value_of(samples, "gen_ai_server_time_to_first_token_seconds_sum") == pytest.approx(2.0)
    assert value_of(samples, "gen_ai_server_time_per_output_token_seconds_sum") == pytest.approx(1.0)
    assert value_of(samples, "gen_ai_server_time_to_first_token_seconds_bucket", le="1.0") == 0
    assert value_of(samples, "gen_ai_server_time_to_first_token_seconds_bucket", le="2.5") == 1
    assert value_of(samples, "messaging_process_duration_seconds_sum") == pytest.approx(5.0)
    ((labels, _),) = samples["gen_ai_server_request_duration_seconds_count"]
    assert labels == {
        "gen_ai_operation_name": "text_completion",
        "gen_ai_provider_name": "mlx",
        "gen_ai_request_model": "tiny",
        "gen_ai_response_model": "tiny",
    }


def test_forwards_are_counted_by_width_and_jobs_by_their_widest():
    rig = Counted()
    rig.ready()
    for number in (1, 2):
        rig.submit(number)
        rig.chunk(1)
        rig.final(speculation=FIGURES if number == 1 else {"widths": {"1": 3}})
    samples = rig.samples()
    assert value_of(samples, "mtplx_forwards_total", mtplx_width="1") == 8
    assert value_of(samples, "mtplx_forwards_total", mtplx_width="4") == 2
    assert value_of(samples, "mtplx_request_width_bucket", le="1.0") == 1
    assert value_of(samples, "mtplx_request_width_bucket", le="4.0") == 2


def test_a_job_that_fails_is_refused_or_never_runs_is_counted_as_what_it_was():
    rig = Counted(queue_jobs=1)
    rig.ready()
    rig.submit(1)
    rig.submit(2)
    rig.submit(3)
    rig.submit(4, job=body(prompt=""))
    samples = rig.samples()
    assert value_of(samples, "mtplx_queue_depth") == 1
    assert value_of(samples, "messaging_process_duration_seconds_count", error_type="E_QUEUE_FULL") == 2
    rig.say(b"a", m.Cancel(job_id(2)))
    for _ in range(2):
        rig.gone.add(WORKER)
        rig.back.beat()
        rig.turn()
        rig.gone.discard(WORKER)
        rig.ready()
    samples = rig.samples()
    assert value_of(samples, "mtplx_queue_depth") == 0
    assert value_of(samples, "gen_ai_server_request_duration_seconds_count", error_type="E_POISON") == 1
    assert "gen_ai_server_time_to_first_token_seconds_count" not in samples
    # The cancelled one never ran.
    assert sum(value for _, value in samples["gen_ai_server_request_duration_seconds_count"]) == 1
    assert sum(value for _, value in samples["messaging_process_duration_seconds_count"]) == 4


def test_lost_spans_are_told_by_reason():
    rig = Counted()
    rig.lost = {"spans_dropped": 3}
    samples = rig.samples()
    assert value_of(samples, "mtplx_spans_lost_total", mtplx_reason="no_room") == 3
    assert value_of(samples, "mtplx_spans_lost_total", mtplx_reason="not_exported") == 0


def test_without_the_extra_the_exposition_says_what_to_install():
    text, kind = NoMetrics().exposition()
    assert b"pip install 'mtplx-line[otlp]'" in text
    assert list(text_string_to_metric_families(text.decode())) == []
    assert kind.startswith("text/plain")


def test_nothing_asked_for_costs_nothing():
    rig = Rig()
    assert open_telemetry(settings(), rig.machine.identity, int, exposed=False) is None


class Parts:
    """Notes what it is given."""

    def __init__(self) -> None:
        self.got: list[Moment] = []

    def record(self, moments) -> None:
        self.got += moments

    def lost(self) -> dict[str, int]:
        return {"spans_dropped": len(self.got)} if self.got else {}

    def close(self) -> None:
        pass


def test_moments_wait_until_the_loop_is_idle_and_are_built_in_order_a_few_at_a_time():
    part = Parts()
    telemetry = Telemetry(part, None)
    moments = [Moment(str(number), ("", b""), number) for number in range(MAX_MOMENTS + 50)]
    assert telemetry.wake_s() == math.inf
    telemetry.take(moments[:10], idle=False)
    assert (part.got, telemetry.newly_lost()) == ([], {})
    assert 0 < telemetry.wake_s() < 0.01
    telemetry.take([], idle=True)
    assert part.got == moments[:SLICE]
    assert (telemetry.wake_s(), telemetry.newly_lost()) == (0.0, {"spans_dropped": SLICE})
    telemetry.take(moments[10:], idle=False)
    assert part.got == moments[:50]
    telemetry.close()
    assert part.got == moments
    assert telemetry.newly_lost() == {"spans_dropped": len(moments) - SLICE}


GENERAL, TRACES = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"


@pytest.mark.parametrize(
    ("given", "variables", "traces", "metrics"),
    [
        ("", {}, "", ""),
        ("http://a:1", {}, "http://a:1/v1/traces", "http://a:1/v1/metrics"),
        ("http://a:1/v1/traces", {}, "http://a:1/v1/traces", "http://a:1/v1/metrics"),
        ("http://b:1/", {GENERAL: "http://b:1/"}, "http://b:1/v1/traces", "http://b:1/v1/metrics"),
        ("", {TRACES: "http://c:1/mine"}, "http://c:1/mine", ""),
        ("http://b:1", {GENERAL: "http://b:1", TRACES: "http://c:1/x"}, "http://c:1/x", "http://b:1/v1/metrics"),
        ("http://a:1", {GENERAL: "http://b:1", TRACES: "http://c:1/x"}, "http://a:1/v1/traces", "http://a:1/v1/metrics"),
        ("http://a:1", {"OTEL_TRACES_EXPORTER": "none"}, "", "http://a:1/v1/metrics"),
        ("http://a:1", {"OTEL_METRICS_EXPORTER": "prometheus"}, "http://a:1/v1/traces", ""),
    ],
)  # fmt: skip
def test_where_telemetry_goes_is_what_flag_and_standard_variables_say(given, variables, traces, metrics):
    to = Destinations.of(settings(otlp_endpoint=given), variables)
    assert (to.traces, to.metrics, to.wrong) == (traces, metrics, ())


@pytest.mark.parametrize(
    ("name", "text", "field", "found"),
    [
        ("OTEL_BSP_MAX_QUEUE_SIZE", "64", "max_waiting", 64),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "9999999", "batch", 512),
        ("OTEL_BSP_SCHEDULE_DELAY", "250", "delay_ms", 250),
        ("OTEL_BSP_SCHEDULE_DELAY", "soon", "delay_ms", 5000),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "3", "timeout_s", 3.0),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "10000", "timeout_s", 10.0),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "never", "timeout_s", 1.0),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "nan", "timeout_s", 1.0),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "nonsense", "traces", ""),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://[::1", "traces", ""),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "traces", "http://a:1/v1/traces"),
        ("OTEL_TRACES_EXPORTER", "zipkin", "traces", ""),
    ],
)
def test_a_standard_variable_is_followed_or_the_log_says_why_not(name, text, field, found):
    given = "" if name == TRACES else "http://a:1"
    to = Destinations.of(settings(otlp_endpoint=given), {name: text})
    assert getattr(to, field) == found
    followed = text in ("64", "250", "3", "10000")
    assert [sentence for sentence in to.wrong if name in sentence] == list(to.wrong)
    assert bool(to.wrong) is not followed


def test_a_collector_that_is_away_is_said_once_a_minute_with_all_that_was_lost(caplog):
    clock = ManualClock(1000.0)
    complaint = Complaint("spans could not be exported", clock.monotonic)
    for _ in range(10):
        complaint.lost(5, "refused")
        clock.advance(10.0)
    said = [record.getMessage().split()[0] for record in caplog.records]
    assert said == ["5", "30"]
