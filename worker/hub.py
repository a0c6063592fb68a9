"""A checkpoint on the Hugging Face hub, by its config and the headers of its weight files; no more is fetched."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from huggingface_hub import HfApi, errors, hf_hub_download, try_to_load_from_cache

from mtplx.errors import ModelFilesError
from mtplx.paths import exists, expanded
from worker.engine.files import HUB_ID, KNOWN, Tensor, check_model_files, unreachable
from worker.speculation.mtp.survey import CONFIG, Checkpoint, read_config

# Headers that are read at once: a large checkpoint has 163 files.
_AT_ONCE: Final = 8
# The first is of the HTTP library, whichever the hub's uses.
_UNREACHED: Final = (errors.HTTPError, OSError, ValueError)  # type: ignore[attr-defined]


def is_elsewhere(name: str) -> bool:
    """Whether *name* is a hub id of which no whole copy is on this machine."""
    if name in KNOWN or exists(expanded(name)) or not HUB_ID.fullmatch(name):
        return False
    config = try_to_load_from_cache(name, CONFIG)
    if not isinstance(config, str):
        return True
    try:
        check_model_files(Path(config).parent)
    except ModelFilesError:
        return True
    return False


def checkpoint(hub_id: str) -> Checkpoint:
    """The checkpoint *hub_id*.

    Raises:
        ModelFilesError: it cannot be looked at, or is none.
    """
    api = HfApi()
    try:
        config = read_config(Path(hf_hub_download(hub_id, CONFIG)).parent)
        files = sorted(name for name in api.list_repo_files(hub_id) if Path(name).match("*.safetensors"))
        # Those in folders are other forms of the same weights.
        top = [name for name in files if "/" not in name]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            headers = list(pool.map(lambda name: api.parse_safetensors_file_metadata(hub_id, name), top))
    except _UNREACHED as error:
        raise unreachable(hub_id, error) from error
    except errors.SafetensorsParsingError as error:
        raise ModelFilesError(f"{hub_id} holds a file that is no safetensors file: {error}") from error
    if not top:
        raise ModelFilesError(f"{hub_id} holds no safetensors files; take a conversion of it that does.")
    found: dict[str, Tensor] = {}
    for name, header in zip(top, headers, strict=True):
        found |= _tensors(Path(hub_id) / name, header)
    return Checkpoint(hub_id, hub_id, config, found)


def _tensors(file: Path, header: Any) -> dict[str, Tensor]:
    return {
        name: Tensor(file, tuple(one.shape), one.data_offsets[1] - one.data_offsets[0])
        for name, one in header.tensors.items()
    }
