"""One conversation with a broker, without sockets, threads or clocks; shared by both clients.

A `Session` turns bytes into changes of its streams and says, in `outbox`, what to send next. The
clients move bytes and wait; nothing else.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from mtplx import wire
from mtplx.errors import BadJobError, BrokerUnreachableError, JobError, MtplxError, ProtocolError
from mtplx.job import Job
from mtplx.messages import (
    TO_CLIENT,
    VERSION,
    Admitted,
    Bye,
    Cancel,
    Chunk,
    Done,
    Draining,
    Error,
    GiveCredit,
    Hello,
    Message,
    Progress,
    Started,
    Status,
    StatusReply,
    Submit,
    Welcome,
)
from mtplx.stream import Piece, StreamState, SubmitOptions, error_of

# How many ended jobs are remembered, to count what comes after a last word.
REMEMBERED: Final = 256
# Silence of this many beats, and at least this many seconds, means that the broker is gone.
IDLE_BEATS: Final = 5
MIN_IDLE_S: Final = 10.0


@dataclass(slots=True)
class Ticket:
    """A question. Its answer is told by what it is about: one job, the list of jobs, or health."""

    question: Status
    about: str
    answer: dict[str, Any] | None = None
    error: MtplxError | None = None

    @property
    def settled(self) -> bool:
        """True once the answer or an error is there."""
        return self.answer is not None or self.error is not None


@dataclass(slots=True)
class Session:
    """One conversation with the broker at *endpoint*.

    outbox: messages to send, oldest first. failure: ends everything when set.
    late: messages about a job after its last word; 0 with a broker that keeps its promises.
    """

    endpoint: str
    client: str = ""
    outbox: deque[Message] = field(default_factory=deque)
    streams: dict[bytes, StreamState] = field(default_factory=dict)
    welcome: Welcome | None = None
    draining: bool = False
    restarted: bool = False
    failure: MtplxError | None = None
    late: int = 0
    heard: float = 0.0
    _tickets: deque[Ticket] = field(default_factory=deque)
    _ended: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def hello(self) -> None:
        """Open the conversation."""
        self.outbox.append(Hello(versions=(VERSION,), client=self.client))

    def reconnected(self) -> None:
        """The connection is a new one, which the broker cannot know: say again what is open."""
        self.outbox.clear()
        self.hello()
        self.outbox.extend(state.resume() for state in self.streams.values())
        self.outbox.extend(ticket.question for ticket in self._tickets)

    def submit(self, job: Job, options: SubmitOptions) -> StreamState:
        """Queue a checked job under a fresh random id.

        Raises:
            JobError: E_TOO_LARGE, with both sizes in `detail`.
        """
        body = wire.pack_body(job.to_map())
        limit = self.welcome.limits.get("max_job_bytes") if self.welcome else None
        if isinstance(limit, int) and len(body) > limit:
            raise JobError(
                f"The job has {len(body)} bytes; this broker takes {limit} (--max-job-bytes).",
                code="E_TOO_LARGE",
                field="body",
                detail={"bytes": len(body), "limit": limit},
            )
        message = Submit(
            id=secrets.token_bytes(16),
            job=body,
            credit=options.credit,
            deadline_ms=_ms("deadline_s", options.deadline_s),
            queue_ttl_ms=_ms("queue_ttl_s", options.queue_ttl_s),
            finish=options.finish,
            h=dict(options.headers) if options.headers else None,
        )
        state = self.streams[message.id] = StreamState(message)
        self.outbox.append(message)
        return state

    def cancel(self, job_id: bytes) -> None:
        """Queue the wish that a job ends."""
        self.outbox.append(Cancel(id=job_id))

    def read(self, state: StreamState) -> Piece:
        """The oldest unread piece of a stream; gives the broker credit where that is used."""
        piece, upto = state.read()
        if upto is not None:
            self.outbox.append(GiveCredit(id=state.id, upto_seq=upto))
        return piece

    def ask(self, job_id: bytes | None = None, *, jobs: bool = False) -> Ticket:
        """Queue a STATUS question."""
        ticket = Ticket(Status(id=job_id, jobs=jobs), job_id.hex() if job_id else "jobs" if jobs else "health")
        self._tickets.append(ticket)
        self.outbox.append(ticket.question)
        return ticket

    def give_up(self, state: StreamState, error: MtplxError) -> None:
        """End a stream from this side and let the broker know."""
        if state.ended:
            return
        state.fail(error)
        if state.submit in self.outbox:
            self.outbox.remove(state.submit)
        else:
            self.outbox.append(Cancel(id=state.id))
        self._forget(state)

    def bye(self) -> None:
        """Queue the farewell; jobs without `finish` end with it."""
        self.outbox.clear()
        self.outbox.append(Bye())

    def fail(self, error: MtplxError) -> None:
        """End the conversation, every stream and every question."""
        self.failure = error
        for state in list(self.streams.values()):
            state.fail(error)
            self._forget(state)
        while self._tickets:
            self._tickets.popleft().error = error

    def receive(self, frames: Sequence[bytes], now: float) -> None:
        """Take the frames of one message. Faults end the stream they are about, else the conversation."""
        self.heard = now
        try:
            message = wire.decode(frames, TO_CLIENT)
        except ProtocolError as error:
            self._undecodable(error)
            return
        match message:
            case Welcome():
                self._welcome(message)
            case StatusReply():
                self._answer(message.status)
            case Draining():
                self.draining = True
            case Error():
                self._error(message)
            case Admitted() | Started() | Chunk() | Done() | Progress():
                self._route(message.id, message)

    def idle_limit(self) -> float:
        """Seconds of silence with an open job after which the broker counts as gone."""
        beat_s = self.welcome.beat_ms / 1000 if self.welcome else 0.0
        return max(MIN_IDLE_S, IDLE_BEATS * beat_s)

    def _welcome(self, message: Welcome) -> None:
        if self.welcome is not None and self.welcome.boot_id != message.boot_id:
            self.restarted = True
        self.welcome = message

    def _route(self, job_id: bytes, message: Message) -> None:
        state = self.streams.get(job_id)
        if state is None:
            self._unrouted(job_id, message)
            return
        try:
            state.take(message)
        except ProtocolError as error:
            self.give_up(state, error)
        if state.ended:
            self._forget(state)

    def _unrouted(self, job_id: bytes, message: Message) -> None:
        if job_id not in self._ended or isinstance(message, Progress):
            return
        if isinstance(message, Admitted):
            # Given up while the SUBMIT was on its way.
            self.outbox.append(Cancel(id=job_id))
        else:
            self.late += 1

    def _error(self, message: Error) -> None:
        if self.restarted and message.code == "E_UNKNOWN_JOB":
            message = replace(
                message, message="The broker was started anew and does not know this job; submit it again."
            )
        if message.id is not None and message.id in self.streams:
            self._route(message.id, message)
        elif message.id is None:
            self.fail(error_of(message))
        else:
            ticket = self._take_ticket(message.id.hex())
            if ticket is not None:
                ticket.error = error_of(message)

    def _answer(self, status: dict[str, Any]) -> None:
        about = status.get("id") or ("jobs" if "jobs" in status else "health")
        # One that nobody asked for: CANCEL of another producer's job brings its state, too.
        ticket = self._take_ticket(str(about))
        if ticket is not None:
            ticket.answer = status

    def _take_ticket(self, about: str) -> Ticket | None:
        found = next((ticket for ticket in self._tickets if ticket.about == about), None)
        if found is not None:
            self._tickets.remove(found)
        return found

    def _undecodable(self, error: ProtocolError) -> None:
        state = self.streams.get(error.job_id or b"")
        if state is not None:
            self.give_up(state, error)
        elif error.code != "E_UNKNOWN_KIND" or self.welcome is None:
            # A kind this version does not know is a newer broker's business, once it is known to be one.
            self.fail(
                ProtocolError(
                    f"What answers at {self.endpoint} does not speak MTX/{VERSION} as agreed: {error}",
                    field=error.field or "",
                    code=error.code,
                    detail=error.detail,
                )
            )

    def _forget(self, state: StreamState) -> None:
        self.streams.pop(state.id, None)
        self._ended[state.id] = None
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)


@dataclass(slots=True)
class Patience:
    """How long a wait may take: *limit* seconds in all, *idle* seconds without a word of the broker.

    `missing` makes the error of a wait that took too long.
    """

    session: Session
    began: float
    limit: float | None
    idle: float | None
    missing: Callable[[], Exception]
    lost: Callable[[float], BrokerUnreachableError]

    def left(self, now: float) -> float | None:
        """Seconds the caller may go on waiting; None = for ever.

        Raises:
            Exception: of `missing` or `lost`, when the time is up.
        """
        ends = []
        if self.limit is not None:
            ends.append(self.began + self.limit - now)
            if ends[-1] <= 0:
                raise self.missing()
        if self.idle is not None:
            # Silence while nobody listened proves nothing: count from the start of this wait.
            ends.append(max(self.session.heard, self.began) + self.idle - now)
            if ends[-1] <= 0:
                raise self.lost(self.idle)
        return min(ends, default=None)


def _ms(name: str, seconds: float | None) -> int | None:
    if seconds is None:
        return None
    if not 0 < seconds < wire.MAX_UINT / 1000:
        raise BadJobError(f"{name} must be a number above 0, not {seconds!r}.", field=name)
    return max(1, round(seconds * 1000))
