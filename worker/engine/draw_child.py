"""A child of `draw_kernels.py`: draws one kind, which makes MLX compile what it fuses for it.

The first line of standard input is JSON: `kind`, a place in `COMMON`; `width`, `vocabulary`, `dtype` and `rows`,
as `warm` takes them; `place`, the folder where MLX looks and keeps what it compiles, beside those of the other
children; `folder`, where compiled kernels are kept. When the input ends, so does the child. Kinds share kernels,
so children take from each other what is finished.
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

from mtplx.stdin import STDIN, stdin_ended
from worker.engine.draw import COMMON, warm
from worker.kernels.disk_cache import is_finished, write_whole

PREFIX: Final = ".draws-"
"""Of the folder in `folder` that holds those of the children."""

_LOOK_S: Final = 0.1
_NICE: Final = 10


def move(place: Path, folder: Path) -> Iterator[str]:
    """Move what is finished in *place* to *folder*, never over what is there; the names of all of it."""
    for code in sorted(place.rglob("*.ptx")):
        if not is_finished(code):
            continue
        name = code.relative_to(place)
        kept = folder / name
        if not kept.exists():
            # A long name is split into folders. MLX asks for the code first, so the names are there before it.
            kept.parent.mkdir(parents=True, exist_ok=True)
            code.with_suffix(".txt").replace(kept.with_suffix(".txt"))
            code.replace(kept)
        text = code.with_suffix(".cu")
        if text.exists() and not kept.with_suffix(".cu").exists():
            text.replace(kept.with_suffix(".cu"))
        yield str(name)


def adopt(place: Path, own: Path) -> None:
    """Copy what MLX has finished in *place*, and *own* lacks.

    MLX writes the source last: with it the names are whole, and of the code one can see it.
    """
    for text in place.rglob("*.cu"):
        code = text.with_suffix(".ptx")
        name = code.relative_to(place)
        if name.parts[0].startswith(PREFIX) or (own / name).exists() or not code.exists() or not is_finished(code):
            continue
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        write_whole((own / name).with_suffix(".txt"), code.with_suffix(".txt").read_bytes())
        write_whole(own / name, code.read_bytes())


def _attend(own: Path) -> None:
    """Take what the other children finish, until the parent is gone."""
    while not stdin_ended():
        with suppress(OSError):
            for place in own.parent.iterdir():
                if place != own:
                    adopt(place, own)
        select.select([STDIN], [], [], _LOOK_S)
    os._exit(1)


def main() -> None:
    """Draw one kind, which makes MLX compile it."""
    job: dict[str, Any] = json.loads(sys.stdin.readline())
    own = Path(job["place"])
    os.nice(_NICE)
    # The device's memory is the worker's.
    mx.set_cache_limit(0)
    with suppress(OSError):
        adopt(Path(job["folder"]), own)
    threading.Thread(target=_attend, args=(own,), daemon=True).start()
    kinds = COMMON[job["kind"] :][:1]
    warm(job["width"], job["vocabulary"], getattr(mx, job["dtype"]), job["rows"], kinds)


if __name__ == "__main__":
    main()
