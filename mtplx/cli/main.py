"""`mtplx`: the command line. Settings may stand before the subcommand or after it."""

from __future__ import annotations

from typing import Any

import click

import mtplx
from mtplx.cli.batch import batch
from mtplx.cli.demo import demo
from mtplx.cli.doctor import doctor
from mtplx.cli.forge import forge
from mtplx.cli.inspect import inspect
from mtplx.cli.jobs import jobs
from mtplx.cli.journal import journal
from mtplx.cli.keys import keys
from mtplx.cli.ops import cancel, health
from mtplx.cli.options import settings_options
from mtplx.cli.probe import probe
from mtplx.cli.pull import pull
from mtplx.cli.run import INTERRUPTED, run
from mtplx.cli.serve import serve
from mtplx.cli.service import service
from mtplx.cli.top import top
from mtplx.cli.trace import trace
from mtplx.errors import MtplxError, WireError
from mtplx.logs import printable


def for_people(error: MtplxError) -> str:
    """The sentence of *error* for somebody at a terminal, who has no ids and no fields of a message."""
    told = str(error).replace("submit it again under a new id", "run it again")
    if isinstance(error, WireError) and error.retry_after_ms is not None:
        told = told.replace("after retry_after_ms", f"in {error.retry_after_ms} ms")
    return told


class Commands(click.Group):
    """Tells an expected error in one sentence, with its exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except MtplxError as error:
            click.echo(f"mtplx: {printable(for_people(error))}", err=True)
            ctx.exit(int(error.exit_code))
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)


@click.group(cls=Commands, invoke_without_command=True)
@settings_options
@click.version_option(mtplx.__version__)
@click.pass_context
def main(context: click.Context, /, **flags: Any) -> None:
    """A local LLM service: one device, one line, the whole device for one request.

    Settings without a command mean `mtplx serve`.
    """
    context.obj = {name: value for name, value in flags.items() if value is not None}
    if context.invoked_subcommand is None:
        if context.obj:
            context.invoke(serve)
        else:
            click.echo(context.get_help())


for command in (
    *(serve, service, run, batch, health, jobs, cancel),
    *(top, trace, doctor, journal, keys, pull, inspect, probe, forge, demo),
):
    main.add_command(command)


if __name__ == "__main__":
    main()
