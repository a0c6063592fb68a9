"""Model directories before anything is loaded: where they lie, and whether they are complete."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from huggingface_hub.errors import HfHubHTTPError
from mlx_lm import utils as mlx_lm_utils

from mtplx.errors import ModelFilesError
from mtplx.paths import exists, expanded, is_file, is_folder

# Models that `mtplx pull` knows how to fetch.
KNOWN: Final = ("smollm2-135m",)
# Written by `mtplx pull` beside the weights: {"files": {name: bytes}}.
MANIFEST: Final = "mtplx-manifest.json"
_INDEX: Final = "model.safetensors.index.json"
_JSON: Final = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")
HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_SHARD: Final = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
# mlx-lm has no limit of its own; the longest header of a real model is a few MiB.
_MAX_HEADER: Final = 100_000_000


def model_dir(name: str, cache_dir: Path) -> Path:
    """Where `mtplx pull` keeps the model of that short name."""
    return cache_dir / "models" / name


def resolve_model(name_or_path: str, cache_dir: Path) -> Path:
    """The directory of a pulled name, a local directory, or a Hugging Face id (fetched when absent).

    Raises:
        ModelFilesError: saying what is missing or damaged, and what to do.
    """
    if name_or_path in KNOWN:
        path = model_dir(name_or_path, cache_dir)
        if not is_folder(path):
            raise ModelFilesError(f"{name_or_path} is not in {cache_dir}; run: mtplx pull {name_or_path}")
    elif name_or_path and is_folder(path := expanded(name_or_path)):
        pass
    elif name_or_path and exists(path):
        raise ModelFilesError(f"{path} is a file; --model takes the directory with config.json in it.")
    elif HUB_ID.fullmatch(name_or_path):
        path = _download(name_or_path)
    else:
        raise ModelFilesError(
            f"There is no model {name_or_path!r}: --model takes a pulled name ({', '.join(KNOWN)}), an MLX model "
            "directory, or a Hugging Face id such as mlx-community/SmolLM2-135M-Instruct."
        )
    return path


def check_draft_files(draft: str, cache_dir: Path) -> None:
    """The model that `--draft model:PATH` names is here and whole, whether or not this start drafts.

    A Hugging Face id that is no directory is fetched by who needs it.

    Raises:
        ModelFilesError: saying what is missing or damaged, and what to do.
    """
    if not draft.startswith("model:"):
        return
    name = draft.removeprefix("model:").strip()
    if HUB_ID.fullmatch(name) and not Path(name).expanduser().exists():
        return
    try:
        check_model_files(resolve_model(name, cache_dir))
    except ModelFilesError as error:
        raise ModelFilesError(f"--draft model:{name}: {error}") from error


def model_name(path: Path) -> str:
    """A name for people: the directory's, or `owner/name` where the directory is a hub snapshot."""
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return path.parent.parent.name.removeprefix("models--").replace("--", "/", 1)
    return path.name


def _download(hub_id: str) -> Path:
    try:
        return Path(mlx_lm_utils._download(hub_id))  # noqa: SLF001 - the one way mlx-lm itself fetches a model
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise unreachable(hub_id, error) from error


def unreachable(hub_id: str, error: Exception) -> ModelFilesError:
    """What is told where the hub does not give *hub_id*."""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return ModelFilesError(
        f"{hub_id} cannot be fetched from Hugging Face ({reason}). Check the name and the network; models "
        "behind a licence need `hf auth login`. A directory or a pulled name works without a network."
    )


def weight_file_bytes(path: Path) -> int:
    """Bytes of the weights of the checked model directory *path*, as they lie there."""
    return sum(shard.stat().st_size for shard in weight_files(path))


def check_model_files(path: Path) -> None:
    """Refuse a model directory that is not whole, before any of it is loaded.

    Sizes are taken from the manifest, from the index, and from each weight file's own header.

    Raises:
        ModelFilesError: naming the file.
    """
    if not path.is_dir():
        raise ModelFilesError(f"{path} is not a directory.")
    # Beside the files, or where a download into a local directory keeps its parts.
    unfinished = sorted([*path.glob("*.incomplete"), *(path / ".cache").rglob("*.incomplete")])
    if unfinished:
        raise ModelFilesError(f"{unfinished[0]} is an unfinished download; fetch the model again.")
    check_config(_read_json(path / "config.json"), str(path))
    if (path / MANIFEST).exists():
        _check_manifest(path)
    for shard in weight_files(path):
        tensors_of(shard)
    for name in _JSON:
        if (path / name).exists():
            _read_json(path / name)
    _check_tokenizer(path)


def check_config(config: dict[str, Any], where: str) -> None:
    """Refuse a config that is no model's, or that brings code.

    Raises:
        ModelFilesError: naming *where* it is.
    """
    if not isinstance(config.get("model_type"), str):
        raise ModelFilesError(f"{where}/config.json names no model_type; it is not the config of a model.")
    if config.get("model_file") is not None:
        raise ModelFilesError(f"{where} wants to run its own code ({config['model_file']}); that is never done.")


def _check_manifest(path: Path) -> None:
    files = _read_json(path / MANIFEST).get("files")
    if not isinstance(files, dict):
        raise ModelFilesError(f"{path / MANIFEST} lists no files; remove the directory and pull or copy it again.")
    for name, size in files.items():
        found = (path / name).stat().st_size if is_file(path / name) else None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes, not {size}"
            raise ModelFilesError(f"{path / name} {state}; remove the directory and pull or copy it again.")


def weight_files(path: Path) -> list[Path]:
    """The weight files of the model directory *path*, by name.

    Raises:
        ModelFilesError: there is none, or one is missing.
    """
    if (path / _INDEX).exists():
        weight_map = _read_json(path / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelFilesError(f"{path / _INDEX} has no weight_map; fetch the model again.")
        wanted = {str(name) for name in weight_map.values()}
    else:
        wanted = {file.name for file in path.glob("model*.safetensors")}
        for numbered in [match for name in wanted if (match := _SHARD.fullmatch(name))]:
            wanted |= {f"model-{i:05}-of-{numbered[2]}.safetensors" for i in range(1, int(numbered[2]) + 1)}
    if not wanted:
        raise ModelFilesError(f"{path} has no model*.safetensors file.")
    for name in sorted(wanted):
        if not is_file(path / name):
            raise ModelFilesError(f"{path / name} is missing; the model is not complete. Fetch it again.")
    return [path / name for name in sorted(wanted)]


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where a tensor stands, and what of."""

    file: Path
    shape: tuple[int, ...]
    bytes: int


def tensors_of(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, by its header.

    Raises:
        ModelFilesError: it is damaged, or cut short.
    """
    try:
        if not is_file(file):
            raise ValueError("no file is there")
        size = file.stat().st_size
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(size, _MAX_HEADER):
                raise ValueError("its header is longer than the file")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        found, end = {}, 0
        for name, entry in header.items():
            first, last = map(int, entry["data_offsets"])
            found[name] = Tensor(file, tuple(map(int, entry["shape"])), last - first)
            end = max(end, last)
        expected = 8 + length + end
    except (OSError, struct.error, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelFilesError(f"{file} is not a whole safetensors file ({error}). Fetch it again.") from error
    if size != expected:
        raise ModelFilesError(f"{file} has {size} bytes where its header says {expected}. Fetch it again.")
    return found


def write_tensors(file: Path, tensors: dict[str, mx.array], metadata: dict[str, str]) -> None:
    """Write a safetensors file, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    fresh = file.with_name(f"part-{file.name}")
    try:
        mx.save_safetensors(str(fresh), tensors, metadata=metadata)
        fresh.replace(file)
    except RuntimeError as error:
        raise OSError(str(error)) from error
    finally:
        fresh.unlink(missing_ok=True)


def _check_tokenizer(path: Path) -> None:
    found = [path / name for name in _TOKENIZERS if (path / name).exists()] + sorted(path.glob("*.tiktoken"))
    if not found:
        raise ModelFilesError(f"{path / 'tokenizer.json'} is missing; the model has no tokenizer.")
    for file in found:
        if file.stat().st_size == 0:
            raise ModelFilesError(f"{file} is empty; fetch the model again.")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelFilesError(f"{file} is missing; is {file.parent} a model directory?") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFilesError(f"{file} cannot be read as JSON ({error}). Fetch the model again.") from error
    if not isinstance(content, dict):
        raise ModelFilesError(f"{file} does not hold a JSON object. Fetch the model again.")
    return content
