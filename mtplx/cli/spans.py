"""Reads the spans of a trace file (OTLP JSON, one object a line) and draws them as a tree."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.tree import Tree


@dataclass(slots=True)
class Span:
    """One finished span. Times are nanoseconds since the epoch."""

    name: str
    trace: str
    id: str
    parent: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    children: list[Span] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.end_ns - self.start_ns) / 1e9


def read_spans(path: Path) -> list[Span]:
    """The spans that have no parent in the file, by their start, with their children."""
    spans = [_span(raw) for line in path.read_text().splitlines() for raw in _raw_spans(json.loads(line))]
    known = {span.id: span for span in spans}
    roots: list[Span] = []
    for span in sorted(spans, key=lambda one: one.start_ns):
        parent = known.get(span.parent)
        (parent.children if parent else roots).append(span)
    return roots


def tree_of(roots: list[Span]) -> Tree:
    """The spans as a tree with their times."""
    tree = Tree("spans", hide_root=True)
    for root in roots:
        _grow(tree, root)
    return tree


def _grow(tree: Tree, span: Span) -> None:
    told = {key: value for key, value in span.attributes.items() if key in _SHOWN}
    notes = " ".join(f"{_SHOWN[key]}={value}" for key, value in told.items())
    branch = tree.add(f"{span.name}  {span.seconds:.3f} s  {notes}".rstrip())
    for child in sorted(span.children, key=lambda one: one.start_ns):
        _grow(branch, child)


_SHOWN = {
    "mtplx.admit_seq": "admitted_as",
    "mtplx.outcome": "outcome",
    "gen_ai.usage.input_tokens": "in",
    "gen_ai.usage.output_tokens": "out",
    "mtplx.route": "route",
}


def _raw_spans(line: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        span
        for resource in line.get("resourceSpans", [])
        for scope in resource.get("scopeSpans", [])
        for span in scope.get("spans", [])
    ]


def _span(raw: dict[str, Any]) -> Span:
    return Span(
        name=raw["name"],
        trace=raw["traceId"],
        id=raw["spanId"],
        parent=raw.get("parentSpanId", ""),
        start_ns=int(raw["startTimeUnixNano"]),
        end_ns=int(raw["endTimeUnixNano"]),
        attributes={one["key"]: _plain(one["value"]) for one in raw.get("attributes", [])},
    )


def _plain(value: dict[str, Any]) -> Any:
    if "intValue" in value:
        # 64-bit integers are strings in OTLP JSON.
        return int(value["intValue"])
    return next(iter(value.values()), None)
