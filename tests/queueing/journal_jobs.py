"""Records as the machine makes them, for tests of the journal."""

from __future__ import annotations

from broker.journal import Journal
from broker.record import Answer, Now, Piece, Reading, Record, digest_of
from mtplx.messages import Done, Error

SECOND = 10**9
ADMITTED = Now(5.0, 1_700_000_000 * SECOND)
ENDED = Now(9.0, 1_700_000_004 * SECOND)


def record(seq: int, *, body: bytes | None = None, **more) -> Record:
    """A waiting job."""
    body = b"\x81\xa6prompt" + bytes([0xD9, 8]) + b"job %4d" % seq if body is None else body
    return Record(
        **{
            "id": seq.to_bytes(16, "big"),
            "body": body,
            "size": len(body),
            "digest": digest_of(body),
            "seed": 2**64 - 1 - seq,
            "admit_seq": seq,
            "admitted": ADMITTED,
            "reading": Reading(route=b"r", credit=None),
            "finish": bool(seq % 2),
            "headers": {"traceparent": "00-" + "a" * 32} if seq % 3 else None,
            "owner": "uid:1000" if seq % 2 else "",
            "ttl_ns": ADMITTED.wall_ns + SECOND if seq % 2 else None,
            "deadline_ns": None if seq % 2 else 2**70,
            **more,
        }
    )


def begin(journal: Journal, job: Record) -> None:
    """An attempt begins."""
    job.attempts += 1
    job.barren += 1
    job.model, job.model_hash, job.build_hash = "tiny", "m" * 16, "b" * 16
    journal.attempt(job)


def draw(journal: Journal, job: Record, count: int, *, logprobs: bool = False) -> list[Piece]:
    """The answer goes on by *count* tokens, one a piece."""
    job.answer = job.answer or Answer()
    made = []
    for at in range(job.tokens, job.tokens + count):
        told = (((at, -0.5), (at + 1, -1.25)),) if logprobs else None
        made.append(Piece(at, (at * 31 % 50_000,), f" w{at}é", told))
        job.answer.add(made[-1])
        journal.piece(job, made[-1])
    return made


def end(journal: Journal, job: Record, *, poison: bool = False) -> None:
    """The last word."""
    if poison:
        job.last_word = Error("E_POISON", "It ended the worker twice.", False, id=job.id, detail={"attempts": 2})
    else:
        text = job.answer.text() if job.answer else ""
        usage = {"prompt_tokens": 3, "cached_tokens": 0, "completion_tokens": job.tokens}
        job.last_word = Done(
            job.id, 0, "stop", text, usage, {"queue_s": 0.25}, job.seed, "ab" * 32, {"attempt": 1}
        )
        job.body = b""
    job.ended = ENDED
    journal.ended(job)
