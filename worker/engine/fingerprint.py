"""Two hashes by which a resumed answer is judged: is it the same model, and are its numbers computed alike?"""

from __future__ import annotations

import hashlib
import json
import platform
import struct
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, BinaryIO, Final

from mtplx import __version__
from worker.engine import self_check
from worker.engine.files import MANIFEST, weight_files
from worker.engine.load import LoadedModel, chip_name, device_name

# What makes ids of a text, text of ids, and numbers of ids.
LIBRARIES: Final = ("mlx", "mlx-lm", "transformers", "tokenizers", "jinja2")
# Beside the weights: configs, tokenizers and templates, whatever their names. A note among them does no harm.
_TOLD_BY: Final = frozenset({".json", ".jsonl", ".jinja", ".txt", ".model", ".tiktoken"})
# Of each tensor its first, middle and last bytes: reading all would double the time in which a model loads.
_PIECE: Final = 4096


def model_hash(path: Path) -> str:
    """Hex SHA-256 over the checked model directory *path*: weights, config, tokenizer and chat templates.

    Weights count by their headers and by three pieces of each tensor, all else by every byte.

    Raises:
        OSError: a file cannot be read.
    """
    found = hashlib.sha256()
    weights = weight_files(path)
    for file in sorted(_texts(path)):
        _add(found, str(file.relative_to(path)).encode(), file.read_bytes())
    for file in weights:
        with file.open("rb") as stream:
            _add(found, file.name.encode(), *_pieces(stream))
    return found.hexdigest()


def build_hash(loaded: LoadedModel, info: Mapping[str, Any]) -> str:
    """Hex SHA-256 over what decides how the numbers of *loaded* come out here.

    Args:
        loaded: the model.
        info: of READY; lane, form, row invariance, rows of a prefill forward and kernels are taken from it.
    """
    told = {
        "dtype": loaded.dtype,
        "device": device_name(),
        "chip": chip_name(),
        "machine": platform.machine(),
        "mtplx": __version__,
        "libraries": {name: _version(name) for name in LIBRARIES},
        **{name: info.get(name) for name in ("lane", "form", "row_invariant", "prefill_rows")},
        # A reason holds times, which are never the same twice.
        "kernels": {name: self_check.is_on(state) for name, state in info.get("kernels", {}).items()},
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _texts(path: Path) -> Iterable[Path]:
    for file in path.rglob("*"):
        parts = file.relative_to(path).parts
        hidden = any(part.startswith(".") for part in parts)
        if file.suffix in _TOLD_BY and file.name != MANIFEST and not hidden and file.is_file():
            yield file


def _pieces(stream: BinaryIO) -> Iterable[bytes]:
    head = stream.read(8)
    (length,) = struct.unpack("<Q", head)
    header = stream.read(length)
    yield head + header
    tensors = (entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__")
    for start, end in sorted(tuple(offsets) for offsets in tensors):
        for place in sorted({start, max(start, (start + end - _PIECE) // 2), max(start, end - _PIECE)}):
            stream.seek(8 + length + place)
            yield stream.read(min(_PIECE, end - place))


def _add(found: Any, *parts: bytes) -> None:
    """Add *parts* so that no other parts give the same bytes."""
    for part in parts:
        found.update(struct.pack("<Q", len(part)))
        found.update(part)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
