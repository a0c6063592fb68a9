"""What STATUS answers: the broker's health, one job, the list of jobs. No prompts, no answers."""

from __future__ import annotations

from itertools import islice
from typing import Any, Final

from broker import delivery, words
from broker.back import LOSSES, Back, Identity
from broker.jobs import Jobs
from broker.moves import Phase
from broker.record import Now, Record
from mtplx import messages as m
from mtplx.errors import JournalError
from mtplx.settings import SchedulerMode
from mtplx.wire import unpack_body

# Lists stay far below the frame limit.
MAX_LISTED: Final = 200
# Characters of an answer shown at most; a job beside it still fits a frame.
MAX_SHOWN_TEXT: Final = 1024**2
# Jobs of the line that health tells one by one.
MAX_FIRST: Final = 20


def report(jobs: Jobs, back: Back, identity: Identity, now: Now, *, draining: bool) -> dict[str, Any]:
    """The health report. Jobs are told by their number, never by id or owner: everybody may read it."""
    gate, settings = jobs.gate, jobs.settings
    return {
        "at": now.wall_ns / 1e9,
        "scheduler": _scheduler(jobs, back),
        "worker": _worker(back, now),
        "running": _running(jobs, back, now),
        "line": {
            "depth": len(gate.line),
            "bytes": gate.line_bytes,
            "limit_jobs": settings.queue_jobs,
            "limit_bytes": settings.queue_bytes,
            "refused_total": gate.refused_total,
            "admitted_total": gate.admitted_total,
            "completed_total": gate.completed_total,
            "failed_total": gate.failed_total,
            "returned_total": gate.returned_total,
            "requeued_total": gate.requeued_total,
            "abandoned_before_start_total": gate.abandoned_before_start_total,
            "first": [_waiting(record, now) for record in islice(gate.line.values(), MAX_FIRST)],
        },
        "recent": gate.recent.report(now),
        "broker": {
            "version": identity.version,
            "boot_id": identity.boot_id.hex(),
            "pid": identity.pid,
            "uptime_s": now.mono - identity.started.mono,
            "draining": draining,
        },
        "counters": dict(jobs.counters),
    }


def service(back: Back, found: dict[str, Any]) -> dict[str, Any]:
    """Whether a job that is submitted now could run, and if not, why. *found*: the rest of health."""
    why = ""
    if found["broker"]["draining"]:
        why = "The broker is stopping."
    elif back.worker is None:
        lost = f": {LOSSES[back.last_loss]}" if back.last_loss else ""
        why = f"No worker is connected{lost}."
    elif back.worker.leaving:
        why = "The worker is leaving."
    elif found["journal"]["state"] == "failing" or back.held_up:
        why = f"The journal cannot be written: {found['journal'].get('error') or 'too much waits for it'}"
    return {"able": not why, "why": why}


def _running(jobs: Jobs, back: Back, now: Now) -> dict[str, Any] | None:
    record = jobs.gate.slot
    if record is None or record.run is None:
        return None
    progress = back.progress_of(record, 0)
    return {
        "admit_seq": record.admit_seq,
        "attempt": record.run.attempt,
        "phase": "cancelling" if record.phase is Phase.CANCELLING else progress.phase,
        "done": progress.done,
        "total": progress.total,
        "tokens": record.tokens,
        "tokens_per_s": jobs.gate.recent.speed(record, now),
        "run_s": now.mono - record.run.started.mono,
    }


def _waiting(record: Record, now: Now) -> dict[str, Any]:
    waited = {"admit_seq": record.admit_seq, "waited_s": now.mono - record.admitted.mono, "bytes": record.size}
    return {**waited, "attempts": record.attempts, "tokens": record.tokens}


def job_status(jobs: Jobs, record: Record, position: int | None = None) -> dict[str, Any]:
    """One job's state."""
    found: dict[str, Any] = {
        "id": record.id.hex(),
        "state": record.phase.value,
        "admit_seq": record.admit_seq,
        "tokens": record.tokens,
        "bytes": record.size,
        "attempts": record.attempts,
    }
    if record.phase is Phase.WAITING:
        found["position"] = position if position is not None else jobs.position(record)
    if record.last_word is not None:
        found["outcome"] = words.outcome(record.last_word)
    return found


def job_whole(jobs: Jobs, record: Record) -> dict[str, Any]:
    """One job's state, with what it asks where that is still known, how it ended, and its answer so far."""
    found = job_status(jobs, record)
    if record.body:
        found["job"] = unpack_body(record.body, len(record.body))
    if isinstance(record.last_word, m.Error):
        word = record.last_word
        found["error"] = {"code": word.code, "message": word.message, "detail": word.detail or {}}
    text, first = "", 0
    try:
        while first < record.tokens and len(text) < MAX_SHOWN_TEXT:
            pieces = delivery.window(record, jobs.journal, first, delivery.MAX_CHUNK_TOKENS)
            text += "".join(piece.text for piece in pieces)
            first = pieces[-1].first + len(pieces[-1].ids)
    except JournalError as error:
        found["unreadable"] = str(error)
    found["text"] = text[:MAX_SHOWN_TEXT]
    return found


def job_list(jobs: Jobs, state: str | None = None, owner: str | None = None) -> dict[str, Any]:
    """The running job, the line, then finished jobs, the newest first; MAX_LISTED of each, of *state* alone.

    owner: whose jobs; None for those of all, each with its owner.
    """
    ours = [jobs.gate.slot] if jobs.gate.slot and owner in (None, jobs.gate.slot.owner) else []
    listed = [_listed(jobs, record, owner) for record in ours]
    line = ((place, one) for place, one in jobs.gate.positions() if owner in (None, one.owner))
    listed += [_listed(jobs, record, owner, place) for place, record in islice(line, MAX_LISTED)]
    listed += [_listed(jobs, record, owner) for record in jobs.finished(MAX_LISTED, state, owner)]
    total = len(jobs) if owner is None else sum(record.owner == owner for record in jobs)
    return {"jobs": [one for one in listed if state in (None, one["state"])], "total": total}


def _listed(jobs: Jobs, record: Record, owner: str | None, position: int | None = None) -> dict[str, Any]:
    status = job_status(jobs, record, position)
    return {**status, "owner": record.owner} if owner is None else status


def _scheduler(jobs: Jobs, back: Back) -> dict[str, Any]:
    mode = jobs.settings.scheduler_mode
    found: dict[str, Any] = {"mode": str(mode)}
    if mode is SchedulerMode.HYPER:
        worker = back.worker
        stage = worker.ready.stage if worker else jobs.settings.hyper_stage
        executor = bool(worker and worker.ready.info.get("width_executor"))
        width = worker.width if worker and jobs.gate.slot else 1
        found["hyper"] = jobs.gate.hyper_block(stage, executor=executor, width=width)
    return found


def _worker(back: Back, now: Now) -> dict[str, Any]:
    found: dict[str, Any] = {"state": back.state}
    if back.last_loss:
        found["last_loss"] = back.last_loss
        found["lost_pid"] = back.lost_pid
        if back.lost_process:
            found["lost_process"] = back.lost_process
    if back.worker is not None:
        ready = back.worker.ready
        found |= {
            "pid": ready.pid,
            "model": ready.model,
            "vocabulary": ready.vocabulary,
            "context": ready.context,
            "model_hash": ready.model_hash,
            "build_hash": ready.build_hash,
            "info": ready.info,
            "heard_s": now.mono - back.worker.heard_at,
            "phase": back.worker.phase if back.state == "busy" else "idle",
        }
        if back.worker.prefix is not None:
            found["prefix"] = back.worker.prefix
    return found
