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
from functools import partial
from typing import Any, Final

import click

from broker.back import Identity
from broker.guard import check_keys
from broker.journal_file import open_journal
from broker.loop import Loop, Tracer, now
from broker.machine import Machine
from mtplx import __version__
from mtplx.cli.options import settings_options
from mtplx.cli.program import run_program
from mtplx.errors import SettingsError
from mtplx.settings import Settings

log = logging.getLogger("mtplx.broker")

MAX_FILES: Final = 10_240
# Objects made before the collector looks for cycles among them. What waits in the line is no garbage: looking at
# it every 700 objects is a tenth of what taking a job costs.
GC_OBJECTS: Final = 20_000


def serve(settings: Settings, *, watch_stdin: bool = False) -> None:
    """Run the broker until SIGTERM or SIGINT has drained it.

    Raises:
        LockedError: another broker holds the endpoints or the journal.
        JournalError: the journal is damaged, of another version, or cannot be read or written.
        SettingsError: an endpoint, a key, the trace file or the collector's address cannot be used.
    """
    os.umask(0o077)
    check_keys(settings)
    _allow_many_files()
    gc.set_threshold(GC_OBJECTS)
    for sentence in settings.warnings():
        log.warning(sentence)
    identity = Identity(secrets.token_bytes(16), __version__, os.getpid(), now())
    tracer = _tracer(settings, identity)
    with closing(open_journal(settings.state_folder, settings.durability)) as journal:
        machine = Machine(
            settings, identity, lambda: secrets.randbits(64), journal=journal, keep_moments=tracer is not None
        )
        machine.restore(now())
        loop = Loop(settings, machine, tracer, watch_stdin=watch_stdin)
        try:
            loop.bind()
            loop.run()
        finally:
            loop.close()


def _allow_many_files() -> None:
    # Each connection is a file, and libzmq aborts where it may open no more; macOS starts with 256.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _tracer(settings: Settings, identity: Identity) -> Tracer | None:
    if settings.trace_file is None and not settings.otlp_endpoint:
        return None
    try:
        # An optional extra: without tracing the broker runs without it.
        from broker import tracing  # noqa: PLC0415
    except ImportError as error:
        raise SettingsError("Tracing needs the extra: pip install 'mtplx-line[otlp]'.") from error
    try:
        exporters = tracing.exporters(settings.trace_file, settings.otlp_endpoint)
    except (OSError, ValueError) as error:
        where = f"--trace-file {settings.trace_file}" if isinstance(error, OSError) else "--otlp-endpoint"
        raise SettingsError(f"Spans cannot be written to {where}: {error}.") from error
    return tracing.SpanTracer(exporters, version=identity.version, boot_id=identity.boot_id)


@click.command()
@click.option("--exit-with-stdin", is_flag=True, hidden=True, help="Stop when stdin ends.")
@settings_options
def main(exit_with_stdin: bool, **flags: Any) -> None:
    """The mtplx broker: one line, one slot, one worker."""
    run_program("mtplx-broker", partial(serve, watch_stdin=exit_with_stdin), flags)


if __name__ == "__main__":
    main()
