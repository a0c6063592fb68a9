"""From a loaded model to an engine: which lane, which form of the cache, how large a pool, and what health says of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from worker.engine.dense_in_place import DenseInPlace
from worker.engine.dense_tail import DenseTail
from worker.engine.engine import Engine
from worker.engine.forward import Forward, rows_needed
from worker.engine.load import LoadedModel, device_name
from worker.engine.packed import NotDenseError, Packed, pack
from worker.engine.reference import ReferenceEngine
from worker.engine.serial import SerialEngine
from worker.engine.verify_bank import Switches, unserved
from worker.kernels.dialect import chosen
from worker.kv.pages import PAGE, Pages
from worker.kv.pool import Pool, Shape
from worker.kv.prefix import PrefixIndex

_log = logging.getLogger(__name__)

# Rows of a prefill forward. On the CPU a row comes out the same however many there are; elsewhere the products of a
# fixed count keep warm and cold runs equal, and the wait for the next token after a short prompt bounds the count.
PREFILL_ROWS: Final = {"cpu": 1, "metal": 64, "cuda": 128}

IN_PLACE: Final = "in place"
TAIL_FORM: Final = "tail"

# How far the lane's logits may be from the module's, of the largest of them, by type: its own rounding, no more.
_CLOSE: Final = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}


PagesOf = Callable[[Shape], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What may be chosen.

    prefill_chunk: prompt ids between two looks for a cancel, where the rows of a forward are not fixed.
    prefill_rows: rows of a prefill forward; None, from the table.
    form: "in place" or "tail"; None, the first of these that works here.
    """

    prefill_chunk: int = 512
    prefill_rows: int | None = None
    form: str | None = None
    switches: Switches = Switches()


@dataclass(frozen=True, slots=True)
class Lane:
    """A lane with its books. name: "packed" or "module"; form: of its cache; why: what keeps it off the fast path."""

    forward: Forward
    pages: Pages
    page_bytes: int
    name: str
    form: str
    why: str


def build(loaded: LoadedModel, options: Options, pages_of: PagesOf) -> tuple[SerialEngine, dict[str, Any]]:
    """The serial engine for *loaded*, and what READY and health tell of it.

    Args:
        loaded: the model; a dense one is packed in place and goes on working.
        options: what was chosen.
        pages_of: how many pages a pool of a shape gets on this device.
    """
    lane = _packed_lane(loaded, options, pages_of)
    limit = lane.pages.count * lane.page_bytes
    index = PrefixIndex(
        lane.pages, page_bytes=lane.page_bytes, limit_bytes=limit, align=lane.forward.prefill_rows
    )
    engine = SerialEngine(loaded, lane.forward, index, prefill_chunk=options.prefill_chunk)
    info = {
        "lane": lane.name,
        "form": lane.form,
        "row_invariant": lane.forward.row_invariant,
        "prefill_rows": lane.forward.prefill_rows,
        "pool": {"pages": lane.pages.count, "bytes": limit, "tokens": lane.forward.capacity},
    }
    if lane.why:
        info["why"] = lane.why
    return engine, info


def _packed_lane(loaded: LoadedModel, options: Options, pages_of: PagesOf) -> Lane:
    """The packed lane if the model is dense and its packed form computes the same; else the module lane."""
    try:
        packed = pack(loaded.model)
    except NotDenseError as error:
        return _module_lane(loaded, options, pages_of, str(error))
    shape = Shape(len(packed.layers), packed.heads.kv_heads, packed.heads.dim, packed.dtype)
    pool = Pool(shape, pages_of(shape))
    pages = Pages(pool.pages)
    rows = options.prefill_rows or PREFILL_ROWS[device_name()]
    why = ""
    for form in (options.form,) if options.form else _forms(packed, options):
        forward: Forward = (
            DenseInPlace(packed, pool, prefill_rows=max(rows, PAGE), switches=options.switches)
            if form == IN_PLACE
            else DenseTail(packed, pool, prefill_rows=rows)
        )
        error = distance(loaded, forward, pages)
        if error <= _CLOSE[loaded.dtype]:
            return Lane(forward, pages, shape.page_bytes, "packed", form, why)
        why = f"its packed form ({form}) differs from mlx-lm's module by {error:.2g} of the largest logit"
        _log.warning("%s: %s", loaded.name, why)
    del pool, forward
    return _module_lane(loaded, options, pages_of, why)


def _forms(packed: Packed, options: Options) -> tuple[str, ...]:
    """The forms to be tried, the fastest first."""
    if chosen(options.switches.kernels) is None or unserved(packed):
        return (TAIL_FORM,)
    return (IN_PLACE, TAIL_FORM)


def distance(loaded: LoadedModel, forward: Forward, pages: Pages) -> float:
    """How far a lane's logits are from those of mlx-lm's module, as a share of the largest: prefill and one more row."""
    ids = [place * 7919 % loaded.vocabulary for place in range(1, 6)]
    index = PrefixIndex(pages, page_bytes=1, limit_bytes=0)
    opened = index.open(ids[:-1], rows_needed(len(ids), forward.prefill_rows), owner=b"", cache=False)
    forward.begin(opened)
    first = forward.read(ids[:-1], last=True)
    assert first is not None, "the last chunk gives logits"
    mx.eval(first)
    got = mx.concatenate([first, forward.rows(mx.array(ids[-1:], dtype=mx.uint32))]).astype(mx.float32)
    want = loaded.model(mx.array([ids]))[0, -2:].astype(mx.float32)
    error = mx.abs(got - want).max() / mx.abs(want).max()
    mx.eval(error)
    forward.end()
    opened.sequence.release()
    pages.keepers.remove(index)
    return float(error.item())
