"""Ends the process of a worker that was given up and cannot end itself, on this machine alone."""

from __future__ import annotations

import logging
import os
import signal

from mtplx.messages import Ready
from mtplx.process import host_id, look

log = logging.getLogger("mtplx.broker")

KILLED = "killed"
GONE = "gone"


def end(ready: Ready) -> str:
    """Kill the process that said *ready*, if it is certainly that one and a worker.

    Returns:
        What came of it, for health: KILLED, GONE, or why it was left alone.
    """
    found = _end(ready)
    log.warning("worker process %d, given up: %s", ready.pid, found)
    return found


def _end(ready: Ready) -> str:
    if not ready.host or not ready.born:
        return "left alone: it does not say where it runs; end it by hand if it does not come back"
    if ready.host != host_id():
        return (
            "left alone: it runs on another machine or in another container; end it there if it does not come back"
        )
    found = look(ready.pid)
    if found is None or found.born != ready.born:
        return GONE
    if found.user != os.getuid():
        return f"left alone: it belongs to user {found.user}; end it by hand if it does not come back"
    if ready.pid == os.getpid() or not _is_worker(found.program):
        return f"left alone: it runs {found.program[:64]}, which is no worker"
    return KILLED if _kill(ready) else GONE


def _is_worker(program: str) -> bool:
    # mtplx-worker, the module `worker`, and the worker doubles.
    return program.endswith("worker") or program == "mtplx.testing"


def _kill(ready: Ready) -> bool:
    """Kill by a handle where the system has such: an id may be another process's by now."""
    handle = _handle(ready.pid)
    try:
        now = look(ready.pid)
        if now is None or now.born != ready.born:
            return False
        if handle is None:
            os.kill(ready.pid, signal.SIGKILL)
        else:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except OSError:
        return False
    finally:
        if handle is not None:
            os.close(handle)
    return True


def _handle(pid: int) -> int | None:
    """A handle of the process; None where there are no such things, or a sandbox lets nobody have one."""
    try:
        return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
    except OSError:
        return None
