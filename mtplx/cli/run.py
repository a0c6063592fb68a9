"""`mtplx run PROMPT`: one job, streamed to the terminal. The job options are shared with nothing else."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, Final

import click

from mtplx.cli.connect import connect
from mtplx.cli.options import CONNECTION, connection_options, load_settings
from mtplx.cli.signals import ctrl_c_by_sigterm
from mtplx.client import Stream
from mtplx.errors import Exit, MtplxError
from mtplx.stream import Result

INTERRUPTED: Final = 130
# After Ctrl-C the last word must come soon: a step or a prefill chunk away.
LAST_WORD_S: Final = 30.0

_JOB_OPTIONS: Final[tuple[Callable[[Any], Any], ...]] = (
    click.option("--max-tokens", type=int, help="Longest answer, in tokens (1024)."),
    click.option("--temperature", type=float, help="0 is greedy (the default)."),
    click.option("--top-p", type=float, help="Nucleus: keep this much probability (1 = off)."),
    click.option("--top-k", type=int, help="Keep this many tokens (0 = off)."),
    click.option("--min-p", type=float, help="Keep tokens of at least this share of the best one (0 = off)."),
    click.option("--seed", type=int, help="Same seed, same text; drawn by the broker when missing."),
    click.option("--stop", multiple=True, help="End before this text; may be given several times."),
)


def job_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that become job fields."""
    for option in reversed(_JOB_OPTIONS):
        command = option(command)
    return command


@click.command()
@click.argument("prompt", required=False)
@click.option("--system", help="System message before the prompt.")
@click.option("--raw", is_flag=True, help="Send the prompt as it is, without the model's chat template.")
@click.option("--json", "as_json", is_flag=True, help="Print the whole last word as one JSON object.")
@click.option("--stats", is_flag=True, help="Print times and speed on stderr.")
@job_options
@connection_options
@click.pass_context
def run(context: click.Context, /, prompt: str | None, as_json: bool, stats: bool, **given: Any) -> None:
    """Run one PROMPT (`-` reads it from stdin) and stream the answer.

    The prompt is the user's message of a chat, unless --raw is given.
    """
    connection = {name: given.pop(name) for name in ("config", *CONNECTION)}
    settings = load_settings(connection, context.obj)
    fields = job_fields(read_prompt(prompt), **given)
    with ctrl_c_by_sigterm(), connect(settings) as client:
        stream = client.submit(**fields)
        result, code = _follow(stream, show=not as_json)
    if as_json and result is not None:
        click.echo(json.dumps(result.to_map(), ensure_ascii=False))
    if stats and result is not None:
        click.echo(summary(result), err=True)
    context.exit(code)


def read_prompt(prompt: str | None) -> str:
    """The prompt of the command line, or of stdin.

    Raises:
        UsageError: there is none.
    """
    if prompt is None:
        raise click.UsageError("Missing argument 'PROMPT'; `-` reads it from stdin.")
    if prompt == "-":
        try:
            prompt = sys.stdin.buffer.read().decode()
        except UnicodeDecodeError as error:
            raise click.UsageError(f"stdin is not UTF-8: {error.reason} at byte {error.start}.") from None
    if not prompt.strip():
        raise click.UsageError("The prompt is empty.")
    return prompt


def job_fields(prompt: str, *, system: str | None, raw: bool, **given: Any) -> dict[str, Any]:
    """The job of the command line; only what was given travels."""
    if raw and system is not None:
        raise click.UsageError("--system needs the chat template; leave out --raw.")
    fields = {name: value for name, value in given.items() if value not in (None, ())}
    if raw:
        return {"prompt": prompt, **fields}
    messages = [{"role": "system", "content": system}] if system is not None else []
    return {"messages": [*messages, {"role": "user", "content": prompt}], **fields}


def summary(result: Result) -> str:
    """One line on how a job went."""
    timings, tokens = result.timings, len(result.ids)
    parts = [f"{tokens} tokens", result.finish_reason, f"seed {result.seed}"]
    for name, label in (("queue_wait_s", "waited"), ("time_to_first_token_s", "first token after")):
        if timings.get(name) is not None:
            parts.append(f"{label} {timings[name]:.2f} s")
    speed = tokens_per_s(result)
    if speed is not None:
        parts.append(f"{speed:.1f} tokens/s")
    return ", ".join([*parts, f"sha256 {result.sha256[:16]}"])


def tokens_per_s(result: Result) -> float | None:
    """Speed of the tokens after the first; None where there are too few to tell."""
    decode_s = result.timings.get("decode_s")
    return (len(result.ids) - 1) / decode_s if decode_s and len(result.ids) > 1 else None


def _follow(stream: Stream, *, show: bool) -> tuple[Result | None, int]:
    shown = False
    try:
        for piece in stream:
            if show:
                shown = True
                click.echo(piece.text, nl=False)
        result = stream.result()
    except KeyboardInterrupt:
        stream.cancel()
        return _last_word(stream, show=show), INTERRUPTED
    except MtplxError:
        # What is said about it begins a line of its own.
        if shown:
            click.echo()
        raise
    if show:
        click.echo()
    if result.finish_reason == "cancelled":
        click.echo(f"cancelled after {len(result.ids)} tokens", err=True)
        return result, Exit.FAILED
    return result, Exit.OK


def _last_word(stream: Stream, *, show: bool) -> Result | None:
    """What is left of an interrupted job; None where no last word comes in time, or it is an error."""
    try:
        result = stream.result(LAST_WORD_S)
    except (MtplxError, TimeoutError) as error:
        why = f"no last word within {LAST_WORD_S:.0f} s" if isinstance(error, TimeoutError) else str(error)
        click.echo(f"\ninterrupted: {why}", err=True)
        return None
    if show:
        click.echo()
    click.echo(f"{result.finish_reason} after {len(result.ids)} tokens", err=True)
    return result
