"""A checkpoint on the Hugging Face hub, by its config and the headers of its weight files; no more is fetched."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from huggingface_hub import HfApi, errors, hf_hub_download, try_to_load_from_cache

from mtplx.errors import ModelFilesError
from mtplx.paths import exists, expanded
from worker.engine.files import HUB_ID, KNOWN, Tensor, check_config, check_model_files, unreachable
from worker.speculation.mtp.survey import CONFIG, Checkpoint, read_config

# Headers that are read at once: a large checkpoint has 163 files.
_AT_ONCE: Final = 8
# The first is of the HTTP library, whichever the hub's uses.
_UNREACHED: Final = (errors.HTTPError, OSError, ValueError)  # type: ignore[attr-defined]


def is_hub_id(name: str) -> bool:
    """Whether *name* is a hub id, and nothing on this machine."""
    return name not in KNOWN and not exists(expanded(name)) and HUB_ID.fullmatch(name) is not None


def whole_copy(hub_id: str) -> Path | None:
    """Where the copy of *hub_id* that was fetched is, though the hub may have a later one; None: there is none."""
    config = try_to_load_from_cache(hub_id, CONFIG)
    if not isinstance(config, str):
        return None
    try:
        check_model_files(Path(config).parent)
    except ModelFilesError:
        return None
    return Path(config).parent


def checkpoint(hub_id: str) -> Checkpoint:
    """The checkpoint *hub_id*.

    Raises:
        ModelFilesError: it cannot be looked at, or is none.
    """
    api = HfApi()
    try:
        config = read_config(Path(hf_hub_download(hub_id, CONFIG)).parent)
        check_config(config, hub_id)
        # Those in folders are other forms of the same weights.
        files = sorted(name for name in api.list_repo_files(hub_id) if re.fullmatch(r"[^/]+\.safetensors", name))
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            headers = list(pool.map(lambda name: _tensors(api, hub_id, name), files))
    except errors.LocalEntryNotFoundError as error:
        raise unreachable(hub_id, error) from error
    except errors.EntryNotFoundError as error:
        raise ModelFilesError(f"{hub_id} has no {CONFIG}; take a repository that holds a model.") from error
    except _UNREACHED as error:
        raise unreachable(hub_id, error) from error
    if not files:
        raise ModelFilesError(f"{hub_id} holds no safetensors files; take a conversion of it that does.")
    return Checkpoint(hub_id, hub_id, config, {name: one for header in headers for name, one in header.items()})


def _tensors(api: HfApi, hub_id: str, name: str) -> dict[str, Tensor]:
    """The tensors of one file, by its header."""
    try:
        found = api.parse_safetensors_file_metadata(hub_id, name).tensors
        return {
            tensor: Tensor(Path(hub_id) / name, tuple(one.shape), one.data_offsets[1] - one.data_offsets[0])
            for tensor, one in found.items()
        }
    except (errors.SafetensorsParsingError, TypeError, LookupError, AttributeError) as error:
        why = str(error) or type(error).__name__
        raise ModelFilesError(
            f"{name} of {hub_id} is no whole safetensors file ({why}); take another revision or conversion."
        ) from error
