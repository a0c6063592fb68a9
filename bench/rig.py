"""One model with its lanes over one pool of random rows, and the clocks that the decode bench reads.

Nothing is prefilled: a context of N positions is N rows of random numbers that lie in the pool already, and as
many in the caches handed to mlx-lm. Every loop is the product's (`SerialEngine`) or mlx-lm's (`generate_step`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import models
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from worker.engine.build import distance, prefill_rows
from worker.engine.dense_in_place import DenseInPlace
from worker.engine.engine import Cancelled, EngineRequest, unheard
from worker.engine.forward import MAX_ROWS, Forward, rows_needed
from worker.engine.load import LoadedModel
from worker.engine.packed import Packed, pack
from worker.engine.probe import graph_nodes
from worker.engine.sample import Sampling
from worker.engine.serial import SerialEngine
from worker.engine.verify_bank import Switches
from worker.kv.pages import Pages, pages_for
from worker.kv.pool import Pool
from worker.kv.pool import Shape as PoolShape
from worker.kv.prefix import Opened, PrefixIndex

# Tokens after whose first few the pipeline is full.
SKIP = 5
CACHE_STEP = 256
# Greedy; without a penalty random weights would draw the same id again and again, and any fault would go unseen.
VARIED = Sampling(seed=0, frequency_penalty=100.0, penalty_window=20)


@dataclass
class Times:
    """Milliseconds of interleaved rounds."""

    rounds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Their median."""
        return statistics.median(self.rounds)

    @property
    def least(self) -> float:
        """Their minimum."""
        return min(self.rounds)


def interleaved(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, Times]:
    """The times of all *runs*, each round running every one of them once."""
    found = {name: Times() for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            found[name].rounds.append(run())
    return found


class Placed:
    """A lane whose prompts lie in the pool already: reading one computes the row of its last id only."""

    def __init__(self, lane: Forward) -> None:
        self.row_invariant = lane.row_invariant
        self.prefill_rows = lane.prefill_rows
        self.capacity = lane.capacity
        self.one_ahead = lane.one_ahead
        self.prefix_reuse = lane.prefix_reuse
        self.why = lane.why
        self.width = lane.width
        self.trees = lane.trees
        self.why_narrow = lane.why_narrow
        self.rows, self.keep, self.settle = lane.rows, lane.keep, lane.settle
        self.end, self.trace = lane.end, lane.trace
        self._lane = lane
        self._opened: Opened | None = None

    def begin(self, opened: Opened) -> None:
        """As in `Forward`."""
        self._opened = opened
        self._lane.begin(replace(opened, cached=len(opened.ids) - 1))

    def read(self, ids: Sequence[int], last: bool) -> mx.array | None:
        """As in `Forward`, but for the rows, which are there."""
        assert self._opened is not None, "begin comes first"
        self._opened.sequence.append(len(ids) - last, prompt=True)
        return self.rows(mx.array(ids[-1:], dtype=mx.uint32)) if last else None


@dataclass(frozen=True)
class Rig:
    """A model, packed, and its lanes. kernels: with our products; products: with MLX's own."""

    shape: models.Shape
    loaded: LoadedModel
    packed: Packed
    pool: Pool
    pages: Pages
    kernels: DenseInPlace
    products: DenseInPlace

    @property
    def model(self) -> Any:
        """mlx-lm's module; its weights are views of the packed ones."""
        return self.loaded.model

    def engine(self, lane: DenseInPlace, *, placed: bool = True, kept: bool = False) -> SerialEngine:
        """The serial engine over *lane*, whose prompts are there already if *placed*; *kept*: rows are reused."""
        limit = self.pool.nbytes if kept else 0
        index = PrefixIndex(
            self.pages, page_bytes=self.pool.shape.page_bytes, limit_bytes=limit, align=lane.prefill_rows
        )
        return SerialEngine(self.loaded, Placed(lane) if placed else lane, index)

    def error(self, lane: DenseInPlace) -> float:
        """How far its logits are from the module's, as a share of the largest."""
        return distance(self.loaded, lane, self.pages)

    @contextmanager
    def sequence(self, context: int, more: int) -> Iterator[list[int]]:
        """The block table of a sequence of *context* rows with room for *more*, as meta after its length."""
        sequence = self.pages.reserve(context + more)
        sequence.append(context, prompt=True)
        table = sequence.table
        width = max(8, 1 + self.pool.pages)
        yield [*table, *[table[-1]] * (width - 1 - len(table))]
        sequence.release()


def rig_of(shape: models.Shape, model: Any, positions: int) -> Rig:
    """Pack *model* and give it a pool of random rows in which *positions* have room."""
    packed = pack(model)
    heads = packed.heads
    prompt_rows = prefill_rows("cuda", model)
    rows = rows_needed(positions, prompt_rows) + prompt_rows
    pool = Pool(PoolShape(len(packed.layers), heads.kv_heads, heads.dim, packed.dtype), pages_for(rows))
    for layer, array in enumerate(pool.arrays):
        size = array.shape
        del array
        pool.arrays[layer] = mx.random.normal(size).astype(packed.dtype)
        mx.eval(pool.arrays[layer])
    mx.clear_cache()
    lanes = [
        DenseInPlace(packed, pool, prefill_rows=prompt_rows, switches=Switches(matvec=ours))
        for ours in (True, False)
    ]
    return Rig(shape, models.loaded(shape, model), packed, pool, Pages(pool.pages), *lanes)


def decode(engine: SerialEngine, context: int, sampling: Sampling, tokens: int) -> float:
    """Milliseconds a token of our engine at *context*."""
    # One more than is read: the engine is one step ahead at every stamp.
    request = EngineRequest(prompt=(5,) * context, sampling=sampling, max_tokens=tokens + 2, cache=False)
    engine.start(request, unheard)
    stamps = []
    for _ in range(tokens):
        engine.step()
        stamps.append(time.perf_counter())
    engine.stop()
    return (stamps[-1] - stamps[SKIP]) / (tokens - 1 - SKIP) * 1e3


def caches(model: Any, context: int, dtype: mx.Dtype = mx.bfloat16) -> list[Any]:
    """mlx-lm's caches with *context* random rows."""
    held = make_prompt_cache(model)
    config = model.args
    dim = config.head_dim or config.hidden_size // config.num_attention_heads
    size = (1, config.num_key_value_heads, max(CACHE_STEP, -(-context // CACHE_STEP) * CACHE_STEP), dim)
    for cache in held:
        cache.keys, cache.values = (mx.random.normal(size).astype(dtype) for _ in range(2))
        cache.offset = context
        mx.eval(cache.keys, cache.values)
    return held


def decode_mlx(model: Any, context: int, tokens: int, dtype: mx.Dtype = mx.bfloat16) -> float:
    """Milliseconds a token of mlx-lm's generate_step at *context*."""
    held = caches(model, context - 1, dtype)
    steps = generate_step(mx.array([5]), model, max_tokens=tokens, prompt_cache=held)
    stamps = [time.perf_counter() for _ in steps]
    return (stamps[-1] - stamps[SKIP]) / (tokens - 1 - SKIP) * 1e3


def first_token(engine: SerialEngine, prompt: tuple[int, ...]) -> float:
    """Milliseconds from the request to its first token, nothing reused."""
    began = time.perf_counter()
    engine.start(EngineRequest(prompt=prompt, sampling=Sampling(seed=0), max_tokens=2, cache=False), unheard)
    engine.step()
    took = time.perf_counter() - began
    engine.stop()
    return took * 1e3


def ids(engine: SerialEngine, request: EngineRequest) -> list[int]:
    """The ids of the whole answer."""
    engine.start(request, unheard)
    found = [engine.step().token for _ in range(request.max_tokens)]
    engine.stop()
    return found


def resumed(engine: SerialEngine, prompt: Sequence[int], cuts: Sequence[int], tokens: int) -> tuple[int, int]:
    """Ids of greedy attempts that go on behind *cuts* of the *tokens* ids of a whole one: right ones, and all."""
    request = EngineRequest(prompt=tuple(prompt), sampling=VARIED, max_tokens=tokens, cache=False)
    whole = ids(engine, request)
    right = 0
    for cut in cuts:
        rest = ids(engine, replace(request, drawn=tuple(whole[:cut]), max_tokens=tokens - cut))
        right += sum(one == other for one, other in zip(rest, whole[cut:], strict=True))
    return right, sum(tokens - cut for cut in cuts)


def cancelled(engine: SerialEngine, prompt: Sequence[int], tokens: int) -> int:
    """Greedy ids that stay the same behind a job that was cancelled after the prompt's last forward."""
    request = EngineRequest(prompt=tuple(prompt), sampling=VARIED, max_tokens=tokens)
    want = ids(engine, replace(request, cache=False))

    def cancel(done: int, total: int) -> None:
        if done == total:
            raise Cancelled

    with suppress(Cancelled):
        engine.start(request, cancel)
    engine.stop()
    got = ids(engine, request)
    engine.index.clear()
    return sum(one == other for one, other in zip(got, want, strict=True))


def first_token_mlx(model: Any, prompt: tuple[int, ...]) -> float:
    """The same of mlx-lm's generate_step."""
    began = time.perf_counter()
    next(generate_step(mx.array(prompt), model, max_tokens=2))
    took = time.perf_counter() - began
    mx.synchronize()
    return took * 1e3


def verify(rig: Rig, lane: DenseInPlace, meta: mx.array, rows: int, calls: int) -> float:
    """Milliseconds of a forward of *rows* rows, each fed by the tokens of the one before, nothing read between."""

    def step(tokens: mx.array) -> mx.array:
        logits, _, rig.pool.arrays, _ = lane.bank.run(tokens, meta, rig.pool.arrays)
        return mx.argmax(logits, axis=-1).astype(mx.uint32)

    tokens = step(mx.zeros((rows,), dtype=mx.uint32))
    mx.eval(tokens)
    began = time.perf_counter()
    for _ in range(calls):
        ahead = step(tokens)
        mx.async_eval(ahead)
        mx.eval(tokens)
        tokens = ahead
    mx.eval(tokens)
    return (time.perf_counter() - began) / calls * 1e3


def rows_table(
    rig: Rig, lane: DenseInPlace, context: int, counts: Sequence[int], *, calls: int, rounds: int
) -> dict[int, Times]:
    """The times of forwards of each of *counts* rows at *context*."""
    with rig.sequence(context, MAX_ROWS) as table:
        meta = mx.array([context, *table], dtype=mx.int32)
        mx.eval(meta)
        for rows in counts:
            verify(rig, lane, meta, rows, 2)
        runs = {str(rows): lambda rows=rows: verify(rig, lane, meta, rows, calls) for rows in counts}
        found = interleaved(runs, rounds)
    return {rows: found[str(rows)] for rows in counts}


def differing(rig: Rig, lane: DenseInPlace, context: int) -> int:
    """Logits of sixteen rows whose bits differ when the rows are computed by forwards of 1, 2, 4 and 8."""
    tokens = mx.arange(1, MAX_ROWS + 1, dtype=mx.uint32)
    counts, wrong = (MAX_ROWS, 1, 2, 4, 8), 0
    with rig.sequence(context, MAX_ROWS) as table:
        whole = None
        for count in counts:
            parts = []
            for start in range(0, MAX_ROWS, count):
                meta = mx.array([context + start, *table], dtype=mx.int32)
                logits, _, rig.pool.arrays, _ = lane.bank.run(tokens[start : start + count], meta, rig.pool.arrays)
                mx.eval(logits)
                parts.append(logits)
            got = mx.concatenate(parts).view(mx.uint16)
            whole = got if whole is None else whole
            wrong += int((got != whole).sum().item())
    return wrong


def step_nodes(rig: Rig) -> tuple[int, int]:
    """Graph nodes of a greedy step: ours, mlx-lm's."""
    engine = rig.engine(rig.kernels)
    engine.start(EngineRequest(prompt=(5,) * 64, sampling=Sampling(seed=0), max_tokens=3, cache=False), unheard)
    found = _heard(engine)
    engine.stop()
    model = rig.model
    logits = model(mx.array([[5]]), cache=caches(model, 64))[:, -1]
    token = mx.argmax(logits - mx.logsumexp(logits, keepdims=True), axis=-1)
    return found, graph_nodes(token)


def _heard(engine: SerialEngine) -> int:
    """Nodes of the step that the engine starts next: what it hands to MLX is counted before it is computed."""
    real, counts = mx.async_eval, []

    def counting(*outputs: Any) -> None:
        counts.append(graph_nodes(*[one for one in outputs if isinstance(one, mx.array)]))
        real(*outputs)

    mx.async_eval = counting
    try:
        engine.step()
    finally:
        mx.async_eval = real
    return counts[-1]


def peak(run: Callable[[], object]) -> int:
    """Bytes that MLX held at most while *run* ran."""
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    run()
    mx.synchronize()
    return int(mx.get_peak_memory())
