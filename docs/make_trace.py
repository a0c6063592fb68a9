# ruff: noqa: INP001 - a script beside the page it fills
"""Draws a span file as a picture: one row a span, time from left to right.

    python docs/make_trace.py spans.jsonl docs/trace.svg

The span file is that of `--trace-file`. The picture in the docs is of three jobs that came at once, on SmolLM2.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

from mtplx.cli.spans import Span, read_spans

WIDTH, LABELS, ROW, TOP = 980, 300, 24, 34
COLOURS: Final = {"process": "#7a8aa0", "queue": "#d9a441", "chat": "#3f8f5f", "text_completion": "#3f8f5f"}
TICKS: Final = 5
STYLE: Final = "text { font: 12px sans-serif; fill: #222 } .time { fill: #666 } .grid { stroke: #ddd }"


def picture(roots: list[Span]) -> str:
    """The SVG of all spans below *roots*.

    Raises:
        ValueError: there are no spans.
    """
    rows = [row for root in roots for row in _rows(root, 0)]
    if not rows:
        raise ValueError("The file has no spans.")
    begin = min(span.start_ns for span, _ in rows)
    length = max(max(span.end_ns for span, _ in rows) - begin, 1)
    scale = (WIDTH - LABELS - 70) / length
    height = TOP + ROW * len(rows) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f'<style>{STYLE}</style><rect width="{WIDTH}" height="{height}" fill="#fff"/>',
    ]
    for tick in range(TICKS + 1):
        x = LABELS + scale * length * tick / TICKS
        seconds = length * tick / TICKS / 1e9
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{height}"/>')
        parts.append(f'<text class="time" x="{x:.1f}" y="18" text-anchor="middle">{seconds:.2f} s</text>')
    for number, (span, depth) in enumerate(rows):
        parts += _bar(span, depth, TOP + ROW * number, LABELS + scale * (span.start_ns - begin), scale)
    return "\n".join([*parts, "</svg>", ""])


def _rows(span: Span, depth: int) -> Iterator[tuple[Span, int]]:
    yield span, depth
    for child in sorted(span.children, key=lambda one: one.start_ns):
        yield from _rows(child, depth + 1)


def _bar(span: Span, depth: int, y: float, x: float, scale: float) -> list[str]:
    colour = "#b5403a" if "error.type" in span.attributes else COLOURS.get(span.name.split(" ", 1)[0], "#888")
    width = max(scale * (span.end_ns - span.start_ns), 2.0)
    return [
        f'<text x="{8 + 16 * depth}" y="{y + 15}">{escape(_label(span, depth))}</text>',
        f'<rect x="{x:.1f}" y="{y + 4}" width="{width:.1f}" height="14" rx="2" fill="{colour}"/>',
        f'<text class="time" x="{x + width + 5:.1f}" y="{y + 15}">{span.seconds:.3f} s</text>',
    ]


def _label(span: Span, depth: int) -> str:
    # A model may be named by a whole path.
    kind, _, what = span.name.partition(" ")
    name = f"{kind} {what.rsplit('/', 1)[-1]}"[: 44 - 2 * depth]
    outcome = span.attributes.get("mtplx.outcome", "")
    return f"{name} · {outcome}" if outcome and depth == 0 else name


def main(spans: str, svg: str) -> None:
    """Read *spans*, write *svg*."""
    Path(svg).write_text(picture(read_spans(Path(spans)).roots), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
