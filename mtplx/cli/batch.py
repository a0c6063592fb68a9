"""`mtplx batch jobs.jsonl -o results.jsonl`: many jobs, results in the order of the input, resumable.

`results.py` has the form of a result line. A job that somebody cancelled is an error with the code
"cancelled", and what it had so far in `detail`.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import click
from rich.console import Console
from rich.progress import Progress

from mtplx.cli.connect import connect
from mtplx.cli.options import connection_options, load_settings
from mtplx.cli.results import Line, ResultsFile
from mtplx.cli.signals import ctrl_c_by_sigterm
from mtplx.client import Client, Stream
from mtplx.errors import BadJobError, BusyError, WireError
from mtplx.job import Job
from mtplx.stream import Result

# Enough that the worker never waits for this program, few enough that others get their turn.
WINDOW: Final = 32
MAX_TRIES: Final = 3
DEFAULT_RETRY_MS: Final = 1000


# Seconds between two lines of progress where stderr is no terminal.
REPORT_S: Final = 10.0


@dataclass(slots=True)
class Item:
    """One line of the input. `number` counts lines of the file from 1."""

    number: int
    digest: str
    name: str | None = None
    job: Job | None = None
    stream: Stream | None = None
    tries: int = 0
    error: WireError | None = None

    def record(self, **outcome: Any) -> dict[str, Any]:
        """The line for the results file."""
        named = {} if self.name is None else {"id": self.name}
        return {"line": self.number, "digest": self.digest, **named, **outcome}


def read_item(number: int, line: bytes) -> Item:
    """The job of an input line; a bad one carries its error."""
    item = Item(number, hashlib.sha256(line).hexdigest())
    try:
        body = json.loads(line)
        if isinstance(body, dict) and "id" in body:
            name = body.pop("id")
            if not isinstance(name, str):
                raise BadJobError("id must be a string.", field="id")
            item.name = name
        item.job = Job.parse(body)
    except ValueError as error:
        item.error = BadJobError(f"The line is not JSON: {error}", field="line")
    except RecursionError:
        item.error = BadJobError("The line is nested too deeply.", field="line")
    except BadJobError as error:
        item.error = error
    return item


@dataclass(slots=True)
class Batch:
    """Keeps a window of jobs in the broker's line and hands out results in input order."""

    client: Client
    items: Iterator[Item]
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    _window: deque[Item] = field(default_factory=deque)
    _not_before: float = 0.0

    def results(self) -> Iterator[dict[str, Any]]:
        """One record for each item."""
        while self._fill():
            item = self._window[0]
            if item.stream is None and item.error is None:
                # The line was full: come back when the broker said.
                self.sleep(max(0.0, self._not_before - self.clock()))
                self._not_before = 0.0
                continue
            record = self._outcome(item)
            if record is not None:
                self._window.popleft()
                yield record

    def _fill(self) -> bool:
        for item in self._window:
            self._submit(item)
        while len(self._window) < WINDOW and self.clock() >= self._not_before:
            fresh = next(self.items, None)
            if fresh is None:
                break
            self._window.append(fresh)
            self._submit(fresh)
        return bool(self._window)

    def _submit(self, item: Item) -> None:
        waits = self.clock() < self._not_before
        if item.stream is not None or item.error is not None or item.job is None or waits:
            return
        try:
            item.stream = self.client.submit(item.job, headers={"x-batch-line": str(item.number)})
            item.tries += 1
        except BusyError as error:
            self._not_before = self.clock() + (error.retry_after_ms or DEFAULT_RETRY_MS) / 1000
        except WireError as error:
            item.error = error

    def _outcome(self, item: Item) -> dict[str, Any] | None:
        if item.stream is not None:
            try:
                result = item.stream.result()
                if result.finish_reason == "cancelled":
                    return item.record(error=cancelled_map(result))
                return item.record(result=result.to_map())
            except WireError as error:
                # A broker that was started anew has forgotten the job: as good as a lost worker.
                if (error.retryable or error.code == "E_UNKNOWN_JOB") and item.tries < MAX_TRIES:
                    item.stream = None
                    return None
                item.error = error
        assert item.error is not None
        return item.record(error=error_map(item.error))


def error_map(error: WireError) -> dict[str, Any]:
    """An error as a result line holds it."""
    told = {"code": error.code, "message": error.message, "field": error.field, "detail": error.detail or None}
    return {**{key: value for key, value in told.items() if value is not None}, "retryable": error.retryable}


def cancelled_map(result: Result) -> dict[str, Any]:
    """A cancel from outside as a result line holds it: half an answer is no result."""
    tokens = len(result.ids)
    return {
        "code": "cancelled",
        "message": f"The job was cancelled from outside after {tokens} tokens.",
        "detail": {"tokens": tokens, "text": result.text},
        "retryable": True,
    }


@click.command()
@click.argument("source", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), required=True, help="Results.")
@click.option("--retry-failed", is_flag=True, help="First run those jobs again whose result is an error.")
@connection_options
@click.pass_context
def batch(context: click.Context, /, source: Path, output: Path, retry_failed: bool, **flags: Any) -> None:
    """Run the jobs of SOURCE, one JSON object a line, and append their results in the same order.

    Started again after a stop, it goes on where it stopped. A job that failed (it was wrong, it was cancelled,
    or worker or broker were lost three times) has its error as its result. It is run again, and its new
    result takes the old one's place, when its line was edited, or with --retry-failed. Other lines that have
    a result must not change.
    """
    settings = load_settings(flags, context.obj)
    lines = [(number, line) for number, line in enumerate(source.read_bytes().splitlines(), 1) if line.strip()]
    with ResultsFile(output, source) as results:
        results.take_up(lines)
        kept = results.kept
        again = [place for place, old in enumerate(kept) if old.failed and (retry_failed or old.edited)]
        failed = sum(old.failed for old in kept) - len(again)
        done = len(kept) - len(again)
        if done < len(lines):
            with ctrl_c_by_sigterm(), connect(settings) as client, _Progress(done, len(lines)) as progress:
                results.begin()
                if again:
                    retried = Batch(client, _items([lines[place] for place in again])).results()
                    results.replace(again, progress.counted(retried))
                for record in progress.counted(Batch(client, _items(lines[len(kept) :])).results()):
                    results.append(record)
            failed += progress.failed
    hint = "" if retry_failed or not failed else "; repair their lines, or use --retry-failed"
    click.echo(f"{len(lines)} jobs, {failed} failed, {done} were done before; results in {output}{hint}", err=True)
    context.exit(1 if failed else 0)


def _items(lines: list[Line]) -> Iterator[Item]:
    return (read_item(number, line) for number, line in lines)


class _Progress:
    """A bar on a terminal, elsewhere a line now and then; and the count of failed jobs."""

    def __init__(self, done: int, total: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.failed = 0
        self._done, self._total = done, total
        self._clock = clock
        self._told = clock()
        self._terminal = sys.stderr.isatty()
        self._bar = Progress(console=Console(stderr=True), disable=not self._terminal)
        self._task = self._bar.add_task("jobs", total=total, completed=done)

    def counted(self, records: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """*records* as they are."""
        for record in records:
            self.failed += "error" in record
            self._done += 1
            self._bar.advance(self._task)
            if not self._terminal and self._clock() - self._told >= REPORT_S:
                self._told = self._clock()
                click.echo(f"{self._done} of {self._total} jobs, {self.failed} failed so far", err=True)
            yield record

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
