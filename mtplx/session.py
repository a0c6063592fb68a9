"""One conversation with a broker, without sockets, threads or clocks; shared by both clients.

A `Session` turns bytes into changes of its streams and says, in `outbox`, what to send next. The
clients move bytes and wait; nothing else.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from mtplx import wire
from mtplx.errors import BadJobError, MtplxError, ProtocolError
from mtplx.job import Job
from mtplx.messages import (
    TO_CLIENT,
    VERSION,
    Admitted,
    Bye,
    Cancel,
    Chunk,
    Delete,
    Done,
    Error,
    GiveCredit,
    Hello,
    Kick,
    Message,
    Progress,
    Started,
    Status,
    StatusReply,
    Welcome,
)
from mtplx.request import SubmitOptions, submit_of
from mtplx.stream import FAULTS, Piece, StreamState, error_of

ID_BYTES: Final = 16
# How many ended jobs are remembered, to count what comes after a last word.
REMEMBERED: Final = 256
# Silence of this many beats, and at least this many seconds, on a connection means that the broker hangs.
IDLE_BEATS: Final = 5
MIN_IDLE_S: Final = 10.0
# Without a connection the broker may be starting anew, and goes on with the job when it is back.
RETURN_S: Final = 60.0


Question = Status | Kick | Delete


@dataclass(slots=True, eq=False)
class Ticket:
    """A question. Its answer is told by what it is about: one job, the list of jobs, or health.

    cancel: the wish that goes before the question, where it asks for a job's state after a cancel.
    """

    question: Question
    about: str
    cancel: Cancel | None = None
    answer: dict[str, Any] | None = None
    error: MtplxError | None = None

    @property
    def settled(self) -> bool:
        """True once the answer or an error is there."""
        return self.answer is not None or self.error is not None

    def result(self) -> dict[str, Any]:
        """The answer of a settled question, or its error raised."""
        if self.error is not None:
            raise self.error
        return self.answer or {}


@dataclass(slots=True)
class Session:
    """One conversation with the broker at *endpoint*.

    outbox: messages to send, oldest first. failure: ends everything when set.
    after_last_word: messages about a job after its last word; 0 with a broker that keeps its promises.
    stray_errors: errors about nothing that is open. up: whether there is a connection, as the link sees it.
    """

    endpoint: str
    client: str = ""
    outbox: deque[Message] = field(default_factory=deque)
    streams: dict[bytes, StreamState] = field(default_factory=dict)
    welcome: Welcome | None = None
    restarted: bool = False
    failure: MtplxError | None = None
    after_last_word: int = 0
    stray_errors: int = 0
    heard: float = 0.0
    up: bool = False
    # What waits for its first answer, oldest first: questions, and jobs not yet admitted. Keys are `id()`s.
    _open: dict[int, Ticket | StreamState] = field(default_factory=dict)
    # Answers that are still to come to questions nobody waits for any more, by what they are about.
    _unwanted: Counter[str] = field(default_factory=Counter)
    # Ended jobs; True for those given up from this side, which the broker may still run.
    _ended: OrderedDict[bytes, bool] = field(default_factory=OrderedDict)

    def hello(self) -> None:
        """Open the conversation."""
        self.outbox.append(Hello(versions=(VERSION,), client=self.client))

    def reconnected(self) -> None:
        """The connection is a new one, which the broker cannot know: say again what is open and what is wished."""
        wishes = [message for message in self.outbox if isinstance(message, Cancel)]
        wishes += [Cancel(id=state.id) for state in self.streams.values() if state.cancel_wanted]
        wishes += [Cancel(id=job_id) for job_id, given_up in self._ended.items() if given_up]
        wishes += [ticket.cancel for ticket in self._tickets() if ticket.cancel is not None]
        self.outbox.clear()
        self._unwanted.clear()
        self.hello()
        self.outbox.extend(state.resume() for state in self.streams.values())
        self.outbox.extend(dict.fromkeys(wishes))
        self.outbox.extend(ticket.question for ticket in self._tickets())

    def submit(self, job: Job, options: SubmitOptions) -> StreamState:
        """Queue a checked job under a fresh random id.

        Raises:
            JobError: E_TOO_LARGE, with both sizes in `detail`.
            BadJobError: the headers are too large.
        """
        limit = self.welcome.limits.get("max_job_bytes") if self.welcome else None
        message = submit_of(job, options, limit if isinstance(limit, int) else None)
        state = self.streams[message.id] = StreamState(message, job.metadata or None)
        self._open[id(state)] = state
        self.outbox.append(message)
        return state

    def cancel(self, state: StreamState) -> None:
        """Queue the wish that a job ends; it is said again on a new connection."""
        if not state.ended:
            state.cancel_wanted = True
            self.outbox.append(Cancel(id=state.id))

    def read(self, state: StreamState) -> Piece | None:
        """The oldest unread piece; gives the broker credit where that is used. None at the end of the job.

        Raises:
            MtplxError: there is no piece, and the job has failed.
        """
        if not state.pieces:
            if state.error is not None:
                raise state.error
            return None
        piece, upto = state.read()
        if upto is not None:
            self.outbox.append(GiveCredit(id=state.id, upto_seq=upto))
        return piece

    def ask(self, question: Question, *, cancel: bool = False) -> Ticket:
        """Queue a question, with *cancel* after the wish that its job ends; `drop` it in the end.

        Raises:
            BadJobError: the id in it is none.
        """
        job_id = question.id
        if job_id is not None and (type(job_id) is not bytes or len(job_id) != ID_BYTES):
            raise BadJobError(f"A job id has exactly {ID_BYTES} bytes, not {job_id!r:.64}.", field="job_id")
        jobs = isinstance(question, Status) and question.jobs
        ticket = Ticket(question, job_id.hex() if job_id else "jobs" if jobs else "health")
        if cancel and job_id is not None:
            ticket.cancel = Cancel(id=job_id)
            self.outbox.append(ticket.cancel)
            if job_id in self.streams:
                self.streams[job_id].cancel_wanted = True
        self._open[id(ticket)] = ticket
        self.outbox.append(ticket.question)
        return ticket

    def drop(self, ticket: Ticket) -> None:
        """Nobody waits for this answer any more."""
        if self._open.pop(id(ticket), None) is None:
            return
        if ticket.question in self.outbox:
            self.outbox.remove(ticket.question)
        else:
            # It may still come, and is no answer to a later question.
            self._unwanted[ticket.about] += 1

    def give_up(self, state: StreamState, error: MtplxError) -> None:
        """End a stream from this side and let the broker know."""
        if state.ended:
            return
        state.fail(error)
        sent = state.submit not in self.outbox
        if sent:
            self.outbox.append(Cancel(id=state.id))
        else:
            self.outbox.remove(state.submit)
        self._forget(state, given_up=sent)

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
        for ticket in self._tickets():
            ticket.error = error
        self._open.clear()

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
            case Error():
                self._error(message)
            case Admitted() | Started() | Chunk() | Done() | Progress():
                self._route(message.id, message)

    def idle_limit(self) -> float:
        """Seconds of silence with an open job after which it is given up."""
        if not self.up:
            return RETURN_S
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
        elif state.admitted is not None:
            self._open.pop(id(state), None)

    def _unrouted(self, job_id: bytes, message: Message) -> None:
        given_up = self._ended.get(job_id)
        if given_up is None or isinstance(message, Progress):
            return
        if isinstance(message, Error) and message.code in FAULTS:
            return
        if isinstance(message, Error) and message.code == "E_UNKNOWN_JOB":
            self._ended[job_id] = False
        elif not given_up:
            self.after_last_word += 1
        elif isinstance(message, Admitted):
            # Given up while the SUBMIT was on its way.
            self.outbox.append(Cancel(id=job_id))
        elif isinstance(message, Done | Error):
            self._ended[job_id] = False

    def _error(self, message: Error) -> None:
        job_id = message.id
        if job_id is None:
            self._error_without_id(message)
            return
        unknown = message.code == "E_UNKNOWN_JOB"
        if self.restarted and unknown:
            message = replace(
                message,
                message="The broker was started anew and does not know this job; use a new id.",
            )
        state = self.streams.get(job_id)
        if state is None or unknown:
            ticket = self._take_ticket(job_id.hex())
            if ticket is not None:
                ticket.error = error_of(message)
        if state is not None and unknown and self._began_anew(state):
            return
        if state is not None and state.admitted is not None and message.code in FAULTS:
            self.stray_errors += 1
        else:
            self._route(job_id, message)

    def _began_anew(self, state: StreamState) -> bool:
        """Whether a new broker's not knowing a job that has not begun costs nothing: it is submitted again."""
        if not self.restarted:
            return False
        if state.admitted is None:
            # No answer to SUBMIT: it is about what was said before.
            return True
        if state.ids or state.cancel_wanted:
            return False
        state.forget_admission()
        self._open[id(state)] = state
        self.outbox.append(state.submit)
        return True

    def _error_without_id(self, message: Error) -> None:
        """It is about the connection, or about the message the broker read last, and ends no job."""
        if self.welcome is None or message.code == "E_VERSION":
            self.fail(error_of(message))
            return
        asked = next((one for one in self._open.values() if not self._unsent(one)), None)
        if isinstance(asked, Ticket):
            self._open.pop(id(asked))
            asked.error = error_of(message)
        elif asked is not None:
            self.give_up(asked, error_of(message))
        else:
            self.stray_errors += 1

    def _unsent(self, asked: Ticket | StreamState) -> bool:
        first = asked.question if isinstance(asked, Ticket) else asked.submit
        return any(message is first for message in self.outbox)

    def _answer(self, status: dict[str, Any]) -> None:
        about = status.get("id") or ("jobs" if "jobs" in status else "health")
        # One that nobody asked for: CANCEL of another producer's job brings its state, too.
        ticket = self._take_ticket(str(about))
        if ticket is not None:
            ticket.answer = status

    def _tickets(self) -> list[Ticket]:
        return [one for one in self._open.values() if isinstance(one, Ticket)]

    def _take_ticket(self, about: str) -> Ticket | None:
        if self._unwanted[about] > 0:
            self._unwanted[about] -= 1
            return None
        found = next((ticket for ticket in self._tickets() if ticket.about == about), None)
        if found is not None:
            self._open.pop(id(found))
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

    def _forget(self, state: StreamState, *, given_up: bool = False) -> None:
        self.streams.pop(state.id, None)
        self._open.pop(id(state), None)
        self._ended[state.id] = given_up
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
