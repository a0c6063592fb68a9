"""Reads the spans of a trace file (OTLP JSON, one object a line) and draws them as trees."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.table import Table
from rich.text import Text

BAR: Final = 24
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


@dataclass(slots=True)
class Span:
    """One finished span. Times are nanoseconds since the epoch. events: name and time of each."""

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
    with path.open("rb") as lines:
        for line in lines:
            try:
                spans += [_span(raw) for raw in _raw_spans(json.loads(line))]
            except (ValueError, KeyError, TypeError, AttributeError):
                damaged += 1
    return Spans(_trees(spans), damaged)


def _trees(spans: list[Span]) -> list[Span]:
    # Ids of spans are drawn anew by each process: within one trace they are unique.
    known = {(span.trace, span.id): span for span in spans}
    roots: list[Span] = []
    for span in sorted(known.values(), key=lambda one: one.start_ns):
        parent = known.get((span.trace, span.parent))
        (roots if parent is None or parent is span else parent.children).append(span)
    return roots


def tree_of(roots: list[Span]) -> Table:
    """The spans as trees: name, time from the root's start, how long, where in the root's time, and notes."""
    table = Table.grid(padding=(0, 2))
    for justify in ("left", "right", "right", "left", "left"):
        table.add_column(justify=justify, no_wrap=justify == "right")
    for root in roots:
        for row in _rows(root, root, "", ""):
            table.add_row(*row)
    return table


def _rows(span: Span, root: Span, own: str, below: str) -> Iterator[tuple[Text, ...]]:
    """The lines of *span*; *own* and *below* are what is drawn before its name, and before those under it."""
    name = Text(own, style="dim") + Text(span.name, style="bold red" if span.failed else "bold")
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
            yield Text(f"{corner}{part}", style="dim"), Text(_after(at, root), style="dim")
        elif len(below) < MAX_INDENT:
            yield from _rows(part, root, corner, line)
        else:
            yield (Text(f"{corner}..."),)


def _notes(span: Span, root: Span) -> Text:
    notes = [f"{word} {span.attributes[key]}" for key, word in SHOWN.items() if key in span.attributes]
    if span is root:
        notes += [f"job {span.job}"] if span.job else []
        notes.append(f"trace {span.trace}")
    return Text(", ".join(notes), style="dim")


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
        start_ns=int(raw["startTimeUnixNano"]),
        end_ns=int(raw["endTimeUnixNano"]),
        attributes={one["key"]: _plain(one["value"]) for one in raw.get("attributes", [])},
        events=[(str(one["name"]), int(one["timeUnixNano"])) for one in raw.get("events", [])],
        failed=raw.get("status", {}).get("code") in ERROR,
    )


def _plain(value: dict[str, Any]) -> Any:
    if "intValue" in value:
        # 64-bit integers are strings in OTLP JSON.
        return int(value["intValue"])
    return next(iter(value.values()), None)
