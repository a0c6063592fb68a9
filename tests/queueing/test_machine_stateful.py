"""Whatever producers, workers, readers and clocks do, in any order: the promises of the queue hold."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from queueing.model import CheckedRig, Fact, Token, View
from queueing.rig import BEATS, body, job_id

from broker.machine import MAX_NEXT_SEQ
from broker.moves import Phase
from mtplx import messages as m
from mtplx.errors import ProtocolError

PICK = st.integers(0, 1000)
CREDIT = st.sampled_from([None, None, 0, 1, 3])
LIMIT_MS = st.sampled_from([None, None, None, 500, 5_000, 10**15, 2**64 - 1])
EXTREME = st.sampled_from([0, 1, 2**53, 2**64 - 1])


class Queue(RuleBasedStateMachine):
    """The machine under everything that can happen to it."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = CheckedRig(
            queue_jobs=5,
            queue_bytes=4000,
            max_job_bytes=2000,
            orphan_s=6.0,
            dead_s=10.0,
            stall_s=20.0,
            retain_s=3e7,
        )
        self.routes = [b"p0", b"p1", b"p2"]
        self.names = 3
        self.workers = self.epoch = 0
        self.hung: set[bytes] = set()

    @initialize(retain_bytes=st.sampled_from([2_500, 10**8]), memory_bytes=st.sampled_from([0, 1000, 10**8]))
    def memory_is_small_or_large(self, retain_bytes, memory_bytes):
        self.rig.change(retain_bytes, memory_bytes)

    # --- producers

    def client(self, pick: int) -> bytes:
        return self.routes[pick % len(self.routes)]

    def any_job(self, pick: int) -> bytes | None:
        known = [job for job in self.rig.facts if self.rig.jobs.find(job) is not None]
        return known[-1 - pick % min(len(known), 8)] if known else None

    def tell(self, route: bytes, message: m.Message) -> None:
        self.rig.machine.on_client(route, message, self.rig.now())

    @rule(
        who=PICK,
        credit=CREDIT,
        deadline=LIMIT_MS,
        ttl=LIMIT_MS,
        finish=st.booleans(),
        size=st.sampled_from([1, 1, 1, 900, 1990, 3000]),
    )
    def submit(self, who, credit, deadline, ttl, finish, size):
        job, route = job_id(len(self.rig.facts)), self.client(who)
        content = body(prompt="x" * size)
        fact = self.rig.facts[job] = Fact(content)
        self.tell(route, m.Submit(job, content, credit, deadline, ttl, finish))
        record = self.rig.jobs.find(job)
        if record is not None:
            fact.admit_seq, fact.view = record.admit_seq, View(route)
        self.turn()

    @rule(who=PICK, bad=st.sampled_from([{"prompt": ""}, {"token_ids": [5, 4000]}, {"prompt": "x", "top_p": 7}]))
    def submit_badly(self, who, bad):
        job, route = job_id(len(self.rig.facts)), self.client(who)
        fact = self.rig.facts[job] = Fact(body(**bad))
        self.tell(route, m.Submit(job, fact.body))
        record = self.rig.jobs.find(job)
        if record is not None:
            assert self.rig.back.limits is None
            fact.admit_seq, fact.view = record.admit_seq, View(route)
        self.turn()

    @rule(who=PICK, which=PICK, credit=CREDIT, same=st.booleans())
    def submit_again(self, who, which, credit, same):
        job, route = self.any_job(which), self.client(who)
        if job is None:
            return
        fact = self.rig.facts[job]
        self.tell(route, m.Submit(job, fact.body if same else body(prompt="other"), credit))
        record = self.rig.jobs.find(job)
        if record is not None and same and fact.view.route != route:
            fact.read_by(View(route))
        self.turn()

    @rule(who=PICK, which=PICK)
    def cancel(self, who, which):
        job = self.any_job(which)
        if job is not None:
            self.tell(self.client(who), m.Cancel(job))
            self.turn()

    @rule(who=PICK, which=PICK, credit=CREDIT)
    def resume(self, who, which, credit):
        job, route = self.any_job(which), self.client(who)
        if job is None:
            return
        old = self.rig.facts[job].view
        if old.next_seq > MAX_NEXT_SEQ:
            # Refused, as below; only who began at the largest number can get there.
            return
        self.tell(route, m.Resume(job, old.next_seq, old.tokens, credit))
        self.rig.facts[job].read_by(View(route, old.next_seq, old.tokens))
        self.turn()

    @rule(who=PICK, which=PICK, next_seq=st.sampled_from([2**53 + 1, 2**64 - 1]), tokens=EXTREME)
    def resume_at_a_number_nobody_can_count_on(self, who, which, next_seq, tokens):
        job = self.any_job(which)
        if job is not None:
            self.tell(self.client(who), m.Resume(job, next_seq, tokens, credit=2**64 - 1))
            self.turn()

    @rule(who=PICK, which=PICK, start=st.sampled_from([2**53 - 1, 2**53]), credit=EXTREME)
    def resume_from_the_start_with_the_largest_numbers(self, who, which, start, credit):
        job, route = self.any_job(which), self.client(who)
        if job is not None:
            self.tell(route, m.Resume(job, start, 0, credit))
            self.rig.facts[job].read_by(View(route, start))
            self.turn()

    @rule(which=PICK, more=st.integers(0, 3))
    def give_credit(self, which, more):
        job = self.any_job(which)
        if job is not None and self.rig.facts[job].view.route in self.routes:
            view = self.rig.facts[job].view
            self.tell(view.route, m.GiveCredit(job, view.next_seq + more))
            self.turn()

    @rule(who=PICK, bad=st.booleans())
    def say_something_else(self, who, bad):
        if bad:
            fault = ProtocolError("Wrong.", field="n")
            fault.job_id = self.any_job(who)
            self.rig.machine.on_bad_frame(self.client(who), fault)
        else:
            self.tell(self.client(who), m.Status(jobs=True))
        self.turn()

    @rule(who=PICK, bye=st.booleans())
    def leave(self, who, bye):
        route = self.client(who)
        self.routes.remove(route)
        if bye:
            self.tell(route, m.Bye())
            for fact in self.rig.facts.values():
                if fact.view is not None and fact.view.route == route:
                    fact.view.lost = True
        self.rig.gone.add(route)
        self.routes.append(b"p%d" % self.names)
        self.names += 1
        self.turn()

    @rule(who=PICK, room=st.sampled_from([None, None, 0, 1, 2]))
    def read_slowly(self, who, room):
        route = self.client(who)
        self.rig.room.pop(route, None)
        if room is not None:
            self.rig.room[route] = room
        self.turn()

    # --- workers

    @rule(again=st.booleans(), repeat=st.booleans())
    def worker_comes(self, again, repeat=False):
        if not again or self.workers == 0:
            self.workers += 1
        if not repeat:
            self.epoch += 1
        ready = m.Ready(self.worker_id, 99, "hyper", "h0", "tiny", 1000, 512, {}, self.epoch)
        slot, live = self.rig.running, self.rig.back.worker
        self.rig.back.on_message(self.worker_route, ready, self.rig.now())
        if live is not None and (live.route, live.ready) == (self.worker_route, ready):
            assert (self.rig.back.worker, self.rig.running) == (live, slot), "a repeated READY cost something"
        self.turn()

    @property
    def worker_route(self) -> bytes:
        return b"w%d" % self.workers

    @property
    def worker_id(self) -> bytes:
        return b"%016d" % self.workers

    def draw(self, route: bytes, run: m.Run, count: int) -> None:
        fact = self.rig.facts[run.id]
        for _ in range(count):
            # A token a chunk, as workers report them: after a power loss a place between two is never missed.
            first, token = len(fact.ids), Token.at(run.id, len(fact.ids))
            if self.rig.holds(route, run):
                fact.ids.append(token.id)
            said = m.WorkerChunk(run.id, run.attempt, run.lease, first, 1, (token.id,), token.text)
            self.rig.back.on_message(route, said, self.rig.now())

    def end(self, route: bytes, run: m.Run, reason: str) -> None:
        said = m.Final(run.id, run.attempt, run.lease, reason, 3, 0, 16, 0.1, 0.1, "0" * 64, "serial_b1", True, {})
        self.rig.back.on_message(route, said, self.rig.now())

    def can_work(self) -> bool:
        return bool(self.rig.boot_runs) and self.rig.boot_runs[-1][0] not in self.hung

    def beat(self) -> None:
        if self.rig.back.worker is not None and self.rig.back.worker.route not in self.hung:
            self.rig.beat(worker_id=self.rig.back.worker.ready.worker_id)

    @precondition(can_work)
    @rule(count=st.integers(1, 3), turns=st.integers(1, 3))
    def worker_draws(self, count, turns):
        route, run = self.rig.boot_runs[-1]
        for _ in range(turns):
            self.draw(route, run, count)
            self.turn()

    @precondition(lambda self: self.rig.running and self.can_work())
    @rule(reason=st.sampled_from(["stop", "length", "cancelled"]))
    def worker_ends(self, reason):
        self.end(*self.rig.boot_runs[-1], reason)
        self.turn()

    @precondition(lambda self: self.rig.running and self.can_work())
    @rule(gap=st.booleans())
    def worker_fails(self, gap):
        route, run = self.rig.boot_runs[-1]
        if gap:
            first = len(self.rig.facts[run.id].ids) + 1
            said = m.WorkerChunk(run.id, run.attempt, run.lease, first, 1, (1,), "no")
        else:
            said = m.Fail(run.id, run.attempt, run.lease, "E_NUMERIC", "NaN")
        self.rig.back.on_message(route, said, self.rig.now())
        self.turn()

    @precondition(lambda self: len(self.rig.all_runs) > 1)
    @rule(which=PICK, final=st.booleans())
    def a_stale_worker_talks(self, which, final):
        route, run = self.rig.all_runs[which % (len(self.rig.all_runs) - 1)]
        if self.rig.holds(route, run):
            return
        if final:
            self.end(route, run, "stop")
        else:
            self.draw(route, run, 1)
        self.turn()

    @precondition(lambda self: self.rig.running)
    @rule(old_lease=st.booleans(), final=st.booleans())
    def an_impostor_talks_about_the_running_job(self, old_lease, final):
        route, run = self.rig.boot_runs[-1]
        if old_lease:
            run = replace(run, lease=run.lease - 1)
        else:
            route = b"w-other"
        if final:
            self.end(route, run, "stop")
        else:
            self.draw(route, run, 1)
        self.turn()

    @precondition(lambda self: self.rig.back.worker)
    @rule(dice=st.integers(0, 2))
    def worker_hangs(self, dice):
        if dice == 0:
            self.hung.add(self.rig.back.worker.route)

    @precondition(lambda self: self.rig.back.worker)
    @rule(bye=st.booleans())
    def worker_dies(self, bye):
        worker = self.rig.back.worker
        if bye:
            self.rig.back.on_message(BEATS, m.WorkerBye(worker.ready.worker_id), self.rig.now())
        else:
            self.rig.gone.add(worker.route)
            self.rig.back.beat()
        self.turn()

    # --- time

    @rule(seconds=st.sampled_from([0.05, 1.0, 3.0]), beats=st.booleans(), turns=st.integers(1, 5))
    def time_passes(self, seconds, beats, turns):
        for _ in range(turns):
            self.rig.clock.advance(seconds)
            if beats:
                self.beat()
            self.turn()

    @rule(seconds=st.sampled_from([30.0, 4000.0]))
    def the_loop_is_away(self, seconds):
        self.rig.clock.advance(seconds)
        self.turn()

    @rule(limit=st.sampled_from([0.0, 5.0]), dice=st.integers(0, 9))
    def drain(self, limit, dice):
        if dice == 0:
            self.rig.machine.drain(self.rig.now(), limit)
            self.turn()

    @rule(dice=st.integers(0, 3), power_loss=st.booleans(), away_s=st.sampled_from([0.0, 1.0, 8.0]))
    def the_broker_is_killed_and_started_again(self, dice, power_loss, away_s):
        if dice:
            return
        # Their connections are new ones, and whoever hears the old worker does not know it.
        self.routes = [b"p%d" % (self.names + place) for place in range(len(self.routes))]
        self.names += len(self.routes)
        self.workers += 1
        self.hung.clear()
        self.rig.clock.advance(away_s)
        self.rig.broker_dies(power_loss=power_loss)

    @rule(fails=st.booleans())
    def the_disk_fails_or_is_mended(self, fails):
        self.rig.journal.fails = fails

    @rule(which=PICK, delete=st.booleans())
    def kick_or_delete(self, which, delete):
        job = self.any_job(which)
        if job is None:
            return
        record = self.rig.jobs.find(job)
        kicked = record.phase is Phase.BURIED and not record.unread and not self.rig.machine.commits.error
        self.tell(b"ops", m.Delete(job) if delete else m.Kick(job))
        if kicked and not delete:
            fact = self.rig.facts[job]
            fact.last_word, fact.admit_seq = None, record.admit_seq
            fact.view = View(b"nobody")
        self.turn()

    # --- always

    def turn(self) -> None:
        self.rig.turn()
        self.rig.settle()

    @invariant()
    def the_line_is_bounded_and_in_order(self):
        line = list(self.rig.gate.line.values())
        # A job that comes back from a worker has its place, however many came meanwhile.
        assert len(line) <= 6
        assert self.rig.gate.line_bytes <= 4000 + 2000
        assert [one.admit_seq for one in line] == sorted(one.admit_seq for one in line)

    @invariant()
    def unread_answers_are_bounded(self):
        jobs = self.rig.jobs
        old = [one for one in jobs if one.unread and one.phase is Phase.ENDED]
        old = [one for one in old if self.rig.clock.seconds - one.filed > 2 * jobs.settings.beat_s]
        assert sum(one.kept_bytes for one in old) <= jobs.settings.retain_bytes

    @invariant()
    def no_client_is_remembered_that_has_nothing_open(self):
        for client in self.rig.jobs.outboxes.clients.values():
            assert client.queue or client.jobs

    def teardown(self):
        """Nothing waits for ever: once all read and a worker works, every admitted job ends and is told."""
        rig = self.rig
        rig.room.clear()
        rig.journal.fails = False
        if rig.machine.draining:
            self.routes = [b"p%d" % (self.names + place) for place in range(len(self.routes))]
            rig.broker_dies(power_loss=False)
            self.workers += 1
        for _ in range(400):
            if not (rig.gate.line or rig.running or rig.jobs.outboxes.clients):
                break
            for job, fact in rig.facts.items():
                if (
                    fact.view
                    and not fact.view.ended
                    and fact.view.route in self.routes
                    and rig.jobs.find(job) is not None
                ):
                    self.tell(fact.view.route, m.GiveCredit(job, 2**64 - 1))
            if rig.back.worker is None and not rig.machine.draining:
                self.worker_comes(again=False)
            if rig.running is not None and rig.back.worker is not None and self.can_work():
                self.end(*rig.boot_runs[-1], "cancelled" if rig.running.phase is Phase.CANCELLING else "stop")
            self.turn()
            # Only as far as the machine asks to be woken: a moment it forgot would stop everything here.
            rig.clock.advance(max(0.0, rig.machine.next_wake() - rig.clock.seconds))
            self.beat()
        assert set(rig.jobs.outboxes.clients) <= rig.gone
        assert not rig.gate.line
        assert rig.running is None
        for job, fact in rig.facts.items():
            if fact.admit_seq is not None:
                # An answer larger than all that is kept, and nobody there to read it, goes in the turn in which it ends.
                forgotten = rig.jobs.find(job) is None and fact.view.route in rig.gone
                assert fact.last_word is not None or forgotten, "an admitted job never ended"
                heard = fact.view.ended or fact.view.route in rig.gone
                assert heard or rig.machine.drained, "a reader never heard the last word"


QUICK = settings(
    max_examples=500,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def test_the_promises_of_the_queue_hold_whatever_happens():
    run_state_machine_as_test(Queue, settings=QUICK)


@pytest.mark.prove
def test_the_promises_of_the_queue_hold_whatever_happens_long_form():
    run_state_machine_as_test(
        Queue, settings=settings(QUICK, max_examples=5_000, stateful_step_count=100, derandomize=False)
    )
