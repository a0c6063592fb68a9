"""Sizes of memory as people write them: `512MB`, `4GB`, `1.5GiB`."""

from __future__ import annotations

import re
from typing import Final

_UNITS: Final = {f"{prefix}{tail}": base**power
                 for power, prefix in enumerate("KMGT", 1)
                 for tail, base in (("B", 1000), ("iB", 1024))}  # fmt: skip
_FORM: Final = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]i?B)", re.ASCII)


def parse_size(text: str) -> int:
    """Bytes of *text*: a number and a unit, KB to TB (powers of 1000) or KiB to TiB (of 1024).

    Raises:
        ValueError: it is written otherwise, or is less than one byte.
    """
    found = _FORM.fullmatch(text)
    size = round(float(found[1]) * _UNITS[found[2]]) if found else 0
    if size < 1:
        raise ValueError(f"{text!r} is no size such as 512MB, 4GB or 1.5GiB")
    return size


def format_size(size: int, *, up: bool = False) -> str:
    """*size* bytes to two places, rounded down or *up*, as `parse_size` reads it: `1.47MB`."""
    power = next((power for power in (4, 3, 2) if size >= 1000**power), 1)
    step = 1000**power // 100
    hundredths = -(-size // step) if up else size // step
    return f"{hundredths / 100:.10g}{'KMGT'[power - 1]}B"
