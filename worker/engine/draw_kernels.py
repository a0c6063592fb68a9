"""What MLX fuses for draws, compiled by child processes while the worker checks itself.

MLX on CUDA compiles a fused kernel when it is first run, one after the other and for seconds each. Here each kind
of `COMMON` is drawn in a process of its own, in a cache folder of its own: MLX writes its files in place, so they
are moved to where the worker's MLX looks when the child is done. Nothing depends on them: what is missing, MLX
compiles by itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Final, Self

from worker.engine import draw, draw_tree, law, sample
from worker.engine.draw_child import PREFIX, move
from worker.engine.load import LoadedModel
from worker.kernels.dialect import target
from worker.kernels.disk_cache import write_whole

_log = logging.getLogger(__name__)

LIMIT_S: Final = 60.0
PROGRAM: Final = (sys.executable, "-P", "-m", "worker.engine.draw_child")
# With fewer, children would only take turns, and be in the way of the check.
_CORES_NEEDED: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the kernels of draws depend on. dtype: of the logits; rows: row counts of the draws."""

    width: int
    vocabulary: int
    dtype: str
    rows: tuple[int, ...] = draw.WARM_ROWS

    @classmethod
    def of(cls, loaded: LoadedModel, rows: tuple[int, ...] = draw.WARM_ROWS) -> Self:
        """What the engines of *loaded* draw, after forwards of each of *rows* rows."""
        return cls(width=loaded.width, vocabulary=loaded.vocabulary, dtype=loaded.dtype, rows=rows)

    @property
    def mark(self) -> str:
        """The name of the file that says which kernels these are; another for other versions and another law."""
        texts = [inspect.getsource(module) for module in (draw, draw_tree, law, sample)]
        parts = [json.dumps(asdict(self)), version("mlx"), version("mlx-lm"), *texts]
        return f"draws-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.json"


@dataclass(frozen=True, slots=True)
class _Child:
    process: subprocess.Popen[bytes]
    place: Path


@dataclass(slots=True)
class Children:
    """The processes, one for each kind, or none. folder: where compiled kernels are kept."""

    folder: Path = Path()
    mark: Path = Path()
    clock: Callable[[], float] = time.monotonic
    end_at: float = 0.0
    _place: Path | None = None
    _lock: int = -1
    _all: list[_Child] = field(default_factory=list)

    def start(self, wanted: Wanted, program: Sequence[str]) -> None:
        """Start them.

        Raises:
            OSError: one could not be started.
        """
        self._place = Path(tempfile.mkdtemp(dir=self.folder, prefix=PREFIX))
        # Held as long as this process lives: a folder that nobody holds is a leftover.
        self._lock = os.open(self._place, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for kind in range(len(draw.COMMON)):
            place = self._place / str(kind)
            place.mkdir()
            # From both ends, so that children have less to compile twice.
            job = asdict(wanted) | {"rows": sorted(wanted.rows, reverse=kind % 2 == 0)}
            line = json.dumps(job | {"kind": kind, "place": str(place), "folder": str(self.folder)})
            # The same code as here, wherever it was found.
            around = [f"MLX_PTX_CACHE_DIR={place}", f"PYTHONPATH={os.pathsep.join(filter(None, sys.path))}"]
            with (place / "errors").open("wb") as errors:
                command, pipe, nothing = ["/usr/bin/env", *around, *program], subprocess.PIPE, subprocess.DEVNULL
                process = subprocess.Popen(command, stdin=pipe, stdout=nothing, stderr=errors)
            self._all.append(_Child(process, place))
            assert process.stdin is not None, "it is a pipe, and open as long as this process lives"
            process.stdin.write(f"{line}\n".encode())
            process.stdin.flush()

    def collect(self) -> None:
        """Wait until they are done, put what they compiled where MLX looks, and note it there. Once is enough."""
        if self._place is None:
            return
        places = [child.place for child in self._all if self._ended_well(child)]
        try:
            names = sorted({name for place in places for name in move(place, self.folder)})
            # Also where a child failed: MLX compiles the rest by itself, and keeps it.
            write_whole(self.mark, json.dumps(names).encode())
        except OSError as error:
            _log.debug("kernels of draws are not kept in %s: %s", self.folder, error)
        self.end()

    def _ended_well(self, child: _Child) -> bool:
        try:
            code = child.process.wait(max(self.end_at - self.clock(), 0.0))
            why = f"exit code {code}"
        except subprocess.TimeoutExpired:
            code, why = -1, "it takes too long"
        if code != 0:
            said = ""
            with suppress(OSError):
                said = (child.place / "errors").read_bytes().decode(errors="replace").strip()[-500:]
            _log.debug("draws of kind %s are left to MLX to compile: %s %s", child.place.name, why, said)
        return code == 0

    def end(self) -> None:
        """End those that still run, and remove what they made."""
        for child in self._all:
            child.process.kill()
            # Leaving it closes the pipe, and waits.
            with suppress(OSError), child.process:
                pass
        if self._place is not None:
            shutil.rmtree(self._place, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
        self._all, self._place, self._lock = [], None, -1


@contextmanager
def compiling(
    wanted: Wanted,
    folder: Path | None,
    *,
    program: Sequence[str] = PROGRAM,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Callable[[], None]]:
    """While this is open children compile what *folder* lacks; what is yielded waits for them, at most `LIMIT_S`.

    Args:
        wanted: what is drawn.
        folder: of `disk_cache.open_folder`.
        program: the child.
        clock: seconds.
    """
    children = Children()
    try:
        try:
            if folder is not None and target() == "cuda":
                _remove_left(folder)
                mark = folder / wanted.mark
                if not _present(mark) and len(os.sched_getaffinity(0)) >= _CORES_NEEDED:
                    children = Children(folder, mark, clock, clock() + LIMIT_S)
                    children.start(wanted, program)
        except OSError as error:
            _log.debug("draws are left to MLX to compile: %s", error)
            children.end()
        yield children.collect
    finally:
        children.end()


def _present(mark: Path) -> bool:
    try:
        names = json.loads(mark.read_bytes())
    except (FileNotFoundError, ValueError):
        return False
    return all((mark.parent / name).exists() for name in names)


def _remove_left(folder: Path) -> None:
    """Temporary folders of workers that were killed."""
    for place in folder.glob(f"{PREFIX}*"):
        with suppress(OSError):
            lock = os.open(place, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(place, ignore_errors=True)
            finally:
                os.close(lock)
