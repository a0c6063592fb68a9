"""All jobs the broker knows: open ones, and ended ones kept for readers that come back."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Final

from broker import words
from broker.admission import Gate
from broker.outbox import Outboxes
from broker.record import Now, Reading, Record
from mtplx import messages as m
from mtplx.job import Job, ModelLimits
from mtplx.settings import Settings
from mtplx.wire import unpack_body

# Ended records kept at most, besides the limits on bytes and seconds.
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
        self._kept: OrderedDict[bytes, Record] = OrderedDict()
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
        self.gate.end(record, now, words.outcome(last_word), words.end_attributes(record, last_word))
        record.body = b""
        record.headers = None
        self._kept[record.id] = record
        self._kept_bytes += record.kept_bytes
        self.outboxes.mark(record)
        self.trim()

    def read_from(self, record: Record, reading: Reading) -> None:
        """Move the stream of *record* to another reader, or to another place in it."""
        self.outboxes.detach(record)
        record.reading = reading
        self.outboxes.attach(record)

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

    def finished(self) -> Iterable[Record]:
        """Ended records, the newest first."""
        return reversed(self._kept.values())

    def acknowledge(self, job_id: bytes) -> None:
        """Drop an ended record that was read to its end."""
        record = self._kept.get(job_id)
        if record is not None and not record.unread:
            self.forget(job_id)

    def forget(self, job_id: bytes) -> None:
        """Drop an ended record; open and unknown ones stay as they are."""
        record = self._kept.pop(job_id, None)
        if record is not None:
            self.outboxes.detach(record)
            del self.records[job_id]
            self._kept_bytes -= record.kept_bytes

    def expire(self, now: Now) -> None:
        """Drop ended records whose time is up."""
        while self._kept:
            oldest = next(iter(self._kept.values()))
            assert oldest.ended is not None
            if now.mono - oldest.ended.mono <= self.settings.retain_s:
                return
            self.forget(oldest.id)

    def trim(self) -> None:
        """Drop the oldest ended records while there are too many, except those that are still being read."""
        count, size = len(self._kept) - MAX_KEPT, self._kept_bytes - self.settings.retain_bytes
        dropped = []
        for record in self._kept.values():
            if count <= 0 and size <= 0:
                break
            if not record.unread:
                dropped.append(record.id)
                count, size = count - 1, size - record.kept_bytes
        for job_id in dropped:
            self.forget(job_id)

    def check(self) -> None:
        """Prove the books."""
        self.gate.check()
        open_ids = set(self.gate.line) | ({self.gate.slot.id} if self.gate.slot else set())
        assert set(self.records) == open_ids | set(self._kept)
        assert self._kept_bytes == sum(record.kept_bytes for record in self._kept.values())
        for route, client in self.outboxes.clients.items():
            assert client.queue or client.jobs
            assert all(record.reading.route == route for record in client.jobs.values())
