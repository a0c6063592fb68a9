"""Keys at the door: who gets in by encrypted tcp, what the others are told, and what becomes of a revoked key."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from click.testing import CliRunner
from whole.harness import LIMIT_S, Producer, check_stream, service
from whole.keyed import Keyed, free_port, keyed, paths

from mtplx import BrokerUnreachableError, Client
from mtplx import messages as m
from mtplx.cli.main import main
from mtplx.cli.serve import Service
from mtplx.endpoints import dialled
from mtplx.keys import BROKER, make
from mtplx.settings import Settings

# The list is looked at every 0.4 s; the rest is for a busy machine.
WITHIN_S = 1.0


@pytest.fixture(scope="module")
def place() -> Iterator[Keyed]:
    with keyed() as found:
        found.key("gpu", "worker")
        found.key("watch")
        found.worker()
        watch = found.producer(found.key("first"))
        while watch.health()["worker"]["state"] != "ready":
            pass
        yield found


def counters(place: Keyed) -> dict[str, int]:
    with place.client("watch") as client:
        return dict(client.health()["counters"])


# --- who gets in


def test_an_allowed_key_runs_a_job_on_a_worker_with_a_key_of_its_own(place: Keyed) -> None:
    with place.client("watch") as client:
        assert client.run("Hi", max_tokens=5).text == "0 1 2 3 4 "


def test_a_client_without_encryption_is_told_that_the_broker_wants_it(place: Keyed) -> None:
    with pytest.raises(BrokerUnreachableError, match=r"wants CURVE.*--server-key.*--key"):
        Client(place.front, settings=Settings(), timeout=LIMIT_S)


def test_a_client_with_encryption_is_told_that_the_broker_has_none(place: Keyed) -> None:
    with service() as plain, zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        settings = place.settings("watch", front=f"tcp://127.0.0.1:{port}")
        with pytest.raises(BrokerUnreachableError, match=r"does not encrypt.*--curve"):
            Client(settings=settings, timeout=LIMIT_S)
        assert plain.broker.process.poll() is None


def test_a_wrong_server_key_is_named_as_the_cause(place: Keyed) -> None:
    wrong = place.key("elsewhere", None).public
    with pytest.raises(BrokerUnreachableError, match=r"Most likely --server-key") as caught:
        place.client("watch", timeout=1.5, server_key=wrong)
    assert wrong in str(caught.value)


def test_a_key_that_is_not_allowed_is_told_at_once_how_to_get_in(place: Keyed) -> None:
    stranger = place.key("stranger", None)
    refused, began = counters(place).get("keys_refused", 0), time.monotonic()
    with pytest.raises(BrokerUnreachableError, match=r"does not allow this key.*mtplx keys allow") as caught:
        place.client("stranger", timeout=LIMIT_S)
    assert time.monotonic() - began < LIMIT_S / 2
    assert stranger.public in str(caught.value)
    while counters(place).get("keys_refused", 0) <= refused:
        pass


def test_a_key_allowed_while_the_broker_runs_gets_in_at_once(place: Keyed) -> None:
    newcomer = place.key("newcomer", None)
    with pytest.raises(BrokerUnreachableError):
        place.client("newcomer")
    place.allow("newcomer", newcomer)
    place.client("newcomer").close()


def test_a_producers_key_opens_no_worker_endpoint_and_a_workers_key_no_producer_endpoint(place: Keyed) -> None:
    producer = place.dealer(place.key("other"), place.back)
    producer.say(m.Ready(b"w" * 16, os.getpid(), "hyper", "h0", "evil", 1000, 512, {}))
    assert producer.socket.poll(500) == 0
    producer.socket.close()
    with pytest.raises(BrokerUnreachableError, match="does not allow this key"):
        place.client("gpu")
    with place.client("watch") as client:
        assert client.health()["worker"]["model"] == "loop"


def test_worker_frames_on_the_producer_endpoint_are_refused_and_change_nothing(place: Keyed) -> None:
    with place.producer(place.key("pretender")) as pretender:
        ready = m.Ready(b"w" * 16, os.getpid(), "hyper", "h0", "evil", 1000, 512, {})
        for message in (ready, m.WorkerBye(b"w" * 16)):
            assert pretender.ask(message, m.Error).code == "E_UNKNOWN_KIND"
        health = pretender.health()
    assert (health["worker"]["model"], health["worker"]["state"]) == ("loop", "ready")


def test_a_routing_id_of_ones_own_is_refused_where_another_key_could_take_it_over(place: Keyed) -> None:
    with place.dealer(place.key("named"), ROUTING_ID=b"me") as named:
        named.say(m.Hello((1,), "test"))
        error = named.hear()
        assert isinstance(error, m.Error)
        assert (error.code, error.field) == ("E_PROTOCOL", "routing_id")


def test_raw_connections_that_never_speak_hold_nobody_up(place: Keyed) -> None:
    port = int(place.front.rpartition(":")[2])
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
    try:
        with place.client("watch") as client:
            assert client.run("Hi", max_tokens=2).text == "0 1 "
    finally:
        for one in idle:
            one.close()


# --- a revoked key


def slow(producer: Producer) -> bytes:
    """A job that runs for as long as the test does."""
    job = producer.submit(script={"token_s": 0.05})
    producer.expect(m.Chunk, job)
    return job


def test_a_revoked_key_is_out_within_a_second_and_its_job_counts_as_left() -> None:
    with keyed("--orphan-s", "0.3") as place:
        place.key("gpu", "worker")
        place.worker()
        lasting = place.producer(place.key("lasting"))
        pair = place.key("leaving")
        leaving = place.producer(pair)
        slow(leaving)
        monitor = leaving.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        place.revoke(pair)
        began = time.monotonic()
        assert monitor.poll(int(LIMIT_S * 1000))
        assert time.monotonic() - began < WITHIN_S
        leaving.drain()
        heard = len(leaving.log)
        # libzmq tries once more, and is refused for good.
        assert monitor.poll(int(LIMIT_S * 1000))
        health = lasting.health()
        while health["worker"]["state"] != "ready":
            health = lasting.health()
        assert health["counters"]["keys_revoked"] == 1
        assert health["counters"]["orphans_cancelled"] == 1
        leaving.drain()
        assert len(leaving.log) == heard
        leaving.socket.disable_monitor()
        monitor.close()
        job = lasting.submit(max_tokens=3)
        lasting.last_word(job)
        check_stream(lasting, job)


def test_a_waiting_job_of_a_revoked_key_counts_as_left_though_nothing_was_to_be_sent() -> None:
    with keyed("--orphan-s", "0.2", "--beat-s", "60", "--dead-s", "120") as place:
        watch = place.producer(place.key("watch"))
        pair = place.key("leaving")
        leaving = place.producer(pair)
        leaving.expect(m.Admitted, leaving.submit())
        place.revoke(pair)
        end = time.monotonic() + LIMIT_S
        while watch.health()["line"]["depth"]:
            assert time.monotonic() < end


def test_the_client_of_a_revoked_key_fails_at_once_and_names_the_cause() -> None:
    with keyed() as place:
        place.key("gpu", "worker")
        place.worker()
        pair = place.key("leaving")
        with place.client("leaving") as client:
            stream = client.submit("Hi", max_tokens=1000)
            next(stream)
            place.revoke(pair)
            began = time.monotonic()
            with pytest.raises(BrokerUnreachableError, match="does not allow this key, or no longer"):
                stream.result(LIMIT_S)
            assert time.monotonic() - began < 3 * WITHIN_S


def test_a_connection_that_says_its_first_word_after_its_key_was_revoked_is_not_heard() -> None:
    with keyed() as place:
        watch = place.producer(place.key("watch"))
        pair = place.key("late")
        late = place.dealer(pair)
        monitor = late.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        assert monitor.poll(int(LIMIT_S * 1000))
        monitor.recv_multipart()
        place.revoke(pair)
        time.sleep(WITHIN_S)
        late.say(m.Hello((1,), "test"))
        assert monitor.poll(int(LIMIT_S * 1000))
        assert watch.health()["counters"]["messages_unheard"] == 1
        assert late.socket.poll(200) == 0
        late.socket.disable_monitor()
        monitor.close()


def test_a_revoked_worker_ends_with_code_5_and_the_next_one_goes_on_with_its_job() -> None:
    with keyed() as place:
        pair = place.key("gpu", "worker")
        worker = place.worker()
        producer = place.producer(place.key("watch"))
        job = producer.submit(script={"token_s": 0.02}, max_tokens=100)
        producer.expect(m.Chunk, job)
        place.revoke(pair)
        assert worker.ended() == 5
        assert "does not allow this key" in worker.said()
        health = producer.health()
        assert (health["worker"]["state"], health["worker"]["last_loss"]) == ("absent", "revoked")
        place.key("gpu2", "worker")
        place.worker("gpu2")
        assert producer.last_word(job).outcome == "length"
        assert check_stream(producer, job).run["attempt"] == 2


@pytest.mark.parametrize("spoil", ["a line that is none", "open to others", "gone"])
def test_a_list_that_cannot_be_trusted_allows_nobody(spoil: str) -> None:
    with keyed() as place:
        place.producer(place.key("watch"))
        file = place.keys / "allowed"
        if spoil == "gone":
            file.unlink()
        elif spoil == "open to others":
            file.chmod(0o666)
        else:
            file.write_text(file.read_text() + "producer nobody\n")
        with pytest.raises(BrokerUnreachableError, match="does not allow this key"):
            place.client("watch")


# --- the broker's own machine


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has no 127.0.0.2 of itself")
def test_serve_and_the_commands_need_no_key_of_their_own_where_the_brokers_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """127.0.0.2 is not among the names of loopback, and so counts as another machine's."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("PYTHONPATH", paths())
    monkeypatch.setenv("MTPLX_CONFIG", os.devnull)
    front, back = (f"tcp://127.0.0.2:{free_port()}" for _ in range(2))
    settings = Settings(front=front, back=back, run_dir=tmp_path)
    make(tmp_path / "state" / "keys", BROKER)
    worker = (sys.executable, "-m", "whole.loop_worker")
    with Service(settings, say=lambda _: None, worker=worker) as running:
        assert running.turn_until(lambda: running.ready, 2 * LIMIT_S)
        with Client(settings=settings) as client:
            assert client.run("Hi", max_tokens=3).text == "0 1 2 "
        said = CliRunner().invoke(main, ["--front", front, "--run-dir", str(tmp_path), "jobs"])
        assert (said.exit_code, "ended" in said.output) == (0, True), said.output


@pytest.mark.parametrize(
    ("endpoint", "here"),
    [
        ("tcp://0.0.0.0:5", "tcp://127.0.0.1:5"),
        ("tcp://*:5", "tcp://127.0.0.1:5"),
        ("tcp://[::]:5", "tcp://[::1]:5"),
        ("tcp://gpu:5", "tcp://gpu:5"),
        ("ipc:///tmp/*", "ipc:///tmp/*"),
    ],
)
def test_an_endpoint_for_all_addresses_is_reached_on_loopback(endpoint: str, here: str) -> None:
    assert dialled(endpoint) == here


# --- the broker's own affairs


def test_a_broker_with_keys_drains_at_sigterm_with_connections_open() -> None:
    with keyed() as place:
        producer = place.producer(place.key("watch"))
        place.programs[0].send(signal.SIGTERM)
        began = time.monotonic()
        assert place.programs[0].ended() == 0, place.programs[0].said()
        assert time.monotonic() - began < 10
        producer.socket.close()


def test_a_brokers_key_replaced_while_it_runs_counts_from_the_next_start() -> None:
    with keyed() as place:
        place.key("watch")
        place.client("watch").close()
        for file in place.keys.glob(f"{BROKER}.*"):
            file.unlink()
        new = make(place.keys, BROKER).public
        time.sleep(WITHIN_S)
        place.client("watch").close()
        assert "stays in use until the next start" in place.programs[0].said()
        with pytest.raises(BrokerUnreachableError, match="Most likely --server-key"):
            place.client("watch", timeout=1.5, server_key=new)
        place.programs[0].send(signal.SIGTERM)
        assert place.programs[0].ended() == 0
        place.start()
        place.client("watch", server_key=new).close()
