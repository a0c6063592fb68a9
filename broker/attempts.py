"""The tries of a job on workers: what counts as one, when it may go on elsewhere, and when there were too many."""

from __future__ import annotations

from typing import Final

from broker import words
from broker.record import Now, Record, Run
from mtplx.messages import Error, Ready

# This many attempts in a row without a new token, or in all, and a job is buried.
MAX_BARREN: Final = 2
MAX_ATTEMPTS: Final = 8


def change_of(record: Record, ready: Ready) -> Error | None:
    """Why the answer of *record* cannot go on with the model of *ready*: its last word; None where it can."""
    if record.tokens == 0:
        return None
    hashes = (record.model_hash, ready.model_hash)
    if all(hashes) and hashes[0] != hashes[1]:
        return words.model_changed(record, ready.model)
    if record.answer is not None and max(record.answer.ids()) >= ready.vocabulary:
        return words.model_changed(record, ready.model)
    return None


def begin(record: Record, ready: Ready, lease: int, now: Now) -> Run:
    """Count an attempt of *record* on the worker that said *ready*."""
    run = Run(lease, record.attempts + 1, now, ready.model, record.tokens, record.barren)
    record.attempts += 1
    record.barren += 1
    # What is not known is not alike.
    known = all((record.model_hash, ready.model_hash, record.build_hash, ready.build_hash))
    alike = known and record.build_hash == ready.build_hash and ready.info.get("row_invariant") is not False
    if record.tokens == 0:
        record.model_hash = ready.model_hash
    elif not alike:
        record.exact = False
    record.model, record.build_hash = ready.model, ready.build_hash
    record.first_run = record.first_run or now
    record.run = run
    return run


def take_back(record: Record) -> None:
    """The latest attempt was handed back in order: it does not count."""
    assert record.run is not None
    record.attempts -= 1
    record.barren = 0 if record.tokens > record.run.behind else record.run.barren


def is_poison(record: Record) -> bool:
    """Whether *record* has had all the attempts there are."""
    return record.barren >= MAX_BARREN or record.attempts >= MAX_ATTEMPTS
