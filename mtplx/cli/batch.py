"""`mtplx batch jobs.jsonl -o results.jsonl`: many jobs, results in the order of the input, resumable.

A result line is {"line", "digest", "id"?, "result"} or {"line", "digest", "id"?, "error"}; `digest` is
the SHA-256 of the job's line, so that a changed input is noticed when the work is taken up again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

import click
from rich.console import Console
from rich.progress import Progress

from mtplx.cli.options import connection_options, load_settings
from mtplx.client import Client, Stream
from mtplx.errors import BadJobError, BusyError, SettingsError, WireError
from mtplx.job import Job

# Enough that the worker never waits for this program, few enough that others get their turn.
WINDOW: Final = 32
MAX_TRIES: Final = 3
DEFAULT_RETRY_MS: Final = 1000


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
                return item.record(result=item.stream.result().to_map())
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


def take_up(results: IO[bytes], lines: list[tuple[int, bytes]], source: Path) -> tuple[int, int]:
    """How many results are there already, and how many of them are errors; cuts off a torn last line.

    Raises:
        SettingsError: the results are not those of this input.
    """
    results.seek(0)
    data = results.read()
    whole = data[: data.rfind(b"\n") + 1]
    results.truncate(len(whole))
    results.seek(len(whole))
    records = whole.splitlines()
    if len(records) > len(lines):
        raise SettingsError(f"There are more results than jobs in {source}; it was changed. Choose another -o.")
    failed = 0
    for record, (number, line) in zip(records, lines, strict=False):
        try:
            told = json.loads(record)
            same = told["line"] == number and told["digest"] == hashlib.sha256(line).hexdigest()
            failed += "error" in told
        except (ValueError, KeyError, TypeError):
            raise SettingsError(f"The results file has a line that is no result: {record[:60]!r}.") from None
        if not same:
            raise SettingsError(
                f"Line {number} of {source} is not the job whose result is there; it was changed. "
                "Choose another -o, or remove the results to begin again."
            )
    return len(records), failed


@click.command()
@click.argument("source", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), required=True, help="Results.")
@connection_options
@click.pass_context
def batch(context: click.Context, /, source: Path, output: Path, **flags: Any) -> None:
    """Run the jobs of SOURCE, one JSON object a line, and append their results in the same order.

    Started again after a stop, it goes on where it stopped.
    """
    settings = load_settings(flags, context.obj)
    lines = [(number, line) for number, line in enumerate(source.read_bytes().splitlines(), 1) if line.strip()]
    with output.open("a+b") as results:
        try:
            fcntl.flock(results, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingsError(f"Another batch writes to {output}.") from None
        have, failed = take_up(results, lines, source)
        if have < len(lines):
            with Client(settings=settings) as client:
                failed += _run(client, lines, have, results)
    click.echo(f"{len(lines)} jobs, {failed} failed, {have} were done before; results in {output}", err=True)
    context.exit(1 if failed else 0)


def _run(client: Client, lines: list[tuple[int, bytes]], have: int, results: IO[bytes]) -> int:
    failed = 0
    work = Batch(client, (read_item(number, line) for number, line in lines[have:]))
    console = Console(stderr=True)
    with Progress(console=console, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("jobs", total=len(lines), completed=have)
        for record in work.results():
            failed += "error" in record
            results.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
            results.flush()
            progress.advance(task)
    return failed
