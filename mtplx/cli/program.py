"""What the broker's and the worker's programs share: settings, logging, and how each failure ends.

Started by a service manager (`--service`), an error that would last is left in a file for `mtplx service status`,
and, under launchd, the process ends with exit code 0: launchd knows no other way to leave a program down.
"""

from __future__ import annotations

import faulthandler
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

import click

from mtplx import last_error
from mtplx.cli.options import load_settings
from mtplx.errors import EXITS, Exit, MtplxError
from mtplx.logs import bound_stderr, printable, set_up
from mtplx.settings import Settings

MANAGERS: Final = ("launchd", "systemd")
log = logging.getLogger("mtplx")


class Program(click.Command):
    """A command whose wrong options end a service as other wrong settings do."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """The rest of *args*, as in click."""
        try:
            return super().parse_args(ctx, list(args))
        except click.UsageError as error:
            if "--service" not in args:
                raise
            asked = dict(zip(args, [*args[1:], ""], strict=True))
            folder = Path(asked.get("--log-dir") or ".")
            _end(str(self.name), Exit.SETTINGS, error.format_message(), service=asked["--service"], folder=folder)


def run_program(
    name: str, serve: Callable[[Settings], None], options: Mapping[str, Any], *, service: str | None = None
) -> None:
    """Load the settings and *serve*; ends the process with the exit code of whatever went wrong.

    service: which of MANAGERS started this process; None, a person or another program.
    """
    # Known before the settings are, which may be what is wrong.
    folder = Path(options.get("log_dir") or ".") if service else None
    to_file = False
    try:
        if service:
            bound_stderr()
            _tell_crashes()
        settings = load_settings(options)
        set_up(settings, name)
        to_file = settings.log_dir is not None
        serve(settings)
    except MtplxError as error:
        if to_file:
            log.error("%s", error)  # noqa: TRY400 - the sentence says it all
        _end(name, error.exit_code, str(error), service=service, folder=folder)
    except Exception as error:
        log.exception("failed")
        why = f"a fault in mtplx ({type(error).__name__}); the log says more"
        _end(name, Exit.INTERNAL, why if service else "", service=service, folder=folder)
    if folder is not None:
        last_error.clear(folder, name)


def _tell_crashes() -> None:
    if sys.stderr is not None:
        faulthandler.enable()


def _end(name: str, code: Exit, why: str, *, service: str | None, folder: Path | None) -> NoReturn:
    """Tell why in one line, where a person looks for it, and end the process."""
    if why:
        click.echo(f"{name}: {printable(why)}", err=True)
    if folder is not None:
        last_error.note(folder, name, code, printable(why))
    stay_down = service == "launchd" and not EXITS[code].again
    sys.exit(Exit.OK if stay_down else code)
