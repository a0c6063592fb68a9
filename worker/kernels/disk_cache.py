"""Kernels of the CUDA build, compiled once and kept on disk.

MLX compiles a custom kernel in every process anew, one after the other, but first looks into the folder that
MLX_PTX_CACHE_DIR names: for `<function>_<hash of the source>.ptx`, machine code, and `.txt`, lines of `function
TAB name in the code`. So what is missing there is compiled beforehand, in parallel. Nothing depends on it: without
a file, or with one under another name, MLX compiles by itself. On Metal the system keeps compiled kernels.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Final

import mlx.core as mx

from mtplx.settings import kernel_folder
from worker.kernels import nvrtc
from worker.kernels.dialect import Launch, keep_texts, target

_log = logging.getLogger(__name__)

# A name beyond this MLX splits into folders.
_LONGEST_NAME: Final = 245
_MASK: Final = 2**64 - 1
_MULTIPLIER: Final = 0xC6A4A7935BD1E995
_SEED: Final = 0xC70F6907
_COMPILE_LIMIT_S: Final = 120.0
# Each update of MLX, and each kind of device, has a folder of its own, which nobody would ever clear.
_UNUSED_S: Final = 30 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Source:
    """A kernel as MLX hands it to the compiler: the function's name, and the whole text."""

    function: str
    text: str

    @property
    def module(self) -> str:
        """What MLX calls the compiled text."""
        return f"{self.function}_{string_hash(self.text.encode()):x}"


def string_hash(data: bytes) -> int:
    """`std::hash<std::string>` of libstdc++ on 64 bits, with which MLX is built on Linux: MurmurHash64A."""
    value = _SEED ^ (len(data) * _MULTIPLIER & _MASK)
    whole = len(data) & ~7
    for (word,) in struct.iter_unpack("<Q", data[:whole]):
        mixed = _shift(word * _MULTIPLIER & _MASK) * _MULTIPLIER & _MASK
        value = (value ^ mixed) * _MULTIPLIER & _MASK
    if whole < len(data):
        value = (value ^ int.from_bytes(data[whole:], "little")) * _MULTIPLIER & _MASK
    return _shift(_shift(value) * _MULTIPLIER & _MASK)


def _shift(value: int) -> int:
    return value ^ value >> 47


def open_folder(cache_dir: Path, now: Callable[[], float] = time.time) -> Path | None:
    """The folder of this MLX and this device, where MLX looks from now on; None where MLX does not run on CUDA.

    To be called before anything is computed: MLX looks up the name of the folder once. What MLX itself compiles
    it keeps there too; a file that a killed process left unfinished is removed, and so are the folders of other
    versions and devices that were not opened for `_UNUSED_S`. A folder that the environment names is left alone.

    Args:
        cache_dir: as in the settings.
        now: seconds since the epoch, as file times are.
    """
    if target() != "cuda":
        return None
    own = cache_dir / "kernels" / f"mlx-{version('mlx')}-{architecture()}"
    folder = kernel_folder(own)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_unfinished(folder)
        if folder == own:
            _remove_unused(own, now())
    except OSError as error:
        _log.debug("kernels are not kept in %s: %s", folder, error)
        return None
    keep_texts(folder)
    return folder


def architecture() -> str:
    """The device as MLX names it to the compiler."""
    info = mx.device_info()
    major, minor = int(info["compute_capability_major"]), int(info["compute_capability_minor"])
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def fill(launches: Iterable[Launch], folder: Path) -> int:
    """Compile what *launches* need and *folder* lacks; how many kernels that was.

    What does not work is left to MLX, with a line in the debug log.
    """
    try:
        missing = [source for source in _sources(launches) if not (folder / f"{source.module}.ptx").exists()]
        library, include = find_library(), find_headers()
    except (OSError, LookupError, ValueError, RuntimeError, struct.error) as error:
        _log.debug("kernels are left to MLX to compile: %s", error)
        return 0
    job = {"library": str(library), "include": str(include), "architecture": architecture()}

    def compiled(source: Source) -> bool:
        try:
            _store(source, *_compile(source, job), folder)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            _log.debug("%s is left to MLX to compile: %s", source.function, error)
            return False
        return True

    with ThreadPoolExecutor(max(1, min(len(missing), len(os.sched_getaffinity(0))))) as threads:
        return sum(threads.map(compiled, missing))


def _sources(launches: Iterable[Launch]) -> list[Source]:
    """The texts that *launches* are compiled from, each once."""
    known: dict[object, Source] = {}
    for launch in launches:
        kinds = tuple((str(array.dtype), array.ndim) for array in launch.arrays)
        key = (launch.kernel, str(launch.template), kinds, str(launch.dtype))
        if key not in known:
            known[key] = source_of(launch)
    return [source for source in known.values() if len(source.module) <= _LONGEST_NAME]


def source_of(launch: Launch) -> Source:
    """The text that MLX would compile for *launch*, from MLX itself: a graph with this kernel, exported to a file.

    Raises:
        ValueError, struct.error: the file is not as expected.
    """
    stand_ins = [mx.zeros((1,) * array.ndim, dtype=array.dtype) for array in launch.arrays]
    with tempfile.TemporaryDirectory() as place:
        path = f"{place}/graph"
        mx.export_function(path, lambda *arrays: replace(launch, arrays=arrays).run("cuda"), *stand_ins)
        data = Path(path).read_bytes()
    function, rest = _string(data[data.index(b"CustomKernel") + len("CustomKernel") :])
    text, _ = _string(rest)
    if f"__global__ void {function}(" not in text:
        raise ValueError("MLX's export does not hold the kernel's text where it was")
    return Source(function, text)


def _string(data: bytes) -> tuple[str, bytes]:
    (length,) = struct.unpack_from("<Q", data)
    return data[8 : 8 + length].decode(), data[8 + length :]


def find_library() -> Path:
    """The NVRTC that MLX has loaded into this process.

    Raises:
        LookupError: there is none.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        if found := re.search(r"/\S*/libnvrtc\.so[.\d]*$", line):
            return Path(found[0])
    raise LookupError("MLX has loaded no libnvrtc")


def find_headers() -> Path:
    """CUDA's own headers, where MLX finds them too.

    Raises:
        LookupError: there are none.
    """
    packages = Path(mx.__file__).parents[1]
    places = [*sorted(packages.glob("nvidia/*/include"), reverse=True), Path("/usr/local/cuda/include")]
    for place in places:
        if (place / "cuda_fp16.h").exists():
            return place
    raise LookupError("there is no cuda_fp16.h")


def _compile(source: Source, job: dict[str, str]) -> tuple[str, bytes]:
    done = subprocess.run(
        [sys.executable, "-P", nvrtc.__file__],
        input=json.dumps(job | {"name": source.function, "source": source.text}),
        capture_output=True,
        text=True,
        check=False,
        timeout=_COMPILE_LIMIT_S,
    )
    if done.returncode != 0:
        raise ValueError(done.stderr.strip()[:2000] or f"exit code {done.returncode}")
    answer = json.loads(done.stdout)
    return answer["lowered"], base64.b64decode(answer["cubin"])


def _store(source: Source, lowered: str, cubin: bytes, folder: Path) -> None:
    # MLX asks for the code first, so the names are there before it.
    write_whole(folder / f"{source.module}.txt", f"{nvrtc.NAMESPACE}{source.function}\t{lowered}\n".encode())
    write_whole(folder / f"{source.module}.ptx", cubin)


def write_whole(path: Path, data: bytes) -> None:
    """The whole file or none, whoever else writes it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise


def _remove_unfinished(folder: Path) -> None:
    """MLX writes its own files in place: where it was killed it would fail over them at every start."""
    for code in folder.glob("*.ptx"):
        if not is_finished(code):
            _log.debug("%s is not whole and is removed", code)
            code.unlink(missing_ok=True)


def is_finished(code: Path) -> bool:
    """Whether *code* is whole, and its names are beside it."""
    names = code.with_suffix(".txt")
    return names.exists() and b"\t" in names.read_bytes() and _is_whole(code)


def _remove_unused(own: Path, now: float) -> None:
    """Mark *own* as used, and drop the folders beside it that nobody has opened for long."""
    os.utime(own, (now, now))
    for other in own.parent.glob("mlx-*"):
        # Another process may be about to do the same.
        with suppress(OSError):
            if other.is_dir() and not other.is_symlink() and now - other.stat().st_mtime > _UNUSED_S:
                _log.debug("%s was not used for long and is removed", other)
                shutil.rmtree(other)


def _is_whole(code: Path) -> bool:
    """Whether machine code, an ELF file, has all the parts that its head names; assembly text has only to end."""
    size = code.stat().st_size
    with code.open("rb") as file:
        head = file.read(64)
    if not head.startswith(b"\x7fELF"):
        return size > 0
    if len(head) < 64:
        return False
    programs, sections = struct.unpack_from("<QQ", head, 32)
    program_size, program_count, section_size, section_count = struct.unpack_from("<4H", head, 54)
    return bool(size >= max(programs + program_size * program_count, sections + section_size * section_count))
