"""All jobs the broker knows: those that wait or run, those that ended, and how long these are kept."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from heapq import nlargest
from itertools import chain
from typing import Final

from broker import words
from broker.admission import Gate, Key
from broker.journal import Journal
from broker.moves import Phase
from broker.outbox import Outboxes
from broker.record import Answer, Now, Reading, Record
from mtplx import messages as m
from mtplx.errors import JournalError
from mtplx.job import Job, ModelLimits
from mtplx.settings import Settings
from mtplx.wire import unpack_body

# Ended and read records kept at most, besides the limits on bytes and seconds; buried ones apart.
MAX_KEPT: Final = 10_000
# Connections of one producer that may have died one after the other before what was said on them is read.
FORMER_READERS: Final = 8
# Answers of ended jobs in memory, beyond which the journal has to do.
MEMORY_BYTES: Final = 16 * 1024**2


class Jobs:
    """The records, their readers' outboxes, and the gate that accounts for them."""

    def __init__(self, settings: Settings, journal: Journal, *, keep_moments: bool) -> None:
        self.settings = settings
        self.journal = journal
        self.gate = Gate(settings.queue_jobs, settings.queue_bytes)
        self.gate.keep(moments=keep_moments, prompts=settings.trace_prompts)
        self.outboxes = Outboxes(journal)
        self.counters: Counter[str] = Counter()
        self.memory_bytes = MEMORY_BYTES
        # Of the next admission.
        self.next_seq = 0
        # Clients that let too many replies pile up, for the machine to treat as gone.
        self.flooders: dict[bytes, None] = {}
        self._records: dict[Key, Record] = {}
        # Ended records, each in one of the three, in the order in which they came there.
        self._unread: OrderedDict[Key, Record] = OrderedDict()
        self._kept: OrderedDict[Key, Record] = OrderedDict()
        self._buried: OrderedDict[Key, Record] = OrderedDict()
        self._bytes = {"unread": 0, "kept": 0, "buried": 0}
        # Ended records whose answers are in memory, the oldest first.
        self._in_memory: OrderedDict[Key, Record] = OrderedDict()
        self._in_memory_bytes = 0

    # --- looking

    def find(self, job_id: bytes, owner: str = "") -> Record | None:
        """The job that *owner* calls *job_id*."""
        return self._records.get((owner, job_id))

    def find_any(self, job_id: bytes) -> Record | None:
        """The job that anybody calls *job_id*; of several one that has not ended, the oldest first."""
        found = (record for record in self if record.id == job_id)
        return min(found, key=lambda record: (record.over, record.admit_seq), default=None)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records.values())

    def __len__(self) -> int:
        return len(self._records)

    def position(self, record: Record) -> int:
        """Jobs before *record*, the running one included; 0 where it does not wait."""
        return next((place for place, waiting in self.gate.positions() if waiting is record), 0)

    def finished(self, limit: int, state: str | None = None, owner: str | None = None) -> list[Record]:
        """The *limit* last ended records, of *state* and *owner* alone where given, the newest first."""
        ended = chain(self._unread.values(), self._kept.values(), self._buried.values())
        wanted = (one for one in ended if state in (None, one.phase) and owner in (None, one.owner))
        return nlargest(limit, wanted, key=_end_order)

    def parse(self, body: bytes, limits: ModelLimits | None) -> Job:
        """The job in *body*, checked against *limits* where a worker has told them.

        Raises:
            WireError: E_BAD_JOB or E_PROTOCOL, naming the field.
        """
        job = Job.parse(unpack_body(body, self.settings.max_job_bytes))
        if limits is not None:
            job.check(limits)
        return job

    # --- a job's life

    def admit(self, record: Record, job: Job) -> None:
        """Take *record*, which has the next number, into the line."""
        self.next_seq += 1
        self._records[record.key] = record
        self.gate.admit(record, job)
        self.journal.admitted(record)

    def restore(self, record: Record, now: Now) -> None:
        """Take *record* over from the journal."""
        self._records[record.key] = record
        if record.over:
            self._file(record, now)
        else:
            self.gate.returned_total += 1
            self.gate.wait_again(record, self._job_for_spans(record))

    def rescind(self, record: Record, refusal: m.Error, now: Now) -> None:
        """Take back an admission that nobody was told of: the producer hears *refusal* in its place."""
        self.journal.withdraw(record)
        self.gate.rescind(record, now)
        self.outboxes.rescind(record, refusal)
        if self._records.get(record.key) is record:
            self._drop(record)

    def requeue(self, record: Record, now: Now, outcome: str) -> None:
        """Put the running *record* back to the head of the line."""
        record.cancel_reason, record.handing_back = None, False
        self.gate.requeue(record, now, outcome)

    def bury(self, record: Record, why: str, now: Now) -> None:
        """End *record*, which had all the attempts there are, and keep it whole."""
        self.counters["jobs_buried"] += 1
        self.end(record, words.poison(record, why), now)

    def kick(self, record: Record) -> None:
        """Put a buried *record* at the end of the line, under a new number and with all its attempts.

        A person wants it run: its time limits count no more, and it ends whether its producer is there or not.

        Raises:
            JournalError: its answer cannot be read; nothing has changed.
        """
        if record.answer is not None and record.answer.spilled:
            record.answer = Answer.of(self.journal.pieces(record, 0, record.tokens))
        self._unfile(record)
        record.admit_seq = self.next_seq
        self.next_seq += 1
        record.attempts = record.barren = 0
        record.ttl_ns = record.deadline_ns = None
        record.finish = True
        record.last_word = record.ended = None
        # Whoever read it has heard its last word, and hears no other.
        self.outboxes.detach(record)
        record.reading = Reading(None, None)
        self.gate.kick(record, self._job_for_spans(record))
        self.journal.kicked(record)

    def _job_for_spans(self, record: Record) -> Job | None:
        return self.parse(record.body, None) if self.gate.keep_moments else None

    def end(self, record: Record, last_word: m.Done | m.Error, now: Now) -> None:
        """Give *record* its one last word and free its place."""
        record.last_word = last_word
        self.gate.end(record, now, words.outcome(last_word), words.end_attributes(record, last_word, now))
        self.journal.ended(record)
        if record.phase is not Phase.BURIED:
            record.body = b""
            record.headers = None
        self.outboxes.mark(record)
        self._file(record, now)
        self.trim(now)

    def read_from(self, record: Record, reading: Reading, now: Now) -> None:
        """Move the stream of *record* to another reader, or to another place in it."""
        former = record.reading
        reading.before = former.before
        if former.route not in (None, reading.route) and not former.last_word_sent:
            reading.before = (*former.before, replace(former, queued=False, before=()))[-FORMER_READERS:]
        self._read_by(record, reading, now)

    def hand_back(self, record: Record, now: Now) -> bool:
        """Its reader is gone: the one before it goes on where it was. False where there is none."""
        if not record.reading.before:
            return False
        *others, reading = record.reading.before
        reading.before = tuple(others)
        self._read_by(record, reading, now)
        return True

    def _read_by(self, record: Record, reading: Reading, now: Now) -> None:
        self.outboxes.detach(record)
        record.reading = reading
        self.outboxes.attach(record)
        if record.over:
            self._file(record, now)

    # --- talking

    def tell(self, route: bytes, message: m.Message, about: Record | None = None) -> None:
        """Say *message* to the client at *route*; *about*: as in `Outboxes.tell`."""
        if not self.outboxes.tell(route, message, about):
            self.flooders[route] = None

    def tell_reader(self, record: Record, message: m.Message) -> None:
        """Say *message* to whoever reads *record*, before its last word."""
        if record.reading.route is not None:
            self.tell(record.reading.route, message, record)

    def offer(self, route: bytes, now: Now) -> m.Message | None:
        """The next message for *route*. An answer that cannot be read from the journal ends with E_JOURNAL."""
        while True:
            try:
                return self.outboxes.offer(route)
            except JournalError as error:
                record = self.outboxes.head(route)
                self.counters["journal_errors"] += 1
                self.outboxes.detach(record)
                self._file(record, now)
                self.tell(route, words.not_readable(record, str(error)))

    def sent(self, route: bytes, now: Now) -> None:
        """The message on offer to *route* has left."""
        record = self.outboxes.sent(route)
        if record is not None and record.over:
            self._file(record, now)

    # --- how long ended jobs are kept

    def left(self, record: Record, now: Now) -> None:
        """The reader of an ended *record* is gone."""
        self._file(record, now)

    def acknowledge(self, record: Record) -> None:
        """Drop an ended record that was read to its end; a buried one stays."""
        if record.key in self._kept:
            self.forget(record)

    def forget(self, record: Record) -> None:
        """Drop an ended *record*, here and in the journal."""
        self.journal.forgotten(record)
        self._drop(record)

    def expire(self, now: Now) -> None:
        """Drop ended records that were read, or left by their reader, `retain_s` ago; no unread or buried ones."""
        while self._kept:
            oldest = next(iter(self._kept.values()))
            if now.mono - oldest.filed <= self.settings.retain_s:
                return
            self.forget(oldest)

    def trim(self, now: Now) -> None:
        """Drop the oldest ended records while there are too many.

        Those still being read are bounded apart from the others, and only by bytes; the reader of one that
        goes hears why. Nobody counts as slow within the first beat.
        """
        most = self.settings.retain_bytes
        for name, ended in (("kept", self._kept), ("buried", self._buried)):
            while ended and (len(ended) > MAX_KEPT or self._bytes[name] > most):
                self.forget(next(iter(ended.values())))
        while self._unread and self._bytes["unread"] > most:
            oldest = next(iter(self._unread.values()))
            if now.mono - oldest.filed < self.settings.beat_s:
                return
            self._give_up_on_reader(oldest)

    def spill(self) -> None:
        """Leave the oldest answers of ended jobs to the journal while memory holds too many. All is committed."""
        if not self.journal.keeps:
            return
        while self._in_memory and self._in_memory_bytes > self.memory_bytes:
            self._spill(next(iter(self._in_memory.values())))

    def _spill(self, record: Record) -> None:
        self._out_of_memory(record)
        assert record.answer is not None
        record.answer.spill()
        record.last_word = words.without_text(record.last_word)

    def _give_up_on_reader(self, record: Record) -> None:
        route = record.reading.route
        assert route is not None
        self.counters["slow_readers"] += 1
        self.forget(record)
        self.tell(route, words.slow_reader(record, self.settings.retain_bytes))

    def _file(self, record: Record, now: Now) -> None:
        """Put an ended *record* with those that are being read, or with those kept for whoever comes back."""
        self._unfile(record)
        record.filed = now.mono
        name, ended = self._place(record)
        ended[record.key] = record
        self._bytes[name] += record.kept_bytes
        if record.answer is not None and not record.answer.spilled:
            self._in_memory[record.key] = record
            self._in_memory_bytes += record.answer.nbytes

    def _place(self, record: Record) -> tuple[str, OrderedDict[Key, Record]]:
        if record.unread:
            return "unread", self._unread
        return ("buried", self._buried) if record.phase is Phase.BURIED else ("kept", self._kept)

    def _unfile(self, record: Record) -> None:
        for name, ended in (("unread", self._unread), ("kept", self._kept), ("buried", self._buried)):
            if ended.pop(record.key, None) is not None:
                self._bytes[name] -= record.kept_bytes
        self._out_of_memory(record)

    def _out_of_memory(self, record: Record) -> None:
        if self._in_memory.pop(record.key, None) is not None and record.answer is not None:
            self._in_memory_bytes -= record.answer.nbytes

    def _drop(self, record: Record) -> None:
        self._unfile(record)
        self.outboxes.detach(record)
        del self._records[record.key]

    def check(self) -> None:
        """Prove the books."""
        self.gate.check()
        filed = {"unread": self._unread, "kept": self._kept, "buried": self._buried}
        open_keys = set(self.gate.line) | ({self.gate.slot.key} if self.gate.slot else set())
        assert set(self._records) == open_keys | set(self._kept) | set(self._unread) | set(self._buried)
        assert sum(map(len, filed.values())) + len(open_keys) == len(self._records)
        for name, ended in filed.items():
            assert self._bytes[name] == sum(record.kept_bytes for record in ended.values())
            assert all(record.over and record.unread is (name == "unread") for record in ended.values())
        assert all(record.phase is Phase.BURIED for record in self._buried.values())
        assert not any(record.phase is Phase.BURIED for record in self._kept.values())
        in_memory = {
            one.key: one.answer.nbytes for one in self if one.over and one.answer and not one.answer.spilled
        }
        assert set(self._in_memory) == set(in_memory)
        assert self._in_memory_bytes == sum(in_memory.values())
        for route, client in self.outboxes.clients.items():
            assert client.queue or client.jobs
            assert all(record.reading.route == route for record in client.jobs.values())


def _end_order(record: Record) -> tuple[float, int]:
    return (record.ended.mono if record.ended else 0.0, record.admit_seq)
