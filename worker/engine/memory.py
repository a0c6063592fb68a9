"""How many pages the pool of keys and values gets, from what the device can hold and what was asked for."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Final

import mlx.core as mx

from mtplx.errors import SettingsError
from mtplx.sizes import format_size
from worker.engine.forward import rows_needed
from worker.engine.load import LoadedModel
from worker.kv.pages import pages_for

_log = logging.getLogger(__name__)

# A pool must hold a short question and its answer, and by itself takes no more than two jobs of full length.
LEAST_POSITIONS: Final = 64
CONTEXTS: Final = 2
# What a model that names no context is taken to have when the pool is sized; its jobs may be as long as the pool.
UNNAMED_CONTEXT: Final = 2**17
# Beside the logits: hidden states, products and scores of one row of a prefill forward, a few of each at a time.
_ROW_BYTES: Final = 512 * 1024
_LOGIT_BYTES: Final = 8
# The reserve is an estimate, made for a roomy device: on a small one it gets no more than one part in so many.
_RESERVE_SHARE: Final = 4


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes on the device. total: what MLX may fill. used: what it has filled, the weights above all."""

    total: int
    used: int

    @property
    def left(self) -> int:
        """Bytes not yet filled; never below 0."""
        return max(self.total - self.used, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a model asks of a pool.

    page_bytes: one page in all its layers. context: positions of the model. prefill_rows: as in `Forward`.
    reserve: bytes to be left free for a prefill forward.
    """

    page_bytes: int
    context: int
    prefill_rows: int
    reserve: int

    def pages(self, positions: int) -> int:
        """Pages that a job of *positions* reserves."""
        return pages_for(rows_needed(positions, self.prefill_rows))

    @property
    def least(self) -> int:
        """Pages below which a pool is of no use."""
        return self.pages(min(LEAST_POSITIONS, self.context))


def pool_pages(asked: int | None, room: Room, need: Need) -> int:
    """Pages of the pool: as many as *asked* bytes hold, or if None half of what weights and reserve leave.

    By itself the pool grows no larger than `CONTEXTS` jobs of full length need, and no smaller than `need.least`;
    the reserve is a quarter of what is left at most. The log warns where the device is so small.

    Raises:
        SettingsError: *asked* is too small for any job, or more than the device has left.
    """
    if asked is None:
        reserve = min(need.reserve, room.left // _RESERVE_SHARE)
        half = (room.left - reserve) // 2 // need.page_bytes
        context = min(need.context, UNNAMED_CONTEXT)
        pages = max(min(half, CONTEXTS * need.pages(context)), need.least)
        if reserve < need.reserve or half < need.least:
            _warn(room, need, pages)
        return pages
    pages = asked // need.page_bytes
    if pages < need.least:
        raise SettingsError(
            f"--kv-memory {format_size(asked)} holds less than {min(LEAST_POSITIONS, need.context)} tokens of "
            f"this model; give at least {format_size(need.least * need.page_bytes, up=True)}, or auto."
        )
    if asked > room.left:
        raise SettingsError(
            f"--kv-memory {format_size(asked)} is more than the {format_size(room.left)} that the device has left "
            f"beside the {format_size(room.used)} in use; give less, or auto."
        )
    return pages


def _warn(room: Room, need: Need, pages: int) -> None:
    chunk = "a smaller --prefill-chunk needs less" if need.prefill_rows == 1 else "another model may fit better"
    _log.warning(
        "little memory: %s are left beside the %s in use, a forward of a prompt may take %s of them, and keys and "
        "values get %s; %s, and --kv-memory sets the size of the pool",
        format_size(room.left),
        format_size(room.used),
        format_size(need.reserve, up=True),
        format_size(pages * need.page_bytes),
        chunk,
    )


def pages_for_model(
    loaded: LoadedModel, page_bytes: int, *, asked: int | None, prefill_rows: int, chunk: int
) -> int:
    """Pages of the pool of *loaded* on this device, by `pool_pages`; to be asked when the weights are loaded.

    Args:
        loaded: the model.
        page_bytes: one page in all its layers.
        asked: `Settings.kv_bytes`.
        prefill_rows: as in `Forward`.
        chunk: ids that a forward of a prompt reads where *prefill_rows* is 1.

    Raises:
        SettingsError: *asked* is too little or too much.
    """
    rows = prefill_rows if prefill_rows > 1 else min(chunk, loaded.context)
    need = Need(
        page_bytes=page_bytes,
        context=loaded.context,
        prefill_rows=prefill_rows,
        reserve=prefill_bytes(rows, loaded.width),
    )
    return pool_pages(asked, room(), need)


def check_draft_fits(what: str, weights: int) -> None:
    """Refuse what drafts where its *weights*, in bytes, are more than the device has left, before they are loaded.

    what: it is, in words that a sentence about it begins with.

    Raises:
        SettingsError: they are.
    """
    now = room()
    if weights > now.left:
        raise SettingsError(
            f"{what}: its weights take {format_size(weights, up=True)}, and the device has "
            f"{format_size(now.left)} left beside the {format_size(now.used)} in use; give keys and values less "
            "with --kv-memory, or draft with something smaller: --draft ngram needs no memory."
        )


def prefill_bytes(rows: int, width: int) -> int:
    """Bytes set aside for a prefill forward of *rows* rows in a model whose head is *width* wide; an estimate."""
    return rows * (width * _LOGIT_BYTES + _ROW_BYTES)


def room() -> Room:
    """What MLX's default device can hold and holds now: to be asked when the weights are loaded."""
    info, used = mx.device_info(), mx.get_active_memory()
    if "max_recommended_working_set_size" in info:
        return Room(int(info["max_recommended_working_set_size"]), used)
    if "free_memory" in info:
        # Other programs' share is not ours to fill; what MLX keeps for its next arrays is.
        return Room(int(info["free_memory"]) + used + mx.get_cache_memory(), used)
    return Room(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), used)
