"""From a loaded model to an engine: which lane, which form of the cache, how large a pool; and health's words."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, cast

import mlx.core as mx

from worker.engine import self_check
from worker.engine.dense_in_place import DenseInPlace
from worker.engine.dense_tail import DenseTail
from worker.engine.forward import Forward, rows_needed
from worker.engine.load import LoadedModel, device_name, weight_bytes
from worker.engine.memory import pages_for_model
from worker.engine.module_lane import module_lane
from worker.engine.packed import NotDenseError, Packed, pack
from worker.engine.serial import SerialEngine
from worker.engine.verify_bank import Switches
from worker.kv.pages import PAGE, Pages
from worker.kv.pool import Pool, Shape
from worker.kv.prefix import Opened, PrefixIndex

_log = logging.getLogger(__name__)

# Rows of a prefill forward, for models up to a size and beyond. On the CPU a row comes out the same however many
# there are. Elsewhere products of one shape keep warm and cold runs equal: few rows make a short prompt fast, many
# a long one, and a small model is done with either sooner than the host has asked for it.
PREFILL_ROWS: Final = {"cpu": (1, 1), "metal": (128, 64), "cuda": (1024, 512)}
SMALL_BYTES: Final = 2 * 10**9

IN_PLACE: Final = self_check.IN_PLACE
TAIL_FORM: Final = "tail"

# How far a lane's logits may be from the module's, of the largest of them, by type: its own rounding, no more.
_CLOSE: Final = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}


def prefill_rows(device: str, model: Any) -> int:
    """Rows of a prefill forward of *model* on *device*, as `device_name` calls it."""
    small, large = PREFILL_ROWS[device]
    return small if weight_bytes(model) <= SMALL_BYTES else large


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What may be chosen.

    kv_bytes: memory for keys and values; None, what the device holds well.
    prefill_chunk: prompt ids between two looks for a cancel, where the rows of a forward are not fixed.
    prefill_rows: rows of a prefill forward; None, from the table.
    form: of the cache, taken unchecked; None, the fastest that passes the check at start.
    switches: of the in-place form where *form* is given.
    trees: drafts may branch, for which the in-place form checks and compiles more at start.
    kernel_folder: where compiled kernels are kept; None, nowhere.
    before_memory: called before the device's free memory is asked for, perhaps more than once: what others of us
        still use of it must not make the pool smaller.
    """

    kv_bytes: int | None = None
    prefill_chunk: int = 512
    prefill_rows: int | None = None
    form: str | None = None
    switches: Switches = Switches()
    trees: bool = False
    kernel_folder: Path | None = None
    before_memory: Callable[[], None] = lambda: None

    def rows(self, loaded: LoadedModel) -> int:
        """Rows of a prefill forward of this model on this device."""
        return self.prefill_rows or prefill_rows(device_name(), loaded.model)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A lane with its books.

    name: "packed" or "module". form: of its cache. why: what keeps it off the fast path, empty if nothing does.
    kernels: each kernel's name, and as in `self_check.Choice`.
    """

    name: str
    form: str
    forward: Forward
    pages: Pages
    page_bytes: int
    why: str
    kernels: dict[str, str] = field(default_factory=dict)


def build(loaded: LoadedModel, options: Options) -> tuple[SerialEngine, dict[str, Any]]:
    """The serial engine for *loaded*, and what READY and health tell of it. A dense model is packed in place.

    Raises:
        SettingsError: the memory asked for is too little or too much.
    """
    lane = _packed(loaded, options)
    limit = lane.pages.count * lane.page_bytes
    index = PrefixIndex(
        lane.pages,
        page_bytes=max(lane.page_bytes, 1),
        limit_bytes=limit,
        align=lane.forward.prefill_rows,
    )
    # Without pages the books only count what mlx-lm's own caches may grow to: there is no pool to tell of.
    pool = {"pool": {"pages": lane.pages.count, "bytes": limit, "tokens": lane.forward.capacity}} if limit else {}
    info = {
        "lane": lane.name,
        "form": lane.form,
        "row_invariant": lane.forward.row_invariant,
        "prefill_rows": lane.forward.prefill_rows,
        "prefix_reuse": lane.forward.prefix_reuse,
        **pool,
        "why": lane.why,
        "kernels": lane.kernels,
    }
    return SerialEngine(loaded, lane.forward, index, prefill_chunk=options.prefill_chunk), info


def _packed(loaded: LoadedModel, options: Options) -> Lane:
    """The packed lane if the model is dense and its packed form computes the same; else the module lane."""
    try:
        packed = pack(loaded.model)
    except NotDenseError as error:
        return _module(loaded, options, str(error))
    rows = options.rows(loaded)
    choice = _choice(packed, options, rows)
    options.before_memory()
    shape = Shape(len(packed.layers), packed.heads.kv_heads, packed.heads.dim, packed.dtype)
    count = pages_for_model(
        loaded, shape.page_bytes, asked=options.kv_bytes, prefill_rows=rows, chunk=options.prefill_chunk
    )
    pool, pages = Pool(shape, count), Pages(count)
    why = choice.why
    for form in (IN_PLACE, TAIL_FORM) if choice.in_place else (TAIL_FORM,):
        forward = _dense(packed, pool, form, rows, choice.switches)
        off = distance(loaded, forward, pages)
        if off <= _CLOSE[loaded.dtype]:
            return Lane(
                name="packed",
                form=form,
                forward=forward,
                pages=pages,
                page_bytes=shape.page_bytes,
                why=why,
                kernels=choice.kernels,
            )
        why = f"its packed form ({form}) differs from mlx-lm's module by {off:.2g} of the largest logit"
        _log.warning("%s: %s", loaded.name, why)
    # Its memory is the module lane's now.
    del pool, forward
    return _module(loaded, options, why)


def _choice(packed: Packed, options: Options, rows: int) -> self_check.Choice:
    """What is used: as given, unchecked, or what the check at start finds."""
    if options.form is not None:
        switches = replace(options.switches, trees=options.trees)
        return self_check.Choice(switches=switches, in_place=options.form == IN_PLACE)
    sizes = self_check.Sizes(trees=options.trees)
    return self_check.choose(
        packed, prefill_rows=max(rows, PAGE), kernel_folder=options.kernel_folder, sizes=sizes
    )


def _dense(packed: Packed, pool: Pool, form: str, rows: int, switches: Switches) -> Forward:
    if form == IN_PLACE:
        return DenseInPlace(packed, pool, prefill_rows=max(rows, PAGE), switches=switches)
    return DenseTail(packed, pool, prefill_rows=rows)


def _module(loaded: LoadedModel, options: Options, why: str) -> Lane:
    options.before_memory()
    forward = module_lane(
        loaded, asked=options.kv_bytes, prefill_rows=options.rows(loaded), chunk=options.prefill_chunk
    )
    reasons = "; ".join(reason for reason in (why, forward.why) if reason)
    form = "pages" if forward.page_bytes else "mlx-lm"
    return Lane(
        name="module",
        form=form,
        forward=forward,
        pages=Pages(forward.pages),
        page_bytes=forward.page_bytes,
        why=reasons,
    )


def distance(loaded: LoadedModel, forward: Forward, pages: Pages) -> float:
    """How far a lane's logits are from those of mlx-lm's module, as a share of the largest.

    Both read a few ids, the lane the last of them as a row of an answer.
    """
    ids = [place * 7919 % loaded.vocabulary for place in range(1, 6)]
    sequence = pages.reserve(rows_needed(len(ids), forward.prefill_rows))
    forward.begin(Opened(sequence, tuple(ids[:-1]), b"", False, (), 0, True))
    first = forward.read(ids[:-1], last=True)
    assert first is not None, "the last chunk gives logits"
    mx.eval(first)
    got = mx.concatenate([first, forward.rows(mx.array(ids[-1:], dtype=mx.uint32))]).astype(mx.float32)
    with self_check.uncompiled():
        want = loaded.model(mx.array([ids], dtype=mx.uint32))[0, -2:].astype(mx.float32)
    # A model that produces no numbers is told so in a job, whatever the lane.
    finite = mx.isfinite(want)
    apart = mx.where(finite, mx.where(mx.isfinite(got), mx.abs(got - want), math.inf), 0)
    share = apart.max() / mx.maximum(mx.where(finite, mx.abs(want), 0).max(), 1e-30)
    mx.eval(share)
    forward.end()
    sequence.release()
    return float(cast("float", share.item()))
