"""Garbage never hurts: a job streams on while thousands of wounded frames arrive, and each gets its answer."""

import pytest
import zmq
from whole import fuzz
from whole.harness import service

from bench.report import Figure, write
from mtplx import messages as m
from mtplx import wire

MIB = 1024**2
# Answers to a running job are kept, about 300 bytes for each of its tokens.
BYTES_PER_TOKEN = 500
# What allocators keep back after bodies of megabytes.
SLACK = 8 * MIB


def held(report: fuzz.Report) -> None:
    """What every run must show."""
    tally = report.tally
    assert tally.unanswered == []
    assert tally.delimiter_answers == tally.with_delimiter
    counters = report.status["counters"]
    assert counters["bad_frames"] == tally.bad
    assert counters.get("foreign_frames", 0) == tally.foreign
    assert "internal_errors" not in counters
    assert "flooders_dropped" not in counters
    assert report.rss_after - report.rss_before < SLACK + BYTES_PER_TOKEN * report.stream_tokens


@pytest.fixture
def running():
    # A short line: wounded SUBMITs are often sound jobs, and must not count as growth.
    with service("--queue-jobs", "16") as running:
        running.worker("--tokens", "1")
        yield running


def test_a_stream_is_untouched_by_five_thousand_wounded_frames(running):
    report = fuzz.attack(running, count=5_000, seed=20_240_229, warm_up=1_000)
    held(report)
    assert report.tally.bad > 3_000
    assert report.stream_tokens > 50


def test_a_frame_above_the_transports_limit_ends_only_its_own_connection(running):
    with running.producer() as bad, running.producer() as good:
        assert bad.ask(m.Ping(1), m.Pong).n == 1
        bad.socket.send_multipart([*wire.encode(m.Bye())[:2], bytes(wire.MAX_FRAME_BYTES + 1)])
        assert good.ask(m.Ping(2), m.Pong).n == 2
        # libzmq connects anew by itself, as a stranger.
        assert bad.ask(m.Ping(3), m.Pong).n == 3


def test_a_req_socket_is_told_to_be_a_dealer(running):
    with running.context.socket(zmq.REQ) as socket:
        socket.linger = 0
        socket.connect(running.front)
        socket.send_multipart(wire.encode(m.Ping(1)))
        assert socket.poll(20_000)
        answer = wire.decode(socket.recv_multipart(), m.TO_CLIENT)
    assert (answer.code, answer.field) == ("E_PROTOCOL", "frames")
    assert "DEALER" in answer.message


@pytest.mark.prove
def test_a_stream_is_untouched_by_a_hundred_thousand_wounded_frames(running):
    report = fuzz.attack(running, count=100_000, seed=20_240_301, warm_up=10_000)
    held(report)
    growth = (report.rss_after - report.rss_before) / MIB
    figures = [
        Figure("wounded messages sent", report.tally.sent, "messages", 100_000, "higher"),
        Figure("decodable bad messages", report.tally.bad, "messages", None, "higher"),
        Figure("decodable bad messages without an answer", len(report.tally.unanswered), "messages", 0, "lower"),
        Figure("tokens streamed meanwhile, gap-free", report.stream_tokens, "tokens", None, "higher"),
        Figure("growth of the broker's memory", round(growth, 2), "MiB", 8, "lower"),
        Figure("rate", round(report.tally.sent / report.seconds), "messages/s", None, "higher"),
    ]
    write("fuzz", figures, "python -m pytest -m prove tests/whole/test_fuzz_frames.py")
