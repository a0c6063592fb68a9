"""What STATUS answers: the broker's health, one job, the list of jobs. No prompts, no answers."""

from __future__ import annotations

from itertools import islice
from typing import Any, Final

from broker import words
from broker.back import Back, Identity
from broker.jobs import Jobs
from broker.moves import Phase
from broker.record import Now, Record
from mtplx.settings import SchedulerMode

# Lists stay far below the frame limit.
MAX_LISTED: Final = 200


def report(jobs: Jobs, back: Back, identity: Identity, now: Now, *, draining: bool) -> dict[str, Any]:
    """The whole health report."""
    gate, settings = jobs.gate, jobs.settings
    return {
        "scheduler": _scheduler(jobs, back),
        "worker": _worker(back, now),
        "line": {
            "depth": len(gate.line),
            "bytes": gate.line_bytes,
            "limit_jobs": settings.queue_jobs,
            "limit_bytes": settings.queue_bytes,
            "refused_total": gate.refused_total,
            "admitted_total": gate.admitted_total,
            "completed_total": gate.completed_total,
            "failed_total": gate.failed_total,
        },
        "broker": {
            "version": identity.version,
            "boot_id": identity.boot_id.hex(),
            "pid": identity.pid,
            "uptime_s": now.mono - identity.started.mono,
            "draining": draining,
        },
        "counters": dict(jobs.counters),
    }


def job_status(jobs: Jobs, record: Record, position: int | None = None) -> dict[str, Any]:
    """One job's state."""
    found: dict[str, Any] = {
        "id": record.id.hex(),
        "state": record.phase.value,
        "admit_seq": record.admit_seq,
        "tokens": record.tokens,
        "bytes": record.size,
    }
    if record.phase is Phase.WAITING:
        found["position"] = position if position is not None else jobs.position(record)
    if record.last_word is not None:
        found["outcome"] = words.outcome(record.last_word)
    return found


def job_list(jobs: Jobs) -> dict[str, Any]:
    """The running job, the line, then finished jobs, the newest first; MAX_LISTED of each."""
    listed = [job_status(jobs, jobs.gate.slot)] if jobs.gate.slot else []
    listed += [job_status(jobs, record, place) for place, record in islice(jobs.gate.positions(), MAX_LISTED)]
    listed += [job_status(jobs, record) for record in jobs.finished(MAX_LISTED)]
    return {"jobs": listed, "total": len(jobs.records)}


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
    if back.worker is not None:
        ready = back.worker.ready
        found |= {
            "pid": ready.pid,
            "model": ready.model,
            "vocabulary": ready.vocabulary,
            "context": ready.context,
            "info": ready.info,
            "heard_s": now.mono - back.worker.heard_at,
            "phase": back.worker.phase if back.state == "busy" else "idle",
        }
        if back.worker.prefix is not None:
            found["prefix"] = back.worker.prefix
    return found
