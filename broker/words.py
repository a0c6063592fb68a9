"""The messages the broker composes: refusals and last words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from broker.record import Now, Record, Run
from mtplx import messages as m
from mtplx.errors import CODES, BusyError, WireError
from mtplx.trajectory import trajectory_sha256

MAX_SHOWN: Final = 8
# The outcome of a job that had too many attempts.
POISON: Final = "poison"
# A commit that failed is tried again this often.
JOURNAL_RETRY_MS: Final = 1000


def error(fault: WireError, job_id: bytes | None) -> m.Error:
    """The ERROR that tells a peer of *fault*."""
    return m.Error(
        fault.code,
        fault.message,
        fault.retryable,
        id=job_id,
        retry_after_ms=fault.retry_after_ms,
        field=fault.field,
        detail=fault.detail or None,
    )


def coded(code: str, message: str, job_id: bytes | None = None, detail: dict[str, Any] | None = None) -> m.Error:
    """An ERROR of *code*, whose class stands in the table of codes."""
    return m.Error(code, message, CODES[code].retryable, id=job_id, detail=detail)


def version_error(versions: tuple[int, ...]) -> m.Error:
    """The answer to a HELLO that offers no version spoken here."""
    # A header must hold it, however many were offered.
    asked = ", ".join(map(str, versions[:MAX_SHOWN])) or "none"
    if len(versions) > MAX_SHOWN:
        asked += " ..."
    return coded(
        "E_VERSION",
        f"This broker speaks MTX version {m.VERSION}, the producer {asked}; update the older of the two.",
        detail={"supported": [m.VERSION]},
    )


def admitted(record: Record, position: int, boot_id: bytes, *, dup: bool) -> m.Admitted:
    """The promise that the job is in the line."""
    return m.Admitted(record.id, record.admit_seq, position, boot_id, record.seed, dup)


def started(record: Record, run: Run) -> m.Started:
    """The news that the job was handed to the worker."""
    return m.Started(record.id, run.attempt, run.model, run.started.mono - record.admitted.mono)


def cancelled(record: Record, now: Now) -> m.Done:
    """The last word of a job that ended by cancel before the worker could report on it."""
    ids = record.answer.ids() if record.answer else ()
    return m.Done(
        record.id,
        0,
        "cancelled",
        text=record.answer.text() if record.answer else "",
        usage={"prompt_tokens": None, "cached_tokens": None, "completion_tokens": len(ids)},
        timings={"queue_wait_s": _waited(record, record.run.started if record.run else now)},
        seed=record.seed,
        sha256=trajectory_sha256(ids),
        run={"attempt": record.attempts, "speculation": {}},
    )


def done(record: Record, final: m.Final, model: str) -> m.Done:
    """The last word made of the worker's FINAL and the broker's own clock."""
    assert record.run is not None
    timings = {
        "queue_wait_s": _waited(record, record.run.started),
        "prefill_s": final.prefill_s,
        "decode_s": final.decode_s,
    }
    if record.first_token is not None:
        timings["time_to_first_token_s"] = record.first_token.mono - record.admitted.mono
    run = {
        "model": model,
        "route": final.route,
        "attempt": record.run.attempt,
        "max_tokens_used": final.max_tokens_used,
        "row_invariant": final.row_invariant,
        "prefix_exact": final.prefix_exact,
        "speculation": final.speculation,
    }
    if record.run.behind or record.attempts > 1:
        run["resume_exact"] = record.exact and (final.row_invariant or not record.run.behind)
    return m.Done(
        record.id,
        0,
        final.finish_reason,
        text=record.answer.text() if record.answer else "",
        usage={
            "prompt_tokens": final.prompt_tokens,
            "cached_tokens": final.cached_tokens,
            "completion_tokens": record.tokens,
        },
        timings=timings,
        seed=record.seed,
        sha256=final.sha256,
        run=run,
    )


def expired(record: Record, kind: str) -> m.Error:
    """The last word of a job whose own time limit ran out."""
    if kind == "ttl":
        return coded("E_EXPIRED", "The job waited longer than its queue_ttl_ms and was not run.", record.id)
    return coded(
        "E_EXPIRED", "The job's deadline_ms passed before it ended.", record.id, {"tokens": record.tokens}
    )


def draining(record: Record) -> m.Error:
    """The last word of a job that the stopping broker could not run to its end."""
    what = "had no time left to run" if record.run is None else "could not end in time"
    return coded(
        "E_DRAINING",
        f"The broker is stopping and the job {what}; submit it again later.",
        record.id,
        {"tokens": record.tokens},
    )


def poison(record: Record, why: str) -> m.Error:
    """The last word of a job that had all the attempts there are. *why*: how the last one ended."""
    return coded(
        "E_POISON",
        f"The job is buried after {record.attempts} attempts, the last of which ended so: {why}. See "
        "`mtplx jobs show`; `mtplx jobs kick` runs it again.",
        record.id,
        {"reason": why, "tokens": record.tokens, "attempts": record.attempts},
    )


def model_changed(record: Record, model: str) -> m.Error:
    """The last word of a job whose answer another model began."""
    return coded(
        "E_MODEL_CHANGED",
        f"Another model, or another version of it, began this answer than {model[:64]!r}, which runs now; "
        "submit the job under a new id for all of it.",
        record.id,
        {"tokens": record.tokens},
    )


def answer_lost(record: Record) -> m.Error:
    """The last word for a reader that has more of the answer than can be told again."""
    return coded(
        "E_ANSWER_LOST",
        f"{record.reading.tokens} tokens were received and the journal kept {record.tokens}, in other pieces; the "
        "stream cannot go on from there. Submit the job under a new id.",
        record.id,
        {"tokens": record.tokens, "received": record.reading.tokens},
    )


def journal_fault(cause: str) -> BusyError:
    """The refusal of jobs that the journal cannot take."""
    return BusyError(
        f"The job is not taken, because it could not be written down: {cause} Submit again after retry_after_ms.",
        code="E_JOURNAL",
        retry_after_ms=JOURNAL_RETRY_MS,
    )


def slow_reader(record: Record, limit: int) -> m.Error:
    """The last word of a job whose answer could not wait any longer for its reader."""
    return coded(
        "E_SLOW_READER",
        f"Unread answers fill more than {limit} bytes and this, the oldest, was dropped; read faster, "
        "or submit with credit and fewer jobs at once.",
        record.id,
        {"tokens": record.tokens, "limit": limit},
    )


def not_readable(record: Record, cause: str) -> m.Error:
    """The last word for the reader of an answer that the journal does not give out."""
    return coded("E_JOURNAL", f"The answer cannot be read: {cause}", record.id, {"tokens": record.tokens})


def without_text(last_word: m.Done | m.Error | None) -> m.Done | m.Error | None:
    """What of a last word is kept in memory when the journal has the whole of it."""
    return replace(last_word, text="") if isinstance(last_word, m.Done) else last_word


def outcome(last_word: m.Done | m.Error) -> str:
    """One low-cardinality word for spans and lists."""
    if isinstance(last_word, m.Done):
        return last_word.outcome
    return last_word.code.removeprefix("E_").lower()


def _waited(record: Record, until: Now) -> float:
    return (record.first_run or until).mono - record.admitted.mono


def end_attributes(record: Record, last_word: m.Done | m.Error, now: Now) -> dict[str, Any]:
    """What the end of a job at *now* adds to its spans. The worker's times win over the broker's own."""
    found: dict[str, Any] = {"tokens": record.tokens, "chunks": len(record.answer.pieces) if record.answer else 0}
    timings = clocked(record, now)
    if isinstance(last_word, m.Error):
        return {**found, "error": last_word.code, "timings": timings}
    return {**found, "usage": last_word.usage, "run": last_word.run, "timings": {**timings, **last_word.timings}}


def clocked(record: Record, now: Now) -> dict[str, float]:
    """The times of an attempt as the broker saw them; empty where there was no token."""
    if record.run is None or record.run.first_token is None:
        return {}
    first = record.run.first_token.mono
    to_first = first - record.run.started.mono
    found = {"prefill_s": to_first, "run_first_token_s": to_first, "decode_s": now.mono - first}
    if record.first_token is not None:
        found["time_to_first_token_s"] = record.first_token.mono - record.admitted.mono
    return found
