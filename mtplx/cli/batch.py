"""`mtplx batch jobs.jsonl -o results.jsonl`: many jobs, results in the order of the input, resumable.

A result line is {"line", "digest", "id"?, "result"} or {"line", "digest", "id"?, "error"}; `digest` is
the SHA-256 of the job's line, so that a changed input is noticed when the work is taken up again. A job
that somebody cancelled is an error with the code "cancelled", and what it had so far in `detail`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, NamedTuple, Self

import click
from rich.console import Console
from rich.progress import Progress

from mtplx.cli.options import connection_options, load_settings
from mtplx.client import Client, Stream
from mtplx.errors import BadJobError, BusyError, SettingsError, WireError
from mtplx.job import Job
from mtplx.stream import Result

# Enough that the worker never waits for this program, few enough that others get their turn.
WINDOW: Final = 32
MAX_TRIES: Final = 3
DEFAULT_RETRY_MS: Final = 1000


Line = tuple[int, bytes]


class Kept(NamedTuple):
    """A result of an earlier run: its line of the file, and whether it is an error."""

    line: bytes
    failed: bool


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


def line_of(record: dict[str, Any]) -> bytes:
    """A record as its line; always UTF-8, whatever the input's strings hold."""
    try:
        return json.dumps(record, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        # Half a surrogate pair, which JSON can escape and UTF-8 cannot hold.
        return json.dumps(record).encode() + b"\n"


def take_up(results: IO[bytes], lines: list[Line], source: Path) -> list[Kept]:
    """The results that are there already; cuts off a torn last line.

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
    kept = []
    for record, (number, line) in zip(records, lines, strict=False):
        try:
            told = json.loads(record)
            same = told["line"] == number and told["digest"] == hashlib.sha256(line).hexdigest()
            kept.append(Kept(record + b"\n", failed="error" in told))
        except (ValueError, KeyError, TypeError):
            raise SettingsError(f"The results file has a line that is no result: {record[:60]!r}.") from None
        if not same:
            raise SettingsError(
                f"Line {number} of {source} is not the job whose result is there; it was changed. "
                "Choose another -o, or remove the results to begin again."
            )
    return kept


def renew(output: Path, kept: list[Kept], retried: Iterator[dict[str, Any]]) -> IO[bytes]:
    """Put the records of *retried*, which come in order, in the places of the failed ones; the file from then on.

    The old file stays as it is until the new one stands beside it, whole. Ctrl-C, or a broker that is gone,
    keeps every record: the new one where there was time for it, else the old one.
    """
    beside = output.with_name(f"{output.name}.new")
    renewed = beside.open("wb")
    # The lock goes over with the name.
    fcntl.flock(renewed, fcntl.LOCK_EX | fcntl.LOCK_NB)
    lines = [old.line for old in kept]
    try:
        for place, old in enumerate(kept):
            if old.failed:
                lines[place] = line_of(next(retried))
    finally:
        renewed.writelines(lines)
        renewed.flush()
        os.fsync(renewed.fileno())
        beside.replace(output)
    return renewed


@click.command()
@click.argument("source", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), required=True, help="Results.")
@click.option("--retry-failed", is_flag=True, help="First run those jobs again whose result is an error.")
@connection_options
@click.pass_context
def batch(context: click.Context, /, source: Path, output: Path, retry_failed: bool, **flags: Any) -> None:
    """Run the jobs of SOURCE, one JSON object a line, and append their results in the same order.

    Started again after a stop, it goes on where it stopped. A job that failed (it was wrong, it was cancelled,
    or worker or broker were lost three times) has its error as its result and stays so, unless
    --retry-failed is given: then such jobs are run again first, and each new result takes the old one's place.
    """
    settings = load_settings(flags, context.obj)
    lines = [(number, line) for number, line in enumerate(source.read_bytes().splitlines(), 1) if line.strip()]
    with ExitStack() as open_files:
        results: IO[bytes] = open_files.enter_context(output.open("a+b"))
        try:
            fcntl.flock(results, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingsError(f"Another batch writes to {output}.") from None
        kept = take_up(results, lines, source)
        again = [line for line, old in zip(lines, kept, strict=False) if old.failed and retry_failed]
        failed = sum(old.failed for old in kept) - len(again)
        done = len(kept) - len(again)
        if done < len(lines):
            with Client(settings=settings) as client, _Progress(done, len(lines)) as progress:
                if again:
                    retried = progress.counted(Batch(client, _items(again)).results())
                    results = open_files.enter_context(renew(output, kept, retried))
                for record in progress.counted(Batch(client, _items(lines[len(kept) :])).results()):
                    results.write(line_of(record))
                    results.flush()
            failed += progress.failed
    hint = "" if retry_failed or not failed else "; --retry-failed runs the failed ones again"
    click.echo(f"{len(lines)} jobs, {failed} failed, {done} were done before; results in {output}{hint}", err=True)
    context.exit(1 if failed else 0)


def _items(lines: list[Line]) -> Iterator[Item]:
    return (read_item(number, line) for number, line in lines)


class _Progress:
    """A bar on a terminal, and the count of failed jobs."""

    def __init__(self, done: int, total: int) -> None:
        self.failed = 0
        self._bar = Progress(console=Console(stderr=True), disable=not sys.stderr.isatty())
        self._task = self._bar.add_task("jobs", total=total, completed=done)

    def counted(self, records: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for record in records:
            self.failed += "error" in record
            yield record
            self._bar.advance(self._task)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
