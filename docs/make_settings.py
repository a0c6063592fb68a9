# ruff: noqa: INP001, E501 - a script beside the pages it fills; sentences of tables stay on one line
"""Fills the tables of settings.md, operate.md and troubleshooting.md: `python docs/make_settings.py`.

What stands between `<!-- begin NAME -->` and `<!-- end NAME -->` is replaced; the rest is written by hand.
"""

from __future__ import annotations

import sys
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from mtplx import settings as s
from mtplx.errors import CODES, EXITS, Exit
from mtplx.services import TABLE, Unit
from mtplx.settings import PREFIX, SchedulerMode, Settings, flag

HERE = Path(__file__).parent
# Settings that stand for one of a few words, and which.
WORDS = {
    "scheduler_mode": tuple(SchedulerMode),
    "hyper_stage": s.STAGES,
    "draft": (*s.DRAFTS[:2], "model:PATH", *s.DRAFTS[2:]),
    "batching_preset": s.PRESETS,
    "durability": s.DURABILITIES,
    "log_level": s.LOG_LEVELS,
    "log_format": s.LOG_FORMATS,
}
KINDS = {"int": "whole number", "float": "number", "bool": "true or false", "str": "text"}

EXIT_ADVICE = {
    Exit.OK: "Nothing.",
    Exit.FAILED: "The message names the job, or the command that was refused; `mtplx jobs show ID` tells how a job ended.",
    Exit.SETTINGS: "The message names flag, variable or file and what is allowed: [settings.md](settings.md).",
    Exit.MODEL_FILES: "The message names the file. Fetch the model again with `mtplx pull`, or give another `--model`.",
    Exit.LOCKED: "The message names the process. Stop it (`mtplx service stop`, or Ctrl-C in its terminal), or give this broker a `--run-dir` of its own.",
    Exit.WORKER_REFUSED: "The message has the broker's reason: another worker is live, the scheduler modes differ, or a key is not allowed ([security.md](security.md)).",
    Exit.UNREACHABLE: "Start a broker (`mtplx serve`, `mtplx service start`), or give the `--run-dir` or `--front` of the one that runs.",
    Exit.JOURNAL: "The message names the file. Make room where the disk is full; `mtplx journal info` checks, `mtplx journal salvage` saves what is whole ([journal.md](journal.md)).",
    Exit.INTERNAL: "Look into the log for the line with `failed`, and report it. A service is started again by itself.",
    Exit.STALLED: "A step took longer than `--stall-s`. Where the device is only slow, raise it; a service is started again by itself, and the job goes on.",
    Exit.LEASE_LOST: "The worker was away too long (a machine asleep, a debugger). It is started again by itself, and the job goes on.",
}

CODE_ADVICE = {
    "E_VERSION": "Update the older of client and broker.",
    "E_PROTOCOL": "A client's fault: compare with [protocol.md](protocol.md); `field` names the place.",
    "E_UNKNOWN_KIND": "As above; a newer client may speak to an older broker.",
    "E_TOO_LARGE": "Send less; `--max-job-bytes` raises the limit of a job.",
    "E_BAD_JOB": "Repair the field that `field` names.",
    "E_CONFLICT": "Submit under a new id; `mtplx jobs show ID` tells what the id stands for.",
    "E_UNKNOWN_JOB": "Submit again. Answers are kept for `--retain-s` seconds after they were read.",
    "E_QUEUE_FULL": "Wait for `retry_after_ms` and submit again; `--queue-jobs` and `--queue-bytes` make the line longer.",
    "E_DRAINING": "Submit again when the broker is back.",
    "E_EXPIRED": "Give the job more time, or find in `mtplx health` why the line is slow.",
    "E_SLOW_READER": "Read answers as they come, or raise `--retain-bytes`.",
    "E_WORKER_LOST": "Nothing; no producer sees it.",
    "E_POISON": "`mtplx jobs show ID` tells how the worker died; `mtplx jobs kick ID` runs the job again, `mtplx jobs delete ID` drops it.",
    "E_MODEL_CHANGED": "Submit under a new id.",
    "E_ANSWER_LOST": "Submit under a new id.",
    "E_JOURNAL": "Make room on the disk of `--state-dir`; the broker takes jobs again by itself.",
    "E_NUMERIC": "The model's files are damaged, or it overflows in its type: fetch it again, or try another form of it.",
    "E_INTERNAL": "Look into the worker's log for the job's id, and report it.",
    "E_WORKER_EXISTS": "Stop one of the two workers.",
    "E_WORKER_MODE": "Give broker and worker the same `--scheduler-mode`.",
    "E_UNKNOWN_WORKER": "Nothing; the worker says READY again.",
}


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def settings() -> str:
    """One row for each setting."""
    rows = [
        [
            f"`{flag(item.name)}`",
            f"`{PREFIX}{item.name.upper()}`",
            _allowed(item),
            _default(item),
            item.metadata["help"],
        ]
        for item in fields(Settings)
    ]
    return table(["flag", "variable", "value", "default", "meaning"], rows)


def _allowed(item: Field[Any]) -> str:
    if item.name in WORDS:
        return ", ".join(f"`{word}`" for word in WORDS[item.name])
    low, high = s._RANGES.get(item.name, (None, None))  # noqa: SLF001 - the ranges are told here and nowhere else
    kind = "path" if "Path" in str(item.type) else KINDS[str(item.type)]
    return kind if low is None else f"{kind}, {low:,g} to {high:,.12g}"


def _default(item: Field[Any]) -> str:
    if item.default is MISSING:
        return {"run_dir": "`~/.mtplx/run`", "cache_dir": "`~/.cache/mtplx`, on macOS `~/Library/Caches/mtplx`"}[
            item.name
        ]
    if item.default in (None, ""):
        return "none"
    return f"`{str(item.default).lower() if isinstance(item.default, bool) else item.default}`"


def exits() -> str:
    """One row for each exit code."""
    rows = [
        [str(int(code)), ending.meaning, "yes" if ending.again else "no", EXIT_ADVICE[code]]
        for code, ending in EXITS.items()
    ]
    return table(["code", "meaning", "started again", "what to do"], rows)


def codes() -> str:
    """One row for each error code of the wire."""
    rows = [
        [f"`{name}`", "yes" if code.retryable else "no", code.meaning, CODE_ADVICE[name]]
        for name, code in CODES.items()
    ]
    return table(["code", "retryable", "meaning", "what to do"], rows)


def services() -> str:
    """What both managers are asked for, with the values of the defaults."""
    unit = Unit(
        name="broker",
        command=("/...",),
        folder=Path("/..."),
        logs=Path("/..."),
        environment={"HOME": "/..."},
        stop_s=35,
    )
    rows = []
    for promise in TABLE:
        lines = [line for found in promise.systemd(unit).values() for line in found]
        short = [line if len(line) < 44 else line.partition("=")[0] for line in lines]
        launchd = [f"`{key}`{_shown(value)}" for key, value in promise.launchd(unit).items()]
        rows.append([promise.text, ", ".join(launchd), ", ".join(f"`{line}`" for line in short)])
    return table(["promise", "launchd", "systemd"], rows)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "".join(f" `{key}` {str(one).lower()}" for key, one in value.items())
    if isinstance(value, bool | int):
        return f" {str(value).lower()}"
    return ""


PAGES = {
    "settings.md": {"settings": settings},
    "operate.md": {"services": services},
    "troubleshooting.md": {"exits": exits, "codes": codes},
}


def filled(name: str, page: str) -> str:
    """The *page* of that *name* with every generated section replaced.

    Raises:
        ValueError: a section of the code has no place on the page.
    """
    for section, made in PAGES[name].items():
        begin, end = f"<!-- begin {section} -->", f"<!-- end {section} -->"
        before, found, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"{name} has no place for {section}.")
        page = f"{before}{begin}\n\n{made()}\n\n{end}{after}"
    return page


if __name__ == "__main__":
    for name in PAGES:
        path = HERE / name
        path.write_text(filled(name, path.read_text()))
        sys.stdout.write(f"{path} written\n")
