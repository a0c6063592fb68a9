"""One turn of the loop: what cannot be sent costs only its peer, and no reader holds up another."""

import pytest
from queueing.rig import BOOT_ID, WORKER, WORKER_ID, body, job_id, settings

from broker import loop as loops
from broker.back import Identity
from broker.loop import Loop, now
from broker.machine import Machine
from mtplx import messages as m

# No msgpack integer holds this.
TOO_LARGE = 2**64


class Sent(Loop):
    """A loop whose sockets are never bound; what it would send is kept."""

    def __init__(self, monkeypatch) -> None:
        given = settings()
        machine = Machine(given, Identity(BOOT_ID, "1", 1, now()), lambda: 1)
        super().__init__(given, machine, None)
        self.sent: list[tuple[bytes, bytes]] = []
        monkeypatch.setattr(self, "_try_send", self._keep)

    def _keep(self, _socket, frames) -> bool:
        self.sent.append((frames[0], frames[2]))
        return True

    @property
    def machine(self) -> Machine:
        return self._machine

    def turn(self) -> None:
        self._turn({})

    def kinds(self, route: bytes) -> list[int]:
        return [kind[0] for to, kind in self.sent if to == route]


@pytest.fixture
def loop(monkeypatch):
    made = Sent(monkeypatch)
    yield made
    made.close()


def ready(loop: Sent) -> None:
    loop.machine.back.on_message(WORKER, m.Ready(WORKER_ID, 9, "hyper", "h0", "tiny", 1000, 512, {}), now())


def test_an_answer_that_cannot_be_encoded_costs_its_reader_alone(loop):
    loop.machine.on_client(b"a", m.Submit(job_id(1), body()), now())
    loop.machine.jobs.tell(b"a", m.Pong(TOO_LARGE))
    loop.machine.jobs.tell(b"a", m.Pong(1))
    loop.machine.jobs.tell(b"b", m.Pong(2))
    loop.turn()
    assert loop.kinds(b"a") == [m.Admitted.KIND]
    assert loop.kinds(b"b") == [m.Pong.KIND]
    assert loop.machine.jobs.counters["internal_errors"] == 1
    assert loop.machine.jobs.find(job_id(1)).reading.route is None
    loop.turn()
    assert loop.machine.jobs.counters["internal_errors"] == 1


def test_a_message_to_the_worker_that_cannot_be_encoded_costs_the_worker_and_the_next_one_is_taken(loop):
    ready(loop)
    loop.machine.back.outgoing.append((WORKER, m.CancelRun(TOO_LARGE)))
    loop.turn()
    assert loop.machine.back.worker is None
    assert loop.machine.jobs.counters["internal_errors"] == 1
    ready(loop)
    loop.turn()
    assert loop.kinds(WORKER) == [m.Accepted.KIND] * 2


def test_a_turn_that_fails_is_counted_and_the_next_turn_goes_on(loop, monkeypatch):
    monkeypatch.setattr(loop.machine.jobs, "expire", _fail_once())
    loop.machine.jobs.tell(b"a", m.Pong(1))
    loop.turn()
    loop.turn()
    assert loop.machine.jobs.counters["internal_errors"] == 1
    assert loop.kinds(b"a") == [m.Pong.KIND]


def _fail_once():
    left = [ValueError("once")]

    def expire(_now):
        if left:
            raise left.pop()

    return expire


def test_a_loop_whose_every_turn_fails_ends_so_that_it_can_be_started_anew(loop, monkeypatch):
    def expire(_now):
        raise ValueError("always")

    monkeypatch.setattr(loop.machine.jobs, "expire", expire)
    for _ in range(loops.MAX_FAILED_TURNS - 1):
        loop.turn()
    with pytest.raises(ValueError, match="always"):
        loop.turn()


def test_a_fast_reader_with_much_to_read_waits_for_the_others_every_few_messages(loop):
    for number in range(1000):
        loop.machine.jobs.tell(b"fast", m.Pong(number))
    loop.machine.jobs.tell(b"other", m.Pong(1))
    loop.turn()
    assert len(loop.kinds(b"fast")) == loops.MAX_SENT_PER_TURN
    assert loop.kinds(b"other") == [m.Pong.KIND]
    assert loop._timeout_ms() == 0, "the rest goes on at once"
    while loop.machine.jobs.outboxes.pending:
        loop.turn()
    assert len(loop.kinds(b"fast")) == 1000


def test_a_turn_that_has_sent_for_long_goes_on_with_those_who_got_nothing(loop, monkeypatch):
    monkeypatch.setattr(loops, "SEND_FOR_S", 0.0)
    for route in (b"a", b"b", b"c"):
        for number in range(3):
            loop.machine.jobs.tell(route, m.Pong(number))
    for _ in range(9):
        loop.turn()
    assert [route for route, _ in loop.sent] == [b"a", b"b", b"c"] * 3
