"""`mtplx-worker`: loads the model, warms it up, and serves the broker one job at a time."""

from __future__ import annotations

import logging
import sys
from typing import Any

import click

from mtplx.cli.options import load_settings, settings_options
from mtplx.errors import Exit, MtplxError, SettingsError
from mtplx.settings import Settings

log = logging.getLogger("mtplx.worker")


def serve(settings: Settings, *, watch_stdin: bool = False) -> None:
    """Load, warm up, and run jobs until SIGTERM or SIGINT.

    Raises:
        ModelFilesError: the model is missing or incomplete.
        WorkerRefusedError: the broker will not take this worker.
    """
    try:
        # MLX starts its device on import: a wrong setting must be told before that.
        from worker.runtime import start  # noqa: PLC0415
    except ImportError as error:
        raise SettingsError(f"The worker needs the extra: pip install 'mtplx-line[worker]' ({error}).") from error
    worker = start(settings, watch_stdin=watch_stdin)
    try:
        worker.serve()
    finally:
        worker.close()


@click.command()
@click.option("--exit-with-stdin", is_flag=True, hidden=True, help="Stop when stdin ends.")
@settings_options
def main(exit_with_stdin: bool, **flags: Any) -> None:
    """The mtplx worker: one model, one device, one job at a time."""
    try:
        settings = load_settings(flags)
        logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(name)s %(message)s")
        serve(settings, watch_stdin=exit_with_stdin)
    except MtplxError as error:
        click.echo(f"mtplx-worker: {error}", err=True)
        sys.exit(error.exit_code)
    except Exception:
        log.exception("the worker failed")
        sys.exit(Exit.INTERNAL)


if __name__ == "__main__":
    main()
