"""Every message of MTX/1, one frozen dataclass each: the single source of the protocol.

Codec (`wire.py`), tables of `docs/protocol.md` and golden vectors are made from it. A field is `Annotated[python
type, wire type, "meaning"]`; `BODY` puts it into the body map; a default makes it optional.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from mtplx.fields import (
    BODY,
    BOOL,
    FLOAT,
    ID,
    STR,
    UINT,
    Attempt,
    Count,
    Credit,
    First,
    Headers,
    JobId,
    LogprobsField,
    Message,
    Text,
    TokenIds,
    Wire,
)
from mtplx.worker_messages import (
    Accepted,
    BrokerBeat,
    CancelRun,
    Drawn,
    Fail,
    Final,
    Quiet,
    Ready,
    Run,
    WorkerBeat,
    WorkerBye,
    WorkerChunk,
)

__all__ = [
    "FROM_CLIENT",
    "FROM_WORKER",
    "MAGIC",
    "TO_CLIENT",
    "TO_WORKER",
    "VERSION",
    "Accepted",
    "Ack",
    "Admitted",
    "BrokerBeat",
    "Bye",
    "Cancel",
    "CancelRun",
    "Chunk",
    "Delete",
    "Done",
    "Draining",
    "Drawn",
    "Error",
    "Fail",
    "Final",
    "GiveCredit",
    "Hello",
    "Kick",
    "Message",
    "Ping",
    "Pong",
    "Progress",
    "Quiet",
    "Ready",
    "Resume",
    "Run",
    "Started",
    "Status",
    "StatusReply",
    "Submit",
    "Welcome",
    "WorkerBeat",
    "WorkerBye",
    "WorkerChunk",
]

VERSION, MAGIC = 1, b"MTX\x01"


# --- producer to broker


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """Opens a conversation; answered by WELCOME."""

    KIND: ClassVar[int] = 0x01
    versions: Annotated[tuple[int, ...], Wire.UINTS, "Major versions the producer speaks."]
    client: Annotated[str, STR, "Name and version of the producer's library, for people."] = ""
    caps: Annotated[tuple[str, ...], Wire.STRS, "Capabilities the producer offers; none are defined yet."] = ()


@dataclass(frozen=True, slots=True)
class Submit(Message):
    """Asks for a job; answered by ADMITTED or ERROR."""

    KIND: ClassVar[int] = 0x02
    id: JobId
    job: Annotated[bytes, Wire.RAW, BODY, "The job: a map, see the table of job fields."]
    credit: Credit = None
    deadline_ms: Annotated[int | None, UINT, "Ends the job with E_EXPIRED this long after admission."] = None
    queue_ttl_ms: Annotated[int | None, UINT, "Ends the job with E_EXPIRED if it still waits after this."] = None
    finish: Annotated[bool, BOOL, "Run to the end even if the producer is gone."] = False
    h: Headers = None


@dataclass(frozen=True, slots=True)
class Cancel(Message):
    """Ends a job; its last word follows (DONE with outcome `cancelled`, unless it ended first)."""

    KIND: ClassVar[int] = 0x03
    id: JobId


@dataclass(frozen=True, slots=True)
class Resume(Message):
    """Takes up a job's stream on this connection; the rest of the chunks follow."""

    KIND: ClassVar[int] = 0x04
    id: JobId
    next_seq: Annotated[int, UINT, "The number the next chunk gets."]
    tokens: Annotated[int, UINT, "Tokens received so far; nothing below is sent again."]
    credit: Credit = None


@dataclass(frozen=True, slots=True)
class GiveCredit(Message):
    """Allows more chunks of a job that was submitted with credit."""

    KIND: ClassVar[int] = 0x05
    id: JobId
    upto_seq: Annotated[int, UINT, "Chunks with a number below this may be sent."]


@dataclass(frozen=True, slots=True)
class Ack(Message):
    """Lets the broker forget an ended job before its retention ends; a buried one stays. No answer."""

    KIND: ClassVar[int] = 0x06
    id: JobId


@dataclass(frozen=True, slots=True)
class Status(Message):
    """Asks for the broker's health, one job's state, or the list of jobs; answered by STATUS_REPLY."""

    KIND: ClassVar[int] = 0x07
    id: Annotated[bytes | None, ID, "One job."] = None
    jobs: Annotated[bool, BOOL, "All jobs, running first, then the line, then finished ones."] = False
    state: Annotated[str | None, STR, "Only jobs in this state; with `jobs`."] = None
    whole: Annotated[bool, BOOL, "With `id`: the job as submitted and the answer so far, too."] = False


@dataclass(frozen=True, slots=True)
class Kick(Message):
    """Puts a buried job at the end of the line, with all its attempts; answered by STATUS_REPLY or ERROR."""

    KIND: ClassVar[int] = 0x0A
    id: JobId


@dataclass(frozen=True, slots=True)
class Delete(Message):
    """Forgets an ended job, a buried one among them; answered by STATUS_REPLY (`state` is `deleted`) or ERROR."""

    KIND: ClassVar[int] = 0x0B
    id: JobId


@dataclass(frozen=True, slots=True)
class Ping(Message):
    """Answered by PONG."""

    KIND: ClassVar[int] = 0x08
    n: Annotated[int, UINT, "Comes back in PONG."] = 0


@dataclass(frozen=True, slots=True)
class Bye(Message):
    """The producer leaves; its jobs without `finish` are cancelled at once. No answer."""

    KIND: ClassVar[int] = 0x09


# --- broker to producer


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    """Answers HELLO."""

    KIND: ClassVar[int] = 0x81
    version: Annotated[int, UINT, "The major version spoken from here on."]
    boot_id: Annotated[bytes, ID, "Drawn at each start of the broker."]
    beat_ms: Annotated[int, UINT, "A producer with open jobs hears from the broker at least this often."]
    limits: Annotated[dict[str, Any], Wire.MAP, "Integers; see Limits."]
    server: Annotated[str, STR, "Name and version of the broker, for people."] = ""
    caps: Annotated[tuple[str, ...], Wire.STRS, "Capabilities the broker offers; none are defined yet."] = ()


@dataclass(frozen=True, slots=True)
class Admitted(Message):
    """The job is in the line. Nothing else implies acceptance."""

    KIND: ClassVar[int] = 0x82
    id: JobId
    admit_seq: Annotated[int, UINT, "Place in the order of all admissions; jobs run in this order."]
    position: Annotated[int, UINT, "Jobs before this one, the running one included."]
    boot_id: Annotated[bytes, ID, "As in WELCOME."]
    seed: Annotated[int, UINT, "The seed in force: the job's own, or the one the broker drew."]
    dup: Annotated[bool, BOOL, "The same job was submitted before; it is not run again."] = False


@dataclass(frozen=True, slots=True)
class Started(Message):
    """The job was handed to the worker."""

    KIND: ClassVar[int] = 0x83
    id: JobId
    attempt: Attempt
    model: Annotated[str, STR, "Name of the model that runs it."]
    queue_wait_s: Annotated[float, FLOAT, "Seconds from admission to this moment."]


@dataclass(frozen=True, slots=True)
class Chunk(Message):
    """A numbered piece of the answer."""

    KIND: ClassVar[int] = 0x84
    id: JobId
    attempt: Attempt
    seq: Annotated[int, UINT, "Number of the chunk, gap-free from 0."]
    first: First
    n: Count
    ids: TokenIds
    text: Text
    logprobs: LogprobsField = None


@dataclass(frozen=True, slots=True)
class Done(Message):
    """Last word: the job ended as asked (or was cancelled)."""

    KIND: ClassVar[int] = 0x85
    id: JobId
    seq: Annotated[int, UINT, "Number of chunks sent, which a reader compares with its own count."]
    outcome: Annotated[str, STR, "`stop`, `length` or `cancelled`."]
    text: Annotated[str, STR, BODY, "The whole answer; equal to the chunks' texts put together."]
    usage: Annotated[dict[str, Any], Wire.MAP, BODY, "`prompt_tokens`, `cached_tokens`, `completion_tokens`."]
    timings: Annotated[dict[str, Any], Wire.MAP, BODY, "Seconds; see What DONE tells."]
    seed: Annotated[int, UINT, BODY, "The seed used."]
    sha256: Annotated[str, STR, BODY, "Hex SHA-256 of the token ids as little-endian uint32."]
    run: Annotated[dict[str, Any], Wire.MAP, BODY, "How it ran; see What DONE tells."]


@dataclass(frozen=True, slots=True)
class Error(Message):
    """A refusal, or a last word: the job could not be run to its end. Also broker to worker."""

    KIND: ClassVar[int] = 0x86
    code: Annotated[str, STR, "One of the error codes."]
    message: Annotated[str, STR, "A sentence for people: what is wrong and what to do."]
    retryable: Annotated[bool, BOOL, "The only thing a program should branch on."]
    id: Annotated[bytes | None, ID, "The job, where there is one."] = None
    retry_after_ms: Annotated[int | None, UINT, "When to come back."] = None
    field: Annotated[str | None, STR, "The offending key."] = None
    detail: Annotated[dict[str, Any] | None, Wire.MAP, "Numbers behind the message."] = None


@dataclass(frozen=True, slots=True)
class StatusReply(Message):
    """Answers STATUS."""

    KIND: ClassVar[int] = 0x87
    status: Annotated[dict[str, Any], Wire.MAP, BODY, "Health, a job, or `jobs`."]


@dataclass(frozen=True, slots=True)
class Pong(Message):
    """Answers PING."""

    KIND: ClassVar[int] = 0x88
    n: Annotated[int, UINT, "As in PING."] = 0


@dataclass(frozen=True, slots=True)
class Draining(Message):
    """The broker stops: no job is taken any more. Those that it does not end go on when it is back."""

    KIND: ClassVar[int] = 0x89


@dataclass(frozen=True, slots=True)
class Progress(Message):
    """A timed sign of life for an open job, off a clock and not off progress."""

    KIND: ClassVar[int] = 0x8A
    id: JobId
    phase: Annotated[str, STR, "`waiting`, `prefill` or `decode`."]
    position: Annotated[int, UINT, "Jobs before this one, the running one included."] = 0
    done: Annotated[int, UINT, "Prompt tokens read (prefill) or tokens drawn (decode)."] = 0
    total: Annotated[int, UINT, "Of how many: prompt tokens, or the budget."] = 0
    worker: Annotated[str, STR, "`ready`, `busy` or `absent`."] = ""


def _table(*kinds: type[Message]) -> dict[int, type[Message]]:
    return {kind.KIND: kind for kind in kinds}


# Who may say what on which socket; a kind of another table is unknown there.
FROM_CLIENT = _table(Hello, Submit, Cancel, Resume, GiveCredit, Ack, Status, Kick, Delete, Ping, Bye)
TO_CLIENT = _table(Welcome, Admitted, Started, Chunk, Done, Error, StatusReply, Pong, Draining, Progress)
FROM_WORKER = _table(Ready, WorkerChunk, Final, Fail, WorkerBeat, WorkerBye)
TO_WORKER = _table(Run, Drawn, CancelRun, Quiet, BrokerBeat, Accepted, Error)
