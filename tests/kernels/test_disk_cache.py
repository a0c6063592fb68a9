"""Kernels that are compiled beforehand: under the names that MLX looks for, and never in the way."""

from __future__ import annotations

import logging
import os
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from worker.kernels import dialect, disk_cache, swiglu
from worker.kernels.dialect import Launch, recorded
from worker.kernels.disk_cache import Source

HASHES = """
#include <functional>
#include <iostream>
#include <string>
int main() {
  for (std::string text; std::getline(std::cin, text);) std::cout << std::hash<std::string>{}(text) << "\\n";
}
"""


def built(folder: Path, source: str, *flags: str) -> Path:
    made = folder / "made"
    subprocess.run(["c++", "-O1", "-x", "c++", "-o", made, *flags, "-"], input=source, text=True, check=True)
    return made


def a_launch(width: int = 64) -> Launch:
    return swiglu.launch(mx.zeros((1, 2 * width), dtype=mx.bfloat16))


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a compiler that answers, and an MLX that tells its texts."""
    text = Path(__file__).with_name("nvrtc_stub.cpp").read_text()
    made = built(tmp_path, text, "-shared", "-fPIC")
    monkeypatch.setattr(disk_cache, "find_library", lambda: made)
    monkeypatch.setattr(disk_cache, "find_headers", lambda: tmp_path)
    monkeypatch.setattr(disk_cache, "architecture", lambda: "sm_90a")
    monkeypatch.setattr(
        disk_cache, "source_of", lambda launch: Source(f"swiglu_{launch.template[1][1]}", f"text {launch.shape}\n")
    )
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "kept").mkdir()
    return tmp_path / "kept"


def test_the_hash_is_that_of_the_c_plus_plus_library(tmp_path: Path) -> None:
    texts = ["", *("abcdefghijklmnopqrstuvwxyz"[:n] for n in range(1, 26)), "über " * 2000]
    program = built(tmp_path, HASHES)
    told = subprocess.run([program], input="\n".join(texts) + "\n", capture_output=True, text=True, check=True)
    assert [disk_cache.string_hash(text.encode()) for text in texts] == [int(line) for line in told.stdout.split()]


def test_the_hash_has_a_known_value() -> None:
    assert disk_cache.string_hash(b"mtplx") == 0x95929EC3B28884DD


@pytest.mark.usefixtures("library")
def test_what_is_missing_is_compiled_and_named_as_mlx_looks_for_it(folder: Path) -> None:
    launches = [a_launch(64), a_launch(64), a_launch(128)]
    assert disk_cache.fill(launches, folder) == 2
    first = Source("swiglu_64", "text (1, 64)\n")
    assert first.module == f"swiglu_64_{disk_cache.string_hash(first.text.encode()):x}"
    name = "mlx::core::cu::swiglu_64"
    assert (folder / f"{first.module}.txt").read_text() == f"{name}\t_Z{len(name)}\n"
    code = (folder / f"{first.module}.ptx").read_text()
    for part in (name, "--gpu-architecture=sm_90a ", f"--include-path={folder.parent} ", "utils.cuh ", first.text):
        assert part in code
    assert len(list(folder.iterdir())) == 4, "nothing else is left there"


@pytest.mark.usefixtures("library")
def test_what_is_there_is_not_compiled_again(folder: Path) -> None:
    assert disk_cache.fill([a_launch()], folder) == 1
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert disk_cache.fill([a_launch()], folder) == 0
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


@pytest.mark.usefixtures("library")
def test_a_kernel_that_the_compiler_refuses_is_left_to_mlx(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    texts = {64: "REFUSE", 128: "text"}
    monkeypatch.setattr(
        disk_cache, "source_of", lambda launch: Source(f"f{launch.shape[1]}", texts[launch.shape[1]])
    )
    with caplog.at_level(logging.DEBUG):
        assert disk_cache.fill([a_launch(64), a_launch(128)], folder) == 1
    assert [record.getMessage() for record in caplog.records] == ["f64 is left to MLX to compile: line 1: no"]
    assert len(list(folder.iterdir())) == 2


def test_without_a_compiler_all_is_left_to_mlx(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On this machine MLX has no CUDA and tells no text; with one it has loaded no compiler."""
    with caplog.at_level(logging.DEBUG):
        assert disk_cache.fill([a_launch()], folder) == 0
    assert len(caplog.records) == 1
    assert "left to MLX to compile" in caplog.text
    with pytest.raises(LookupError):
        disk_cache.find_library()


def test_mlx_is_not_pointed_anywhere_without_cuda(tmp_path: Path) -> None:
    assert disk_cache.open_folder(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX runs on CUDA."""
    monkeypatch.setattr(disk_cache, "target", lambda: "cuda")
    monkeypatch.setattr(disk_cache, "architecture", lambda: "sm_90a")


def opened(tmp_path: Path) -> Path:
    found = disk_cache.open_folder(tmp_path)
    assert found is not None
    return found


@pytest.mark.usefixtures("cuda")
def test_on_cuda_mlx_looks_into_a_folder_of_this_version_and_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLX_PTX_CACHE_DIR", raising=False)
    found = opened(tmp_path)
    assert found.parent == tmp_path / "kernels"
    assert found.name.endswith("-sm_90a")
    assert os.environ["MLX_PTX_CACHE_DIR"] == str(found)
    assert found.stat().st_mode & 0o777 == 0o700


@pytest.mark.usefixtures("cuda")
def test_a_folder_that_somebody_chose_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path / "mine"))
    assert opened(tmp_path) == tmp_path / "mine"


DAY_S = 24 * 3600.0


@pytest.mark.usefixtures("cuda")
def test_folders_of_other_versions_are_dropped_when_unused_for_a_month(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLX_PTX_CACHE_DIR", raising=False)
    now = 1000 * DAY_S
    kept = tmp_path / "kernels"
    for name, days in {"mlx-0.1-sm_90a": 31, "mlx-0.2-sm_80": 29, "mine": 400, "mlx-0.3-sm_70": 0}.items():
        (kept / name).mkdir(parents=True)
        (kept / name / "some.ptx").write_bytes(b"code")
        os.utime(kept / name, (now - days * DAY_S,) * 2)
    (kept / "mlx-link").symlink_to(kept / "mine")
    (kept / "mlx-file").touch()
    own = disk_cache.open_folder(tmp_path, lambda: now)
    assert own is not None
    names = {"mlx-0.2-sm_80", "mine", "mlx-0.3-sm_70", "mlx-link", "mlx-file", own.name}
    assert {path.name for path in kept.iterdir()} == names
    # Opened again all the time, the folder is in use although nothing new is kept there.
    monkeypatch.delenv("MLX_PTX_CACHE_DIR")
    for day in range(0, 60, 20):
        disk_cache.open_folder(tmp_path, lambda day=day: now + day * DAY_S)
    monkeypatch.delenv("MLX_PTX_CACHE_DIR")
    monkeypatch.setattr(disk_cache, "architecture", lambda: "sm_100a")
    other = disk_cache.open_folder(tmp_path, lambda: now + 65 * DAY_S)
    assert other is not None
    assert {path.name for path in kept.iterdir()} == {"mine", "mlx-link", "mlx-file", own.name, other.name}


@pytest.mark.usefixtures("cuda")
def test_beside_a_folder_that_somebody_chose_nothing_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path / "theirs" / "mlx-chosen"))
    for place in (tmp_path / "theirs", tmp_path / "kernels"):
        (place / "mlx-old").mkdir(parents=True)
        os.utime(place / "mlx-old", (0.0, 0.0))
    assert disk_cache.open_folder(tmp_path, lambda: 1000 * DAY_S) is not None
    assert (tmp_path / "theirs" / "mlx-old").exists()
    assert (tmp_path / "kernels" / "mlx-old").exists()


def elf(size: int) -> bytes:
    """Machine code of *size* bytes whose head names sections up to the byte 256."""
    head = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF", 2, 190, 1, 0, 0, 128, 0, 64, 56, 0, 64, 2, 1)
    return head + bytes(max(size - len(head), 0))


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("code", "names", "stays"),
    [
        (elf(256), b"f\tg\n", True),
        (elf(255), b"f\tg\n", False),
        (elf(256)[:40], b"f\tg\n", False),
        (elf(256), b"", False),
        (elf(256), None, False),
        (b"", b"f\tg\n", False),
        (b".version 9.0\n", b"f\tg\n", True),
    ],
)
def test_a_file_that_mlx_could_not_finish_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: bytes, names: bytes | None, stays: bool
) -> None:
    monkeypatch.delenv("MLX_PTX_CACHE_DIR", raising=False)
    found = opened(tmp_path)
    (found / "some.ptx").write_bytes(code)
    if names is not None:
        (found / "some.txt").write_bytes(names)
    opened(tmp_path)
    assert (found / "some.ptx").exists() is stays


def test_launches_are_recorded_as_the_graph_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialect, "target", lambda: "metal")
    monkeypatch.setattr(dialect, "build", lambda *_: lambda output_shapes, **_: [mx.zeros(output_shapes[0])])
    run: Callable[..., mx.array] = mx.compile(swiglu.swiglu)
    with recorded() as outer:
        run(mx.zeros((2, 128), dtype=mx.bfloat16))
        with recorded() as inner:
            swiglu.swiglu(mx.zeros((4, 128), dtype=mx.bfloat16))
    swiglu.swiglu(mx.zeros((8, 128), dtype=mx.bfloat16))
    assert [launch.shape for launch in outer] == [(2, 64), (4, 64)]
    assert [launch.shape for launch in inner] == [(4, 64)]
