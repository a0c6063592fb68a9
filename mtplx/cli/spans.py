"""Reads the spans of a trace file (OTLP JSON, one object a line) and draws them as trees."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from mtplx.logs import printable

BAR: Final = 24
# A narrower terminal shows no bars: it has room for ids or for them.
BAR_FROM_WIDTH: Final = 110
# A batch of spans with all their prompts and answers is shorter; in nanoseconds, the year 2262.
MAX_LINE: Final = 64 * 1024**2
MAX_NS: Final = 2**63
# A chain deeper than any of ours is damaged, or was made to be.
MAX_INDENT: Final = 60
ERROR: Final = (2, "STATUS_CODE_ERROR")
JOB_ID: Final = "messaging.message.id"
# Attributes that are told beside a span, in this order; all others are left to a viewer.
SHOWN: Final = {
    "mtplx.admit_seq": "number",
    "mtplx.attempt": "attempt",
    "mtplx.outcome": "outcome",
    "error.type": "error",
    "gen_ai.usage.input_tokens": "in",
    "gen_ai.usage.cache_read.input_tokens": "cached",
    "gen_ai.usage.output_tokens": "out",
    "mtplx.route": "route",
}
# Prompts and answers, where a file has them, are not held.
KEPT: Final = {*SHOWN, JOB_ID}


@dataclass(slots=True)
class Span:
    """One finished span. Times: nanoseconds since the epoch. events: name and time of each. attributes: KEPT."""

    name: str
    trace: str
    id: str
    parent: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[tuple[str, int]] = field(default_factory=list)
    failed: bool = False
    children: list[Span] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.end_ns - self.start_ns) / 1e9

    @property
    def job(self) -> str:
        """The id of its job, in hexadecimal; empty where it names none."""
        return str(self.attributes.get(JOB_ID, ""))


@dataclass(frozen=True, slots=True)
class Spans:
    """What a file holds: the spans without a parent in it, by their start; and how many lines are none."""

    roots: list[Span]
    damaged: int


def read_spans(path: Path) -> Spans:
    """The spans of a file, which may be written to at this moment.

    Raises:
        OSError: it cannot be read.
    """
    spans: list[Span] = []
    damaged = 0
    with path.open("rb") as file:
        for line in _lines(file):
            try:
                spans += [_span(raw) for raw in _raw_spans(json.loads(line))]
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
                damaged += 1
    return Spans(_trees(spans), damaged)


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """The lines of *file*; of one that is too long, its beginning."""
    while line := file.readline(MAX_LINE):
        yield line
        while len(line) == MAX_LINE and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE)


def _trees(spans: list[Span]) -> list[Span]:
    # Ids of spans are drawn anew by each process: within one trace they are unique.
    known = {(span.trace, span.id): span for span in spans}
    roots: list[Span] = []
    for span in sorted(known.values(), key=lambda one: one.start_ns):
        parent = known.get((span.trace, span.parent))
        (roots if parent is None or parent is span else parent.children).append(span)
    return roots


def tree_of(roots: list[Span], width: int) -> Table:
    """The spans as trees: name, time from the root's start, how long, where in the root's time, and notes.

    width: columns of the terminal; below BAR_FROM_WIDTH nothing is drawn of where.
    """
    rows = [row for root in roots for row in _rows(root, root, "", "")]
    longest = max((cell_len(row[0].plain) for row in rows), default=0)
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=min(longest, width // 2), overflow="fold")
    for _ in range(2):
        table.add_column(justify="right", no_wrap=True)
    if width >= BAR_FROM_WIDTH:
        table.add_column(no_wrap=True, min_width=BAR)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*(row if width >= BAR_FROM_WIDTH else row[:3] + row[4:]))
    return table


def _rows(span: Span, root: Span, own: str, below: str) -> Iterator[tuple[Text, ...]]:
    """The lines of *span*; *own* and *below* are what is drawn before its name, and before those under it."""
    name = Text(own, style="dim") + Text(printable(span.name), style="bold red" if span.failed else "bold")
    yield (
        name,
        Text(_after(span.start_ns, root)),
        Text(f"{span.seconds:.3f} s"),
        _bar(span, root),
        _notes(span, root),
    )
    parts: list[tuple[int, Span | str]] = [(at, event) for event, at in span.events]
    parts += [(child.start_ns, child) for child in span.children]
    parts.sort(key=lambda one: one[0])
    for place, (at, part) in enumerate(parts):
        last = place == len(parts) - 1
        corner, line = (below + "└─ ", below + "   ") if last else (below + "├─ ", below + "│  ")
        if isinstance(part, str):
            yield Text(f"{corner}{printable(part)}", style="dim"), Text(_after(at, root), style="dim")
        elif len(below) < MAX_INDENT:
            yield from _rows(part, root, corner, line)
        else:
            yield (Text(f"{corner}..."),)


def _notes(span: Span, root: Span) -> Text:
    notes = [f"{word} {span.attributes[key]}" for key, word in SHOWN.items() if key in span.attributes]
    if span is root:
        notes += [f"job {span.job}"] if span.job else []
        notes.append(f"trace {span.trace}")
    return Text(printable(", ".join(notes)), style="dim")


def _after(at: int, root: Span) -> str:
    return f"+{max(0, at - root.start_ns) / 1e9:.3f} s"


def _bar(span: Span, root: Span) -> Text:
    """Where in the time of *root* the span lies."""
    whole = max(1, root.end_ns - root.start_ns)
    first = min(BAR - 1, max(0, BAR * (span.start_ns - root.start_ns) // whole))
    length = min(BAR - first, max(1, round(BAR * (span.end_ns - span.start_ns) / whole)))
    return Text(" " * first + "━" * length + " " * (BAR - first - length), style="red" if span.failed else "blue")


def _raw_spans(line: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for resource in line.get("resourceSpans", []):
        for scope in resource.get("scopeSpans", []):
            yield from scope.get("spans", [])


def _span(raw: dict[str, Any]) -> Span:
    return Span(
        name=str(raw["name"]),
        trace=str(raw["traceId"]),
        id=str(raw["spanId"]),
        parent=str(raw.get("parentSpanId") or ""),
        start_ns=_time(raw["startTimeUnixNano"]),
        end_ns=_time(raw["endTimeUnixNano"]),
        attributes={one["key"]: _plain(one["value"]) for one in raw.get("attributes", []) if one["key"] in KEPT},
        events=[(str(one["name"]), _time(one["timeUnixNano"])) for one in raw.get("events", [])],
        failed=raw.get("status", {}).get("code") in ERROR,
    )


def _time(value: Any) -> int:
    """Nanoseconds since the epoch, which OTLP JSON writes as a string."""
    at = int(value)
    if not 0 <= at < MAX_NS:
        raise ValueError("no time")
    return at


def _plain(value: dict[str, Any]) -> Any:
    if "intValue" in value:
        # 64-bit integers are strings in OTLP JSON.
        return int(value["intValue"])
    return next(iter(value.values()), None)
