"""`mtplx-broker`: reads the settings, takes the endpoints, serves until it is told to stop."""

from __future__ import annotations

import signal
import sys

# Before all that takes time: until the loop hears signals there is nothing to drain, and a stop ends with code 0.
for _stop in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_stop) is not signal.SIG_IGN:
        signal.signal(_stop, lambda *_: sys.exit(0))

import gc
import logging
import os
import resource
import secrets
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, Final

import click

from broker import http
from broker.back import Identity
from broker.guard import check_keys
from broker.journal_file import open_journal
from broker.loop import Loop, now
from broker.machine import Machine
from broker.telemetry import open_telemetry
from mtplx import __version__
from mtplx.cli.options import settings_options
from mtplx.cli.program import MANAGERS, Program, run_program
from mtplx.http_place import AUTO
from mtplx.settings import Settings

log = logging.getLogger("mtplx.broker")

MAX_FILES: Final = 10_240
# Objects made before the collector looks for cycles among them. What waits in the line is no garbage: looking at
# it every 700 objects is a tenth of what taking a job costs.
GC_OBJECTS: Final = 20_000


def serve(settings: Settings, *, watch_stdin: bool = False, page: bool = False) -> None:
    """Run the broker until SIGTERM or SIGINT has drained it.

    page: it has an HTTP port, unless the settings say otherwise.

    Raises:
        LockedError: another broker holds the endpoints or the journal.
        JournalError: the journal is damaged, of another version, or cannot be read or written.
        SettingsError: an endpoint, a key, the trace file or the collector's address cannot be used.
    """
    if page and not settings.http:
        settings = replace(settings, http=AUTO)
    os.umask(0o077)
    check_keys(settings)
    _allow_many_files()
    gc.set_threshold(GC_OBJECTS)
    for sentence in settings.warnings():
        log.warning(sentence)
    identity = Identity(secrets.token_bytes(16), __version__, os.getpid(), now())
    with closing(open_journal(settings.state_folder, settings.durability)) as journal:
        machine = Machine(settings, identity, lambda: secrets.randbits(64), journal=journal)
        gate = machine.jobs.gate
        telemetry = open_telemetry(
            settings, identity, lambda: len(gate.line), exposed=settings.http_place is not None
        )
        gate.keep(moments=telemetry is not None, prompts=settings.trace_prompts)
        machine.restore(now())
        loop = Loop(settings, machine, telemetry, watch_stdin=watch_stdin)
        try:
            loop.bind()
            with http.serving(settings, machine, telemetry.metrics if telemetry else None) as window:
                loop.run(window)
        finally:
            loop.close()


def _allow_many_files() -> None:
    # Each connection is a file, and libzmq aborts where it may open no more; macOS starts with 256.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@click.command("mtplx-broker", cls=Program)
@click.option("--exit-with-stdin", is_flag=True, hidden=True, help="Stop when stdin ends.")
@click.option(
    "--service", type=click.Choice(MANAGERS), help="Which service manager starts this, in a service file."
)
@settings_options
def main(exit_with_stdin: bool, service: str | None, **flags: Any) -> None:
    """The mtplx broker: one line, one slot, one worker."""
    run = partial(serve, watch_stdin=exit_with_stdin, page=service is not None)
    run_program("mtplx-broker", run, flags, service=service)
    # All is closed. Else Python would once more look for cycles among all known jobs, for most of the exit's time.
    gc.freeze()


if __name__ == "__main__":
    main()
