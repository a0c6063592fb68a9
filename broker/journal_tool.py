"""The program behind `mtplx journal`; it reads its settings from the environment."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import click

from broker import journal_open
from broker.journal_file import hold
from broker.journal_rows import VERSION
from broker.journal_salvage import Report, salvage
from mtplx.cli.program import run_program
from mtplx.errors import JournalError
from mtplx.paths import private_folder
from mtplx.settings import Settings


def counts(folder: Path) -> dict[str, Any]:
    """What the journal in *folder* holds, after all of it was checked; a broker may be writing it.

    Raises:
        JournalError: there is none, it is damaged, or another version made it.
    """
    path = folder / journal_open.NAME
    found = journal_open.check(path)
    if found.meta is None:
        raise JournalError(f"There is no journal in {folder}; name its folder by --state-dir.")
    buried = len(found.buried)
    return {
        "path": str(path),
        "layout": VERSION,
        "made_by": found.meta.program,
        "commits": found.meta.commits,
        "jobs": {"open": len(found.live) - found.ended - buried, "ended": found.ended, "buried": buried},
        "tokens": found.tokens,
        "next_admit_seq": found.meta.admit_seq,
        "bytes": path.stat().st_size,
        "log_bytes": _size(journal_open.log_of(path)),
    }


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def sentences(report: Report) -> list[str]:
    """What a salvage did, for people."""
    told = [
        f"Jobs kept: {report.kept} ({report.waiting} open, {report.ended} ended, {report.buried} buried).",
        f"The damaged files are now {report.moved_to} and what begins so; they hold prompts.",
    ]
    if report.begun_anew:
        told.insert(1, f"{report.begun_anew} of them begin anew: their attempts and answers could not be read.")
    if report.shortened:
        told.insert(1, f"{report.shortened} of them lost the end of what was drawn.")
    if report.lost or not report.counted:
        told.insert(
            1, f"Jobs lost: {report.lost}{'' if report.counted else ', or more: they could not be counted'}."
        )
    return told


@click.group()
def main() -> None:
    """What `mtplx journal` does."""


@main.command()
@click.option("--json", "as_json", is_flag=True)
def info(as_json: bool) -> None:
    """Print what the journal holds."""
    run_program("mtplx", partial(_info, as_json=as_json), {})


def _info(settings: Settings, *, as_json: bool) -> None:
    report = counts(settings.state_folder)
    if as_json:
        click.echo(json.dumps(report, indent=2))
        return
    report["jobs"] = ", ".join(f"{count} {name}" for name, count in report["jobs"].items())
    for name, value in report.items():
        click.echo(f"{name:<16} {value}")


@main.command("salvage")
def salvage_command() -> None:
    """Put a new journal in the place of a damaged one."""
    run_program("mtplx", _salvage, {})


def _salvage(settings: Settings) -> None:
    folder = private_folder(settings.state_folder, "--state-dir")
    held = hold(folder)
    try:
        report = salvage(folder)
    finally:
        os.close(held)
    if report is None:
        click.echo(f"The journal in {folder} is whole; nothing was done.")
        return
    for sentence in sentences(report):
        click.echo(sentence)


if __name__ == "__main__":
    main()
