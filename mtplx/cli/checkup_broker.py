"""What `mtplx doctor` learns from the broker: whether it answers, and what its health tells."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from mtplx import __version__
from mtplx.cli.checkup import Finding, note, well, wrong
from mtplx.cli.connect import listens
from mtplx.client import Client
from mtplx.errors import BrokerUnreachableError, SettingsError, WireError
from mtplx.overview import overview
from mtplx.settings import Settings, flag

ANSWER_S: Final = 3.0
NO_WORKER: Final = (
    "Its log says why it is not there (`mtplx service status` names that of a service). "
    "Start one: mtplx-worker, or mtplx serve for both."
)
# Counters that grow where something is set up wrongly, and what to do then.
COUNTERS: Final = {
    "workers_refused": (
        "workers were refused",
        "Start broker and worker with the same --scheduler-mode, and one worker.",
    ),
    "keys_refused": ("connections came with a key that is not allowed", "Allow it: mtplx keys allow KEY."),
    "bad_frames": ("messages were no MTX/1", "Something else may be speaking to this endpoint."),
    "spans_failed": ("spans did not reach the collector", "See whether it runs, and --otlp-endpoint."),
    "internal_errors": ("faults in the broker itself", "Its log has the tracebacks; please report them."),
}


def of_the_broker(settings: Settings) -> Iterator[Finding]:
    """Whether it runs, answers, and is well."""
    endpoint = settings.endpoint("front")
    if not listens(endpoint):
        yield wrong(
            "broker", f"No broker listens at {endpoint}.", "Start one: mtplx serve, or mtplx service start."
        )
        return
    try:
        with Client(settings=settings, timeout=ANSWER_S) as client:
            health = client.health()
    except BrokerUnreachableError as error:
        yield wrong("broker", f"Something listens at {endpoint}, but: {error}", _hung(settings))
    except WireError as error:
        yield wrong("broker", f"What listens at {endpoint} answers: {error}", "Update the older one of the two.")
    except SettingsError:
        # The keys were looked at already.
        yield wrong("broker", f"A broker listens at {endpoint}, and cannot be asked without a key.", "See keys.")
    else:
        yield from judged(health, settings)


def _hung(settings: Settings) -> str:
    """Who to look at, where the lock beside the socket tells it."""
    if settings.server_key or settings.key or settings.encrypted("front"):
        return "If it is the key, who runs the broker allows it; if the broker hangs, its log may say why."
    lock = Path(f"{settings.endpoint('front').removeprefix('ipc://')}.lock")
    try:
        pid = lock.read_text().strip()
    except (OSError, ValueError):
        pid = ""
    who = f"process {pid}" if pid.isdigit() else "the broker"
    return f"If {who} hangs or is stopped (Ctrl-Z), its log may say why; end it and start it again."


def judged(health: dict[str, Any], settings: Settings) -> Iterator[Finding]:
    """What *health* tells of what is wrong."""
    broker, worker, line = (health.get(name) or {} for name in ("broker", "worker", "line"))
    shown = overview(health)
    yield well("broker", f"The broker answers (pid {broker.get('pid')}). {shown['headline']}: {shown['sentence']}")
    yield from _versions(broker, worker)
    service = health.get("service", {})
    if not service.get("able", False) and service:
        absent = worker.get("state") == "absent"
        do = NO_WORKER if absent else "See its log, and the disk."
        yield wrong("worker" if absent else "broker", service.get("why", ""), do)
    elif worker.get("state") != "absent":
        yield well("worker", f"A worker is {worker.get('state')} with {worker.get('model')}.")
    if worker.get("lost_process"):
        yield note("worker", f"Of the worker that was lost last: {worker['lost_process']}.")
    if line.get("depth", 0) >= line.get("limit_jobs", 1):
        yield wrong(
            "line",
            f"The line is full with {line['depth']} jobs; more are refused.",
            f"Wait, or raise {flag('queue_jobs')}.",
        )
    ours, theirs = str(settings.scheduler_mode), health.get("scheduler", {}).get("mode")
    if theirs != ours:
        yield note(
            "settings",
            f"The broker runs in {theirs} mode; these settings say {ours}.",
            "Start it again to change it.",
        )
    for name, (what, do) in COUNTERS.items():
        count = health.get("counters", {}).get(name, 0)
        if count:
            yield note("broker", f"{count} {what} since its start.", do)


def _versions(broker: dict[str, Any], worker: dict[str, Any]) -> Iterator[Finding]:
    told = {"broker": broker.get("version"), "worker": worker.get("info", {}).get("versions", {}).get("mtplx")}
    for who, version in told.items():
        if version is not None and version != __version__:
            yield wrong(
                "versions",
                f"The {who} runs mtplx {version}, and this command is {__version__}.",
                f"Start the {who} again after an update, or use the command of its own virtual environment.",
            )
