"""What is still to be said to each producer, in order, however slowly it reads.

A client's queue holds messages and records. A record stands for "this job has something to deliver": it is
turned into one chunk of everything undelivered, or into the job's last word, at the moment it can be sent.
So a slow reader costs no more memory than the answer itself, and nothing is lost or repeated.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from broker import delivery
from broker.admission import Key
from broker.journal import Journal
from broker.record import Record
from mtplx.messages import Admitted, Chunk, Error, Message, Progress, Started, StatusReply

# A client that lets replies of this weight pile up floods without reading; its queue is dropped. A plain reply
# weighs 1, a few hundred bytes; a health report weighs REPORT_WEIGHT, and 1 more for each job it lists, or for so
# many bytes of a job that is shown whole.
MAX_REPLIES: Final = 20_000
REPORT_WEIGHT: Final = 20
BYTES_A_REPLY: Final = 1024
# A full pipe is tried again after RETRY_S, then ever later: each try packs up to MAX_CHUNK_TOKENS anew.
RETRY_S: Final = 0.01
MAX_RETRY_S: Final = 1.0


@dataclass(slots=True)
class Client:
    """One connection of a producer that has jobs or replies open."""

    route: bytes
    queue: deque[Message | Record] = field(default_factory=deque)
    jobs: dict[Key, Record] = field(default_factory=dict)
    weight: int = 0
    retry_at: float = 0.0
    retry_s: float = RETRY_S
    # Tokens delivered once the message on offer has been sent; None where it is no chunk.
    cursor: int | None = None


class Outboxes:
    """The queues of all clients. Holds no client that has nothing open."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.clients: dict[bytes, Client] = {}
        self.pending: dict[bytes, None] = {}

    def tell(self, route: bytes, message: Message, about: Record | None = None) -> bool:
        """Queue *message*; False where the client has let too many pile up and must be dropped.

        about: the record that the client reads, where it is to hear this before what it is still to get of that.
        """
        client = self._client(route)
        if client.weight >= MAX_REPLIES:
            return False
        if about is not None and about.reading.queued:
            client.queue.insert(client.queue.index(about), message)
        else:
            client.queue.append(message)
        client.weight += _weight(message)
        self.pending[route] = None
        return True

    def attach(self, record: Record) -> None:
        """Make `record.reading.route` the reader of *record*."""
        route = record.reading.route
        if route is not None:
            self._client(route).jobs[record.key] = record
            self.mark(record)

    def detach(self, record: Record) -> None:
        """Nobody reads *record* any more."""
        client = self.clients.get(record.reading.route or b"")
        record.reading.route = None
        record.reading.queued = False
        if client is not None:
            client.jobs.pop(record.key, None)
            if record in client.queue:
                client.queue.remove(record)
            self._forget_if_idle(client)

    def rescind(self, record: Record, refusal: Error) -> None:
        """Say *refusal* where ADMITTED of *record* was to be said, and nothing else of it."""
        for client in self.clients.values():
            kept: deque[Message | Record] = deque()
            # Another owner's job may have the same id.
            refused, ours = False, record.key in client.jobs
            for item in client.queue:
                if isinstance(item, Admitted) and item.admit_seq == record.admit_seq:
                    if not refused:
                        kept.append(refusal)
                    refused = True
                elif item is not record and not (
                    ours and isinstance(item, Started | Progress) and item.id == record.id
                ):
                    kept.append(item)
            client.queue = kept
            client.weight = sum(_weight(item) for item in kept if not isinstance(item, Record))

    def head(self, route: bytes) -> Record:
        """The job whose message `offer` failed to make."""
        head = self.clients[route].queue[0]
        assert isinstance(head, Record)
        return head

    def mark(self, record: Record) -> None:
        """Note that *record* may have something to deliver."""
        reading = record.reading
        if reading.route is None or reading.queued or reading.last_word_sent:
            return
        if record.answer is None and record.last_word is None:
            # A marker queued before there is anything to deliver would let a chunk overtake STARTED.
            return
        reading.queued = True
        self._client(reading.route).queue.append(record)
        self.pending[reading.route] = None

    def due(self, now: float) -> list[bytes]:
        """Clients that have something to be said and are not waiting for a retry."""
        return [route for route in self.pending if self.clients[route].retry_at <= now]

    def rotate(self, route: bytes) -> None:
        """Put *route* behind the others in `due`."""
        if route in self.pending:
            del self.pending[route]
            self.pending[route] = None

    def next_retry(self) -> float | None:
        """When the first of the blocked clients is due; 0 where one is due already."""
        return min((self.clients[route].retry_at for route in self.pending), default=None)

    def offer(self, route: bytes) -> Message | None:
        """The next message for *route*, not yet taken off its queue."""
        client = self.clients.get(route)
        while client is not None and client.queue:
            head = client.queue[0]
            if not isinstance(head, Record):
                client.cursor = None
                return head
            message = self._delivery(client, head)
            if message is not None:
                return message
            client.queue.popleft()
            head.reading.queued = False
        self.pending.pop(route, None)
        if client is not None:
            self._forget_if_idle(client)
        return None

    def sent(self, route: bytes) -> Record | None:
        """The message on offer has left; move on. Returns the record whose last word it was."""
        client = self.clients[route]
        head = client.queue[0]
        client.retry_at = 0.0
        client.retry_s = RETRY_S
        if not isinstance(head, Record):
            client.queue.popleft()
            client.weight -= _weight(head)
        elif client.cursor is not None:
            head.reading.tokens = client.cursor
            head.reading.next_seq += 1
        else:
            head.reading.last_word_sent = True
            client.jobs.pop(head.key, None)
            return head
        return None

    def blocked(self, route: bytes, now: float) -> None:
        """The client's pipe is full; offer again later."""
        client = self.clients[route]
        client.retry_at = now + client.retry_s
        client.retry_s = min(2 * client.retry_s, MAX_RETRY_S)

    def jobs_of(self, route: bytes) -> int:
        """Jobs that *route* reads and has not heard the last word of."""
        client = self.clients.get(route)
        return len(client.jobs) if client else 0

    def drop(self, route: bytes) -> list[Record]:
        """Forget the client; returns the records it was reading."""
        self.pending.pop(route, None)
        client = self.clients.pop(route, None)
        if client is None:
            return []
        for record in client.jobs.values():
            record.reading.route = None
            record.reading.queued = False
        return list(client.jobs.values())

    def _delivery(self, client: Client, record: Record) -> Message | None:
        """The next message about *record* to its reader. May raise JournalError."""
        reading = record.reading
        if reading.last_word_sent or (reading.tokens < record.tokens and reading.stalled()):
            return None
        chunk = delivery.next_chunk(record, self._journal)
        if chunk is not None:
            message, cursor = chunk
            client.cursor = cursor if isinstance(message, Chunk) else None
            return message
        if record.last_word is None:
            return None
        client.cursor = None
        return delivery.final_word(record, self._journal)

    def _client(self, route: bytes) -> Client:
        client = self.clients.get(route)
        if client is None:
            client = self.clients[route] = Client(route)
        return client

    def _forget_if_idle(self, client: Client) -> None:
        if not client.queue and not client.jobs:
            self.clients.pop(client.route, None)
            self.pending.pop(client.route, None)


def _weight(message: Message) -> int:
    if not isinstance(message, StatusReply):
        return 1
    status = message.status
    shown = len(status.get("text", "")) + (status["bytes"] if "job" in status else 0)
    return REPORT_WEIGHT + len(status.get("jobs", ())) + shown // BYTES_A_REPLY
