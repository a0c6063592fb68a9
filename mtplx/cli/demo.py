"""`mtplx demo`: the whole system once, on a real model, checked by itself."""

from __future__ import annotations

import secrets
import shutil
import tempfile
import threading
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mtplx.cli.ops import print_map
from mtplx.cli.options import load_settings, settings_options
from mtplx.cli.pull import pull_model
from mtplx.cli.run import tokens_per_s
from mtplx.cli.serve import Service, absolute_model
from mtplx.cli.signals import Signals
from mtplx.cli.spans import Span, read_spans, tree_of
from mtplx.client import Client, Stream
from mtplx.errors import Exit, MtplxError, SettingsError
from mtplx.paths import check_ipc_path
from mtplx.settings import Settings
from mtplx.stream import Result

START_LIMIT_S: Final = 180.0
JOBS_LIMIT_S: Final = 600.0
PIPE_WIDTH: Final = 110
PULLED_BY_NAME: Final = next(item.default for item in fields(Settings) if item.name == "model")

PRODUCERS: Final[dict[str, dict[str, Any]]] = {
    "amber": {"prompt": "Explain why the sky is blue in three sentences.", "max_tokens": 100},
    "birch": {"prompt": "Write four lines about the sea.", "max_tokens": 60, "temperature": 0.8, "seed": 7},
    "cedar": {"prompt": "Name five uses of a paper clip.", "max_tokens": 60, "temperature": 0.7, "top_p": 0.9},
}


@dataclass(slots=True)
class Producer:
    """One of the three, in a thread with a client of its own."""

    name: str
    job: dict[str, Any]
    settings: Settings
    trace: str = field(default_factory=lambda: secrets.token_hex(16))
    stream: Stream | None = None
    result: Result | None = None
    error: MtplxError | None = None
    state: str = "connecting"

    def work(self) -> None:
        """Submit, read to the last word, and keep what came; runs in a thread."""
        asked = dict(self.job)
        messages = [{"role": "user", "content": asked.pop("prompt")}]
        headers = {"traceparent": f"00-{self.trace}-{secrets.token_hex(8)}-01"}
        try:
            with Client(settings=self.settings) as client:
                self.stream = client.submit(messages=messages, headers=headers, **asked)
                self.state = f"admitted as {self.stream.admit_seq}, {self.stream.position} before it"
                for _ in self.stream:
                    self.state = "streaming"
                self.result = self.stream.result()
                self.state = f"done ({self.result.finish_reason})"
        except MtplxError as error:
            self.error = error
            self.state = f"failed: {error}"
        finally:
            # Anything else ends the thread with its traceback, and must not look like a job under way.
            if self.result is None and self.error is None:
                self.state = "failed by a fault of the demo itself"


@click.command()
@settings_options
@click.pass_context
def demo(context: click.Context, /, **flags: Any) -> None:
    """Three producers at once on a small real model: one line, one job at a time, streamed back."""
    settings = load_settings(flags, context.obj)
    console = Console()
    if not console.is_terminal:
        # A pipe has no width; the table needs some.
        console.width = PIPE_WIDTH
    if settings.model == PULLED_BY_NAME:
        code = pull_model(settings.model, settings)
        if code:
            context.exit(code)
    with Signals() as signals:
        folder = private_temp()
        try:
            context.exit(run_demo(settings, folder, console, signals))
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def private_temp() -> Path:
    """A new folder of our own, in /tmp where the usual temporary folder is too long for a socket's path."""
    folder = Path(tempfile.mkdtemp(prefix="mtplx-demo-"))
    try:
        check_ipc_path(str(folder / "front.sock"))
    except SettingsError:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="mtplx-demo-", dir="/tmp"))
    return folder


def run_demo(settings: Settings, folder: Path, console: Console, signals: Signals, **commands: Any) -> int:
    """Run it all in *folder*, which is private; the exit code. Prints what was found wrong."""
    trace_file = folder / "spans.jsonl"
    settings = replace(absolute_model(settings), run_dir=folder, front="", back="", trace_file=trace_file)
    producers = [Producer(name, job, settings) for name, job in PRODUCERS.items()]
    with Service(settings, say=console.print, pause=signals.pause, **commands) as service:
        signals.again = service.hurry
        started = service.turn_until(lambda: service.ready or signals.count > 0, START_LIMIT_S)
        if not started:
            return _failed(console, service, "The worker did not become ready.")
        ended = signals.count > 0 or _produce(service, producers, console, signals)
        if signals.count:
            console.print("Interrupted.")
            return 128 + signals.last
        if not ended:
            return _failed(console, service, "Not all jobs have ended.")
        service.turn()
        health = service.health
    roots = read_spans(trace_file).roots if trace_file.exists() else []
    _report(console, producers, health, roots)
    wrong = faults(producers, roots)
    for fault in wrong:
        console.print(f"WRONG: {fault}", style="bold red", markup=False)
    if not wrong:
        console.print("All checks passed: three last words, run in the order of admission, spans complete.")
    return int(Exit.FAILED) if wrong else 0


def faults(producers: list[Producer], roots: list[Span]) -> list[str]:
    """What is not as promised; empty when all is well."""
    found = [f"{one.name} has no last word: {one.error or one.state}" for one in producers if one.result is None]
    of_job = {root.attributes.get("messaging.message.id"): root for root in roots}
    chats = []
    for one in sorted(producers, key=lambda each: each.stream.admit_seq if each.stream else -1):
        root = of_job.get(one.stream.id.hex()) if one.stream else None
        if root is None:
            found.append(f"{one.name} has no process span")
            continue
        if root.trace != one.trace:
            found.append(f"{one.name}'s span is not in the trace of its producer")
        kinds = [child.name.split(" ", 1)[0] for child in root.children]
        if sorted(kinds) != ["chat", "queue"]:
            found.append(f"{one.name}'s spans are {', '.join(kinds) or 'none'}, not queue and chat")
        chats += [child for child in root.children if child.name.startswith("chat ")]
    for before, after in pairwise(chats):
        if after.start_ns < before.end_ns:
            found.append("jobs did not run one at a time in the order of their admission")
    return found


def _failed(console: Console, service: Service, what: str) -> int:
    console.print(what)
    return service.exit_code or int(Exit.FAILED)


def _produce(service: Service, producers: list[Producer], console: Console, signals: Signals) -> bool:
    """Let the producers work; True once all have ended, or a signal came."""
    threads = [threading.Thread(target=one.work, name=one.name, daemon=True) for one in producers]
    for thread in threads:
        thread.start()
    shown = dict.fromkeys(PRODUCERS, "")
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def all_done() -> bool:
            if console.is_terminal:
                live.update(Group(*(_panel(one) for one in producers)), refresh=True)
            else:
                _print_changes(console, producers, shown)
            return signals.count > 0 or not any(thread.is_alive() for thread in threads)

        return service.turn_until(all_done, JOBS_LIMIT_S)


def _panel(one: Producer) -> Panel:
    text = one.stream.text if one.stream else ""
    return Panel(Text(text), title=f"{one.name}: {one.state}", title_align="left")


def _print_changes(console: Console, producers: list[Producer], shown: dict[str, str]) -> None:
    for one in producers:
        if shown[one.name] != one.state:
            shown[one.name] = one.state
            console.print(f"{one.name}: {one.state}", markup=False)


def _report(console: Console, producers: list[Producer], health: dict[str, Any], roots: list[Span]) -> None:
    for one in producers:
        answer = one.result.text if one.result else f"no answer: {one.error}"
        console.print(f"\n{one.name} asked: {one.job['prompt']}", style="bold", markup=False)
        console.print(answer.strip(), markup=False, highlight=False)
    console.print()
    console.print(_table(producers))
    console.print("\nscheduler", style="bold")
    print_map(health.get("scheduler", {}))
    console.print("\nspans", style="bold")
    console.print(tree_of(roots, console.width))


def _table(producers: list[Producer]) -> Table:
    table = Table(box=None)
    titles = ("JOB", "ADMITTED AS", "QUEUE WAIT", "PREFILL", "FIRST TOKEN", "TOKENS/S", "FINISH", "HASH")
    for title in titles:
        table.add_column(title)
    for one in producers:
        result = one.result
        if result is None or one.stream is None:
            table.add_row(one.name, *["-"] * (len(titles) - 1))
            continue
        seconds = [result.timings.get(key) for key in ("queue_wait_s", "prefill_s", "time_to_first_token_s")]
        speed = tokens_per_s(result)
        table.add_row(
            one.name,
            str(one.stream.admit_seq),
            *("-" if value is None else f"{value:.3f} s" for value in seconds),
            "-" if speed is None else f"{speed:.1f}",
            result.finish_reason,
            result.sha256[:16],
        )
    return table
