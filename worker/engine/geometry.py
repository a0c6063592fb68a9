"""The geometry probe: what a forward of R rows costs here, by context, and whether its rows come out alike.

Rows are dummies behind a context of rows that nobody computed: time does not depend on what they hold. A step is
timed as the loop runs it, each built while the one before it runs; beside it one that waits, as a step must whose
drafts the host makes.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

from worker.engine.forward import MAX_ROWS, Forward, rows_needed
from worker.engine.visibility import number_of
from worker.kv.pages import PAGE, Pages
from worker.kv.prefix import Opened

_log = logging.getLogger(__name__)

ROWS: Final = (1, 2, 3, 4, 6, 8, 12, 16)
CONTEXTS: Final = (64, 1024, 4096, 16384)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much is measured. steps: of each run, of which the first tells nothing. turns: runs of each kind."""

    rows: tuple[int, ...] = ROWS
    contexts: tuple[int, ...] = CONTEXTS
    steps: int = 8
    turns: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The figures.

    ms: for each context, of a step of each number of rows, one ahead of the host where the lane allows it.
    overhead_ms: what a step of one row takes longer where the host waits for it. moved: for each number of rows,
    how far the logits of row 0 are from those of a forward of one row, as a share of the largest.
    """

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    ms: tuple[tuple[float, ...], ...]
    overhead_ms: float
    moved: tuple[float, ...]

    def table(self) -> list[str]:
        """The figures as lines of text."""
        head = "rows     " + "".join(f"{rows:>9}" for rows in self.rows)
        lines = [head]
        for context, times in zip(self.contexts, self.ms, strict=True):
            lines.append(f"{context:>6} ms" + "".join(f"{ms:>9.3g}" for ms in times))
            lines.append("  c(R)   " + "".join(f"{ms / times[0]:>9.2f}" for ms in times))
        lines.append("moved    " + "".join(f"{moved:>9.1g}" for moved in self.moved))
        return [*lines, f"a step that waits takes {self.overhead_ms:.3g} ms longer"]


def measure(forward: Forward, pages: Pages, extent: Extent, clock: Callable[[], float]) -> Geometry:
    """Measure *forward* over free *pages*, which are given back. clock: seconds.

    Contexts without room are left out; a lane that reuses no rows is measured at its beginning.
    """
    available = min(forward.capacity, pages.free * PAGE) - 1
    # In a small pool fewer steps are timed, of which two are the least, and no more rows than it holds so often.
    rows = tuple(n for n in extent.rows if n == 1 or (n <= forward.width and available >= MAX_ROWS * 3))
    steps = max(2, min(extent.steps, available // MAX_ROWS - 1)) if len(rows) > 1 else 2
    contexts = extent.contexts if forward.prefix_reuse else (0,)
    written = (MAX_ROWS if len(rows) > 1 else 1) * (steps + 1)
    room = available - written
    contexts = tuple(context for context in contexts if context <= room) or (int(forward.prefix_reuse),)
    times: list[tuple[float, ...]] = []
    # A recurrent state cannot go back: each run has a sequence of its own.
    for context in contexts:
        runs: dict[int, list[float]] = {count: [] for count in rows}
        for _ in range(extent.turns + 1):
            for count, taken in runs.items():
                with _begun(forward, pages, context, written):
                    taken.append(_run(forward, count, steps, clock, wait=not forward.one_ahead))
        # What else the machine does only adds to a time.
        times.append(tuple(min(taken[1:]) for taken in runs.values()))
    waited = []
    for _ in range(extent.turns + 1):
        with _begun(forward, pages, contexts[0], written):
            waited.append(_run(forward, 1, steps, clock, wait=True))
    firsts = []
    for count in rows:
        with _begun(forward, pages, contexts[0], written):
            firsts.append(_first_row(forward, count))
    moved = tuple(_moved(first, firsts[0]) for first in firsts)
    overhead = max(min(waited[1:]) - times[0][0], 0.0)
    return Geometry(rows=rows, contexts=contexts, ms=tuple(times), overhead_ms=overhead, moved=moved)


@contextmanager
def _begun(forward: Forward, pages: Pages, context: int, written: int) -> Iterator[None]:
    sequence = pages.reserve(rows_needed(context + written, forward.prefill_rows))
    sequence.append(context, prompt=True)
    forward.begin(Opened(sequence, (), b"", False, (), context, True))
    try:
        yield
        forward.settle()
    finally:
        forward.end()
        sequence.release()


def _run(forward: Forward, rows: int, steps: int, clock: Callable[[], float], *, wait: bool) -> float:
    """Milliseconds a step of *steps* steps of *rows* rows, each fed by what the one before it found likeliest."""
    tokens = mx.zeros((rows,), dtype=mx.uint32)
    began = 0.0
    for step in range(steps):
        ahead = mx.argmax(forward.rows(tokens), axis=-1).astype(mx.uint32)
        mx.async_eval(ahead)  # type: ignore[no-untyped-call]
        mx.eval(ahead if wait else tokens)
        if step == 0:
            mx.eval(ahead)
            began = clock()
        tokens = ahead
    mx.eval(tokens)
    return (clock() - began) * 1e3 / (steps - 1)


def _first_row(forward: Forward, count: int) -> mx.array:
    """The logits of row 0 in a forward of *count* rows."""
    first = forward.rows(mx.arange(1, count + 1, dtype=mx.uint32))[0].astype(mx.float32)
    mx.eval(first)
    return first


def _moved(first: mx.array, alone: mx.array) -> float:
    share = number_of(mx.abs(first - alone).max() / mx.maximum(mx.abs(alone).max(), 1e-30))
    # A model whose numbers are none has its word in a job; what is told here must be a number.
    return share if math.isfinite(share) else 1.0


def kept(path: Path) -> Geometry | None:
    """The geometry that *path* holds; None where there is none, or one that no probe would have found."""
    try:
        found = json.loads(path.read_text())
        geometry = Geometry(
            rows=tuple(found["rows"]),
            contexts=tuple(found["contexts"]),
            ms=tuple(map(tuple, found["ms"])),
            overhead_ms=found["overhead_ms"],
            moved=tuple(found["moved"]),
        )
        return geometry if _plausible(geometry) else None
    except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return None


def _plausible(geometry: Geometry) -> bool:
    """Whether all is what planning counts on: the file may be damaged, or of another version."""
    rows, contexts = geometry.rows, geometry.contexts
    times = [ms for line in geometry.ms for ms in line]
    numbers = (*times, geometry.overhead_ms, *geometry.moved)
    return (
        all(type(one) is int for one in (*rows, *contexts))
        and rows[0] == 1
        and contexts[0] >= 0
        and all(low < high for one in (rows, contexts) for low, high in pairwise(one))
        and len(geometry.ms) == len(contexts)
        and all(len(line) == len(rows) for line in (*geometry.ms, geometry.moved))
        and all(type(one) in (int, float) for one in numbers)
        and all(math.isfinite(ms) and ms > 0 for ms in times)
        and math.isfinite(geometry.overhead_ms)
        and geometry.overhead_ms >= 0
    )


def keep(geometry: Geometry, path: Path) -> None:
    """Write *geometry* to *path*, the whole of it or nothing; the log tells where that cannot be."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            part.write_text(json.dumps(asdict(geometry)))
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("what rows cost is not kept, and is measured again at each start: %s", error)


def place(folder: Path, facts: dict[str, Any]) -> Path:
    """Where the geometry of this model on this device is kept: a file named after *facts*."""
    return folder / f"{blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()}.json"
