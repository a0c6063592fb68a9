"""What libzmq must not do to our processes, whatever becomes of a peer."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import zmq
from whole.harness import ROOT, environment, service

from broker.endpoints import FRONT_RECEIVE_MESSAGES, router
from mtplx import Client
from mtplx.link import Link
from mtplx.session import Session
from mtplx.sockets import worker_dealer

# A producer sends more than the broker reads and is gone; libzmq's timers ring before the rest is read.
BEHIND = """
import sys, time
import zmq
from broker.endpoints import FRONT_RECEIVE_MESSAGES, router
broker, producer = zmq.Context(), zmq.Context()
front = router(broker, FRONT_RECEIVE_MESSAGES)
front.bind(sys.argv[1])
dealer = producer.socket(zmq.DEALER)
dealer.connect(sys.argv[1])
full = 0
while full < 50:
    try:
        dealer.send_multipart([b"MTX", bytes(20)], zmq.NOBLOCK)
    except zmq.Again:
        full += 1
        time.sleep(0.01)
dealer.close(linger=0)
producer.term()
time.sleep(2.5)
while front.poll(200):
    front.recv_multipart()
front.close()
broker.term()
"""


@pytest.fixture
def sockets() -> Iterator[list[zmq.Socket]]:
    """One of each kind: the broker's, the worker's, the clients'."""
    with zmq.Context() as context:
        link = Link(Session("tcp://127.0.0.1:9"))
        made = [router(context, FRONT_RECEIVE_MESSAGES), worker_dealer(context, "tcp://127.0.0.1:9")]
        try:
            yield [*made, link._socket]
        finally:
            link.close(goodbye=False)
            for one in made:
                one.close(linger=0)


def test_no_socket_of_ours_has_the_heartbeats_of_libzmq(sockets: list[zmq.Socket]) -> None:
    """With them libzmq 4.3.5 aborts: `!_io_error` where a peer is gone, `_input_stopped` where one reads slowly."""
    assert [one.heartbeat_ivl for one in sockets] == [0, 0, 0]


def test_no_socket_of_ours_holds_up_the_exit_for_what_nobody_reads(sockets: list[zmq.Socket]) -> None:
    """libzmq's own default is to wait for ever."""
    assert all(0 <= one.linger <= 500 for one in sockets), [one.linger for one in sockets]


@pytest.mark.prove
def test_a_peer_that_leaves_much_unread_behind_does_not_end_the_process(endpoint: str) -> None:
    command = [sys.executable, "-c", BEHIND, endpoint]
    done = subprocess.run(
        command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.prove
def test_a_client_that_pauses_in_the_middle_of_a_long_answer_reads_it_to_its_end() -> None:
    """More chunks than its socket holds come meanwhile, for longer than heartbeats would have waited."""
    script = json.dumps({"tokens": 6000, "token_s": 0.002})
    with service() as broker:
        broker.worker()
        with Client(broker.front) as client:
            stream = client.submit("go", max_tokens=10_000, metadata={"script": script})
            text = next(stream).text
            time.sleep(20)
            text += "".join(piece.text for piece in stream)
            assert text == "".join(f"{token} " for token in range(6000))
            assert stream.result().finish_reason == "stop"
