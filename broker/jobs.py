"""All jobs the broker knows: open ones, and ended ones kept for readers that come back."""

from __future__ import annotations

from collections import Counter, OrderedDict
from heapq import nlargest
from itertools import chain
from typing import Final

from broker import words
from broker.admission import Gate
from broker.moves import Phase
from broker.outbox import Outboxes
from broker.record import Now, Reading, Record
from mtplx import messages as m
from mtplx.job import Job, ModelLimits
from mtplx.settings import Settings
from mtplx.wire import unpack_body

# Ended and read records kept at most, besides the limits on bytes and seconds.
MAX_KEPT: Final = 10_000


class Jobs:
    """The records, their readers' outboxes, and the gate that accounts for them."""

    def __init__(self, settings: Settings, *, keep_moments: bool) -> None:
        self.settings = settings
        self.gate = Gate(settings.queue_jobs, settings.queue_bytes, keep_moments=keep_moments)
        self.outboxes = Outboxes()
        self.counters: Counter[str] = Counter()
        self.records: dict[bytes, Record] = {}
        # Clients that let too many replies pile up, for the machine to treat as gone.
        self.flooders: dict[bytes, None] = {}
        # Ended records, each in one of the two, in the order in which they came there.
        self._unread: OrderedDict[bytes, Record] = OrderedDict()
        self._kept: OrderedDict[bytes, Record] = OrderedDict()
        self._unread_bytes = 0
        self._kept_bytes = 0

    def parse(self, body: bytes, limits: ModelLimits | None) -> Job:
        """The job in *body*, checked against *limits* where a worker has told them.

        Raises:
            WireError: E_BAD_JOB or E_PROTOCOL, naming the field.
        """
        job = Job.parse(unpack_body(body, self.settings.max_job_bytes))
        if limits is not None:
            job.check(limits)
        return job

    def admit(self, record: Record, job: Job) -> None:
        """Take *record* into the line."""
        self.records[record.id] = record
        self.gate.admit(record, job)

    def end(self, record: Record, last_word: m.Done | m.Error, now: Now) -> None:
        """Give *record* its one last word and free its place."""
        record.last_word = last_word
        self.gate.end(record, now, words.outcome(last_word), words.end_attributes(record, last_word, now))
        record.body = b""
        record.headers = None
        self.outboxes.mark(record)
        self._file(record, now)
        self.trim(now)

    def read_from(self, record: Record, reading: Reading, now: Now) -> None:
        """Move the stream of *record* to another reader, or to another place in it."""
        self.outboxes.detach(record)
        record.reading = reading
        self.outboxes.attach(record)
        if record.phase is Phase.ENDED:
            self._file(record, now)

    def tell(self, route: bytes, message: m.Message) -> None:
        """Say *message* to the client at *route*."""
        if not self.outboxes.tell(route, message):
            self.flooders[route] = None

    def tell_reader(self, record: Record, message: m.Message) -> None:
        """Say *message* to whoever reads *record*."""
        if record.reading.route is not None:
            self.tell(record.reading.route, message)

    def position(self, record: Record) -> int:
        """Jobs before *record*, the running one included; 0 where it does not wait."""
        return next((place for place, waiting in self.gate.positions() if waiting is record), 0)

    def finished(self, limit: int) -> list[Record]:
        """The *limit* last ended records, the newest first."""
        return nlargest(limit, chain(self._unread.values(), self._kept.values()), key=_end_order)

    def sent(self, route: bytes, now: Now) -> None:
        """The message on offer to *route* has left."""
        record = self.outboxes.sent(route)
        if record is not None:
            self._file(record, now)

    def left(self, record: Record, now: Now) -> None:
        """The reader of an ended *record* is gone."""
        self._file(record, now)

    def acknowledge(self, job_id: bytes) -> None:
        """Drop an ended record that was read to its end."""
        if job_id in self._kept:
            self._forget(self._kept[job_id])

    def expire(self, now: Now) -> None:
        """Drop ended records that were read, or left by their reader, `retain_s` ago; unread ones stay."""
        while self._kept:
            oldest = next(iter(self._kept.values()))
            if now.mono - oldest.filed <= self.settings.retain_s:
                return
            self._forget(oldest)

    def trim(self, now: Now) -> None:
        """Drop the oldest ended records while there are too many.

        Those still being read are bounded apart from the others, and only by bytes; the reader of one that
        goes hears why. Nobody counts as slow within the first beat.
        """
        most = self.settings.retain_bytes
        while self._kept and (len(self._kept) > MAX_KEPT or self._kept_bytes > most):
            self._forget(next(iter(self._kept.values())))
        while self._unread and self._unread_bytes > most:
            oldest = next(iter(self._unread.values()))
            if now.mono - oldest.filed < self.settings.beat_s:
                return
            self._give_up_on_reader(oldest)

    def _give_up_on_reader(self, record: Record) -> None:
        route = record.reading.route
        assert route is not None
        self.counters["slow_readers"] += 1
        self._forget(record)
        self.tell(route, words.slow_reader(record, self.settings.retain_bytes))

    def _file(self, record: Record, now: Now) -> None:
        """Put an ended *record* with those that are being read, or with those kept for whoever comes back."""
        self._unfile(record)
        record.filed = now.mono
        if record.unread:
            self._unread[record.id] = record
            self._unread_bytes += record.kept_bytes
        else:
            self._kept[record.id] = record
            self._kept_bytes += record.kept_bytes

    def _unfile(self, record: Record) -> None:
        if self._unread.pop(record.id, None) is not None:
            self._unread_bytes -= record.kept_bytes
        if self._kept.pop(record.id, None) is not None:
            self._kept_bytes -= record.kept_bytes

    def _forget(self, record: Record) -> None:
        self._unfile(record)
        self.outboxes.detach(record)
        del self.records[record.id]

    def check(self) -> None:
        """Prove the books."""
        self.gate.check()
        open_ids = set(self.gate.line) | ({self.gate.slot.id} if self.gate.slot else set())
        assert set(self.records) == open_ids | set(self._kept) | set(self._unread)
        assert not set(self._kept) & set(self._unread)
        assert self._kept_bytes == sum(record.kept_bytes for record in self._kept.values())
        assert self._unread_bytes == sum(record.kept_bytes for record in self._unread.values())
        assert all(record.unread for record in self._unread.values())
        assert not any(record.unread for record in self._kept.values())
        for route, client in self.outboxes.clients.items():
            assert client.queue or client.jobs
            assert all(record.reading.route == route for record in client.jobs.values())


def _end_order(record: Record) -> tuple[float, int]:
    return (record.ended.mono if record.ended else 0.0, record.admit_seq)
