"""Jobs as the journal had them when the broker starts."""

from __future__ import annotations

from typing import Final

from broker import attempts, words
from broker.back import Back
from broker.jobs import Jobs
from broker.journal import Stored
from broker.moves import Phase
from broker.record import Answer, Now, Reading, Record, charge
from broker.timers import Timers
from mtplx.job import ModelLimits

# Producers have at least this long to come back to their jobs.
RETURN_S: Final = 5.0


def restore(jobs: Jobs, back: Back, timers: Timers, now: Now) -> None:
    """Take over what the journal holds: the line, the model's limits and ended jobs.

    Raises:
        JournalError: it cannot be read.
    """
    known = jobs.journal.known()
    jobs.next_seq = known.admit_seq
    if known.limits is not None:
        back.limits = ModelLimits(*known.limits)
    for record in [record_of(stored, now) for stored in jobs.journal.jobs()]:
        jobs.next_seq = max(jobs.next_seq, record.admit_seq + 1)
        if not record.over and record.answer is not None:
            record.answer = Answer.of(jobs.journal.pieces(record, 0, record.tokens))
        jobs.restore(record, now)
        if not record.over:
            _wait(record, jobs, timers, now)
    jobs.trim(now)


def _wait(record: Record, jobs: Jobs, timers: Timers, now: Now) -> None:
    if attempts.is_poison(record):
        jobs.bury(record, "the broker ended while it ran", now)
        return
    timers.set_limits(record, now)
    if not record.finish:
        timers.await_return(record, now, max(jobs.settings.orphan_s, RETURN_S))


def record_of(stored: Stored, now: Now) -> Record:
    """The record of a job; of its answer only what it adds up to."""
    phase, last_word = Phase.WAITING, words.without_text(stored.last_word)
    if last_word is not None:
        phase = Phase.BURIED if words.outcome(last_word) == words.POISON else Phase.ENDED
    return Record(
        id=stored.id,
        body=stored.body,
        size=charge(stored.body, stored.headers),
        digest=stored.digest,
        seed=stored.seed,
        admit_seq=stored.admit_seq,
        admitted=_past(stored.admitted_ns, now),
        reading=Reading(None, None),
        finish=stored.finish,
        headers=stored.headers,
        owner=stored.owner,
        ttl_ns=stored.ttl_ns,
        deadline_ns=stored.deadline_ns,
        attempts=stored.attempts,
        barren=stored.barren,
        model=stored.model,
        model_hash=stored.model_hash,
        build_hash=stored.build_hash,
        exact=stored.exact,
        phase=phase,
        answer=Answer(tokens=stored.tokens, nbytes=stored.answer_bytes, spilled=True) if stored.tokens else None,
        ended=None if stored.ended_ns is None else _past(stored.ended_ns, now),
        last_word=last_word,
        restored=True,
    )


def _past(wall_ns: int, now: Now) -> Now:
    """When that was: not after *now*, wherever the wall clock was set meanwhile."""
    return now.at(min(wall_ns, now.wall_ns))
