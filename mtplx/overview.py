"""Health as a person reads it, for the page and for `mtplx top`: sentences, figures, and bars with their words."""

from __future__ import annotations

import time
from typing import Any, Final

from mtplx.logs import printable

# Rows of the line that are shown; the rest is a number.
MAX_ROWS: Final = 8
MINUTE_S: Final = 60
HOUR_S: Final = 3600
DAY_S: Final = 86_400
KIB: Final = 1024
NOTHING: Final = "-"

Found = dict[str, Any]


def overview(health: Found) -> Found:
    """What is shown of *health*, as plain lists, maps and printable strings; anything may be missing in it.

    tone: `idle`, `busy` or `wrong`. Times of day are those of this machine.
    """
    tone, headline, sentence = _headline(health)
    shown = {
        "tone": tone,
        "headline": headline,
        "sentence": sentence,
        "figures": _figures(health),
        "running": _running(health),
        "line": [_waiting(place, one) for place, one in enumerate(_first(health)[:MAX_ROWS], start=1)],
        "line_more": max(0, _map(health, "line").get("depth", 0) - len(_first(health)[:MAX_ROWS])),
        "waits": _waits(health),
        "acceptance": _acceptance(health),
        "widths": _widths(health),
        "worker": _worker(health),
        "faults": [_fault(one) for one in _map(health, "recent").get("faults", [])],
    }
    return {name: _printable(value) for name, value in shown.items()}


def _printable(value: Any) -> Any:
    """*value* with all its texts harmless to a terminal: a worker tells of itself what it likes."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {name: _printable(one) for name, one in value.items()}
    return [_printable(one) for one in value] if isinstance(value, list) else value


def seconds(value: float | None) -> str:
    """A time span in the unit that suits it."""
    if value is None:
        return NOTHING
    if value < 10:
        return f"{value:.1f} s" if value >= 0.1 or value == 0 else f"{1000 * value:.0f} ms"
    if value < 2 * MINUTE_S:
        return f"{value:.0f} s"
    if value < 2 * HOUR_S:
        return f"{value / MINUTE_S:.0f} min"
    return f"{value / HOUR_S:.0f} h" if value < 2 * DAY_S else f"{value / DAY_S:.0f} days"


def size(count: float) -> str:
    """Bytes in the unit that suits them."""
    for unit in ("B", "KiB", "MiB"):
        if count < KIB:
            return f"{count:.0f} {unit}"
        count /= KIB
    return f"{count:.1f} GiB"


def of_day(at: float) -> str:
    """Wall seconds as a time of day here."""
    return time.strftime("%H:%M:%S", time.localtime(at))


def speed(value: float | None) -> str:
    """Tokens a second."""
    if value is None:
        return NOTHING
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _map(found: Found, key: str) -> Found:
    part = found.get(key)
    return part if isinstance(part, dict) else {}


def _first(health: Found) -> list[Found]:
    first: list[Found] = _map(health, "line").get("first", [])
    return first


def _headline(health: Found) -> tuple[str, str, str]:
    service, running, line = _map(health, "service"), _map(health, "running"), _map(health, "line")
    waiting = _jobs(line.get("depth", 0))
    if not service.get("able", False):
        what = "No worker" if _map(health, "worker").get("state") == "absent" else "Not ready"
        what = "Stopping" if _map(health, "broker").get("draining") else what
        then = f" {waiting} in the line." if line.get("depth") else ""
        return "wrong", what, f"{service.get('why', '')}{then}{_what_to_do(health)}".strip()
    if running:
        after = f"{waiting} behind it" if line.get("depth") else "Nobody waits behind it"
        return "busy", f"Running job {running.get('admit_seq', '')}".strip(), f"{after}."
    if line.get("depth"):
        return "busy", "Starting", f"{waiting} in the line."
    return "idle", "Idle", "Nobody waits. A job that comes now runs at once."


def _what_to_do(health: Found) -> str:
    if _map(health, "broker").get("draining") or _map(health, "worker").get("state") != "absent":
        return ""
    return " Start a worker: mtplx serve or mtplx-worker; mtplx doctor looks for the cause."


def _jobs(count: int) -> str:
    return "1 job" if count == 1 else f"{count} jobs"


def _figures(health: Found) -> list[Found]:
    line, running, last = _map(health, "line"), _map(health, "running"), _map(_map(health, "recent"), "last_job")
    told = running.get("tokens_per_s") if running else last.get("tokens_per_s")
    whose = f"job {last.get('admit_seq')}, ended {of_day(last.get('at', 0.0))}" if last else "no job yet"
    waits = [one.get("waited_s") for one in _first(health)]
    failed = line.get("failed_total", 0)
    return [
        {
            "label": "tokens a second",
            "value": speed(told),
            "note": "running job" if running else whose,
            "wrong": False,
        },
        {"label": "waiting", "value": str(line.get("depth", 0)), "note": _room(line), "wrong": False},
        {
            "label": "longest wait now",
            "value": seconds(max((one for one in waits if one is not None), default=None)) if waits else "none",
            "note": "since it was admitted" if waits else "nobody waits",
            "wrong": False,
        },
        {
            "label": "done",
            "value": str(line.get("completed_total", 0)),
            "note": f"{failed} failed, {line.get('refused_total', 0)} refused, since the broker's start",
            "wrong": failed > 0,
        },
    ]


def _room(line: Found) -> str:
    if "limit_jobs" not in line or "limit_bytes" not in line:
        return ""
    return f"{size(line.get('bytes', 0))}; room for {line['limit_jobs']} jobs, {size(line['limit_bytes'])}"


def _running(health: Found) -> Found | None:
    running = _map(health, "running")
    if not running:
        return None
    done, total = running.get("done", 0), running.get("total", 0)
    unit = "prompt tokens read" if running.get("phase") == "prefill" else "tokens drawn"
    notes = [] if running.get("attempt", 1) == 1 else [f"attempt {running['attempt']}"]
    return {
        "name": f"Job {running.get('admit_seq')}",
        "phase": running.get("phase", ""),
        "progress": f"{done} of at most {total} {unit}" if total else f"{done} {unit}",
        "share": min(1.0, done / total) if total else None,
        "speed": f"{speed(running.get('tokens_per_s'))} tokens/s",
        "since": seconds(running.get("run_s")),
        "note": ", ".join(notes),
    }


def _waiting(place: int, one: Found) -> Found:
    notes = [f"goes on after {one['tokens']} tokens"] if one.get("tokens") else []
    notes += [f"{one['attempts']} attempts"] if one.get("attempts", 0) > 1 else []
    return {
        "place": str(place),
        "name": f"Job {one.get('admit_seq')}",
        "waited": seconds(one.get("waited_s")),
        "size": size(one.get("bytes", 0)),
        "note": ", ".join(notes) or ("next" if place == 1 else ""),
    }


def _waits(health: Found) -> Found:
    """The waits of jobs by when they began to run, the oldest first; a place without one has no job."""
    told = _map(_map(health, "recent"), "waits")
    bucket_s, buckets = told.get("bucket_s", 1), {one[0]: one for one in told.get("buckets", [])}
    deep = max(buckets, default=-1) + 1
    # Whole minutes, so that the picture does not jump with each new bar.
    shown = max(20, -(-deep // 20) * 20) if buckets else 0
    longest = max((one[3] for one in buckets.values()), default=0.0)
    bars = []
    for age in range(shown - 1, -1, -1):
        _, jobs, mean, most = buckets.get(age, (age, 0, 0.0, 0.0))
        text = f"{_jobs(jobs)}, mean {seconds(mean)}, longest {seconds(most)}" if jobs else ""
        share = (most / longest, mean / longest) if longest else (0.0, 0.0)
        bars.append({"text": text, "most": share[0], "mean": share[1]})
    return {
        "bars": bars,
        "longest": seconds(longest),
        "span": seconds(shown * bucket_s),
        "step": seconds(bucket_s),
    }


def _acceptance(health: Found) -> list[Found]:
    recent = _map(health, "recent")
    drafted = sum(count for rows, count in _map(recent, "forwards_by_width").items() if rows != "1")
    counts = recent.get("accepted_by_depth", [])
    return [
        {"label": f"depth {depth}", "text": f"{100 * count / drafted:.0f} %", "share": min(1.0, count / drafted)}
        for depth, count in enumerate(counts, start=1)
        if drafted
    ]


def _widths(health: Found) -> list[Found]:
    counts = _map(_map(health, "recent"), "forwards_by_width")
    total = sum(counts.values())
    return [
        {
            "label": "1 row" if rows == "1" else f"{rows} rows",
            "text": f"{count} ({100 * count / total:.0f} %)",
            "share": count / total,
        }
        for rows, count in counts.items()
        if total
    ]


def _worker(health: Found) -> list[list[str]]:
    worker, broker, journal = (_map(health, name) for name in ("worker", "broker", "journal"))
    info, hyper = _map(worker, "info"), _map(_map(health, "scheduler"), "hyper")
    versions = {**_map(info, "versions"), "mtplx": broker.get("version")}
    mode = _map(health, "scheduler").get("mode", "")
    rows = [
        ("state", _state(worker)),
        ("model", worker.get("model")),
        ("device", " ".join(str(info[name]) for name in ("device", "dtype") if info.get(name))),
        ("scheduler", f"{mode} ({hyper['stage']})" if hyper.get("stage") else mode),
        ("context", f"{worker['context']} tokens" if "context" in worker else ""),
        ("journal", _journal(journal)),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version)),
    ]
    return [[name, str(value)] for name, value in rows if value]


def _journal(journal: Found) -> str:
    told = [str(journal.get("state", "")), size(journal["bytes"]) if "bytes" in journal else ""]
    return ", ".join(one for one in told if one)


def _state(worker: Found) -> str:
    state = str(worker.get("state", "unknown"))
    lost = f"the last one was lost: {worker['last_loss']}" if worker.get("last_loss") else ""
    if state == "absent" and lost:
        return f"absent; {lost}, pid {worker.get('lost_pid')}"
    return f"{state}, pid {worker['pid']}" if "pid" in worker else state


def _fault(one: Found) -> Found:
    count, what = one.get("count", 1), str(one.get("what", ""))
    who = f"job {one['admit_seq']}" if one.get("admit_seq") is not None else what
    return {
        "at": of_day(one.get("at", 0.0)),
        "who": who,
        "code": one.get("code", ""),
        "text": one.get("meaning", ""),
        "count": "once" if count == 1 else f"{count} times",
    }
