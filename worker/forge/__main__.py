"""`python -m worker.forge MODEL --out DIR`: makes a head; `mtplx forge` starts this."""

from __future__ import annotations

import sys
from time import perf_counter
from typing import Any

import click

from mtplx.cli.forge import forge_options
from mtplx.errors import Exit, MtplxError
from mtplx.settings import Settings
from worker.forge.forge import Tools, Wish, forge


@click.command()
@forge_options
def main(**given: Any) -> None:
    """Make a multi-token prediction head for the dense MODEL, by its own text."""
    try:
        tools = Tools(say=_say, clock=perf_counter, cache_dir=Settings.load({}).cache_dir)
        forge(Wish(**given), tools)
    except MtplxError as error:
        _say(f"mtplx-forge: {error}")
        sys.exit(int(error.exit_code))
    except OSError as error:
        why = error.strerror or error
        _say(f"mtplx-forge: {given['out']} cannot be written ({why}); make room, or choose another --out.")
        sys.exit(int(Exit.FAILED))


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
