"""`mtplx top`: the page of the broker in a terminal. It stands still while nothing changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mtplx.cli.connect import connect
from mtplx.cli.options import connection_options, load_settings
from mtplx.cli.signals import Signals
from mtplx.client import Client
from mtplx.errors import BrokerUnreachableError, WireError
from mtplx.logs import printable
from mtplx.overview import of_day, overview
from mtplx.settings import Settings

EVERY_S: Final = 1.0
# A broker that says nothing for so long is told to be gone.
PATIENCE_S: Final = 2.0
PIPE_WIDTH: Final = 110
BAR: Final = 24
EIGHTHS: Final = " ▁▂▃▄▅▆▇█"
TONES: Final = {"idle": "bold green", "busy": "bold blue", "wrong": "bold red"}


@click.command()
@click.option("--once", is_flag=True, help="Print it once and end; so it is where the output is no terminal.")
@connection_options
@click.pass_context
def top(context: click.Context, /, once: bool, **flags: Any) -> None:
    """Watch the line, the running job and the worker, until Ctrl-C."""
    settings = load_settings(flags, context.obj)
    console = Console()
    if once or not console.is_terminal:
        if not console.is_terminal:
            console.width = PIPE_WIDTH
        with connect(settings) as client:
            console.print(drawn(overview(client.health())))
        return
    with Signals() as signals:
        watch(Watcher(settings), console, signals.pause, lambda: signals.count > 0)


class Watcher:
    """Asks the broker, as long as it takes, also across its end and the next one's start."""

    def __init__(self, settings: Settings, *, clock: Callable[[], float] = time.time) -> None:
        self._settings = settings
        self._clock = clock
        self._client: Client | None = None
        self._shown: dict[str, Any] = {}
        self._answered: float | None = None

    def look(self) -> dict[str, Any]:
        """What is to be shown now: the overview, or the last one under the news that the broker is gone."""
        try:
            if self._client is None:
                self._client = Client(settings=self._settings, timeout=PATIENCE_S)
            self._shown = overview(self._client.health())
            self._answered = self._clock()
        except (BrokerUnreachableError, WireError) as error:
            last = f"It last answered at {of_day(self._answered)}. " if self._answered else ""
            told = {"tone": "wrong", "headline": "The broker is gone", "sentence": printable(f"{last}{error}")}
            return {**self._shown, **told}
        return self._shown

    def close(self) -> None:
        """Say goodbye."""
        if self._client is not None:
            self._client.close()


def watch(watcher: Watcher, console: Console, pause: Callable[[float], None], ended: Callable[[], bool]) -> None:
    """Show what *watcher* sees, on a screen of its own, until *ended*."""
    before: dict[str, Any] | None = None
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while not ended():
                found = watcher.look()
                size = {**found, "": tuple(console.size)}
                if size != before:
                    before = size
                    live.update(drawn(found), refresh=True)
                pause(EVERY_S)
    finally:
        watcher.close()


def drawn(shown: dict[str, Any]) -> RenderableType:
    """An overview as a terminal shows it."""
    head = [Text(shown["headline"], style=TONES[shown["tone"]]), Text(shown["sentence"], style="dim"), Text()]
    if "figures" not in shown:
        return Group(*head)
    sides = Table.grid(expand=True, padding=(0, 3))
    sides.add_column(ratio=5)
    sides.add_column(ratio=4)
    left = Group(*_line(shown), *_faults(shown), *_worker(shown))
    right = Group(*_waits(shown["waits"]), *_bars("Drafts accepted, by depth", shown["acceptance"]))
    right = Group(right, *_bars("Forwards by width", shown["widths"]))
    sides.add_row(left, right)
    return Group(*head, _figures(shown["figures"]), Text(), sides)


def _figures(figures: list[dict[str, Any]]) -> Table:
    table = Table.grid(expand=True, padding=(0, 3))
    for _ in figures:
        table.add_column(ratio=1)
    table.add_row(*(Text(one["value"], style="bold") + Text(f" {one['label']}") for one in figures))
    table.add_row(*(Text(one["note"], style="red" if one["wrong"] else "dim") for one in figures))
    return table


def _line(shown: dict[str, Any]) -> list[RenderableType]:
    parts: list[RenderableType] = [Text("The line", style="bold")]
    running = shown["running"]
    if running is not None:
        parts.append(Text(f"{running['name']}  {running['phase']}  {running['speed']}", style="blue"))
        if running["share"] is not None:
            parts.append(_bar(running["share"], 2 * BAR))
        notes = [running["progress"], f"running for {running['since']}", running["note"]]
        parts.append(Text("; ".join(note for note in notes if note), style="dim"))
    rows = [[one["place"], one["name"], one["note"], one["size"], one["waited"]] for one in shown["line"]]
    parts.append(_table(rows, right=(3, 4)) if rows else Text("Nobody waits.", style="dim"))
    if shown["line_more"]:
        parts.append(Text(f"and {shown['line_more']} more", style="dim"))
    return [*parts, Text()]


def _faults(shown: dict[str, Any]) -> list[RenderableType]:
    rows = [[one["at"], one["who"], f"{one['code']}: {one['text']}", one["count"]] for one in shown["faults"]]
    body = _table(rows) if rows else Text("None since the broker's start.", style="dim")
    return [Text("Last errors", style="bold"), body, Text()]


def _worker(shown: dict[str, Any]) -> list[RenderableType]:
    return [Text("Worker", style="bold"), _table(shown["worker"])]


def _waits(waits: dict[str, Any]) -> list[RenderableType]:
    title = Text("Waits before a job ran", style="bold")
    if not waits["bars"]:
        return [title, Text("No job has begun to run in the last 20 minutes.", style="dim"), Text()]
    heights = (min(8, round(8 * one["most"]) or (1 if one["text"] else 0)) for one in waits["bars"])
    chart = Text("".join(EIGHTHS[height] for height in heights), style="blue")
    told = f"{waits['span']} ago to now, {waits['step']} a place; the highest is {waits['longest']}"
    return [title, chart, Text(told, style="dim"), Text()]


def _bars(title: str, bars: list[dict[str, Any]]) -> list[RenderableType]:
    table = Table.grid(padding=(0, 1))
    for one in bars:
        table.add_row(Text(one["label"]), _bar(one["share"], BAR), Text(one["text"], style="dim"))
    return [Text(title, style="bold"), table if bars else Text("None yet.", style="dim"), Text()]


def _bar(share: float, width: int) -> Text:
    full = round(share * width)
    return Text("█" * full, style="blue") + Text("░" * (width - full), style="dim")


def _table(rows: list[list[str]], right: tuple[int, ...] = ()) -> Table:
    table = Table.grid(padding=(0, 2))
    for place in range(max(map(len, rows), default=0)):
        table.add_column(justify="right" if place in right else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
