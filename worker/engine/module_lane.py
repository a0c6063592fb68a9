"""The lane of every model that mlx-lm loads: its own module, with our pages where a layer's cache allows it.

A paged layer is written in place only if the forward before was evaluated, so where there is one, steps are not
built ahead. What else a model keeps (windows, recurrent states, latent keys) stays in mlx-lm's objects, fresh ones
for every job.

Drafted rows that were wrong are cut off where a cache holds rows. A window or a recurrent state is put back to
what it was before the forward, for which its arrays are kept, and the right rows are computed again.
"""

from __future__ import annotations

from collections.abc import Sequence as Ids
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache

from worker.engine.forward import MAX_ROWS, Follower, Path, Started, branching, positions_within, rows_needed
from worker.engine.load import LoadedModel
from worker.engine.memory import pages_for_model
from worker.engine.trunk import Tap
from worker.kv.cache import PagedCache, Table
from worker.kv.pages import PAGE, Pages, Sequence, pages_for
from worker.kv.pool import Pool, Shape, settle
from worker.kv.prefix import Opened

# Positions for a model without pages, whose memory is not ours to count; no job's bytes hold a longer prompt.
UNPAGED_POSITIONS: Final = 2**24
_PROBE: Final = (0, 0, 0, 0, 0)
# What a model or its caches raise that cannot do with pages, or cannot be put back, or MLX for them.
_REFUSALS: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
# Of the largest logit; a wrong row changes far more, another order of sums far less.
_TOLERANCE: Final = 0.05


@dataclass(frozen=True, slots=True)
class Layout:
    """Which of a model's caches lie in pages.

    shapes: one for each pool. places: for each cache of the model (pool, layer of it), or None where mlx-lm's own
    object stays. why: what keeps rows from being reused by another job, in words; empty if nothing does.
    replays: some caches can only be put back as a whole. narrow: why no row can be taken back, in words.
    """

    shapes: tuple[Shape, ...]
    places: tuple[tuple[int, int] | None, ...]
    why: str
    replays: bool = False
    narrow: str = ""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all pools; 0 where nothing is paged."""
        return sum(shape.page_bytes for shape in self.shapes)

    def caches(self, model: Any, pools: Ids[Pool], table: Table) -> list[Any]:
        """Caches for one sequence, in the order in which the model takes them."""
        return [
            own if place is None else PagedCache(pools[place[0]], place[1], table)
            for own, place in zip(make_prompt_cache(model), self.places, strict=True)
        ]


def look_at(model: Any) -> Layout:
    """Find out which caches of *model* can lie in pages, and whether they can be put back.

    It is run on a few ids, and must answer the same then.
    """
    layout = _paged(model)
    if all(map(_holds_rows, make_prompt_cache(model))):
        return layout
    return replace(layout, replays=True, narrow=_unrestored(model))


def _paged(model: Any) -> Layout:
    own = make_prompt_cache(model)
    wanted = _probe(model, own)
    layout = _layout(own)
    if not layout.shapes:
        return layout
    pages = Pages(1)
    pools = [Pool(shape, 1, fill=float("nan")) for shape in layout.shapes]
    try:
        found = _probe(model, layout.caches(model, pools, Table(pages.reserve(PAGE))))
    except _REFUSALS as error:
        return _unpaged(own, f"it handles its caches in a way of its own ({str(error) or type(error).__name__})")
    off = mx.abs(found - wanted) > _TOLERANCE * mx.abs(wanted).max()
    if mx.any(off).item():
        return _unpaged(own, "it answers otherwise from pages than from mlx-lm's caches")
    return layout


def _holds_rows(cache: Any) -> bool:
    """Whether cutting rows off leaves what was there before them, bit by bit."""
    if isinstance(cache, CacheList):
        return all(map(_holds_rows, cache.caches))
    return type(cache) in (KVCache, PagedCache)


def _unrestored(model: Any) -> str:
    """What keeps the caches of *model* from being put back, in words; empty if nothing does."""
    answers: list[mx.array] = []
    try:
        for drafted in (False, True):
            caches = make_prompt_cache(model)
            mx.eval(model(_ids(_PROBE)[None], cache=caches))
            if drafted:
                before = [snapshot(cache) for cache in caches]
                mx.eval(model(_ids((1, 1, 1))[None], cache=caches), [cache.state for cache in caches])
                for cache, state in zip(caches, before, strict=True):
                    cache.state = state
            answers.append(_probe(model, caches))
    except _REFUSALS as error:
        return f"its caches cannot be put back to an earlier row ({str(error) or type(error).__name__})"
    same = mx.array_equal(answers[0], answers[1], equal_nan=True).item()
    return "" if same else "its caches are not what they were when put back"


def snapshot(cache: Any) -> Any:
    """The state of a cache of mlx-lm's, which later rows do not change: values, not the arrays' own names."""
    return tree_map(lambda one: copy(one) if isinstance(one, mx.array) else one, cache.state)


def _probe(model: Any, caches: list[Any]) -> mx.array:
    """Float32 [V]: logits behind a few ids, the last of which is read by itself."""
    mx.eval(model(_ids(_PROBE[:-1])[None], cache=caches))
    logits: mx.array = model(_ids(_PROBE[-1:])[None], cache=caches)[0, -1].astype(mx.float32)
    mx.eval(logits)
    return logits


def _unpaged(own: list[Any], why: str) -> Layout:
    return Layout((), (None,) * len(own), why)


def _layout(own: list[Any]) -> Layout:
    """The layout of a model that has filled its caches *own*."""
    layers: dict[tuple[int, int, mx.Dtype], int] = {}
    places: list[tuple[int, int] | None] = []
    others: dict[str, None] = {}
    for cache in own:
        other = _obstacle(cache)
        if other:
            others[other] = None
            places.append(None)
            continue
        kind = (cache.keys.shape[1], cache.keys.shape[3], cache.keys.dtype)
        layer = layers.setdefault(kind, 0)
        layers[kind] += 1
        places.append((list(layers).index(kind), layer))
    shapes = tuple(Shape(count, heads, dim, dtype) for (heads, dim, dtype), count in layers.items())
    return Layout(shapes, tuple(places), f"it has layers with {', '.join(others)}" if others else "")


def _obstacle(cache: Any) -> str:
    """What keeps a filled cache of mlx-lm's from being paged; empty if nothing does."""
    if type(cache) is not KVCache:
        return type(cache).__name__
    if cache.keys is None:
        return "caches that are not used"
    if cache.keys.shape != cache.values.shape or cache.keys.dtype != cache.values.dtype:
        return "keys of another shape than values"
    return ""


def module_lane(loaded: LoadedModel, *, asked: int | None, prefill_rows: int, chunk: int) -> ModuleForward:
    """The lane of *loaded* with pools of *asked* bytes, or if None of what the device holds well.

    Args:
        loaded: the model, whose weights are on the device.
        asked: `Settings.kv_bytes`.
        prefill_rows: B.
        chunk: ids read at once where B is 1.

    Raises:
        SettingsError: *asked* is too little or too much.
    """
    layout = look_at(loaded.model)
    if not layout.shapes:
        pages = pages_for(rows_needed(min(loaded.context, UNPAGED_POSITIONS), prefill_rows))
    else:
        pages = pages_for_model(loaded, layout.page_bytes, asked=asked, prefill_rows=prefill_rows, chunk=chunk)
    return ModuleForward(loaded.model, layout, pages=pages, prefill_rows=prefill_rows)


class ModuleForward:
    """The `Forward` over mlx-lm's module.

    pages, page_bytes: what the books of the pools are made for; 0 bytes where nothing is paged.

    Args:
        model: mlx-lm's module.
        layout: what `look_at` found.
        pages: of each pool; only counted where nothing is paged.
        prefill_rows: B, a multiple of `PAGE`, or 1 where the rows of a prompt do not depend on how it is cut.
    """

    row_invariant = False
    pipelines = False
    follower: Follower | None = None
    tap: Tap | None = None
    """What shows the states to the follower; there is no follower without it."""

    def __init__(self, model: Any, layout: Layout, *, pages: int, prefill_rows: int = 1) -> None:
        assert prefill_rows == 1 or prefill_rows % PAGE == 0
        self.prefill_rows = prefill_rows
        self.capacity = positions_within(pages, prefill_rows)
        self.one_ahead = not layout.shapes
        self.prefix_reuse = bool(layout.shapes) and not layout.why
        self.why = layout.why
        self.width = 1 if layout.narrow else MAX_ROWS
        self.trees = False
        self.cuts = not layout.replays
        self.why_narrow = layout.narrow or "mlx-lm's modules take rows as a chain alone"
        self.pages = pages
        self.page_bytes = layout.page_bytes
        self.pools = [Pool(shape, pages) for shape in layout.shapes]
        self._model = model
        self._layout = layout
        # A recurrent state would take in padding; rows in pages are taken back. Nobody else needs it.
        self._padded = prefill_rows > 1 and self.prefix_reuse
        self._sequence: Sequence | None = None
        self._table: Table | None = None
        self._caches: list[Any] = []
        self._rows = 0
        # The latest rows that may still be taken back, their tokens, and what cannot be cut off as it was before.
        self._open: Started | None = None
        self._tokens: mx.array | None = None
        self._before: list[tuple[Any, Any]] = []

    def begin(self, opened: Opened) -> None:
        """As in `Forward`."""
        assert self.prefix_reuse or not opened.cached, "rows of another job"
        for pool in self.pools:
            pool.copy(opened.copies)
        self._sequence = opened.sequence
        self._table = Table(opened.sequence)
        self._caches = self._layout.caches(self._model, self.pools, self._table)
        self._rows = opened.cached
        if self.follower is not None:
            self.follower.begin(opened)

    def read(self, ids: Ids[int], last: bool) -> mx.array | None:
        """As in `Forward`."""
        assert ids, "a chunk of at least one id"
        if self._padded:
            assert len(ids) == self.prefill_rows or (last and len(ids) < self.prefill_rows), "a whole forward"
            padded = (*ids, *[0] * (self.prefill_rows - len(ids)))
            logits = self._forward(_ids(padded), len(ids), prompt=True)
            self._tell(ids)
            if last:
                return logits[len(ids) - 1 : len(ids)]
            self._evaluate()
            return None
        # Before the last id nobody wants logits, whose computing is then left out.
        before = ids[:-1] if last else ids
        if before:
            self._forward(_ids(before), len(before), prompt=True)
            self._tell(before)
            self._evaluate()
        if not last:
            return None
        logits = self._forward(_ids(ids[-1:]), 1, prompt=True)
        self._tell(ids[-1:])
        return logits

    def size(self, rows: int) -> int:
        """As in `Forward`: any count runs as it is."""
        return rows

    def rows(self, tokens: mx.array, parents: Path | None = None, last: mx.array | None = None) -> mx.array:
        """As in `Forward`."""
        assert self._sequence is not None, "begin() comes first"
        assert last is None, "this lane does not pipeline"
        count = tokens.size
        assert branching(parents, count) is None, self.why_narrow
        self._take_back()
        self._open, self._tokens, self._before = Started(self._sequence.length, count, None), tokens, []
        if count > 1 and self._layout.replays and self.width > 1:
            self._before = [(cache, snapshot(cache)) for cache in self._caches if not _holds_rows(cache)]
        logits = self._forward(tokens, count, prompt=False)
        if self.follower is not None and self.tap is not None:
            self.follower.rows(self.tap.states(), count, behind=False)
        return logits

    def keep(self, path: Path) -> None:
        """As in `Forward`."""
        done, sequence = self._open, self._sequence
        assert done is not None, "rows come first"
        assert sequence is not None, "begin() comes first"
        done.unmoved(path)
        assert self.width >= done.count or len(path) == done.count, self.why_narrow
        if self.follower is not None:
            self.follower.keep(path)
        copies = sequence.truncate(done.start + len(path))
        if copies:
            self.settle()
            for pool in self.pools:
                pool.copy(copies)
        if self._before and len(path) < done.count:
            self._again(len(path), done.count)
        self._open, self._tokens, self._before = None, None, []

    def trace(self) -> None:
        """As in `Forward`: nothing here is compiled ahead."""

    def settle(self) -> None:
        """As in `Forward`."""
        self._evaluate()
        settle()

    def end(self) -> None:
        """As in `Forward`."""
        self._sequence = self._table = self._open = self._tokens = None
        self._caches, self._before = [], []

    def _forward(self, tokens: mx.array, count: int, *, prompt: bool) -> mx.array:
        """Build a forward of *tokens*, of which the first *count* are rows of the sequence: logits [R, V]."""
        assert self._sequence is not None, "begin() comes first"
        assert self._table is not None
        if self.pools:
            settle()
        self._take_back()
        self._table.refresh()
        logits: mx.array = self._model(tokens[None], cache=self._caches)[0]
        self._sequence.append(count, prompt=prompt)
        self._rows = self._sequence.length + tokens.shape[0] - count
        return logits

    def _tell(self, ids: Ids[int]) -> None:
        """Show the states of prompt rows, computed: their graph would hold the caches."""
        if self.follower is not None and self.tap is not None:
            states = self.tap.states()
            mx.eval(states)
            self.follower.read(ids, states)

    def _again(self, kept: int, count: int) -> None:
        """Put the caches back to before the latest *count* rows, and compute the first *kept* of these again."""
        assert self._table is not None
        assert self._tokens is not None
        for cache in self._caches:
            if _holds_rows(cache):
                cache.trim(count)
        for cache, state in self._before:
            cache.state = state
        if self.pools:
            settle()
        self._table.refresh()
        self._model(self._tokens[None, :kept], cache=self._caches)
        self._rows -= count - kept
        if self.pools:
            # Views that the forward took must be gone before the next one writes.
            self._evaluate()

    def _take_back(self) -> None:
        """Bring the caches back to where the sequence ends."""
        assert self._sequence is not None
        back = self._rows - self._sequence.length
        if back:
            assert all(cache.is_trimmable() for cache in self._caches), "a recurrent state cannot go back"
            for cache in self._caches:
                cache.trim(back)
            self._rows -= back

    def _evaluate(self) -> None:
        others = [cache.state for cache in self._caches if not isinstance(cache, PagedCache)]
        mx.eval([pool.arrays for pool in self.pools], others)


def _ids(ids: Ids[int]) -> mx.array:
    return mx.array(list(ids), dtype=mx.uint32)
