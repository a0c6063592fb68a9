"""Kernel texts as short as they can be: on CUDA MLX hashes the whole text of a custom kernel whenever it runs.

At some microseconds for ten thousand characters and two hundred kernels a token, that is a good part of a small
model's step. So texts lose what no compiler reads, and where there is a folder for them, they become a line that
includes a file.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_NAMES: Final = re.compile(r"#define (\w+)|FN \w+ (\w+)\(|typedef [^;]*?(\w+);")
_WORDS: Final = re.compile(r"\w+")
# The beginning of a name that the preprocessor puts together.
_PASTED: Final = re.compile(r"(\w+)##")
# Assembly in them has braces of its own.
_STRINGS: Final = re.compile(r'"[^"\n]*"')
# Around these a space means nothing outside of directives; around operators it can, as in `a / *b`.
_SPACES: Final = re.compile(r" *([,;{}()\[\]?]) *")


@dataclass(frozen=True, slots=True)
class _Unit:
    """A definition of a header, and the names that it brings."""

    text: str
    names: frozenset[str]


def needed(header: str, body: str) -> str:
    """Those definitions of *header* that *body* uses, directly or through another."""
    units = _units(header)
    kept: set[int] = set()
    words, pasted = set(_WORDS.findall(body)), set(_PASTED.findall(body))
    found = True
    while found:
        found = False
        for place, unit in enumerate(units):
            used = unit.names & words or any(name.startswith(tuple(pasted)) for name in unit.names)
            if place not in kept and used:
                kept.add(place)
                words |= set(_WORDS.findall(unit.text))
                pasted |= set(_PASTED.findall(unit.text))
                found = True
    return "".join(units[place].text for place in sorted(kept))


def compact(text: str) -> str:
    """*text* without what a compiler does not read: comments, line ends, spaces."""
    lines: list[str] = []
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL).replace("\\\n", " ")
    for line in text.splitlines():
        words = " ".join(line.split())
        if not words:
            continue
        if words.startswith("#"):
            lines += ["\n", words, "\n"]
        else:
            lines += [_SPACES.sub(r"\1", words), " "]
    return re.sub(r" ?\n+", "\n", "".join(lines)).replace("; ", ";").replace("} ", "}").replace("{ ", "{")


def in_file(text: str, folder: Path, suffix: str) -> str:
    """A line that includes *text* from a file of *folder*, named after its content.

    MLX looks for the words of an operand's shape in what it is given, so these stay, as a comment.

    Raises:
        OSError: the file cannot be written.
    """
    path = folder / f"{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}.{suffix}"
    if not path.exists():
        # Whoever includes it must never see half of it.
        part = path.with_name(f"{path.name}.{os.getpid()}")
        part.write_text(text)
        part.replace(path)
    shapes = sorted(set(re.findall(r"\b\w+_(?:shape|strides|ndim)\b", text)))
    return f'\n#include "{path.absolute()}"\n' + (f"// {' '.join(shapes)}\n" if shapes else "")


def _units(header: str) -> list[_Unit]:
    """The definitions of *header*, in order. A macro that makes functions brings their names where it is used."""
    units: list[_Unit] = []
    text = ""
    for line in header.splitlines(keepends=True):
        text += line
        code = _STRINGS.sub("", text)
        if line.endswith("\\\n") or code.count("{") != code.count("}") or not text.strip():
            continue
        names = {name for match in _NAMES.findall(text) for name in match if name}
        called = re.match(r"(\w+)\(", text)
        if called:
            names = next(set(unit.names) for unit in units if called[1] in unit.names)
        units.append(_Unit(text, frozenset(names)))
        text = ""
    return units
