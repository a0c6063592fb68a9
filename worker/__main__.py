"""`mtplx-worker`: loads the model, warms it up, and serves the broker one job at a time."""

from __future__ import annotations

import signal
import sys

# Before all that takes time: until the loop hears signals there is nothing to drain, and a stop ends with code 0.
for _stop in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_stop) is not signal.SIG_IGN:
        signal.signal(_stop, lambda *_: sys.exit(0))

from functools import partial
from typing import Any

import click

from mtplx.cli.options import settings_options
from mtplx.cli.program import MANAGERS, Program, run_program
from mtplx.errors import SettingsError
from mtplx.logs import take_over
from mtplx.settings import Settings, quiet_libraries


def serve(settings: Settings, *, watch_stdin: bool = False) -> None:
    """Load, warm up, and run jobs until SIGTERM, SIGINT or SIGHUP.

    Raises:
        ModelFilesError: the model is missing or incomplete.
        WorkerRefusedError: the broker will not take this worker.
    """
    quiet_libraries()
    try:
        # MLX starts its device on import: a wrong setting must be told before that.
        from worker.runtime import start  # noqa: PLC0415
    except ImportError as error:
        raise SettingsError(f"The worker needs the extra: pip install 'mtplx-line[worker]' ({error}).") from error
    take_over("transformers", "huggingface_hub")
    worker = start(settings, watch_stdin=watch_stdin)
    try:
        worker.serve()
    finally:
        worker.close()


@click.command("mtplx-worker", cls=Program)
@click.option("--exit-with-stdin", is_flag=True, hidden=True, help="Stop when stdin ends.")
@click.option(
    "--service", type=click.Choice(MANAGERS), help="Which service manager starts this, in a service file."
)
@settings_options
def main(exit_with_stdin: bool, service: str | None, **flags: Any) -> None:
    """The mtplx worker: one model, one device, one job at a time."""
    run_program("mtplx-worker", partial(serve, watch_stdin=exit_with_stdin), flags, service=service)


if __name__ == "__main__":
    main()
